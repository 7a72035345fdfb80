"""Which kernel multiplies fastest on this machine, by the number of rows: `vlmrun doctor --tune`.

Kernels take turns, so that what else the machine does meets all of them, and the fastest try of
each counts. To displace the packaged choice, one must be faster by more than a margin, and seconds
later once more, so that noise alone does not.
"""

import json
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle, pairwise
from pathlib import Path

import torch
from torch import Tensor

from vlmrun.errors import OutputError, VlmrunError
from vlmrun.memory.products import Cpu, Kernel, Kernels, Row, Table, entry_of
from vlmrun.memory.workload import resolve_compute_dtype
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.checkpoints.reading import torch_dtype
from vlmrun.nn.kernels import Product, find_product
from vlmrun.nn.linear import Kernel as Multiply
from vlmrun.nn.linear import loops, native, tiled

MARGIN = 1.05  # times as fast as the packaged choice, at least
SECONDS = 60.0  # of it all, with the time to compile the loops
PASSES = 2  # over all numbers of rows
LEAST_TURNS, MOST_TURNS = 2, 12
FLOATS = (Dtype.float32, Dtype.bfloat16, Dtype.float16)
STORED = (Dtype.bfloat16, Dtype.float16, Dtype.int8, Dtype.float32)

Shapes = tuple[tuple[int, int], ...]  # [N, K] of the matrices of a block
DECODER: Shapes = (  # Qwen2-0.5B: q and o, k and v, gate and up, down
    *((896, 896), (896, 896), (128, 896), (128, 896)),
    *((4864, 896), (4864, 896), (896, 4864)),
)
TOWER: Shapes = (*4 * ((1152, 1152),), (4304, 1152), (1152, 4304))  # SigLIP so400m
# few rows are new tokens of a batch, many are patches of pictures
BLOCKS: tuple[tuple[Shapes, tuple[int, ...]], ...] = (
    (DECODER, (1, 2, 4, 8, 16, 32, 64)),
    (TOWER, (192, 729)),
)

