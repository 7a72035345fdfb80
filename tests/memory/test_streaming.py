"""The slot: one layer at a time, each weight on an aligned address."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from entries import build_cut_head
from folders import model_at
from safetensors.torch import load_file
from tiny import VISION

from vlmrun.memory.streaming import Slot, aligned, buffer_bytes, read_layer, scale_path
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.checkpoints.quantising import quantise
from vlmrun.models.checkpoints.reading import ALIGNMENT, WeightReader, torch_dtype
from vlmrun.models.layer import Layer, Weight
from vlmrun.models.model import Model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of 71 numbers lie before others; the head moves in pieces."""
    with patch.dict(VISION, intermediate_size=71):
        return build_cut_head(tmp_path_factory.mktemp("odd"), tied=False)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return model_at(folder)


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def movable(model: Model) -> list[Layer]:
    return [layer for layer in model.layers if not layer.gathered]


def test_aligned() -> None:
    assert [aligned(n) for n in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]
    assert ALIGNMENT == 16


@pytest.mark.parametrize("dtype", Dtype)
def test_every_layer_passes_the_slot(
    model: Model, tensors: dict[str, torch.Tensor], dtype: Dtype
) -> None:
    """Each tensor on an aligned address, in as many bytes as the layer counts but for padding."""
    layers = movable(model)
    nbytes = max(buffer_bytes(layer, dtype) for layer in layers)
    with WeightReader() as reader:
        slot = Slot(nbytes, dtype=dtype, checkpoint=model.checkpoint, reader=reader)
        for layer in layers:
            found = slot.read(layer)
            for weight in layer.weights:
                start, stop = weight.rows or (0, len(tensors[weight.key]))
                expected = tensors[weight.key][start:stop]
                tensor = found[weight.path]
                assert tensor.shape == weight.shape
                if dtype is Dtype.int8 and weight.quantised:
                    numbers, scale = quantise(expected)
                    assert torch.equal(tensor, numbers)
                    assert torch.equal(found[scale_path(weight)], scale)
                else:
                    kept = torch.float32 if dtype is Dtype.int8 else torch_dtype(dtype)
                    assert torch.equal(tensor, expected.to(kept))
                    assert scale_path(weight) not in found
            assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in found.values())
            assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1
            total = sum(tensor.nbytes for tensor in found.values())
            assert layer.nbytes(dtype) == total <= buffer_bytes(layer, dtype) <= nbytes
            assert buffer_bytes(layer, dtype) - total < ALIGNMENT * len(found)
            slot.free()


def test_a_slot_holds_one_layer(model: Model) -> None:
    first, second = movable(model)[:2]
    with WeightReader() as reader:
        slot = Slot(1 << 20, dtype=Dtype.float32, checkpoint=model.checkpoint, reader=reader)
        slot.read(first)
        with pytest.raises(AssertionError, match=f"{second.name} needs the slot that {first.name}"):
            slot.read(second)
        slot.free()
        slot.read(second)


def test_weights_of_odd_lengths_do_not_overlap(model: Model) -> None:
    """Rows of one table, three at a time, as weights of one layer."""
    [head] = {w.key for layer in model.layers if layer.part == "head" for w in layer.weights}
    width = model.checkpoint.tensors[head].shape[1]
    rows = [(0, 1), (5, 8), (3, 4)]
    weights = tuple(Weight(f"{at}", head, (stop - at, width), (at, stop)) for at, stop in rows)
    layer = Layer("odd", "odd", "head", "", weights)
    with WeightReader() as reader:
        buffer = torch.full((buffer_bytes(layer, Dtype.float32) + 1,), 77, dtype=torch.uint8)
        found = read_layer(layer, buffer, Dtype.float32, model.checkpoint, reader)
        assert buffer[-1] == 77
        for weight in weights:
            expected = torch.empty(weight.shape)
            info = model.checkpoint.tensors[head]
            reader.read_into(expected, info, name=head, rows=weight.rows)
            assert torch.equal(found[weight.path], expected)
