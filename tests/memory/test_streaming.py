"""The slot: one layer at a time, each weight on an aligned address."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from entries import build_cut_head
from folders import model_at
from safetensors.torch import load_file
from tiny import VISION

from vlmrun.memory.streaming import Slot, aligned, read_layer, slot_numbers
from vlmrun.models.checkpoints.reading import ALIGNMENT, WeightReader
from vlmrun.models.layer import Layer, Weight
from vlmrun.models.model import Model

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


@pytest.mark.parametrize(
    ("dtype", "numel", "expected"),
    [
        (torch.float32, 0, 0),
        (torch.float32, 1, 4),
        (torch.float32, 4, 4),
        (torch.float32, 5, 8),
        (torch.bfloat16, 1, 8),
        (torch.float16, 9, 16),
    ],
)
def test_aligned(dtype: torch.dtype, numel: int, expected: int) -> None:
    assert aligned(numel, dtype) == expected
    assert aligned(numel, dtype) * dtype.itemsize % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layer_passes_the_slot(
    model: Model, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    layers = movable(model)
    numbers = slot_numbers(layers, dtype)
    assert numbers == max(sum(aligned(w.numel, dtype) for w in layer.weights) for layer in layers)
    with WeightReader() as reader:
        slot = Slot(
            numbers * dtype.itemsize, dtype=dtype, checkpoint=model.checkpoint, reader=reader
        )
        for layer in layers:
            found = slot.read(layer)
            for weight, tensor in zip(layer.weights, found, strict=True):
                start, stop = weight.rows or (0, len(tensors[weight.key]))
                assert tensor.shape == weight.shape
                assert torch.equal(tensor, tensors[weight.key][start:stop].to(dtype))
                assert tensor.data_ptr() % ALIGNMENT == 0
            assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
            slot.free()


def test_a_slot_holds_one_layer(model: Model) -> None:
    first, second = movable(model)[:2]
    with WeightReader() as reader:
        slot = Slot(1 << 20, dtype=torch.float32, checkpoint=model.checkpoint, reader=reader)
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
    weights = tuple(Weight("p", head, (stop - at, width), (at, stop)) for at, stop in rows)
    layer = Layer("odd", "odd", "head", "", weights)
    with WeightReader() as reader:
        buffer = torch.full((slot_numbers([layer], torch.float32) + 1,), torch.nan)
        found = read_layer(layer, buffer, model.checkpoint, reader)
        assert torch.isnan(buffer[-1])
        for weight, tensor in zip(weights, found, strict=True):
            expected = torch.empty(weight.shape)
            info = model.checkpoint.tensors[head]
            reader.read_into(expected, info, name=head, rows=weight.rows)
            assert torch.equal(tensor, expected)
