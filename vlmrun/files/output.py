"""Where rows go: a stream, or a file (`growing.py`); and the lock on an output.

No file is touched that a run did not make itself, but for the results it was told to replace.
"""

import errno
import fcntl
import os
import re
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from vlmrun.errors import OutputError

LOCK_TEXT = re.compile(rb"(\d+\n)?")  # what is in a lock of ours; empty: killed before it wrote


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


def in_the_way(path: Path, output: Path) -> OutputError:
    return OutputError(
        f"{path} is in the way: vlmrun needs this name while it writes {output.name}",
        "it may hold the rows of a run that was killed, and --exists overwrite leaves it, too: "
        "move it away, or choose another output",
    )


def status_of(path: Path) -> os.stat_result | None:
    """What lies under a name, links followed; None: nothing."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def create(path: Path, *, like: os.stat_result | None) -> int:
    """Open a new file for writing, with the mode of the file whose place it will take.

    Raises:
        FileExistsError: something is there already, be it a link to nowhere.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666 if like is None else 0o600)
    if like is not None:
        with suppress(OSError):  # a file system without modes
            os.fchmod(descriptor, stat.S_IMODE(like.st_mode))
    return descriptor


def write_all(stream: BinaryIO, data: bytes) -> None:
    """Write all of `data` and flush it. Past the stream's own buffer: without one, as under
    PYTHONUNBUFFERED, a write may take a part of the data only, and none of it where the other
    end of a pipe is not waited for.

    Raises:
        OutputError: it cannot be written; BrokenPipeError: nobody reads it any more.
    """
    raw = getattr(stream, "raw", stream)
    rest = memoryview(data)
    with errors_named("standard output"):
        while rest:
            written = raw.write(rest)
            if written is None:
                select.select([], [raw], [])
            rest = rest[written or 0 :]
        stream.flush()


class OutputLock:
    """An exclusive lock: `<output>.lock`, with the holder's process id in it, removed at the end.

    The kernel drops the lock of a process that dies, so a file that is left over locks nothing.
    """

    def __init__(self, output: Path) -> None:
        """Take the lock.

        Raises:
            OutputError: another run holds it, something else bears its name, or nothing can be
                written in this folder.
        """
        self._output = output
        self._path = beside(output, ".lock")
        self._descriptor: int | None = None
        with errors_named(output):
            while self._descriptor is None:
                self._descriptor = self._take()

    def _take(self) -> int | None:
        """A locked descriptor, or None if the last holder removed the file just before."""
        descriptor = self._open()
        try:
            text = self._text(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                os.truncate(descriptor, 0)
                os.write(descriptor, b"%d\n" % os.getpid())
                kept, descriptor = descriptor, -1
                return kept
        except BlockingIOError as error:
            raise OutputError(
                f"{self._output} is being written by another run (process {text or 'unknown'})",
                "wait for it to end, or choose another output",
            ) from error
        except FileNotFoundError:
            pass
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return None

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return os.open(self._path, flags, 0o644)
        except OSError as error:
            if os.path.islink(self._path) or os.path.isdir(self._path):
                raise in_the_way(self._path, self._output) from error
            raise

    def _text(self, descriptor: int) -> str:
        """What the file says, which is ours if that is a process id or nothing."""
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        found = os.pread(descriptor, 32, 0) if regular else b"?"
        if not LOCK_TEXT.fullmatch(found):
            raise in_the_way(self._path, self._output)
        return found.decode().strip()

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        if self._descriptor is not None:
            with suppress(OSError):  # removed by hand, or its folder: nothing is left to do
                if os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
                    self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None


class StreamSink:
    """Standard output: plain writes, flushed row by row."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: bytes, *, finished: bool) -> None:
        """Write one row. `finished` makes no difference on a stream."""
        write_all(self._stream, data)

    def close(self) -> None:
        """The stream belongs to the caller."""
