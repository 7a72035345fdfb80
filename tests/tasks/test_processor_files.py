"""Files beside the weights: what may be missing, what is refused, and what is said of it."""

import json
import logging
import socket
from pathlib import Path

import pytest
import torch
from commands import Command
from folders import Change, all_of, changed, model_at, picture, replaced, setting, without
from tiny_tokenizers import SPECIAL
from transformers import AutoTokenizer
from transformers.utils.logging import warning_once

from vlmrun.errors import CheckpointError, UsageError
from vlmrun.models.companions import check_companions
from vlmrun.tasks.chat import Chat
from vlmrun.tasks.preprocess import PicturePreprocessor
from vlmrun.tasks.texts import TextPreprocessor

PROMPT = "What is in the picture?"


def unending_decoder(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    setting("config.json", text_config={**text, "eos_token_id": None})(folder)


USER_ONLY = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
USER_ONLY += "{% endif %}{{ m.role }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "system", "error", "words"),
    [
        (USER_ONLY, "be brief", UsageError, "takes no system prompt: no system"),
        ("a<image>b", "be brief", UsageError, "takes no system prompt: it is left out"),
        ("{{ raise_exception('no') }}", "", CheckpointError, "the chat template fails: no"),
        ("{{ 'a' + 1 }}", "", CheckpointError, "the chat template fails"),
        ("{% for %}", "", CheckpointError, "the chat template fails"),
        ("no picture", "", CheckpointError, "0 places for 1 pictures"),
    ],
)
def test_template_faults_are_told_apart(
    tiny_onevision: Path,
    tmp_path: Path,
    template: str,
    system: str,
    error: type[Exception],
    words: str,
) -> None:
    change = replaced("chat_template.jinja", template.encode())
    chat = Chat(changed(tiny_onevision, tmp_path, change))
    with pytest.raises(error, match=words):
        chat.input_ids(PROMPT, (20,), system=system)


NAMED = [
    {"name": "tool_use", "template": "tool <image>"},
    {"name": "default", "template": "jason <image>"},
]


@pytest.mark.parametrize(
    "change",
    [
        setting("chat_template.json", chat_template="jason <image>"),
        setting("processor_config.json", chat_template="jason <image>"),
        setting("tokenizer_config.json", chat_template="jason <image>"),
        setting("tokenizer_config.json", chat_template=NAMED),
    ],
    ids=["chat_template.json", "processor_config.json", "tokenizer_config.json", "several"],
)
def test_template_is_found_wherever_it_lies(
    tiny_onevision: Path, tmp_path: Path, change: Change
) -> None:
    moved = all_of(without("chat_template.jinja"), change)
    chat = Chat(changed(tiny_onevision, tmp_path, moved))
    ids = chat.input_ids(PROMPT, (20,))
    assert chat.vocabulary.tokenizer.decode(ids).startswith("jason")


@pytest.mark.parametrize("value", [NAMED[:1], [{"name": [1]}], {"tool_use": "<image>"}, 5, True])
def test_what_is_no_template_is_refused_before_torch(
    vlmrun: Command, tiny_onevision: Path, tmp_path: Path, value: object
) -> None:
    """The family's own form takes the place of a missing one, never of a wrong one."""
    change = all_of(
        without("chat_template.jinja"), setting("tokenizer_config.json", chat_template=value)
    )
    model = changed(tiny_onevision, tmp_path, change)
    words = "tokenizer_config.json: chat_template is no text, nor several with a default"
    with pytest.raises(CheckpointError, match=words):
        check_companions(model, images=True, texts=False)
    told = vlmrun("mem-plan", "-m", tmp_path)
    assert f"vlmrun caption would refuse it: {words}" in told.err


