"""From a job and a model to a plan: the one path that `mem-plan` and every run share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vlmrun.errors import CheckpointError, UnsupportedModel, UsageError
from vlmrun.job import Job, Placing
from vlmrun.memory.attention import choose_attention, one_row_only
from vlmrun.memory.budget import SHARE, Budget, budget_of, cpu_features, find_device, size_flag
from vlmrun.memory.plan import MAX_BATCH, Plan, Storage, make_plan
from vlmrun.memory.products import choose_products
from vlmrun.memory.working import Workload
from vlmrun.models.checkpoints.dtype import (
    Dtype,
    float_dtype,
    parse_compute_dtype,
    parse_dtype,
    resolve_dtype,
)
from vlmrun.models.companions import COPY, read_image_settings
from vlmrun.models.decoders import KINDS
from vlmrun.models.family import ImageCost, Phase, View
from vlmrun.models.model import Model, check_task
from vlmrun.models.sharding import Shard
from vlmrun.models.siglip2 import MAX_PATCHES

Size = tuple[int, int]

TEMPLATE_TOKENS = 64  # role markers and line breaks that a chat template adds
NATIVE = {
    Dtype.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    Dtype.float16: ("avx512_fp16", "amx_fp16"),
}


def plan_job(model: Model, job: Job, sizes: Sequence[Size]) -> Plan:
    """Plan a job; `sizes` are the (width, height) of its pictures, read from their headers.

    Without pictures the plan is for one of the tower's own size, and says so.

    Raises:
        UsageError: flags contradict each other or the model.
        UnsupportedModel: the model cannot give this kind of output.
    """
    check_task(model.family, model.source.name, job.task)
    phases = used_phases(model, job)
    storage = decide_storage(model, job.placing, phases)
    budget = budget_of(job.placing, device=storage.device)
    load = describe(model, job, phases, sizes)
    if job.placing.batch_size is not None:
        if job.placing.batch_size > 1 and one_row_only(storage.attention, storage.device):
            raise UsageError(
                "--attention flex_attention decodes one row at a time on a CPU, where PyTorch "
                f"compiles no padded batch; --batch-size is {job.placing.batch_size}",
                "use --batch-size 1, or --attention auto",
            )
        return planned(model, load, job.placing.batch_size, storage, budget, job.placing)
    return largest_batch(model, load, storage, budget, job.placing)


def own_placing(placing: Placing, shard: Shard) -> Placing:
    """Where one of several processes on a machine computes, and its part of the memory that is
    free; budgets that are given are each process's own.

    Raises:
        UsageError: one GPU is named for all of them.
    """
    device, _ = find_device(placing.device)
    if shard.local_size > 1 and placing.device.startswith("cuda:"):
        raise UsageError(
            f"--device {placing.device} is one GPU, and {shard.local_size} processes share it",
            "use --device cuda: every process takes the GPU of its own number",
        )
    return replace(
        placing,
        device=placing.device if device == "cpu" else f"cuda:{shard.local_rank}",
        ram=placing.ram or f"{100 * SHARE / shard.local_size:.4g}%",
        processes=shard.local_size,
    )


def used_phases(model: Model, job: Job) -> dict[Phase, tuple[str, ...]]:
    """Phases and blocks the job runs: a job without texts leaves the text tower alone."""
    kind = job.output_kind
    phases = dict(model.family.phases(model.architecture, kind))
    if job.task == "caption":
        return phases
    if job.texts and model.architecture.text is None:
        raise UnsupportedModel(
            f"{model.source.name} cannot embed texts: it has no text tower",
            "texts are embedded by models with both towers, as siglip",
        )
    if job.texts and "text" not in phases:
        raise UsageError(
            f"texts are embedded as pooled vectors only, not as {kind}",
            "leave out --output-kind, or the texts",
        )
    if job.texts and (job.scores or (job.one_array and job.images)):
        check_widths(model)
    wanted = {"text": bool(job.texts), "vision": bool(job.images) or not job.texts}
    return {phase: blocks for phase, blocks in phases.items() if wanted[phase]}


def check_widths(model: Model) -> None:
    """Raises UnsupportedModel where vectors of pictures and texts are not of one length."""
    vision, text = model.architecture.vision, model.architecture.text
    if vision is None or text is None:
        return
    width = text.projection or text.width
    if width != vision.width:
        raise UnsupportedModel(
            f"{model.source.name} makes vectors of {vision.width} numbers of pictures and of "
            f"{width} of texts, which no score compares and no array holds",
            "embed pictures and texts by two commands, without --scores",
        )


def check_shapes(model: Model, job: Job, sizes: Mapping[str, Size]) -> None:
    """Hold pictures seen at their own (width, height) to the one shape that an array has.

    Raises:
        UsageError: two of them make matrices of different length.
    """
    if not (job.one_array and job.dynamic_size) or job.output_kind == "pooled":
        return
    view = view_of(model, job)
    found: dict[int, str] = {}
    for path, (width, height) in sizes.items():
        cost = model.family.image_cost(model.architecture, width, height, view)
        found.setdefault(cost.tokens, path)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise UsageError(
            f"{first} makes {one} vectors and {second} {other}: one array holds one shape",
            "use --format jsonl, or leave out --dynamic-size",
        )


def decide_storage(model: Model, placing: Placing, phases: dict[Phase, tuple[str, ...]]) -> Storage:
    """Decide dtype, compute dtype, device and attention once; everything later carries them."""
    blocks = {block for names in phases.values() for block in names}
    keys = {w.key for layer in model.layers if layer.block in blocks for w in layer.weights}
    stored = model.checkpoint.stored_bytes(sorted(keys))
    dtype, dtype_reason = resolve_dtype(parse_dtype(placing.dtype), stored)
    device, device_reason = find_device(placing.device)
    asked = parse_compute_dtype(placing.compute_dtype)
    compute, reason = decide_compute_dtype(model, asked, float_dtype(dtype, stored), device)
    attention = choose_attention(
        model.architecture, phases, placing.attention, compute=compute, device=device
    )
    products = choose_products(dtype, compute, device)
    return Storage(dtype, dtype_reason, compute, reason, device, device_reason, attention, products)


def decide_compute_dtype(
    model: Model, requested: Dtype | None, stored: Dtype, device: str
) -> tuple[Dtype, str]:
    """As below, but never float16 where the decoder would overflow it.

    Raises:
        UsageError: it is asked for all the same.
    """
    decoder = model.architecture.decoder
    if decoder is not None and KINDS[decoder.kind].overflows_float16:
        if requested is Dtype.float16:
            raise UsageError(
                f"--compute-dtype float16: what passes a {decoder.kind} decoder is larger than "
                "float16 holds",
                "use --compute-dtype float32 or bfloat16; --dtype float16 stores weights so",
            )
        if requested is None and stored is Dtype.float16:
            return Dtype.float32, f"a {decoder.kind} decoder overflows float16"
    return resolve_compute_dtype(requested, stored, device)


def resolve_compute_dtype(
    requested: Dtype | None, stored: Dtype, device: str, features: frozenset[str] | None = None
) -> tuple[Dtype, str]:
    """Choose the dtype arithmetic runs in: the stored one where the device has units for it,
    float32 elsewhere, because a CPU without them computes halves 6-10 times slower."""
    if requested is not None:
        return requested, "asked for"
    if stored is Dtype.float32:
        return stored, "as stored"
    if device != "cpu":
        return stored, "a GPU computes halves natively"
    found = cpu_features() if features is None else features
    units = sorted(found.intersection(NATIVE[stored]))
    if units:
        return stored, f"this CPU has {stored} units ({units[0]})"
    return Dtype.float32, f"this CPU has no {stored} units"


def describe(
    model: Model, job: Job, phases: dict[Phase, tuple[str, ...]], sizes: Sequence[Size]
) -> Workload:
    """The largest of everything the job will meet, and how many batches' worth there is."""
    vision = model.architecture.vision
    side = vision.image_size if vision is not None else 0
    known = list(sizes) or [(side, side)]
    view = view_of(model, job)
    costs = [model.family.image_cost(model.architecture, w, h, view) for w, h in known]
    prompts = job.prompts or ()
    longest = max([len(p.text.encode()) for p in prompts] or [len(model.family.default_prompt)])
    caption = job.task == "caption"
    return Workload(
        phases=phases,
        count=max(len(job.images) * max(1, len(prompts)), len(job.texts), 1),
        image=ImageCost(max(c.crops for c in costs), max(c.tokens for c in costs)),
        image_pixels=max(width * height for width, height in known),
        prompt_tokens=longest + len(job.system.encode()) + TEMPLATE_TOKENS if caption else 0,
        new_tokens=job.generation.max_new_tokens if caption else 0,
        picture_known=bool(sizes),
    )


