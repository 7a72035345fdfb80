"""Vectors in one array, with an index of one JSON line per input beside it.

While a run lasts its vectors are in `<output>.part`, raw float32. At its end the array is built
from there and renamed, so memory stays flat. An array that is replaced stays, with its index,
until then; the new index is in `<output>.jsonl.part`. Sources: NumPy's format version 1.0 (npy,
npz); the safetensors format, github.com/huggingface/safetensors.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vlmrun.errors import OutputError
from vlmrun.files.growing import FileSink, GrowingFile
from vlmrun.files.lines import Writer
from vlmrun.files.output import OutputLock, beside, create, errors_named, status_of
from vlmrun.files.rows import Embedding, Failure, Row, readable, to_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vectors = npt.NDArray[np.float32]


def index_path(output: Path) -> Path:
    """Where the index of an array output is."""
    return beside(output, ".jsonl")


def temporary_paths(output: Path) -> list[Path]:
    """What lies beside an array output while it is written: its vectors, its index where it
    replaces another, and at the end the array before it is renamed."""
    return [beside(output, ending) for ending in (".part", ".jsonl.part", ".new")]


class ArrayWriter(Writer):
    """One array row per finished input, in order; `<output>.jsonl` has one line per input."""

    def __init__(
        self, output: Path, save: "SaveArray", locks: Sequence[OutputLock], *, replaces: bool
    ) -> None:
        """`replaces`: there are old results here, of which only a whole array takes the place."""
        super().__init__(locks)
        self._output = output
        self._save = save
        self._replaces = replaces
        self._part_path, new_index, self._new = temporary_paths(output)
        self._part: GrowingFile | None = None
        self._index_path = new_index if replaces else index_path(output)
        like = status_of(index_path(output))
        self._index = FileSink(self._index_path, replaces=False, like=like)
        self._names: list[str] = []
        self._first: Embedding | None = None

    def write(self, row: Row) -> None:
        if isinstance(row, Failure):
            self._index.write(to_json(row.row()), finished=False)
            return
        assert isinstance(row, Embedding), "open_writer lets captions have no array"
        self._check_shape(row)
        data = row.vector.astype("<f4").tobytes()
        with errors_named(self._part_path):
            if self._part is None:
                self._part = GrowingFile(self._part_path, like=status_of(self._output))
            # At its place, not at the end: what an interrupted write left is written over.
            self._part.write(data, at=len(self._names) * len(data))
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
        part, self._part = self._part, None
        try:
            if part is None or not self._names:
                self._index.close()
                self._drop(part)
                return
            part.check()
            with self._vectors_kept():
                self._index.close()
                self._build()
                self._part_path.unlink()
        finally:
            if part is not None:
                part.close()

    def _drop(self, part: GrowingFile | None) -> None:
        """End a run without a vector: nothing stays of it but failures where nothing was."""
        if part is not None:
            self._part_path.unlink(missing_ok=True)
        if self._replaces:
            self._index_path.unlink(missing_ok=True)

    @contextmanager
    def _vectors_kept(self) -> Iterator[None]:
        """Say where the vectors are if no array comes of them, and how to read them."""
        try:
            with errors_named(self._output):
                yield
        except OutputError as error:
            call = f"numpy.fromfile({str(self._part_path)!r}, '<f4').reshape{self._shape()}"
            raise OutputError(
                f"{error.message}; its vectors are kept in {self._part_path}",
                f"{error.hint}; {call} reads them",
            ) from error

    def _shape(self) -> tuple[int, ...]:
        assert self._first is not None, "there is a row"
        return (len(self._names), *self._first.vector.shape)

    def _build(self) -> None:
        import numpy as np  # late: only a run that writes an array pays for it

        assert self._first is not None, "there is a row"
        vectors = np.memmap(self._part_path, dtype="<f4", mode="r", shape=self._shape())
        descriptor = create(self._new, like=status_of(self._output))
        try:
            with open(descriptor, "wb") as file:
                self._save(file, vectors, self._names, self._first)
            if not self._replaces and status_of(self._output) is not None:
                raise OutputError(
                    f"{self._output} exists now, and did not when the run began",
                    "move it away before anything else",
                )
            self._new.replace(self._output)
        except BaseException:
            self._new.unlink(missing_ok=True)
            raise
        if self._replaces:
            self._index_path.replace(index_path(self._output))


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
        "model": readable(first.model),
        "revision": readable(first.revision or ""),
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
