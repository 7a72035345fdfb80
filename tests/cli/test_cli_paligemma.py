"""`vlmrun caption` and `mem-plan` with tiny PaliGemmas: what stock generates, row by row."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import Command, assert_refused
from folders import copied, without
from paligemmas import NEW_TOKENS, ask, processor_of, stock_tokens
from PIL import Image
from tiny_paligemma import build_paligemma

MOST = ("--max-new-tokens", NEW_TOKENS)
PROMPTS = ("caption en", "answer en what is it?", "ocr")


@pytest.fixture(scope="module", params=[1, 2])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_paligemma(tmp_path_factory.mktemp("paligemma"), version=request.param)


def stock_captions(folder: Path, files: Sequence[Path], prompt: str) -> list[str]:
    found = []
    for file in files:
        said = stock_tokens(folder, ask(folder, prompt, Image.open(file).convert("RGB")))
        found.append(processor_of(folder).decode(said, skip_special_tokens=True).strip())
    return found


def test_captions_are_stocks_by_the_default_prompt(
    vlmrun: Command, folder: Path, three: list[Path]
) -> None:
    """In one batch, everything in memory, and row by row, most of it on disk."""
    expected = stock_captions(folder, three, "caption en")
    assert len(set(expected)) == 3
    for flags in ((), ("--resident", "0%", "-b", 1)):
        done = vlmrun("caption", "-m", folder, "--json", *MOST, *flags, *three)
        assert (done.code, done.err) == (0, "")
        assert [row["caption"] for row in done.rows] == expected
        assert {row["prompt"] for row in done.rows} == {"caption en"}


def test_several_prompts_about_one_picture(
    vlmrun: Command, folder: Path, three: list[Path]
) -> None:
    asked = [word for prompt in PROMPTS for word in ("-p", prompt)]
    done = vlmrun("caption", "-m", folder, "--json", *MOST, *asked, three[0])
    assert done.code == 0, done
    expected = [stock_captions(folder, three[:1], prompt)[0] for prompt in PROMPTS]
    assert [row["caption"] for row in done.rows] == expected


def test_mem_plan_counts_the_tied_table_once(
    vlmrun: Command, folder: Path, three: list[Path]
) -> None:
    """Bytes of all layers are those of the file, and the plan needs no chat template."""
    done = vlmrun("mem-plan", "-m", folder, "--json", three[0])
    assert done.code == 0, done
    (plan,) = done.rows
    assert plan["fits"]
    header = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    stored = (folder / "model.safetensors").stat().st_size - header - 8
    assert sum(layer["bytes"] for layer in plan["layers"]) == stored


def test_what_is_refused(vlmrun: Command, folder: Path, three: list[Path], tmp_path: Path) -> None:
    caption = ("caption", "-m", folder)
    assert_refused(
        vlmrun(*caption, "--system", "Be brief.", three[0]),
        "PaliGemma takes no system prompt",
        hint="leave out --system",
        code=2,
    )
    assert_refused(
        vlmrun(*caption, "-p", "what is <image>?", three[0]), "the prompt holds <image>", code=2
    )
    assert_refused(
        vlmrun(*caption, "--compute-dtype", "float16", three[0]),
        "larger than float16 holds",
        hint="--dtype float16",
        code=2,
    )
    lacking = copied(folder, tmp_path, without("tokenizer.json"))
    assert_refused(vlmrun("caption", "-m", lacking, three[0]), "tokenizer.json is missing")
