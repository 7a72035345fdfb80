"""A folder's tokenizer: texts become token ids, and these texts again."""

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.models.auto.tokenization_auto import AutoTokenizer

from vlmrun.errors import CheckpointError, UsageError, VlmrunError
from vlmrun.models.companions import COPY, OTHER_MODEL, check_tokenizer
from vlmrun.models.quiet import quiet_transformers
from vlmrun.tasks.processor_files import one_line

PROBE = "a cat \U0010fffd"  # and what no vocabulary has


def load_tokenizer(folder: Path, *, default: str) -> Any:
    """The tokenizer of a folder, of the class that tokenizer_config.json names, else `default`.

    Raises:
        CheckpointError: its files are missing or damaged.
    """
    check_tokenizer(folder, default=default)
    with standard_output_kept(), quiet_transformers(), damage_told("the tokenizer cannot be read"):
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    encode(tokenizer, PROBE)  # some damage is met no earlier
    return tokenizer


@contextmanager
def standard_output_kept() -> Iterator[None]:
    """Drop what is printed, by Rust and past `sys.stdout`: a token's setting that it does not know
    would stand among the results."""
    if sys.stdout is None:  # closed; the number may be another file's
        yield
        return
    kept, sink = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(sink)


@contextmanager
def damage_told(what: str) -> Iterator[None]:
    """Raises CheckpointError for what a damaged tokenizer meets, in Python or in Rust, whose
    panics are no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, VlmrunError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what}: {one_line(error)}", COPY) from error


def encode(
    tokenizer: Any, text: str, *, special_tokens: bool = True, limit: int | None = None
) -> list[int]:
    """Token ids of a text; `special_tokens`: between those that the tokenizer itself adds;
    `limit`: cut to so many, on the side that the tokenizer cuts.

    Raises:
        CheckpointError: the tokenizer is damaged.
    """
    # `verbose` is a remark on long sequences; SigLIP's warns of a text that ends in </s>
    with damage_told("the tokenizer fails"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = tokenizer(
            text,
            add_special_tokens=special_tokens,
            truncation=limit is not None,
            max_length=limit,
            verbose=False,
        )
    ids = made.get("input_ids")
    if not ids or not all(type(each) is int for each in ids):
        raise CheckpointError(f"the tokenizer makes no ids of {text!r}", COPY)
    if limit is not None and len(ids) > limit:
        raise CheckpointError(f"the tokenizer cuts {text!r} to {len(ids)} ids, not {limit}", COPY)
    return list(ids)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens left out.

    Raises:
        CheckpointError: the tokenizer is damaged.
    """
    with damage_told("the tokenizer fails"):
        return str(tokenizer.decode(ids, skip_special_tokens=True))


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
