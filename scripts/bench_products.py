#!/usr/bin/env python3
"""Times the ways to multiply by a stored weight, alternately, and prints a Markdown table.

Milliseconds of the compiled loops in both block sizes, of float32 tiles and
of PyTorch's own product in the weight's dtype; the last columns are ratios of the others to the
loops of 4x6. Measured with the shapes of SigLIP so400m, Qwen2-0.5B and Qwen2-7B.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from vlmrun.nn.kernels.products import product
from vlmrun.nn.linear import tiled

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    dtype = getattr(torch, asked.dtype)
    print("| weight | rows | loops 4x6 | loops 3x4 | tiles | native | tiles ÷ | native ÷ |")
    print("|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        weight = torch.randn(*shape).to(dtype)
        for rows in ROWS:
            x = torch.randn(rows, shape[1])
            half = x.to(dtype)
            calls: list[Callable[[], object]] = [
                lambda x=x, w=weight: product(x, w),
                lambda x=x, w=weight: product(x, w, wide=False),
                lambda x=x, w=weight: tiled(x, w),
                lambda x=half, w=weight: functional.linear(x, w),
            ]
            ms = median_ms(calls, 5 if rows > 64 else 15)
            cells = [*map("{:.2f}".format, ms), *(f"{other / ms[0]:.1f}" for other in ms[2:])]
            print(f"| {shape[0]}x{shape[1]} | {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
