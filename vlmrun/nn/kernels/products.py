"""Products of float32 rows with stored weights, by compiled blocks.

Every number of the result is the sum that one thread makes over the whole of K, so the bits
depend on the shapes alone: neither on the number of threads nor on where a weight lies.
"""

from typing import Any

import numba
import torch
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import njit, prange
from torch import Tensor

from vlmrun.nn.kernels.blocks import (
    FAST,
    block_1x1,
    block_3x4,
    block_4x2,
    block_4x4,
    block_4x6,
)

PANEL = 48  # rows of the input that are kept in a core's cache while the weight passes


WIDE = bool(get_host_cpu_features().get("avx512f"))  # 32 registers instead of 16
BITS = {
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.float32: torch.float32,
    torch.int8: torch.int8,
}


def product(x: Tensor, weight: Tensor, *, wide: bool = WIDE) -> Tensor:
    """Compute x @ weight.T: [M, K] float32 by [N, K] as stored, both on the CPU, gives [M, N]
    float32. `wide`: for a CPU with AVX-512."""
    rows, columns = x.shape[0], weight.shape[0]
    if columns < 4:
        size, loop = 1, rows_of_1
    else:
        size, loop = loop_of(rows, wide=wide)
    filled = x.new_zeros(max(rows, size), x.shape[1]) if rows < size else x.contiguous()
    if rows < size:
        filled[:rows] = x
    out = torch.empty(filled.shape[0], columns)
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(torch.get_num_threads(), most))
    stored = weight.contiguous().view(BITS[weight.dtype])
    loop(filled.numpy(), stored.numpy(), out.numpy())
    return out[:rows]


def loop_of(rows: int, *, wide: bool) -> tuple[int, Any]:
    """The loop for so many rows of the input, and how many it takes at least: measured with
    shapes of SigLIP and Qwen2 on Zen 5, as it is and held to AVX2."""
    if rows < 3:
        return rows, rows_of_1 if rows == 1 else rows_of_2
    if not wide:
        return 4, rows_of_4_narrow
    return (4, rows_of_4) if rows < 5 else (6, rows_of_6)


@njit(parallel=True, fastmath=FAST, cache=True)
def rows_of_1(x: Any, w: Any, out: Any) -> None:
    for m in range(x.shape[0]):
        for n in prange(w.shape[0]):
            block_1x1(x, w, out, m, n)


@njit(parallel=True, fastmath=FAST, cache=True)
def rows_of_2(x: Any, w: Any, out: Any) -> None:
    for at in prange((w.shape[0] + 3) // 4):
        for m in range(0, x.shape[0], 2):
            block_4x2(x, w, out, min(m, x.shape[0] - 2), min(4 * at, w.shape[0] - 4))


@njit(parallel=True, fastmath=FAST, cache=True)
def rows_of_4_narrow(x: Any, w: Any, out: Any) -> None:
    for start in range(0, x.shape[0], PANEL):
        stop = min(start + PANEL, x.shape[0])
        for at in prange((w.shape[0] + 2) // 3):
            for m in range(start, stop, 4):
                block_3x4(x, w, out, min(m, x.shape[0] - 4), min(3 * at, w.shape[0] - 3))


@njit(parallel=True, fastmath=FAST, cache=True)
def rows_of_4(x: Any, w: Any, out: Any) -> None:
    for at in prange((w.shape[0] + 3) // 4):
        for m in range(0, x.shape[0], 4):
            block_4x4(x, w, out, min(m, x.shape[0] - 4), min(4 * at, w.shape[0] - 4))


@njit(parallel=True, fastmath=FAST, cache=True)
def rows_of_6(x: Any, w: Any, out: Any) -> None:
    for start in range(0, x.shape[0], PANEL):
        stop = min(start + PANEL, x.shape[0])
        for at in prange((w.shape[0] + 3) // 4):
            for m in range(start, stop, 6):
                block_4x6(x, w, out, min(m, x.shape[0] - 6), min(4 * at, w.shape[0] - 4))
