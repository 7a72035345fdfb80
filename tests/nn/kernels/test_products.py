"""Compiled products against the same product in double precision, over odd shapes and strides."""

import mmap
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vlmrun.nn.kernels import compile_product, page_out
from vlmrun.nn.kernels.claims import kept, source_digest
from vlmrun.nn.kernels.products import PANEL, product
from vlmrun.nn.linear import Gate, gated

ROWS = (1, 2, 3, 4, 5, 8, 9, 11, PANEL, PANEL + 1, 100)
SHAPES = ((1, 5), (3, 8), (4, 1), (5, 33), (17, 100), (64, 768), (1100, 9), (7, 4867))  # [N, K]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return (40 * numbers).clamp(-127, 127).to(dtype) if dtype == torch.int8 else numbers.to(dtype)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_double_precision(dtype: torch.dtype, wide: bool) -> None:
    for shape in SHAPES:
        weight = random(*shape, dtype=dtype)
        for rows in ROWS:
            x = random(rows, shape[1])
            exact = x.double() @ weight.double().t()
            size = x.double().abs() @ weight.double().abs().t()  # of what is added up
            error = (product(x, weight, wide=wide) - exact).abs() / size
            assert error.max() < 1e-6, (shape, rows)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("gate", ["", "gelu_tanh", "quick_gelu"])
def test_scale_bias_and_gate_are_each_taken_once(gate: Gate, wide: bool) -> None:
    """Where blocks overlap at the edges, too."""
    for columns, depth in ((3, 8), (5, 33), (70, 64), (1100, 9)):
        weight = random(columns, depth, dtype=torch.int8)
        scale, bias = random(columns).abs() / 1000, random(columns)
        for rows in (1, 3, 5, PANEL + 1, 2 * PANEL - 1, 2 * PANEL + 1):
            x = random(rows, depth) / 40
            exact = gated(x.double() @ weight.double().t() * scale.double() + bias.double(), gate)
            found = product(x, weight, scale=scale, bias=bias, gate=gate, wide=wide)
            torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=1e-5)


def test_no_rows_have_no_product() -> None:
    assert product(torch.ones(0, 8), random(5, 8, dtype=torch.bfloat16)).shape == (0, 5)


@pytest.mark.parametrize("wide", [True, False])
def test_strides_and_odd_addresses(wide: bool) -> None:
    whole = random(9, 130)
    weight = random(11, 130, dtype=torch.bfloat16)
    for x, w in (
        (whole[:, 1:], weight[:, 1:]),
        (whole[::2], weight[::3]),
        (random(130, 9).t(), random(130, 11, dtype=torch.bfloat16).t()),
        (whole[1:], weight.view(-1)[3 : 3 + 10 * 130].view(10, 130)),
    ):
        exact = x.double() @ w.double().t()
        torch.testing.assert_close(product(x, w, wide=wide).double(), exact, atol=2e-5, rtol=1e-5)


def test_every_half_is_widened_exactly() -> None:
    """Subnormal numbers, infinities and signed zeros included; the payload of a NaN may change."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        halves = bits.to(torch.int16).view(dtype)[:, None]
        found, expected = product(torch.ones(1, 1), halves)[0], halves[:, 0].float()
        assert bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def test_every_int8_is_widened_exactly() -> None:
    whole = torch.arange(-128, 128, dtype=torch.int8)[:, None]
    assert torch.equal(product(torch.ones(1, 1), whole)[0], whole[:, 0].float())


@pytest.mark.parametrize("rows", [1, 2, 4, 9])
def test_what_is_not_finite_stays_so(rows: int) -> None:
    """An overflow must be seen where logits are looked at."""
    for value in (float("inf"), float("nan")):
        x, weight = torch.ones(rows, 40), torch.ones(12, 40, dtype=torch.float16)
        x[rows - 1, 17] = value
        found = product(x, weight)
        assert not bool(torch.isfinite(found[rows - 1]).any())
        assert bool((found[: rows - 1] == 40).all())


def test_bits_do_not_depend_on_threads() -> None:
    weight = random(301, 513, dtype=torch.bfloat16)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append([product(random(rows, 513), weight) for rows in ROWS])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_what_is_compiled_is_kept(tmp_path: Path) -> None:
    """A second process compiles nothing: its cache is not written to."""
    code = (
        "import torch; from vlmrun.nn.kernels.products import bits, entry;"
        "print(entry(bits(torch.bfloat16), 1, 1).cache_hits)"
    )
    command = [sys.executable, "-c", code]
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PATH": ""}
    hits = [
        subprocess.run(command, env=environment, capture_output=True, check=True).stdout.strip()
        for _ in range(2)
    ]
    assert hits == [b"0", b"1"]


def test_other_source_is_other_code(tmp_path: Path) -> None:
    """numba keeps code under the text of one file, and code of several files is in it."""
    code = (
        "import torch; from vlmrun.nn.kernels import products;"
        "products.source_digest = lambda: {};"
        "print(products.entry(products.bits(torch.bfloat16), 1, 1).cache_hits)"
    )
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PATH": ""}
    hits = [
        subprocess.run(
            [sys.executable, "-c", code.format(digest)],
            env=environment,
            capture_output=True,
            check=True,
        ).stdout.strip()
        for digest in (1, 2, 1)
    ]
    assert hits == [b"0", b"0", b"1"]
    assert source_digest() > 0


def test_what_cannot_be_kept_is_compiled_all_the_same() -> None:
    def compile_it(keep: bool) -> SimpleNamespace:
        if keep:
            raise OSError(28, "No space left on device")
        return SimpleNamespace(address=7)

    assert kept(compile_it) == 7


def resident(library: str) -> int:
    """KiB of a library's mappings that lie in memory."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counted = library in line
        elif counted and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_pages_of_a_library_are_given_back(tmp_path: Path) -> None:
    """Of one that no other process has mapped: the kernel leaves shared pages alone."""
    file = tmp_path / "some-library.so"
    file.write_bytes(b"x" * (8 << 20))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[::4096] == b"x" * 2048
        before = resident(file.name)
        page_out(file.name)
        assert resident(file.name) < before / 10
        assert mapped[::4096] == b"x" * 2048


def test_more_is_compiled_after_the_compilers_memory_was_given_back() -> None:
    compile_product(product, torch.float16, rows=1)
    x, weight = random(3, 9), random(5, 9, dtype=torch.float16)
    torch.testing.assert_close(product(x, weight), x @ weight.float().t())
