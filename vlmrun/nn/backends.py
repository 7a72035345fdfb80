"""Kernels that attention runs through: one that transformers does not know, and a try of each.

Plain values in and out: which backend a tower should take is decided elsewhere.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

EFFICIENT = "sdpa-efficient"
EFFICIENT_KERNEL = SDPBackend.EFFICIENT_ATTENTION
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
TRIED_TOKENS = 16


def register_backends() -> None:
    """Make our backend known to transformers, to its masks too: a name that only its attention
    knows gets no mask, and causality and padding vanish without an error."""
    from transformers import AttentionInterface, AttentionMaskInterface  # late: seconds
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(EFFICIENT, efficient_attention)
    AttentionMaskInterface.register(EFFICIENT, sdpa_mask)


def efficient_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of [B, H, Q, D] over keys and values [B, G, K, D], held to the memory-efficient
    kernel of PyTorch (Rabe and Staats 2021, arXiv:2112.05682); gives [B, Q, H, D]."""
    groups = query.shape[1] // key.shape[1]  # the kernel takes no grouped heads
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    with sdpa_kernel(EFFICIENT_KERNEL):
        seen = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            scale=scaling,
            is_causal=bool(causal) and attention_mask is None and query.shape[2] > 1,
        )
    return seen.transpose(1, 2).contiguous(), None


@torch.inference_mode()
def try_backend(backend: str, *, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """Call a backend with two heads and a few tokens; says in a line why that fails, nothing
    where it works. `flex_attention` compiles: that takes a minute, and a compiler on a CPU."""
    states = torch.zeros(1, 2, TRIED_TOKENS, head_dim, dtype=dtype, device=device)
    try:
        with quiet():
            call(backend, states)
    except Exception as error:  # kernels and compilers raise whatever they like
        said = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {said[0]}".removesuffix(": ")
    return ""


def call(backend: str, states: Tensor) -> None:
    """Let a backend attend states [1, 2, T, D] to themselves."""
    if backend == "flash_attention_2":
        import_module("flash_attn").flash_attn_func(*[states.transpose(1, 2)] * 3)
    elif backend != "eager":  # a chain of products, which every device has
        from transformers import AttentionInterface  # late: seconds

        register_backends()
        module = nn.Module().eval()
        module.is_causal = False  # type: ignore[assignment]
        AttentionInterface()[backend](module, states, states, states, None, scaling=1.0)


@torch.inference_mode()
def is_fused(*, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether one of PyTorch's fused kernels takes heads of this width, so that scores do not
    lie in memory."""
    states = torch.zeros(1, 2, TRIED_TOKENS, head_dim, dtype=dtype, device=device)
    try:
        with quiet(), sdpa_kernel(FUSED):
            functional.scaled_dot_product_attention(states, states, states)
    except RuntimeError:
        return False
    return True


@contextmanager
def quiet() -> Iterator[None]:
    """Kernels that do not fit warn before they fail, and compilers of their own affairs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
