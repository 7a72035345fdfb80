"""What the files beside the weights say of special tokens: images, ends of answers."""

from typing import Any

from vlmrun.errors import CheckpointError
from vlmrun.models.companions import COPY, OTHER_MODEL, read_optional
from vlmrun.models.model import Model

IMAGE_TOKEN = "<image>"


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


def read_stop_ids(model: Model, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer, from the first file that names any.

    `generate()` asks no other file where generation_config.json says null, and never ends.

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


def one_line(error: BaseException) -> str:
    """The first line of a foreign error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
