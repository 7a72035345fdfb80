"""A decoder's block: modules for a prompt, one compiled call for one new token of every row.

Stands for the blocks of Qwen2, Llama, Mistral and Gemma, which have two norms, and of Gemma 2,
which has four.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vlmrun.nn.kv import KVCache
from vlmrun.nn.linear import CastLinear
from vlmrun.nn.norm import CastGemmaNorm, CastRMSNorm

CACHED = (torch.float32, torch.bfloat16)  # what keys and values may be stored in
STEP_ROWS = 8  # up to which the call is faster than the modules, measured
LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
SILU, GELU = ("SiLU", "SiLUActivation"), ("GELUTanh",)
WITH_TWO_NORMS = ("input_layernorm", "", "post_attention_layernorm", "")
WITH_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
# x [B, D] float32, cosines and sines [B, H] float32, keys and values [B, G, P, H] with room for
# the new position, where each row starts [B] int64, positions so far -> [B, D] float32
Call = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]


class DecoderBlock(nn.Module):
    """A block of the same signature as transformers' own, made of its modules.

    call: what runs a step, set when the model is loaded; None where the modules do.
    """

    self_attn: Any
    mlp: Any
    call: Call | None = None

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        for name, child in stock.named_children():
            self.add_module(name, child)
        self.norms = WITH_FOUR_NORMS if hasattr(self, WITH_FOUR_NORMS[2]) else WITH_TWO_NORMS

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states: [B, T, D]; gives the same. attention_mask: in the form of the backend."""
        if self.call is not None and runs_call(hidden_states, cache):
            assert position_embeddings is not None
            return self._step(hidden_states, position_embeddings, cache)
        before, after, second, last = (self._modules.get(name) for name in self.norms)
        assert before is not None
        assert second is not None
        seen, _ = self.self_attn(
            hidden_states=before(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = hidden_states + (seen if after is None else after(seen))
        made = self.mlp(second(hidden_states))
        out: Tensor = hidden_states + (made if last is None else last(made))
        return out

    def _step(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
        assert self.call is not None
        layer = cache.layers[self.self_attn.layer_idx]
        rows = len(x)
        wide, cos, sin = (
            each.expand(rows, 1, -1).float().contiguous().view(rows, -1) for each in (x, *angles)
        )
        out = self.call(wide, cos, sin, layer.keys, layer.values, cache.starts, layer.length)
        return out.to(x.dtype)[:, None]


def runs_call(x: Tensor, cache: object) -> bool:
    """Whether states [B, T, D] are one new token of each of a few rows, and keys and values lie
    where the call finds them."""
    return (
        x.shape[1] == 1
        and len(x) <= STEP_ROWS
        and x.device.type == "cpu"
        and x.dtype in CACHED
        and isinstance(cache, KVCache)
    )


def parts_of(block: DecoderBlock) -> dict[str, Any] | None:
    """What a call is made of, by the names it takes them by; None for a block of other parts:
    one that several processes share, say, or with another gate."""
    linears = [block.get_submodule(path) for path in LINEARS]
    norms: list[Any] = [block._modules.get(name) for name in block.norms]
    attention, gate = block.self_attn, type(block.mlp.act_fn).__name__
    kinds = {type(norm) for norm in norms if norm is not None}
    fits = (
        all(type(linear) is CastLinear and len(linear.weight) % 4 == 0 for linear in linears)
        and kinds in ({CastRMSNorm}, {CastGemmaNorm})
        and gate in SILU + GELU
        and attention.head_dim % 2 == 0
    )
    if not fits:
        return None
    return {
        "linears": linears,
        "norms": norms,
        "gelu": gate in GELU,
        "eps": norms[0].eps,
        "offset": float(kinds == {CastGemmaNorm}),
        "scaling": attention.scaling,
        "cap": getattr(attention, "attn_logit_softcapping", None) or 0.0,
        "window": window_of(attention),
    }


def window_of(attention: Any) -> int | None:
    """How many positions a block looks back on, itself among them: what its attention passes on.
    Mistral's keeps it in its configuration."""
    holder = attention if hasattr(attention, "sliding_window") else attention.config
    window: int | None = getattr(holder, "sliding_window", None)
    return window
