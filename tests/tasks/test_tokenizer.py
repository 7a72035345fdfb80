"""Damaged tokenizers: one error that says so, in Python or in Rust, before any row."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command
from folders import Change, all_of, changed, copied, model_at, replaced, setting
from gemma_tokenizer import gemma
from tiny_llava import build_llava
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


def without_ids(found: dict[str, Any]) -> None:
    """As a half-written file: no text gets any token."""
    found["model"] |= {"vocab": {}, "merges": []}
    found["post_processor"] = None


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


def null_unknown(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "unk_token": None}))


def forget_unknown(found: dict[str, Any]) -> None:
    del found["model"]["vocab"]["<unk>"]
    found["added_tokens"] = [each for each in found["added_tokens"] if each["content"] != "<unk>"]


@pytest.mark.parametrize(
    ("fixture", "change"),
    [
        ("tiny_siglip", null_unknown),
        ("tiny_siglip2", all_of(gemma(True), null_unknown)),
        ("tiny_siglip2", all_of(gemma(True), damaged(forget_unknown))),
    ],
)
def test_no_token_for_what_is_unknown(
    fixture: str, change: Change, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Told before a text has such a character."""
    with pytest.raises(CheckpointError, match="the tokenizer fails: ") as caught:
        TextPreprocessor(changed(request.getfixturevalue(fixture), tmp_path, change))
    assert caught.value.hint


@pytest.mark.parametrize("value", [[], ["x"], [1]], ids=str)
@pytest.mark.parametrize("fixture", ["tiny_siglip", "tiny_siglip2"])
def test_names_of_inputs_are_not_needed(
    fixture: str, tmp_path: Path, request: pytest.FixtureRequest, value: list[object]
) -> None:
    folder = request.getfixturevalue(fixture)
    model = changed(folder, tmp_path, setting("tokenizer_config.json", model_input_names=value))
    rows, _ = TextPreprocessor(model).tokens(["a fox"])
    assert torch.equal(rows, TextPreprocessor(model_at(folder)).tokens(["a fox"])[0])


def test_damage_is_met_before_any_prompt(tmp_path: Path) -> None:
    """A decoder's tokenizer is tried where it is loaded."""
    folder = build_llava(tmp_path / "llava")
    model = changed(folder, tmp_path / "m", damaged(without_ids))
    with pytest.raises(CheckpointError, match="the tokenizer makes no ids of 'a cat"):
        Chat(model)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("<image>{{ '\\ud800' }}", "the tokenizer fails"),  # half a character
        ("{{ messages[1].content }}<image>", "the chat template fails"),
    ],
)
def test_templates_are_tried_before_any_picture(
    vlmrun: Command, tiny_onevision: Path, tmp_path: Path, template: str, words: str
) -> None:
    """No picture can be read, and that is not what is said."""
    folder = copied(
        tiny_onevision, tmp_path / "m", replaced("chat_template.jinja", template.encode())
    )
    (tmp_path / "p.png").write_bytes(b"no picture")
    told = vlmrun("caption", "-m", folder, tmp_path / "p.png", "--json")
    assert (told.code, told.out) == (1, b"")
    assert words in told.err


def test_what_rust_prints_is_no_result(
    tiny_onevision: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`tokenizers` tells standard output of a token's settings that it does not know."""
    odd = {"content": "<|endoftext|>", "id": 3}
    folder = copied(tiny_onevision, tmp_path, setting("special_tokens_map.json", unk_token=odd))
    Chat(model_at(folder))
    assert capfd.readouterr().out == ""
    AutoTokenizer.from_pretrained(folder)
    assert "unknown kwarg" in capfd.readouterr().out


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


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"padding_side": "right"}, []),
        ({}, ["padded on the right"]),
        ({"padding_side": "right", "do_lower_case": None}, ["put in lower case"]),
    ],
)
def test_what_no_file_says_of_texts_is_told_once(
    tiny_siglip2: Path, tmp_path: Path, stated: dict[str, object], words: list[str]
) -> None:
    """SigLIP 2's class pads on the left and keeps case: not what the model was trained with."""
    change = all_of(gemma(True), setting("tokenizer_config.json", **stated))
    texts = TextPreprocessor(changed(tiny_siglip2, tmp_path, change))
    rows, notes = texts.tokens(["A CAT", "a cat"])
    assert torch.equal(rows[0], rows[1])
    assert rows[0, -1] == 0
    said = [
        f"texts are {each}, as SigLIP's are: tokenizer_config.json does not say" for each in words
    ]
    assert list(notes) == said
    assert texts.tokens(["a cat"])[1] == ()
