"""What lies in PyTorch's pickled weight files (`.bin`), learned without unpickling them.

Since PyTorch 1.6 such a file is a zip of uncompressed entries: `NAME/data.pkl` describes the
tensors, `NAME/data/KEY` holds the bytes of one storage
(https://docs.pytorch.org/docs/stable/notes/serialization.html). No weight is read here.
"""

import errno
import io
import math
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from zipfile import BadZipFile, ZipFile, ZipInfo

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.checkpoints.pickle_program import STORAGES, Interpreter, Storage, View

LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"  # the number such files begin with
ZIP = b"PK\x03\x04"
MAX_PICKLE_BYTES = 4 << 20  # a thousand tensors take 0.15 MB
MAX_DIRECTORY_BYTES = 16 << 20
MAX_DIMENSIONS = 8
AGAIN = "download it again, or a safetensors version"
CONVERT = "load it with PyTorch where you trust it, and save it as safetensors"
PLAIN = int | float | str | None


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """Where a tensor lies in its file: contiguous, little-endian."""

    dtype: str  # as safetensors spells it: F32, BF16, …
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


class BoundedReads(io.FileIO):
    """A file that no damaged count makes read more than a directory's worth at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_DIRECTORY_BYTES:
            raise ValueError(f"it asks for {size} bytes at once")
        return super().read(size)


def read_pickle(path: Path) -> dict[str, PickledTensor]:
    """The tensors of a `.bin` file by name; nothing in it is run.

    Raises:
        CheckpointError: truncated, compressed, not such a file, or it holds more than tensors.
        UnsupportedModel: sound, but big-endian, of before PyTorch 1.6, or not contiguous.
        OSError: it cannot be read.
    """
    with BoundedReads(path) as file:
        start = file.read(len(LEGACY))
        if start == LEGACY:
            raise UnsupportedModel(
                f"{path.name} is in the format of PyTorch before 1.6, which is not read", CONVERT
            )
        try:
            with ZipFile(file) as archive:
                return read_archive(path.name, file, archive)
        # What zipfile raises of damaged files, and the interpreter of damaged programs.
        except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
            raise damaged(path, start, error) from error
        except (BadZipFile, struct.error, zlib.error, EOFError) as error:
            raise damaged(path, start, error) from error
        except OSError as error:
            if error.errno != errno.EINVAL:  # of a place outside the file
                raise
            raise damaged(path, start, error) from error


def damaged(path: Path, start: bytes, error: Exception) -> CheckpointError:
    size = os.stat(path).st_size
    if not start.startswith(ZIP):
        return CheckpointError(f"{path.name} ({size} bytes) is not a PyTorch weight file", AGAIN)
    reason = ascii(str(error))[1:-1][:100]
    return CheckpointError(f"{path.name} ({size} bytes) is damaged or truncated: {reason}", AGAIN)


def read_archive(name: str, file: io.FileIO, archive: ZipFile) -> dict[str, PickledTensor]:
    entries = {entry.filename: entry for entry in archive.infolist()}
    if len(entries) != len(archive.infolist()):
        raise ValueError("two entries have one name")
    root = find_root(name, entries)
    program = read_small(name, archive, entries[f"{root}data.pkl"])
    order = entries.get(f"{root}byteorder")
    if order is not None and read_small(name, archive, order) != b"little":
        raise UnsupportedModel(f"{name} was written by a big-endian machine", CONVERT)
    offsets: dict[str, int] = {}
    tensors = {}
    for tensor, view in state_dict(name, Interpreter(name).run(program)).items():
        storage = check_view(name, tensor, view)
        entry = entries.get(f"{root}data/{storage.key}")
        if entry is None:
            raise ValueError(f"the storage of {tensor} is not in it")
        dtype, itemsize = STORAGES[storage.kind]
        if storage.numbers * itemsize > entry.file_size:
            raise ValueError(f"the storage of {tensor} is cut")
        if storage.key not in offsets:
            offsets[storage.key] = data_offset(name, file, entry)
        offset = offsets[storage.key] + view.offset * itemsize
        tensors[tensor] = PickledTensor(dtype, view.shape, offset)
    return tensors


def find_root(name: str, entries: Mapping[str, ZipInfo]) -> str:
    """The folder inside the zip that everything lies in, with its slash."""
    roots = [entry.removesuffix("data.pkl") for entry in entries if entry.endswith("/data.pkl")]
    if len(roots) != 1:
        raise CheckpointError(f"{name} is a zip file, but not one of PyTorch's", AGAIN)
    if f"{roots[0]}constants.pkl" in entries:
        raise UnsupportedModel(
            f"{name} is a TorchScript program, not weights", "get the weights as safetensors"
        )
    return roots[0]


def read_small(name: str, archive: ZipFile, entry: ZipInfo) -> bytes:
    check_stored(name, entry)
    if entry.file_size > MAX_PICKLE_BYTES:
        raise ValueError(f"{entry.filename} takes {entry.file_size} bytes")
    return archive.read(entry)


def check_stored(name: str, entry: ZipInfo) -> None:
    if entry.compress_type or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
        raise CheckpointError(
            f"{name}: {entry.filename} is compressed or encrypted, which PyTorch does not do",
            "it was packed again: unpack it and zip it without compression, or download it again",
        )


def data_offset(name: str, file: io.FileIO, entry: ZipInfo) -> int:
    """Where an entry's bytes start. Its local header is longer than the directory says:
    PyTorch pads there, so that storages lie on 64-byte boundaries."""
    check_stored(name, entry)
    file.seek(entry.header_offset)
    header = file.read(30)
    if len(header) < 30 or not header.startswith(ZIP):
        raise ValueError(f"{entry.filename} is not where it should be")
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    offset: int = entry.header_offset + 30 + name_bytes + extra_bytes
    if offset + entry.file_size > os.fstat(file.fileno()).st_size:
        raise ValueError(f"{entry.filename} ends after the file does")
    return offset


def state_dict(name: str, found: object) -> dict[str, View]:
    """The tensors of a dict, or of the one under its `state_dict`; plain values are left out.

    Raises:
        CheckpointError: it holds more than tensors, numbers and texts.
    """
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        for key, value in found.items():
            if key != "state_dict" and not isinstance(value, PLAIN):
                refuse_contents(name, f"{key} beside state_dict", value)
        found = found["state_dict"]
    if not isinstance(found, dict):
        refuse_contents(name, "the whole", found)
    for key, value in found.items():
        if not isinstance(value, View | PLAIN):
            refuse_contents(name, str(key), value)
    return {str(key): value for key, value in found.items() if isinstance(value, View)}


def refuse_contents(name: str, key: str, value: object) -> NoReturn:
    kind = "tensor" if isinstance(value, View) else type(value).__name__
    raise CheckpointError(
        f"{name} is not a dict of tensors: {key} is a {kind}",
        "give a file that holds weights alone, not the state of a training or a whole module",
    )


def check_view(name: str, tensor: str, view: View) -> Storage:
    """Hold a tensor's numbers to what they must be; returns its storage.

    Raises:
        ValueError: they cannot be.
        UnsupportedModel: its rows do not follow each other.
    """
    shape, strides, storage = view.shape, view.strides, view.storage
    if not isinstance(storage, Storage):
        raise ValueError(f"{tensor} has no storage")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError(f"{tensor} has no shape")
    numbers = (view.offset, storage.numbers, *shape, *strides)
    whole = all(type(number) is int and 0 <= number < 1 << 48 for number in numbers)
    if not whole or len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{tensor} has an impossible shape")
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected and 0 not in shape:
            raise UnsupportedModel(
                f"{name}: {tensor} is not stored row by row (strides {list(strides)})",
                "save the file as safetensors, which makes its tensors contiguous",
            )
        expected *= size
    if view.offset + math.prod(shape) > storage.numbers:
        raise ValueError(f"{tensor} reaches beyond its storage")
    return storage
