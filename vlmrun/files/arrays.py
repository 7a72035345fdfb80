"""Vectors in one array, with an index of one JSON line per input beside it.

While a run lasts its vectors are in `<output>.part`, raw float32. At its end the array is built
from there and renamed, so memory stays flat. Sources: NumPy's format version 1.0 (npy, npz);
the safetensors format, github.com/huggingface/safetensors.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vlmrun.errors import OutputError
from vlmrun.files.lines import Writer
from vlmrun.files.output import FileSink, OutputLock, beside, errors_named, write_at
from vlmrun.files.rows import Embedding, Failure, Row, readable, to_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vectors = npt.NDArray[np.float32]


def index_path(output: Path) -> Path:
    """Where the index of an array output is."""
    return beside(output, ".jsonl")


class ArrayWriter(Writer):
    """One array row per finished input, in order; `<output>.jsonl` has one line per input."""

    def __init__(self, output: Path, save: "SaveArray", lock: OutputLock) -> None:
        super().__init__(lock)
        index = index_path(output)
        replaces = output.exists() or index.exists()
        self._output = output
        self._save = save
        self._part = beside(output, ".part")
        self._descriptor: int | None = None
        self._index = FileSink(index, replaces=replaces)
        self._names: list[str] = []
        self._first: Embedding | None = None

    def write(self, row: Row) -> None:
        if isinstance(row, Failure):
            self._index.write(to_json(row.row()), finished=False)
            return
        assert isinstance(row, Embedding), "open_writer lets captions have no array"
        self._check_shape(row)
        data = row.vector.astype("<f4").tobytes()
        with errors_named(self._output):
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                self._descriptor = os.open(self._part, flags, 0o666)
            # At its place, not at the end: what an interrupted write left is written over.
            write_at(self._descriptor, data, len(self._names) * len(data))
            if not self._names:  # an array never stands beside the index of another
                self._output.unlink(missing_ok=True)
        self._index.write(to_json(row.row(index=len(self._names))), finished=True)
        self._names.append(_name(row))

    def _check_shape(self, row: Embedding) -> None:
        if self._first is None:
            self._first = row
        if row.vector.shape != self._first.vector.shape:
            raise OutputError(
                f"{_name(row)}: its vector of shape {row.vector.shape} does not fit into "
                f"{self._output}, whose rows have the shape {self._first.vector.shape}",
                "--format jsonl takes vectors of every shape",
            )

    def _finish(self) -> None:
        self._index.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._names:
            with errors_named(self._output):
                self._build()

    def _build(self) -> None:
        import numpy as np  # late: only a run that writes an array pays for it

        assert self._first is not None, "there is a row"
        shape = (len(self._names), *self._first.vector.shape)
        vectors = np.memmap(self._part, dtype="<f4", mode="r", shape=shape)
        new = beside(self._output, ".new")
        try:
            with open(new, "wb") as file:
                self._save(file, vectors, self._names, self._first)
            new.replace(self._output)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        self._part.unlink()


def _name(row: Embedding) -> str:
    return readable(row.path if row.path is not None else row.text or "")


def save_npy(file: BinaryIO, vectors: "Vectors", names: list[str], first: Embedding) -> None:
    """The array alone."""
    from numpy.lib import format as npy  # late, as above

    npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(vectors))
    _write_numbers(file, vectors)


def save_npz(file: BinaryIO, vectors: "Vectors", names: list[str], first: Embedding) -> None:
    """`embeddings`, and `paths` with each row's path or text."""
    import numpy as np  # late, as above

    np.savez(file, embeddings=vectors, paths=np.array(names))


def save_safetensors(
    file: BinaryIO, vectors: "Vectors", names: list[str], first: Embedding
) -> None:
    """`embeddings`, with what made them as metadata.

    Written here: the library's own function takes a copy of the whole array.
    """
    metadata = {
        "model": first.model,
        "revision": first.revision or "",
        "dtype": first.dtype,
        "output_kind": first.output_kind,
    }
    place = {"dtype": "F32", "shape": list(vectors.shape), "data_offsets": [0, vectors.nbytes]}
    header = json.dumps({"__metadata__": metadata, "embeddings": place}).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    _write_numbers(file, vectors)


def _write_numbers(file: BinaryIO, vectors: "Vectors") -> None:
    """Row by row, not with numpy's `tofile` (nor `save`): that does not notice a full disk."""
    for vector in vectors:
        file.write(vector.data)


SaveArray = Callable[[BinaryIO, "Vectors", list[str], Embedding], None]
ARRAYS: dict[str, SaveArray] = {
    "npy": save_npy,
    "npz": save_npz,
    "safetensors": save_safetensors,
}
