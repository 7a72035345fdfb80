"""Find the pictures a command line names: files, folders, patterns, lists, standard input."""

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from vlmrun.errors import UsageError

# What a folder is searched for. Pillow reads no .heic or .heif; they are listed all the same, so
# that a phone's folder gives errors that say so instead of looking empty.
SUFFIXES = (
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .gif .webp .avif .avifs .heic .heif .tif .tiff .bmp "
    ".dib .ico .icns .ppm .pgm .pbm .pnm .pfm .tga .jp2 .j2k .jpx .pcx .qoi .psd .sgi .dds"
)
IMAGE_SUFFIXES = frozenset(SUFFIXES.split())
NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One picture: its path as rows show it, and its bytes if they came from standard input."""

    path: str
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """The pictures in the order they were named.

    `single`: one file (or `-`) was named and nothing else, so the output is the bare result.
    `notes`: lines for standard error, such as a folder without pictures.
    """

    images: tuple[ImageInput, ...]
    single: bool = False
    notes: tuple[str, ...] = ()


def find_inputs(
    named: Sequence[str],
    *,
    recursive: bool = False,
    files_from: str | None = None,
    null_separated: bool = False,
    stdin: BinaryIO | None = None,
) -> Inputs:
    """List the pictures that `named` and the list `files_from` stand for.

    A name is a file, a folder (its picture files in sorted order; with `recursive` its subfolders
    too), a pattern the shell did not expand, or `-` for a picture's bytes on `stdin`. Lines of a
    list are file names and nothing else. With neither names nor list, paths are read from `stdin`
    if one is given. Names that are not valid UTF-8 keep their bytes (surrogateescape). A missing
    file among others stays in the list and becomes an error row when it is decoded.

    Raises:
        UsageError: none of the names exists, standard input is asked for twice, a name is a URL.
    """
    _check_streams(named, files_from, stdin)
    _check_some_exist(named)
    images: list[ImageInput] = []
    notes: list[str] = []
    for name in named:
        if name == "-":
            assert stdin is not None, "_check_streams lets `-` through only with a stream"
            images.append(ImageInput("-", stdin.read()))
        else:
            found, note = _expand(name, recursive)
            images += map(_on_disk, found)
            notes += note
    if files_from is not None or (not named and stdin is not None):
        listed = _read_list(files_from, null_separated, stdin)
        if not listed:
            notes.append(f"{_list_name(files_from)}: no paths in the list")
        images += map(_on_disk, listed)
    elif null_separated:
        raise UsageError("-0 describes a list of paths, and there is none", "add --files-from")
    single = len(named) == 1 and files_from is None and [image.path for image in images] == [*named]
    return Inputs(tuple(images), single, tuple(notes))


def _on_disk(path: str) -> ImageInput:
    """A picture in a file; one called `-` is told from standard input by its folder."""
    return ImageInput("./-" if path == "-" else path)


def _check_streams(named: Sequence[str], files_from: str | None, stdin: BinaryIO | None) -> None:
    uses = list(named).count("-") + (files_from == "-")
    if uses > 1:
        raise UsageError(
            "standard input is asked for more than once",
            "give `-` once: for a picture's bytes as INPUT, or for a list as --files-from -",
        )
    if uses and stdin is None:
        raise UsageError("standard input cannot be read here", "name files instead of `-`")
    for name in named:
        _refuse_url(name)


def _refuse_url(name: str) -> None:
    if name.lower().startswith(("http://", "https://")):
        raise UsageError(f"{name}: URLs are not read yet", "download it first")


def _check_some_exist(named: Sequence[str]) -> None:
    """A mistyped command line ends here; one missing file among others does not stop the rest."""
    if not named or any(name == "-" or _exists(name) or _matches(name) for name in named):
        return
    shown = ", ".join(named[:NAMES_SHOWN])
    more = f" and {len(named) - NAMES_SHOWN} more" if len(named) > NAMES_SHOWN else ""
    raise UsageError(f"no such file: {shown}{more}", "check the names and the working directory")


def _exists(name: str) -> bool:
    """False only where nothing is there; what cannot be looked at becomes an error row."""
    try:
        os.lstat(name)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _matches(name: str) -> list[str]:
    """What a pattern stands for. A file that bears the name literally comes before this."""
    return sorted(set(_glob(name))) if glob.has_magic(name) else []


def _glob(pattern: str) -> Iterator[str]:
    """As glob.glob, but `**` stays out of linked folders, as -r does: they may lead in circles."""
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    at = parts.index("**")
    head, tail = "/".join(parts[:at]), "/".join(parts[at + 1 :]) or "*"
    start = "/" if parts[0] == "" and at == 1 else head or "."
    for top in glob.iglob(start):
        for folder, folders, _ in os.walk(top):
            folders[:] = [name for name in folders if not name.startswith(".")]
            where = folder[len("./") :] if start == "." and not head else folder
            yield from _glob(os.path.join(glob.escape(where), tail))


def _expand(name: str, recursive: bool) -> tuple[list[str], list[str]]:
    """The files one name stands for, and notes about folders that hold none."""
    files: list[str] = []
    notes: list[str] = []
    for path in [name] if _exists(name) else _matches(name) or [name]:
        if not os.path.isdir(path):
            files.append(path)
            continue
        found = list(_walk(path, recursive))
        files += found
        if not found:
            notes.append(_why_empty(path, recursive))
    return files, notes


def _why_empty(folder: str, recursive: bool) -> str:
    if not recursive and next(_walk(folder, True), None) is not None:
        return f"{folder}: pictures are in its subfolders only; -r reads them too"
    return f"{folder}: no pictures in this folder"


def _walk(folder: str, recursive: bool) -> Iterator[str]:
    """Picture files of a folder, sorted, each folder's files before its subfolders.

    A folder that cannot be listed is yielded itself: decoding it gives the error row.
    """
    unreadable: list[OSError] = []
    for where, folders, names in os.walk(folder, onerror=unreadable.append):
        for name in sorted(names):
            suffix = os.path.splitext(name)[1].lower()
            if suffix in IMAGE_SUFFIXES and not name.startswith("."):
                yield os.path.join(where, name)
        folders[:] = sorted(name for name in folders if recursive and not name.startswith("."))
    yield from (os.fspath(error.filename) for error in unreadable)


def _list_name(files_from: str | None) -> str:
    return "standard input" if files_from in (None, "-") else str(files_from)


def _read_list(files_from: str | None, null_separated: bool, stdin: BinaryIO | None) -> list[str]:
    if files_from in (None, "-"):
        assert stdin is not None, "checked by _check_streams and the caller"
        data = stdin.read()
    else:
        try:
            with open(str(files_from), "rb") as file:
                data = file.read()
        except OSError as error:
            raise UsageError(
                f"--files-from {files_from}: {error.strerror}",
                "name a file that holds one path per line, or - for standard input",
            ) from error
    if null_separated:
        lines = data.split(b"\0")
    elif b"\0" in data:
        raise UsageError(
            f"{_list_name(files_from)} holds NUL bytes, so it is not a list with one path per line",
            "name `-` to give a picture's bytes, or add -0 for a NUL separated list",
        )
    else:
        # Lists made on Windows start with a byte order mark and end their lines with CR LF.
        lines = [
            line.removesuffix(b"\r") for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        ]
    paths = [os.fsdecode(line) for line in lines if line]
    for path in paths:
        _refuse_url(path)
    return paths
