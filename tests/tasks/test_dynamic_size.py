"""Pictures at their own size: what timm makes of them (`dynamic_img_size`, `dynamic_img_pad`)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from entries import load_tiny
from folders import model_at, picture
from seeded import random_pixels
from timm_goldens import GOLDENS, load_stock, write_timm
from torch import Tensor
from torch.nn import functional

from vlmrun.models.family import View
from vlmrun.models.inferred import picture_settings
from vlmrun.models.siglip import SIGLIP_VISION
from vlmrun.models.timm import TIMM_FUSED, TIMM_IGNORED, TIMM_RENAMES, translate_timm
from vlmrun.tasks.embed import embed_images
from vlmrun.tasks.patches import picture_cutter
from vlmrun.tasks.vision import Group, joined

TIMM = replace(SIGLIP_VISION, renames=TIMM_RENAMES, fused=TIMM_FUSED, ignored=TIMM_IGNORED)
GOLDEN: dict[str, Any] = GOLDENS["models"]["map"]
PATCH = 7


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The goldens' weights in transformers' spelling."""
    folder = tmp_path_factory.mktemp("tower")
    settings = translate_timm(GOLDEN["config"])
    own = {k: v for k, v in settings.items() if k not in ("model_type", "image_processor")}
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**own))
    load_stock(model, TIMM, GOLDEN["weights"])
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(picture_settings(28)))
    return folder


def padded(height: int, width: int) -> Tensor:
    return functional.pad(random_pixels(height, width), (0, -width % PATCH, 0, -height % PATCH))


def run(folder: Path, groups: list[Group], kind: str, **options: Any) -> list[Tensor]:
    ready = load_tiny(folder, kind=kind, **options)
    return embed_images(ready.entry, ready.model.architecture, groups, kind)


@pytest.mark.parametrize("kind", ["pooled", "last-hidden"])
@pytest.mark.parametrize("size", GOLDEN["dynamic"])
def test_equals_timm(tower: Path, size: str, kind: str) -> None:
    height, width = map(int, size.split("x"))
    [found] = run(tower, [Group((padded(height, width),))], kind, resident="50%")
    expected = torch.tensor(GOLDEN["dynamic"][size][kind])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_residency_and_company_never_change_the_result(tower: Path) -> None:
    sizes = [(30, 45), (30, 45), (70, 40), (30, 45), (28, 28)]
    groups = list(joined(Group((padded(*size),)) for size in sizes))
    assert [len(group.inputs[0]) for group in groups] == [2, 1, 1, 1]
    whole = run(tower, groups, "pooled", resident="100%")
    for resident in ("50%", "0%"):
        assert all(map(torch.equal, whole, run(tower, groups, "pooled", resident=resident)))
    torch.testing.assert_close(whole[0], whole[3], rtol=0, atol=1e-6)


def test_pictures_are_neither_scaled_nor_cut(tower: Path) -> None:
    """(72, 31) pixels become (77, 35): the levels as they are, zeros on the right and below."""
    cut = picture_cutter(model_at(tower), View(dynamic=True))
    image = picture(72, 31)
    [pixels] = cut(image).inputs
    assert pixels.shape == (1, 3, 35, 77)
    levels = torch.tensor(list(image.get_flattened_data())).view(31, 72, 3).permute(2, 0, 1)
    torch.testing.assert_close(pixels[0, :, :31, :72], (levels / 255 - 0.5) / 0.5)
    assert not pixels[..., 31:, :].any()
    assert not pixels[..., 72:].any()


def test_a_folder_of_timms_own_is_shown_whole_pictures(tmp_path: Path) -> None:
    """Its crop is for squares; levels and patches are all that counts here."""
    folder, image = write_timm(tmp_path, "map"), picture(45, 30)
    [group] = [picture_cutter(model_at(folder), View(dynamic=True))(image)]
    assert group.inputs[0].shape == (1, 3, 35, 49)
    random = [Group((padded(30, 45),))]
    [found] = run(folder, random, "pooled", resident="0%")
    expected = torch.tensor(GOLDEN["dynamic"]["30x45"]["pooled"])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_halves_resample_in_float32(tower: Path, compute: str) -> None:
    groups = [Group((padded(30, 45),))]
    [exact], [found] = (
        run(tower, groups, "pooled", dtype="bfloat16", compute=c) for c in ("float32", compute)
    )
    assert torch.cosine_similarity(exact, found, dim=0) > 0.995
