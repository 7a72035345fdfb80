"""Drive a run from the command line: follow its summaries, show them, choose the exit code."""

import io
import os
import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vlmrun.cli.options import OutputFlags, PictureFlags, TalkFlags
from vlmrun.cli.processes import follows_another
from vlmrun.cli.screen import Screen, say
from vlmrun.cli.signals import Signals
from vlmrun.cli.statistics import show_statistics
from vlmrun.errors import OutputError, UsageError
from vlmrun.files.arrays import ARRAYS
from vlmrun.files.inputs import Inputs, find_inputs
from vlmrun.files.lines import LineWriter
from vlmrun.files.output import StreamSink
from vlmrun.files.writers import Writer, choose_format, open_writer
from vlmrun.job import Job

if TYPE_CHECKING:
    from vlmrun.memory.plan import Plan
    from vlmrun.run import Summary


def read_inputs(flags: PictureFlags, *, stdin_is_list: bool, tp: bool) -> Inputs:
    """The pictures of a command line; `stdin_is_list`: without any, paths come from stdin, which
    several processes (`tp`) cannot share.

    Raises:
        UsageError: there are none and stdin is a terminal, or what is named does not exist.
    """
    stdin: BinaryIO | None = None if sys.stdin is None or tp else sys.stdin.buffer
    named = flags.inputs or flags.files_from is not None
    if not named and (stdin is None or not stdin_is_list or sys.stdin.isatty()):
        stdin = None
        if stdin_is_list:
            raise UsageError("no INPUT", "name files or folders, or pipe a list of paths in")
    return find_inputs(
        flags.inputs,
        recursive=flags.recursive,
        files_from=flags.files_from,
        null_separated=flags.null_separated,
        stdin=stdin,
    )


def run_inputs(
    job: Job,
    inputs: Inputs,
    *,
    flags: OutputFlags,
    talk: TalkFlags,
    command: str,
    filenames: bool | None = None,
    one_line: bool = False,
) -> int:
    """Open the output of a job, add the pictures to it, and run it.

    Raises:
        UsageError, OutputError: as `open_writer`; or standard output is closed.
    """
    check_working_directory()
    silent = follows_another(tp=job.placing.tp)
    nothing = not inputs.images and not job.texts
    notes = inputs.notes or (("nothing to do",) if nothing else ())
    for note in notes if not talk.quiet and not silent else ():
        say(note)
    if nothing:
        return 0
    if sys.stdout is None and flags.output is None:
        raise OutputError("standard output is closed", "name a file with -o")
    job = replace(
        job,
        images=tuple(image.path for image in inputs.images),
        one_array=choose_format(output_of(flags), flags.chosen_format(), task=job.task) in ARRAYS,
        stdin_image=next((i.data for i in inputs.images if i.data is not None), None),
    )
    screen = Screen(talk, results_shown=shown_on_terminal(flags), silent=silent)
    with Signals(quiet=talk.quiet or silent) as signals:
        writer: Writer = LineWriter(StreamSink(io.BytesIO()), lambda row: None)
        if not silent:
            writer = open_output(
                job, flags, single=inputs.single, filenames=filenames, one_line=one_line
            )
        signals.give_up = writer.release
        with writer:
            return run_job(job, writer, screen, signals, flags=flags, command=command)


def open_output(
    job: Job, flags: OutputFlags, *, single: bool, filenames: bool | None, one_line: bool
) -> Writer:
    """The writer that the flags ask for.

    Raises:
        UsageError, OutputError: as `open_writer`.
    """
    return open_writer(
        output_of(flags),
        task=job.task,
        stdout=io.BytesIO() if sys.stdout is None else sys.stdout.buffer,
        format=flags.chosen_format(),
        single=single,
        prompts=max(1, len(job.prompts)),
        filenames=filenames,
        one_line=one_line,
        exists=flags.exists,
    )


def output_of(flags: OutputFlags) -> Path | None:
    return None if flags.output is None else Path(flags.output)


def check_working_directory() -> None:
    """Libraries end the process where there is none.

    Raises:
        UsageError: it was deleted.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory cannot be found: {error.strerror}", "cd to one that exists"
        ) from error


def shown_on_terminal(flags: OutputFlags) -> bool:
    return flags.output is None and sys.stdout is not None and sys.stdout.isatty()


def run_job(
    job: Job,
    writer: Writer,
    screen: Screen,
    signals: Signals,
    *,
    flags: OutputFlags,
    command: str,
) -> int:
    """Run a job to its end, or to the first failure or signal that ends it, and close its
    output; `command` is what the statistics call it.

    Returns:
        The exit code: 0 all done, 1 every input failed, 3 some did, 128 + a signal's number. In
        a process that follows another 0 for 1 and 3.
    """
    from vlmrun.run import run  # late: what a run needs is of no use to the checks before it

    steps = run(job, writer, measure=flags.stats, progress=screen.progress_wanted)
    assert isinstance(steps, Generator), "closing it releases the model at once"
    with writer, screen, closing(steps):
        screen.loading(job.placing.model)
        for summary in steps:
            if not signals.computing:
                signals.computing = True
                explain(screen, summary.plan)
            follow(screen, summary)
            ends = signals.received is not None or (flags.fail_fast and summary.failed > 0)
            if ends_for_all(ends, tp=job.placing.tp):
                summary = end_early(steps, summary)
                follow(screen, summary)
                break
    if summary.failed or signals.received is not None:
        screen.error(f"{summary.done} done, {summary.failed} failed" + left(summary))
    if summary.measured is not None and not screen.silent:
        show_statistics(screen, job, summary, command=command, as_json=flags.json)
    if signals.received is not None:
        return 128 + signals.received
    if not summary.failed or screen.silent:  # torchrun ends all processes after a code of one
        return 0
    return 3 if summary.done else 1


def end_early(steps: Generator["Summary", bool | None, None], summary: "Summary") -> "Summary":
    """The summary of a run that is told to end: what is finished and waits for its turn is
    written."""
    try:
        return steps.send(True)
    except StopIteration:  # it had nothing left to do
        return replace(summary, failures=(), notes=())


def ends_for_all(ends: bool, *, tp: bool) -> bool:
    """Whether a run ends here; several processes end after the same batch, whichever of them
    the signal reached first."""
    if not tp:
        return ends
    from vlmrun.nn.parallel import true_of_any  # late: imports torch, which runs already

    return true_of_any(ends)


def explain(screen: Screen, plan: "Plan | None") -> None:
    from vlmrun.report import decisions  # late: imports rich

    for label, text in decisions(plan) if plan is not None else ():
        screen.explain(f"{label}: {text}")


def follow(screen: Screen, summary: "Summary") -> None:
    for note in summary.notes:
        screen.note(note)
    for failure in summary.failures:
        name = repr(failure.text) if failure.path is None else failure.path or "''"
        screen.error(f"{name}: {failure.message}")
    screen.advance(summary.done + summary.failed, summary.total, summary.seconds)


def left(summary: "Summary") -> str:
    count = summary.total - summary.done - summary.failed
    return f", {count} not tried" if count else ""
