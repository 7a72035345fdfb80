"""The command line: flags become a job. The one place that catches errors, prints and exits."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, NoReturn

import typer

from vlmrun import __version__
from vlmrun.cli.caption import caption
from vlmrun.cli.command import Command
from vlmrun.cli.embed import embed
from vlmrun.cli.mem_plan import mem_plan
from vlmrun.cli.models import models
from vlmrun.cli.processes import told_by_the_first
from vlmrun.cli.screen import say
from vlmrun.cli.signals import Interrupted
from vlmrun.errors import UsageError, VlmrunError
from vlmrun.files.output import errors_named

COMPLETION = "_VLMRUN_COMPLETE"  # set by the shell that asks for completions


def run_and_exit() -> NoReturn:
    """The entry point of the installed command."""
    code = main()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:  # nobody reads any more: nothing is left to be written when Python ends
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; every error has been printed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbose = 0
    try:
        command = parse(arguments)
        if isinstance(command, int):
            return command
        verbose = command.talk.verbose
        code = command.start()
        flush_results()
        return code
    except KeyboardInterrupt as error:
        say("interrupted")
        return 128 + (error.signum if isinstance(error, Interrupted) else signal.SIGINT)
    except BrokenPipeError:  # whoever reads the results has enough of them
        return 0
    except VlmrunError as error:
        if isinstance(error, UsageError) and told_by_the_first(arguments):
            return error.exit_code
        return tell(error.message, error.hint, error.exit_code, verbose)
    except Exception as error:
        hint = "-vv shows the traceback; please report it"
        return tell(f"internal: {type(error).__name__}: {error}", hint, 1, verbose)


def parse(arguments: list[str]) -> Command | int:
    """Read a command line; an exit code where there is nothing more to do."""
    parser = make_parser()
    if not arguments and COMPLETION not in os.environ:
        with contextlib.redirect_stdout(sys.stderr):
            parser.main(["--help"], prog_name="vlmrun", standalone_mode=False)
        return 2
    try:
        found = parser.main(arguments, prog_name="vlmrun", standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        name = "vlmrun" if context is None else context.command_path
        lists = "commands" if context is None or context.parent is None else "flags"
        words = explained(error).replace("Value error, ", "").rstrip(".")
        return tell(words, f"{name} --help lists the {lists}", 2, 0)
    except SystemExit as error:  # shell completion, or the reader of the help text is gone
        gone = isinstance(error.__context__, BrokenPipeError)
        return 0 if gone else int(error.code or 0)
    assert isinstance(found, Command | int)
    return found


def explained(error: Any) -> str:
    """What typer says of a command line; the start of a flag is taken for that flag."""
    if hasattr(error, "possibilities"):
        known = [name for param in error.ctx.command.params for name in param.opts]
        begun = [name for name in known if name.startswith(error.option_name)]
        error.possibilities = begun or error.possibilities
    return str(error.format_message())


@lru_cache(maxsize=1)
def make_parser() -> Any:
    app = typer.Typer(name="vlmrun", context_settings={"help_option_names": ["-h", "--help"]})
    app.callback()(root)
    app.command()(caption)
    app.command()(embed)
    app.command(name="mem-plan")(mem_plan)
    app.command()(models)
    parser = typer.main.get_command(app)
    hide_types(parser)
    return parser


def hide_types(parser: Any) -> None:
    """Leave Python's names of types out of the help: INPUT and the bare flags need none."""
    above = typer.Context(parser, **parser.context_settings)
    for command in (parser, *parser.commands.values()):
        for param in command.get_params(typer.Context(command, parent=above)):
            if param.param_type_name == "argument" or param.is_flag:
                param.display_type_rich = lambda ctx: None


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vlmrun {__version__}")
        raise typer.Exit()


def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
    ] = False,
) -> None:
    """Run SigLIP and LLaVA from a shell, in the memory you have."""


def flush_results() -> None:
    """Push out what is buffered while errors can still be told.

    Raises:
        OutputError: standard output cannot be written.
    """
    if sys.stdout is not None:
        with errors_named("standard output"):
            sys.stdout.flush()


def tell(message: str, hint: str, code: int, verbose: int) -> int:
    """Say what went wrong in one line and what to do in another; `code` is handed through."""
    if verbose > 1:
        traceback.print_exc()
    say(f"error: {' '.join(message.split())}")
    if hint:
        say(f"hint: {' '.join(hint.split())}")
    return code
