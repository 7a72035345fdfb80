"""SigLIP 2 NaFlex: pictures of any shape, the values of stock transformers at every residency."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from entries import Ready, load_tiny
from folders import changed, model_at, picture, setting
from tiny_naflex import MAX_PATCHES, build_naflex
from torch import Tensor
from transformers import Siglip2Model, Siglip2VisionModel
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from vlmrun.errors import CheckpointError, VlmrunError
from vlmrun.models.companions import check_companions
from vlmrun.models.family import View
from vlmrun.tasks.embed import embed_images, embed_texts, unit_length
from vlmrun.tasks.patches import picture_cutter
from vlmrun.tasks.texts import TextPreprocessor
from vlmrun.tasks.vision import Group, joined

SIZES = ((60, 40), (1, 1), (16, 16), (1000, 10), (10, 4000), (28, 28), (333, 500))
KINDS = ("pooled", "last-hidden", "hidden:-2", "hidden:0")


@pytest.fixture(scope="module")
def naflex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_naflex(tmp_path_factory.mktemp("naflex"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_naflex(tmp_path_factory.mktemp("naflex_vision"), alone=True)


@pytest.fixture(scope="module")
def stock(naflex: Path) -> Siglip2Model:
    return Siglip2Model.from_pretrained(naflex, dtype=torch.float32).eval()


def processed(folder: Path, **more: Any) -> dict[str, Tensor]:
    images = [picture(*size) for size in SIZES]
    return dict(
        Siglip2ImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt", **more)
    )


def groups_of(folder: Path, most: int = MAX_PATCHES) -> list[Group]:
    cut = picture_cutter(model_at(folder), View(max_patches=most))
    return list(joined(cut(picture(*size)) for size in SIZES))


def run(folder: Path, groups: list[Group], kind: str, **options: Any) -> Tensor:
    ready = load_tiny(folder, kind=kind, **options)
    return run_ready(ready, groups, kind)


def run_ready(ready: Ready, groups: list[Group], kind: str) -> Tensor:
    return torch.stack(embed_images(ready.entry, ready.model.architecture, groups, kind))


@torch.no_grad()
def stock_vision(stock: Siglip2VisionModel, kind: str, inputs: dict[str, Tensor]) -> Tensor:
    """Stock's output with the vectors of padding set to zero."""
    out = stock(**inputs, output_hidden_states=True)
    if kind == "pooled":
        return out.pooler_output
    last = kind == "last-hidden"
    states = out.last_hidden_state if last else out.hidden_states[int(kind.split(":")[1])]
    return states * inputs["pixel_attention_mask"][..., None]


@pytest.mark.parametrize("most", [MAX_PATCHES, 5, 1])
def test_patches_equal_the_stock_image_processor(naflex: Path, most: int) -> None:
    expected = processed(naflex, max_num_patches=most)
    groups = groups_of(naflex, most)
    pixels, shapes = (torch.cat(parts) for parts in zip(*(g.inputs for g in groups), strict=True))
    masks = torch.cat([group.mask for group in groups if group.mask is not None])
    assert pixels.dtype == torch.float32
    assert torch.equal(pixels, expected["pixel_values"])
    assert torch.equal(shapes, expected["spatial_shapes"])
    assert torch.equal(masks.int(), expected["pixel_attention_mask"].int())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [MAX_PATCHES, 9])
def test_pictures_equal_stock(naflex: Path, stock: Siglip2Model, kind: str, most: int) -> None:
    found = run(naflex, groups_of(naflex, most), kind, resident="50%")
    inputs = processed(naflex, max_num_patches=most)
    theirs = stock_vision(stock.vision_model, kind, inputs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["pooled", "last-hidden"])
def test_a_tower_alone_equals_stock(alone: Path, kind: str) -> None:
    stock = Siglip2VisionModel.from_pretrained(alone, dtype=torch.float32).eval()
    found = run(alone, groups_of(alone), kind, resident="25%")
    theirs = stock_vision(stock, kind, processed(alone))
    torch.testing.assert_close(found, theirs, atol=2e-5, rtol=0)


