"""`vlmrun mem-plan`: where every layer would live, what it costs, and whether it fits."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import typer

from vlmrun.cli.caption import PromptFlags
from vlmrun.cli.command import Command, flags_of, spell, takes_flags
from vlmrun.cli.embed import LengthFlags, VectorFlags, of_vectors
from vlmrun.cli.options import (
    DEFAULT_MODELS,
    MODEL_VARIABLES,
    MemoryFlags,
    ModelFlags,
    PictureFlags,
    TalkFlags,
    named_inputs,
    of_input,
    of_output,
    placing,
)
from vlmrun.cli.screen import Screen, show_result, write_result
from vlmrun.cli.texts import check_text
from vlmrun.errors import ImageError, OutOfBudget, UsageError, VlmrunError
from vlmrun.files.images import read_size
from vlmrun.files.inputs import find_inputs
from vlmrun.files.rows import to_json
from vlmrun.job import Generation, Job, Placing
from vlmrun.memory.floor import assumed_rates, floor
from vlmrun.memory.plan import Plan
from vlmrun.memory.workload import Size, flags_that_fit, own_placing, plan_job
from vlmrun.models.companions import check_companions
from vlmrun.models.family import Task
from vlmrun.models.model import Model, describe_model
from vlmrun.models.sharding import Shard, shard_model

of_plan = partial(typer.Option, rich_help_panel="Plan")
PLACEHOLDER = "INPUT..."


@dataclass(frozen=True, slots=True)
class PlannedPictures(PictureFlags):
    """Pictures that are on disk: standard input is not read."""

    inputs: Annotated[list[str], named_inputs(help="Picture files, folders or patterns.")] = field(
        default_factory=list
    )
    files_from: Annotated[
        str | None, of_input(metavar="FILE", help="Read one path per line from FILE.")
    ] = None


@dataclass(frozen=True, slots=True)
class PlannedVectors(VectorFlags):
    """The same of texts."""

    texts_from: Annotated[
        str | None, of_vectors(metavar="FILE", help="Embed every line of FILE.")
    ] = None


@dataclass(frozen=True, slots=True)
class PlanFlags:
    layers: Annotated[bool, of_plan("--layers", help="One row per layer.")] = False
    count: Annotated[
        int | None,
        of_plan(min=1, metavar="N", help="Add the time for N pictures.", show_default=False),
    ] = None
    tp: Annotated[
        int | None,
        of_plan(
            min=1,
            metavar="N",
            help="Plan for one of N processes that share the model (see --tp of caption).",
            show_default=False,
        ),
    ] = None
    json: Annotated[bool, of_output("--json", help="The whole plan as one JSON object.")] = False


@takes_flags
def mem_plan(
    pictures: PlannedPictures,
    wanted: PlanFlags,
    asked: PromptFlags,
    vectors: PlannedVectors,
    length: LengthFlags,
    model: ModelFlags,
    memory: MemoryFlags,
    talk: TalkFlags,
) -> Command:
    """Show where every layer would live, what that costs, and whether it fits.

    Reads configurations and headers, never a weight, and of INPUT the headers
    only. The exit code is 0 if the job fits and 4 if it does not. Standard
    input is not read.
    """

    def start() -> int:
        screen = Screen(talk, results_shown=False)
        images, sizes = read_sizes(pictures, screen)
        placed = placing(model, memory, spec=model.spec("caption"))
        job = asked_job(placed, pictures, images, asked, vectors, length)
        opened = describe_model(
            job.placing.model, revision=job.placing.revision, offline=job.placing.offline
        )
        task = opened.family.task
        own: tuple[object, ...] = (asked,)
        other: tuple[object, ...] = (vectors, length)
        if task == "embed":
            own, other = other, own
        check_flags(task, opened.source.name, *other)
        opened, job = shared(opened, replace(job, task=task), wanted.tp)
        plan = plan_job(opened, counted(job, wanted.count), sizes)
        note_missing(opened, job, screen)
        shown = pictures if images or job.texts else replace(pictures, inputs=[PLACEHOLDER])
        flags: dict[str, Any] = dict(flags_that_fit(plan))
        fitting = replace(memory, **flags)
        command = spell(task, named(model, task), fitting, *own, shown)
        show(plan, opened, job, launched(command, wanted.tp), wanted, talk)
        return 0 if plan.fits else OutOfBudget.exit_code

    return Command(start, talk)


def asked_job(
    placed: Placing,
    pictures: PictureFlags,
    images: tuple[str, ...],
    asked: PromptFlags,
    vectors: VectorFlags,
    length: LengthFlags,
) -> Job:
    """The job that the flags of both commands ask for; the model decides whose it is."""
    return Job(
        task="caption",
        placing=placed,
        images=images,
        max_pixels=pictures.max_pixels,
        frame=pictures.frame,
        texts=vectors.texts(stdin_allowed=False),
        prompts=asked.prompts(),
        system=check_text(asked.system, where="--system"),
        detail=asked.detail,
        generation=Generation(max_new_tokens=asked.max_new_tokens),
        output_kind=vectors.kind(),
        max_patches=vectors.max_patches,
        dynamic_size=vectors.dynamic_size,
        scores=length.scores,
    )


def note_missing(model: Model, job: Job, screen: Screen) -> None:
    """Say what a run would refuse of the files beside the weights: they change no plan."""
    if not model.source.complete:
        return
    try:
        check_companions(
            model,
            images=bool(job.images) or not job.texts,
            texts=bool(job.texts),
            dynamic=job.dynamic_size,
        )
    except VlmrunError as error:
        screen.note(f"vlmrun {job.task} would refuse it: {error.message}")


def shared(model: Model, job: Job, processes: int | None) -> tuple[Model, Job]:
    """A model and a job as the first of several processes on this machine has them.

    Raises:
        UsageError: their number does not divide the model.
    """
    if processes is None:
        return model, job
    shard = Shard(0, processes, 0, processes)
    return shard_model(model, shard), replace(job, placing=own_placing(job.placing, shard))


def counted(job: Job, count: int | None) -> Job:
    """A job of so many pictures, for the batch that those would run in."""
    if count is None or job.texts:
        return job
    return replace(job, images=("a picture",) * count)


def launched(command: str, processes: int | None) -> str:
    """A command, or what starts it in several processes. It is the installed one: `-m vlmrun`
    would take a folder of that name in the working directory, as a clone's, for the package."""
    if processes is None:
        return command
    program, name, flags = command.split(" ", 2)
    start = f"torchrun --nproc-per-node {processes} --no-python"
    return f"{start} {program} {name} --tp {flags}"


