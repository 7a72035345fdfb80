"""Matrix products over weights stored in another dtype than the arithmetic.

The weight is converted in row tiles through one small scratch buffer, so that a bf16 matrix
never exists as fp32. The tiles depend on the shape alone, never on where the weight lies, so
neither do the bits of the result.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

TILE_NUMBERS = 1 << 20  # measured: smaller tiles pay for launches, larger ones leave the cache


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias in the dtype of `x`.

    x: [..., K], weight: [N, K] in any floating dtype, bias: [N]; returns [..., N].
    """
    bias = None if bias is None else bias.to(x.dtype)
    if weight.dtype == x.dtype:
        return functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])  # [M, K]
    out = x.new_empty(rows.shape[0], weight.shape[0])  # [M, N]
    step = max(1, TILE_NUMBERS // weight.shape[1])
    scratch = x.new_empty(min(step, weight.shape[0]), weight.shape[1])
    for start in range(0, weight.shape[0], step):
        stop = min(start + step, weight.shape[0])
        tile = scratch[: stop - start]
        tile.copy_(weight[start:stop])
        torch.mm(rows, tile.t(), out=out[:, start:stop])
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


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
