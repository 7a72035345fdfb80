"""What must lie beside the weights: settings of the image processor, tokenizer, chat template.

Looked at before torch is imported; the processors themselves are built by the tasks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.checkpoints.folder import read_json, unreadable
from vlmrun.models.family import Config
from vlmrun.models.model import Model
from vlmrun.models.templates import KNOWN
from vlmrun.models.transforms import UNRUN

COPY = "copy it from where the model comes from"
OTHER_MODEL = "the files are of different models or versions; download them again"
VOCABULARIES = ("tokenizer.json", "spiece.model", "tokenizer.model", "vocab.json")
CROPPED = "the middle of {} is seen, as the model's settings for timm say"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
# settings of transformers' generate() that change greedy answers and are not followed, with the
# values that ask for nothing
UNFOLLOWED: Mapping[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "guidance_scale": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None, []),
    "force_words_ids": (None, []),
    "token_healing": (None, False),
    "prefill_chunk_size": (None,),  # PaliGemma's prefix is seen whole
    "watermarking_config": (None,),
    "stop_strings": (None, [], ""),
    "max_time": (None,),
}


def check_companions(
    model: Model, *, images: bool, texts: bool, dynamic: bool = False
) -> tuple[str, ...]:
    """Hold a folder to what a job with pictures or texts needs of it; `dynamic` pictures are seen
    at their own size. Returns notes on what is put in place of a missing file, and on what is
    seen of a picture.

    Raises:
        CheckpointError: a file is missing, or contradicts config.json.
        UnsupportedModel: pictures cannot be made what the tower takes.
    """
    folder = model.source.folder
    assert folder is not None
    caption = model.family.task == "caption"
    notes: tuple[str, ...] = ()
    if images:
        check_channels(model)
        file, settings = read_image_settings(model)
        if UNRUN in settings and not dynamic:
            raise UnsupportedModel(
                f"{file}: {settings[UNRUN]}",
                "embed --dynamic-size shows pictures as they are, uncut",
            )
        check_tiling(model)
        notes += () if dynamic else crop_notes(model.config)
    if caption and model.family.prompt_style == "chat":
        notes += check_template(model)
    if caption:
        notes += unfollowed_settings(model)
    if caption or texts:
        check_tokenizer(folder, default="TokenizersBackend" if caption else text_tokenizer(model))
    return notes


def crop_notes(config: Config) -> tuple[str, ...]:
    """A note where a configuration of timm's has pictures cut: all of them where they are scaled
    to more than the tower's square, else those of another shape."""
    settings = config.get("image_processor", {})
    if not settings.get("do_center_crop"):
        return ()
    all_of_them = settings["size"]["shortest_edge"] > settings["crop_size"]["width"]
    return (CROPPED.format("every picture" if all_of_them else "a picture that is not square"),)


def check_channels(model: Model) -> None:
    """Raises UnsupportedModel where the tower takes no pictures of red, green and blue."""
    vision = model.architecture.vision
    if vision is not None and vision.channels != 3:
        raise UnsupportedModel(
            f"{model.source.name} takes pictures of {vision.channels} channels",
            "pictures are decoded to three: red, green and blue",
        )


def unfollowed_settings(model: Model) -> tuple[str, ...]:
    """A note of what the settings of generation ask for and is not done."""
    file, settings = read_generation(model)
    named = [name for name, idle in UNFOLLOWED.items() if settings.get(name) not in idle]
    return (f"{file} sets {', '.join(named)}: not followed",) if named else ()


def read_generation(model: Model) -> tuple[str, Mapping[str, Any]]:
    """The file that holds the settings of generation, and the settings.

    Without a file of their own they are config.json's, and what that leaves open the decoder's
    part of it, as transformers reads old folders.
    """
    folder = model.source.folder
    assert folder is not None
    if (folder / GENERATION).exists():
        return GENERATION, read_json(folder / GENERATION)
    given = {name: value for name, value in model.config.items() if value is not None}
    return "config.json", {**(model.config.get("text_config") or {}), **given}


def text_tokenizer(model: Model) -> str:
    """The tokenizer of SigLIP's text tower where tokenizer_config.json names none."""
    vision = model.architecture.vision
    return "Siglip2Tokenizer" if vision is not None and vision.naflex else "SiglipTokenizer"


def read_optional(folder: Path, name: str) -> Mapping[str, Any]:
    """A JSON file of the folder; empty where there is none."""
    return read_json(folder / name) if (folder / name).exists() else {}


