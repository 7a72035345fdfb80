"""PaliGemma 1 and 2: the same bits wherever the weights lie, and stock's features and tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from entries import RESIDENCIES, Prompted, load_tiny, noise, rows_of
from paligemmas import answers, ask, logits, stock_logits, stock_of, stock_tokens, tokens
from tiny_paligemma import GEMMA2, IMAGE, build_paligemma

from vlmrun.job import Generation
from vlmrun.tasks.caption import encode_pictures
from vlmrun.tasks.decode import Steps, decode, embed_prompts, left_padded
from vlmrun.tasks.prefix import Prefix

PROMPTS = (
    "caption en",
    "answer en what is in the picture?",
    "detect red apple ; <loc0012> größe",
    "",
)
DTYPES = (
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float32"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def build(**options: Any) -> Path:
        return build_paligemma(tmp_path_factory.mktemp("paligemma"), **options)

    return {
        "1": build(),
        "2": build(version=2),
        "1, untied": build(tied=False),
        "1, module spelling": build(spelling="module", shards=3),
        "2, <image> beyond the table": build(version=2, vocab_size=IMAGE),
        "2, bfloat16": build(version=2, dtype="bfloat16"),
        "2, float16": build(version=2, dtype="float16"),
    }


@pytest.fixture(scope="module")
def batch(folders: dict[str, Path]) -> list[Prompted]:
    """One prompt without an end of its own, and one about two pictures."""
    made = [ask(folders["1"], text, noise(i, 40, 30)) for i, text in enumerate(PROMPTS)]
    made.append(ask(folders["1"], "caption en", noise(8), noise(9, 7, 60)))
    assert len({len(prompt.ids) for prompt in made}) == len(made)
    return made


@pytest.mark.parametrize(("stored", "compute"), DTYPES)
def test_residency_never_changes_the_bits(
    folders: dict[str, Path], batch: list[Prompted], stored: str, compute: str
) -> None:
    folder = folders["2" if stored == "float32" else f"2, {stored}"]
    found = {}
    for resident in RESIDENCIES[::2]:
        ready = load_tiny(folder, resident=resident, compute=compute)
        rows = rows_of(ready, batch)
        found[resident] = (
            [row.features for row in rows],
            logits(ready, rows[:1]),
            logits(ready, rows),
        )
    whole = found.pop("100%")
    for resident, (features, alone, together) in found.items():
        assert all(map(torch.equal, whole[0], features)), resident
        assert torch.equal(whole[1], alone), resident
        assert torch.equal(whole[2], together), resident


def test_features_are_stocks(folders: dict[str, Path], batch: list[Prompted]) -> None:
    """The tower after its last norm, through one linear layer, several pictures in order."""
    ready = load_tiny(folders["1"], resident="50%")
    pictures = [prompt.pictures for prompt in batch if prompt.pictures is not None]
    found = encode_pictures(ready.entry, ready.model.architecture, pictures)
    for prompt, features in zip(batch, found, strict=True):
        with torch.no_grad():
            seen = stock_of(folders["1"]).get_image_features(prompt.stock["pixel_values"])
        expected = seen.pooler_output.flatten(0, 1)
        torch.testing.assert_close(features, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["1", "2", "1, untied", "2, <image> beyond the table"])
def test_greedy_tokens_are_stocks(
    folders: dict[str, Path], batch: list[Prompted], name: str
) -> None:
    """Of each prompt alone and of all in one padded batch, everything in memory or on disk."""
    expected = [stock_tokens(folders[name], prompt) for prompt in batch]
    assert len({tuple(said) for said in expected}) == len(expected)
    assert tokens(folders[name], batch, resident="100%") == expected
    assert [tokens(folders[name], [prompt], resident="0%")[0] for prompt in batch] == expected


def test_the_form_of_the_checkpoint_never_changes_the_bits(
    folders: dict[str, Path], batch: list[Prompted]
) -> None:
    found = []
    for name in "1", "1, module spelling":
        ready = load_tiny(folders[name], resident="30%")
        found.append(logits(ready, rows_of(ready, batch[:2])))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["1", "2"])
def test_logits_are_stocks_after_every_token(
    folders: dict[str, Path], batch: list[Prompted], name: str
) -> None:
    """Stock runs the prompt and the answer at once: the prompt both ways, the answer after it."""
    ready = load_tiny(folders[name], resident="50%")
    found = logits(ready, rows_of(ready, batch))  # [steps, B, V]
    said = found.argmax(dim=-1)
    for i, prompt in enumerate(batch):
        expected = stock_logits(folders[name], prompt, said[:-1, i].tolist())
        torch.testing.assert_close(found[:, i], expected, atol=5e-5, rtol=0)


def test_layers_with_a_window_see_no_further(folders: dict[str, Path]) -> None:
    """A prompt and an answer longer than the window; and the window is what makes the answer."""
    prompt = ask(folders["2"], PROMPTS[1], noise(5))
    assert len(prompt.ids) > GEMMA2["sliding_window"]
    ready = load_tiny(folders["2"], resident="50%")
    narrow = logits(ready, rows_of(ready, [prompt]), steps=8)
    said = narrow.argmax(dim=-1)[:-1, 0].tolist()
    expected = stock_logits(folders["2"], prompt, said)
    torch.testing.assert_close(narrow[:, 0], expected, atol=5e-5, rtol=0)
    with ready.entry.use("decode") as module:
        module.model.language_model.config.sliding_window = 4096
    wide = logits(ready, rows_of(ready, [prompt]), steps=8)
    assert torch.equal(narrow[0], wide[0])  # the prompt sees itself whole, as stock has it
    assert (narrow[1:] - wide[1:]).abs().max() > 1e-3


def test_a_step_may_be_repeated(folders: dict[str, Path], batch: list[Prompted]) -> None:
    """The prefill too: its mask is made anew, from what has been counted."""
    ready = load_tiny(folders["2"], resident="0%")
    rows = rows_of(ready, batch[:2])
    expected = logits(ready, rows, steps=2)
    ids, mask = left_padded(rows, 0)
    decoder = ready.model.architecture.decoder
    with torch.inference_mode(), ready.entry.use("decode") as module:
        embeds = embed_prompts(module, rows, ids, IMAGE)
        steps = Steps(ready.entry, module, decoder, embeds, mask, 2)
        inner = module.get_submodule("model.language_model.layers.2.mlp")
        for run, given, right in (
            (steps.prefill, embeds, expected[0]),
            (steps.step, expected[0].argmax(dim=-1), expected[1]),
        ):
            hook = inner.register_forward_pre_hook(fail)
            with pytest.raises(OSError, match="once"):
                run(given)
            hook.remove()
            assert torch.equal(run(given), right)


def fail(*_: object) -> None:
    raise OSError("once")


def test_sampling_draws_from_the_capped_logits(
    folders: dict[str, Path], batch: list[Prompted]
) -> None:
    """A cap of 3 flattens them: uncapped ones would hardly leave a choice."""
    ready = load_tiny(folders["2"], resident="50%")
    rows = [answers(ready, batch[:1], temperature=1.0, seed=seed)[0] for seed in range(4)]
    assert len({tuple(row.tokens) for row in rows}) == 4
    assert logits(ready, rows_of(ready, batch), steps=2).abs().max() <= 3.0


def test_a_penalty_meets_the_placeholder_beyond_the_table(
    folders: dict[str, Path], batch: list[Prompted]
) -> None:
    """Among the tokens that were said, and none that could be said again."""
    folder = folders["2, <image> beyond the table"]
    ready = load_tiny(folder, resident="50%")
    vocabulary = Prefix(ready.model).vocabulary
    vocabulary.settings.repetition_penalty = 3.0
    decoder, rows = ready.model.architecture.decoder, rows_of(ready, batch[:1])
    generation = Generation(max_new_tokens=12)
    [row] = decode(ready.entry, decoder, rows, vocabulary=vocabulary, generation=generation)
    assert row.tokens == stock_tokens(folder, batch[0], repetition_penalty=3.0)
    assert row.tokens != stock_tokens(folder, batch[0])
