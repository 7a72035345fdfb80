"""The pooling head's attention is `nn.MultiheadAttention` as SigLIP calls it."""

import pytest
import torch
from torch import Tensor, nn

from vlmrun.nn.attention import CastMultiheadAttention

WIDTH, HEADS = 24, 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(stored: torch.dtype) -> tuple[nn.MultiheadAttention, CastMultiheadAttention]:
    """Stock and ours, over the same weights rounded to `stored`."""
    stock = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    ours = CastMultiheadAttention(WIDTH, HEADS)
    shapes = {name: value.shape for name, value in stock.named_parameters()}
    weights = {name: draw(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    weights = {name: value.to(stored) for name, value in weights.items()}
    stock.load_state_dict(weights)
    for kind in ("weight", "bias"):
        fused = weights.pop(f"in_proj_{kind}").chunk(3)
        weights |= {f"{p}_proj.{kind}": part for p, part in zip("qkv", fused, strict=True)}
    ours.to(stored).load_state_dict(weights)
    return stock, ours


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_equals_multihead_attention(stored: torch.dtype, batch: int) -> None:
    stock, ours = both(stored)
    probe, states = draw(batch, 1, WIDTH, seed=8), draw(batch, 16, WIDTH, seed=9)
    found, nothing = ours(probe, states, states)
    assert nothing is None
    assert found.shape == (batch, 1, WIDTH)
    torch.testing.assert_close(found, stock(probe, states, states)[0], atol=5e-5, rtol=1e-4)


@torch.no_grad()
def test_a_stored_probe_meets_states_in_their_dtype() -> None:
    """The probe is a weight: bfloat16 beside states in float32."""
    _, ours = both(torch.bfloat16)
    probe, states = draw(2, 1, WIDTH, seed=8).bfloat16(), draw(2, 16, WIDTH, seed=9)
    found, _ = ours(probe, states, states)
    assert found.dtype == torch.float32
    assert torch.equal(found, ours(probe.float(), states, states)[0])


@torch.no_grad()
def test_every_tensor_counts() -> None:
    """The output projection too, which stock reads without calling it. What is added to every
    key alike changes no choice between them."""
    _, ours = both(torch.float32)
    probe, states = draw(1, 1, WIDTH, seed=8), draw(1, 16, WIDTH, seed=9)
    before = ours(probe, states, states)[0]
    for name, value in ours.named_parameters():
        if name == "k_proj.bias":
            continue
        kept = value.clone()
        value[:] = draw(*value.shape, seed=77)
        changed = not torch.allclose(ours(probe, states, states)[0], before, atol=1e-3)
        value.copy_(kept)
        assert changed, name