def test_texts_equal_stock(naflex: Path, stock: Siglip2Model) -> None:
    ids = torch.randint(2, 200, (3, 16), generator=torch.Generator().manual_seed(8))
    ready = load_tiny(naflex, resident="50%", texts=True)
    with torch.no_grad():
        theirs = stock.text_model(input_ids=ids).pooler_output
    torch.testing.assert_close(embed_texts(ready.entry, ids), theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_residency_never_changes_the_bits(naflex: Path, dtype: str, compute: str) -> None:
    groups = groups_of(naflex)
    for kind in ("pooled", "hidden:-2"):
        whole, *parts = (
            run(naflex, groups, kind, resident=resident, dtype=dtype, compute=compute)
            for resident in ("100%", "50%", "0%")
        )
        assert torch.isfinite(whole).all()
        assert all(torch.equal(whole, part) for part in parts)


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_padding_is_not_seen(naflex: Path, compute: str) -> None:
    """Whatever lies in it, whoever is beside it."""
    ready = load_tiny(naflex, compute=compute)
    last = load_tiny(naflex, compute=compute, kind="last-hidden")
    for size in SIZES:
        [group] = joined(
            [picture_cutter(model_at(naflex), View(max_patches=MAX_PATCHES))(picture(*size))]
        )
        pixels, shapes = group.inputs
        assert group.mask is not None
        noisy = torch.where(group.mask[..., None], pixels, torch.full_like(pixels, 7.0))
        changed = replace(group, inputs=(noisy, shapes))
        for model, kind in ((ready, "pooled"), (last, "last-hidden")):
            assert torch.equal(run_ready(model, [group], kind), run_ready(model, [changed], kind))


@pytest.mark.parametrize("kind", ["pooled", "last-hidden"])
def test_backends_agree(naflex: Path, kind: str) -> None:
    """Each takes the mask in its own form; none is a full attention of padding."""
    ready, groups = load_tiny(naflex, kind=kind), groups_of(naflex)
    found = {}
    for backend in ("eager", "sdpa"):
        with ready.entry.use("vision") as module:
            module.get_submodule("vision_model").config._attn_implementation = backend
        found[backend] = run_ready(ready, groups, kind)
    assert not torch.equal(found["eager"], found["sdpa"])
    torch.testing.assert_close(found["eager"], found["sdpa"], atol=2e-5, rtol=0)


def test_halves_are_near(naflex: Path) -> None:
    groups = groups_of(naflex)
    exact = run(naflex, groups, "pooled")
    for compute in ("bfloat16", "float16"):
        found = run(naflex, groups, "pooled", dtype="bfloat16", compute=compute)
        assert torch.cosine_similarity(exact, found).min() > 0.995


def test_padding_of_unit_length_stays_zero(naflex: Path) -> None:
    found = unit_length(run(naflex, groups_of(naflex), "last-hidden"))
    own = torch.cat([group.mask for group in groups_of(naflex) if group.mask is not None])
    torch.testing.assert_close(found.norm(dim=-1), own.float())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"image_mean": None}, "does not say image_mean"),
        ({"resample": None}, "does not say resample"),
        ({"patch_size": 8}, "patch_size is 8, and config.json's 7"),
        ({"patch_size": None}, "patch_size is 16, and config.json's 7"),
        ({"image_processor_type": "SiglipImageProcessor"}, "is of a SiglipImageProcessor"),
        ({"do_resize": False}, "does not scale"),
        ({"image_std": [0.5, 0.0, 0.5]}, "finite"),
        ({"resample": 77}, "resample is 77, no filter"),
        ({"image_std": "no"}, "cannot be read"),
    ],
)
def test_settings_that_cannot_be(
    naflex: Path, tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    model = changed(naflex, tmp_path, setting("preprocessor_config.json", **values))
    with pytest.raises(CheckpointError, match=words) as caught:
        picture_cutter(model, View(max_patches=MAX_PATCHES))
    assert isinstance(caught.value, VlmrunError)
    assert caught.value.hint


def test_a_tokenizer_without_a_class_is_siglip2s(naflex: Path, tmp_path: Path) -> None:
    model = changed(naflex, tmp_path, setting("tokenizer_config.json", tokenizer_class=None))
    check_companions(model, images=True, texts=True)
    ids, _ = TextPreprocessor(model).tokens(["A red FOX"])
    expected, _ = TextPreprocessor(model_at(naflex)).tokens(["a red fox"])
    assert torch.equal(ids, expected)
