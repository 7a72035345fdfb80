"""LLaVAs and LLaVA-NeXTs answer as stock `generate()` does, wherever their weights lie."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from entries import Ready, load_tiny, noise, trace
from folders import Tensors, copied, setting, weights
from tiny_llava import (
    LLAMA3_ROPE,
    build_joycaption,
    build_llava,
    build_llava_next,
    stock_processor,
)

from vlmrun.job import Generation
from vlmrun.tasks.caption import encode_pictures
from vlmrun.tasks.chat import Chat
from vlmrun.tasks.decode import DecodeRow, decode
from vlmrun.tasks.preprocess import PicturePreprocessor

NEW_TOKENS = 10
Build = tuple[Callable[..., Path], dict[str, Any]]
MISTRAL = {"model_type": "mistral", "rope_theta": 10000.0}
WINDOWED = {**MISTRAL, "sliding_window": 20}  # a picture and its question are longer
BUILDS: Mapping[str, Build] = {
    "llava 1.5": (build_llava, {}),
    "llava 1.5, module paths, in shards": (build_llava, {"spelling": "module", "shards": 3}),
    "llava 1.5, biases": (build_llava, {"decoder": {"attention_bias": True, "mlp_bias": True}}),
    "llava 1.5, class token seen": (build_llava, {"vision_feature_select_strategy": "full"}),
    "llava 1.5, two layers": (build_llava, {"vision_feature_layer": [-2, 0]}),
    "llava 1.5, tied in the text part": (build_llava, {"decoder": {"tie_word_embeddings": True}}),
    "joycaption": (build_joycaption, {}),
    "bakllava": (build_llava, {"decoder": WINDOWED}),
    "siglip without its first patch": (
        build_llava,
        {"tower": "siglip", "vision_feature_select_strategy": "default"},
    ),
    "next, mistral": (build_llava_next, {"decoder": {**MISTRAL, "sliding_window": None}}),
    "next, mistral, windowed": (build_llava_next, {"decoder": WINDOWED}),
    "next, llama, in shards": (build_llava_next, {"shards": 3}),
    "next, siglip and qwen2": (
        build_llava_next,
        {"tower": "siglip", "decoder": {"model_type": "qwen2"}, "spelling": "module"},
    ),
}
QUESTIONS: tuple[tuple[tuple[int, int] | None, str], ...] = (
    ((40, 40), "what is in the picture?"),
    ((90, 20), "describe this image."),
    ((20, 97), "a dog?"),
    ((9, 7), "answer with one word, please."),
    (None, "the quick brown fox jumps over the lazy dog"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as our decoder takes it, and as `generate()` does."""

    row: DecodeRow
    stock: dict[str, Any]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @lru_cache
    def made(name: str) -> Path:
        build, options = BUILDS[name]
        return build(tmp_path_factory.mktemp("llava") / "model", **options)

    return made


@lru_cache(maxsize=2)
def stock_of(folder: Path) -> tuple[Any, Any]:
    [kind] = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)
    return model.eval(), stock_processor(folder)


def ask(ready: Ready, index: int) -> Asked:
    size, text = QUESTIONS[index]
    folder = ready.model.source.folder
    assert folder is not None
    images = [] if size is None else [noise(index, *size)]
    said = [*[{"type": "image"}] * len(images), {"type": "text", "text": text}]
    _, processor = stock_of(folder)
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": said}], add_generation_prompt=True
    )
    stock = processor(text=[prompt], images=images or None, return_tensors="pt")
    features, costs = None, ()
    if images:
        pictures = PicturePreprocessor(ready.model).pictures(images)
        [features] = encode_pictures(ready.entry, ready.model.architecture, [pictures])
        costs = pictures.tokens
    ids = Chat(ready.model).input_ids(text, costs)
    assert ids == tuple(stock["input_ids"][0].tolist())
    return Asked(DecodeRow(ids, features, seed=index), dict(stock))


def answers(ready: Ready, rows: list[DecodeRow]) -> list[list[int]]:
    assert ready.model.architecture.decoder is not None
    made = decode(
        ready.entry,
        ready.model.architecture.decoder,
        rows,
        vocabulary=Chat(ready.model).vocabulary,
        generation=Generation(max_new_tokens=NEW_TOKENS),
    )
    return [row.tokens for row in made]


