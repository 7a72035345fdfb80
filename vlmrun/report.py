"""What rich shows of a plan and of a run. Renderables are returned, never printed."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vlmrun.job import Job
from vlmrun.memory.attention import TOWERS
from vlmrun.memory.budget import format_bytes, size_flag
from vlmrun.memory.floor import Floor
from vlmrun.memory.plan import Placement, Plan, Tier
from vlmrun.memory.working import GPU_RUNTIME_BYTES
from vlmrun.models.family import Phase
from vlmrun.models.model import Model

Fields = dict[str, object]
Column = tuple[Phase, Tier]


def plan_report(
    plan: Plan,
    model: Model,
    job: Job,
    *,
    least: Floor,
    rates: str,
    command: str,
    pictures: int | None = None,
    processes: int | None = None,
    layers: bool = False,
) -> Group:
    """All that `mem-plan` says. `pictures`: add the time of so many; `processes`: the plan is that
    of one of so many."""
    blank = Text("")
    parts: list[RenderableType] = [opened(model)]
    if processes is not None:
        parts.append(Text(f"one of {processes} processes: every figure is for one of them"))
    parts += [blank, memory_table(plan)]
    if layers:
        parts += [blank, layer_table(plan)]
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    rows = [*budget_lines(plan), *decisions(plan), *workload_lines(plan, model, job)]
    rows += [("least time", least_time(least)), ("assumed rates", rates)]
    if pictures is not None:
        answers = pictures * max(1, len(job.prompts))
        rows.append((f"{pictures} pictures", job_time(plan, answers * least.image_s)))
    rows += [("not used", text) for text in unused_lines(plan)]
    for label, text in rows:
        lines.add_row(label, text)
    return Group(
        *parts, blank, lines, blank, verdict(plan), Text(command, overflow="ignore", no_wrap=True)
    )


def opened(model: Model) -> Text:
    """The model, its family, and where the facts of the plan come from."""
    facts = "; ".join(model.notes)
    if model.source.folder is not None and not facts:
        facts = f"headers in {model.source.folder}"
    return Text(f"{model.source.name} ({model.family.name}): {facts}")


def memory_table(plan: Plan) -> Table:
    """Weights by part and working memory, a column for every tier in every phase.

    The columns of RAM and VRAM add up to what the phase takes at its peak. A token table lies
    in neither: the rows that are looked up are read from the file.
    """
    tiers = [Tier.VRAM, Tier.RAM] if plan.storage.compute_tier is Tier.VRAM else [Tier.RAM]
    columns: list[Column] = [(p, t) for p in plan.workload.phases for t in (*tiers, Tier.DISK)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column("")
    table.add_column("bytes", justify="right")
    for phase, tier in columns:
        table.add_column(f"{phase}\n{tier.upper()}", justify="right")
    for part in dict.fromkeys(p.layer.part for p in plan.placements if not p.layer.gathered):
        add_bytes(table, f"{part} weights", columns, weights_of(plan, part))
    gathered = sum(p.nbytes for p in plan.placements if p.layer.gathered)
    if gathered:
        add_bytes(table, "token table (rows are read)", columns, {None: gathered})
    table.add_section()
    for label, cells in working_rows(plan):
        add_bytes(table, label, columns, cells)
    table.add_section()
    add_bytes(table, "at the peak", columns, peaks(plan, columns))
    return table


def add_bytes(
    table: Table, label: str, columns: Sequence[Column], cells: dict[Column | None, int]
) -> None:
    """A row of the memory table; the key None is the column of bytes in all."""
    keys: list[Column | None] = [None, *columns]
    table.add_row(label, *(format_bytes(cells[k]) if cells.get(k) else "-" for k in keys))


def weights_of(plan: Plan, part: str) -> dict[Column | None, int]:
    cells: dict[Column | None, int] = {None: 0}
    for use in plan.placements:
        if use.layer.part == part and not use.layer.gathered:
            cells[None] += use.nbytes
            for phase, tier in use.tiers.items():
                cells[phase, tier] = cells.get((phase, tier), 0) + use.nbytes
    return cells


def working_rows(plan: Plan) -> list[tuple[str, dict[Column | None, int]]]:
    """What is needed beside the weights, and where."""
    compute, working = plan.storage.compute_tier, plan.working
    largest = max(use.nbytes for use in plan.placements if not use.layer.gathered)
    runtime: dict[Column | None, int] = {}
    pictures: dict[Column | None, int] = {}
    activations: dict[Column | None, int] = {}
    cache: dict[Column | None, int] = {}
    slots: dict[Column | None, int] = {}
    for phase in plan.workload.phases:
        if compute is Tier.VRAM:
            runtime[phase, Tier.VRAM] = GPU_RUNTIME_BYTES
        runtime[phase, Tier.RAM] = working.runtime_bytes
        pictures[phase, Tier.RAM] = working.picture_bytes
        activations[phase, compute] = working.activation_bytes[phase]
        cache[phase, compute] = working.kv_bytes if phase == "decode" else 0
        if compute is Tier.VRAM:  # every layer passes through RAM on its way to the device
            slots[phase, Tier.RAM] = largest
        slots[phase, compute] = plan.slot_bytes
    rows = [("runtime", runtime), ("pictures", pictures), ("activations", activations)]
    rows += [("key-value cache", cache)] if working.kv_bytes else []
    return rows + ([("slot for a layer", slots)] if any(slots.values()) else [])


def peaks(plan: Plan, columns: Sequence[Column]) -> dict[Column | None, int]:
    rows = [cells for _, cells in working_rows(plan)]
    return {
        (phase, tier): plan.tier_bytes(tier, phase) + sum(c.get((phase, tier), 0) for c in rows)
        for phase, tier in columns
        if tier is not Tier.DISK
    }


def layer_table(plan: Plan) -> Table:
    """One row per layer: its bytes, how often it runs, where it lies in every phase."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name in ("layer", "part"):
        table.add_column(name)
    for name in ("bytes", "passes"):
        table.add_column(name, justify="right")
    for phase in plan.workload.phases:
        table.add_column(phase)
    for use in plan.placements:
        tiers = ["rows" if use.layer.gathered else t.upper() for t in use.tiers.values()]
        table.add_row(
            use.layer.name, use.layer.part, format_bytes(use.nbytes), str(use.passes), *tiers
        )
    if any(use.layer.gathered for use in plan.placements):
        table.caption = "rows: only the rows that are looked up are read, from the file"
        table.caption_justify = "left"
    return table


