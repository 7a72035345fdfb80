"""vlmrun gives the stored numbers of transformers, timm and open_clip (tests/goldens.json)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from entries import Ready, load_tiny
from folders import model_at
from golden_cases import (
    CAPTIONERS,
    ENCODERS,
    GOLDENS,
    NEW_TOKENS,
    OPEN_CLIP,
    QUESTION,
    TASK,
    TEXT,
    TIMM,
    numbers,
    picture,
)
from seeded import random_pixels, sha256
from timm_goldens import register_trunk, write_open_clip, write_timm
from torch import Tensor

from vlmrun.job import Generation
from vlmrun.memory.workload import read_max_patches
from vlmrun.models.families import FAMILIES
from vlmrun.models.family import View
from vlmrun.tasks.caption import encode_pictures
from vlmrun.tasks.chat import Chat
from vlmrun.tasks.decode import DecodeRow, decode
from vlmrun.tasks.embed import embed_images, embed_texts
from vlmrun.tasks.patches import picture_cutter
from vlmrun.tasks.prefix import Prefix
from vlmrun.tasks.preprocess import PicturePreprocessor
from vlmrun.tasks.texts import TextPreprocessor
from vlmrun.tasks.vision import Group, squares

STORED: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))["cases"]
SCRIPT = Path(__file__).parents[1] / "scripts/make_goldens.py"
RESIDENCIES = ("100%", "0%")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("goldens")
    builds = {**ENCODERS, **CAPTIONERS}
    made = {name: build(root / str(at)) for at, (name, build) in enumerate(builds.items())}
    made |= {name: write_timm(root / name, kind) for name, kind in TIMM.items()}
    return made | {OPEN_CLIP: write_open_clip(root / OPEN_CLIP)}


def check(found: Tensor, golden: dict[str, Any], where: str) -> None:
    """Numbers within 2e-5; sums over many of them within as much of their size."""
    mine = numbers(found)
    assert mine.keys() == golden.keys()
    assert mine["shape"] == golden["shape"], where
    assert mine["first"] == pytest.approx(golden["first"], rel=0, abs=2e-5), where
    for name in "norm", "sum":
        assert mine[name] == pytest.approx(golden[name], rel=2e-5), (where, name)


def seen_by(ready: Ready) -> Group:
    """The picture as the model's tower takes it."""
    vision = ready.model.architecture.vision
    assert vision is not None
    most = read_max_patches(ready.model) if vision.naflex else None
    return picture_cutter(ready.model, View(max_patches=most))(picture())


def embedded(ready: Ready, group: Group, kind: str) -> Tensor:
    [vector] = embed_images(ready.entry, ready.model.architecture, [group], kind)
    return vector


def check_pictures(folder: Path, resident: str, golden: dict[str, Any], pixels: Any = None) -> None:
    """Every kind of output that is stored; of other pixels than the picture's, where given."""
    for kind in golden.keys() & {"pooled", "last-hidden"}:
        ready = load_tiny(folder, resident=resident, kind=kind)
        group = seen_by(ready) if pixels is None else next(squares(pixels))
        check(embedded(ready, group, kind), golden[kind], kind)


@pytest.mark.parametrize("resident", RESIDENCIES)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(folders: dict[str, Path], name: str, resident: str) -> None:
    folder, golden = folders[name], STORED[name]
    texts = "text" in golden
    ready = load_tiny(folder, resident=resident, texts=texts)
    assert sha256([seen_by(ready).inputs[0][0]]) == golden["pixels"]
    check_pictures(folder, resident, golden)
    if texts:
        ids, _ = TextPreprocessor(ready.model).tokens([TEXT])
        assert ids[0].tolist() == golden["text ids"]
        check(embed_texts(ready.entry, ids)[0], golden["text"], "text")


@pytest.mark.parametrize("resident", RESIDENCIES)
@pytest.mark.parametrize("name", CAPTIONERS)
def test_captioners(folders: dict[str, Path], name: str, resident: str) -> None:
    golden = STORED[name]
    ready = load_tiny(folders[name], resident=resident, new_tokens=NEW_TOKENS)
    pictures = PicturePreprocessor(ready.model).pictures([picture()])
    assert sha256([pictures.pixel_values]) == golden["pixels"]
    [features] = encode_pictures(ready.entry, ready.model.architecture, [pictures])
    check(features, golden["features"], "features")
    prefixed = ready.model.family.prompt_style == "prefix"
    asking = Prefix(ready.model) if prefixed else Chat(ready.model)
    ids = asking.input_ids(TASK if prefixed else QUESTION, pictures.tokens)
    assert list(ids) == golden["prompt"]
    decoder = ready.model.architecture.decoder
    assert decoder is not None
    [answer] = decode(
        ready.entry,
        decoder,
        [DecodeRow(ids, features, seed=0)],
        vocabulary=asking.vocabulary,
        generation=Generation(max_new_tokens=NEW_TOKENS),
    )
    assert answer.tokens == golden["answer"]


@pytest.mark.parametrize("resident", RESIDENCIES)
@pytest.mark.parametrize("name", TIMM)
def test_timm_towers(folders: dict[str, Path], name: str, resident: str) -> None:
    golden = STORED[name]
    [pixels] = PicturePreprocessor(model_at(folders[name])).pixels([picture()])
    levels = ((pixels / 2 + 0.5) * 255).round().to(torch.uint8)
    assert sha256([levels]) == golden["levels"]
    check_pictures(folders[name], resident, golden, random_pixels(28, 28))


@pytest.mark.parametrize("resident", RESIDENCIES)
def test_open_clip(
    folders: dict[str, Path], resident: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_trunk(monkeypatch)
    golden = STORED[OPEN_CLIP]
    ready = load_tiny(folders[OPEN_CLIP], resident=resident, texts=True)
    [pixels] = PicturePreprocessor(ready.model).pixels([picture()])
    assert sha256([pixels]) == golden["pixels"]
    check_pictures(folders[OPEN_CLIP], resident, golden, random_pixels(28, 28))
    [vector] = embed_texts(ready.entry, torch.tensor([golden["text ids"]]))
    check(vector, golden["text"], "text")


def test_every_family_has_a_golden(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_trunk(monkeypatch)
    assert folders.keys() == STORED.keys()
    covered = {model_at(folder).family.name for folder in folders.values()}
    assert covered == {family.name for family in FAMILIES}


@pytest.mark.slow
def test_the_script_still_writes_these_numbers() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
