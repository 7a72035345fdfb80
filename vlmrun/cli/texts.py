"""Texts from flags, files and standard input: what is not UTF-8 is refused by name."""

import sys

from vlmrun.errors import UsageError


def check_text(text: str, *, where: str) -> str:
    """Text that a tokenizer can read.

    Raises:
        UsageError: it holds bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} is not valid UTF-8", "convert it first") from error
    return text


def read_text_file(path: str, *, where: str) -> str:
    """A text file of the command line's.

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    try:
        with open(path, encoding="utf-8-sig", newline=None) as file:
            return file.read()
    except OSError as error:
        raise UsageError(
            f"{where} {path}: {error.strerror}", "name a text file that may be read"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} {path}: not valid UTF-8", "convert it first") from error


def read_stdin_text(*, where: str) -> str:
    """Standard input as text.

    Raises:
        UsageError: it is closed, or not UTF-8.
    """
    if sys.stdin is None:
        raise UsageError(f"{where} -: standard input is closed", "pipe text in, or name a file")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} -: not valid UTF-8", "convert it first") from error
