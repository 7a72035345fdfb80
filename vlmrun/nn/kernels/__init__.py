"""Compiled products: whether this process has them. What is compiled is imported late."""

from collections.abc import Callable
from functools import lru_cache

from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


@lru_cache(maxsize=1)
def find_product() -> tuple[Product | None, str]:
    """The compiled product of float32 rows [M, K] with a stored weight [N, K], and why there is
    none where there is none.

    numba refuses to be imported beside a numpy it does not know, and to keep what it compiled
    where nothing can be written; its threads of last resort abort a process that calls from two.
    """
    try:
        import numba
        import torch

        from vlmrun.nn.kernels.products import product

        product(torch.zeros(1, 8), torch.zeros(8, 8))
        layer = str(numba.threading_layer())  # type: ignore[attr-defined]
    except Exception as error:  # of an import, of a compiler, of a cache
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return None, f"numba does not work here ({words[:200]})"
    if layer == "workqueue":
        return None, "numba has no threads of OpenMP or TBB here"
    return product, ""
