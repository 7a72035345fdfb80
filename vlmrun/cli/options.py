"""Flags that commands share, in groups: a group is a dataclass, each of its fields a flag."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal, get_args

import typer

from vlmrun.errors import UsageError
from vlmrun.files.images import DecodeOptions, parse_background
from vlmrun.job import Backend, Placing
from vlmrun.memory.budget import find_device, parse_bytes
from vlmrun.memory.threads import choose_threads
from vlmrun.models.checkpoints.dtype import parse_compute_dtype, parse_dtype
from vlmrun.models.family import Task

DEFAULT_MODELS: dict[Task, str] = {"caption": "llava-onevision-0.5b", "embed": "siglip"}
parse_size = partial(parse_bytes, whole=1)  # of what, is known when the budget is read
MODEL_VARIABLES: dict[Task, str] = {"caption": "VLMRUN_MODEL", "embed": "VLMRUN_EMBED_MODEL"}

of_input = partial(typer.Option, rich_help_panel="Input")
of_model = partial(typer.Option, rich_help_panel="Model")
of_memory = partial(typer.Option, rich_help_panel="Memory")
of_output = partial(typer.Option, rich_help_panel="Output")


named_inputs = partial(typer.Argument, metavar="INPUT", show_default=False)


@dataclass(frozen=True, slots=True)
class PictureFlags:
    inputs: Annotated[
        list[str],
        named_inputs(help="Picture files, folders or patterns; - for a picture on stdin."),
    ] = field(default_factory=list)
    recursive: Annotated[
        bool, of_input("-r", "--recursive", help="Read the subfolders of folders, too.")
    ] = False
    files_from: Annotated[
        str | None,
        of_input(metavar="FILE", help="Read one path per line from FILE, or - for stdin."),
    ] = None
    null_separated: Annotated[
        bool, of_input("-0", "--null", help="The list of paths is NUL separated.")
    ] = False
    background: Annotated[
        str, of_input(metavar="COLOUR", help="What transparent pictures are laid on.")
    ] = "white"
    max_pixels: Annotated[int, of_input(min=1, metavar="N", help="Refuse larger pictures.")] = (
        DecodeOptions().max_pixels
    )
    frame: Annotated[
        int, of_input(min=0, metavar="N", help="Which frame of an animation, from 0.")
    ] = 0

    def decoding(self) -> DecodeOptions:
        colour = self.background
        if re.fullmatch(r"#[0-9a-fA-F]{3}", colour):
            colour = "#" + "".join(2 * digit for digit in colour[1:])
        return DecodeOptions(parse_background(colour), self.max_pixels, self.frame)


named_model = partial(
    of_model,
    "-m",
    "--model",
    metavar="MODEL",
    help="Short name (see vlmrun models), hub id, folder or .safetensors file; demo and "
    "demo-siglip are packaged.",
)


@dataclass(frozen=True, slots=True)
class ModelFlags:
    model: Annotated[
        str | None, named_model(show_default="$VLMRUN_MODEL, else llava-onevision-0.5b")
    ] = None
    revision: Annotated[
        str | None,
        of_model(metavar="NAME", help="Branch, tag or commit on the hub.", show_default="main"),
    ] = None
    offline: Annotated[bool, of_model("--offline", help="Never touch the network.")] = False

    def spec(self, task: Task) -> str:
        return self.model or os.environ.get(MODEL_VARIABLES[task]) or DEFAULT_MODELS[task]


@dataclass(frozen=True, slots=True)
class EmbedModelFlags(ModelFlags):
    model: Annotated[str | None, named_model(show_default="$VLMRUN_EMBED_MODEL, else siglip")] = (
        None
    )


NamedDevice = Annotated[str, of_memory(metavar="NAME", help="auto, cpu, cuda or cuda:N.")]
CountedThreads = Annotated[
    int | None,
    of_memory(
        min=1,
        metavar="N",
        help="CPU threads to compute with.",
        show_default="$OMP_NUM_THREADS, else what affinity and cgroups allow",
    ),
]


@dataclass(frozen=True, slots=True)
class MemoryFlags:
    dtype: Annotated[
        str | None,
        of_memory(
            metavar="NAME",
            help="How weights are stored in memory: auto (as in the checkpoint), float32, "
            "bfloat16, float16, int8 (lossy).",
            show_default="$VLMRUN_DTYPE, else auto",
        ),
    ] = None
    compute_dtype: Annotated[
        str, of_memory(metavar="NAME", help="What arithmetic runs in; -v says why.")
    ] = "auto"
    device: NamedDevice = "auto"
    ram: Annotated[
        str | None,
        of_memory(
            metavar="SIZE",
            help="Most RAM to use: 8GiB, 8G (= GiB), 8GB or 75%.",
            show_default="$VLMRUN_RAM, else 80% of what is free",
        ),
    ] = None
    vram: Annotated[
        str | None,
        of_memory(
            metavar="SIZE",
            help="Most GPU memory to use.",
            show_default="$VLMRUN_VRAM, else 80% of what is free",
        ),
    ] = None
    resident: Annotated[
        str | None,
        of_memory(
            metavar="SIZE",
            help="Keep at most this much of the weights on the compute tier (RAM, or VRAM with "
            "a GPU): 50%, 400MiB.",
            show_default="what the budget allows",
        ),
    ] = None
    threads: CountedThreads = None
    attention: Annotated[
        Backend,
        of_memory(metavar="NAME", help=f"{', '.join(get_args(Backend))}; -v says why."),
    ] = "auto"
    batch_size: Annotated[
        str, of_memory("-b", "--batch-size", metavar="N", help="auto, or how many rows at once.")
    ] = "auto"


@dataclass(frozen=True, slots=True)
class OutputFlags:
    output: Annotated[
        str | None,
        of_output("-o", "--output", metavar="FILE", help="Write here; the suffix is the format."),
    ] = None
    format: Annotated[
        str | None,
        of_output(metavar="NAME", help="Format, if not by the suffix.", show_default=False),
    ] = None
    json: Annotated[
        bool, of_output("--json", help="One JSON object per line on stdout; --stats as JSON.")
    ] = False
    exists: Annotated[
        Literal["error", "overwrite"], of_output(help="What to do if the output exists.")
    ] = "error"
    stats: Annotated[
        bool, of_output("--stats", help="End with predicted and measured time and memory.")
    ] = False
    tp: Annotated[
        bool,
        of_memory(
            "--tp", help="Share the model between the processes that torchrun started this in."
        ),
    ] = False
    fail_fast: Annotated[
        bool,
        of_output("--fail-fast", help="Stop after the batch in which an input failed (see -b)."),
    ] = False

    def chosen_format(self) -> str | None:
        """The format the flags name; None leaves it to the output's suffix.

        Raises:
            UsageError: the flags contradict each other.
        """
        if not self.json or (self.stats and self.output is not None):
            return self.format
        if self.output is not None:
            raise UsageError(
                "--json is about standard output, which -o leaves empty",
                "use a name that ends in .jsonl, or --format jsonl",
            )
        if self.format not in (None, "json", "jsonl"):
            raise UsageError(
                f"--json and --format {self.format} contradict each other", "leave one of them out"
            )
        return "json"


@dataclass(frozen=True, slots=True)
class TalkFlags:
    quiet: Annotated[
        bool, of_output("-q", "--quiet", help="No progress and no notes; errors only.")
    ] = False
    verbose: Annotated[
        int,
        of_output(
            "-v",
            "--verbose",
            count=True,
            metavar="",
            show_default=False,
            help="Say what was decided and why; -vv adds tracebacks.",
        ),
    ] = 0
    no_progress: Annotated[bool, of_output("--no-progress", help="No progress bar.")] = False
    no_color: Annotated[
        bool, of_output("--no-color", help="No colours; also where NO_COLOR is set.")
    ] = False


def placing(
    model: ModelFlags,
    memory: MemoryFlags,
    *,
    spec: str,
    tp: bool = False,
    allow_untested: bool = False,
) -> Placing:
    """Flags, else the environment, else the defaults; what needs no model is checked here.

    VLMRUN_VRAM is for machines with a GPU: a job on the CPU does not look at it.

    Raises:
        UsageError: a flag or variable is no dtype, size, device or number.
    """
    device, _ = find_device(memory.device)
    choose_threads(memory.threads)
    vram_variable = "VLMRUN_VRAM" if device != "cpu" else None
    return Placing(
        model=spec,
        revision=model.revision,
        offline=model.offline,
        dtype=chosen("--dtype", memory.dtype, parse_dtype, variable="VLMRUN_DTYPE") or "auto",
        compute_dtype=chosen("--compute-dtype", memory.compute_dtype, parse_compute_dtype)
        or "auto",
        device=memory.device,
        ram=chosen("--ram", memory.ram, parse_size, variable="VLMRUN_RAM"),
        vram=chosen("--vram", memory.vram, parse_size, variable=vram_variable),
        resident=chosen("--resident", memory.resident, parse_size),
        batch_size=parse_batch_size(memory.batch_size),
        attention=memory.attention,
        threads=memory.threads,
        tp=tp,
        allow_untested=allow_untested,
    )


def chosen(
    flag: str, value: str | None, check: Callable[[str], object], *, variable: str | None = None
) -> str | None:
    """What a flag says, else what its variable does; None where neither says anything.

    Raises:
        UsageError: as `check`; the message names the flag or the variable.
    """
    where, found = flag, value
    if value is None and variable is not None:
        where, found = variable, os.environ.get(variable) or None
    if found is None:
        return None
    try:
        check(found)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from error
    return found


def parse_batch_size(text: str) -> int | None:
    """`auto` is None.

    Raises:
        UsageError: it is neither `auto` nor a positive number.
    """
    if text == "auto":
        return None
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
        raise UsageError(f"--batch-size {text}: not a positive number", "use auto, 1, 2, 4, …")
    return int(text)
