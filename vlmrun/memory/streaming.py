"""The one buffer that streamed layers pass through.

A layer that does not stay is read into the slot before it runs and forgotten after. There is
one slot of the size of the largest layer, so one streamed layer is bound at a time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmrun.models.checkpoints.checkpoint import Checkpoint
from vlmrun.models.checkpoints.reading import ALIGNMENT, WeightReader
from vlmrun.models.layer import Layer, Weight


class Slot:
    """A fixed buffer on the CPU; `read` fills it with one layer and hands out views of it."""

    def __init__(
        self, nbytes: int, *, dtype: torch.dtype, checkpoint: Checkpoint, reader: WeightReader
    ) -> None:
        self._buffer = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
        self._checkpoint = checkpoint
        self._reader = reader
        self._holder: str | None = None

    def read(self, layer: Layer) -> list[Tensor]:
        """Read a layer's weights, in the order of `layer.weights`."""
        assert self._holder is None, f"{layer.name} needs the slot that {self._holder} holds"
        self._holder = layer.name
        return read_layer(layer, self._buffer, self._checkpoint, self._reader)

    def free(self) -> None:
        self._holder = None


def slot_numbers(layers: Sequence[Layer], dtype: torch.dtype) -> int:
    """Numbers that the largest of the layers needs, each weight on an aligned address."""
    return max(sum(aligned(w.numel, dtype) for w in layer.weights) for layer in layers)


def aligned(numel: int, dtype: torch.dtype) -> int:
    """Round a length up so that what follows starts on an aligned address."""
    step = ALIGNMENT // dtype.itemsize
    return -(-numel // step) * step


def read_layer(
    layer: Layer, buffer: Tensor, checkpoint: Checkpoint, reader: WeightReader
) -> list[Tensor]:
    """Read a layer's weights into views of a flat buffer."""
    tensors, at = [], 0
    for weight in layer.weights:
        out = buffer[at : at + weight.numel].view(weight.shape)
        read_weight(weight, out, checkpoint, reader)
        tensors.append(out)
        at += aligned(weight.numel, buffer.dtype)
    return tensors


def read_weight(weight: Weight, out: Tensor, checkpoint: Checkpoint, reader: WeightReader) -> None:
    info = checkpoint.tensors[weight.key]
    if weight.columns is not None:
        reader.read_columns(out, info, name=weight.key, columns=weight.columns)
    else:
        reader.read_into(out, info, name=weight.key, rows=weight.rows)