def budget_lines(plan: Plan) -> list[tuple[str, str]]:
    budget = plan.budget
    lines = [("RAM budget", f"{format_bytes(budget.ram_bytes)} ({budget.ram_reason})")]
    if plan.storage.compute_tier is Tier.VRAM:
        lines.append(("VRAM budget", f"{format_bytes(budget.vram_bytes)} ({budget.vram_reason})"))
    return lines


def decisions(plan: Plan) -> list[tuple[str, str]]:
    """What was decided, each with its reason."""
    storage, attention = plan.storage, plan.storage.attention
    return [
        ("weights", f"{storage.dtype} ({storage.dtype_reason})"),
        ("arithmetic", f"{storage.compute_dtype} ({storage.compute_reason})"),
        ("device", f"{storage.device} ({storage.device_reason})"),
        ("threads", f"{plan.budget.threads.count} ({plan.budget.threads.reason})"),
        ("products", str(storage.products)),
        *((f"{TOWERS[p]} attention", f"{a.backend} ({a.reason})") for p, a in attention.items()),
        ("batch", f"{plan.workload.batch_size} ({plan.workload.batch_reason})"),
    ]


def workload_lines(plan: Plan, model: Model, job: Job) -> list[tuple[str, str]]:
    """What the plan takes the job to be."""
    load, vision = plan.workload, model.architecture.vision
    lines = []
    if "vision" in load.phases:
        crops = "1 crop" if load.image.crops == 1 else f"{load.image.crops} crops"
        which = "the largest of the job" if load.picture_known else "of the tower's own size"
        if vision is not None and vision.naflex:
            asked = job.max_patches is not None
            which = "as --max-patches asks" if asked else "the default of --max-patches"
        lines.append(("a picture", f"{crops}, {load.image.tokens} tokens ({which})"))
        if not load.picture_known:  # one that only its decoding makes larger takes more RAM
            lines.append(("", "a larger one costs more: name pictures to plan for them"))
    if "decode" in load.phases:
        lines.append(("a prompt", f"at most {load.prompt_tokens} tokens beside the picture's"))
        lines.append(("an answer", f"at most {load.new_tokens} tokens"))
    return lines


