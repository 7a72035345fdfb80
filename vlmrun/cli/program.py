"""One command line from its words to its exit code: the one place that catches and prints."""

import contextlib
import os
import signal
import sys
import traceback
from functools import lru_cache
from typing import Annotated, Any, NoReturn

import typer

from vlmrun import __version__
from vlmrun.cli.caption import caption
from vlmrun.cli.command import Command
from vlmrun.cli.doctor import doctor
from vlmrun.cli.embed import embed
from vlmrun.cli.mem_plan import mem_plan
from vlmrun.cli.models import models
from vlmrun.cli.processes import let_others_tell
from vlmrun.cli.screen import say
from vlmrun.cli.signals import Interrupted
from vlmrun.errors import UsageError, VlmrunError
from vlmrun.files.output import errors_named

# what a value should be, by pydantic's name of the error
WANTED = {
    "greater_than_equal": "{ge:.20g} or more",
    "less_than_equal": "{le} or less",
    "int_parsing": "a whole number",
    "int_parsing_size": "a number of a length that can be read",
    "float_parsing": "a number",
}
COMPLETION = "_VLMRUN_COMPLETE"  # set by the shell that asks for completions


def run_arguments(arguments: list[str]) -> int:
    """Run a command line and return its exit code; every error has been printed."""
    verbose = 0
    try:
        with errors_named("standard output"):  # of help texts and completions
            command = parse(arguments)
        if isinstance(command, int):
            flush_results()
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
        whose = let_others_tell(arguments, error)
        return tell(whose + error.message, error.hint, error.exit_code, verbose)
    except Exception as error:
        message, hint = what_happened(error)
        return tell(let_others_tell(arguments, error) + message, hint, 1, verbose)


def flush_and_exit(code: int) -> NoReturn:
    """End the process; that nobody reads what is left to be written is no error any more."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # Python would try again when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def what_happened(error: Exception) -> tuple[str, str]:
    """The message and hint of an error that is not ours.

    Libraries read settings from the environment while they are imported, and some of them raise
    at a value they do not know.
    """
    words = f"{type(error).__name__}: {error}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(f.f_globals.get("__name__")) for f in frames if f.f_code.co_name == "<module>"]
    library = names[-1].partition(".")[0] if names else "vlmrun"
    if library != "vlmrun":
        hint = "look at what the environment sets for it, or install it again"
        return f"{library} cannot be imported: {words}", hint
    return f"internal: {words}", "-vv shows the traceback; please report it"


def parse(arguments: list[str]) -> Command | int:
    """Read a command line; an exit code where there is nothing more to do.

    Raises:
        UsageError: it is none.
    """
    parser = make_parser()
    if not arguments and COMPLETION not in os.environ:
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(OSError):
            parser.main(["--help"], prog_name="vlmrun", standalone_mode=False)
        return 2
    try:
        found = parser.main(arguments, prog_name="vlmrun", standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        name = "vlmrun" if context is None else context.command_path
        lists = "commands" if context is None or context.parent is None else "flags"
        hint = f"{name} --help lists the {lists}"
        raise UsageError(explained(error).rstrip("."), hint) from error
    except SystemExit as error:  # shell completion, or the reader of the help text is gone
        gone = isinstance(error.__context__, BrokenPipeError)
        return 0 if gone else int(error.code or 0)
    assert isinstance(found, Command | int)
    return found


def explained(error: Any) -> str:
    """What typer says of a command line; the start of a flag is taken for that flag, and of a
    flag's value it is said in the words of our own checks."""
    if hasattr(error.__cause__, "errors"):  # pydantic's
        (found, *_) = error.__cause__.errors()
        flag, value, bounds = max(error.param.opts, key=len), found["input"], found.get("ctx", {})
        wanted = WANTED.get(found["type"])
        if wanted is None:
            return f"{flag}: {bounds.get('error', found['msg'])}"
        return f"{flag} {value}: not {wanted.format(**bounds)}"
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
    app.command()(doctor)
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