def check_flags(task: Task, name: str, *other: object) -> None:
    """Refuse flags of the other task.

    Raises:
        UsageError: there are some.
    """
    wrong = flags_of(*other)
    if wrong:
        fitting: Task = "embed" if task == "caption" else "caption"
        raise UsageError(
            f"{wrong[0]}: {name} {task}s, and this flag is not for that",
            f"leave it out, or name a model that {fitting}s, as -m {DEFAULT_MODELS[fitting]}",
        )


def read_sizes(pictures: PictureFlags, screen: Screen) -> tuple[tuple[str, ...], list[Size]]:
    """The pictures whose header can be read, and their sizes; the others are noted.

    Raises:
        UsageError: as `find_inputs`; ImageError: pictures are named, and none can be read.
    """
    inputs = find_inputs(
        pictures.inputs,
        recursive=pictures.recursive,
        files_from=pictures.files_from,
        null_separated=pictures.null_separated,
    )
    for note in inputs.notes:
        screen.note(note)
    images, sizes = [], []
    for image in inputs.images:
        try:
            sizes.append(read_size(image, options=pictures.decoding()))
            images.append(image.path)
        except ImageError as error:
            screen.note(f"{image.path}: {error.message}; left out of the plan")
    if inputs.images and not images:
        raise ImageError("none of the pictures can be read", "name others, or none at all")
    return tuple(images), sizes


def named(model: ModelFlags, task: Task) -> ModelFlags:
    """The model's flags, with its name where the command would choose another one."""
    spec = model.spec("caption")
    return model if MODEL_VARIABLES[task] == "VLMRUN_MODEL" else replace(model, model=spec)


def show(
    plan: Plan, model: Model, job: Job, command: str, wanted: PlanFlags, talk: TalkFlags
) -> None:
    """Write the plan on standard output, as JSON or as tables.

    Raises:
        OutputError: standard output is closed.
    """
    from vlmrun import report  # late: imports rich

    rates = assumed_rates(plan)
    least = floor(plan, model, rates=rates)
    if wanted.json:
        write_result(to_json(report.plan_fields(plan, least, command)))
        return
    shown = report.plan_report(
        plan,
        model,
        job,
        least=least,
        rates=rates.reason,
        command=command,
        pictures=wanted.count,
        processes=wanted.tp,
        layers=wanted.layers,
    )
    show_result(shown, no_color=talk.no_color)
