"""The call of a decoder block: its tensors' addresses, told to the compiled code."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numba
import torch
from torch import Tensor

from vlmrun.nn.kernels import decoder as told
from vlmrun.nn.kernels.claims import kept, launch
from vlmrun.nn.kernels.products import bits, threads_now

EVERYTHING = 1 << 62  # positions that are looked back on where there is no window


class BlockCall:
    """One new token of every row through a block of a decoder.

    linears: q, k, v, o, gate, up and down, each with weight [N, K], N a multiple of 4, bias and
    scale; norms: before attention, after it or None, before the gate, after it or None. All are
    read anew at every call, wherever they lie in memory then.
    """

    def __init__(
        self,
        linears: Sequence[Any],
        norms: Sequence[Any],
        *,
        gelu: bool,
        eps: float,
        offset: float,
        scaling: float,
        cap: float,
        window: int | None,
    ) -> None:
        self._linears = linears
        self._norms = [None if norm is None else norm._parameters for norm in norms]
        self._parameters = [linear._parameters for linear in linears]
        self._gelu = int(gelu)
        self._window = EVERYTHING if window is None else window
        self._factors = torch.tensor([eps, offset, scaling, cap])
        self._numbers = torch.zeros(told.NUMBERS + told.CELLS, dtype=torch.int64)
        self._told = self._numbers.numpy()

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        starts: Tensor,
        length: int,
    ) -> Tensor:
        """See `nn.decoder.Call`. Writes the new position's keys and values."""
        rows, width = x.shape
        _, groups, capacity, head = keys.shape
        threads = threads_now()
        weights = [own["weight"] for own in self._parameters]
        inner, shared, mlp = (weights[i].shape[0] for i in (0, 1, 4))
        shares = parts(inner // (groups * head), rows * groups, threads)
        out, scratch = torch.empty_like(x), x.new_empty(2 * rows * (inner + shared + mlp + width))
        job = [rows, width, head, groups, capacity, length, self._window, shares, self._gelu]
        job.append(threads)
        for each in (x, out, cos, sin, keys, values, starts, scratch, self._factors):
            job.append(each.data_ptr())
        job += [0 if own is None else own["weight"].data_ptr() for own in self._norms]
        for linear, own in zip(self._linears, self._parameters, strict=True):
            weight, bias, scale = own["weight"], own.get("bias"), linear.scale
            job += [weight.shape[0], weight.data_ptr()]
            job.append(0 if scale is None else scale.data_ptr())
            job.append(0 if bias is None else bias.data_ptr())
        self._told[: told.NUMBERS] = job
        self._told[told.NUMBERS :] = 0
        vector = self._norms[0]["weight"].dtype  # type: ignore[index]
        address = address_of(weights[0].dtype, vector, keys.dtype, rows > 1)
        numba.set_num_threads(threads)
        launch(threads, address, self._numbers.data_ptr())
        return out


@cache
def address_of(matrix: torch.dtype, vector: torch.dtype, cached: torch.dtype, several: bool) -> int:
    """Where the code for weights, norms, and keys and values of these dtypes lies, compiled or
    read from the cache, for one row or for several."""
    kinds = bits(matrix), bits(vector), bits(cached)
    return kept(lambda keep: told.entry(*kinds, several, keep=keep))


@cache
def parts(heads: int, groups: int, threads: int) -> int:
    """In how many parts the query heads of a group are attended to, so that every thread has
    some: as few as that takes, as each reads all keys."""
    fair = [count for count in range(1, heads + 1) if heads % count == 0]
    return next((count for count in fair if count * groups >= threads), heads)
