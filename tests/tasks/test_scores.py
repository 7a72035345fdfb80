"""Scores of texts for pictures are the model's own."""

from pathlib import Path

import pytest
import torch
from entries import load_tiny
from folders import changed, weights
from tiny_naflex import build_naflex
from torch import Tensor
from transformers import Siglip2Model, SiglipModel

from vlmrun.load import load
from vlmrun.tasks.embed import embed_images, embed_texts
from vlmrun.tasks.scores import make_scorer
from vlmrun.tasks.vision import Group, squares


def pixels() -> Tensor:
    return torch.rand(3, 3, 28, 28, generator=torch.Generator().manual_seed(7)) * 2 - 1


def texts() -> Tensor:
    return torch.randint(2, 200, (4, 16), generator=torch.Generator().manual_seed(8))


def scores(folder: Path, groups: list[Group]) -> tuple[Tensor, Tensor]:
    ready = load_tiny(folder, resident="50%", texts=True)
    said = embed_texts(ready.entry, texts())
    seen = embed_images(ready.entry, ready.model.architecture, groups, "pooled")
    scorer = make_scorer(ready.model, ready.entry, "abcd", list(said))
    found = [scorer.scores(vector) for vector in seen]
    assert all([score.text for score in row] == list("abcd") for row in found)
    pairs = torch.tensor([[(score.cosine, score.probability) for score in row] for row in found])
    return pairs[..., 0], pairs[..., 1]


def test_probabilities_equal_stock(tiny_siglip: Path) -> None:
    stock = SiglipModel.from_pretrained(tiny_siglip, dtype=torch.float32).eval()
    with torch.no_grad():
        out = stock(input_ids=texts(), pixel_values=pixels())
    cosines, probabilities = scores(tiny_siglip, squares(pixels()))
    torch.testing.assert_close(probabilities, out.logits_per_image.sigmoid(), atol=2e-5, rtol=0)
    torch.testing.assert_close(cosines, out.image_embeds @ out.text_embeds.T, atol=2e-5, rtol=0)
    assert probabilities.std() > 0.01


def test_probabilities_of_naflex_equal_stock(tmp_path: Path) -> None:
    folder = build_naflex(tmp_path, dtype="bfloat16")
    stock = Siglip2Model.from_pretrained(folder, dtype=torch.float32).eval()
    flat = torch.randn(3, 20, 147, generator=torch.Generator().manual_seed(7))
    shapes = torch.tensor([[4, 5], [2, 9], [1, 1]])
    mask = torch.arange(20)[None] < shapes.prod(dim=1)[:, None]
    with torch.no_grad():
        out = stock(
            input_ids=texts(),
            pixel_values=flat,
            pixel_attention_mask=mask.int(),
            spatial_shapes=shapes,
        )
    _, probabilities = scores(folder, [Group((flat, shapes), mask)])
    torch.testing.assert_close(probabilities, out.logits_per_image.sigmoid(), atol=2e-5, rtol=0)


def test_scalars_without_an_axis_are_read(tiny_siglip: Path, tmp_path: Path) -> None:
    """open_clip writes them so."""

    def flatten(tensors: dict[str, Tensor]) -> None:
        tensors["logit_bias"] = tensors["logit_bias"].view(())

    model = changed(tiny_siglip, tmp_path, weights(flatten))
    ready = load_tiny(tiny_siglip, texts=True)
    said = list(embed_texts(ready.entry, texts()))
    first, second = (
        make_scorer(m, load(m, ready.plan), "abcd", said).scores(said[0])
        for m in (model, ready.model)
    )
    assert first == second
    assert first[0].cosine == pytest.approx(1, abs=1e-6)
    assert ready.plan.unused_bytes.keys() >= {"score"}


def test_a_picture_that_overflowed_has_none(tiny_siglip: Path) -> None:
    ready = load_tiny(tiny_siglip, texts=True)
    said = list(embed_texts(ready.entry, texts()))
    scorer = make_scorer(ready.model, ready.entry, "abcd", said)
    assert scorer.scores(torch.full_like(said[0], float("nan"))) == ()
