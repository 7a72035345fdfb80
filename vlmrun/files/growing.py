"""Files that grow row by row."""

import os
from pathlib import Path

from vlmrun.errors import OutputError
from vlmrun.files.output import beside, create, errors_named, status_of


class GrowingFile:
    """A file that this run made and that grows at its end. Before every write it is looked at:
    rows must not go where nobody will find them."""

    def __init__(self, path: Path, *, like: os.stat_result | None) -> None:
        """Make it. `like`: the file whose mode it gets.

        Raises:
            FileExistsError: something is there already.
        """
        self.path = path
        self.length = 0  # bytes
        self._descriptor = create(path, like=like)

    def write(self, data: bytes, at: int | None = None) -> None:
        """Write at the end, or write over what is there from `at` on.

        Raises:
            OutputError: as `check`; OSError: the disk is full or failing, and what was written
                of `data` is cut off again.
        """
        self.check()
        start = self.length if at is None else at
        rest, offset = memoryview(data), start
        try:
            while rest:
                written = os.pwrite(self._descriptor, rest, offset)
                rest, offset = rest[written:], offset + written
        except OSError:
            os.truncate(self._descriptor, start)
            offset = start
            raise
        finally:
            self.length = offset

    def check(self) -> None:
        """Hold the file to what was made.

        Raises:
            OutputError: somebody deleted, replaced or cut it.
        """
        own = os.fstat(self._descriptor)
        try:
            same = os.path.samestat(own, os.lstat(self.path))
        except FileNotFoundError:
            same = None
        if same and own.st_size >= self.length:
            return
        what = "deleted" if same is None else "cut short" if same else "replaced"
        raise OutputError(
            f"{self.path} was {what} while it was being written",
            "leave the files of a run alone until it ends, and run it again",
        )

    def move(self, path: Path) -> None:
        """Take the place of the file there."""
        self.path.replace(path)
        self.path = path

    def close(self) -> None:
        os.close(self._descriptor)


class FileSink:
    """A file that grows row by row.

    It comes into being with the first finished row: until then an old file of that name stays
    as it is, and rows of failures wait. So a run that fails early loses nothing, and a failure
    never takes the place of an earlier success.
    """

    def __init__(self, path: Path, *, replaces: bool, like: os.stat_result | None = None) -> None:
        """`replaces`: there are old results here that only a finished row may end. `like`: the
        file whose mode it gets, if not theirs."""
        self._path = path
        self._replaces = replaces
        self._like = like
        self._waiting = b""
        self._file: GrowingFile | None = None

    def write(self, data: bytes, *, finished: bool) -> None:
        """Append one row: a `finished` one, or one of a failure.

        Raises:
            OutputError: the disk is full or failing; no half row is left in the file. Or the
                file is not the one that was made.
        """
        if self._file is None and self._replaces and not finished:
            self._waiting += data
            return
        with errors_named(self._path):
            if self._file is None:
                self._file = self._start(self._waiting + data)
            else:
                self._file.write(data)

    def _start(self, data: bytes) -> GrowingFile:
        new = beside(self._path, ".new") if self._replaces else self._path
        like = status_of(self._path) if self._replaces else self._like
        file = GrowingFile(new, like=like)
        try:
            file.write(data)
            file.move(self._path)
        except BaseException:
            file.close()
            new.unlink(missing_ok=True)
            raise
        return file

    def close(self) -> None:
        """Close the file; a second call does nothing. Rows that still wait are dropped.

        Raises:
            OutputError: it is not the one that was made.
        """
        file, self._file = self._file, None
        if file is not None:
            try:
                file.check()
            finally:
                file.close()
