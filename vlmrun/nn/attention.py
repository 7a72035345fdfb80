"""The attention of SigLIP's pooling head, over weights stored in any dtype."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlmrun.nn.linear import CastLinear, linear


class CastMultiheadAttention(nn.Module):
    """`nn.MultiheadAttention` as the pooling head calls it: batch first, fused input
    projection, keys and values from the same tensor, no mask, attention weights not returned.
    """

    in_proj_weight: Tensor
    in_proj_bias: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width), requires_grad=False)
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width), requires_grad=False)
        self.out_proj = CastLinear(width, width, bias=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        """query: [B, Q, D] in any dtype, key and value: the same [B, N, D]; gives [B, Q, D]."""
        assert key is value
        width = key.shape[-1]
        weight, bias = self.in_proj_weight, self.in_proj_bias
        q = linear(query.to(key.dtype), weight[:width], bias[:width])
        k = linear(key, weight[width : 2 * width], bias[width : 2 * width])
        v = linear(key, weight[2 * width :], bias[2 * width :])
        heads = [x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2) for x in (q, k, v)]
        seen = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        return self.out_proj(seen.transpose(1, 2).flatten(2)), None
