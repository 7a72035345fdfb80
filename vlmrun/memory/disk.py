"""How fast a file system is read from, measured with a temporary file of its own."""

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 4 << 20
MOST_BYTES = 256 << 20
LONGEST_SECONDS = 1.0  # of writing, and of reading once
PASSES = 2


@dataclass(frozen=True, slots=True)
class DiskRate:
    """What was read per second; `direct`: past the page cache."""

    bytes_per_s: float
    file_bytes: int
    direct: bool


def measure_disk(folder: Path) -> DiskRate:
    """Write a file as large as a second allows, read it from start to end, twice, and take the
    faster pass. Nothing of it stays, however this process ends.

    Raises:
        OSError: the folder cannot be written, or is full.
    """
    try:
        return measured(folder, direct=True)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return measured(folder, direct=False)


def measured(folder: Path, *, direct: bool) -> DiskRate:
    """As above, by direct I/O, or by what the page cache is asked to give back before."""
    flags = os.O_DIRECT if direct else os.O_DSYNC
    with unnamed_file(folder, flags) as file, mmap.mmap(-1, PIECE_BYTES) as piece:
        piece.write(os.urandom(PIECE_BYTES))  # a mapping begins at a page, as direct I/O wants
        written, _ = moved(lambda at: os.pwritev(file, [piece], at), MOST_BYTES)
        best = 0.0
        for _ in range(PASSES):
            if not direct:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            nbytes, seconds = moved(lambda at: os.preadv(file, [piece], at), written)
            best = max(best, nbytes / seconds)
    return DiskRate(best, written, direct)


@contextmanager
def unnamed_file(folder: Path, flags: int) -> Iterator[int]:
    """An open file in a folder that no longer shows it: it goes when it is closed."""
    made, path = tempfile.mkstemp(prefix=".vlmrun-", dir=folder)
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags)
    finally:
        os.close(made)
        os.unlink(path)
    try:
        yield file
    finally:
        os.close(file)


def moved(move: Callable[[int], int], most: int) -> tuple[int, float]:
    """Move piece after piece until there are `most` bytes or it takes too long; gives how many
    were moved, in how many seconds."""
    done, start = 0, time.perf_counter()
    while True:
        done += move(done)
        seconds = time.perf_counter() - start
        if done >= most or seconds > LONGEST_SECONDS:
            return done, seconds
