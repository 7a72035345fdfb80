"""Commands as functions of flag groups, shown to typer as functions of flags."""

import inspect
import shlex
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, get_type_hints

from vlmrun.cli.options import TalkFlags


@dataclass(frozen=True, slots=True)
class Command:
    """A command line that has been read: what to do, and how much to say about it."""

    start: Callable[[], int]
    talk: TalkFlags


def takes_flags(command: Callable[..., Command]) -> Callable[..., Command]:
    """Show typer every field of a command's groups as a flag of its own."""
    groups = {name: kind for name, kind in get_type_hints(command).items() if name != "return"}

    def unfolded(**values: Any) -> Command:
        made = {
            name: group(**{each.name: values[each.name] for each in fields(group)})
            for name, group in groups.items()
        }
        return command(**made)

    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default_of(each),
            annotation=each.type,
        )
        for group in groups.values()
        for each in fields(group)
    ]
    unfolded.__name__, unfolded.__doc__ = command.__name__, command.__doc__
    unfolded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return unfolded


def default_of(field: "Field[Any]") -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def spell(name: str, *groups: Any) -> str:
    """The shell command that gives a command these groups: flags that differ from their
    defaults, then the inputs."""
    inputs = [word for group in groups for word in getattr(group, "inputs", ())]
    marker = ["--"] if any(word.startswith("-") and word != "-" for word in inputs) else []
    return shlex.join(["vlmrun", name, *flags_of(*groups), *marker, *inputs])


def flags_of(*groups: Any) -> list[str]:
    """The words of all flags that differ from their defaults."""
    words: list[str] = []
    for group in groups:
        for each in fields(group):
            value = getattr(group, each.name)
            if each.name != "inputs" and value != default_of(each):
                words += spell_flag(each, value)
    return words


def spell_flag(field: "Field[Any]", value: Any) -> Iterator[str]:
    """One flag as words, by the first of its names."""
    option = field.type.__metadata__[0]  # type: ignore[union-attr]
    first = f"--{field.name.replace('_', '-')}" if option.default is ... else str(option.default)
    yes, _, no = first.partition("/")
    if isinstance(value, bool):
        yield yes if value else no
    elif option.count:
        yield from [yes] * value
    else:
        for each in value if isinstance(value, list) else [value]:
            yield from (yes, str(each))
