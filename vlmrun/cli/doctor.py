"""`vlmrun doctor`: what this machine has, what it does per second, and what is chosen on it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from vlmrun.cli.command import Command, takes_flags
from vlmrun.cli.options import CountedThreads, NamedDevice, TalkFlags, of_output
from vlmrun.cli.screen import Screen, say, show_result, write_result
from vlmrun.files.rows import to_json

if TYPE_CHECKING:
    from vlmrun.memory.machine import Machine
    from vlmrun.memory.tuning import Timing

BUSY = 0.5  # of the threads: with more load, a table may be for what others leave


@dataclass(frozen=True, slots=True)
class MachineFlags:
    device: NamedDevice = "auto"
    threads: CountedThreads = None
    tune: Annotated[
        bool,
        of_output("--tune", help="Measure the kernels for about a minute; keep what is fastest."),
    ] = False
    json: Annotated[bool, of_output("--json", help="All of it as one JSON object.")] = False


@takes_flags
def doctor(wanted: MachineFlags, talk: TalkFlags) -> Command:
    """Show versions, devices, memory and its limits, measure, and say what is chosen and why.

    Takes some seconds. No model is loaded and the network is not asked; a
    temporary file in the hub cache's file system is written and read. What is
    missing is said in its row, and the exit code is 0 all the same, but for a
    device that is named.

    --tune measures which kernel multiplies fastest with how many rows, and writes a table that
    later runs on this machine choose by; results may differ in the last bits from those before.
    """

    def start() -> int:
        from vlmrun.cli import diagnosis  # late: imports rich
        from vlmrun.memory import machine  # late: imports psutil

        found = machine.look_around(device=wanted.device, threads=wanted.threads)
        screen = Screen(talk, results_shown=False)
        if wanted.tune:
            note_load(found, screen)
            with screen:
                follow(machine.tune(found), screen)
        if screen.progress_wanted:
            say("measuring for some seconds")
        rates = list(machine.measure(found))
        chosen = list(machine.choices(found))
        table = machine.find_table()
        if wanted.json:
            write_result(to_json(diagnosis.diagnosis_fields(found, rates, chosen, table)))
            return 0
        show_result(diagnosis.diagnosis(found, rates, chosen, table), no_color=talk.no_color)
        return 0

    return Command(start, talk)


def note_load(found: "Machine", screen: Screen) -> None:
    """Say that a table measured now may be one for what other programs leave."""
    if found.load > BUSY * found.budget.threads.count:
        screen.note(
            f"other programs compute as well (load {found.load:.2f}): "
            "tune again when they have ended"
        )


def follow(timings: "Iterator[tuple[Timing, int]]", screen: Screen) -> None:
    """Show how far the timing of kernels is, with -v what was found, and what was left out."""
    if screen.progress_wanted:
        say("measuring kernels for about a minute; they are compiled before, the first time")
    start, done, total = time.monotonic(), 0, 0
    for timing, total in timings:
        done += 1
        screen.explain(str(timing))
        screen.advance(done, total, time.monotonic() - start)
    if done < total:
        screen.note(
            f"the time was up after {done} of {total} measurements: "
            "kernels for the other dtypes stay as packaged"
        )
