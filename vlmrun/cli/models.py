"""`vlmrun models`: the short names of models, what each needs, and what of it is cached."""

from dataclasses import dataclass, field
from typing import Annotated

import typer

from vlmrun.cli.command import Command, takes_flags
from vlmrun.cli.options import TalkFlags, of_output
from vlmrun.cli.screen import show_result, write_result
from vlmrun.files.rows import to_json
from vlmrun.models.listed import NAMES, look_up


@dataclass(frozen=True, slots=True)
class ListFlags:
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", show_default=False, help="Tell more, of these only."),
    ] = field(default_factory=list)
    json: Annotated[
        bool, of_output("--json", help="One JSON object per model and line, with every dtype.")
    ] = False


@takes_flags
def models(wanted: ListFlags, talk: TalkFlags) -> Command:
    """List the short names of models: what each needs, and what of it is cached.

    Answers from packaged shapes and the hub cache; the network is not asked.
    """

    def start() -> int:
        from vlmrun.cli import listing  # late: imports rich

        found = [look_up(name) for name in wanted.names or NAMES]
        if wanted.json:
            for each in found:
                write_result(to_json(listing.listed_fields(each)))
            return 0
        shown = listing.details(found) if wanted.names else listing.listing(found)
        show_result(shown, no_color=talk.no_color)
        return 0

    return Command(start, talk)
