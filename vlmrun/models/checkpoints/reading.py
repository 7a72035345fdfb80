"""Reading weights, at the dtype asked for: the one place where it happens.

Needs torch. A weight is read straight into its place or mapped where it lies; a conversion
goes through one small staging buffer, never through a copy of the whole tensor.
"""

import mmap
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

from vlmrun.errors import CheckpointError
from vlmrun.models.checkpoints.checkpoint import TensorInfo
from vlmrun.models.checkpoints.dtype import SAFETENSORS, Dtype
from vlmrun.models.checkpoints.folder import AGAIN, unreadable
from vlmrun.models.checkpoints.quantising import quantise_

STAGING_NUMBERS = 1 << 20
ALIGNMENT = 16  # bytes; fp32 kernels give other bits at other addresses, measured


def torch_dtype(dtype: Dtype) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.value)
    return found


class WeightReader:
    """Open weight files: reads and maps tensors, counts the bytes it read. Closable."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._files: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._staging: dict[torch.dtype, Tensor] = {}

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Tensors that were mapped keep their mapping alive by themselves."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._maps.clear()
        self._staging.clear()

    def read_into(
        self, out: Tensor, info: TensorInfo, *, name: str, rows: tuple[int, int] | None = None
    ) -> None:
        """Read a tensor, or its rows `start:stop`, into contiguous `out`, converting on the way.

        Raises:
            CheckpointError: the file ends early or cannot be read, or a value is too large for
                float16.
        """
        stored = torch_dtype(SAFETENSORS[info.dtype])
        start = info.offset
        if rows is not None:
            start += rows[0] * (info.nbytes // info.shape[0])
        flat = out.view(-1)
        if stored == out.dtype:
            self._fill(flat, info, start, name)
            return
        for at in range(0, flat.numel(), STAGING_NUMBERS):
            piece = flat[at : at + STAGING_NUMBERS]
            staged = self._staged(stored)[: piece.numel()]
            self._fill(staged, info, start + at * stored.itemsize, name)
            piece.copy_(staged)
            check_range(piece, stored, name)

    def read_columns(
        self, out: Tensor, info: TensorInfo, *, name: str, columns: tuple[int, int]
    ) -> None:
        """Read the columns `start:stop` of a matrix into contiguous `out` [rows, stop - start]:
        whole rows pass through the staging buffer, a few at a time.

        Raises:
            CheckpointError: as `read_into`.
        """
        stored = torch_dtype(SAFETENSORS[info.dtype])
        rows, width = info.shape
        step = max(1, STAGING_NUMBERS // width)
        for at in range(0, rows, step):
            part = out[at : at + step]
            staged = self._staged(stored)[: part.shape[0] * width]
            self._fill(staged, info, info.offset + at * width * stored.itemsize, name)
            part.copy_(staged.view(-1, width)[:, slice(*columns)])
            check_range(part, stored, name)

    def read_quantised(
        self,
        out: Tensor,
        scale: Tensor,
        info: TensorInfo,
        *,
        name: str,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> None:
        """Read a matrix, or its rows or columns `start:stop`, into int8 `out` [N, K] and float32
        `scale` [N]. Whole rows pass through the staging buffer: columns keep the scale of theirs,
        so that parts of a row that several processes keep are parts of one quantised row.

        Raises:
            CheckpointError: as `read_into`, or a number is not finite.
        """
        stored, width = torch_dtype(SAFETENSORS[info.dtype]), info.shape[-1]
        start = info.offset + (rows[0] if rows is not None else 0) * width * stored.itemsize
        step = max(1, STAGING_NUMBERS // width)
        for at in range(0, out.shape[0], step):
            part = out[at : at + step]
            staged = self._staged(stored)[: part.shape[0] * width]
            self._fill(staged, info, start + at * width * stored.itemsize, name)
            wide = self._staged(torch.float32)[: staged.numel()]
            rounded = wide.copy_(staged).view(-1, width)
            found = quantise_(rounded)
            if not torch.isfinite(found).all():
                raise CheckpointError(
                    f"{name} holds numbers that are not finite", "no scale makes int8 of them"
                )
            part.copy_(rounded if columns is None else rounded[:, slice(*columns)])
            scale[at : at + step] = found

    def read_rows(self, info: TensorInfo, ids: list[int], dtype: torch.dtype, name: str) -> Tensor:
        """Gather rows by index: [len(ids), width] at `dtype`."""
        assert all(0 <= at < info.shape[0] for at in ids), "a row of another tensor"
        out = torch.empty(len(ids), info.shape[1], dtype=dtype)
        for row, at in zip(out, ids, strict=True):
            self.read_into(row, info, name=name, rows=(at, at + 1))
        return out

    def map(
        self, info: TensorInfo, *, name: str, rows: tuple[int, int] | None = None
    ) -> Tensor | None:
        """A read-only view of a tensor where it lies in its file, at the dtype it is stored in.

        None where its address would not do: float32 off a 16-byte boundary, halves off an even
        one.

        Raises:
            CheckpointError: the file ends before the tensor does.
        """
        width = info.nbytes // info.shape[0] if info.shape else info.nbytes
        first, stop = rows if rows is not None else (0, info.shape[0] if info.shape else 1)
        start = info.offset + first * width
        dtype = torch_dtype(SAFETENSORS[info.dtype])
        if start % (ALIGNMENT if dtype == torch.float32 else dtype.itemsize):
            return None
        assert info.file is not None
        mapping = self._mapping(info.file)
        if start + (stop - first) * width > len(mapping):
            raise ended(info.file, name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            flat = torch.frombuffer(
                mapping, dtype=dtype, count=(stop - first) * width // dtype.itemsize, offset=start
            )
        return flat.view((stop - first, *info.shape[1:]) if info.shape else ())

    def _staged(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._staging:
            self._staging[dtype] = torch.empty(STAGING_NUMBERS, dtype=dtype)
        return self._staging[dtype]

    def _fill(self, out: Tensor, info: TensorInfo, start: int, name: str) -> None:
        """Read bytes until `out` is full."""
        assert info.file is not None
        target = out.view(torch.uint8).numpy().data
        done = 0
        while done < len(target):
            try:
                got = os.preadv(self._file(info.file), [target[done:]], start + done)
            except OSError as error:
                raise unreadable(info.file, error) from error
            if got == 0:
                raise ended(info.file, name)
            done += got
        self.bytes_read += done

    def _file(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise unreadable(path, error) from error
        return self._files[path]

    def _mapping(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            file = self._file(path)
            try:
                self._maps[path] = mmap.mmap(file, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            except (OSError, ValueError) as error:  # the latter of an empty file
                raise CheckpointError(f"cannot map {path}: {error}", AGAIN) from error
        return self._maps[path]


def check_range(converted: Tensor, stored: torch.dtype, name: str) -> None:
    """Raises CheckpointError where a conversion to float16 met values too large for it."""
    if converted.dtype != torch.float16 or stored == torch.float16:
        return
    if not torch.isfinite(converted).all():
        raise CheckpointError(
            f"{name} holds values that float16 cannot", "use --dtype bfloat16 or float32"
        )


def ended(file: Path, name: str) -> CheckpointError:
    return CheckpointError(f"{file.name} ended while {name} was being read", AGAIN)
