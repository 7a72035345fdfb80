"""Matrices in 8 bits: the numbers of the definition, whatever the rows are read with."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vlmrun.errors import CheckpointError
from vlmrun.models.checkpoints import reading
from vlmrun.models.checkpoints.checkpoint import read_header
from vlmrun.models.checkpoints.quantising import MOST, dequantised, quantise
from vlmrun.models.checkpoints.reading import WeightReader

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (1, 7), (5, 1), (3, 33), (17, 130), (64, 1000))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes."""
    source = torch.Generator().manual_seed(sum(shape))
    sizes = torch.logspace(-3, 2, shape[0])[:, None]
    return (torch.randn(*shape, generator=source) * sizes).to(dtype)


def by_the_definition(row: list[float]) -> tuple[list[int], float]:
    """One row, number by number; a number halfway between two goes to the even one."""
    scale = torch.tensor(max(abs(number) for number in row)) / 127
    steps = [torch.tensor(number) / scale for number in row] if scale else [0] * len(row)
    return [max(-127, min(127, round(float(step)))) for step in steps], float(scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_those_of_the_definition(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        matrix = draw(*shape, dtype=dtype)
        numbers, scale = quantise(matrix)
        assert (numbers.dtype, scale.dtype) == (torch.int8, torch.float32)
        for row, mine, step in zip(matrix.tolist(), numbers.tolist(), scale.tolist(), strict=True):
            assert (mine, step) == by_the_definition(row)


def test_what_comes_back_is_off_by_half_a_step_at_most() -> None:
    matrix = draw(40, 300)
    numbers, scale = quantise(matrix)
    assert numbers.abs().amax(dim=1).tolist() == [MOST] * 40  # of every row, no more and no less
    error = (dequantised(numbers, scale) - matrix).abs() / scale[:, None]
    assert error.max() < 0.5 + 1e-4
    assert error.max() > 0.49


def test_halves_go_to_the_even_number() -> None:
    row = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]])
    assert quantise(row)[0].tolist() == [[127, 0, 2, 2, 0, -2, -126]]


@pytest.mark.parametrize("value", [0.0, 1e-45, -3e-44])
def test_rows_of_next_to_nothing_are_finite(value: float) -> None:
    """Zeros, and numbers whose scale is too small for float32."""
    numbers, scale = quantise(torch.full((2, 5), value))
    back = dequantised(numbers, scale)
    assert torch.isfinite(back).all()
    assert (back - value).abs().max() <= abs(value)


def test_a_cut_into_rows_changes_no_bit() -> None:
    matrix = draw(23, 65, dtype=torch.bfloat16)
    whole = quantise(matrix)
    for pieces in ([1] * 23, [5, 18], [22, 1]):
        parts = [quantise(part) for part in matrix.split(pieces)]
        for one, other in zip(whole, map(torch.cat, zip(*parts, strict=True)), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("staging", [65, 200, 1 << 20])
def test_what_is_read_is_what_the_whole_matrix_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, staging: int
) -> None:
    """Rows, or columns: these keep the scale of the whole row."""
    monkeypatch.setattr(reading, "STAGING_NUMBERS", staging)
    matrix = draw(23, 65, dtype=dtype)
    save_file({"before": draw(3, 3), "w": matrix}, tmp_path / "x.safetensors")
    info = read_header(tmp_path / "x.safetensors")["w"]
    numbers, scale = quantise(matrix)
    with WeightReader() as reader:
        for rows, columns in ((None, None), ((4, 11), None), (None, (0, 13)), (None, (13, 65))):
            kept = numbers if rows is None else numbers[slice(*rows)]
            kept = kept if columns is None else kept[:, slice(*columns)]
            out = torch.full(kept.shape, -128, dtype=torch.int8)
            found = torch.full((len(out),), torch.nan)
            before = reader.bytes_read
            reader.read_quantised(out, found, info, name="w", rows=rows, columns=columns)
            assert torch.equal(out, kept)
            assert torch.equal(found, scale if rows is None else scale[slice(*rows)])
            assert reader.bytes_read - before == len(out) * 65 * dtype.itemsize


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_refused_by_name(tmp_path: Path, value: float) -> None:
    matrix = draw(4, 6)
    matrix[2, 5] = value
    save_file({"some.weight": matrix}, tmp_path / "x.safetensors")
    info = read_header(tmp_path / "x.safetensors")["some.weight"]
    with WeightReader() as reader, pytest.raises(CheckpointError) as caught:
        reader.read_quantised(
            torch.empty(4, 6, dtype=torch.int8), torch.empty(4), info, name="some.weight"
        )
    assert caught.value.message == "some.weight holds numbers that are not finite"
    assert caught.value.hint
