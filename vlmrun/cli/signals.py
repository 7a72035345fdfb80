"""Interruptions: while rows are computed, the first one lets the batch in flight end.

A signal is either taken at once, by an exception, or written down until the run looks for it.
The exception must not be raised while numpy or torch is imported: their start-up in C swallows
it, or takes it for a library that is missing.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BATCH = b"vlmrun: ending after the batch in flight; interrupt again to stop at once\n"
LOADING = b"vlmrun: ending when the model is loaded; interrupt again to stop at once\n"
IMPORTING = "<frozen importlib._bootstrap>"  # the file of every import's frames


class Interrupted(KeyboardInterrupt):
    """A signal that stops the run at once."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def end_quietly_on_signals() -> None:
    """Have signals end this process without Python's traceback wherever a run does not receive
    them: before it and after it, nothing is at stake."""
    for signum in SIGNALS:
        if signal.getsignal(signum) not in (signal.SIG_IGN, None):
            signal.signal(signum, signal.SIG_DFL)


class Signals:
    """Receives signals for the time of a run; signals that are ignored (nohup) stay so.

    `received` is the first signal, after which the run should end. `computing` is set while
    rows are computed, and the first signal is only written down. Another one stops the run by
    an exception, and one more, or one while the exception would be swallowed, ends the process
    as if it had not been received, but for a call of `give_up`. Outside the main thread, where
    Python lets nobody receive signals, nothing is.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.received: int | None = None
        self.computing = False
        self.give_up: Callable[[], None] = lambda: None
        self._quiet = quiet
        self._stopping = False
        self._before: dict[int, Callable[..., Any] | int] = {}

    def __enter__(self) -> Self:
        import threading  # late: this module is loaded before it can receive anything

        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                before = signal.getsignal(signum)
                if before is not None and before != signal.SIG_IGN:
                    self._before[signum] = before
                    signal.signal(signum, self._receive)
        return self

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        again, fragile = self.received is not None, importing(frame)
        self.received = self.received or signum
        if self._stopping or (again and fragile):
            with suppress(OSError):
                self.give_up()
            end_process(signum)
        elif again or not (self.computing or fragile):
            self._stopping = True
            raise Interrupted(signum)
        elif not self._quiet:
            with suppress(OSError):  # sys.stderr must not be entered twice
                os.write(2, BATCH if self.computing else LOADING)

    def __exit__(self, *_: object) -> None:
        for signum, before in self._before.items():
            signal.signal(signum, before)


def importing(frame: FrameType | None) -> bool:
    """Whether an import is under way that may be numpy's or torch's, or is on top of them."""
    if not {"numpy", "torch"} & sys.modules.keys():
        return False
    while frame is not None and frame.f_code.co_filename != IMPORTING:
        frame = frame.f_back
    return frame is not None


def end_process(signum: int) -> None:
    """Let a signal do what it does to programs that do not receive it."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
