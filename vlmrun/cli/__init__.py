"""The command line: flags become a job. Light to import, so that signals find it ready early."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from vlmrun.cli.signals import end_quietly_on_signals


def run_and_exit() -> NoReturn:
    """The entry point of the installed command."""
    end_quietly_on_signals()
    from vlmrun.cli.program import flush_and_exit  # late: as in `main`

    flush_and_exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; every error has been printed."""
    from vlmrun.cli.program import run_arguments  # late: 100 ms of imports, see `run_and_exit`

    return run_arguments(list(sys.argv[1:] if argv is None else argv))
