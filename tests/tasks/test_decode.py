"""Tokens: the same bits wherever the weights lie, and those of stock `generate()`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from entries import (
    DTYPES,
    RESIDENCIES,
    Prompted,
    Ready,
    build_cut_head,
    load_tiny,
    noise,
    prompted,
    rows_of,
    shifted,
    trace,
    vocabulary_of,
)
from folders import model_at
from tiny import SPECIAL, build_onevision
from transformers import LlavaOnevisionForConditionalGeneration

from vlmrun.job import Generation
from vlmrun.tasks.decode import Decoded, DecodeRow, Steps, decode, embed_prompts, left_padded

NEW_TOKENS = 10
STOP = SPECIAL["<|im_end|>"]
PROMPTS = {
    "one picture": ([(40, 40)], "what is in the picture?"),
    "another": ([(60, 20)], "describe this image."),
    "several pictures": ([(40, 40), (20, 60), (9, 7)], "a dog or two cats?"),
    "no picture": ([], "the quick brown fox jumps over the lazy dog"),
    "one word": ([], "vexing"),
}


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, tiny_onevision: Path, tiny_onevision_untied: Path
) -> dict[str, Path]:
    made = {
        dtype: build_onevision(tmp_path_factory.mktemp(dtype), dtype=dtype)
        for dtype in ("bfloat16", "float16")
    }
    return {**made, "float32": tiny_onevision, "untied": tiny_onevision_untied}


@pytest.fixture(scope="module")
def prompts(tiny_onevision: Path) -> dict[str, Prompted]:
    model = model_at(tiny_onevision)
    return {
        name: prompted(model, [noise(i, *size) for i, size in enumerate(sizes)], text)
        for name, (sizes, text) in PROMPTS.items()
    }


@pytest.fixture(scope="module")
def stock(folders: dict[str, Path]) -> dict[str, Any]:
    load = LlavaOnevisionForConditionalGeneration.from_pretrained
    return {name: load(folders[name], dtype=torch.float32) for name in ("float32", "untied")}


@pytest.fixture(scope="module")
def ready(tiny_onevision: Path) -> Ready:
    return load_tiny(tiny_onevision, resident="60%", new_tokens=NEW_TOKENS)


def stock_tokens(model: Any, prompt: Prompted, **settings: Any) -> list[int]:
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **settings}
    return model.generate(**prompt.stock, **settings)[0, len(prompt.ids) :].tolist()


def run(
    ready: Ready, batch: Sequence[Prompted], *, settings: dict[str, Any] | None = None, **job: Any
) -> list[Decoded]:
    return run_rows(ready, rows_of(ready, batch), settings=settings, **job)


def run_rows(
    ready: Ready,
    rows: Sequence[DecodeRow],
    *,
    settings: dict[str, Any] | None = None,
    stop_ids: tuple[int, ...] = (STOP,),
    **job: Any,
) -> list[Decoded]:
    folder, decoder = ready.model.source.folder, ready.model.architecture.decoder
    assert folder is not None
    assert decoder is not None
    vocabulary = replace(vocabulary_of(folder, **settings or {}), stop_ids=frozenset(stop_ids))
    generation = Generation(**{"max_new_tokens": NEW_TOKENS, **job})
    return decode(ready.entry, decoder, rows, vocabulary=vocabulary, generation=generation)


def tokens(decoded: Sequence[Decoded]) -> list[list[int]]:
    return [row.tokens for row in decoded]


@pytest.mark.parametrize(("stored", "dtype", "compute"), DTYPES)
def test_residency_never_changes_the_bits(
    folders: dict[str, Path], prompts: dict[str, Prompted], stored: str, dtype: str, compute: str
) -> None:
    """Logits of one row alone and of a padded batch, and the tokens."""
    found = {}
    for resident in RESIDENCIES:
        ready = load_tiny(folders[stored], resident=resident, dtype=dtype, compute=compute)
        assert ready.plan.all_resident == (resident == "100%")
        rows = rows_of(ready, list(prompts.values()))
        made = tokens(run_rows(ready, rows))
        found[resident] = trace(ready, rows[:1]), trace(ready, rows), made
    for resident, (alone, batch, made) in found.items():
        assert torch.equal(alone, found["100%"][0]), resident
        assert torch.equal(batch, found["100%"][1]), resident
        assert made == found["100%"][2], resident


@pytest.mark.parametrize("nbytes", [1, 8, 16, 24])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "untied"])
def test_the_place_in_the_file_never_changes_the_bits(
    folders: dict[str, Path],
    prompts: dict[str, Prompted],
    tmp_path: Path,
    stored: str,
    nbytes: int,
) -> None:
    """One row: its steps are matrix-vector products, whose kernels mind addresses."""
    batch = [prompts["one picture"]]
    whole = load_tiny(folders[stored])
    expected = trace(whole, rows_of(whole, batch))
    moved = shifted(folders[stored], tmp_path, nbytes)
    for resident in RESIDENCIES:
        ready = load_tiny(moved, resident=resident)
        assert torch.equal(trace(ready, rows_of(ready, batch)), expected), resident


@pytest.mark.parametrize(
    "options",
    [{"shards": 3}, {"spelling": "module"}, {"spelling": "module", "shards": 2}],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_form_of_the_checkpoint_never_changes_the_bits(
    folders: dict[str, Path], prompts: dict[str, Prompted], tmp_path: Path, tied: bool, options: Any
) -> None:
    build_onevision(tmp_path, tied=tied, **options)
    found = []
    for folder in folders["float32" if tied else "untied"], tmp_path:
        ready = load_tiny(folder, resident="30%")
        found.append(trace(ready, rows_of(ready, [prompts["several pictures"]])))
    assert torch.equal(*found)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_pieces_gives_the_same_bits_and_stocks_tokens(
    tmp_path: Path, prompts: dict[str, Prompted], tied: bool
) -> None:
    """More rows than the largest block holds: some pieces stay, others stream."""
    folder = build_cut_head(tmp_path, tied=tied)
    batch = [prompts["one picture"], prompts["no picture"]]
    found = {}
    for resident in RESIDENCIES:
        ready = load_tiny(folder, resident=resident, new_tokens=NEW_TOKENS)
        rows = rows_of(ready, batch)
        found[resident] = trace(ready, rows), tokens(run_rows(ready, rows))
        assert torch.equal(found[resident][0], found["100%"][0]), resident
        assert found[resident][1] == found["100%"][1]
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    assert found["0%"][1] == [stock_tokens(model, prompt) for prompt in batch]


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("folder", ["float32", "untied"])
@pytest.mark.parametrize("resident", ["100%", "20%"])
def test_greedy_tokens_equal_stock(
    folders: dict[str, Path],
    stock: dict[str, Any],
    prompts: dict[str, Prompted],
    folder: str,
    name: str,
    resident: str,
) -> None:
    ready = load_tiny(folders[folder], resident=resident, new_tokens=NEW_TOKENS)
    [row] = run(ready, [prompts[name]])
    assert row.tokens == stock_tokens(stock[folder], prompts[name])
    assert row.text == vocabulary_of(folders[folder]).tokenizer.decode(
        row.tokens, skip_special_tokens=True
    )
    assert len(set(row.tokens)) > 2


def test_a_padded_batch_equals_its_rows(
    ready: Ready, prompts: dict[str, Prompted], stock: dict[str, Any]
) -> None:
    batch = list(prompts.values())
    assert len({len(prompt.ids) for prompt in batch}) == len(batch)
    expected = [stock_tokens(stock["float32"], prompt) for prompt in batch]
    assert tokens(run(ready, batch)) == expected
    assert tokens(run(ready, batch[::-1])) == expected[::-1]


def test_padded_logits_equal_stock(
    ready: Ready, prompts: dict[str, Prompted], stock: dict[str, Any]
) -> None:
    """Of the prompts alone, where stock takes no cache and no padding."""
    found = trace(ready, rows_of(ready, list(prompts.values())), steps=1)[0]
    for prompt, logits in zip(prompts.values(), found, strict=True):
        with torch.no_grad():
            theirs = stock["float32"](**prompt.stock).logits[0, -1]
        torch.testing.assert_close(logits, theirs, atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 1},
        {"repetition_penalty": 1.1, "no_repeat_ngram_size": 2},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    ],
    ids=str,
)
def test_the_checkpoints_settings_are_stocks(
    tiny_onevision: Path,
    tmp_path: Path,
    prompts: dict[str, Prompted],
    stock: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """From generation_config.json; greedy search leaves the sampling settings alone."""
    folder = shifted(tiny_onevision, tmp_path, 0)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    ready = load_tiny(folder, resident="50%")
    batch = list(prompts.values())
    unset = {"temperature": None, "top_k": None, "top_p": None}  # else it warns of them
    expected = [stock_tokens(model, prompt, **unset) for prompt in batch]
    assert tokens(run(ready, batch)) == expected
    plain = [stock_tokens(stock["float32"], prompt) for prompt in batch]
    assert (expected == plain) == ("do_sample" in settings)


def test_padding_is_not_a_token_that_was_said(ready: Ready, prompts: dict[str, Prompted]) -> None:
    """A penalty on repeated tokens would meet the padding of the shorter row."""
    batch = [prompts["one word"], prompts["one picture"]]
    folder, decoder = ready.model.source.folder, ready.model.architecture.decoder
    settings = {"repetition_penalty": 50.0}
    alone = [run(ready, [prompt], settings=settings)[0] for prompt in batch]
    said = alone[0].tokens[0]
    assert said not in prompts["one word"].ids
    vocabulary = replace(vocabulary_of(folder, **settings), pad_id=said)
    generation = Generation(max_new_tokens=NEW_TOKENS)
    rows = rows_of(ready, batch)
    together = decode(ready.entry, decoder, rows, vocabulary=vocabulary, generation=generation)
    assert tokens(together) == tokens(alone)


def test_a_stop_token_ends_a_row_and_not_the_others(
    ready: Ready, prompts: dict[str, Prompted], stock: dict[str, Any]
) -> None:
    batch = [prompts["one picture"], prompts["another"]]
    free = run(ready, batch)
    stop = next(token for token in free[0].tokens[2:] if token not in free[1].tokens)
    first, second = run(ready, batch, stop_ids=(stop, STOP))
    assert first.tokens == stock_tokens(stock["float32"], batch[0], eos_token_id=[stop, STOP])
    assert first.tokens[-1] == stop
    assert len(first.tokens) < NEW_TOKENS
    assert (first.finish, second.finish) == ("stop", "length")
    assert second.tokens == free[1].tokens


def test_stop_strings_end_and_cut(ready: Ready, prompts: dict[str, Prompted]) -> None:
    batch = [prompts["one picture"], prompts["another"]]
    free = run(ready, batch)
    text = free[0].text
    stop = next(text[i : i + 3] for i in range(3, len(text)) if text[i : i + 3] not in free[1].text)
    first, second = run(ready, batch, stop=("never said", stop))
    assert first.text == text[: text.index(stop)]
    assert first.finish == "stop"
    assert first.tokens == free[0].tokens[: len(first.tokens)]
    assert len(first.tokens) < len(free[0].tokens)
    assert (second.text, second.finish) == (free[1].text, "length")


@pytest.mark.parametrize("count", [1, 3])
def test_the_limit_is_kept(ready: Ready, prompts: dict[str, Prompted], count: int) -> None:
    free, short = (
        run(ready, [prompts["no picture"]], max_new_tokens=n)[0] for n in (NEW_TOKENS, count)
    )
    assert short.tokens == free.tokens[:count]
    assert short.finish == "length"


def test_sampling_is_reproducible(ready: Ready, prompts: dict[str, Prompted]) -> None:
    """A row draws by the job's seed and its own, whatever else is in its batch."""
    rows = rows_of(ready, list(prompts.values()))
    settings = {"temperature": 1.2, "top_k": 50, "top_p": 0.95}
    batch = tokens(run_rows(ready, rows, **settings, seed=5))
    assert tokens(run_rows(ready, rows, **settings, seed=5)) == batch
    alone = [tokens(run_rows(ready, [row], **settings, seed=5))[0] for row in rows]
    assert alone == batch
    assert tokens(run_rows(ready, rows[::-1], **settings, seed=5)) == batch[::-1]
    other = tokens(run_rows(ready, rows, **settings, seed=6))
    assert all(one != another for one, another in zip(batch, other, strict=True))
    same = [replace(rows[0], seed=seed) for seed in (3, 3, 4)]
    first, second, third = tokens(run_rows(ready, same, **settings))
    assert first == second != third


