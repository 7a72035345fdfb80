"""What towers and decoders are given equals what stock transformers would give them."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import changed, model_at, picture, setting
from gemma_tokenizer import gemma
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.tokenization_siglip2 import Siglip2Tokenizer
from transformers.processing_utils import ProcessorMixin

from vlmrun.errors import ImageError, UnsupportedModel, UsageError
from vlmrun.models.checkpoints.source import resolve_source
from vlmrun.models.family import View
from vlmrun.models.model import Model, read_model
from vlmrun.tasks import crops as crops_module
from vlmrun.tasks.chat import Chat
from vlmrun.tasks.preprocess import PicturePreprocessor
from vlmrun.tasks.texts import TextPreprocessor

PROMPT = "What is in the picture?"


class StockProcessor(LlavaOnevisionProcessor):
    """LlavaOnevisionProcessor without its video part, which needs torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def stock_processor(folder: Path) -> StockProcessor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = LlavaOnevisionImageProcessorPil.from_pretrained(folder)
    stock = StockProcessor(images, tokenizer, (folder / "chat_template.jinja").read_text())
    for name, value in json.loads((folder / "processor_config.json").read_text()).items():
        setattr(stock, name, value)
    stock.image_token_id = tokenizer.convert_tokens_to_ids(stock.image_token)
    return stock


@pytest.fixture(scope="module", params=["demo", "tiny"])
def onevision(request: pytest.FixtureRequest) -> Model:
    if request.param == "demo":
        return read_model(resolve_source("demo"))
    return model_at(request.getfixturevalue("tiny_onevision"))


@pytest.mark.parametrize(
    "sizes",
    [
        [(40, 40)],
        [(97, 60)],
        [(60, 97)],
        [(640, 200)],
        [(1, 1)],
        [(3, 1500)],
        [(1500, 1)],
        [(50, 60), (300, 20)],
        [(20, 90), (28, 28), (1900, 3)],
        [],
    ],
    ids=str,
)
def test_rows_equal_the_stock_processor(onevision: Model, sizes: list[tuple[int, int]]) -> None:
    assert onevision.source.folder is not None
    stock = stock_processor(onevision.source.folder)
    images = [picture(*size) for size in sizes]
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": PROMPT}]
    chat = stock.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    nested = {"images": [images]} if images else {}
    expected = stock(text=[chat], return_tensors="pt", **nested)
    preprocessor = PicturePreprocessor(onevision)
    asked = Chat(onevision)
    seen = preprocessor.pictures(images) if images else None
    ids = asked.input_ids(PROMPT, seen.tokens if seen else ())
    assert ids == tuple(expected["input_ids"][0].tolist())
    if seen is None:
        return
    assert seen.pixel_values.dtype == torch.float32
    assert seen.pixel_values.is_contiguous()
    pixels = expected["pixel_values"]  # [1, C, 3, S, S] for one picture, [C, 3, S, S] for several
    assert torch.equal(seen.pixel_values, pixels.reshape(-1, *pixels.shape[-3:]))
    assert [list(size) for size in seen.sizes] == expected["image_sizes"].tolist()
    assert sum(seen.crops) == len(seen.pixel_values)
    assert sum(seen.tokens) == ids.count(asked.vocabulary.placeholder_id)


@pytest.mark.parametrize("size", [(40, 40), (97, 60), (60, 97), (3, 3000), (3000, 2)], ids=str)
def test_low_detail_is_the_view_of_several_pictures(
    onevision: Model, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded in strips, of any number, and equal to padding the whole square."""
    preprocessor, image = PicturePreprocessor(onevision), picture(*size)
    folder, vision = onevision.source.folder, onevision.architecture.vision
    assert folder is not None
    assert vision is not None
    stock = LlavaOnevisionImageProcessorPil.from_pretrained(folder)
    expected = stock([[image, image]], return_tensors="pt")["pixel_values"][0]
    for strip_pixels in (crops_module.STRIP_PIXELS, 7 * max(size)):
        monkeypatch.setattr(crops_module, "STRIP_PIXELS", strip_pixels)
        low = preprocessor.pictures([image], view=View(detail="low"))
        assert (low.crops, low.tokens) == ((1,), (vision.tokens + 1,))
        assert torch.equal(low.pixel_values, expected)


@pytest.mark.parametrize("detail", ["high", "low"])
def test_rows_cost_what_the_family_says(onevision: Model, detail: Any) -> None:
    preprocessor, chat, source = PicturePreprocessor(onevision), Chat(onevision), random.Random(1)
    for _ in range(30):
        image = Image.new("RGB", (source.randint(1, 300), source.randint(1, 300)))
        cost = onevision.family.image_cost(onevision.architecture, *image.size, View(detail))
        seen = preprocessor.pictures([image], view=View(detail))
        ids = chat.input_ids(PROMPT, seen.tokens)
        assert ids.count(chat.vocabulary.placeholder_id) == cost.tokens
        assert (seen.crops, len(seen.pixel_values)) == ((cost.crops,), cost.crops)


def test_pictures_too_long_to_pad_are_refused(onevision: Model) -> None:
    strip = Image.new("RGB", (70_000, 1))
    preprocessor = PicturePreprocessor(onevision)
    assert preprocessor.pictures([strip]).sizes == ((1, 70_000),)
    with pytest.raises(ImageError, match="70000 pixels long"):
        preprocessor.pictures([strip], view=View(detail="low"))


def test_system_prompt_goes_first(onevision: Model) -> None:
    chat = Chat(onevision)
    ids = chat.input_ids(PROMPT, (), system="Answer with one word.")
    text = chat.vocabulary.tokenizer.decode(ids)
    assert text.index("system") < text.index("Answer with one word.") < text.index(PROMPT)
    assert ids != chat.input_ids(PROMPT, ())


@pytest.mark.parametrize(
    ("prompt", "system", "words"),
    [
        ("what is <image> here?", "", "the prompt holds <image>"),
        ("what?", "see <image>", "the system prompt holds <image>"),
        ("caf\udce9", "", "not valid UTF-8"),
    ],
)
def test_texts_that_cannot_be_meant_are_refused(
    onevision: Model, prompt: str, system: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Chat(onevision).input_ids(prompt, (), system=system)


def test_settings_are_used(tiny_onevision: Path, tmp_path: Path) -> None:
    """CLIP's colours and another filter, both as the stock processor takes them."""
    change = setting(
        "preprocessor_config.json",
        image_mean=[0.48, 0.46, 0.41],
        image_std=[0.27, 0.26, 0.28],
        resample=1,
    )
    model, image = changed(tiny_onevision, tmp_path, change), picture(70, 40)
    stock = LlavaOnevisionImageProcessorPil.from_pretrained(tmp_path)
    expected = stock([[image], [picture(9, 30), image]], return_tensors="pt")["pixel_values"]
    preprocessor = PicturePreprocessor(model)
    assert torch.equal(preprocessor.pictures([image]).pixel_values, expected[0])
    both = preprocessor.pictures([picture(9, 30), image])
    assert torch.equal(both.pixel_values, expected[1:, 0])


def test_pictures_are_squashed_not_cropped(siglip: Path) -> None:
    """A picture of 2:1, by hand: a square one cannot show a crop."""
    image = picture(200, 100)
    resized = np.asarray(image.resize((28, 28), Image.Resampling.BICUBIC), dtype=np.float64)
    expected = torch.from_numpy(((resized / 255 - 0.5) / 0.5).transpose(2, 0, 1))
    preprocessor = PicturePreprocessor(model_at(siglip))
    pixels = preprocessor.pixels([image])
    assert pixels.shape == (1, 3, 28, 28)
    assert pixels.dtype == torch.float32
    torch.testing.assert_close(pixels[0].double(), expected, rtol=0, atol=1e-6)


def test_pixels_equal_the_stock_image_processor(siglip: Path) -> None:
    images = [picture(*size) for size in [(200, 100), (28, 28), (1, 1), (5, 900), (31, 33)]]
    stock = SiglipImageProcessorPil.from_pretrained(siglip)(images, return_tensors="pt")
    preprocessor = PicturePreprocessor(model_at(siglip))
    assert torch.equal(preprocessor.pixels(images), stock["pixel_values"])
    assert preprocessor.pixels([]).shape == (0, 3, 28, 28)


TEXTS = ["a red apple", "The quick, brown FOX!", "jump " * 200, "", "umbrella </s>", "ΟΔΟΣ"]


def test_texts_equal_the_stock_tokenizer(siglip: Path) -> None:
    rows, notes = TextPreprocessor(model_at(siglip)).tokens(TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(siglip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = tokenizer(
            TEXTS, padding="max_length", truncation=True, max_length=16, return_tensors="pt"
        )
    assert torch.equal(rows, stock["input_ids"])
    assert rows.dtype == torch.int64
    assert rows[0, -1] == tokenizer.pad_token_id
    assert rows[2, -1] == tokenizer.eos_token_id
    assert len(notes) == 1
    assert notes[0].startswith("text 'jump jump jump")
    assert notes[0].endswith("is cut to 16")


def test_no_text_gives_no_row(siglip: Path) -> None:
    rows, notes = TextPreprocessor(model_at(siglip)).tokens([])
    assert (rows.shape, notes) == ((0, 16), ())


def test_version_1_drops_punctuation(tiny_siglip: Path) -> None:
    preprocessor = TextPreprocessor(model_at(tiny_siglip))
    rows, _ = preprocessor.tokens(["A red, apple!", "a red apple"])
    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("lower", [None, True])
def test_version_2_is_lowered_and_padded_on_the_right(
    tiny_siglip2: Path, tmp_path: Path, lower: bool | None
) -> None:
    model = changed(tiny_siglip2, tmp_path, gemma(lower))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.padding_side == "left"
    assert tokenizer("A CAT")["input_ids"] != tokenizer("a cat")["input_ids"]
    texts = ["A CAT", "a cat", "a cat on the umbrella", "ΟΔΟΣ"]
    rows, _ = TextPreprocessor(model).tokens(texts)
    assert rows[0].tolist() == tokenizer("a cat")["input_ids"] + [0] * 10
    assert rows[2, -1] == tokenizer.eos_token_id
    lowering = Siglip2Tokenizer.from_pretrained(tmp_path)  # NaFlex models'
    right = {"padding": "max_length", "padding_side": "right"}
    stock = lowering(texts, truncation=True, max_length=16, return_tensors="pt", **right)
    assert torch.equal(rows, stock["input_ids"])


def test_a_tokenizer_told_to_keep_case_keeps_it(tiny_siglip2: Path, tmp_path: Path) -> None:
    model = changed(tiny_siglip2, tmp_path, gemma(False))
    rows, _ = TextPreprocessor(model).tokens(["A CAT", "a cat"])
    assert not torch.equal(rows[0], rows[1])


def test_a_vision_tower_embeds_no_texts(tiny_siglip_vision: Path) -> None:
    model = model_at(tiny_siglip_vision)
    assert PicturePreprocessor(model).pixels([picture(9, 5)]).any()
    with pytest.raises(UnsupportedModel, match="has no text tower"):
        TextPreprocessor(model)


def test_texts_that_are_not_unicode_are_refused(siglip: Path) -> None:
    preprocessor = TextPreprocessor(model_at(siglip))
    with pytest.raises(UsageError, match="not valid UTF-8"):
        preprocessor.tokens(["caf\udce9"])
