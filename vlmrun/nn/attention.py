"""The attention of SigLIP's pooling head, over weights stored in any dtype."""

from torch import Tensor, nn
from torch.nn import functional

from vlmrun.nn.linear import CastLinear


class CastMultiheadAttention(nn.Module):
    """`nn.MultiheadAttention` as the pooling head calls it: batch first, keys and values from
    the same tensor, attention weights not returned. The three input projections, fused in the
    stock module, are layers of their own, as everywhere else. `--attention` does not reach it,
    as it does not in transformers: with one query a kernel makes no difference.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = CastLinear(width, width, bias=True)
        self.k_proj = CastLinear(width, width, bias=True)
        self.v_proj = CastLinear(width, width, bias=True)
        self.out_proj = CastLinear(width, width, bias=True)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """query: [B, Q, D] in any dtype, key and value: the same [B, N, D], attn_mask: added to
        the scores, [B * heads, Q, N]; gives [B, Q, D]."""
        assert key is value
        q, k, v = self.q_proj(query.to(key.dtype)), self.k_proj(key), self.v_proj(key)
        q, k, v = (x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2) for x in (q, k, v))
        if attn_mask is not None:
            attn_mask = attn_mask.view(key.shape[0], self.heads, *attn_mask.shape[1:]).to(key.dtype)
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return self.out_proj(seen.transpose(1, 2).flatten(2)), None