def least_time(least: Floor) -> str:
    if least.first_token_s is None or least.decode_s_per_token is None:
        return f"{format_seconds(least.image_s)} for each input"
    first, step = format_seconds(least.first_token_s), format_seconds(least.decode_s_per_token)
    return f"{first} to the first token, {step} for each further one"


def job_time(plan: Plan, seconds: float) -> str:
    """How long a job takes at the assumed rates: of captions, that depends on the answers."""
    if "decode" not in plan.workload.phases:
        return f"{format_seconds(seconds)} at the assumed rates"
    return f"{format_seconds(seconds)} if every answer takes {plan.workload.new_tokens} tokens"


def unused_lines(plan: Plan) -> list[str]:
    """Parts of the checkpoint that this job leaves alone."""
    return [f"{part} {format_bytes(n)}" for part, n in plan.unused_bytes.items() if n]


def verdict(plan: Plan) -> Text:
    """Whether the job fits; if it does not, the smallest flags that would do."""
    on_gpu = plan.storage.compute_tier is Tier.VRAM
    if plan.fits:
        peak = f"{format_bytes(plan.peak_ram_bytes)} of RAM"
        peak += f", {format_bytes(plan.peak_vram_bytes)} of VRAM" if on_gpu else ""
        return Text(f"fits: {peak} at the peak", style="bold green")
    wanted = f"--ram {size_flag(plan.smallest_ram_bytes)}"
    wanted += f" --vram {size_flag(plan.smallest_vram_bytes)}" if on_gpu else ""
    return Text(f"does not fit: the smallest that would do is {wanted}", style="bold red")


def format_seconds(seconds: float) -> str:
    """A duration in the largest unit that gives at least 1."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * length or (unit == "s" and seconds >= 1):
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


def plan_fields(plan: Plan, least: Floor, command: str) -> Fields:
    """The plan as JSON (version 1); `per_pass` is of the phase that runs most often."""
    busiest = max(plan.placements, key=lambda use: use.passes).runs_in
    on_gpu = plan.storage.compute_tier is Tier.VRAM
    link = plan.streamed_bytes(busiest, (Tier.RAM, Tier.DISK)) if on_gpu else 0
    working = plan.working
    return {
        "v": 1,
        "model": plan.model,
        "dtype": str(plan.storage.dtype),
        "dtype_reason": plan.storage.dtype_reason,
        "device": plan.storage.device,
        "fits": plan.fits,
        "budget": {"ram_bytes": plan.budget.ram_bytes, "vram_bytes": plan.budget.vram_bytes},
        "layers": [layer_fields(use) for use in plan.placements],
        "unused": dict(plan.unused_bytes),
        "working": {
            "runtime_bytes": working.runtime_bytes,
            "picture_bytes": working.picture_bytes,
            "activation_bytes": max(working.activation_bytes.values()),
            "kv_bytes": working.kv_bytes,
            "slot_bytes": plan.slot_bytes,
        },
        "peak": {"ram_bytes": plan.peak_ram_bytes, "vram_bytes": plan.peak_vram_bytes},
        "per_pass": {"disk_bytes": plan.streamed_bytes(busiest), "link_bytes": link},
        "floor": {
            "first_token_s": least.first_token_s,
            "decode_s_per_token": least.decode_s_per_token,
            "image_s": least.image_s,
        },
        "products": str(plan.storage.products),
        "attention": {
            TOWERS[phase]: {"backend": each.backend, "reason": each.reason}
            for phase, each in plan.storage.attention.items()
        },
        "batch": plan.workload.batch_size,
        "smallest_ram_bytes": plan.smallest_ram_bytes,
        "smallest_vram_bytes": plan.smallest_vram_bytes,
        "command": command,
    }


def layer_fields(use: Placement) -> Fields:
    tiers = {phase: str(tier) for phase, tier in use.tiers.items()}
    return {"name": use.layer.name, "tier": tiers, "bytes": use.nbytes, "passes": use.passes}


def comparison(rows: Iterable[tuple[str, str, str]]) -> Table:
    """Predicted beside measured, one row each."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column("")
    table.add_column("predicted", justify="right", overflow="fold")
    table.add_column("measured", justify="right")
    for row in rows:
        table.add_row(*row)
    return table
