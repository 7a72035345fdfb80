"""The unit that moves between tiers: a block of the network with all its tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vlmrun.models.checkpoints.checkpoint import ITEMSIZES
from vlmrun.models.checkpoints.dtype import SAFETENSORS, Dtype

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One block of an architecture: its tensors by module path, and the module that runs it.

    A gathered block is a token table: rows are looked up where it lies, it is never moved.
    A block with `row_blocks` is a large matrix that moves in pieces of rows.
    quantised: `--dtype int8` stores its matrices so, all of which are of linear layers.
    """

    name: str
    part: str
    module: str
    tensors: Mapping[str, Shape]
    gathered: bool = False
    row_blocks: bool = False
    quantised: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a layer, or the rows or columns `start:stop` of one.

    stored: its dtype in the checkpoint, as safetensors spells it. quantised: `--dtype int8`
    keeps it as whole numbers, and a float32 scale for each of its rows.
    """

    path: str  # module path of the parameter
    key: str  # name in the checkpoint
    shape: Shape
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    stored: str = "F32"
    quantised: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def kept(self, dtype: Dtype) -> Dtype:
        """What it is kept in where the model is stored at `dtype`."""
        return dtype if self.quantised or dtype is not Dtype.int8 else SAFETENSORS[self.stored]

    def nbytes(self, dtype: Dtype) -> int:
        """Bytes it is kept in where the model is stored at `dtype`."""
        if dtype is not Dtype.int8:
            return self.numel * dtype.itemsize
        if not self.quantised:
            return self.numel * ITEMSIZES[self.stored]
        return self.numel + self.shape[0] * Dtype.float32.itemsize


@dataclass(frozen=True, slots=True)
class Layer:
    """A block with its place in the checkpoint. Every tensor belongs to exactly one layer,
    except that a table tied to the head is gathered under its own name as well (`tied`)."""

    name: str
    block: str  # the architecture's block it is, or is a piece of
    part: str
    module: str  # module path of what runs it
    weights: tuple[Weight, ...]
    gathered: bool = False
    tied: bool = False

    def nbytes(self, dtype: Dtype) -> int:
        """Bytes the layer takes when stored at `dtype`; a tied table counts at its owner."""
        return 0 if self.tied else sum(weight.nbytes(dtype) for weight in self.weights)
