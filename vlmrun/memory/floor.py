"""The least time a plan implies, from assumed rates: no run with these rates is faster.

A pass over the layers of a phase takes as long as the slowest of what it must do at once: read
the streamed layers, move them to the device, read every weight from memory, do the arithmetic.
"""

from dataclasses import dataclass

from vlmrun.memory.plan import Placement, Plan, Tier
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.family import Phase
from vlmrun.models.model import Model
from vlmrun.models.shapes import Decoder

DISK_BYTES_PER_S = 800_000_000
LINK_BYTES_PER_S = 12_000_000_000  # RAM to a GPU over PCIe
MEMORY_BYTES_PER_S = {"cpu": 20_000_000_000, "cuda": 500_000_000_000}
CORE_FLOP_PER_S = 50_000_000_000  # one core, fp32; twice that where halves have units
GPU_FLOP_PER_S = 40_000_000_000_000


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine is assumed to do per second, and the assumption in words."""

    disk_bytes: int
    link_bytes: int
    memory_bytes: int
    flop: int
    reason: str


@dataclass(frozen=True, slots=True)
class Floor:
    """Least seconds. `image_s` is one row (a picture, or a text where there are no pictures)
    of a long job, with an answer of full length; `first_token_s` and `decode_s_per_token` are
    of a whole batch, and None where nothing is decoded."""

    first_token_s: float | None
    decode_s_per_token: float | None
    image_s: float
    batch_size: int = 1

    def run_s(self, inputs: int, *, tokens: int) -> float:
        """A run over so many inputs that made so many new tokens in all."""
        if self.first_token_s is None or self.decode_s_per_token is None:
            return inputs * self.image_s
        steps = max(0, tokens - inputs)
        return (inputs * self.first_token_s + steps * self.decode_s_per_token) / self.batch_size


def assumed_rates(plan: Plan) -> Rates:
    """Rates for the device a plan is for; on a CPU, of as many cores as the plan has threads."""
    disk = f"disk {DISK_BYTES_PER_S / 1e9:g} GB/s"
    if plan.storage.device != "cpu":
        memory, flop = MEMORY_BYTES_PER_S["cuda"], GPU_FLOP_PER_S
        words = f"GPU memory {memory / 1e9:g} GB/s, {flop / 1e12:g} TFLOP/s"
        reason = f"{disk}, link {LINK_BYTES_PER_S / 1e9:g} GB/s, {words}"
        return Rates(DISK_BYTES_PER_S, LINK_BYTES_PER_S, memory, flop, reason)
    threads = plan.budget.threads.count
    per_core = CORE_FLOP_PER_S * (1 if plan.storage.compute_dtype is Dtype.float32 else 2)
    memory = MEMORY_BYTES_PER_S["cpu"]
    noun = "core" if threads == 1 else "cores"
    words = f"memory {memory / 1e9:g} GB/s, {per_core / 1e9:g} GFLOP/s on each of {threads} {noun}"
    return Rates(DISK_BYTES_PER_S, LINK_BYTES_PER_S, memory, per_core * threads, f"{disk}, {words}")


def floor(plan: Plan, model: Model, *, rates: Rates | None = None) -> Floor:
    """Least times of a plan; `rates` = None takes the assumed ones."""
    rates = rates or assumed_rates(plan)
    batch = plan.workload.batch_size
    if "decode" not in plan.workload.phases:
        phase: Phase = "vision" if "vision" in plan.workload.phases else "text"
        seconds = pass_seconds(plan, rates, phase, encoder_flop(plan, model, phase))
        return Floor(None, None, seconds / batch, batch)
    seen = pass_seconds(plan, rates, "vision", encoder_flop(plan, model, "vision"))
    first = seen + pass_seconds(plan, rates, "decode", prefill_flop(plan, model))
    step = pass_seconds(plan, rates, "decode", step_flop(plan, model), plan.working.kv_bytes)
    steps = max(0, plan.workload.new_tokens - 1)
    return Floor(first, step, (first + steps * step) / batch, batch)


def pass_seconds(plan: Plan, rates: Rates, phase: Phase, flop: int, read_bytes: int = 0) -> float:
    """One pass of a batch over the layers of a phase; `read_bytes` are read beside weights."""
    on_gpu = plan.storage.device != "cpu"
    link = plan.streamed_bytes(phase, (Tier.RAM, Tier.DISK)) if on_gpu else 0
    return max(
        plan.streamed_bytes(phase) / rates.disk_bytes,
        link / rates.link_bytes,
        (plan.streamed_bytes(phase, tuple(Tier)) + read_bytes) / rates.memory_bytes,
        flop / rates.flop,
    )


def encoder_flop(plan: Plan, model: Model, phase: Phase) -> int:
    """One batch through a tower: every matrix meets every token, every token every other."""
    architecture, load = model.architecture, plan.workload
    if phase == "vision":
        assert architecture.vision is not None
        width, tokens = architecture.vision.width, load.crop_tokens(architecture)
    else:
        assert architecture.text is not None
        width, tokens = architecture.text.width, architecture.text.positions
    sequences = load.crops if phase == "vision" else load.batch_size
    blocks = sum(".layers." in name for name in load.phases[phase])
    attention = 4 * blocks * sequences * tokens**2 * width
    return 2 * matrix_numbers(plan, phase) * sequences * tokens + attention


def prefill_flop(plan: Plan, model: Model) -> int:
    """The prompt of a batch through the decoder; the head sees last positions only."""
    decoder, load = decoder_of(model), plan.workload
    tokens = load.prefill_tokens
    body = matrix_numbers(plan, "decode", part="decoder") * tokens
    head = matrix_numbers(plan, "decode", part="head")
    causal = decoder.layers * tokens**2 * decoder.heads * decoder.head_dim
    return 2 * load.batch_size * (body + head + causal)


def step_flop(plan: Plan, model: Model) -> int:
    """One new token of every row of a batch."""
    decoder, load = decoder_of(model), plan.workload
    past = load.prefill_tokens * decoder.layers * decoder.heads * decoder.head_dim
    return 2 * load.batch_size * (matrix_numbers(plan, "decode") + 2 * past)


def decoder_of(model: Model) -> Decoder:
    assert model.architecture.decoder is not None
    return model.architecture.decoder


def matrix_numbers(plan: Plan, phase: Phase, *, part: str | None = None) -> int:
    """Numbers of a phase's matrices that are multiplied with, not looked up in."""

    def counts(use: Placement) -> bool:
        return use.runs_in == phase and not use.layer.gathered and part in (None, use.layer.part)

    return sum(
        weight.numel
        for use in plan.placements
        if counts(use)
        for weight in use.layer.weights
        if len(weight.shape) > 1
    )
