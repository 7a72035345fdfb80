"""Backends are tried before they are trusted, and ours is PyTorch's attention."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend

from vlmrun.nn import backends
from vlmrun.nn.backends import efficient_attention, is_fused, try_backend

CPU = torch.device("cpu")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tried(backend: str, dtype: torch.dtype = torch.float32) -> str:
    return try_backend(backend, head_dim=72, dtype=dtype, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pytorchs_kernel_takes_heads_of_72(dtype: torch.dtype) -> None:
    assert tried("sdpa", dtype) == tried("eager", dtype) == ""
    assert is_fused(head_dim=72, dtype=dtype, device=CPU)


def test_what_fails_says_why_in_a_line() -> None:
    said = tried("sdpa-efficient")
    assert "RuntimeError: No viable backend" in said
    assert "\n" not in said
    assert "No module named 'flash_attn'" in tried("flash_attention_2")


def test_flex_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    assert "No working C++ compiler" in tried("flex_attention")


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_ours_is_pytorchs_attention(
    queries: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped heads, and causal where nothing masks. A CPU has only the plain kernel."""
    monkeypatch.setattr(backends, "EFFICIENT_KERNEL", SDPBackend.MATH)
    module = nn.Module()
    q, k, v = draw(2, 4, queries, 72, seed=1), draw(2, 2, 5, 72, seed=2), draw(2, 2, 5, 72, seed=3)
    mask = draw(2, 1, queries, 5, seed=4) > 0 if masked else None
    if mask is not None:
        mask[..., 0] = True
    found, nothing = efficient_attention(module, q, k, v, mask, scaling=0.3, dropout=0.0)
    assert nothing is None
    seen = torch.ones(queries, 5).tril(5 - queries).bool() if mask is None else mask
    expected = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=2e-6, rtol=1e-5)
