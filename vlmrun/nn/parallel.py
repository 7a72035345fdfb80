"""Layers and messages of several processes that share one model (tensor parallel).

Not DTensor: its parallel styles accept stock layers only.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, distributed

from vlmrun.errors import ImageError, ProcessLost
from vlmrun.nn.linear import CastLinear, Gate, linear

PATIENCE = timedelta(minutes=30)  # a process may read weights from a slow disk for long


class RowParallelLinear(CastLinear):
    """A linear layer of which every process has some columns of the weight, and the features
    of the input that these meet. One all-reduce adds the parts up; the bias is added after.
    """

    def forward(self, x: Tensor, gate: Gate = "") -> Tensor:
        """x: [..., K / processes]; gives [..., N], the same in every process."""
        assert not gate, "it would come before the sum"
        part = linear(x, self.weight, scale=self.scale, kernels=self.kernels)
        part = part.float()  # halves would be rounded once per process
        with others_needed():
            distributed.all_reduce(part)
        whole = part.to(x.dtype)
        return whole if self.bias is None else whole + self.bias.to(x.dtype)


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Meet the other processes that torchrun started, and part in the end; where they have met
    before, stay with them.

    Raises:
        ProcessLost: one of them does not come.
    """
    if distributed.is_initialized():
        yield
        return
    # transformers imports it: after the meeting it keeps hold of the group, whose threads then
    # outlive the interpreter and abort the process (torch 2.13)
    import torch._dynamo

    if device != "cpu":
        torch.cuda.set_device(device)
    with others_needed():
        distributed.init_process_group("gloo" if device == "cpu" else "nccl", timeout=PATIENCE)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def others_needed() -> Iterator[None]:
    """Around what all processes do together.

    Raises:
        ProcessLost: one of them has ended, or does not answer in time.
    """
    try:
        yield
    except RuntimeError as error:  # gloo's and NCCL's
        reason = re.sub(r"^\[[^]]*\] *", "", str(error)).partition(". ")[0]
        raise ProcessLost(
            f"lost another process of --tp: {reason}",
            "what it said, or torchrun's report, tells why",
        ) from error


def from_first(values: Tensor) -> Tensor:
    """The values of the first process, in all of them; as they are where there is only one."""
    if not distributed.is_initialized():
        return values
    sent = values.cuda() if distributed.get_backend() == "nccl" else values.clone()
    with others_needed():
        distributed.broadcast(sent, src=0)
    return sent.to(values.device)


def least_number(number: int) -> int:
    """The least of the processes' whole numbers."""
    if not distributed.is_initialized():
        return number
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    found = torch.tensor(number, device=device)
    with others_needed():
        distributed.all_reduce(found, distributed.ReduceOp.MIN)
    return int(found)


def true_of_any(flag: bool) -> bool:
    """Whether it is true in one of the processes."""
    return not least_number(not flag)


def check_same(read: list[str]) -> None:
    """Hold what this process read of a batch's files to what the first one did.

    Raises:
        ImageError: they differ; the processes would wait for each other for ever.
    """
    if not distributed.is_initialized():
        return
    found: list[list[str] | None] = [None] * distributed.get_world_size()
    with others_needed():
        distributed.all_gather_object(found, read)
    if any(other != found[0] for other in found):
        raise ImageError(
            "the processes of --tp read different pictures; change no file while a job runs"
        )
