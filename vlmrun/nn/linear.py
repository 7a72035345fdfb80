"""Matrix products over weights stored in another dtype than the arithmetic.

On a CPU compiled loops widen every number where it is used; float32 weights with float32 inputs
are left to torch, whose bits stock models have. Without the loops the weight is converted
in row tiles through one small scratch buffer, so that a bf16 matrix never exists as fp32. Either
way the bits depend on the shapes alone, never on where the weight lies.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlmrun.nn.kernels import Product

TILE_NUMBERS = 1 << 20  # measured: smaller tiles pay for launches, larger ones leave the cache

Gate = Literal["", "gelu_tanh", "quick_gelu"]
# gate(rows @ weight.T * scale + bias) [M, N] of rows [M, K] and a weight [N, K]; scale: float32 [N]
# of a quantised one, bias: [N], each None where there is none
Kernel = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Gate], Tensor]
# by the dtypes of weight and rows: kernels by the most rows they are for, fewest first
Kernels = Mapping[tuple[torch.dtype, torch.dtype], tuple[tuple[float, Kernel], ...]]
PYTORCH: Kernels = MappingProxyType({})


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    kernels: Kernels = PYTORCH,
    gate: Gate = "",
) -> Tensor:
    """Compute gate(x @ weight.T + bias) in the dtype of `x`, sums in float32.

    x: [..., K], weight: [N, K] in any floating dtype, or int8 with the float32 `scale` [N] of its
    rows, bias: [N]; returns [..., N].
    """
    rows = x.reshape(-1, x.shape[-1])  # [M, K]
    kernel = choose_kernel(kernels, weight.dtype, x.dtype, len(rows))
    return kernel(rows, weight, scale, bias, gate).view(*x.shape[:-1], weight.shape[0])


def choose_kernel(kernels: Kernels, stored: torch.dtype, compute: torch.dtype, rows: int) -> Kernel:
    """What is named for weights and inputs of these dtypes, else PyTorch's own way."""
    for most, kernel in kernels.get((stored, compute), ()):
        if rows <= most:
            return kernel
    return native if stored == compute else tiled


def native(
    rows: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Gate = "",
) -> Tensor:
    """As stock does, to the bit."""
    assert scale is None
    return gated(functional.linear(rows, weight, cast(bias, rows.dtype)), gate)


def loops(product: Product) -> Kernel:
    """The compiled product of float32 rows for rows of any dtype."""

    def multiply(
        rows: Tensor,
        weight: Tensor,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        gate: Gate = "",
    ) -> Tensor:
        wide = cast(bias, torch.float32)
        out: Tensor = product(rows.float(), weight, scale=scale, bias=wide, gate=gate)
        return out.to(rows.dtype)

    return multiply


def cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def gated(x: Tensor, gate: Gate) -> Tensor:
    """What an MLP of a vision tower puts between its layers, in transformers' forms."""
    if gate == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return x * torch.sigmoid(1.702 * x) if gate == "quick_gelu" else x


def tiled(
    rows: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Gate = "",
) -> Tensor:
    """The product [M, N] of rows [M, K] with a weight [N, K] of another dtype, tile by tile. A
    quantised one is multiplied by its scales there: float16 may not hold products without."""
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    step = max(1, TILE_NUMBERS // weight.shape[1])
    scratch = rows.new_empty(min(step, weight.shape[0]), weight.shape[1])
    for start in range(0, weight.shape[0], step):
        stop = min(start + step, weight.shape[0])
        tile = scratch[: stop - start]
        if scale is None:
            tile.copy_(weight[start:stop])
        else:  # by way of float32: torch takes 50 times as long from int8 to a half
            tile.copy_(weight[start:stop].float().mul_(scale[start:stop, None]))
        torch.mm(rows, tile.t(), out=out[:, start:stop])
    if bias is not None:
        out += bias.to(out.dtype)
    return gated(out, gate)


class CastLinear(nn.Module):
    """A linear layer that computes in the dtype of its input, whatever its weight is stored as.

    scale: float32 [N] of the rows of a weight that is bound as int8, else None. kernels: what
    multiplies, set when the model is loaded.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None
    kernels: Kernels = PYTORCH

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor, gate: Gate = "") -> Tensor:
        return linear(x, self.weight, self.bias, self.scale, self.kernels, gate)


class RowBlocks(nn.Module):
    """A large matrix in pieces of rows, each of which moves between tiers on its own."""

    def __init__(self, in_features: int, block_rows: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            CastLinear(in_features, rows, bias=False) for rows in block_rows
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([block(x) for block in self.blocks], dim=-1)  # [..., N]