@pytest.mark.parametrize(
    "settings", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}], ids=str
)
def test_sampling_without_a_choice_is_greedy(
    ready: Ready, prompts: dict[str, Prompted], settings: dict[str, Any]
) -> None:
    batch = list(prompts.values())
    sampled = run(ready, batch, **{"temperature": 1.0, **settings})
    assert tokens(sampled) == tokens(run(ready, batch))


def test_a_row_that_overflows_ends_alone(ready: Ready, prompts: dict[str, Prompted]) -> None:
    batch = [prompts["one picture"], prompts["several pictures"], prompts["no picture"]]
    rows = rows_of(ready, batch)
    free = run_rows(ready, rows)
    features = rows[1].features
    assert features is not None
    rows[1] = replace(rows[1], features=torch.full_like(features, torch.inf))
    found = run_rows(ready, rows)
    assert [row.finite for row in found] == [True, False, True]
    assert found[1].tokens == []
    assert [found[0].tokens, found[2].tokens] == [free[0].tokens, free[2].tokens]


def test_a_step_that_failed_may_be_repeated(
    tiny_onevision: Path, prompts: dict[str, Prompted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader fails in the middle of the second step, once; the logits are the same."""
    ready = load_tiny(tiny_onevision, resident="0%")
    rows = rows_of(ready, [prompts["one picture"], prompts["one word"]])
    expected = trace(ready, rows)
    step, failed = Steps.step, []

    def twice(self: Steps, chosen: torch.Tensor) -> torch.Tensor:
        with ready.entry.use("decode") as module:
            inner = module.get_submodule("model.language_model.layers.1.mlp")

        def fail(*_: object) -> None:
            failed.append(True)
            raise OSError("once")

        hook = inner.register_forward_pre_hook(fail)
        with pytest.raises(OSError, match="once"):
            step(self, chosen)
        hook.remove()
        return step(self, chosen)

    monkeypatch.setattr(Steps, "step", twice)
    assert torch.equal(trace(ready, rows), expected)
    assert len(failed) == 3


def test_left_padding() -> None:
    ids, mask = left_padded([DecodeRow((5, 6, 7), None), DecodeRow((8,), None)], 0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_features_take_the_placeholders_places(ready: Ready) -> None:
    image = SPECIAL["<image>"]
    features = torch.arange(64.0).view(2, 32)
    rows = [DecodeRow((5, image, 6, image), features), DecodeRow((5, 6), None)]
    ids, _ = left_padded(rows, SPECIAL["<|endoftext|>"])
    with torch.inference_mode(), ready.entry.use("decode") as module:
        found = embed_prompts(module, rows, ids, image)
    assert torch.equal(found[0, [1, 3]], features)
    assert torch.equal(found[0, [0, 2]], found[1, [2, 3]])
