"""NaFlex's embeddings, and position tables resized to other grids."""

import pytest
import torch
from torch import Tensor
from transformers import Siglip2VisionConfig
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from vlmrun.nn.embedding import PatchEmbedding, resampled
from vlmrun.nn.patches import FlatPatchEmbedding

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = torch.tensor([[4, 4], [1, 20], [20, 1], [2, 9], [1, 1], [5, 4]])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stored", DTYPES)
@torch.no_grad()
def test_flat_patches_are_siglip2s(stored: torch.dtype) -> None:
    """Own patches are; padding has no position of its own in either."""
    config = Siglip2VisionConfig(hidden_size=12, patch_size=7, num_patches=16)
    stock = Siglip2VisionEmbeddings(config)
    ours = FlatPatchEmbedding(numbers=147, width=12, positions=16, dtype=torch.float32)
    weights = {n: draw(*p.shape, seed=i) for i, (n, p) in enumerate(stock.named_parameters())}
    ours.load_state_dict(weights)
    stock.load_state_dict(weights)
    pixels = draw(len(SHAPES), 20, 147, seed=9)
    found = ours.to(stored)(pixels, SHAPES)
    expected = stock.to(stored).float()(pixels, SHAPES)
    own = torch.arange(20)[None] < SHAPES.prod(dim=1)[:, None]
    torch.testing.assert_close(found[own], expected[own], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("compute", DTYPES)
@torch.no_grad()
def test_embeddings_come_in_the_compute_dtype(compute: torch.dtype) -> None:
    flat = FlatPatchEmbedding(numbers=147, width=12, positions=16, dtype=compute).bfloat16()
    square = PatchEmbedding(channels=3, width=12, patch_size=7, positions=16, dtype=compute)
    for module in (flat, square):
        for seed, value in enumerate(module.parameters()):
            value.copy_(draw(*value.shape, seed=seed))
    assert flat(draw(1, 20, 147), SHAPES[1:2]).dtype == compute
    assert square.bfloat16()(draw(1, 3, 14, 35)).dtype == compute


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_keeps_rows_and_columns_apart(mode: str, dtype: torch.dtype) -> None:
    """One that holds its row's and its column's number still does when resized, and a constant
    stays one; its own grid is given back as it is."""
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    table = torch.stack([rows, columns, torch.ones(4, 4)], dim=-1).view(16, 3).to(dtype)
    assert torch.equal(resampled(table, (4, 4), mode), table)
    found = resampled(table, (3, 8), mode).view(3, 8, 3)
    assert found.dtype == torch.float32
    assert found[..., 0].diff(dim=0).min() > 0.5
    assert found[..., 0].diff(dim=1).abs().max() < 1e-5
    assert found[..., 1].diff(dim=1).min() > 0
    torch.testing.assert_close(found[..., 2], torch.ones(3, 8))


@torch.no_grad()
def test_as_many_patches_in_another_shape_have_other_positions() -> None:
    """14 x 56 pixels are 16 patches as 28 x 28 are; stock adds the wrong positions to them."""
    module = PatchEmbedding(channels=3, width=12, patch_size=7, positions=16, dtype=torch.float32)
    for seed, value in enumerate(module.parameters()):
        value.copy_(draw(*value.shape, seed=seed))
    black = torch.zeros(1, 3, 14, 56)
    table = module.position_embedding.weight
    found = module(black)[0] - module.patch_embedding.bias
    torch.testing.assert_close(found, resampled(table, (2, 8), "bicubic"), atol=1e-5, rtol=0)
    assert (found - table).abs().max() > 0.1
