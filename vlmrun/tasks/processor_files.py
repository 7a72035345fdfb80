"""What the files beside the weights say: tokenizer, chat template, settings of the processors."""

from pathlib import Path
from typing import Any

from transformers.generation.configuration_utils import GenerationConfig
from transformers.models.auto.tokenization_auto import AutoTokenizer

from vlmrun.errors import CheckpointError, UsageError
from vlmrun.models.companions import COPY, OTHER_MODEL, check_tokenizer, read_optional
from vlmrun.models.model import Model
from vlmrun.models.quiet import quiet_transformers

IMAGE_TOKEN = "<image>"


def load_tokenizer(folder: Path, *, default: str) -> Any:
    """The tokenizer of a folder, of the class that tokenizer_config.json names, else `default`.

    Raises:
        CheckpointError: its files are missing or damaged.
    """
    check_tokenizer(folder, default=default)
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise CheckpointError(f"the tokenizer cannot be read: {one_line(error)}", COPY) from error


def read_template(model: Model, tokenizer: Any) -> str:
    """The chat template, from the first place that has one, in transformers' order, else the
    family's own.

    Raises:
        CheckpointError: there is none.
    """
    folder = model.source.folder
    assert folder is not None
    template = read_optional(folder, "processor_config.json").get("chat_template")
    template = template or read_optional(folder, "chat_template.json").get("chat_template")
    # The tokenizer has read chat_template.jinja, else tokenizer_config.json.
    template = template or tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    template = template or model.family.chat_template(model.config)
    if not isinstance(template, str) or not template:
        raise CheckpointError("chat_template.jinja is missing", COPY)
    return template


def read_image_token(model: Model, tokenizer: Any) -> tuple[str, int]:
    """The token that stands for a picture, and its id.

    Raises:
        CheckpointError: it is no text, or config.json and the tokenizer disagree on the id.
    """
    assert model.source.folder is not None
    processor = read_optional(model.source.folder, "processor_config.json")
    config = {"image_token_index": model.family.image_token_id, **model.config}
    expected = config.get("image_token_id", config["image_token_index"])
    token = getattr(tokenizer, "image_token", None) or processor.get("image_token") or IMAGE_TOKEN
    if not isinstance(token, str):
        raise CheckpointError(f"processor_config.json: image_token is {token!r}, no text", COPY)
    found = tokenizer.convert_tokens_to_ids(token)
    if found != expected or type(expected) is not int:
        raise CheckpointError(
            f"config.json: image_token_index is {expected}, "
            f"but the tokenizer has {token} as {found}",
            OTHER_MODEL,
        )
    return token, expected


def read_generation_settings(folder: Path) -> GenerationConfig:
    """generation_config.json, or the defaults of transformers where there is none.

    Raises:
        CheckpointError: it holds settings that transformers refuses.
    """
    settings = read_optional(folder, "generation_config.json")
    try:
        with quiet_transformers():
            return GenerationConfig.from_dict(dict(settings))
    except Exception as error:  # of every setting's own kind
        raise CheckpointError(
            f"generation_config.json cannot be read: {one_line(error)}", COPY
        ) from error


def read_stop_ids(model: Model, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer, from the first file that names any.

    Raises:
        CheckpointError: none does, or what it names is no token of the model's.
    """
    folder, decoder = model.source.folder, model.architecture.decoder
    assert folder is not None
    assert decoder is not None
    named = (
        ("generation_config.json", read_optional(folder, "generation_config.json")),
        ("config.json", model.config),
        ("config.json", model.config.get("text_config") or {}),
        ("tokenizer_config.json", {"eos_token_id": tokenizer.eos_token_id}),
    )
    found = ((file, settings.get("eos_token_id")) for file, settings in named)
    file, ids = next(((file, ids) for file, ids in found if ids not in (None, [])), ("", None))
    if ids is None:
        raise CheckpointError("no file names the token that ends an answer", COPY)
    stops = ids if isinstance(ids, list) else [ids]
    if not all(type(stop) is int and 0 <= stop < decoder.vocabulary for stop in stops):
        raise CheckpointError(
            f"{file}: eos_token_id is {ids!r}, and the model has tokens 0 to "
            f"{decoder.vocabulary - 1}",
            COPY,
        )
    return frozenset(stops)


def check_text(what: str, text: str) -> None:
    """Refuse text that no tokenizer takes: bytes of a shell or a file that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the {what} {text!r} is not valid UTF-8", "convert it first") from error


def check_said(what: str, text: str, image_token: str) -> None:
    """Refuse what no tokenizer takes, and the token that stands for a picture."""
    check_text(what, text)
    if image_token in text:
        raise UsageError(
            f"the {what} holds {image_token}, which stands for a picture",
            "leave it out; pictures are put before the prompt",
        )


def check_vocabulary(highest: int, vocabulary: int) -> None:
    """Hold a token id to the rows of the model's table."""
    if highest >= vocabulary:
        raise CheckpointError(
            f"the tokenizer gives id {highest}, and the model has {vocabulary} tokens",
            OTHER_MODEL,
        )


def one_line(error: Exception) -> str:
    """The first line of a foreign error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
