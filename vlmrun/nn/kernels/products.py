"""Products of float32 rows with stored weights, by compiled blocks.

Every number of the result is the sum that one thread makes over the whole of K, so the bits
depend on the shapes alone: neither on the number of threads nor on where a weight lies.
"""

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import cfunc, types
from numba.extending import overload
from torch import Tensor

from vlmrun.nn.kernels.blocks import (
    FAST,
    block_1x1,
    block_1x2,
    block_1x4,
    block_3x4,
    block_4x2,
    block_4x4,
    block_4x6,
    inner,
)
from vlmrun.nn.kernels.claims import LINE, claim, kept, launch, placed, source_digest, task_size
from vlmrun.nn.kernels.elementwise import gelu_share, logistic, plus, times

PANEL = 48  # rows of the input that are kept in a core's cache while the weight passes
SHORT = 2048  # numbers in a row of a weight: up to which few rows of the input take them singly
FEW = 8

# what a call is told, by place: sizes and addresses; 0 for no scale, bias or gate
ROWS, COLUMNS, DEPTH, THREADS, X, WEIGHT, RESULT, SCALE, BIAS, GATE, NUMBERS = range(11)
GATES = {"": 0, "gelu_tanh": 1, "quick_gelu": 2}
BITS = {
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.float32: torch.float32,
    torch.int8: torch.int8,
}
Block = tuple[int, int]  # rows of the weight, rows of the input
BLOCKS: dict[Block, Any] = {
    (1, 1): block_1x1,
    (1, 2): block_1x2,
    (1, 4): block_1x4,
    (3, 4): block_3x4,
    (4, 2): block_4x2,
    (4, 4): block_4x4,
    (4, 6): block_4x6,
}


def has_wide_registers() -> bool:
    """Whether code is made for AVX-512, with 32 registers instead of 16."""
    named: str | None = numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    found = get_host_cpu_features().flatten() if named is None else named
    return "+avx512f" in found.split(",")


WIDE = has_wide_registers()


def product(
    x: Tensor,
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    gate: str = "",
    wide: bool = WIDE,
) -> Tensor:
    """Compute gate((x @ weight.T) * scale + bias): [M, K] float32 by [N, K] as stored, both on the
    CPU, gives [M, N] float32. scale, bias: [N] float32; gate: one of GATES. `wide`: for a CPU with
    AVX-512."""
    x, weight = x.contiguous(), weight.contiguous()
    (rows, depth), columns = x.shape, weight.shape[0]
    block = choose_block(rows, columns, depth, wide=wide)
    if rows < block[1]:
        x = torch.cat([x, x.new_zeros(block[1] - rows, depth)])
    out = x.new_empty(len(x), columns)
    threads = threads_now()
    told = [len(x), columns, depth, threads, x.data_ptr(), weight.data_ptr(), out.data_ptr()]
    told += [0 if each is None else each.data_ptr() for each in (scale, bias)]
    job = torch.tensor([*told, GATES[gate], *[0] * 2 * LINE])
    numba.set_num_threads(threads)
    launch(threads, address_of(weight.dtype, block), job.data_ptr())
    return out[:rows]


def choose_block(rows: int, columns: int, depth: int, *, wide: bool) -> Block:
    """The block for so many rows of an input and a weight [columns, depth], as measured with
    shapes of SigLIP and Qwen2 on Zen 5, as it is and held to AVX2. Short rows of a weight that
    few rows of the input meet are taken one at a time, which reads memory in one stream."""
    if rows == 1 or columns < 4:
        return 1, 1
    if depth <= SHORT and rows <= FEW:
        return 1, 2 if rows < 4 else 4
    if rows < 4:
        return 4, 2
    if not wide:
        return 3, 4
    return 4, 4 if rows < 6 else 6


def threads_now() -> int:
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    return min(torch.get_num_threads(), most)


@cache
def address_of(stored: torch.dtype, block: Block) -> int:
    """Where the code for weights of this dtype and blocks of this size lies."""
    return kept(lambda keep: entry(bits(stored), *block, keep=keep))


def bits(dtype: torch.dtype) -> Any:
    """What compiled code takes numbers of a dtype as."""
    return np.dtype(str(BITS[dtype]).removeprefix("torch."))


def multiply(x: Any, w: Any, out: Any, m: int, n: int, high: int, wide: int) -> None:
    """A block of constant size."""
    raise NotImplementedError("compiled code only")


@overload(multiply, prefer_literal=True)
def _multiply(x: Any, w: Any, out: Any, m: Any, n: Any, high: Any, wide: Any) -> Any:
    if not isinstance(high, types.IntegerLiteral):
        return None
    block = BLOCKS[high.literal_value, wide.literal_value]

    def implementation(x: Any, w: Any, out: Any, m: Any, n: Any, high: Any, wide: Any) -> Any:
        block(x, w, out, m, n)

    return implementation


@inner
def finish_task(job: Any, first: int, last: int, start: int, stop: int, out: Any) -> None:
    """Scale, bias and gate of the rows and columns of a task, while they are in a core's cache.
    Slices, because a loop over what may be a negative index is compiled to slow code."""
    kind = job[GATE]
    for m in range(first, last):
        row = out[m, start:stop]
        if job[SCALE]:
            times(row, placed(job[SCALE], (job[COLUMNS],), np.float32)[start:stop])
        if job[BIAS]:
            plus(row, placed(job[BIAS], (job[COLUMNS],), np.float32)[start:stop])
        if kind == 1:
            for n in range(row.shape[0]):
                row[n] *= gelu_share(row[n])
        elif kind:
            for n in range(row.shape[0]):
                row[n] *= logistic(np.float32(1.702) * row[n])


def entry(stored: Any, high: int, wide: int, *, keep: bool = True) -> Any:
    """What `launch` calls for weights of these numbers, compiled, or read from the cache it is
    kept in."""
    source = source_digest()

    @cfunc("void(int64)", fastmath=FAST, error_model="numpy", cache=keep)
    def run(at: int) -> None:
        if source == 0:  # never: by this number, other code is kept apart
            return
        job = placed(at, (NUMBERS,), np.int64)
        cells = placed(at + 8 * NUMBERS, (2 * LINE,), np.int64)
        rows, columns, size = job[ROWS], job[COLUMNS], task_size(job[COLUMNS], job[THREADS])
        x = placed(job[X], (rows, job[DEPTH]), np.float32)
        w = placed(job[WEIGHT], (columns, job[DEPTH]), stored)
        out = placed(job[RESULT], (rows, columns), np.float32)
        chunks, panels = max(1, columns // size), max(1, rows // PANEL)
        task = claim(cells, 0)
        while task < chunks * panels:
            # what is left over is the last one's: blocks that overlap stay within a task
            panel, chunk = task // chunks, task % chunks
            first, last = PANEL * panel, PANEL * (panel + 1) if panel < panels - 1 else rows
            start, stop = size * chunk, size * (chunk + 1) if chunk < chunks - 1 else columns
            for n in range(start, stop, high):
                for m in range(first, last, wide):
                    multiply(x, w, out, min(m, last - wide), min(n, stop - high), high, wide)
            finish_task(job, first, last, start, stop, out)
            task = claim(cells, 0)

    return run
