"""Standard error: notes, errors and the progress bar. Standard output: results but for rows."""

import os
import sys
from contextlib import suppress
from io import TextIOBase
from typing import TYPE_CHECKING, Self, TextIO, cast

from vlmrun.cli.options import TalkFlags
from vlmrun.errors import OutputError
from vlmrun.files.output import write_all
from vlmrun.files.rows import readable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

WIDTH = 100  # of tables where there is no terminal
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    ord("\t"): "\\t",
    ord("\n"): "\\n",
    ord("\r"): "\\r",
}


def say(text: str) -> None:
    """Write a line on standard error."""
    write(line(text))


def line(text: str) -> str:
    """One line of standard error; names of files must neither break it nor drive a terminal."""
    return f"vlmrun: {readable(text).translate(CONTROLS)}\n"


def write(text: str) -> None:
    """Write on standard error as it is; that nobody reads there must not end a run."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


class Forgiving(TextIOBase):
    """A stream that may break without an error: rich's own answer is to end the process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def make_console(stream: TextIO, *, no_color: bool) -> "Console":
    """A rich console that colours terminals only, and is as wide as one."""
    from rich.console import Console  # late: 50 ms that --help and errors need not pay

    terminal = stream.isatty()
    plain = no_color or "NO_COLOR" in os.environ or not terminal
    return Console(
        file=cast("TextIO", Forgiving(stream)),
        width=None if terminal else WIDTH,
        force_terminal=terminal,
        no_color=plain,
        color_system=None if plain else "auto",
        markup=False,
        highlight=False,
    )


def show_result(renderable: "RenderableType", *, no_color: bool) -> None:
    """Write tables on standard output, as the result of a command.

    Raises:
        OutputError: standard output is closed, or cannot be written.
    """
    console = make_console(results(), no_color=no_color)
    with console.capture() as capture:
        console.print(renderable, crop=False)
    lines = readable(capture.get()).splitlines()
    text = "\n".join([*(line.rstrip() for line in lines), ""])
    write_result(text.encode(results().encoding, "backslashreplace"))


def write_result(data: bytes) -> None:
    """Write on standard output.

    Raises:
        OutputError: it is closed, or cannot be written.
    """
    write_all(results().buffer, data)


def results() -> TextIO:
    """Standard output.

    Raises:
        OutputError: it is closed.
    """
    if sys.stdout is None:
        raise OutputError("standard output is closed", "send it to a file or a terminal")
    return sys.stdout


class Screen:
    """What a run shows while it lasts. The bar is drawn on a terminal only, and not where the
    results appear on a terminal themselves."""

    def __init__(self, talk: TalkFlags, *, results_shown: bool, silent: bool = False) -> None:
        self.silent = silent  # another process says it all
        self._talk = talk
        terminal = sys.stderr is not None and sys.stderr.isatty() and not silent
        self.progress_wanted = terminal and not talk.quiet and not talk.no_progress
        self._bar_wanted = self.progress_wanted and not results_shown
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def error(self, text: str) -> None:
        """A line that -q does not silence."""
        if self.silent:
            return
        if self._bar is None:
            say(text)
        else:
            self._bar.console.print(line(text), soft_wrap=True, end="")

    def note(self, text: str) -> None:
        if not self._talk.quiet:
            self.error(text)

    def explain(self, text: str) -> None:
        """A line that only -v asks for."""
        if self._talk.verbose and not self._talk.quiet:
            self.error(text)

    def loading(self, model: str) -> None:
        """Tell a person at a terminal what the wait is for."""
        if self.progress_wanted:
            say(f"loading {model}")

    def advance(self, finished: int, total: int, seconds: float) -> None:
        """Draw how far the run is."""
        if not self._bar_wanted:
            return
        if self._bar is None:
            self._bar = self._make_bar(total)
        rate = f"{finished / seconds:.3g}/s" if finished and seconds else ""
        self._bar.update(self._bar.task_ids[0], completed=finished, rate=rate)

    def _make_bar(self, total: int) -> "Progress":
        from rich import progress  # late: as in make_console

        console = make_console(sys.stderr, no_color=self._talk.no_color)
        columns = (
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TextColumn("ETA"),
            progress.TimeRemainingColumn(),
        )
        bar = progress.Progress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        bar.add_task("", total=total, rate="")
        bar.start()
        return bar

    def show(self, renderable: "RenderableType") -> None:
        """Print a table."""
        if sys.stderr is not None:
            console = make_console(sys.stderr, no_color=self._talk.no_color)
            console.print(renderable, crop=False)
