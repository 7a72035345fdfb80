"""Tables, patches, and token rows that are gathered where they lie."""

import pytest
import torch
from torch import Tensor, nn
from transformers import SiglipVisionConfig
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding
from transformers.models.siglip.modeling_siglip import SiglipVisionEmbeddings

from vlmrun.nn.embedding import CastEmbedding, PatchEmbedding, TokenTable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@torch.no_grad()
def test_rows_are_cast(stored: torch.dtype, compute: torch.dtype) -> None:
    table = CastEmbedding(7, 5, compute_dtype=compute)
    table.load_state_dict({"weight": draw(7, 5)})
    table.to(stored)
    ids = torch.tensor([[6, 0, 0], [3, 6, 1]])
    assert torch.equal(table(ids), draw(7, 5).to(stored).to(compute)[ids])


@pytest.mark.parametrize("compute", DTYPES)
def test_a_token_table_reads_each_row_once(compute: torch.dtype) -> None:
    weight = draw(100, 5).bfloat16()
    asked: list[list[int]] = []

    def read_rows(ids: list[int]) -> Tensor:
        asked.append(ids)
        return weight[ids]

    table = TokenTable(5, compute_dtype=compute)
    table.read_rows = read_rows
    assert not list(table.parameters())
    for ids in torch.tensor([[9, 2, 9], [99, 0, 2]]), torch.tensor([4]), torch.tensor(4):
        assert torch.equal(table(ids), weight[ids].to(compute))
    assert asked == [[0, 2, 9, 99], [4], [4]]


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@torch.no_grad()
def test_gemmas_scale_is_rounded_as_stock_rounds_it(
    stored: torch.dtype, compute: torch.dtype
) -> None:
    """sqrt(3072) = 55.43 is 55.5 in bfloat16; table and streamed rows give the same bits."""
    scale, weight = 3072**0.5, draw(7, 5).to(stored)
    stock = GemmaTextScaledWordEmbedding(7, 5, 0, embed_scale=scale)
    stock.load_state_dict({"weight": weight})
    whole = CastEmbedding(7, 5, compute_dtype=compute, scale=scale).to(stored)
    whole.load_state_dict({"weight": weight})
    rows = TokenTable(5, compute_dtype=compute, scale=scale)
    rows.read_rows = lambda ids: weight[ids]
    ids = torch.tensor([[6, 0, 0], [3, 6, 1]])
    expected = stock.to(compute)(ids)
    assert torch.equal(whole(ids), expected)
    assert torch.equal(rows(ids), expected)


@pytest.mark.parametrize("size", [28, 30])
@pytest.mark.parametrize("stored", DTYPES)
@torch.no_grad()
def test_patches_are_siglips(size: int, stored: torch.dtype) -> None:
    """Rows and columns that do not fill a patch are left out, as stock does."""
    config = SiglipVisionConfig(hidden_size=12, image_size=size, patch_size=7, num_channels=3)
    stock = SiglipVisionEmbeddings(config)
    ours = PatchEmbedding(channels=3, width=12, patch_size=7, positions=16, dtype=torch.float32)
    weights = {n: draw(*p.shape, seed=i) for i, (n, p) in enumerate(stock.named_parameters())}
    ours.load_state_dict(weights)
    stock.load_state_dict(weights)
    pixels = draw(2, 3, size, size, seed=9)
    found, expected = ours.to(stored)(pixels), stock.to(stored).float()(pixels)
    assert found.shape == (2, 16, 12)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("compute", DTYPES)
@torch.no_grad()
def test_patches_are_computed_in_the_compute_dtype(compute: torch.dtype) -> None:
    """Stock rounds pixels to the dtype of the stored weight; ours does not."""
    ours = PatchEmbedding(channels=3, width=12, patch_size=7, positions=16, dtype=compute)
    for seed, value in enumerate(ours.parameters()):
        value.copy_(draw(*value.shape, seed=seed))
    pixels = draw(1, 3, 28, 28, seed=9)
    found = ours.bfloat16()(pixels)
    assert found.dtype == compute
    weight, bias = ours.patch_embedding.weight.float(), ours.patch_embedding.bias.float()
    exact = nn.functional.conv2d(pixels, weight, bias, stride=7).flatten(2).transpose(1, 2)
    exact = exact + ours.position_embedding.weight.float()
    bound = 1e-4 if compute == torch.float32 else 0.3
    assert (found.float() - exact).abs().max() < bound
