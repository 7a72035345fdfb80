"""Faults that others reported of SigLIP, by their numbers in research: each a right value here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from commands import Command, assert_refused
from entries import load_tiny
from folders import changed, copied, model_at, picture, setting
from gemma_tokenizer import gemma
from PIL import Image
from safetensors.torch import load_file
from tiny import build_siglip
from tiny_naflex import MAX_PATCHES, build_naflex
from torch import Tensor
from torch.nn import functional
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

import vlmrun as vlmrun_package
from vlmrun.errors import CheckpointError
from vlmrun.models.families import family_of
from vlmrun.models.family import View
from vlmrun.nn.attention import CastMultiheadAttention
from vlmrun.nn.embedding import resampled
from vlmrun.nn.linear import CastLinear
from vlmrun.tasks.embed import embed_images, embed_texts
from vlmrun.tasks.patches import picture_cutter
from vlmrun.tasks.preprocess import PicturePreprocessor
from vlmrun.tasks.texts import TextPreprocessor
from vlmrun.tasks.vision import Group, joined, squares

DATA = Path(vlmrun_package.__file__).parent / "data"


@pytest.fixture(scope="module")
def naflex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_naflex(tmp_path_factory.mktemp("naflex"))


def pixels(count: int = 2) -> Tensor:
    return torch.rand(count, 3, 28, 28, generator=torch.Generator().manual_seed(7)) * 2 - 1


def pooled(folder: Path, groups: list[Group], **options: Any) -> Tensor:
    ready = load_tiny(folder, **options)
    return torch.stack(embed_images(ready.entry, ready.model.architecture, groups, "pooled"))


@torch.no_grad()
def stock_pooled(folder: Path, seen: Tensor) -> Tensor:
    stock = transformers.SiglipModel.from_pretrained(folder, dtype=torch.float32).eval()
    return stock.vision_model(seen).pooler_output


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_f04_the_pooling_head_is_whole_at_every_budget(tiny_siglip: Path) -> None:
    whole = pooled(tiny_siglip, squares(pixels()))
    for share in range(0, 100, 15):
        assert torch.equal(pooled(tiny_siglip, squares(pixels()), resident=f"{share}%"), whole)


def test_f05_the_output_projection_nobody_calls_is_brought_in(tiny_siglip: Path) -> None:
    found = pooled(tiny_siglip, squares(pixels()), resident="0%")
    close(found, stock_pooled(tiny_siglip, pixels()))


def test_f06_the_head_computes_in_one_dtype_whatever_is_stored(tmp_path: Path) -> None:
    folder = build_siglip(tmp_path, dtype="bfloat16")
    ready = load_tiny(folder)
    with ready.entry.bound("vision.head") as head:
        assert type(head.attention) is CastMultiheadAttention
        assert type(head.attention.out_proj) is CastLinear
        assert head.attention.out_proj.weight.dtype == torch.bfloat16
    close(pooled(folder, squares(pixels())), stock_pooled(folder, pixels()))


def test_f15_halves_run_on_the_cpu(tmp_path: Path) -> None:
    """No kernel is asked to mix dtypes, or for one that the CPU lacks."""
    folder = build_siglip(tmp_path, dtype="float16")
    for compute in ("float32", "float16", "bfloat16"):
        found = pooled(folder, squares(pixels()), resident="50%", compute=compute)
        cosine = torch.cosine_similarity(found, stock_pooled(folder, pixels()))
        assert cosine.min() > (0.999999 if compute == "float32" else 0.995), compute


def test_f17_the_class_follows_from_the_model_type_not_the_name(
    tiny_siglip2: Path, naflex: Path, tmp_path: Path
) -> None:
    named = setting("config.json", _name_or_path="google/siglip2-so400m-patch14-384")
    fixed = changed(tiny_siglip2, tmp_path / "google--siglip2-base-patch16-naflex", named)
    assert fixed.family.model_class == "SiglipModel"
    assert model_at(naflex).family.model_class == "Siglip2Model"
    assert family_of({"model_type": "siglip2_vision_model"}).model_class == "Siglip2VisionModel"
    text, vision = (
        json.loads((naflex / "config.json").read_text())[f"{part}_config"]
        for part in ("text", "vision")
    )
    claimed = setting("config.json", model_type="siglip2", text_config=text, vision_config=vision)
    with pytest.raises(CheckpointError, match="patch_embedding"):
        changed(tiny_siglip2, tmp_path / "claimed", claimed)


def test_f20_a_picture_is_the_pooled_field_of_what_stock_returns(
    tiny_siglip: Path, naflex: Path
) -> None:
    stock = transformers.SiglipModel.from_pretrained(tiny_siglip).eval()
    group = naflex_group(naflex, (70, 30))
    flexible = transformers.Siglip2Model.from_pretrained(naflex).eval()
    assert group.mask is not None
    with torch.no_grad():
        fixed = stock.get_image_features(pixel_values=pixels())
        other = flexible.get_image_features(group.inputs[0], group.mask.int(), group.inputs[1])
    assert not isinstance(fixed, Tensor)
    close(pooled(tiny_siglip, squares(pixels())), fixed.pooler_output)
    close(pooled(naflex, [group]), other.pooler_output)


def naflex_group(folder: Path, size: tuple[int, int]) -> Group:
    cut = picture_cutter(model_at(folder), View(max_patches=MAX_PATCHES))
    return cut(picture(*size))


@torch.no_grad()
def test_f25_positions_of_naflex_are_resized_bilinearly(naflex: Path) -> None:
    groups = list(joined(naflex_group(naflex, size) for size in [(90, 30), (20, 200), (31, 28)]))
    [group] = groups
    stock = transformers.Siglip2Model.from_pretrained(naflex).eval()
    assert group.mask is not None
    out = stock.get_image_features(group.inputs[0], group.mask.int(), group.inputs[1])
    assert torch.cosine_similarity(pooled(naflex, groups), out.pooler_output).min() > 0.9999
    table = stock.vision_model.embeddings.position_embedding.weight
    embed = stock.vision_model.embeddings.resize_positional_embeddings
    expected = embed(table.view(4, 4, -1), torch.tensor([[3, 8]]), max_length=24)[0]
    close(resampled(table, (3, 8), "bilinear"), expected)
    assert (resampled(table, (3, 8), "bicubic") - expected).abs().max() > 1e-3


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_f27_antialiasing_runs_in_float32(tiny_siglip: Path, compute: str) -> None:
    """torch has it for no other dtype on the CPU; stored and computed as halves, both."""
    seen = torch.rand(1, 3, 35, 63, generator=torch.Generator().manual_seed(3)) * 2 - 1
    exact = pooled(tiny_siglip, [Group((seen,))])
    found = pooled(tiny_siglip, [Group((seen,))], dtype=compute, compute=compute)
    assert torch.cosine_similarity(found, exact).min() > 0.995


@torch.no_grad()
def test_f29_texts_are_padded_to_the_position_limit(tiny_siglip: Path) -> None:
    ids, _ = TextPreprocessor(model_at(tiny_siglip)).tokens(["a red apple"])
    found = embed_texts(load_tiny(tiny_siglip, texts=True).entry, ids)
    stock = transformers.SiglipModel.from_pretrained(tiny_siglip).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_siglip)
    padded, bare = (
        stock.get_text_features(**tokenizer("a red apple", return_tensors="pt", **how))
        for how in ({"padding": "max_length"}, {})
    )
    close(found, padded.pooler_output)
    assert torch.cosine_similarity(found, bare.pooler_output) < 0.99


def test_f30_version_2_hears_lower_case(naflex: Path, tiny_siglip2: Path, tmp_path: Path) -> None:
    """The hub's files come with a tokenizer that keeps case (Gemma's)."""
    for folder in (naflex, tiny_siglip2):
        model = changed(folder, tmp_path / folder.name, gemma(None))
        ids, _ = TextPreprocessor(model).tokens(["A CAT", "a cat", "A Cat"])
        assert torch.equal(ids[0], ids[1])
        assert torch.equal(ids[0], ids[2])
        entry = load_tiny(tmp_path / folder.name, texts=True).entry
        vectors = embed_texts(entry, ids)
        assert torch.equal(vectors[0], vectors[1])


@torch.no_grad()
def test_f31_the_last_position_is_pooled_whatever_it_holds(tiny_siglip2: Path) -> None:
    ids, notes = TextPreprocessor(model_at(tiny_siglip2)).tokens(["a red fox", "fox " * 200])
    assert ids[:, -1].tolist() == [0, 1]  # padding, the end of a text
    assert len(notes) == 1
    stock = transformers.SiglipModel.from_pretrained(tiny_siglip2).eval().text_model
    states = stock(input_ids=ids).last_hidden_state
    found = embed_texts(load_tiny(tiny_siglip2, texts=True).entry, ids)
    close(found, stock.head(states[:, -1]))
    at_end = stock.head(states[0, ids[0].tolist().index(1)])
    assert torch.cosine_similarity(found[0], at_end, dim=0) < 0.999


def test_f34_texts_without_their_tokenizer_are_refused_by_its_name(
    vlmrun: Command, tiny_siglip: Path, tmp_path: Path
) -> None:
    def fast_only(folder: Path) -> None:
        (folder / "spiece.model").rename(folder / "tokenizer.json")

    folder = copied(tiny_siglip, tmp_path / "fast", fast_only)
    refused = vlmrun("embed", "-m", folder, "-t", "a cat")
    assert_refused(refused, "spiece.model is missing, which a SiglipTokenizer reads")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tiny_siglip / "spiece.model"))
    ids, _ = TextPreprocessor(model_at(tiny_siglip)).tokens(["A red, apple!"])
    own = [*pieces.encode("a red apple"), 1]
    assert ids[0].tolist() == own + [1] * (16 - len(own))


def test_f35_a_row_tells_cosine_and_probability_apart(vlmrun: Command) -> None:
    """A small probability is no bug: it may be that of the best of all texts."""
    texts = ("an elephant", "a strawberry", "an elephant")
    argv = [word for text in texts for word in ("-t", text)]
    picture = DATA / "pictures/elephant.png"
    rows = vlmrun("embed", "-m", "demo-siglip", "--scores", picture, *argv).rows
    scores, vectors = rows[0]["scores"], torch.tensor([row["embedding"] for row in rows])
    cosines = vectors[1:] @ vectors[0]
    learned = load_file(DATA / "demo-siglip/model.safetensors")
    logits = cosines * learned["logit_scale"].float().exp() + learned["logit_bias"].float()
    assert [score["cosine"] for score in scores] == pytest.approx(cosines.tolist(), abs=1e-5)
    found = [score["probability"] for score in scores]
    assert found == pytest.approx(logits.sigmoid().tolist(), abs=1e-4)
    assert found.index(max(found)) == 0
    assert found[2] == found[0]  # the two do not share a probability of 1


def test_f36_pictures_are_squashed_whole(tiny_siglip: Path) -> None:
    """What lies at the edges of a wide picture counts; a crop would not see it."""
    image = picture(200, 100)
    edges = np.asarray(image).copy()
    edges[:, :40] = 255
    found = PicturePreprocessor(model_at(tiny_siglip)).pixels([image, Image.fromarray(edges)])
    processor = SiglipImageProcessorPil.from_pretrained(tiny_siglip)
    assert torch.equal(found[:1], processor([image], return_tensors="pt")["pixel_values"])
    assert (found[0] - found[1])[:, :, :5].abs().max() > 0.5
    first, second = pooled(tiny_siglip, squares(found))
    assert functional.cosine_similarity(first, second, dim=0) < 0.999
