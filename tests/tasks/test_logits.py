"""Settings of generation_config.json: the tokens of stock `generate()`, alone and in a batch."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import paligemmas
import pytest
import torch
from commands import Command, assert_refused
from entries import Prompted, Ready, load_tiny, noise, prompted, rows_of, vocabulary_of
from folders import all_of, changed, copied, model_at, setting, without
from tiny import SPECIAL
from tiny_paligemma import IMAGE, build_paligemma
from transformers import LlavaOnevisionForConditionalGeneration

from vlmrun.errors import CheckpointError
from vlmrun.job import Generation
from vlmrun.tasks.chat import Chat
from vlmrun.tasks.decode import decode
from vlmrun.tasks.prefix import Prefix

PICTURE = Path(__file__).parents[2] / "vlmrun/data/pictures/elephant.png"
NEW_TOKENS = 10
STOP = SPECIAL["<|im_end|>"]
Settings = Callable[[list[int]], dict[str, Any]]  # of the tokens that come without them
SETTINGS: dict[str, Settings] = {
    "suppress_tokens": lambda said: {"suppress_tokens": said[:2]},
    "begin_suppress_tokens": lambda said: {"begin_suppress_tokens": said[:1]},
    "bad_words_ids": lambda said: {"bad_words_ids": [said[:1], said[2:4]]},
    "sequence_bias": lambda said: {"sequence_bias": [[said[:1], -9.0], [[7], 3.0]]},
    "min_length": lambda said: {"min_length": 118, "eos_token_id": [STOP, said[2]]},
    "min_new_tokens": lambda said: {"min_new_tokens": 5, "eos_token_id": [STOP, said[2]]},
    "min_new_tokens 1": lambda said: {"min_new_tokens": 1, "eos_token_id": [STOP, said[0]]},
    "forced_eos_token_id": lambda said: {"forced_eos_token_id": 1},
    "encoder_no_repeat_ngram_size": lambda said: {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": lambda said: {"encoder_repetition_penalty": 0.3},
    "exponential_decay": lambda said: {"exponential_decay_length_penalty": (3, 4.0)},
}


@pytest.fixture(scope="module")
def ready(tiny_onevision: Path) -> Ready:
    return load_tiny(tiny_onevision, resident="60%", new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def stock(tiny_onevision: Path) -> Any:
    load = LlavaOnevisionForConditionalGeneration.from_pretrained
    return load(tiny_onevision, dtype=torch.float32)


@pytest.fixture(scope="module")
def batch(tiny_onevision: Path) -> list[Prompted]:
    model = model_at(tiny_onevision)
    return [
        prompted(model, [noise(1)], "what is in the picture?"),
        prompted(model, [], "the quick brown fox jumps over the lazy dog"),
    ]


def stock_tokens(stock: Any, prompt: Prompted, **settings: Any) -> list[int]:
    given = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **settings}
    return stock.generate(**prompt.stock, **given)[0, len(prompt.ids) :].tolist()


def our_tokens(ready: Ready, batch: list[Prompted], **settings: Any) -> list[list[int]]:
    folder, decoder = ready.model.source.folder, ready.model.architecture.decoder
    stops = settings.pop("eos_token_id", [STOP])
    vocabulary = replace(vocabulary_of(folder, **settings), stop_ids=frozenset(stops))
    generation = Generation(max_new_tokens=NEW_TOKENS)
    rows = rows_of(ready, batch)
    decoded = decode(ready.entry, decoder, rows, vocabulary=vocabulary, generation=generation)
    return [row.tokens for row in decoded]


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_followed_as_stock_does(
    name: str, ready: Ready, stock: Any, batch: list[Prompted]
) -> None:
    plain = [stock_tokens(stock, prompt) for prompt in batch]
    settings = SETTINGS[name](plain[0])
    expected = [stock_tokens(stock, prompt, **settings) for prompt in batch]
    assert our_tokens(ready, batch, **settings) == expected
    ends = {"eos_token_id": settings["eos_token_id"]} if "eos_token_id" in settings else {}
    assert expected != [stock_tokens(stock, prompt, **ends) for prompt in batch], "no effect"


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5, "forced_eos_token_id": 7},
        {"encoder_no_repeat_ngram_size": 1, "suppress_tokens": [0, 1, 2]},
        {"min_new_tokens": NEW_TOKENS, "bad_words_ids": [[9]]},
    ],
    ids=str,
)
def test_another_family_follows_its_file(settings: dict[str, Any], tmp_path: Path) -> None:
    """Read from the folder on both sides."""
    folder = build_paligemma(tmp_path / "m")
    setting("generation_config.json", **settings)(folder)
    batch = [paligemmas.ask(folder, text, noise(1)) for text in ("caption en", "what is it?")]
    expected = [paligemmas.stock_tokens(folder, prompt) for prompt in batch]
    assert paligemmas.tokens(folder, batch) == expected


@pytest.mark.parametrize("part", ["config", "text_config"])
@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 5.0}, {"forced_eos_token_id": 1}], ids=str
)
def test_settings_in_the_configuration(
    settings: dict[str, Any], part: str, tiny_onevision: Path, tmp_path: Path
) -> None:
    """Where old folders have them; a file of their own, even an empty one, takes their place."""
    config = json.loads((tiny_onevision / "config.json").read_text())
    given = settings if part == "config" else {part: config[part] | settings}
    bare = without("generation_config.json")
    folder = copied(tiny_onevision, tmp_path / "m", all_of(setting("config.json", **given), bare))
    values = {name: getattr(Chat(model_at(folder)).vocabulary.settings, name) for name in settings}
    stock = LlavaOnevisionForConditionalGeneration.from_pretrained(folder).generation_config
    assert values == settings == {name: getattr(stock, name) for name in settings}
    (folder / "generation_config.json").write_text("{}")
    own = Chat(model_at(folder)).vocabulary.settings
    assert [getattr(own, name) for name in settings] == [None]


@pytest.mark.parametrize(
    "settings",
    [
        {"suppress_tokens": "abc"},
        {"bad_words_ids": [[10**9]]},
        {"sequence_bias": [[["a"], 1.0]]},
        {"forced_eos_token_id": 10**6},
        {"begin_suppress_tokens": [[1], 2]},
        {"repetition_penalty": -1.0},
        {"no_repeat_ngram_size": 1.5},
        {"encoder_repetition_penalty": "x"},
        {"exponential_decay_length_penalty": [1]},
        {"exponential_decay_length_penalty": [5, "x"]},
        {"exponential_decay_length_penalty": ["x", 1.5]},
        {"suppress_tokens": 5},
    ],
    ids=str,
)
def test_a_setting_that_cannot_be(
    settings: dict[str, Any], tiny_onevision: Path, tmp_path: Path
) -> None:
    """Named and tried before the first picture, even what only the last token would meet."""
    (name,) = settings
    change = setting("generation_config.json", temperature=0.5, **settings)
    model = changed(tiny_onevision, tmp_path / "m", change)
    with pytest.raises(CheckpointError, match=rf"^generation_config\.json: {name} is .*: \S"):
        Chat(model)


@pytest.mark.parametrize("settings", [{"min_p": 2}, {"typical_p": "x"}], ids=str)
def test_a_setting_of_sampling_that_cannot_be(
    settings: dict[str, Any], tiny_onevision: Path, tmp_path: Path, vlmrun: Command
) -> None:
    """Greedy search, which stock does with it too, does not look at it."""
    folder = copied(tiny_onevision, tmp_path / "m", setting("generation_config.json", **settings))
    ask = ["caption", "--max-new-tokens", "2", PICTURE]
    greedy, plain = (vlmrun(*ask, "-m", each) for each in (folder, tiny_onevision))
    assert (greedy.code, greedy.out, greedy.err) == (0, plain.out, "")
    (name,) = settings
    drawn = vlmrun(*ask, "-m", folder, "--temperature", "1")
    assert_refused(drawn, f"generation_config.json: {name} is {settings[name]!r}: ")


def test_repeats_longer_than_the_prompt_cost_nothing(
    ready: Ready, batch: list[Prompted], stock: Any
) -> None:
    """Of 10^12 tokens: stock would list as many parts of the prompt, and fill any memory."""
    expected = [stock_tokens(stock, prompt) for prompt in batch]
    assert our_tokens(ready, batch, encoder_no_repeat_ngram_size=10**12) == expected


def test_a_setting_that_fails_later(ready: Ready, batch: list[Prompted]) -> None:
    """It is the checkpoint's fault still."""
    with pytest.raises(CheckpointError, match=r"settings of generation: .*out of range"):
        our_tokens(ready, batch, exponential_decay_length_penalty=[1, -1e200])


def test_a_penalty_on_what_has_no_logit(tmp_path: Path) -> None:
    """The token of a picture may lie beyond the table; stock ends in an IndexError."""
    folder = build_paligemma(tmp_path / "m", vocab_size=IMAGE)
    setting("generation_config.json", encoder_repetition_penalty=2.0)(folder)
    with pytest.raises(CheckpointError, match=r"encoder_repetition_penalty is 2\.0: index"):
        Prefix(model_at(folder))
