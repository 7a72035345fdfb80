"""How matrix products with stored weights are computed, decided before numba is imported."""

from dataclasses import dataclass
from importlib.util import find_spec

from vlmrun.models.checkpoints.dtype import Dtype


@dataclass(frozen=True, slots=True)
class Products:
    """compiled: by our loops, which widen a number where it is used, or else by PyTorch."""

    compiled: bool
    reason: str

    def __str__(self) -> str:
        return f"{'compiled loops' if self.compiled else 'PyTorch'} ({self.reason})"


PYTORCH = Products(False, "as nothing is known")


def choose_products(stored: Dtype, compute: Dtype, device: str) -> Products:
    """Choose by what was measured on CPUs (scripts/bench_products.py): the loops reach the rate of
    memory for a few rows, where PyTorch reaches a third of it, and convert nothing beforehand."""
    if device != "cpu":
        return Products(False, "a GPU has its own")
    if stored is compute is Dtype.float32:
        return Products(False, "float32 is computed as it is stored")
    if find_spec("numba") is None:
        return Products(False, "numba is not installed")
    if compute is Dtype.float32:
        return Products(True, f"{stored} is widened where it is used")
    return Products(True, f"for up to 4 rows; PyTorch has this CPU's {compute} units for more")