Pair = tuple[Dtype, Dtype]  # weights are stored so, rows are computed so


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that every kernel takes for the products of one block with so many rows."""

    pair: Pair
    rows: int
    seconds: Mapping[Kernel, float]

    def __str__(self) -> str:
        stored, compute = self.pair
        each = ", ".join(f"{name} {1000 * took:.3g} ms" for name, took in self.seconds.items())
        return f"{stored} in {compute}, {self.rows} rows: {each}"


def pairs_to_time(features: frozenset[str] | None = None) -> list[Pair]:
    """All there are, first those that this CPU (`features` = None) computes in unasked. Without
    float32 in float32, which PyTorch multiplies to the bits that stock models have."""
    own = [resolve_compute_dtype(None, each, "cpu", features)[0] for each in FLOATS]
    order = dict.fromkeys([*own, *FLOATS])
    pairs = [(stored, compute) for compute in order for stored in STORED]
    return [pair for pair in pairs if pair != (Dtype.float32, Dtype.float32)]


def count_timings(pairs: Sequence[Pair]) -> int:
    return len(pairs) * PASSES * sum(len(counts) for _, counts in BLOCKS)


def time_kernels(
    pairs: Sequence[Pair], *, threads: int, buffer_bytes: int, seconds: float = SECONDS
) -> Iterator[Timing]:
    """Time one pair after the other, each with every number of rows, in every pass, until the
    time is up. `buffer_bytes` of weights are more than the caches hold.

    Raises:
        VlmrunError: there are no compiled loops, and so no choice.
    """
    torch.set_num_threads(threads)
    deadline = time.monotonic() + seconds
    product, why = find_product()
    if product is None:
        raise VlmrunError(
            f"there is nothing to choose from: {why}", "run without --tune: PyTorch serves"
        )
    for timing in time_pairs(pairs, product, deadline, buffer_bytes):
        yield timing
        if time.monotonic() > deadline:
            return


@torch.inference_mode()
def time_pairs(
    pairs: Sequence[Pair], product: Product, deadline: float, buffer_bytes: int
) -> Iterator[Timing]:
    """All timings; pairs share the time until a deadline, which some may overrun."""
    for done, (stored, compute) in enumerate(pairs):
        # PyTorch has its own product where nothing is to be converted
        other: dict[Kernel, Multiply]
        other = {"native": native} if stored == compute else {"tiles": tiled}
        kernels: dict[Kernel, Multiply] = {"loops": loops(product), **other}
        share = (deadline - time.monotonic()) / (len(pairs) - done)
        for rows, took in time_pair(stored, compute, kernels, share, buffer_bytes):
            yield Timing((stored, compute), rows, took)


def time_pair(
    stored: Dtype,
    compute: Dtype,
    kernels: Mapping[Kernel, Multiply],
    seconds: float,
    buffer_bytes: int,
) -> Iterator[tuple[int, dict[Kernel, float]]]:
    """Numbers of rows, and what every kernel takes with them."""
    deadline, left = time.monotonic() + seconds, count_timings([(stored, compute)])
    for shapes, counts in PASSES * BLOCKS:
        copies = cycle(copies_of(shapes, torch_dtype(stored), buffer_bytes))
        scales = [torch.rand(n) if stored is Dtype.int8 else None for n, _ in shapes]
        for rows in counts:
            inputs = [torch.rand(rows, k).to(torch_dtype(compute)) for _, k in shapes]
            share = (deadline - time.monotonic()) / left
            yield rows, take_turns(kernels, inputs, copies, scales, share)
            left -= 1


def copies_of(shapes: Shapes, dtype: torch.dtype, nbytes: int) -> list[list[Tensor]]:
    """The matrices [N, K] of a block so many times that no cache holds them from one use to the
    next, as those of a model."""
    sizes = [n * k for n, k in shapes]
    one = torch.randint(-127, 128, (sum(sizes),), dtype=torch.int8).to(dtype)
    count = max(1, nbytes // one.nbytes)
    copies = one.repeat(count).view(count, -1)
    return [
        [flat.view(shape) for flat, shape in zip(copy.split(sizes), shapes, strict=True)]
        for copy in copies
    ]


def take_turns(
    kernels: Mapping[Kernel, Multiply],
    inputs: Sequence[Tensor],
    copies: Iterator[Sequence[Tensor]],
    scales: Sequence[Tensor | None],
    seconds: float,
) -> dict[Kernel, float]:
    """The sum over a block's products of the fastest time of each. A first turn, in which
    kernels are compiled, does not count."""
    for multiply in kernels.values():
        time_block(multiply, inputs, next(copies), scales)
    best = {name: [math.inf] * len(inputs) for name in kernels}
    start = time.monotonic()
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and time.monotonic() - start > seconds:
            break
        for name, multiply in kernels.items():
            taken = time_block(multiply, inputs, next(copies), scales)
            best[name] = list(map(min, best[name], taken))
    return {name: sum(each) for name, each in best.items()}


def time_block(
    multiply: Multiply,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    scales: Sequence[Tensor | None],
) -> list[float]:
    times = [time.perf_counter()]
    for x, weight, scale in zip(inputs, weights, scales, strict=True):
        multiply(x, weight, scale, None, "")
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def choose_kernels(
    passes: Mapping[int, Sequence[Mapping[Kernel, float]]], packaged: Kernels
) -> Kernels:
    """For every number of rows the packaged kernel, or one that was faster in all passes by more
    than the margin. What was measured holds for fewer rows as well, down to the next lower
    number, and the highest number for all above."""
    chosen: list[tuple[int | None, Kernel]] = []
    for rows, times in sorted(passes.items()):
        default = next(name for most, name in packaged if most is None or rows <= most)
        kernel = choose_kernel(times, default)
        if chosen and chosen[-1][1] == kernel:
            chosen.pop()
        chosen.append((rows, kernel))
    return (*chosen[:-1], (None, chosen[-1][1]))


def choose_kernel(times: Sequence[Mapping[Kernel, float]], default: Kernel) -> Kernel:
    """The kernel for one number of rows, of which there are seconds in several passes."""

    def displaces(kernel: Kernel) -> bool:
        return all(each[kernel] * MARGIN < each.get(default, math.inf) for each in times)

    faster = [kernel for kernel in times[0] if displaces(kernel)]
    return min(faster, key=lambda kernel: sum(each[kernel] for each in times), default=default)


def tuned_text(timings: Sequence[Timing], packaged: Table, cpu: Cpu, threads: int) -> str:
    """A table as its file holds it: a row for every pair for which other kernels than the
    packaged ones were chosen, of those that were timed in full, then the packaged rows.

    Raises:
        VlmrunError: no pair was.
    """
    found: dict[Pair, dict[int, list[Mapping[Kernel, float]]]]
    found = defaultdict(lambda: defaultdict(list))
    for timing in timings:
        found[timing.pair][timing.rows].append(timing.seconds)
    features = frozenset(cpu.features)
    chosen = {
        pair: choose_kernels(passes, packaged.kernels(*pair, features))
        for pair, passes in found.items()
        if sum(map(len, passes.values())) == count_timings([pair])
    }
    if not chosen:
        raise VlmrunError(
            f"{len(timings)} measurements in {SECONDS:.0f} s are too few to choose by",
            "tune again when other programs have ended",
        )
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    by = f"{threads} thread" + "s" * (threads != 1)
    names = ", ".join(f"{stored} in {compute}" for stored, compute in chosen)
    rows = [
        Row(frozenset(), *pair, kernels)
        for pair, kernels in chosen.items()
        if kernels != packaged.kernels(*pair, features)
    ]
    fields = {
        "measured": f"vlmrun doctor --tune, {when}, {cpu.name}, {by}: {names}",
        "machine": {"cpu": cpu.name, "features": cpu.features},
        "rows": [entry_of(row) for row in (*rows, *packaged.rows)],
    }
    return json.dumps(fields, indent=2) + "\n"


def check_writable(path: Path) -> None:
    """Find out before anything is measured for it.

    Raises:
        OutputError: nothing can be written there.
    """
    with errors_told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


def write_table(path: Path, text: str) -> None:
    """Put a table in the place of the one there, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    with errors_told(path):
        descriptor, made = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as stream:
                stream.write(text)
            os.replace(made, path)
        except BaseException:
            os.unlink(made)
            raise


@contextmanager
def errors_told(path: Path) -> Iterator[None]:
    hint = "set XDG_CACHE_HOME to a folder that can be written"
    if not path.is_absolute():  # there is no home directory
        raise OutputError(f"{path} is where nobody would look for it", hint)
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}", hint) from error
