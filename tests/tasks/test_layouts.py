"""timm's and open_clip's files give the vectors that timm and open_clip give."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entries import RESIDENCIES, load_tiny
from folders import model_at
from PIL import Image
from seeded import random_pixels
from timm_goldens import GOLDENS, register_trunk, write_open_clip, write_timm

import vlmrun
from vlmrun.errors import UnsupportedModel
from vlmrun.models.transforms import HALVES_ROUNDED, UNRUN, picture_settings
from vlmrun.tasks.crops import Crops
from vlmrun.tasks.embed import embed_images, embed_texts
from vlmrun.tasks.preprocess import PicturePreprocessor
from vlmrun.tasks.vision import squares

PICTURE = Path(vlmrun.__file__).parent / "data/pictures/elephant.png"
KINDS = ("pooled", "last-hidden", "hidden:-2")


def near(found: torch.Tensor, golden: Any) -> None:
    torch.testing.assert_close(found, torch.tensor(golden), rtol=0, atol=1e-5)


def vector(folder: Path, resident: str, kind: str, texts: bool = False) -> torch.Tensor:
    ready = load_tiny(folder, resident=resident, kind=kind, texts=texts)
    groups = list(squares(random_pixels(28, 28)))
    [found] = embed_images(ready.entry, ready.model.architecture, groups, kind)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GOLDENS["models"])
def test_timm_towers(tmp_path: Path, name: str, kind: str) -> None:
    folder, golden = write_timm(tmp_path, name), GOLDENS["models"][name]
    if name == "gap" and kind == "pooled":
        with pytest.raises(UnsupportedModel, match="no pooling head"):
            load_tiny(folder, kind=kind)
        return
    found = [vector(folder, resident, kind) for resident in RESIDENCIES]
    near(found[0], golden[kind])
    assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.parametrize("resident", ["100%", "0%"])
def test_open_clip_pictures_and_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: str
) -> None:
    register_trunk(monkeypatch)
    folder, golden = write_open_clip(tmp_path), GOLDENS["open_clip"]
    near(vector(folder, resident, "pooled", texts=True), golden["image"])
    ready = load_tiny(folder, resident=resident, texts=True)
    near(embed_texts(ready.entry, torch.tensor(golden["ids"])), golden["text"])


def test_an_open_clip_text_tower_without_projection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """so400m i18n's: what is pooled is the vector."""
    register_trunk(monkeypatch)
    golden = GOLDENS["open_clip"]
    config = golden["config"]
    text = {**config["model_cfg"]["text_cfg"], "proj_type": "none", "width": 48}
    model = {**config["model_cfg"], "text_cfg": text}
    weights = {
        key: [48 if n == 40 else 144 if n == 120 else n for n in shape]
        for key, shape in golden["weights"].items()
        if "text_projection" not in key
    }
    weights = {
        k: [67 if n == 56 and k.startswith("text") else n for n in s] for k, s in weights.items()
    }
    monkeypatch.setitem(
        GOLDENS, "open_clip", {"config": {**config, "model_cfg": model}, "weights": weights}
    )
    ready = load_tiny(write_open_clip(tmp_path), texts=True)
    ids = torch.tensor(golden["ids"])
    found = embed_texts(ready.entry, ids)
    assert found.shape == (len(ids), 48)
    with ready.entry.use("text") as module:
        tower = module.get_submodule("text_model")
        normed = tower(input_ids=ids).last_hidden_state[:, -1]
    torch.testing.assert_close(found, normed)


@pytest.mark.parametrize("at", range(len(GOLDENS["crops"])))
def test_crops_are_timms_pixel_for_pixel(at: int) -> None:
    golden = GOLDENS["crops"][at]
    given = {**GOLDENS["models"]["map"]["config"]["pretrained_cfg"], **golden}
    if (golden["crop_mode"], golden["crop_pct"]) == ("squash", 0.9):
        assert "crop_mode is 'squash'" in picture_settings(given, golden["side"])[UNRUN]
        return
    settings = picture_settings(given, golden["side"])
    crops = Crops(
        golden["side"],
        "centred" if settings.get("do_center_crop") else "squashed",
        settings["size"].get("shortest_edge"),
        Image.Resampling(settings["resample"]),
        (0, 0, 0),
        np.zeros((3, 256), dtype=np.float32),
        halves_rounded=bool(settings.get(HALVES_ROUNDED)),
    )
    found = crops.whole(Image.open(PICTURE).convert("RGB").crop(golden["box"]))
    levels = np.asarray(found).transpose(2, 0, 1)
    assert hashlib.sha256(levels.tobytes()).hexdigest() == golden["sha256"]


def test_a_timm_folder_is_cropped_as_its_file_says(tmp_path: Path) -> None:
    """Most say the middle 90 %; timm does that, though SigLIP was trained on squashed pictures."""
    model = model_at(write_timm(tmp_path, "map"))
    image = Image.open(PICTURE).convert("RGB").resize((61, 43))
    edge, side = int(28 / 0.9), 28
    scaled = image.resize((int(edge * 61 / 43), edge), Image.Resampling.BICUBIC)
    left, top = round((scaled.width - side) / 2), round((scaled.height - side) / 2)
    values = np.asarray(scaled.crop((left, top, left + side, top + side)), dtype=np.float64)
    expected = torch.from_numpy(((values / 255 - 0.5) / 0.5).transpose(2, 0, 1)).float()
    [found] = PicturePreprocessor(model).pixels([image])
    torch.testing.assert_close(found, expected)
