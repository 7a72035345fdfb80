"""Commands run in process through `cli.main`, with byte streams in place of the terminal's."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from io import TextIOWrapper
from pathlib import Path

import pytest
from commands import Command, Done, Terminal, Watched

import vlmrun as package
from vlmrun.cli import main


@pytest.fixture
def vlmrun(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command line. `terminals` names the streams that say they are one; `watch` is told
    the name of a stream whenever something is written on it."""

    def run(
        *argv: object,
        stdin: bytes = b"",
        terminals: str = "",
        watch: Callable[[str], None] = lambda name: None,
    ) -> Done:
        names = ("stdin", "stdout", "stderr")
        streams = {n: Watched(stdin if n == "stdin" else b"", partial(watch, n)) for n in names}
        with monkeypatch.context() as patch:
            for name, stream in streams.items():
                kind = Terminal if name in terminals.split() else TextIOWrapper
                errors = "strict" if name == "stdout" else "backslashreplace"
                patch.setattr(sys, name, kind(stream, encoding="utf-8", errors=errors))
            code = main([str(word) for word in argv])
            for name in names:
                getattr(sys, name).detach()
        return Done(code, streams["stdout"].getvalue(), streams["stderr"].getvalue().decode())

    return run


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products this small take twice as long on two threads that have to share a core."""
    import torch  # late: the tests that run no model do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pictures() -> Path:
    return Path(package.__file__).parent / "data" / "pictures"