def read_image_settings(model: Model) -> tuple[str, Mapping[str, Any]]:
    """The file that holds the image processor's settings, and the settings.

    Configurations that are not transformers' own bring them along. Files written by
    transformers 5 nest them in processor_config.json, which goes first there.

    Raises:
        CheckpointError: no file holds any.
    """
    folder, own = model.source.folder, model.config.get("image_processor")
    assert folder is not None
    if isinstance(own, dict):
        return "config.json", own
    nested = read_optional(folder, "processor_config.json").get("image_processor")
    if isinstance(nested, dict):
        return "processor_config.json", nested
    settings = read_optional(folder, "preprocessor_config.json")
    if not settings:
        raise CheckpointError("preprocessor_config.json is missing", COPY)
    return "preprocessor_config.json", settings


def check_tokenizer(folder: Path, *, default: str) -> None:
    """Hold the tokenizer's files to its class: the one tokenizer_config.json names, or `default`.

    Raises:
        CheckpointError: they are missing, or a setting is not what it should be.
    """
    settings = read_optional(folder, "tokenizer_config.json")
    kind = str(settings.get("tokenizer_class") or default).removesuffix("Fast")
    if kind == "SiglipTokenizer" and not (folder / "spiece.model").exists():
        raise CheckpointError(
            "spiece.model is missing, which a SiglipTokenizer reads",
            f"{COPY}; with tokenizer.json alone, tokenizer_config.json must name another class",
        )
    if not any((folder / name).exists() for name in VOCABULARIES):
        raise CheckpointError("tokenizer.json is missing", COPY)
    longest = settings.get("model_max_length")
    if not isinstance(longest, int | float | None):
        raise CheckpointError(
            f"tokenizer_config.json: model_max_length is {longest!r}, not a number", COPY
        )


def find_template(folder: Path) -> str:
    """The chat template of a folder, the default one of several, from the first of its four places
    that has one, in transformers' order; empty where none has.

    Raises:
        CheckpointError: a file cannot be read, or what it has is no template.
    """
    for name in ("processor_config.json", "chat_template.json"):
        if found := template_in(folder, name):
            return found
    try:
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return template_in(folder, "tokenizer_config.json")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{TEMPLATE} is not UTF-8", COPY) from error
    except OSError as error:
        raise unreadable(folder / TEMPLATE, error) from error


def template_in(folder: Path, name: str) -> str:
    """The chat template in a JSON file of the folder; empty where there is none."""
    found = read_optional(folder, name).get("chat_template")
    if not found:
        return ""
    if isinstance(found, list):  # as tokenizer_config.json lists several
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[-1].get("template") if named else None
    elif isinstance(found, dict):
        found = found.get("default")
    if not isinstance(found, str):
        raise CheckpointError(f"{name}: chat_template is no text, nor several with a default", COPY)
    return found


def read_template(model: Model) -> str:
    """The chat template of a folder, else the family's own.

    Raises:
        CheckpointError: there is none, or what a file has is none.
    """
    assert model.source.folder is not None
    found = find_template(model.source.folder) or model.family.chat_template(model.config)
    if not found:
        decoder = model.architecture.decoder
        assert decoder is not None
        raise CheckpointError(
            f"{TEMPLATE} is missing, no other file has one, and the prompts of a {decoder.kind} "
            f"decoder of {decoder.vocabulary} tokens are not known",
            f"{COPY}; known are those of {KNOWN[model.family.name]}",
        )
    return found


def check_template(model: Model) -> tuple[str, ...]:
    """A note where the family's own chat template is used; raises as `read_template`."""
    folder = model.source.folder
    assert folder is not None
    read_template(model)
    if find_template(folder):
        return ()
    return (f"{TEMPLATE} is missing: the form of {model.family.name}'s prompts is vlmrun's own",)


def check_tiling(model: Model) -> None:
    """Hold the processor's files to what config.json says of tiles and tokens.

    What other files say of token counts is left alone: old ones lack it or have it wrong, and
    only the model's own count is used.

    Raises:
        CheckpointError: they disagree.
    """
    folder, vision = model.source.folder, model.architecture.vision
    tiling = model.architecture.tiling
    assert folder is not None
    assert vision is not None
    if tiling is None:
        return
    processor = read_optional(folder, "processor_config.json")
    file, settings = read_image_settings(model)
    facts: list[tuple[str, Mapping[str, Any], object]] = [
        ("image_grid_pinpoints", settings, [list(pair) for pair in tiling.resolutions])
    ]
    if tiling.max_tiles is not None:
        facts += [
            ("num_image_tokens", processor, vision.tokens),
            ("vision_aspect_ratio", processor, f"anyres_max_{tiling.max_tiles}"),
            ("vision_feature_select_strategy", processor, "full"),
        ]
    for name, given, expected in facts:
        if given.get(name) not in (None, expected):
            where = file if given is settings else "processor_config.json"
            raise CheckpointError(f"{where} and config.json disagree on {name}", OTHER_MODEL)
