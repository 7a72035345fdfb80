"""Matrix products over stored weights: values, shapes, tiles."""

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from vlmrun.nn import linear as module
from vlmrun.nn.kernels.products import product
from vlmrun.nn.linear import (
    PYTORCH,
    CastLinear,
    Kernels,
    RowBlocks,
    choose_kernel,
    loops,
    native,
    tiled,
)

HALVES = (torch.bfloat16, torch.float16)
# (M, K, N): one row, one column, nothing at all, and sizes that are no multiple of anything
SHAPES = [
    (1, 1, 1),
    (1, 1, 9),
    (0, 5, 7),
    (1, 64, 48),
    (3, 7, 5),
    (7, 33, 31),
    (7, 48, 130),
    (2, 130, 1),
]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=["compiled", "tiles"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """By compiled loops, but for float32 in float32, and as where there are none."""
    if request.param == "tiles":
        return PYTORCH
    dtypes = (torch.float32, *HALVES)
    pairs = ((stored, compute) for stored in dtypes for compute in dtypes)
    mine = ((math.inf, loops(product)),)
    return {pair: mine for pair in pairs if pair != (torch.float32, torch.float32)}


@pytest.fixture
def linear(kernels: Kernels) -> partial[Tensor]:
    return partial(module.linear, kernels=kernels)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = x.double() @ weight.double().T
    return wide if bias is None else wide + bias.double()


@pytest.mark.parametrize("tile", [1, 7, 100, 1 << 20])
@pytest.mark.parametrize("stored", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_right(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int],
    stored: torch.dtype,
    tile: int,
    linear: partial[Tensor],
) -> None:
    """In float32, over weights of any dtype, with tiles of one row up to the whole matrix."""
    monkeypatch.setattr(module, "TILE_NUMBERS", tile)
    rows, narrow, wide = shape
    x, weight = draw(rows, narrow), draw(wide, narrow, seed=1, dtype=stored)
    for bias in None, draw(wide, seed=2, dtype=stored):
        found = linear(x, weight, bias)
        assert found.dtype == torch.float32
        assert found.shape == (rows, wide)
        torch.testing.assert_close(found.double(), reference(x, weight, bias), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("compute", HALVES)
@pytest.mark.parametrize("stored", [torch.float32, *HALVES])
def test_halves_compute_too(
    compute: torch.dtype, stored: torch.dtype, linear: partial[Tensor]
) -> None:
    x, weight, bias = draw(5, 33, dtype=compute), draw(40, 33, seed=1), draw(40, seed=2)
    weight, bias = weight.to(stored), bias.to(stored)
    found = linear(x, weight, bias)
    assert found.dtype == compute
    expected = reference(x, weight.to(compute), bias.to(compute))
    torch.testing.assert_close(found.double(), expected, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("shape", [(33,), (4, 33), (2, 3, 33), (2, 1, 3, 33), (2, 0, 33)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_any_number_of_dimensions(
    shape: tuple[int, ...], stored: torch.dtype, linear: partial[Tensor]
) -> None:
    x, weight, bias = draw(*shape), draw(10, 33, seed=1, dtype=stored), draw(10, seed=2)
    found = linear(x, weight, bias)
    assert found.shape == (*shape[:-1], 10)
    torch.testing.assert_close(found.double(), reference(x, weight, bias), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_inputs_need_not_be_contiguous(stored: torch.dtype, linear: partial[Tensor]) -> None:
    weight = draw(10, 6, seed=1, dtype=stored)
    base = draw(6, 4, 5)
    wide = draw(4, 9)[:, 2:8]
    for x in base.permute(2, 1, 0), base.permute(1, 2, 0)[::2], wide, base[:, 0, 0].expand(3, 6):
        assert not x.is_contiguous()
        torch.testing.assert_close(
            linear(x, weight).double(), reference(x, weight, None), atol=2e-5, rtol=1e-5
        )


def test_the_input_is_left_alone(linear: partial[Tensor]) -> None:
    x, weight, bias = draw(3, 8), draw(4, 8, dtype=torch.bfloat16), draw(4)
    copies = [value.clone() for value in (x, weight, bias)]
    linear(x, weight, bias)
    assert all(map(torch.equal, (x, weight, bias), copies))


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("stored", HALVES)
def test_bits_do_not_depend_on_the_address(
    rows: int, stored: torch.dtype, linear: partial[Tensor]
) -> None:
    """Halves are mapped where they lie: on any even address, in any dtype of arithmetic."""
    x, weight = draw(rows, 72), draw(130, 72, seed=1, dtype=stored)
    for compute in torch.float32, stored:
        expected = linear(x.to(compute), weight)
        for shift in range(1, 16):
            moved = torch.empty(weight.numel() + shift, dtype=stored)[shift:].view(weight.shape)
            moved.copy_(weight)
            assert torch.equal(linear(x.to(compute), moved), expected)


def test_a_half_matrix_never_exists_in_float32(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, linear: partial[Tensor]
) -> None:
    """The only float32 buffers are the result and one tile."""
    monkeypatch.setattr(module, "TILE_NUMBERS", 640)
    x, weight = draw(2, 64), draw(100, 64, seed=1, dtype=torch.bfloat16)
    with torch.profiler.profile(profile_memory=True) as seen:
        linear(x, weight)
    largest = max(event.self_cpu_memory_usage for event in seen.events())
    assert largest == 2 * 100 * 4 if kernels else 640 * 4 <= largest < 100 * 64 * 4


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_cast_linear_is_linear(bias: bool, stored: torch.dtype, kernels: Kernels) -> None:
    stock = torch.nn.Linear(9, 5, bias=bias)
    layer = CastLinear(9, 5, bias=bias)
    layer.kernels = kernels
    assert {n: p.shape for n, p in layer.named_parameters()} == {
        n: p.shape for n, p in stock.named_parameters()
    }
    layer.load_state_dict(stock.state_dict())
    layer.to(stored)
    x = draw(4, 9)
    torch.testing.assert_close(layer(x), stock.to(stored).float()(x), atol=1e-5, rtol=1e-5)
    assert not any(value.requires_grad for value in layer.parameters())


@pytest.mark.parametrize("pieces", [[10], [4, 4, 2], [1] * 10, [9, 1]])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_row_blocks_are_the_whole_matrix(
    pieces: list[int], stored: torch.dtype, linear: partial[Tensor], kernels: Kernels
) -> None:
    weight = draw(10, 33, seed=1, dtype=stored)
    blocks = RowBlocks(33, pieces)
    for block, part in zip(blocks.blocks, weight.split(pieces), strict=True):
        block.weight = torch.nn.Parameter(part.clone(), requires_grad=False)
        block.kernels = kernels
    for x in draw(1, 33), draw(2, 3, 33):
        found = blocks(x)
        assert found.shape == (*x.shape[:-1], 10)
        torch.testing.assert_close(found, linear(x, weight), atol=2e-5, rtol=1e-5)


def test_kernels_are_chosen_by_rows_and_dtypes() -> None:
    """What is not named PyTorch computes, over tiles where it must convert."""
    mine = loops(product)
    single, half = torch.float32, torch.bfloat16
    kernels = {(half, half): ((4, mine), (9, tiled), (math.inf, native))}
    chosen = [choose_kernel(kernels, half, half, rows) for rows in (0, 4, 5, 9, 10, 10_000)]
    assert chosen == [mine, mine, tiled, tiled, native, native]
    for stored, compute in ((single, single), (half, single), (single, half), (torch.int8, half)):
        expected = native if stored == compute else tiled
        assert choose_kernel(kernels, stored, compute, 1) is expected


@pytest.mark.parametrize("bias", [True, False])
def test_float32_is_pytorchs_to_the_bit(bias: bool) -> None:
    x, weight = draw(2, 5, 64), draw(48, 64, seed=1)
    added = draw(48, seed=2) if bias else None
    expected = torch.nn.functional.linear(x, weight, added)
    assert torch.equal(module.linear(x, weight, added), expected)
