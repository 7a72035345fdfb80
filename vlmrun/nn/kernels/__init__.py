"""Compiled products: whether this process has them. What is compiled is imported late."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

MADV_PAGEOUT = 21  # linux/mman.h
MANY_ROWS = 9  # and more take one block
Product = Callable[..., Tensor]  # see `products.product`


@lru_cache(maxsize=1)
def find_product() -> tuple[Product | None, str]:
    """The compiled product of float32 rows [M, K] with a stored weight [N, K], and why there is
    none where there is none.

    numba refuses to be imported beside a numpy it does not know, and to keep what it compiled
    where nothing can be written; its threads of last resort abort a process that calls from two.
    """
    try:
        import numba

        from vlmrun.nn.kernels.products import product

        product(torch.zeros(1, 8), torch.zeros(8, 8, dtype=torch.bfloat16))
        layer = str(numba.threading_layer())  # type: ignore[attr-defined]
    except Exception as error:  # of an import, of a compiler, of a cache
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return None, f"numba does not work here ({words[:200]})"
    if layer == "workqueue":
        return None, "numba has no threads of OpenMP or TBB here"
    return product, ""


def compile_product(product: Product, dtype: torch.dtype, *, rows: int) -> None:
    """Compile, or read from the cache, what a decode step of so many rows and what many rows
    take over weights of a dtype; then give back the memory of the compiler, which waits in the
    file it came from."""
    for count in (rows, MANY_ROWS):
        product(torch.zeros(count, 8), torch.zeros(8, 8, dtype=dtype))
    page_out("llvmlite")


def page_out(library: str) -> None:
    """Have the kernel drop the pages of a library that are as in its file: they are read again
    where they are needed. Nothing where it cannot (Linux before 5.4, other systems)."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    for line in maps:
        addresses, rights, *_ = line.split()
        if library in line and "w" not in rights:
            start, stop = (int(each, 16) for each in addresses.split("-"))
            advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_PAGEOUT)
