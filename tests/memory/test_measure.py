"""The highest memory of a process, by kind."""

import mmap
import threading
import time
from pathlib import Path

import pytest

from vlmrun.memory import measure
from vlmrun.memory.measure import PeakMemory

NBYTES = 64 << 20


def touch(memory: mmap.mmap) -> None:
    for at in range(0, NBYTES, mmap.PAGESIZE):
        memory[at]


def test_a_peak_in_the_middle_is_seen() -> None:
    with PeakMemory() as seen:
        before = seen.peak
        with mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            for at in range(0, NBYTES, mmap.PAGESIZE):
                memory[at] = 1
            time.sleep(0.1)
        time.sleep(0.05)
    assert seen.peak.anon_bytes >= before.anon_bytes + 0.95 * NBYTES
    assert seen.peak.total_bytes >= before.total_bytes + 0.95 * NBYTES


def test_file_pages_are_counted_apart(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"\1" * NBYTES)
    with (
        PeakMemory() as seen,
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as memory,
    ):
        before = seen.peak
        touch(memory)
        time.sleep(0.1)
    assert seen.peak.file_bytes >= before.file_bytes + 0.95 * NBYTES
    assert seen.peak.anon_bytes < before.anon_bytes + 0.25 * NBYTES


def test_the_end_is_sampled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run shorter than the interval."""
    monkeypatch.setattr(measure, "INTERVAL_SECONDS", 60)
    with PeakMemory() as seen:
        before = seen.peak
        memory = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(b"\1" * NBYTES)
    memory.close()
    assert seen.peak.anon_bytes >= before.anon_bytes + 0.95 * NBYTES


def test_sampling_ends() -> None:
    before = threading.active_count()
    with PeakMemory() as seen:
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    peak = seen.peak
    time.sleep(0.03)
    assert seen.peak is peak
