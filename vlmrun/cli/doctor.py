"""`vlmrun doctor`: what this machine has, what it does per second, and what is chosen on it."""

from dataclasses import dataclass
from typing import Annotated

from vlmrun.cli.command import Command, takes_flags
from vlmrun.cli.options import CountedThreads, NamedDevice, TalkFlags, of_output
from vlmrun.cli.screen import Screen, say, show_result, write_result
from vlmrun.files.rows import to_json


@dataclass(frozen=True, slots=True)
class MachineFlags:
    device: NamedDevice = "auto"
    threads: CountedThreads = None
    json: Annotated[bool, of_output("--json", help="All of it as one JSON object.")] = False


@takes_flags
def doctor(wanted: MachineFlags, talk: TalkFlags) -> Command:
    """Show versions, devices, memory and its limits, measure, and say what is chosen and why.

    Takes some seconds. No model is loaded and the network is not asked; a
    temporary file in the hub cache's file system is written and read. What is
    missing is said in its row, and the exit code is 0 all the same.
    """

    def start() -> int:
        from vlmrun.cli import diagnosis  # late: imports rich
        from vlmrun.memory import machine  # late: imports psutil

        found = machine.look_around(device=wanted.device, threads=wanted.threads)
        if Screen(talk, results_shown=False).progress_wanted:
            say("measuring for some seconds")
        rates = list(machine.measure(found))
        chosen = list(machine.choices(found))
        if wanted.json:
            write_result(to_json(diagnosis.diagnosis_fields(found, rates, chosen)))
            return 0
        show_result(diagnosis.diagnosis(found, rates, chosen), no_color=talk.no_color)
        return 0

    return Command(start, talk)
