"""Interruptions: while rows are computed, the first one lets the batch in flight end."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICE = b"vlmrun: ending after the batch in flight; interrupt again to stop at once\n"


class Interrupted(KeyboardInterrupt):
    """A signal that stops the run at once."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


class Signals:
    """Receives signals for the time of a run; signals that are ignored (nohup) stay so.

    `received` is the signal after which the run should end. Outside the main thread, where
    Python lets nobody receive signals, it does nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.received: int | None = None
        self.computing = False
        self._quiet = quiet
        self._before: dict[int, Callable[..., Any] | int] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                before = signal.getsignal(signum)
                if before is not None and before != signal.SIG_IGN:
                    self._before[signum] = before
                    signal.signal(signum, self._receive)
        return self

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if not self.computing or self.received is not None:
            raise Interrupted(signum)
        self.received = signum
        if not self._quiet:
            with suppress(OSError):  # sys.stderr must not be entered twice
                os.write(2, NOTICE)

    def __exit__(self, *_: object) -> None:
        for signum, before in self._before.items():
            signal.signal(signum, before)