BAD_CAPTION_FILES = {
    "no preprocessor_config.json": (without("preprocessor_config.json"), "preprocessor_config"),
    "no colours": (
        setting("preprocessor_config.json", image_mean=None, image_std=None),
        "does not say image_mean, image_std",
    ),
    "no size": (setting("preprocessor_config.json", size=None), "does not say size"),
    "no filter": (setting("preprocessor_config.json", resample=None), "does not say resample"),
    "unknown filter": (
        setting("preprocessor_config.json", resample=17),
        "resample is 17, no filter",
    ),
    "two colours": (setting("preprocessor_config.json", image_mean=[0.5, 0.5]), "cannot be read"),
    "an endless colour": (
        setting("preprocessor_config.json", image_mean=[0.5, 0.5, float("inf")]),
        "make no finite numbers",
    ),
    "no spread": (
        setting("preprocessor_config.json", image_std=[0.5, 0, 0.5]),
        "make no finite numbers",
    ),
    "tiles of another size": (
        setting("preprocessor_config.json", crop_size={"height": 14, "width": 14}),
        "crop_size is .* image_size 28",
    ),
    "another size": (
        setting("preprocessor_config.json", size={"height": 56, "width": 56}),
        "size is .* image_size 28",
    ),
    "a size to fit into": (
        setting("preprocessor_config.json", size={"shortest_edge": 28}),
        "size is .* image_size 28",
    ),
    "another processor": (
        setting("preprocessor_config.json", image_processor_type="CLIPImageProcessor"),
        "is of a CLIPImageProcessor",
    ),
    "a crop": (setting("preprocessor_config.json", do_center_crop=True), "does not squash"),
    "another grid": (
        setting("preprocessor_config.json", image_grid_pinpoints=[[28, 28]]),
        "disagree on image_grid_pinpoints",
    ),
    "another token count": (
        setting("processor_config.json", num_image_tokens=17),
        "disagree on num_image_tokens",
    ),
    "another aspect": (
        setting("processor_config.json", vision_aspect_ratio="anyres_max_4"),
        "disagree on vision_aspect_ratio",
    ),
    "another image token": (
        setting("processor_config.json", image_token="<video>"),
        "the tokenizer has <video> as 399",
    ),
    "another image token id": (setting("config.json", image_token_index=7), "image_token_index"),
    "no image token id": (setting("config.json", image_token_index=None), "151646"),
    "no tokenizer": (without("tokenizer.json"), "tokenizer.json is missing"),
    "no end": (
        all_of(
            without("generation_config.json"),
            unending_decoder,
            setting("tokenizer_config.json", eos_token=None, tokenizer_class="TokenizersBackend"),
        ),
        "no file names the token that ends",
    ),
    "an end in words": (
        setting("generation_config.json", eos_token_id="<|im_end|>"),
        r"generation_config\.json: eos_token_id is '<\|im_end\|>', and .* has tokens 0 to 407",
    ),
    "ends in lists": (setting("generation_config.json", eos_token_id=[[397], 395]), "eos_token_id"),
    "an end outside": (setting("generation_config.json", eos_token_id=[397, 408]), "eos_token_id"),
    "an end below": (setting("generation_config.json", eos_token_id=-1), "eos_token_id is -1"),
    "an end that is true": (setting("generation_config.json", eos_token_id=True), "is True"),
    "an end outside, in another file": (
        all_of(without("generation_config.json"), setting("config.json", eos_token_id=408)),
        r"config\.json: eos_token_id is 408",
    ),
    "a length in words": (
        setting("tokenizer_config.json", model_max_length="long"),
        r"tokenizer_config\.json: model_max_length is 'long', not a number",
    ),
}


@pytest.mark.parametrize("fault", BAD_CAPTION_FILES)
def test_bad_files_are_refused_by_name(tiny_onevision: Path, tmp_path: Path, fault: str) -> None:
    change, words = BAD_CAPTION_FILES[fault]
    model = changed(tiny_onevision, tmp_path, change)
    with pytest.raises(CheckpointError, match=words) as caught:
        PicturePreprocessor(model), Chat(model)
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "change",
    [
        setting("processor_config.json", num_image_tokens=None, image_token=None),
        without("processor_config.json"),
        setting("preprocessor_config.json", image_grid_pinpoints=None, rescale_factor=None),
    ],
)
def test_what_can_be_derived_may_be_missing(
    tiny_onevision: Path, tmp_path: Path, change: Change
) -> None:
    whole, part = model_at(tiny_onevision), changed(tiny_onevision, tmp_path, change)
    seen, same = (PicturePreprocessor(m).pictures([picture(70, 40)]) for m in (whole, part))
    assert torch.equal(same.pixel_values, seen.pixel_values)
    assert Chat(part).input_ids(PROMPT, same.tokens) == Chat(whole).input_ids(PROMPT, seen.tokens)


def test_settings_may_be_nested_in_the_processor_configuration(
    tiny_onevision: Path, tmp_path: Path
) -> None:
    def nest(folder: Path) -> None:
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        setting("processor_config.json", image_processor=settings)(folder)
        without("preprocessor_config.json")(folder)

    image = picture(70, 40)
    nested = PicturePreprocessor(changed(tiny_onevision, tmp_path, nest)).pictures([image])
    flat = PicturePreprocessor(model_at(tiny_onevision)).pictures([image])
    assert torch.equal(nested.pixel_values, flat.pixel_values)


@pytest.mark.parametrize(
    ("change", "stops"),
    [
        (lambda folder: None, {397}),
        (setting("generation_config.json", eos_token_id=[397, 395]), {397, 395}),
        (setting("generation_config.json", eos_token_id=None), {397}),
        (setting("config.json", eos_token_id=3), {397}),
        (
            all_of(without("generation_config.json"), setting("config.json", eos_token_id=0)),
            {0},
        ),
    ],
)
def test_stop_tokens_come_from_the_first_file_that_names_them(
    tiny_onevision: Path, tmp_path: Path, change: Change, stops: set[int]
) -> None:
    vocabulary = Chat(changed(tiny_onevision, tmp_path, change)).vocabulary
    assert (vocabulary.stop_ids, vocabulary.pad_id) == (stops, SPECIAL["<|endoftext|>"])
    assert vocabulary.placeholder_id == SPECIAL["<image>"]


