"""The one buffer that streamed layers pass through.

A layer that does not stay is read into the slot before it runs and forgotten after. There is
one slot of the size of the largest layer, so one streamed layer is bound at a time.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vlmrun.models.checkpoints.checkpoint import Checkpoint
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.checkpoints.reading import ALIGNMENT, WeightReader, torch_dtype
from vlmrun.models.layer import Layer, Shape, Weight


class Slot:
    """A fixed buffer on the CPU; `read` fills it with one layer and hands out views of it."""

    def __init__(
        self, nbytes: int, *, dtype: Dtype, checkpoint: Checkpoint, reader: WeightReader
    ) -> None:
        self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._dtype = dtype
        self._checkpoint = checkpoint
        self._reader = reader
        self._holder: str | None = None

    def read(self, layer: Layer) -> dict[str, Tensor]:
        """Read a layer's tensors; gives them by path."""
        assert self._holder is None, f"{layer.name} needs the slot that {self._holder} holds"
        self._holder = layer.name
        return read_layer(layer, self._buffer, self._dtype, self._checkpoint, self._reader)

    def free(self) -> None:
        self._holder = None


def tensors_of(layer: Layer, dtype: Dtype) -> Iterator[tuple[str, Shape, Dtype]]:
    """Path, shape and dtype of what a layer is kept as where the model is stored at `dtype`: its
    weights, and beside a quantised one the scales of its rows."""
    for weight in layer.weights:
        kept = weight.kept(dtype)
        yield weight.path, weight.shape, kept
        if kept is Dtype.int8:
            yield scale_path(weight), weight.shape[:1], Dtype.float32


def scale_path(weight: Weight) -> str:
    """The path that the scales of a linear layer's weight lie at."""
    return f"{weight.path.removesuffix('weight')}scale"


def buffer_bytes(layer: Layer, dtype: Dtype) -> int:
    """Bytes that a layer takes with each tensor on an aligned address."""
    return sum(
        aligned(math.prod(shape) * kept.itemsize) for _, shape, kept in tensors_of(layer, dtype)
    )


def aligned(nbytes: int) -> int:
    """Round a size up so that what follows starts on an aligned address."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def read_layer(
    layer: Layer, buffer: Tensor, dtype: Dtype, checkpoint: Checkpoint, reader: WeightReader
) -> dict[str, Tensor]:
    """Read a layer's tensors into views of a buffer of bytes; gives them by path."""
    tensors: dict[str, Tensor] = {}
    at = 0
    for path, shape, kept in tensors_of(layer, dtype):
        nbytes = math.prod(shape) * kept.itemsize
        tensors[path] = buffer[at : at + nbytes].view(torch_dtype(kept)).view(shape)
        at += aligned(nbytes)
    for weight in layer.weights:
        scale = tensors.get(scale_path(weight))
        read_weight(weight, tensors[weight.path], scale, checkpoint, reader)
    return tensors


def read_weight(
    weight: Weight,
    out: Tensor,
    scale: Tensor | None,
    checkpoint: Checkpoint,
    reader: WeightReader,
) -> None:
    info, name = checkpoint.tensors[weight.key], weight.key
    if scale is not None:
        reader.read_quantised(out, scale, info, name=name, rows=weight.rows, columns=weight.columns)
    elif weight.columns is not None:
        reader.read_columns(out, info, name=name, columns=weight.columns)
    else:
        reader.read_into(out, info, name=name, rows=weight.rows)
