"""`--stats`: what was predicted beside what was measured, on standard error."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from vlmrun.cli.screen import Screen, write
from vlmrun.files.rows import to_json
from vlmrun.job import Job
from vlmrun.memory.budget import format_bytes
from vlmrun.memory.floor import Floor, floor
from vlmrun.memory.plan import Plan, Tier
from vlmrun.models.model import describe_model

if TYPE_CHECKING:
    from vlmrun.memory.measure import Measured
    from vlmrun.run import Summary


def show_statistics(
    screen: Screen, job: Job, summary: "Summary", *, command: str, as_json: bool
) -> None:
    """End a run that was measured. What has no plan has no prediction."""
    from vlmrun import report  # late: imports rich

    plan, measured = summary.plan, summary.measured
    assert measured is not None
    least = None if plan is None else least_times(job, plan)
    if as_json:
        fields = plan and least and report.plan_fields(plan, least, command)
        rate = {"tokens_per_s": tokens_per_second(measured)}
        told: dict[str, object] = {"plan": fields, "measured": {**asdict(measured), **rate}}
        write(to_json(told).decode())
        return
    rows = [*memory_rows(plan, measured), *time_rows(summary, measured, least)]
    screen.show(report.comparison(rows))
    for phase, names in streamed_layers(plan):
        write(f"layers on DISK in {phase}: {name_ranges(names)}\n")


def least_times(job: Job, plan: Plan) -> Floor:
    placing = job.placing
    model = describe_model(placing.model, revision=placing.revision, offline=placing.offline)
    return floor(plan, model)


def streamed_layers(plan: Plan | None) -> Iterator[tuple[str, list[str]]]:
    """The layers that every pass of a phase reads from disk."""
    if plan is None:
        return
    for phase in plan.workload.phases:
        names = [
            use.layer.name
            for use in plan.placements
            if use.runs_in == phase and use.tiers[phase] is Tier.DISK and not use.layer.gathered
        ]
        if names:
            yield phase, names


def tokens_per_second(measured: "Measured") -> float:
    return measured.tokens / measured.run_seconds if measured.run_seconds else 0.0


def memory_rows(plan: Plan | None, measured: "Measured") -> Iterator[tuple[str, str, str]]:
    predicted = "" if plan is None else format_bytes(plan.peak_ram_bytes)
    yield "RAM peak", predicted, format_bytes(measured.peak_ram_bytes)
    yield "  anonymous", "", format_bytes(measured.peak_anon_bytes)
    yield "  file", "", format_bytes(measured.peak_file_bytes)
    yield "  shared", "", format_bytes(measured.peak_shmem_bytes)
    if plan is not None and plan.peak_vram_bytes:
        predicted = format_bytes(plan.peak_vram_bytes)
        yield "VRAM peak", predicted, format_bytes(measured.peak_vram_bytes)


def time_rows(
    summary: "Summary", measured: "Measured", least: Floor | None
) -> Iterator[tuple[str, str, str]]:
    yield "loading", "", f"{measured.load_seconds:.2f} s"
    predicted = ""
    if least is not None:
        predicted = f"{least.run_s(summary.done, tokens=measured.tokens):.2g} s at assumed rates"
    yield "running", predicted, f"{measured.run_seconds:.2f} s"
    yield "read from disk", "", format_bytes(measured.disk_bytes_read)
    if measured.tokens:
        yield "new tokens", "", str(measured.tokens)
        yield "tokens per second", "", f"{tokens_per_second(measured):.2f}"


def name_ranges(names: Iterable[str]) -> str:
    """Names with runs of numbers drawn together: `decoder.layers.3-9, head.0`."""
    found: dict[str, list[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.+)\.(\d+)", name)
        found.setdefault(match[1] if match else name, []).extend([int(match[2])] if match else [])
    return ", ".join(
        stem + (f".{ranges(numbers)}" if numbers else "") for stem, numbers in found.items()
    )


def ranges(numbers: Sequence[int]) -> str:
    runs = itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
