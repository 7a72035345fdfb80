"""Run a job: open, plan, load, then batch by batch decode, compute and write.

Yields a `Summary` after every batch, so that the caller can draw progress and may stop; what
was yielded has been written.
"""

import gc
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from vlmrun.errors import ImageError, OutOfBudget, UsageError
from vlmrun.files.images import DecodeOptions, read_size
from vlmrun.files.inputs import ImageInput
from vlmrun.files.rows import Caption, Failure
from vlmrun.files.writers import Writer
from vlmrun.job import Job
from vlmrun.memory.budget import format_bytes
from vlmrun.memory.measure import Measured, PeakMemory, read_measures
from vlmrun.memory.plan import Plan
from vlmrun.memory.threads import let_waiting_threads_sleep
from vlmrun.memory.working import DECODED_PIXEL_BYTES
from vlmrun.memory.workload import Size, check_shapes, flags_that_fit, own_placing, plan_job
from vlmrun.models.checkpoints.source import Source
from vlmrun.models.companions import check_companions
from vlmrun.models.families import is_supported
from vlmrun.models.model import Model, open_source, read_model
from vlmrun.models.sharding import read_shard, shard_model

if TYPE_CHECKING:
    from vlmrun.memory.cached_model import CachedModel
    from vlmrun.tasks.samples import Batch


@dataclass(frozen=True, slots=True)
class Summary:
    """How far a run is. `failures` and `notes` are those since the last one."""

    plan: Plan | None  # None for an untested model, which is loaded whole
    total: int
    done: int = 0
    failed: int = 0
    seconds: float = 0.0
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    measured: Measured | None = None


def run(
    job: Job, writer: Writer, *, measure: bool = False, progress: bool = False
) -> Generator[Summary, bool | None, None]:
    """Run a job to its end. The first summary comes when the model is ready, with none done;
    the last one carries `measured` when asked for. `progress` draws downloads on stderr. Sent
    True, it writes what is finished and waits for its turn, and ends after one more summary.

    Raises:
        VlmrunError: the job cannot run; raised before torch is imported where the command
            line or the checkpoint's files are at fault.
    """
    start = time.perf_counter()
    placing = job.placing
    source, config = open_source(
        placing.model,
        task=job.task,
        revision=placing.revision,
        offline=placing.offline,
        progress=progress,
        untested=placing.allow_untested,
    )
    let_waiting_threads_sleep()
    with ExitStack() as stack:
        peak = stack.enter_context(PeakMemory()) if measure else None
        with uncollected():
            ready = (prepare if is_supported(config) else prepare_whole)(job, source, stack)
        loaded = time.perf_counter()
        summary = Summary(ready.plan, len(job.images) + len(job.texts), notes=ready.notes)
        if (yield summary):
            return
        tokens = 0
        stack.push(partial(write_rest, ready, writer))
        for batch in ready.batches:
            tokens += sum(row.tokens for row in batch.rows if isinstance(row, Caption))
            summary = written(batch, writer, summary, time.perf_counter() - loaded)
            if (yield summary):
                yield written(ready.rest(), writer, summary, summary.seconds)
                return
        writer.commit()
        if peak is not None:
            measured = read_measures(peak, ready.entry, loaded - start, summary.seconds, tokens)
            yield replace(summary, failures=(), notes=(), measured=measured)


def written(batch: "Batch", writer: Writer, summary: Summary, seconds: float) -> Summary:
    """The summary after a batch's rows are written."""
    for row in batch.rows:
        writer.write(row)
    return replace(
        summary,
        done=summary.done + batch.done,
        failed=summary.failed + batch.failed,
        seconds=seconds,
        failures=tuple(row for row in batch.rows if isinstance(row, Failure)),
        notes=batch.notes,
    )


def write_rest(
    ready: "Ready", writer: Writer, kind: type[BaseException] | None, *_: object
) -> None:
    """Write what is finished and waits for its turn, where an error ends the run, or a second
    signal."""
    if kind is not None:
        for row in ready.rest().rows:
            writer.write(row)


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage while libraries are imported: what they make stays, and looking through
    it over and over takes a tenth of a short run."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Ready:
    """A model that is ready, its batches, and `rest`: one of what is finished and waits."""

    plan: Plan | None
    entry: "CachedModel"
    batches: Iterator["Batch"]
    rest: Callable[[], "Batch"]
    notes: tuple[str, ...]


def prepare(job: Job, source: Source, stack: ExitStack) -> Ready:
    """Plan, refuse what does not fit, import torch, and make the model's cache entry."""
    model = read_model(source)
    if job.placing.tp:
        shard = read_shard(os.environ)
        model = shard_model(model, shard)
        job = replace(job, placing=own_placing(job.placing, shard))
    known = known_sizes(job)
    check_shapes(model, job, known)
    sizes = list(known.values())
    plan = plan_job(model, job, sizes)
    notes = check_companions(
        model, images=bool(job.images), texts=bool(job.texts), dynamic=job.dynamic_size
    )
    check_budget(plan)
    # late: torch and transformers cost seconds, and a refused job need not pay for them
    from vlmrun.load import load
    from vlmrun.memory.cache import ModelCache
    from vlmrun.nn.parallel import joined
    from vlmrun.tasks.captioner import Captioner
    from vlmrun.tasks.embedder import Embedder

    if job.placing.tp:
        stack.enter_context(joined(plan.storage.device))
        plan = agreed(plan, model, job, sizes)
    cache = stack.enter_context(ModelCache(plan.budget.ram_bytes + plan.budget.vram_bytes))
    stays = max(plan.stored_bytes(phase) for phase in plan.workload.phases)
    entry = stack.enter_context(
        cache.use(source.name, lambda: load(model, plan), nbytes=stays),
    )
    notes += changed_products(plan, entry.plan)
    plan = entry.plan  # with the attention and the products that were found to work
    task = (Captioner if job.task == "caption" else Embedder)(job, model, plan, entry)
    return Ready(plan, entry, task.batches(), task.rest, (*model.notes, *notes))


