"""Damaged tokenizers: one error that says so, in Python or in Rust, before any row."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import Change, changed, model_at, setting
from gemma_tokenizer import gemma
from transformers import AutoTokenizer

from vlmrun.errors import CheckpointError
from vlmrun.tasks.chat import Chat
from vlmrun.tasks.texts import TextPreprocessor
from vlmrun.tasks.tokenizer import damage_told

LONG = "a quick brown fox jumps over the lazy dog and does so once more today"


def damaged(edit: Callable[[dict[str, Any]], object]) -> Change:
    """An edit of tokenizer.json."""

    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        found = json.loads(path.read_text())
        edit(found)
        path.write_text(json.dumps(found))

    return change


def without_specials(found: dict[str, Any]) -> None:
    """`tokenizers` panics when it looks one up: that is no Exception of Python's."""
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}]
    found["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": pieces,
        "special_tokens": {"x": {"id": "x", "ids": [7], "tokens": []}},
    }


@pytest.mark.parametrize(
    "change",
    [
        damaged(without_specials),
        damaged(lambda found: found.update(post_processor={"type": "TemplateProcessing"})),
    ],
    ids=["panic", "half a processor"],
)
def test_a_damaged_tokenizer_of_texts(tiny_siglip2: Path, tmp_path: Path, change: Change) -> None:
    with pytest.raises(CheckpointError, match="tokenizer") as caught:
        TextPreprocessor(changed(tiny_siglip2, tmp_path, change))
    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("value", [[], ["x"], [1]], ids=str)
@pytest.mark.parametrize("fixture", ["tiny_siglip", "tiny_siglip2"])
def test_names_of_inputs_are_not_needed(
    fixture: str, tmp_path: Path, request: pytest.FixtureRequest, value: list[object]
) -> None:
    folder = request.getfixturevalue(fixture)
    model = changed(folder, tmp_path, setting("tokenizer_config.json", model_input_names=value))
    rows, _ = TextPreprocessor(model).tokens(["a fox"])
    assert torch.equal(rows, TextPreprocessor(model_at(folder)).tokens(["a fox"])[0])


def test_a_template_of_half_a_character(tiny_onevision: Path, tmp_path: Path) -> None:
    """Written by the template itself, it reaches the tokenizer."""

    def change(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text("<image>{{ '\\ud800' }}")

    with pytest.raises(CheckpointError, match="the tokenizer fails"):
        Chat(changed(tiny_onevision, tmp_path, change)).input_ids("?", (20,))


def test_an_interrupt_is_no_damage() -> None:
    with pytest.raises(KeyboardInterrupt), damage_told("never"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("side", ["left", "right"])
def test_sides_that_a_file_names_are_kept(tiny_siglip2: Path, tmp_path: Path, side: str) -> None:
    """As the stock tokenizer pads and cuts by them."""
    sides = {"padding_side": side, "truncation_side": side}
    model = changed(tiny_siglip2, tmp_path, setting("tokenizer_config.json", **sides))
    texts = ["a fox", LONG]
    rows, notes = TextPreprocessor(model).tokens(texts)
    stock = AutoTokenizer.from_pretrained(tmp_path)
    padded = {"padding": "max_length", "truncation": True, "max_length": rows.shape[1]}
    assert torch.equal(rows, stock(texts, return_tensors="pt", **padded)["input_ids"])
    assert len(notes) == 1


@pytest.mark.parametrize("value", [False, 0, None])
def test_every_way_to_keep_case(tiny_siglip2: Path, tmp_path: Path, value: object) -> None:
    def change(folder: Path) -> None:
        gemma(False)(folder)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "do_lower_case": value}))

    rows, _ = TextPreprocessor(changed(tiny_siglip2, tmp_path, change)).tokens(["A CAT", "a cat"])
    assert not torch.equal(rows[0], rows[1])
