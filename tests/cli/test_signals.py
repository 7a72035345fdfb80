"""When a signal is taken at once, when it is written down, and when it ends the process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import PROGRAM

from vlmrun.cli.signals import Interrupted, Signals

PICTURE = Path(__file__).parents[2] / "vlmrun/data/pictures/elephant.png"


@pytest.fixture
def heeded() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("heeded")
def test_a_signal_is_taken_at_once_while_nothing_is_at_stake() -> None:
    with Signals(quiet=True) as signals, pytest.raises(Interrupted):
        interrupt()
    assert signals.received == signal.SIGINT


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_signal_is_written_down_while_a_library_starts(
    library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "on_top.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "on_top", raising=False)
    for name in ("numpy", "torch"):
        monkeypatch.setitem(sys.modules, name, sys)
        if name != library:
            monkeypatch.delitem(sys.modules, name)
    with Signals(quiet=False) as signals:
        import on_top  # noqa: F401

        assert signals.received == signal.SIGINT
        assert capfd.readouterr().err == (
            "vlmrun: ending when the model is loaded; interrupt again to stop at once\n"
        )
        with pytest.raises(Interrupted):
            interrupt()


THRICE = """
import os, signal, sys
from vlmrun.cli.signals import Interrupted, Signals
with Signals(quiet=True) as signals:
    signals.computing = True
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except Interrupted:
        print("stopping", flush=True)
        os.kill(os.getpid(), signal.SIGINT)
print("never")
"""
IN_AN_IMPORT = """
import os, signal, sys
from vlmrun.cli.signals import Signals
class Finder:
    def find_spec(self, name, *_):
        if name == "nothing_of_that_name":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
sys.modules["numpy"] = sys
sys.meta_path.insert(0, Finder())
with Signals(quiet=True) as signals:
    signals.give_up = lambda: print("unlocked", flush=True)
    import nothing_of_that_name
"""
BEFORE = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "vlmrun.cli.program":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from vlmrun.cli import run_and_exit
run_and_exit()
"""
AFTER = """
import atexit, os, signal, sys
from vlmrun.cli import run_and_exit
sys.argv[1:] = ["--version"]
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
run_and_exit()
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [(THRICE, "stopping\n"), (IN_AN_IMPORT, "unlocked\n"), (BEFORE, ""), (AFTER, "vlmrun 0.1.0\n")],
)
def test_the_process_ends_as_if_nobody_received_the_signal(code: str, printed: str) -> None:
    restore = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=restore
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, printed, "")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_ends_the_run(signum: int) -> None:
    """In the milliseconds after numpy's C part appears, an exception was lost every time."""
    command = [PROGRAM, "caption", "-m", "demo", PICTURE]
    restore = lambda: [signal.signal(each, signal.SIG_DFL) for each in (2, 15)]  # noqa: E731
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, preexec_fn=restore) as run:
        maps = Path(f"/proc/{run.pid}/maps")
        while run.poll() is None and "_multiarray_umath" not in maps.read_text():
            pass
        run.send_signal(signum)
        out, err = run.communicate()
    assert (run.returncode, out) == (128 + signum, b"")
    assert b"error" not in err
    assert b"0 done, 0 failed, 1 not tried" in err
