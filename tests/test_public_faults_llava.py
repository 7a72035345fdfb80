"""Faults of other programs with LLaVA, LLaVA-NeXT, JoyCaption and OneVision, each by its number
in the list of public faults, and what is right instead."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from commands import Command, assert_refused
from folders import (
    Change,
    Tensors,
    all_of,
    changed,
    copied,
    model_at,
    picture,
    setting,
    weights,
    without,
)
from light import ONEVISION
from PIL import Image
from tiny_llava import build_joycaption, build_llava, build_llava_next, stock_processor

from vlmrun.models import llava, llava_next
from vlmrun.models.families import FAMILIES
from vlmrun.models.family import View
from vlmrun.models.onevision import LLAVA_ONEVISION
from vlmrun.models.templates import KNOWN
from vlmrun.tasks.chat import Chat
from vlmrun.tasks.preprocess import PicturePreprocessor

SIZES = ((60, 40), (30, 90), (40, 40))
PROMPT = "what is in the picture?"
FLAGS = ("--json", "-q", "--max-new-tokens", "10", "-p", PROMPT)
HEAD = "language_model.lm_head.weight"
TABLE = "language_model.model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    make = tmp_path_factory.mktemp
    return {
        "llava": build_llava(make("llava")),
        "next": build_llava_next(make("next")),
        "joycaption": build_joycaption(make("joycaption")),
    }


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{width}x{height}.png" for width, height in SIZES]
    for path, size in zip(paths, SIZES, strict=True):
        picture(*size).save(path)
    return paths


@pytest.fixture
def captions(vlmrun: Command, pictures: list[Path]) -> Callable[..., list[str]]:
    """Captions of the three pictures."""

    def run(folder: Path, *flags: object) -> list[str]:
        told = vlmrun("caption", "-m", folder, *FLAGS, *pictures, *flags)
        assert told.code == 0, told.err
        found = [row["caption"] for row in told.rows]
        assert len(set(found)) == len(pictures)
        return found

    return run


def stock_captions(folder: Path, pictures: Sequence[Path], dtype: str = "float32") -> list[str]:
    """What stock transformers makes of each picture by itself, on weights read at `dtype`."""
    [kind] = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, kind).from_pretrained(folder, dtype=getattr(torch, dtype))
    model, processor = model.float().eval(), stock_processor(folder)
    said = [{"type": "image"}, {"type": "text", "text": PROMPT}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": said}], add_generation_prompt=True
    )
    found = []
    for path in pictures:
        inputs = processor(text=[text], images=[Image.open(path)], return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=10, do_sample=False)
        answer = out[0, inputs["input_ids"].shape[1] :]
        found.append(processor.decode(answer, skip_special_tokens=True).strip())
    return found


def text_setting(**values: Any) -> Change:
    """Other values of the decoder's part of the configuration."""

    def change(folder: Path) -> None:
        text = json.loads((folder / "config.json").read_text())["text_config"]
        setting("config.json", text_config={**text, **values})(folder)

    return change


def share_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[TABLE].clone()


def drop_head(tensors: Tensors) -> None:
    tensors.pop(HEAD)


