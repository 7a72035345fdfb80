"""The lock on an output, and standard output in its odd forms."""

import fcntl
import os
import threading

import pytest
from faults import full_disk

from vlmrun.errors import OutputError
from vlmrun.files.output import OutputLock, StreamSink


@pytest.mark.parametrize("size", [3, 4096])
def test_a_stream_without_a_buffer_takes_rows_in_parts(size):
    """As standard output under PYTHONUNBUFFERED, to a pipe that is not waited for."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    data = bytes(range(256)) * size * 16
    read: list[bytes] = []

    def drain() -> None:
        with os.fdopen(reader, "rb") as file:
            read.append(file.read())

    thread = threading.Thread(target=drain)
    with os.fdopen(writer, "wb", buffering=0) as stream:
        thread.start()
        StreamSink(stream).write(data, finished=True)
    thread.join()
    assert read == [data]


def test_a_full_disk_behind_a_stream_without_a_buffer(tmp_path):
    """It takes the ten bytes that there is room for, and says so only if it is asked again."""
    with full_disk(10), open(tmp_path / "x", "wb", buffering=0) as stream:
        sink = StreamSink(stream)
        sink.write(b"short\n", finished=True)
        with pytest.raises(OutputError, match="standard output cannot be written: File too large"):
            sink.write(b"b" * 200 + b"\n", finished=True)
    assert (tmp_path / "x").stat().st_size == 10


@pytest.mark.parametrize("kind", ["file", "link", "folder", "pipe"])
def test_what_is_called_as_the_lock_stays(tmp_path, kind):
    lock, target = tmp_path / "x.lock", tmp_path / "target"
    target.write_bytes(b"precious")
    make = {
        "file": lambda: lock.write_bytes(b"precious"),
        "link": lambda: lock.symlink_to(target),
        "folder": lock.mkdir,
        "pipe": lambda: os.mkfifo(lock),
    }
    make[kind]()
    before = os.lstat(lock)
    with pytest.raises(OutputError, match=r"x\.lock is in the way") as caught:
        OutputLock(tmp_path / "x")
    assert "move it away" in caught.value.hint
    assert os.path.samestat(os.lstat(lock), before)
    assert target.read_bytes() == b"precious"
    assert kind != "file" or lock.read_bytes() == b"precious"


def test_a_lock_that_another_run_made_anew_stays(tmp_path):
    first = OutputLock(tmp_path / "x")
    (tmp_path / "x.lock").unlink()
    second = OutputLock(tmp_path / "x")
    first.release()
    with pytest.raises(OutputError, match="another run"):
        OutputLock(tmp_path / "x")
    second.release()


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
