"""Command lines run in process by tests that belong to no single room, and what they must say."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from vlmrun.cli import main


@dataclass(frozen=True, slots=True)
class Told:
    """What a command line came to: its exit code and what it wrote."""

    code: int
    out: bytes
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Standard output as JSON Lines."""
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Told]


def runner(capture: pytest.CaptureFixture[bytes]) -> Run:
    """A function that runs a command line; file descriptors are captured, so that what other
    people's libraries write is seen, too."""

    def run(*argv: object) -> Told:
        capture.readouterr()
        code = main([str(word) for word in argv])
        out, err = capture.readouterr()
        return Told(code, out, err.decode())

    return run


def assert_refused(told: Told, *words: str, hint: str = "", code: int = 1) -> None:
    """Nothing on stdout, one line that says what is wrong and one of what to do about it."""
    lines = told.err.splitlines()
    assert (told.code, told.out, len(lines)) == (code, b"", 2), told
    assert lines[0].startswith("vlmrun: error: ")
    assert lines[1].startswith("vlmrun: hint: ")
    assert [word for word in words if word not in lines[0]] == [], lines[0]
    assert hint in lines[1]


def result(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what differs between two runs of one model: its name, place and time."""
    return {key: row[key] for key in row if key not in ("model", "revision", "ms")}
