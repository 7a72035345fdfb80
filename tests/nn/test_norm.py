"""Norms: those of torch and transformers, over weights of any dtype."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from vlmrun.nn.norm import CastGemmaNorm, CastLayerNorm, CastRMSNorm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1,), (24,), (3, 24), (2, 3, 48), (0, 24)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@torch.no_grad()
def test_layer_norm(shape: tuple[int, ...], stored: torch.dtype, compute: torch.dtype) -> None:
    """The bits of torch's own norm over weights cast to the dtype of the input."""
    width = shape[-1]
    stock, ours = nn.LayerNorm(width, eps=1e-3), CastLayerNorm(width, eps=1e-3)
    weights = {"weight": 1 + draw(width, seed=1), "bias": draw(width, seed=2)}
    for layer in stock, ours:
        layer.load_state_dict(weights)
        layer.to(stored)
    x = (3 * draw(*shape) + 1).to(compute)
    found = ours(x)
    assert found.dtype == compute
    assert torch.equal(found, stock.to(compute)(x))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@torch.no_grad()
def test_rms_norm(shape: tuple[int, ...], stored: torch.dtype, compute: torch.dtype) -> None:
    """The bits of the decoder's own norm; its mean is taken in float32 in any dtype."""
    width = shape[-1]
    stock, ours = Qwen2RMSNorm(width, eps=1e-3), CastRMSNorm(width, eps=1e-3)
    for layer in stock, ours:
        layer.load_state_dict({"weight": 1 + draw(width, seed=1)})
        layer.to(stored)
    x = (3 * draw(*shape) + 1).to(compute)
    found = ours(x)
    assert found.dtype == compute
    assert torch.equal(found, stock.to(compute)(x))


@pytest.mark.parametrize("stock_class", [GemmaRMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@torch.no_grad()
def test_gemma_norm(stock_class: type, stored: torch.dtype, compute: torch.dtype) -> None:
    """The weight is added to 1 in float32, and nothing is rounded before the end."""
    stock, ours = stock_class(24, eps=1e-3), CastGemmaNorm(24, eps=1e-3)
    for layer in stock, ours:
        layer.load_state_dict({"weight": draw(24, seed=1)})
        layer.to(stored)
    x = (3 * draw(2, 3, 24) + 1).to(compute)
    found = ours(x)
    assert found.dtype == compute
    assert torch.equal(found, stock(x))


@torch.no_grad()
def test_rms_norm_of_large_halves_is_finite() -> None:
    """Squares of 300 overflow float16; the mean is taken in float32."""
    layer = CastRMSNorm(4, eps=1e-6)
    layer.load_state_dict({"weight": torch.ones(4)})
    found = layer(torch.full((1, 4), 300.0, dtype=torch.float16))
    torch.testing.assert_close(found, torch.ones(1, 4, dtype=torch.float16))
