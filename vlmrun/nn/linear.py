"""Matrix products over weights stored in another dtype than the arithmetic.

On a CPU compiled loops widen every number where it is used; float32 weights with float32 inputs
are left to torch, whose bits stock models have. Without the loops the weight is converted
in row tiles through one small scratch buffer, so that a bf16 matrix never exists as fp32. Either
way the bits depend on the shapes alone, never on where the weight lies.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlmrun.nn.kernels import find_product

TILE_NUMBERS = 1 << 20  # measured: smaller tiles pay for launches, larger ones leave the cache
FEW = 4  # rows up to which the compiled loop beats a CPU's own bf16 units, measured on Zen 5


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias in the dtype of `x`, sums in float32.

    x: [..., K], weight: [N, K] in any floating dtype, bias: [N]; returns [..., N].
    """
    bias = None if bias is None else bias.to(x.dtype)
    rows = x.reshape(-1, x.shape[-1])  # [M, K]
    same, single, few = weight.dtype == x.dtype, x.dtype == torch.float32, len(rows) <= FEW
    wanted = x.device.type == "cpu" and (few or single) and not (same and single)
    product = find_product()[0] if wanted else None
    if product is not None:
        out = product(rows.float(), weight).to(x.dtype)
    elif same:
        return functional.linear(x, weight, bias)
    else:
        out = tiled(rows, weight)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


def tiled(rows: Tensor, weight: Tensor) -> Tensor:
    """The product [M, N] of rows [M, K] with a weight [N, K] of another dtype, tile by tile."""
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    step = max(1, TILE_NUMBERS // weight.shape[1])
    scratch = rows.new_empty(min(step, weight.shape[0]), weight.shape[1])
    for start in range(0, weight.shape[0], step):
        stop = min(start + step, weight.shape[0])
        tile = scratch[: stop - start]
        tile.copy_(weight[start:stop])
        torch.mm(rows, tile.t(), out=out[:, start:stop])
    return out


class CastLinear(nn.Module):
    """A linear layer that computes in the dtype of its input, whatever its weight is stored as."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RowBlocks(nn.Module):
    """A large matrix in pieces of rows, each of which moves between tiers on its own."""

    def __init__(self, in_features: int, block_rows: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            CastLinear(in_features, rows, bias=False) for rows in block_rows
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([block(x) for block in self.blocks], dim=-1)  # [..., N]