@pytest.mark.parametrize("name", ["llava", "next", "joycaption"])
def test_f08_head_tied_in_the_text_part_only(
    captions: Callable[..., list[str]], folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """transformers#43429, vllm#53019: garbage from a random head, without an error."""
    written = copied(folders[name], tmp_path / "written", weights(share_head))
    tie = all_of(weights(drop_head), text_setting(tie_word_embeddings=True))
    tied = copied(folders[name], tmp_path / "tied", tie)
    assert captions(tied) == captions(written)
    assert captions(tied, "--resident", "0%") == captions(written)


@pytest.mark.parametrize("name", ["llava", "next"])
def test_f07_no_head_and_no_tie_is_no_model(
    vlmrun: Command, folders: dict[str, Path], tmp_path: Path, pictures: list[Path], name: str
) -> None:
    """transformers#43617, #43592: a head that no file holds is drawn at random."""
    folder = copied(folders[name], tmp_path / "m", weights(drop_head))
    told = vlmrun("caption", "-m", folder, *FLAGS, *pictures)
    assert_refused(told, "1 tensor is missing from the checkpoint: lm_head.weight")


def test_f06_a_pooling_head_that_nothing_uses(
    captions: Callable[..., list[str]],
    folders: dict[str, Path],
    tmp_path: Path,
    pictures: list[Path],
) -> None:
    """taggui#344: JoyCaption fails in the head of its tower, which it never needs."""

    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".head." in name]:
            tensors.pop(name)

    vision = json.loads((folders["joycaption"] / "config.json").read_text())["vision_config"]
    headless = setting("config.json", vision_config={**vision, "vision_use_head": False})
    folder = copied(folders["joycaption"], tmp_path / "m", all_of(weights(drop), headless))
    found = captions(folders["joycaption"], "--resident", "0%")
    assert found == captions(folder) == stock_captions(folders["joycaption"], pictures)


def test_f13_too_little_memory_is_said_before_loading(
    vlmrun: Command, folders: dict[str, Path], pictures: list[Path]
) -> None:
    """taggui#384: the program dies while it loads JoyCaption."""
    told = vlmrun("caption", "-m", folders["joycaption"], *FLAGS, *pictures, "--ram", "1MiB")
    assert_refused(told, "does not fit 1.0 MiB of RAM", "smallest budget", hint="--ram", code=4)


@pytest.mark.parametrize("build", [build_llava, build_llava_next, build_joycaption])
def test_f15_half_precision_files_on_a_cpu(
    captions: Callable[..., list[str]],
    tmp_path: Path,
    pictures: list[Path],
    build: Callable[..., Path],
) -> None:
    """ComfyUI_SLK_joy_caption_two#31: "LayerNormKernelImpl" not implemented for 'Half'."""
    folder = build(tmp_path / "m", dtype="float16")
    found = captions(folder, "--compute-dtype", "float32")
    assert found == stock_captions(folder, pictures, "float16")


@pytest.mark.parametrize(
    ("size", "tokens"), [((700, 840), 576 + 48 * 40 + 48), ((1024, 899), 576 + 42 * 48 + 42)]
)
def test_f38_tokens_of_odd_sizes(size: tuple[int, int], tokens: int) -> None:
    """transformers#34625, #35775, vllm#8421: the prompt's places and the features differ."""
    architecture = llava_next.architecture({})  # the hub's numbers
    assert llava_next.image_cost(architecture, *size, View()).tokens == tokens


@pytest.mark.parametrize(
    ("tower", "strategy", "tokens"),
    [
        ({}, "default", 576),
        ({}, "full", 577),
        (ONEVISION["vision_config"], "full", 729),
        (ONEVISION["vision_config"], "default", 728),  # a patch is lost, as in the stock model
    ],
)
def test_f39_the_class_token_is_counted_once(
    tower: dict[str, Any], strategy: str, tokens: int
) -> None:
    """transformers#34447, vllm#7153: 728 or 577 places for 729 or 576 features."""
    config: dict[str, Any] = {"vision_feature_select_strategy": strategy}
    found = llava.architecture(config | ({"vision_config": tower} if tower else {}))
    assert llava.image_cost(found, 640, 480, View()).tokens == tokens


@pytest.mark.parametrize("name", ["llava", "next", "joycaption"])
def test_f39_what_the_processor_counts_does_not_matter(
    captions: Callable[..., list[str]],
    folders: dict[str, Path],
    tmp_path: Path,
    name: str,
) -> None:
    wrong = setting(
        "processor_config.json",
        num_additional_image_tokens=5,
        patch_size=3,
        vision_feature_select_strategy="full",
    )
    assert captions(copied(folders[name], tmp_path / "m", wrong)) == captions(folders[name])