def view_of(model: Model, job: Job) -> View:
    """How the job's pictures are looked at, the model's own settings filled in.

    Raises:
        UsageError: a flag is given that is not for this model.
        CheckpointError: the image processor's settings are missing, or say no number of patches.
    """
    vision = model.architecture.vision
    naflex = vision is not None and vision.naflex
    if job.max_patches is not None and not naflex:
        raise UsageError(
            f"--max-patches: {model.source.name} sees every picture as a square",
            "it is for SigLIP 2 NaFlex models; leave it out",
        )
    if job.dynamic_size and (naflex or model.family.task != "embed"):
        raise UsageError(
            f"--dynamic-size: {model.source.name} is no SigLIP tower of a fixed size",
            "leave it out",
        )
    most = job.max_patches
    if naflex and most is None and (job.images or not job.texts):
        most = read_max_patches(model)
    return View(job.detail, most, job.dynamic_size)


def read_max_patches(model: Model) -> int:
    """What the image processor's settings say, else the default of its class.

    Raises:
        CheckpointError: there are no settings, or the number is none.
    """
    if model.source.folder is None:  # known from the packaged catalogue alone
        return MAX_PATCHES
    file, settings = read_image_settings(model)
    most = settings.get("max_num_patches", MAX_PATCHES)
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise CheckpointError(f"{file}: max_num_patches is {most!r}, not a positive number", COPY)
    return most


