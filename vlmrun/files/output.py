"""Where rows go: a stream, or a file that grows row by row; and the lock on an output."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from vlmrun.errors import OutputError


def beside(path: Path, ending: str) -> Path:
    """The file of the same name with one more ending."""
    return path.with_name(path.name + ending)


@contextmanager
def errors_named(output: Path | str) -> Iterator[None]:
    """Turn an error of the file system into OutputError. A closed pipe is left to the caller."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise OutputError(
            f"{output} cannot be written: {error.strerror}",
            "make room, or choose another output" if full else "choose another output",
        ) from error


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data` at an offset of a file; the system may take it in several parts."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


class OutputLock:
    """An exclusive lock: `<output>.lock`, with the holder's process id in it, removed at the end.

    The kernel drops the lock of a process that dies, so a file that is left over locks nothing.
    """

    def __init__(self, output: Path) -> None:
        """Take the lock.

        Raises:
            OutputError: another run holds it, or nothing can be written in this folder.
        """
        self._output = output
        self._path = beside(output, ".lock")
        self._descriptor: int | None = None
        with errors_named(output):
            while self._descriptor is None:
                self._descriptor = self._take()

    def _take(self) -> int | None:
        """A locked descriptor, or None if the last holder removed the file just before."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                os.truncate(descriptor, 0)
                os.write(descriptor, b"%d\n" % os.getpid())
                kept, descriptor = descriptor, -1
                return kept
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
            raise OutputError(
                f"{self._output} is being written by another run (process {holder})",
                "wait for it to end, or choose another output",
            ) from error
        except FileNotFoundError:
            pass
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return None

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        if self._descriptor is not None:
            with suppress(OSError):  # removed by hand, or its folder: nothing is left to do
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None


class StreamSink:
    """Standard output: plain writes, flushed row by row."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: bytes, *, finished: bool) -> None:
        """Write one row. `finished` makes no difference on a stream."""
        with errors_named("standard output"):
            self._stream.write(data)
            self._stream.flush()

    def close(self) -> None:
        """The stream belongs to the caller."""


class FileSink:
    """A file that grows row by row.

    It comes into being with the first finished row: until then an old file of that name stays
    as it is, and rows of failures wait. So a run that fails early loses nothing, and a failure
    never takes the place of an earlier success.
    """

    def __init__(self, path: Path, *, replaces: bool) -> None:
        """`replaces`: there are old results here that only a finished row may end."""
        self._path = path
        self._replaces = replaces
        self._waiting = b""
        self._length = 0
        self._descriptor: int | None = None

    def write(self, data: bytes, *, finished: bool) -> None:
        """Append one row: a `finished` one, or one of a failure.

        Raises:
            OutputError: the disk is full or failing; no half row is left in the file.
        """
        if self._descriptor is None and self._replaces and not finished:
            self._waiting += data
            return
        with errors_named(self._path):
            if self._descriptor is None:
                self._start(self._waiting + data)
            else:
                self._append(self._descriptor, data)

    def _start(self, data: bytes) -> None:
        new = beside(self._path, ".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_at(descriptor, data, 0)
            new.replace(self._path)
        except OSError:
            os.close(descriptor)
            new.unlink()
            raise
        self._descriptor, self._length = descriptor, len(data)

    def _append(self, descriptor: int, data: bytes) -> None:
        try:
            write_at(descriptor, data, self._length)
        except OSError:
            os.truncate(descriptor, self._length)
            raise
        self._length += len(data)

    def close(self) -> None:
        """Close the file; a second call does nothing. Rows that still wait are dropped."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


Sink = StreamSink | FileSink