@pytest.mark.parametrize("name", ["llava", "next"])
def test_f40_patch_size_missing(
    captions: Callable[..., list[str]],
    folders: dict[str, Path],
    tmp_path: Path,
    pictures: list[Path],
    name: str,
) -> None:
    """vllm#13690, mlx-vlm#178, transformers#41206: int // None."""
    absent = dict.fromkeys(
        ("patch_size", "num_additional_image_tokens", "vision_feature_select_strategy")
    )
    folder = copied(folders[name], tmp_path / "m", setting("processor_config.json", **absent))
    assert captions(folder) == stock_captions(folders[name], pictures)
    without("processor_config.json")(folder)
    assert captions(folder) == stock_captions(folders[name], pictures)


def test_f41_several_pictures_are_not_tiled() -> None:
    """transformers#38084, #34585: thousands of tokens each, which OneVision never saw."""
    architecture = LLAVA_ONEVISION.architecture(ONEVISION)
    cost = LLAVA_ONEVISION.image_cost(architecture, 2000, 1500, View(detail="low"))
    assert 2 * cost.tokens == 2 * (729 + 1)


def test_f41_several_pictures_cost_one_view_each(tiny_onevision: Path) -> None:
    seen = PicturePreprocessor(model_at(tiny_onevision)).pictures([picture(60, 40)] * 2)
    assert (seen.crops, seen.tokens) == ((1, 1), (17, 17))


