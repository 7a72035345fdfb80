"""The disk's rate: what is read is what was written, and nothing stays."""

import errno
import os
from pathlib import Path

import pytest

from vlmrun.memory import disk
from vlmrun.memory.disk import PIECE_BYTES, measure_disk


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MOST_BYTES", 3 * PIECE_BYTES)


def test_a_file_system_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = measure_disk(tmp_path)
    assert found.file_bytes == 3 * PIECE_BYTES
    assert 1e5 < found.bytes_per_s < 1e13
    assert list(tmp_path.iterdir()) == []


def test_without_direct_io_the_page_cache_is_emptied_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, dropped = os.open, []

    def plain_only(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", plain_only)
    monkeypatch.setattr(os, "posix_fadvise", lambda *asked: dropped.append(asked[3]))
    found = measure_disk(tmp_path)
    assert (found.direct, found.file_bytes) == (False, 3 * PIECE_BYTES)
    assert dropped == [os.POSIX_FADV_DONTNEED] * disk.PASSES
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_not_written_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LONGEST_SECONDS", 0.0)
    assert measure_disk(tmp_path).file_bytes == PIECE_BYTES


def test_errors_of_the_folder_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        measure_disk(tmp_path / "nowhere")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        measure_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []
