"""What lies in a checkpoint's files, read from their headers alone.

A safetensors file is 8 bytes of header length, a JSON header, then the data
(https://huggingface.co/docs/safetensors); pickled files are read in `pickles.py`. No weight is
read here.
"""

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.checkpoints.dtype import SAFETENSORS, Dtype
from vlmrun.models.checkpoints.file_names import (
    INDEX,
    PICKLE_INDEX,
    SHARD,
    SINGLE,
    find_weights,
    is_pickled,
)
from vlmrun.models.checkpoints.folder import (
    AGAIN,
    LFS_POINTER,
    list_files,
    read_json,
    refuse_pointer,
    refuse_special,
    unreadable,
)
from vlmrun.models.checkpoints.pickles import read_pickle

MAX_HEADER_BYTES = 100_000_000
ITEMSIZES = {
    name: size
    for size, names in {
        8: ("F64", "I64", "U64"),
        4: ("F32", "I32", "U32"),
        2: ("F16", "BF16", "I16", "U16"),
        1: ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"),
    }.items()
    for name in names
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `file` is None where only shapes are known (nothing downloaded)."""

    dtype: str  # as safetensors spells it: F32, BF16, …
    shape: tuple[int, ...]
    file: Path | None = None
    offset: int = 0  # bytes from the start of the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint by their name in the files."""

    tensors: Mapping[str, TensorInfo]
    notes: tuple[str, ...] = field(default=())

    def stored_bytes(self, names: Iterable[str]) -> dict[Dtype, int]:
        """Bytes of the named tensors by dtype.

        Raises:
            UnsupportedModel: a tensor holds something else than fp32, bf16 or fp16 weights.
        """
        found: dict[Dtype, int] = {}
        for name in names:
            info = self.tensors[name]
            if info.dtype not in SAFETENSORS:
                raise unsupported(name, info.dtype)
            dtype = SAFETENSORS[info.dtype]
            found[dtype] = found.get(dtype, 0) + info.nbytes
        return found


def read_checkpoint(folder: Path, file: str | None = None) -> Checkpoint:
    """Read the headers of a folder's weight files, sharded or single; with `file`, of that one.

    Raises:
        CheckpointError: no weights, an absent shard, a truncated file, a Git-LFS pointer, an
            index that names tensors no shard holds or files outside the folder, a pickle that
            holds more than tensors.
        UnsupportedModel: a pickle in a form that is not read.
    """
    names = [] if file else list_files(folder)
    name = file or find_weights(names)
    if name is None:
        raise CheckpointError(f"{folder} holds no {SINGLE}", what_lies_there(names))
    is_index = name in (INDEX, PICKLE_INDEX)
    found = read_shards(folder, folder / name) if is_index else Checkpoint(read_file(folder / name))
    if not is_pickled(name):
        return found
    note = f"weights from {name}, a pickle: tensors only, no code is run; safetensors is safer"
    return Checkpoint(found.tensors, (note, *found.notes))


def what_lies_there(names: Collection[str]) -> str:
    """A hint from the weight files that are there instead."""
    weights = [name for name in names if name.endswith(".safetensors")]
    if weights:
        found = f"found {', '.join(weights[:3])}"
        if any(SHARD.fullmatch(name) for name in weights):
            return f"{found}, but no {INDEX} that lists them"
        return f"{found}: give the one that is meant by its path"
    for name in names:
        if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".h5", ".msgpack")):
            return f"{name} is not read under this name or in this format; look for {SINGLE}"
    return "download the model's weights into the folder"


def read_file(path: Path) -> dict[str, TensorInfo]:
    """Read what one weight file, safetensors or pickled, says of its tensors."""
    refuse_special(path)
    if not is_pickled(path.name):
        return read_header(path)
    try:
        with open(path, "rb") as file:
            refuse_pointer(path, file.read(len(LFS_POINTER)))
        found = read_pickle(path)
    except OSError as error:
        raise unreadable(path, error) from error
    return {name: TensorInfo(t.dtype, t.shape, path, t.offset) for name, t in found.items()}


def read_shards(folder: Path, index: Path) -> Checkpoint:
    """Read every shard that the index names, and hold the index to what they contain."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index.name} has no weight_map", AGAIN)
    shards = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in shards if Path(name).name != name or name in ("", "..")]
    if outside:
        raise CheckpointError(
            f"{index.name} names a file outside the folder: {outside[0]}",
            "such an index is refused; download the model from where you trust it",
        )
    absent = [name for name in shards if not (folder / name).exists()]
    if absent:
        raise CheckpointError(
            f"{len(absent)} of {len(shards)} shards are missing: {', '.join(absent)}",
            f"download them into {folder}",
        )
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_file(folder / shard).items():
            if name not in tensors or weight_map.get(name) == shard:
                tensors[name] = info
    unheld = sorted(name for name in weight_map if name not in tensors)
    if unheld:
        raise CheckpointError(
            f"{index.name} lists {unheld[0]} in {weight_map[unheld[0]]}, which does not hold it"
            + (f" (and {len(unheld) - 1} more)" if len(unheld) > 1 else ""),
            "the index and the shards are of different versions; download both again",
        )
    unlisted = sorted(name for name in tensors if name not in weight_map)
    notes = (f"{len(unlisted)} tensors are in the shards but not in the index",) * bool(unlisted)
    return Checkpoint(tensors, notes)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read one safetensors header and hold it to the file's size.

    Raises:
        CheckpointError: the file is a Git-LFS pointer, truncated, or not safetensors.
    """
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            start = file.read(8)
            refuse_pointer(path, start)
            length = int.from_bytes(start, "little")
            if len(start) == 8 and 8 + length > size and length <= MAX_HEADER_BYTES:
                raise truncated(path, size, 8 + length)
            if len(start) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path.name} ({size} bytes) is not a safetensors file", AGAIN
                )
            header = parse_header(path.name, file.read(length))
    except OSError as error:
        raise unreadable(path, error) from error
    tensors = tensors_of(header, path, 8 + length)
    needed = max((info.offset + info.nbytes for info in tensors.values()), default=0)
    if needed > size:
        raise truncated(path, size, needed)
    return tensors


def truncated(path: Path, size: int, needed: int) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is truncated: {size} bytes on disk, its header promises {needed}",
        AGAIN,
    )


def parse_header(name: str, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} has a damaged header: not valid JSON", AGAIN) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{name} has a damaged header: no object", AGAIN)
    return header


def tensors_of(
    header: Mapping[str, Any], file: Path | None, data_start: int
) -> dict[str, TensorInfo]:
    """Tensors of one header; each entry's offsets must agree with its shape and dtype.

    Raises:
        CheckpointError: they do not.
        UnsupportedModel: the dtype is one whose size is not known here.
    """
    where = file.name if file is not None else "the safetensors header"
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
            whole = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole or not isinstance(dtype, str):
            raise CheckpointError(f"{where} has a damaged entry for {name}", AGAIN)
        if dtype not in ITEMSIZES:
            raise unsupported(name, dtype)
        info = TensorInfo(dtype, tuple(shape), file, data_start + start)
        if info.nbytes != stop - start:
            raise CheckpointError(
                f"{where}: {name} spans {stop - start} bytes, its shape needs {info.nbytes}",
                AGAIN,
            )
        tensors[name] = info
    return tensors


def unsupported(name: str, dtype: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} is stored as {dtype}",
        "checkpoints of F32, BF16 or F16 weights are read; quantised ones are not",
    )
