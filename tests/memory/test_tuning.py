"""Kernels that are chosen by what was measured: what displaces a packaged one, and what a file
of a table holds."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from vlmrun.errors import OutputError, VlmrunError
from vlmrun.memory import tuning
from vlmrun.memory.products import (
    FEATURES,
    Cpu,
    Kernel,
    Kernels,
    choose_products,
    packaged_table,
    read_table,
    this_cpu,
    tuned_path,
)
from vlmrun.memory.tuning import (
    BLOCKS,
    PASSES,
    Timing,
    check_writable,
    choose_kernels,
    copies_of,
    pairs_to_time,
    time_kernels,
    tuned_text,
    write_table,
)
from vlmrun.models.checkpoints.dtype import Dtype

ROWS = [rows for _, counts in BLOCKS for rows in counts]
LOOPS: Kernels = ((None, "loops"),)
SPLIT: Kernels = ((4, "loops"), (None, "native"))
PAIR = Dtype.bfloat16, Dtype.float32
TINY = (((16, 8), (8, 16)), (1, 4)), (((24, 8),), (64,))


def times(**seconds: float) -> dict[Kernel, float]:
    return dict(seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("passes", "packaged", "expected"),
    [
        # as fast, or faster within the margin: as packaged
        ({n: [times(loops=1, native=1)] for n in (1, 4, 8, 99)}, SPLIT, SPLIT),
        ({n: [times(loops=1, tiles=0.96)] for n in (1, 4, 8, 99)}, LOOPS, LOOPS),
        ({n: [times(loops=1, tiles=0.95)] for n in (1, 4)}, LOOPS, ((None, "tiles"),)),
        # slower: never, from either side
        ({n: [times(loops=2, native=1)] for n in (1, 4)}, SPLIT, ((None, "native"),)),
        ({n: [times(loops=1, tiles=2)] for n in (1, 4, 8)}, LOOPS, LOOPS),
        # faster in one pass only
        ({1: [times(loops=2, tiles=1), times(loops=1, tiles=1)]}, LOOPS, LOOPS),
        ({1: [times(loops=1, tiles=1), times(loops=2, tiles=1)]}, LOOPS, LOOPS),
        # faster with some numbers of rows: up to those that were measured
        (
            {
                1: [times(loops=1, tiles=2)],
                8: [times(loops=1, tiles=0.5)],
                64: [times(loops=1, tiles=0.5)],
                729: [times(loops=1, tiles=1)],
            },
            LOOPS,
            ((1, "loops"), (64, "tiles"), (None, "loops")),
        ),
        (
            {n: [times(loops=1, native=2)] for n in (1, 4, 8)}
            | {99: [times(loops=2, native=1)] * PASSES},
            SPLIT,
            ((8, "loops"), (None, "native")),
        ),
        # what was not timed cannot be defended
        ({1: [times(loops=2, native=1)]}, ((None, "tiles"),), ((None, "native"),)),
    ],
)
def test_the_choice(
    passes: dict[int, list[dict[Kernel, float]]], packaged: Kernels, expected: Kernels
) -> None:
    assert choose_kernels(passes, packaged) == expected


def test_what_the_packaged_table_tells_apart_is_measured() -> None:
    for row in packaged_table().rows:
        assert {most for most, _ in row.kernels} <= {None, *ROWS}
        assert row.cpu <= set(FEATURES)


@pytest.mark.parametrize(
    ("features", "first"),
    [
        ("avx2", ["float32"] * 3 + ["bfloat16"] * 4),
        ("avx2 avx512_bf16", ["float32"] * 3 + ["bfloat16"] * 4),
        ("amx_bf16 amx_fp16", ["float32"] * 3 + ["bfloat16"] * 4 + ["float16"] * 4),
        ("amx_fp16", ["float32"] * 3 + ["float16"] * 4),
    ],
)
def test_pairs_that_are_computed_in_unasked_come_first(features: str, first: list[str]) -> None:
    pairs = pairs_to_time(frozenset(features.split()))
    assert len(set(pairs)) == len(pairs) == len(Dtype) * 3 - 1
    assert (Dtype.float32, Dtype.float32) not in pairs
    assert [compute for _, compute in pairs][: len(first)] == first


def timings(*pairs: tuple[Dtype, Dtype], loops: float = 1.0) -> list[Timing]:
    return [
        Timing(pair, rows, times(loops=loops, tiles=1.0))
        for pair in pairs
        for rows in PASSES * ROWS
    ]


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "yet"))
    found = tuned_path()
    check_writable(found)
    assert list(found.parent.iterdir()) == []
    return found


def test_a_table_is_read_as_it_was_written(path: Path) -> None:
    half = Dtype.float16, Dtype.float32
    cut = timings(half, loops=9.0)[:-1]  # the time was up
    text = tuned_text([*timings(PAIR, loops=2.0), *cut], packaged_table(), this_cpu(), 3)
    write_table(path, text)
    assert [each.name for each in path.parent.iterdir()] == ["products.json"]
    own, packaged = read_table(), packaged_table()
    assert own.name.startswith("tuned table ")
    assert own.name.split()[-1] != packaged.name.split()[-1]
    assert own.rows[1:] == packaged.rows
    assert own.measured.startswith("vlmrun doctor --tune, 20")
    assert own.measured.endswith(f" UTC, {this_cpu().name}, 3 threads: bfloat16 in float32")
    features = frozenset(this_cpu().features)
    assert own.kernels(*PAIR, features) == ((None, "tiles"),)
    assert own.kernels(*half, features) == packaged.kernels(*half, features)
    found = choose_products(*PAIR, "cpu")
    assert (found.compiled, found.kernels[Dtype.bfloat16]) == (False, ((None, "tiles"),))


def test_two_tables_that_hold_the_same_have_one_name(path: Path) -> None:
    half, digests = (Dtype.float16, Dtype.float32), []
    for loops in (1.0, 2.0):
        for found in (timings(PAIR, loops=loops), timings(PAIR, loops=loops) + timings(half)):
            write_table(path, tuned_text(found, packaged_table(), this_cpu(), 1))
            digests.append(read_table().name.split()[-1])
    packaged = packaged_table().name.split()[-1]
    assert digests[:2] == [packaged] * 2
    assert digests[2] == digests[3] != packaged


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Cpu("Another CPU", this_cpu().features), "Another CPU"),
        (Cpu(this_cpu().name, ("avx9",)), f"{this_cpu().name} with avx9"),
        (Cpu(this_cpu().name, ()), f"{this_cpu().name} with no feature that counts"),
    ],
)
def test_a_table_of_another_cpu_does_not_count(path: Path, other: Cpu, words: str) -> None:
    write_table(path, tuned_text(timings(PAIR, loops=2.0), packaged_table(), other, 1))
    ignored = f"{path} was measured on another CPU, {words}"
    assert (read_table().name, read_table().ignored) == (packaged_table().name, ignored)
    for dtype in (Dtype.bfloat16, Dtype.float32):
        found = choose_products(dtype, Dtype.float32, "cpu")
        assert found.table == packaged_table().name
        assert str(found).endswith(f"; {ignored})")


def test_a_table_that_cannot_be_read_does_not_count(path: Path) -> None:
    path.mkdir()
    assert read_table().name == packaged_table().name
    assert read_table().ignored == f"{path} is no file"


def test_too_little_is_no_table() -> None:
    with pytest.raises(VlmrunError, match=r"^17 measurements in 60 s are too few"):
        tuned_text(timings(PAIR)[:-1], packaged_table(), this_cpu(), 1)


def test_what_cannot_be_written_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path.write_text("as before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OutputError, match=r"products.json cannot be written: No space left"):
            write_table(path, "{}")
    assert [each.read_text() for each in path.parent.iterdir()] == ["as before"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # a file
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        check_writable(tuned_path())
    assert read_table().name == packaged_table().name
    with pytest.raises(OutputError, match="nobody would look"):
        check_writable(Path("~/.cache/vlmrun/products.json"))


def test_matrices_are_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((3, 5), (2, 4))
    few, many = (copies_of(shapes, torch.bfloat16, nbytes) for nbytes in (1, 1000))
    assert (len(few), len(many)) == (1, 1000 // 46)
    places = {matrix.data_ptr() for copy in many for matrix in copy}
    assert len(places) == 2 * len(many)
    assert {tuple(matrix.shape) for copy in many for matrix in copy} == set(shapes)
    assert all(copy[0].is_contiguous() and copy[1].is_contiguous() for copy in many)


def test_every_pair_is_timed_with_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BLOCKS", TINY)
    before = torch.get_num_threads()
    pairs = [PAIR, (Dtype.int8, Dtype.float32), (Dtype.bfloat16, Dtype.bfloat16)]
    found = list(time_kernels(pairs, threads=1, buffer_bytes=1 << 12))
    torch.set_num_threads(before)
    assert [(each.pair, each.rows) for each in found] == [
        (pair, rows) for pair in pairs for rows in (1, 4, 64, 1, 4, 64)
    ]
    for each in found:
        other = "native" if each.pair[0] == each.pair[1] else "tiles"
        assert [*each.seconds] == ["loops", other]
        assert all(0 < took < 1 for took in each.seconds.values())
    assert not torch.is_inference_mode_enabled()
    fields = json.loads(tuned_text(found, packaged_table(), this_cpu(), 1))
    assert fields["measured"].count(" in ") == len(pairs)


def test_nothing_is_timed_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BLOCKS", TINY)
    threads = torch.get_num_threads()
    found = list(time_kernels([PAIR] * 9, threads=threads, buffer_bytes=1, seconds=0))
    assert len(found) == 1


def test_without_loops_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "find_product", lambda: (None, "numba is ill"))
    with pytest.raises(VlmrunError, match="nothing to choose from: numba is ill"):
        next(time_kernels([PAIR], threads=torch.get_num_threads(), buffer_bytes=1))