def test_checkpoint_code_is_not_run(tiny_onevision: Path, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass")
        kind = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
        setting("tokenizer_config.json", **kind)(folder)

    model = changed(tiny_onevision, tmp_path, change)
    with pytest.raises(CheckpointError, match="the tokenizer cannot be read"):
        Chat(model)
    assert not (tmp_path / "ran").exists()


def unended(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))


BAD_TEXT_FILES = {
    "no sentencepiece model": ("tiny_siglip", without("spiece.model"), "spiece.model is missing"),
    "no class": ("tiny_siglip2", without("tokenizer_config.json"), "spiece.model is missing"),
    "no vocabulary": ("tiny_siglip2", without("tokenizer.json"), "tokenizer.json is missing"),
    "damaged model": (
        "tiny_siglip",
        replaced("spiece.model", b"damaged"),
        "the tokenizer cannot be read",
    ),
    "damaged vocabulary": (
        "tiny_siglip2",
        replaced("tokenizer.json", b"{}"),
        "the tokenizer cannot be read",
    ),
    "no end": ("tiny_siglip2", unended, "does not end and pad texts"),
    "no padding": (
        "tiny_siglip2",
        setting("tokenizer_config.json", pad_token=None),
        "does not end and pad texts",
    ),
    "a length in words": (
        "tiny_siglip",
        setting("tokenizer_config.json", model_max_length="16"),
        "model_max_length is '16', not a number",
    ),
}


@pytest.mark.parametrize("fault", BAD_TEXT_FILES)
def test_bad_tokenizers_are_refused_by_name(
    fault: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fixture, change, words = BAD_TEXT_FILES[fault]
    model = changed(request.getfixturevalue(fixture), tmp_path, change)
    with pytest.raises(CheckpointError, match=words) as caught:
        TextPreprocessor(model)
    assert "\n" not in caught.value.message
    PicturePreprocessor(model)  # pictures need no tokenizer


def test_texts_need_no_image_settings(tiny_siglip: Path, tmp_path: Path) -> None:
    model = changed(tiny_siglip, tmp_path, without("preprocessor_config.json"))
    assert len(TextPreprocessor(model).tokens(["a"])[0]) == 1
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json is missing"):
        PicturePreprocessor(model)


def test_tokens_that_the_model_lacks_are_refused(tiny_siglip2: Path, tmp_path: Path) -> None:
    def grow(folder: Path) -> None:
        path = folder / "tokenizer.json"
        found = json.loads(path.read_text())
        more = {"id": 300, "content": "zebra", "normalized": False, "special": False}
        more |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        path.write_text(json.dumps({**found, "added_tokens": [*found["added_tokens"], more]}))

    model = changed(tiny_siglip2, tmp_path, grow)
    preprocessor = TextPreprocessor(model)
    with pytest.raises(CheckpointError, match="id 300, and the model has 300 tokens"):
        preprocessor.tokens(["a fox", "a zebra"])


def test_padding_that_the_model_lacks_is_refused(tiny_siglip2: Path, tmp_path: Path) -> None:
    """Its row of the table would be another tensor's bytes."""
    model = changed(tiny_siglip2, tmp_path, setting("tokenizer_config.json", pad_token="<more>"))
    with pytest.raises(CheckpointError, match="the tokenizer gives id 300"):
        TextPreprocessor(model)


def test_nothing_is_asked_of_the_network(
    siglip: Path, tiny_onevision: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *host, **_: asked.append(host))
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: asked.append(address))
    for model in (model_at(siglip), model_at(tiny_onevision)):
        PicturePreprocessor(model)
    TextPreprocessor(model_at(siglip))
    Chat(model_at(tiny_onevision))
    assert asked == []


def hub_like_ends(folder: Path) -> None:
    """The hub's files leave out ids whose class defaults lie outside of the vocabulary."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    kept = {key: value for key, value in text.items() if not key.endswith("os_token_id")}
    setting("config.json", text_config=kept)(folder)


def test_transformers_says_nothing(
    siglip: Path, tiny_onevision: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its remarks on files and long texts never reach stderr."""
    model = changed(siglip, tmp_path, hub_like_ends)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        warning_once.cache_clear()
        TextPreprocessor(model).tokens(["jump " * 40, "umbrella </s>"])
        Chat(model_at(tiny_onevision)).input_ids("jump " * 2000, ())
        assert caplog.messages == []
        warning_once.cache_clear()
        AutoTokenizer.from_pretrained(tmp_path)("jump " * 40)
    finally:
        logger.removeHandler(caplog.handler)
    assert {message.split()[0] for message in caplog.messages} == {"Model", "Token"}