def agreed(plan: Plan, model: Model, job: Job, sizes: Sequence[Size]) -> Plan:
    """The plan with the batch that every process has room for; what is free, and so the batch,
    may look different to each.

    Raises:
        OutOfBudget: the plan with that batch does not fit this process.
    """
    from vlmrun.nn.parallel import least_number  # late: as above

    batch = least_number(plan.workload.batch_size)
    if batch == plan.workload.batch_size:
        return plan
    plan = plan_job(model, replace(job, placing=replace(job.placing, batch_size=batch)), sizes)
    check_budget(plan)
    reason = "another process has room for no more"
    return replace(plan, workload=replace(plan.workload, batch_reason=reason))


def changed_products(planned: Plan, found: Plan) -> tuple[str, ...]:
    """Notes where a table of this machine does not count, and where the compiled loops were
    planned and do not work."""
    before, now = planned.storage.products, found.storage.products
    failed = (
        f"PyTorch multiplies, more slowly: {now.reason}" if now.compiled < before.compiled else ""
    )
    return tuple(note for note in (before.ignored, failed) if note)


def prepare_whole(job: Job, source: Source, stack: ExitStack) -> Ready:
    """The same for a model of no known family, which is loaded whole and has no plan."""
    refuse_flags(job)
    from vlmrun.memory.cache import ModelCache  # late: as above
    from vlmrun.tasks.batches import InTurn
    from vlmrun.tasks.whole import WholeCaptioner, open_whole

    whole = open_whole(job, source)
    cache = stack.enter_context(ModelCache(whole.nbytes))
    entry = stack.enter_context(cache.use(source.name, lambda: whole, nbytes=whole.nbytes))
    note = f"{source.name} is untested: loaded whole, its working memory is not planned"
    batches = WholeCaptioner(job, source, entry).batches()
    return Ready(None, entry, batches, InTurn().rest, (note,))


def refuse_flags(job: Job) -> None:
    """Refuse what stock `generate()` and a whole load do not follow.

    Raises:
        UsageError: it is asked for.
    """
    given = {
        "--resident": job.placing.resident is not None,
        "--batch-size": (job.placing.batch_size or 1) > 1,
        "--tp": job.placing.tp,
        "--detail": job.detail != "high",
        "--attention": job.placing.attention != "auto",
        "--stop": bool(job.generation.stop),
    }
    for flag in (flag for flag, asked in given.items() if asked):
        raise UsageError(
            f"{flag}: {job.placing.model} is untested, and this flag is not for such models",
            "leave it out: they are loaded whole and run one picture at a time",
        )


def known_sizes(job: Job) -> dict[str, tuple[int, int]]:
    """Sizes, by path, of the pictures whose header can be read; the others become error rows."""
    options = DecodeOptions(background=job.background, max_pixels=job.max_pixels, frame=job.frame)
    sizes = {}
    for path in job.images:
        image = ImageInput(path, job.stdin_image if path == "-" else None)
        try:
            sizes[path] = read_size(image, options=options)
        except ImageError:
            continue
    return sizes


def check_budget(plan: Plan) -> None:
    """Refuse a job before anything is loaded.

    Raises:
        OutOfBudget: the plan does not fit; the message gives the smallest budget that would.
    """
    wanted = flags_that_fit(plan)
    if not wanted:
        return
    budgets = {"ram": plan.budget.ram_bytes, "vram": plan.budget.vram_bytes}
    given = " and ".join(f"{format_bytes(budgets[tier])} of {tier.upper()}" for tier in wanted)
    flags = " ".join(f"--{tier} {size}" for tier, size in wanted.items())
    pixels = plan.workload.image_pixels if plan.workload.picture_known else 0
    largest = f"; the largest picture has {format_pixels(pixels)}" if pixels else ""
    hint = f"use {flags} or more; vlmrun mem-plan shows what takes it"
    if "ram" in wanted and 4 * DECODED_PIXEL_BYTES * pixels > plan.smallest_ram_bytes:
        hint = f"use {flags} or more, or leave large pictures out with --max-pixels"
    raise OutOfBudget(
        f"{plan.model} does not fit {given}: "
        f"the smallest budget that would do is {' and '.join(wanted.values())}{largest}",
        hint,
    )


def format_pixels(pixels: int) -> str:
    return f"{pixels / 1e6:.1f} megapixels" if pixels >= 100_000 else f"{pixels:,} pixels"
