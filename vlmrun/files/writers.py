"""Choose the writer of a run: where its rows go and in what form."""

import os
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Literal

from vlmrun.errors import OutputError, UsageError
from vlmrun.files.arrays import ARRAYS, ArrayWriter, index_path, temporary_paths
from vlmrun.files.growing import FileSink
from vlmrun.files.lines import JsonForm, LineWriter, TextForm, Writer
from vlmrun.files.output import (
    OutputLock,
    StreamSink,
    beside,
    errors_named,
    in_the_way,
    status_of,
)

__all__ = ["Task", "Writer", "choose_format", "open_writer"]

Task = Literal["caption", "embed"]

# Formats of a task by the suffix that picks them. `json` is one object per line, as `jsonl`.
SUFFIXES: dict[Task, dict[str, str]] = {
    "caption": {".txt": "text", ".tsv": "tsv", ".jsonl": "jsonl"},
    "embed": {
        ".npy": "npy",
        ".npz": "npz",
        ".safetensors": "safetensors",
        ".jsonl": "jsonl",
    },
}


def choose_format(output: Path | None, format: str | None, *, task: Task) -> str:
    """The format asked for, else the one of the output's suffix, else that of standard output.

    Raises:
        UsageError: there is no such format, or not for this task or on standard output.
    """
    suffixes = SUFFIXES[task]
    known = dict.fromkeys([*suffixes.values(), "json"])
    suffix = output.suffix.lower() if output is not None else ""
    if format == "parquet" or (format is None and suffix == ".parquet"):
        raise UsageError("parquet is not written yet", f"formats: {', '.join(known)}")
    if format is None and output is None:
        return "text" if task == "caption" else "jsonl"
    if format is None:
        if suffix not in suffixes:
            raise UsageError(
                f"{output}: unknown suffix {suffix!r} for {task}",
                f"known: {', '.join(suffixes)}; or name a format with --format",
            )
        return suffixes[suffix]
    if format not in known:
        raise UsageError(f"unknown format {format!r} for {task}", f"known: {', '.join(known)}")
    if output is None and format in ARRAYS:
        raise UsageError(f"{format} is not written to standard output", f"add -o NAME.{format}")
    return format


def open_writer(
    output: Path | None,
    *,
    task: Task,
    stdout: BinaryIO,
    format: str | None = None,
    single: bool = False,
    prompts: int = 1,
    filenames: bool | None = None,
    one_line: bool = False,
    exists: Literal["error", "overwrite"] = "error",
) -> Writer:
    """Open the output and lock it; nothing that is there is changed before a row is finished.

    Text: with `single` (one file was named) and one of `prompts`, the caption alone and as it
    is; else, and as `tsv` always, lines of `path TAB caption`, with several prompts `path TAB
    name TAB caption`, where the caption's line breaks become spaces. `filenames` forces the path
    in or out. `one_line` folds captions in every form. JSON: one object per line, failures
    included; text leaves failures out. Arrays: see `arrays`.

    Raises:
        UsageError: the format is unknown or does not fit.
        OutputError: it exists already, is being written by another run, or cannot be written.
    """
    chosen = choose_format(output, format, task=task)
    bare = single and prompts == 1 and chosen != "tsv"
    form: TextForm | JsonForm = JsonForm(folded=one_line)
    if chosen in ("text", "tsv"):
        with_path = not bare if filenames is None else filenames
        form = TextForm(with_path, name=prompts > 1, folded=one_line or not bare or with_path)
    if output is None:
        return LineWriter(StreamSink(stdout), form)
    with errors_named(output):
        if output.is_symlink():
            refuse_special(output)
            output = Path(os.path.realpath(output))  # the file is replaced, not the link to it
        locks, replaces = _lock(output, array=chosen in ARRAYS, exists=exists)
    if chosen in ARRAYS:
        return ArrayWriter(output, ARRAYS[chosen], locks, replaces=replaces)
    return LineWriter(FileSink(output, replaces=replaces), form, locks)


def _lock(output: Path, *, array: bool, exists: str) -> tuple[tuple[OutputLock, ...], bool]:
    """Lock the files of an output, make sure that they may be written and that nothing else
    bears the names this takes; returns the locks and whether there are old results."""
    if not output.parent.is_dir():
        raise OutputError(
            f"{output} cannot be written: there is no folder {output.parent}",
            "make the folder, or choose another output",
        )
    files = [output, index_path(output)] if array else [output]
    with ExitStack() as stack:
        locks = []
        for file in files:
            locks.append(OutputLock(file))
            stack.callback(locks[-1].release)
        replaces = any([status_of(file) is not None for file in files])
        temporary = temporary_paths(output) if array else [beside(output, ".new")] * replaces
        for path in temporary:
            if os.path.lexists(path):
                raise in_the_way(path, output)
        for file in files:
            _check_old(file, exists)
        stack.pop_all()
    return tuple(locks), replaces


def refuse_special(file: Path) -> None:
    """Refuse what can be written but not replaced: folders, devices, pipes.

    Raises:
        OutputError: it is one.
    """
    found = status_of(file)
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise OutputError(
            f"{file} cannot be written: it is not a regular file", "choose another output"
        )


def _check_old(file: Path, exists: str) -> None:
    """Make sure that old results may be replaced."""
    refuse_special(file)
    found = status_of(file)
    if found is None:
        return
    if exists == "error":
        raise OutputError(f"{file} exists already", "--exists overwrite replaces it")
    if not found.st_mode & 0o222:
        raise OutputError(
            f"{file} is read-only, and is not replaced", "chmod u+w it, or choose another output"
        )