def flags_that_fit(plan: Plan) -> dict[str, str]:
    """The flags, by name without dashes, whose budgets are too small, with sizes that would do."""
    wanted: dict[str, str] = {}
    if plan.peak_ram_bytes > plan.budget.ram_bytes:
        wanted["ram"] = size_flag(plan.smallest_ram_bytes)
    if plan.peak_vram_bytes > plan.budget.vram_bytes:
        wanted["vram"] = size_flag(plan.smallest_vram_bytes)
    return wanted


def planned(
    model: Model,
    load: Workload,
    batch: int,
    storage: Storage,
    budget: Budget,
    placing: Placing,
    reason: str = "asked for",
) -> Plan:
    sized = replace(load, batch_size=batch, batch_reason=reason)
    return make_plan(model, sized, storage=storage, budget=budget, resident=placing.resident)


def largest_batch(
    model: Model, load: Workload, storage: Storage, budget: Budget, placing: Placing
) -> Plan:
    """The batch of up to 8 that fits with the fewest weights crossing per row, the largest of
    equals: where all weights stay for one row, they stay for the batch; where they do not, a
    batch shares each crossing as long as it does not push out more than that saves."""
    most, reason = MAX_BATCH, "the most that is tried"
    if one_row_only(storage.attention, storage.device):
        most, reason = 1, "flex_attention decodes one row at a time on a CPU"
    if load.count <= most:
        most, reason = load.count, "all rows of the job"
    reasons = dict.fromkeys(range(1, most), "more would not fit, or read more for each row")
    reasons[most] = reason
    plans = [
        planned(model, load, batch, storage, budget, placing, reasons[batch])
        for batch in range(most, 0, -1)
    ]
    return min(
        [plan for plan in plans if plan.fits] or plans[-1:],
        key=lambda plan: plan.crossing_bytes / plan.workload.batch_size,
    )