def test_f42_no_torchvision(
    captions: Callable[..., list[str]],
    folders: dict[str, Path],
    tiny_onevision: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers#43986: a processor that cannot be built without it."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    for folder in (*folders.values(), tiny_onevision):
        assert len(captions(folder)) == len(SIZES)


@pytest.mark.parametrize("build", [build_llava, build_llava_next])
def test_f43_no_chat_template(
    vlmrun: Command, tmp_path: Path, pictures: list[Path], build: Callable[..., Path]
) -> None:
    """vllm#17758, fastmlx#6: refused, or asked in a form that the model never saw."""
    folder = build(tmp_path / "m", decoder={"vocab_size": 32064})  # Vicuna's, by its size
    with_template = Chat(model_at(folder)).input_ids(PROMPT, (16,))
    without("chat_template.jinja")(folder)
    ids = Chat(model_at(folder)).input_ids(PROMPT, (16,))
    if build is build_llava:
        assert ids == with_template
    else:  # LLaVA 1.6's cards have a line of the system's before
        chat = Chat(model_at(folder))
        said = chat.vocabulary.tokenizer.decode(ids, skip_special_tokens=True)
        assert said.startswith("A chat between a curious human and an artificial")
        assert ids[-8:] == with_template[-8:]
    told = vlmrun("caption", "-m", folder, "--max-new-tokens", "1", *pictures)
    note = "chat_template.jinja is missing: the form of LLaVA"
    assert [note in line for line in told.err.splitlines()].count(True) == 1
    assert told.code == 0


def test_f43_no_chat_template_of_onevision(
    vlmrun: Command, tiny_onevision: Path, tmp_path: Path, pictures: list[Path]
) -> None:
    folder = copied(tiny_onevision, tmp_path / "m", without("chat_template.jinja"))
    ask = ("caption", "--json", "-p", PROMPT, "--system", "Be brief.", *pictures)
    told, same = vlmrun(*ask, "-m", folder), vlmrun(*ask, "-m", tiny_onevision)
    assert [row["caption"] for row in told.rows] == [row["caption"] for row in same.rows]
    assert "the form of LLaVA-OneVision's prompts is vlmrun's own" in told.err
    assert same.err == ""


@pytest.mark.parametrize("name", ["llava", "next"])
def test_f43_a_form_that_is_not_known_is_refused(
    vlmrun: Command, folders: dict[str, Path], tmp_path: Path, pictures: list[Path], name: str
) -> None:
    """A Llama of 408 tokens may be anyone's."""
    folder = copied(folders[name], tmp_path / "m", without("chat_template.jinja"))
    told = vlmrun("caption", "-m", folder, *FLAGS, *pictures)
    unknown = "the prompts of a llama decoder of 408 tokens are not known"
    assert_refused(told, "chat_template.jinja is missing", unknown, hint="copy it")
    assert "known are those of Vicuna, Llama 3, " in told.err


def test_f43_every_family_says_whose_forms_it_knows() -> None:
    chats = [f for f in FAMILIES if f.task == "caption" and f.prompt_style == "chat"]
    assert {family.name for family in chats} == set(KNOWN)


def halves() -> Image.Image:
    """2:1, red on the left and blue on the right."""
    image = Image.new("RGB", (112, 56), (255, 0, 0))
    image.paste((0, 0, 255), (56, 0, 112, 56))
    return image


def test_f51_tiles_of_a_wide_picture(tmp_path: Path) -> None:
    """llama.cpp#8457, #17290: tiles in another order or shape, right on squares only."""
    model = model_at(build_llava_next(tmp_path / "m", pinpoints=[(28, 56), (56, 56)]))
    wide = PicturePreprocessor(model).pictures([halves()])
    assert wide.crops == (3,)
    _, left, right = wide.pixel_values
    assert (left[0, :, :-4] == 1).all()  # at the border of the colours the filter mixes them
    assert (left[1:, :, :-4] == -1).all()
    assert (right[2, :, 4:] == 1).all()
    assert (right[:2, :, 4:] == -1).all()
    tall = PicturePreprocessor(model).pictures([halves().rotate(90, expand=True)])
    assert tall.crops == (5,)  # 56 x 56 keeps more of it than 28 x 56
    corner = tall.pixel_values[1]  # upper left: 14 columns of padding, then blue
    assert (corner[:, :, :14] == -1).all()
    assert (corner[2, :-4, 14:] == 1).all()


def test_f51_padding_of_a_wide_picture(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers#33175: LLaVA was trained on squares padded with the mean colour; the
    processor of the converted files cuts the sides off."""
    cut = PicturePreprocessor(model_at(folders["llava"])).pictures([halves()]).pixel_values[0]
    assert (cut[0, :, :10] == 1).all()
    assert (cut[2, :, 18:] == 1).all()
    mean = [0.21, 0.43, 0.65]
    padded = setting(
        "preprocessor_config.json",
        image_processor_type="LlavaImageProcessor",
        do_pad=True,
        image_mean=mean,
    )
    model = changed(folders["llava"], tmp_path / "m", padded)
    whole = PicturePreprocessor(model).pictures([halves()]).pixel_values[0]
    bar = (np.floor(np.array(mean) * 255) / 255 - mean) / 0.5
    expected = torch.tensor(bar).float()[:, None, None]
    for rows in whole[:, :4], whole[:, -4:]:  # bars of 7 rows
        assert (rows - expected).abs().max() < 1e-6
    middle = whole[:, 12:16]
    assert ((middle[0, :, :10] * 0.5 + mean[0]) - 1).abs().max() < 1e-6  # red, and
    assert ((middle[2, :, 18:] * 0.5 + mean[2]) - 1).abs().max() < 1e-6  # blue to the ends


@pytest.mark.parametrize("name", ["llava", "next", "joycaption"])
def test_f53_a_batch_is_padded_on_the_left(
    captions: Callable[..., list[str]],
    folders: dict[str, Path],
    pictures: list[Path],
    name: str,
) -> None:
    """LLaVA-NeXT#169, transformers#28184: rows of a batch differ from the same rows alone."""
    found = captions(folders[name], "--batch-size", "3")
    assert found == captions(folders[name], "--batch-size", "1")
    assert found == stock_captions(folders[name], pictures)


@pytest.mark.parametrize("name", ["llava", "next"])
def test_image_tokens_in_a_prompt_are_refused(
    vlmrun: Command, folders: dict[str, Path], pictures: list[Path], name: str
) -> None:
    """Stock models answer from the placeholder's own vector."""
    told = vlmrun("caption", "-m", folders[name], pictures[0], "-p", "what is <image>?")
    assert_refused(told, "the prompt holds <image>", hint="leave it out", code=2)
