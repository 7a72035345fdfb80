"""PaliGemma's prompts: the ids of the stock processor, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from entries import noise
from folders import Change, all_of, changed, model_at, setting
from light import words
from paligemmas import ask
from tiny_paligemma import IMAGE, IMAGE_TOKENS, build_paligemma

from vlmrun.errors import CheckpointError, UsageError
from vlmrun.tasks.prefix import Prefix

PROMPTS = (
    "",
    "caption en",
    " spaces  before and after ",
    "two\nlines\n",
    "describe <bos> <eos> <pad>",
    "segment <loc0001><seg127> cat",
    "日本語 🍎 größe",
    "\ta tab, e\u0301 in two",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_paligemma(tmp_path_factory.mktemp("paligemma"))


@pytest.mark.parametrize("pictures", [1, 3])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_are_the_stock_processors(folder: Path, prompt: str, pictures: int) -> None:
    """Held by `ask`; pictures first, then the start token, the prompt and a line end."""
    ids = ask(folder, prompt, *(noise(i) for i in range(pictures))).ids
    assert ids[: pictures * IMAGE_TOKENS] == (IMAGE,) * (pictures * IMAGE_TOKENS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    said = tokenizer.decode(ids[pictures * IMAGE_TOKENS :])
    assert said == f"<bos>{prompt}\n"


def test_places_that_the_tokenizer_lacks_are_added_as_stock_adds_them(
    folder: Path, tmp_path: Path
) -> None:
    def forget(there: Path) -> None:
        file = there / "tokenizer.json"
        found = json.loads(file.read_text())
        found["added_tokens"] = [t for t in found["added_tokens"] if "<loc" not in t["content"]]
        file.write_text(json.dumps(found))

    image = IMAGE - 1024  # transformers numbers what is left anew
    change = all_of(forget, setting("config.json", image_token_index=image))
    model = changed(folder, tmp_path, change)
    stock = transformers.AutoProcessor.from_pretrained(tmp_path).tokenizer
    said = "detect <loc0003> a cat"
    expected = stock(f"<bos>{said}\n", add_special_tokens=False)["input_ids"]
    assert stock.convert_tokens_to_ids("<loc0003>") in expected
    assert list(Prefix(model).input_ids(said, [])) == expected


@pytest.mark.parametrize(
    ("prompt", "system", "expected", "hint"),
    [
        ("caption en", "Be brief.", "PaliGemma takes no system prompt", "leave out --system"),
        ("what is <image>?", "", "the prompt holds <image>", "leave it out"),
        ("caption \udcff", "", "is not valid UTF-8", "convert it first"),
    ],
)
def test_prompts_that_are_refused(
    folder: Path, prompt: str, system: str, expected: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        Prefix(model_at(folder)).input_ids(prompt, [IMAGE_TOKENS], system=system)
    assert expected in caught.value.message
    assert hint in words(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            setting("config.json", image_token_index=7),
            f"image_token_index is 7, but the tokenizer has <image> as {IMAGE}",
        ),
        (
            setting("config.json", image_token_index=None),
            f"image_token_index is 256000, but the tokenizer has <image> as {IMAGE}",
        ),
        (
            setting("generation_config.json", eos_token_id=99999),
            "generation_config.json: eos_token_id is 99999",
        ),
    ],
)
def test_folders_that_contradict_themselves(
    folder: Path, tmp_path: Path, change: Change, expected: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        Prefix(changed(folder, tmp_path, change))
    assert expected in words(caught.value)


def test_what_decoding_needs(folder: Path, tmp_path: Path) -> None:
    """Stop tokens are those of generation_config.json, the first of several places."""
    several: dict[str, Any] = {"eos_token_id": [1, 107]}
    model = changed(folder, tmp_path, setting("generation_config.json", **several))
    vocabulary = Prefix(model).vocabulary
    assert (vocabulary.placeholder_id, vocabulary.pad_id) == (IMAGE, 0)
    assert vocabulary.stop_ids == {1, 107}
    assert Prefix(model_at(folder)).vocabulary.stop_ids == {1}
