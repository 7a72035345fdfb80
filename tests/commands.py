"""Command lines run in this process, and what they must say."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from vlmrun.cli import main

PROGRAM = shutil.which("vlmrun", path=Path(sys.executable).parent) or "vlmrun"


class Terminal(TextIOWrapper):
    def isatty(self) -> bool:
        return True


class Watched(BytesIO):
    """Bytes that tell someone whenever they grow."""

    def __init__(self, start: bytes, tell: Callable[[], None]) -> None:
        super().__init__(start)
        self._tell = tell

    def write(self, data: Any) -> int:
        count = super().write(data)
        self._tell()
        return count


@dataclass(frozen=True, slots=True)
class Done:
    """What a command line came to: its exit code and what it wrote."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Standard output as JSON Lines."""
        return [json.loads(line) for line in self.out.splitlines()]


Command = Callable[..., Done]


def runner(monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[bytes]) -> Command:
    """A function that runs a command line with byte streams in place of the terminal's.

    `terminals` names the streams that say they are one; `watch` is told the name of a stream
    whenever something is written on it. File descriptors are captured, so that what other
    people's libraries write is seen, too.
    """

    def run(
        *argv: object,
        stdin: bytes = b"",
        terminals: str = "",
        watch: Callable[[str], None] = lambda name: None,
    ) -> Done:
        names = ("stdin", "stdout", "stderr")
        streams = {n: Watched(stdin if n == "stdin" else b"", partial(watch, n)) for n in names}
        capture.readouterr()
        with monkeypatch.context() as patch:
            for name, stream in streams.items():
                kind = Terminal if name in terminals.split() else TextIOWrapper
                errors = "strict" if name == "stdout" else "backslashreplace"
                patch.setattr(sys, name, kind(stream, encoding="utf-8", errors=errors))
            code = main([str(word) for word in argv])
            for name in names:
                getattr(sys, name).detach()
        out, err = capture.readouterr()
        err = streams["stderr"].getvalue() + err
        return Done(code, streams["stdout"].getvalue() + out, err.decode())

    return run


def assert_refused(done: Done, *words: str, hint: str = "", code: int = 1) -> None:
    """Nothing on stdout, one line that says what is wrong and one of what to do about it."""
    lines = done.err.splitlines()
    assert (done.code, done.out, len(lines)) == (code, b"", 2), done
    assert lines[0].startswith("vlmrun: error: ")
    assert lines[1].startswith("vlmrun: hint: ")
    assert [word for word in words if word not in lines[0]] == [], lines[0]
    assert hint in lines[1]


def result(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what differs between two runs of one model: its name, place and time."""
    return {key: row[key] for key in row if key not in ("model", "revision", "ms")}
