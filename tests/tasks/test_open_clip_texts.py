"""Texts of open_clip's folders become the ids, and with pictures the scores, that it makes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from commands import Command
from folders import Change, model_at, picture, setting
from timm_goldens import GOLDENS, load_stock, register_trunk, write_open_clip
from tiny_tokenizers import write_lower_case_tokenizer

from vlmrun.models.open_clip import translate_open_clip
from vlmrun.tasks.texts import TextPreprocessor

CLEANED: list[list[str]] = GOLDENS["texts"]["canonicalize"]  # texts, and what open_clip makes
LONG = "the quick brown fox jumps over the lazy dog and two cats sleep under a table"
FILE = "tokenizer_config.json"
TOKENIZERS: dict[str, Change] = {
    "padded on the right": lambda folder: None,
    # SigLIP 2's class, which pads on the left
    "padded as its class does": setting(FILE, tokenizer_class="GemmaTokenizer", padding_side=None),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    register_trunk(monkeypatch)
    write_lower_case_tokenizer(write_open_clip(tmp_path / "model"))
    return tmp_path / "model"


def stock_ids(folder: Path, cleaned: list[str]) -> torch.Tensor:
    """As open_clip 3.3.0's HFTokenizer calls the tokenizer: [texts, 16]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    length: dict[str, Any] = {"max_length": 16, "padding": "max_length", "truncation": True}
    return torch.tensor(tokenizer(cleaned, **length).input_ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_are_those_of_open_clip(folder: Path, kind: str) -> None:
    TOKENIZERS[kind](folder)
    texts, cleaned = [[*each, LONG] for each in zip(*CLEANED, strict=True)]
    found, notes = TextPreprocessor(model_at(folder)).tokens(texts)
    assert torch.equal(found, stock_ids(folder, cleaned))
    assert bool((found[-2] == 0)[0]) == (kind != "padded on the right")  # the empty text
    assert any(repr(LONG[:39])[1:-1] in note for note in notes)


def test_vectors_and_scores_from_the_command_line(
    vlmrun: Command, folder: Path, tmp_path: Path
) -> None:
    image, texts = picture(60, 40), [text for text, _ in CLEANED if text]
    image.save(tmp_path / "a.png")
    settings = translate_open_clip(GOLDENS["open_clip"]["config"])
    towers = {name: settings[name] for name in ("vision_config", "text_config")}
    stock = transformers.SiglipModel(transformers.SiglipConfig(**towers)).eval()
    load_stock(stock, model_at(folder).family, GOLDENS["open_clip"]["weights"])
    levels = np.asarray(image.resize((28, 28), 3), dtype=np.float32).transpose(2, 0, 1)
    ids = stock_ids(folder, [cleaned for text, cleaned in CLEANED if text])
    with torch.inference_mode():
        pixels = torch.from_numpy((levels / 255 - 0.5) / 0.5)[None]
        expected = stock(input_ids=ids, pixel_values=pixels)

    output = tmp_path / "v.npy"
    argv = [part for text in texts for part in ("-t", text)]
    done = vlmrun("embed", "-m", folder, tmp_path / "a.png", *argv, "--scores", "-o", output)
    assert done.code == 0
    vectors = torch.cat([expected.image_embeds, expected.text_embeds])  # of unit length
    np.testing.assert_allclose(np.load(output), vectors, rtol=0, atol=1e-5)
    row = json.loads((tmp_path / "v.npy.jsonl").read_text().splitlines()[0])
    found = [score["probability"] for score in row["scores"]]
    assert found == pytest.approx(expected.logits_per_image[0].sigmoid().tolist(), abs=1e-5)
