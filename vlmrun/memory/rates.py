"""What this machine does per second, measured: memory, arithmetic, our compiled loops."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from vlmrun.nn.kernels import Product, find_product

SECONDS = 0.4  # of trying one thing again and again; the fastest counts
COLUMNS = 3584  # of the matrix that one row is multiplied by: LLaVA-OneVision-7B's width
CPU_SHAPE = 729, 1152, 4304  # rows, width, MLP width: a picture in SigLIP so400m
GPU_SHAPE = 8192, 8192, 8192
HALF = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Rate:
    """What was measured: how many of the unit, and of what; None, and why not."""

    name: str
    unit: Literal["bytes_per_s", "flops_per_s"]
    value: float | None
    words: str


def measure_rates(device: str, *, buffer_bytes: int, threads: int) -> Iterator[Rate]:
    """Measure one thing after the other; `buffer_bytes` is more than the caches hold."""
    torch.set_num_threads(threads)
    at = torch.device(device)
    with torch.inference_mode():
        buffer = torch.ones(buffer_bytes // 4, device=at)
        yield read_rate(buffer)
        if at.type != "cpu":
            yield link_rate(at)
        for dtype in (torch.float32, HALF):
            yield matrix_rate(dtype, at)
        if at.type == "cpu":
            yield from loop_rates(buffer)


def read_rate(buffer: Tensor) -> Rate:
    """Reading memory that no cache holds: the sum of all its numbers."""
    seconds = fastest(buffer.sum, buffer.device)
    words = f"the sum of {buffer.nbytes >> 20} MiB"
    return Rate("memory_read", "bytes_per_s", buffer.nbytes / seconds, words)


def link_rate(device: torch.device) -> Rate:
    """Copies from pinned memory to a GPU."""
    source = torch.ones(64 << 20, pin_memory=True)
    target = torch.empty_like(source, device=device)
    seconds = fastest(lambda: target.copy_(source, non_blocking=True), device)
    words = f"copies of {source.nbytes >> 20} MiB from pinned memory"
    return Rate("link", "bytes_per_s", source.nbytes / seconds, words)


def matrix_rate(dtype: torch.dtype, device: torch.device) -> Rate:
    """PyTorch's product of two matrices of one dtype."""
    rows, width, columns = CPU_SHAPE if device.type == "cpu" else GPU_SHAPE
    x = torch.ones(rows, width, dtype=dtype, device=device)
    weight = torch.ones(columns, width, dtype=dtype, device=device)
    name = str(dtype).removeprefix("torch.")
    try:
        seconds = fastest(lambda: functional.linear(x, weight), device)
    except RuntimeError as error:  # PyTorch's word for a kernel it has not
        said = str(error).strip().splitlines() or [""]
        return Rate(f"matrix_{name}", "flops_per_s", None, f"PyTorch: {said[0]}")
    words = f"PyTorch, [{rows}, {width}] by [{width}, {columns}]"
    return Rate(f"matrix_{name}", "flops_per_s", 2 * rows * width * columns / seconds, words)


def loop_rates(buffer: Tensor) -> Iterator[Rate]:
    """Our compiled loops over bfloat16 weights: the read rate of one row, as in decoding, and the
    matrix rate of many."""
    product, why = find_product()
    names: list[tuple[str, Literal["bytes_per_s", "flops_per_s"]]]
    names = [("loops_one_row", "bytes_per_s"), ("loops_many_rows", "flops_per_s")]
    if product is None:
        yield from (Rate(name, unit, None, why) for name, unit in names)
        return
    halves = buffer.view(HALF)
    weight = halves[: len(halves) // COLUMNS * COLUMNS].view(-1, COLUMNS)
    seconds = time_product(product, 1, weight)
    words = f"bfloat16 weights, [1, {COLUMNS}] by [{COLUMNS}, {len(weight)}]"
    yield Rate(*names[0], weight.nbytes / seconds, words)
    rows, width, columns = CPU_SHAPE
    seconds = time_product(product, rows, torch.ones(columns, width, dtype=HALF))
    words = f"bfloat16 weights, [{rows}, {width}] by [{width}, {columns}]"
    yield Rate(*names[1], 2 * rows * width * columns / seconds, words)


def time_product(product: Product, rows: int, weight: Tensor) -> float:
    x = torch.ones(rows, weight.shape[1])
    return fastest(lambda: product(x, weight), weight.device)


def fastest(step: Callable[[], object], device: torch.device) -> float:
    """Least seconds of a step among all that fit a moment, three at least; one before them, in
    which threads start and kernels are compiled, does not count."""
    finish(step, device)
    times: list[float] = []
    while len(times) < 3 or sum(times) < SECONDS:
        start = time.perf_counter()
        finish(step, device)
        times.append(time.perf_counter() - start)
    return min(times)


def finish(step: Callable[[], object], device: torch.device) -> None:
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
