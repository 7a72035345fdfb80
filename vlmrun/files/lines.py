"""Writers of one line per row: text and JSON Lines, on a stream or in a file."""

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from vlmrun.files.growing import FileSink
from vlmrun.files.output import OutputLock, StreamSink
from vlmrun.files.rows import Caption, Failure, Row, fold, to_json

# What would break the columns of a line, in a path.
ESCAPES = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})


class Writer(ABC):
    """Writes rows in the order given; a context manager that closes itself.

    Every row is in its file when `write` returns. `commit` ends the output and says so by not
    raising; leaving without it (an interruption) ends the output all the same, with the rows
    there are.
    """

    def __init__(self, locks: Sequence[OutputLock]) -> None:
        self._locks = locks
        self._finished = False

    @abstractmethod
    def write(self, row: Row) -> None:
        """Write what one input came to.

        Raises:
            OutputError: the output cannot be written, or cannot hold this row.
            BrokenPipeError: nobody reads standard output any more.
        """

    @abstractmethod
    def _finish(self) -> None:
        """Close files and put final ones in their place.

        Raises:
            OutputError: as `commit`.
        """

    def commit(self) -> None:
        """End the output: arrays are built and renamed.

        Raises:
            OutputError: they cannot be written, and the rows are kept beside the output; or a
                file was deleted or replaced during the run.
        """
        if not self._finished:
            self._finished = True
            self._finish()

    def close(self) -> None:
        """Keep every finished row and release the locks; a second call does nothing."""
        try:
            self.commit()
        finally:
            self.release()

    def release(self) -> None:
        """Give the locks up and leave everything else as it is."""
        for lock in self._locks:
            lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class TextForm:
    """A caption as a line: `[path TAB] [prompt name TAB] caption`.

    Paths are their own bytes, with tabs and line breaks in them as `\\t`, `\\n`, `\\r`; the rest
    is UTF-8. `folded`: the caption is on one line. A failure has no line.
    """

    path: bool
    name: bool
    folded: bool

    def __call__(self, row: Row) -> bytes | None:
        if isinstance(row, Failure):
            return None
        assert isinstance(row, Caption), "open_writer lets vectors have no text form"
        columns = [os.fsencode(row.path.translate(ESCAPES))] if self.path else []
        if self.name:
            columns.append(_text(fold(row.prompt_name or row.prompt)))
        columns.append(_text(fold(row.caption) if self.folded else row.caption))
        return b"\t".join(columns) + b"\n"


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class JsonForm:
    """Any row as one JSON object on a line. `folded`: its caption has no line breaks."""

    folded: bool

    def __call__(self, row: Row) -> bytes:
        if self.folded and isinstance(row, Caption):
            row = dataclasses.replace(row, caption=fold(row.caption))
        return to_json(row.row())


class LineWriter(Writer):
    """One line per row, in the given form, appended and flushed row by row."""

    def __init__(
        self,
        sink: StreamSink | FileSink,
        form: Callable[[Row], bytes | None],
        locks: Sequence[OutputLock] = (),
    ) -> None:
        super().__init__(locks)
        self._sink = sink
        self._form = form

    def write(self, row: Row) -> None:
        line = self._form(row)
        if line is not None:
            self._sink.write(line, finished=not isinstance(row, Failure))

    def _finish(self) -> None:
        self._sink.close()
