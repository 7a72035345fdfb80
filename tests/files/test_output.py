import fcntl
import os

import pytest
from faults import full_disk

from vlmrun.errors import OutputError
from vlmrun.files.output import FileSink, OutputLock


def test_full_disk_leaves_no_half_row(tmp_path):
    with full_disk(100):
        sink = FileSink(tmp_path / "x", replaces=False)
        sink.write(b"a" * 59 + b"\n", finished=True)
        for _ in range(2):
            with pytest.raises(OutputError, match="x cannot be written: File too large"):
                sink.write(b"b" * 59 + b"\n", finished=True)
        sink.write(b"c" * 19 + b"\n", finished=True)
        sink.close()
    assert (tmp_path / "x").read_bytes() == b"a" * 59 + b"\n" + b"c" * 19 + b"\n"


def test_full_disk_at_the_first_row_keeps_the_old_file(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    sink = FileSink(tmp_path / "x", replaces=True)
    with full_disk(100), pytest.raises(OutputError, match="File too large"):
        sink.write(b"b" * 200, finished=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"
    sink.write(b"short", finished=True)
    sink.close()
    assert (tmp_path / "x").read_bytes() == b"short"


def test_file_left_by_a_killed_run_is_no_obstacle(tmp_path):
    (tmp_path / "x.new").write_bytes(b"half a row that is longer")
    sink = FileSink(tmp_path / "x", replaces=False)
    sink.write(b"row\n", finished=True)
    sink.close()
    assert (tmp_path / "x").read_bytes() == b"row\n"
    assert not (tmp_path / "x.new").exists()


def test_lock_names_an_unknown_holder(tmp_path):
    lock = OutputLock(tmp_path / "x")
    os.truncate(tmp_path / "x.lock", 0)
    with pytest.raises(OutputError, match=r"\(process unknown\)"):
        OutputLock(tmp_path / "x")
    lock.release()


def test_lock_may_be_removed_by_hand(tmp_path):
    lock = OutputLock(tmp_path / "x")
    (tmp_path / "x.lock").unlink()
    lock.release()
    lock.release()


@pytest.mark.parametrize("replaced", [True, False])
def test_lock_is_on_the_file_that_others_find(tmp_path, monkeypatch, replaced):
    """The last holder removes the file after it was opened here and before it is locked.

    `replaced`: and the next holder has made its own by then.
    """
    path, flock = tmp_path / "x.lock", fcntl.flock
    others: list[OutputLock] = []

    def overtaken(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        if replaced:
            others.append(OutputLock(tmp_path / "x"))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    if replaced:
        with pytest.raises(OutputError, match="another run"):
            OutputLock(tmp_path / "x")
        others[0].release()
    else:
        lock = OutputLock(tmp_path / "x")
        with pytest.raises(OutputError, match="another run"):
            OutputLock(tmp_path / "x")
        lock.release()
    assert list(tmp_path.iterdir()) == []
