"""What LLaVA and LLaVA-NeXT are given equals what their stock processors would give them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import Change, all_of, changed, model_at, picture, replaced, setting, without
from PIL import Image
from tiny_llava import (
    PROCESSORS,
    SQUARE,
    START,
    TEMPLATE,
    build_joycaption,
    build_llava,
    build_llava_next,
    stock_processor,
)
from tiny_tokenizers import SPECIAL

from vlmrun.errors import CheckpointError, ImageError
from vlmrun.models.companions import check_companions
from vlmrun.models.family import View
from vlmrun.tasks import crops as crops_module
from vlmrun.tasks.chat import Chat
from vlmrun.tasks.preprocess import PicturePreprocessor

PROMPT = "What is in the picture?"
SIZES = [(28, 28), (1, 1), (80, 40), (40, 280), (31, 27), (1000, 10), (9, 5), (300, 299), (2, 150)]
FILE = "preprocessor_config.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    make = tmp_path_factory.mktemp
    return {
        "llava": build_llava(make("llava")),
        "joycaption": build_joycaption(make("joycaption")),
        "next": build_llava_next(make("next")),
        "next, siglip": build_llava_next(make("siglip"), tower="siglip"),
    }


def stock_inputs(folder: Path, images: list[Image.Image]) -> Any:
    stock = stock_processor(folder)
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": PROMPT}]
    text = stock.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    return stock(text=[text], images=images or None, return_tensors="pt")


@pytest.mark.parametrize("name", ["llava", "joycaption", "next", "next, siglip"])
@pytest.mark.parametrize("sizes", [[], *([size] for size in SIZES), SIZES[2:5]], ids=str)
def test_rows_equal_the_stock_processor(
    folders: dict[str, Path], name: str, sizes: list[tuple[int, int]]
) -> None:
    model, images = model_at(folders[name]), [picture(*size) for size in sizes]
    expected = stock_inputs(folders[name], images)
    seen = PicturePreprocessor(model).pictures(images) if images else None
    ids = Chat(model).input_ids(PROMPT, seen.tokens if seen else ())
    assert ids == tuple(expected["input_ids"][0].tolist())
    assert ids[0] == SPECIAL[START]  # which the tokenizer adds
    assert ids.count(ids[0]) == 1
    if seen is None:
        return
    pixels = expected["pixel_values"]
    if pixels.dim() == 5:  # the crops of several pictures are padded to the same number
        assert [list(size) for size in seen.sizes] == expected["image_sizes"].tolist()
        pixels = torch.cat([own[:n] for own, n in zip(pixels, seen.crops, strict=True)])
    assert torch.equal(seen.pixel_values, pixels)
    assert sum(seen.tokens) == ids.count(SPECIAL["<image>"])


CLIP, SIGLIP, OPEN = "CLIPImageProcessor", "SiglipImageProcessor", "LlavaImageProcessor"
SETTINGS = {
    "to the shorter side, then the middle": {"image_processor_type": CLIP},
    "sizes as numbers": {"size": 28, "crop_size": 28},
    "no kind named": {"image_processor_type": None},
    "an old name": {"image_processor_type": None, "feature_extractor_type": "CLIPFeatureExtractor"},
    "a fast one": {"image_processor_type": "CLIPImageProcessorFast"},
    "larger than the crop": {"size": {"shortest_edge": 40}},
    "smaller than the crop": {"size": {"shortest_edge": 11}},
    "squashed and cropped": {"size": SQUARE},
    "squashed": {"size": SQUARE, "do_center_crop": False},
    "another filter": {"resample": 2},
    "padded": {"image_processor_type": OPEN, "do_pad": True},
    "padded, not cropped": {"image_processor_type": OPEN, "do_pad": True, "do_center_crop": False},
    "padded and scaled past the crop": {
        "image_processor_type": OPEN,
        "do_pad": True,
        "size": {"shortest_edge": 41},
    },
    "LLaVA's own, not padded": {"image_processor_type": OPEN},
    "SigLIP's": {
        "image_processor_type": SIGLIP,
        "size": SQUARE,
        "do_center_crop": None,
        "crop_size": None,
    },
    "levels as they are": {"do_rescale": False, "do_normalize": False},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_pixels_equal_the_stock_image_processor(
    folders: dict[str, Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = {"image_mean": [0.4815, 0.4578, 0.4082], "image_std": [0.2686, 0.2613, 0.2758]}
    model = changed(folders["llava"], tmp_path, setting(FILE, **clip, **SETTINGS[name]))
    kind = json.loads((tmp_path / FILE).read_text()).get("image_processor_type") or CLIP
    stock = PROCESSORS[kind.removesuffix("Fast")].from_pretrained(tmp_path)
    monkeypatch.setattr(crops_module, "STRIP_PIXELS", 1000)
    preprocessor = PicturePreprocessor(model)
    for size in SIZES:
        expected = stock(picture(*size), return_tensors="pt")["pixel_values"]
        for view in View(), View(detail="low"):
            seen = preprocessor.pictures([picture(*size)], view=view)
            assert torch.equal(seen.pixel_values, expected.float()), size


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_low_detail_of_next_is_its_base_view(
    folders: dict[str, Path], size: tuple[int, int]
) -> None:
    model = model_at(folders["next"])
    low = PicturePreprocessor(model).pictures([picture(*size)], view=View(detail="low"))
    base = stock_inputs(folders["next"], [picture(*size)])["pixel_values"][0, :1]
    assert torch.equal(low.pixel_values, base)
    assert (low.crops, low.tokens) == ((1,), (16 + 1,))


def test_strips_too_long_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """Scaled to 28 on its shorter side, a line of 3000 pixels is 84,000 long."""
    strip = Image.new("RGB", (1, 3000))
    with pytest.raises(ImageError, match=r"1 x 3000 pixels, and scaled to 28 .* 84000 long"):
        PicturePreprocessor(model_at(folders["llava"])).pictures([strip])
    for name in "joycaption", "next":
        PicturePreprocessor(model_at(folders[name])).pictures([strip])
    pad = setting(FILE, image_processor_type=OPEN, do_pad=True)
    preprocessor = PicturePreprocessor(changed(folders["llava"], tmp_path, pad))
    preprocessor.pictures([strip])
    with pytest.raises(ImageError, match="70000 pixels long"):
        preprocessor.pictures([Image.new("RGB", (70_000, 1))])


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a crop of another size": (
        "llava",
        {"crop_size": {"height": 14, "width": 14}},
        r'crop_size is {"height": 14, "width": 14}, and config.json\'s image_size 28',
    ),
    "the class's crop": ("llava", {"crop_size": None}, "crop_size is .*224.* image_size 28"),
    "no crop": ("llava", {"do_center_crop": False}, r'size is {"shortest_edge": 28}'),
    "another square": ("llava", {"size": {"height": 14, "width": 14}}, "size is .*14"),
    "two bounds": (
        "llava",
        {"size": {"shortest_edge": 28, "longest_edge": 56}},
        "size is .*longest_edge",
    ),
    "a margin": (
        "llava",
        {"do_pad": True, "pad_size": {"height": 56, "width": 56}},
        r'pad_size is {"height": 56, "width": 56}, and config.json\'s image_size 28',
    ),
    "not scaled": ("llava", {"do_resize": False}, "does not squash pictures"),
    "colours not said": ("llava", {"image_mean": None}, "does not say image_mean"),
    "spread not said": ("next", {"image_std": None}, "does not say image_std"),
    "size not said": ("next", {"size": None}, "does not say size"),
    "a crop of SigLIP's": ("joycaption", {"do_center_crop": True}, "does not squash"),
    "an image processor of another model": (
        "llava",
        {"image_processor_type": "BlipImageProcessor"},
        "is of a BlipImageProcessor, and the model takes a LlavaImageProcessor or a CLIP",
    ),
    "tiles for LLaVA": (
        "llava",
        {"image_processor_type": "LlavaNextImageProcessor"},
        "is of a LlavaNext",
    ),
    "no tiles for NeXT": ("next", {"image_processor_type": CLIP}, "is of a CLIPImageProcessor"),
    "tiles of another size": ("next", {"crop_size": 56}, "crop_size is .*56"),
    "a base view of another size": ("next", {"size": {"shortest_edge": 56}}, "size is .*56"),
    "another grid": (
        "next",
        {"image_grid_pinpoints": [[28, 56]]},
        "disagree on image_grid_pinpoints",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_settings_of_another_model_are_refused(
    folders: dict[str, Path], tmp_path: Path, fault: str
) -> None:
    name, settings, words = REFUSED[fault]
    model = changed(folders[name], tmp_path, setting(FILE, **settings))
    with pytest.raises(CheckpointError, match=words) as caught:
        PicturePreprocessor(model)
    assert caught.value.hint


WRITTEN = "{{ bos_token }}" + TEMPLATE
AS_TEXT = (  # JoyCaption's kind: the picture is the template's to place
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'user' %}{{ '<image>' }}{% endif %}"
    "{{ m.content.replace('<image>', '').lstrip() }}{% endfor %}"
)
TEXT_MODEL = "{% for m in messages %}{{ '[' + m.role + '] ' }}{{ m.content | trim }}{% endfor %}"


def test_a_template_that_writes_the_start_token_does_not_double_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = changed(folders["llava"], tmp_path, replaced("chat_template.jinja", WRITTEN.encode()))
    stock = stock_processor(tmp_path)
    content = [{"type": "image", "image": picture(9, 9)}, {"type": "text", "text": PROMPT}]
    expected = stock.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
    )
    ids = Chat(model).input_ids(PROMPT, (16,))
    assert list(ids) == expected["input_ids"][0]
    assert ids.count(SPECIAL[START]) == 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (AS_TEXT, "<|im_start|>system: Be brief.user: <image>What?"),
        (TEXT_MODEL, "<|im_start|>[system] Be brief.[user] <image>\nWhat?"),
    ],
)
def test_templates_that_take_text_are_given_text(
    folders: dict[str, Path], tmp_path: Path, template: str, expected: str
) -> None:
    model = changed(folders["llava"], tmp_path, replaced("chat_template.jinja", template.encode()))
    chat = Chat(model)
    ids = chat.input_ids("What?", (1,), system="Be brief.")
    assert chat.vocabulary.tokenizer.decode(ids) == expected


def moved(file: str) -> Change:
    return all_of(without("chat_template.jinja"), setting(file, chat_template=TEMPLATE))


@pytest.mark.parametrize(
    "file", ["tokenizer_config.json", "chat_template.json", "processor_config.json"]
)
@pytest.mark.parametrize("name", ["llava", "next"])
def test_the_template_may_lie_in_any_of_its_places(
    folders: dict[str, Path], tmp_path: Path, name: str, file: str
) -> None:
    model = changed(folders[name], tmp_path, moved(file))
    expected = Chat(model_at(folders[name])).input_ids(PROMPT, (3,))
    assert Chat(model).input_ids(PROMPT, (3,)) == expected
    assert check_companions(model, images=True, texts=False) == ()


@pytest.mark.parametrize("index", [None, 7])
def test_an_image_token_that_the_tokenizer_has_elsewhere_is_refused(
    folders: dict[str, Path], tmp_path: Path, index: int | None
) -> None:
    """Where config.json says none it is 32000, the default of LLaVA's class."""
    model = changed(folders["next"], tmp_path, setting("config.json", image_token_index=index))
    with pytest.raises(CheckpointError, match=f"image_token_index is {index or 32000}, but"):
        Chat(model)


def test_the_image_token_may_be_named_as_newer_files_do(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    token = SPECIAL["<image>"]
    change = setting("config.json", image_token_index=None, image_token_id=token)
    assert Chat(changed(folders["llava"], tmp_path, change)).vocabulary.placeholder_id == token
