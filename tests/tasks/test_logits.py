"""Settings of generation_config.json: the tokens of stock `generate()`, alone and in a batch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from entries import Prompted, Ready, load_tiny, noise, prompted, rows_of, vocabulary_of
from folders import model_at
from tiny import SPECIAL
from transformers import GenerationConfig, LlavaOnevisionForConditionalGeneration

from vlmrun.errors import CheckpointError
from vlmrun.job import Generation
from vlmrun.tasks.decode import decode
from vlmrun.tasks.logits import check_settings

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
        {"suppress_tokens": "abc"},
        {"bad_words_ids": [[10**9]]},
        {"sequence_bias": [[["a"], 1.0]]},
        {"forced_eos_token_id": 10**6},
        {"begin_suppress_tokens": [[1], 2]},
        {"repetition_penalty": -1.0},
        {"no_repeat_ngram_size": 1.5},
        {"encoder_repetition_penalty": "x"},
        {"exponential_decay_length_penalty": [1]},
    ],
    ids=str,
)
def test_a_setting_that_cannot_be(settings: dict[str, Any]) -> None:
    """Tried before the first picture, even what only the last token would meet."""
    config = GenerationConfig()
    config.update(**settings)
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: "):
        check_settings(config, stop_ids={2}, vocabulary=100)
