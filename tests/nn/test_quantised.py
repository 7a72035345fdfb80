"""Products with int8 weights and the scales of their rows, by every way there is."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from vlmrun.models.checkpoints.quantising import dequantised, quantise
from vlmrun.nn import linear as module
from vlmrun.nn.kernels.products import product
from vlmrun.nn.linear import PYTORCH, CastLinear, Kernels, RowBlocks, linear, loops, tiled

ROWS = (0, 1, 2, 3, 5, 8, 16, 33, 49)
SHAPES = ((1, 1), (1, 9), (3, 8), (4, 1), (17, 100), (130, 48), (7, 4867))  # [N, K]
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=["compiled", "tiles"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "tiles":
        return PYTORCH
    return {(torch.int8, compute): ((math.inf, loops(product)),) for compute in TOLERANCES}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("compute", TOLERANCES, ids=str)
@pytest.mark.parametrize("tile", [7, 1 << 20])
def test_products_are_those_of_what_the_numbers_stand_for(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, compute: torch.dtype, tile: int
) -> None:
    monkeypatch.setattr(module, "TILE_NUMBERS", tile)
    for shape in SHAPES:
        numbers, scale = quantise(draw(*shape, seed=1))
        weight, bias = dequantised(numbers, scale).double(), draw(shape[0], seed=2)
        for rows in ROWS:
            x = draw(rows, shape[1]).to(compute)
            found = linear(x, numbers, bias, scale, kernels)
            assert (found.dtype, found.shape) == (compute, (rows, shape[0]))
            exact = x.double() @ weight.t() + bias.double()
            size = x.double().abs() @ weight.abs().t() + bias.double().abs()
            assert not ((found - exact).abs() > TOLERANCES[compute] * size).any(), (shape, rows)


def test_float16_sums_do_not_overflow_before_the_scale(kernels: Kernels) -> None:
    """64 products of 127 and 100 are more than it holds; times their scale they are 1."""
    numbers, scale = quantise(torch.full((8, 64), 1 / 6400))
    x = torch.full((5, 64), 100.0, dtype=torch.float16)
    for found in (linear(x, numbers, None, scale, kernels), tiled(x, numbers, scale)):
        torch.testing.assert_close(found.float(), torch.ones(5, 8), atol=2e-3, rtol=0)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_address(kernels: Kernels, compute: torch.dtype) -> None:
    numbers, scale = quantise(draw(130, 72))
    for rows in (1, 3, 40):
        x = draw(rows, 72).to(compute)
        expected = linear(x, numbers, None, scale, kernels)
        for shift in range(1, 16):
            moved = torch.empty(numbers.numel() + shift, dtype=torch.int8)[shift:].view(130, 72)
            moved.copy_(numbers)
            assert torch.equal(linear(x, moved, None, scale, kernels), expected)


def test_layers_take_their_scales(kernels: Kernels) -> None:
    """Of rows, and of a matrix in pieces of rows."""
    numbers, scale = quantise(draw(10, 33))
    x = draw(2, 3, 33)
    whole = CastLinear(33, 10, bias=False)
    whole.weight, whole.scale = nn.Parameter(numbers, requires_grad=False), scale
    whole.kernels = kernels
    assert [name for name, _ in whole.named_parameters()] == ["weight"]
    blocks = RowBlocks(33, [4, 6])
    for block, part, step in zip(
        blocks.blocks, numbers.split([4, 6]), scale.split([4, 6]), strict=True
    ):
        block.weight, block.scale = nn.Parameter(part, requires_grad=False), step
        block.kernels = kernels
    expected = x @ dequantised(numbers, scale).t()
    for found in (whole(x), blocks(x)):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