def stock_answer(folder: Path, asked: Asked) -> list[int]:
    model, _ = stock_of(folder)
    out = model.generate(**asked.stock, max_new_tokens=NEW_TOKENS, do_sample=False)
    found: list[int] = out[0, len(asked.row.input_ids) :].tolist()
    return found


@pytest.mark.parametrize("name", BUILDS)
def test_answers_equal_stock_generate(folder_of: Callable[[str], Path], name: str) -> None:
    """Each question alone at full residency, all in one left-padded batch with nothing resident."""
    folder = folder_of(name)
    whole = load_tiny(folder, resident="100%", new_tokens=NEW_TOKENS)
    asked = [ask(whole, index) for index in range(len(QUESTIONS))]
    expected = [stock_answer(folder, one) for one in asked]
    assert len(set(map(tuple, expected))) == len(expected)  # pictures and texts both matter
    assert [answers(whole, [one.row])[0] for one in asked] == expected
    parts = load_tiny(folder, resident="0%", new_tokens=NEW_TOKENS)
    assert answers(parts, [ask(parts, index).row for index in range(len(QUESTIONS))]) == expected


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llava 1.5", "joycaption", "next, mistral, windowed"])
def test_residency_never_changes_the_bits(
    folder_of: Callable[[str], Path], name: str, compute: str
) -> None:
    found = []
    for resident in "100%", "50%", "0%":
        ready = load_tiny(folder_of(name), resident=resident, compute=compute)
        rows = [ask(ready, index).row for index in range(3)]
        found.append(trace(ready, rows))
        assert ready.plan.all_resident == (resident == "100%")
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("joycaption", {"rope_scaling": None}),
        ("bakllava", {"sliding_window": 19}),
        ("next, mistral, windowed", {"sliding_window": None}),
    ],
)
def test_what_the_decoder_s_configuration_says_matters(
    folder_of: Callable[[str], Path], tmp_path: Path, name: str, change: dict[str, Any]
) -> None:
    """Else equal tokens above would not show that it was read."""
    text = json.loads((folder_of(name) / "config.json").read_text())["text_config"]
    other = copied(
        folder_of(name), tmp_path / "m", setting("config.json", text_config=text | change)
    )
    ready, changed = load_tiny(folder_of(name)), load_tiny(other)
    one, two = (trace(r, [ask(r, 0).row]) for r in (ready, changed))
    assert (one[0] - two[0]).abs().max() > 1e-3


def test_scaled_frequencies_are_stock_s_and_stay_float32(
    folder_of: Callable[[str], Path],
) -> None:
    folder = folder_of("joycaption")
    model, _ = stock_of(folder)
    expected = model.model.language_model.rotary_emb.inv_freq
    unscaled = 1 / LLAMA3_ROPE["rope_theta"] ** (torch.arange(0, 8, 2) / 8)
    assert not torch.allclose(expected, unscaled)
    ready = load_tiny(folder, dtype="bfloat16", compute="bfloat16")
    with ready.entry.use("decode") as module:
        found = module.get_submodule("model.language_model.rotary_emb").inv_freq
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_the_unused_pooling_head_is_never_read(folder_of: Callable[[str], Path]) -> None:
    """JoyCaption's file has one; it must be there, and costs nothing."""
    ready = load_tiny(folder_of("joycaption"), resident="0%")
    ask(ready, 0)
    assert ready.entry.bytes_read == ready.plan.streamed_bytes("vision")
    assert "vision.head" not in ready.plan.workload.phases["vision"]


def test_a_tied_next_without_a_head_follows_its_table(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Stock LLaVA-NeXT does not look at the text part's flag; equal to the head written out."""

    def untie(tensors: Tensors) -> None:
        tensors["language_model.lm_head.weight"] = table(tensors).clone()

    def behead(tensors: Tensors) -> None:
        tensors.pop("language_model.lm_head.weight")

    def table(tensors: Tensors) -> torch.Tensor:
        return tensors["language_model.model.embed_tokens.weight"]

    base = build_llava_next(tmp_path / "base")
    written = copied(base, tmp_path / "written", weights(untie))
    text = json.loads((base / "config.json").read_text())["text_config"]
    tied = copied(base, tmp_path / "tied", weights(behead))
    setting("config.json", text_config={**text, "tie_word_embeddings": True})(tied)
    for resident in "100%", "0%":
        one, two = (load_tiny(folder, resident=resident) for folder in (written, tied))
        assert torch.equal(trace(one, [ask(one, 0).row]), trace(two, [ask(two, 0).row]))
