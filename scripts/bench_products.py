#!/usr/bin/env python3
"""Times the ways to multiply by a stored weight, alternately, and prints a Markdown table.

Milliseconds of the compiled loops in both block sizes, of float32 tiles, of tiles in the dtype
that a CPU may have units for, and of PyTorch's own product: of halves in their dtype, of int8
`_weight_int8pack_mm` with bfloat16 rows and scales. The last columns are ratios of the others to
the loops of 4x6. Measured with the shapes of SigLIP so400m, Qwen2-0.5B and Qwen2-7B; what is
fastest is written into vlmrun/data/products.json.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from vlmrun.models.checkpoints.quantising import quantise
from vlmrun.nn.kernels.products import product
from vlmrun.nn.linear import loops, tiled

SHAPES = ((896, 896), (4864, 896), (896, 4864), (4304, 1152), (18944, 3584))  # [N, K]
ROWS = (1, 2, 4, 8, 16, 64, 729)


def median_ms(calls: list[Callable[[], object]], times: int) -> list[float]:
    """Of calls that take turns, so that what else the machine does meets all of them."""
    taken: list[list[float]] = [[] for _ in calls]
    for round_ in range(times + 1):
        for call, mine in zip(calls, taken, strict=True):
            start = time.perf_counter()
            call()
            mine += [time.perf_counter() - start] * (round_ > 0)
    return [1000 * statistics.median(mine) for mine in taken]


def ways(x: Tensor, weight: Tensor, scale: Tensor | None) -> list[Callable[[], object]]:
    """Products of float32 rows, then of halves, by every way."""
    narrow = loops(partial(product, wide=False))
    if scale is None:
        half = x.to(weight.dtype)
        native = partial(functional.linear, half, weight)
    else:
        half = x.bfloat16()
        packed = torch.ops.aten._weight_int8pack_mm
        native = partial(packed, half, weight, scale.bfloat16())
    return [
        partial(loops(product), x, weight, scale),
        partial(narrow, x, weight, scale),
        partial(tiled, x, weight, scale),
        partial(tiled, half, weight, scale),
        native,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or int8")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    dtype = getattr(torch, asked.dtype)
    names = ("loops 4x6", "loops 3x4", "tiles", "half tiles", "native")
    print(f"| weight | rows | {' | '.join(names)} | {' ÷ | '.join(names[2:])} ÷ |")
    print(f"|{10 * '---|'}")
    for shape in SHAPES:
        weight = torch.randn(*shape)
        kept = quantise(weight) if dtype == torch.int8 else (weight.to(dtype), None)
        for rows in ROWS:
            calls = ways(torch.randn(rows, shape[1]), *kept)
            ms = median_ms(calls, 5 if rows > 64 else 15)
            cells = [*map("{:.2f}".format, ms), *(f"{other / ms[0]:.1f}" for other in ms[2:])]
            print(f"| {shape[0]}x{shape[1]} | {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
