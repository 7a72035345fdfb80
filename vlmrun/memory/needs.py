"""What a model needs at a dtype, on a CPU and on a GPU, whatever this machine has."""

from dataclasses import dataclass

from vlmrun.job import Job, Placing
from vlmrun.memory.attention import choose_attention
from vlmrun.memory.budget import Budget
from vlmrun.memory.plan import Storage, make_plan
from vlmrun.memory.products import choose_products
from vlmrun.memory.workload import decide_compute_dtype, describe, used_phases
from vlmrun.models.checkpoints.dtype import Dtype, float_dtype
from vlmrun.models.model import Model

UNLIMITED = Budget(1 << 60, "unlimited", 1 << 60, "unlimited")
REASON = "to tell what it would need"


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes at the peak of the plainest job, computed by the CPU, and by a GPU.

    ram_bytes, vram_bytes: with all weights that the job uses in that memory; the smallest: with
    all of them read from the disk as they run. gpu_ram_bytes: RAM that a job on a GPU takes.
    """

    ram_bytes: int
    smallest_ram_bytes: int
    vram_bytes: int
    smallest_vram_bytes: int
    gpu_ram_bytes: int


def needs_of(model: Model, dtype: Dtype) -> Needs:
    """Plan one picture of the tower's own size, with the family's prompt and the default number
    of tokens, as `mem-plan` does for a model alone, within budgets that nothing exceeds."""
    job = Job(task=model.family.task, placing=Placing(model=model.source.spec))
    phases = used_phases(model, job)
    load = describe(model, job, phases, [])
    keys = {weight.key for layer in model.layers for weight in layer.weights}
    floats = float_dtype(dtype, model.checkpoint.stored_bytes(sorted(keys)))
    plans = {}
    for device in ("cpu", "cuda:0"):
        compute, _ = decide_compute_dtype(model, None, floats, device)
        attention = choose_attention(
            model.architecture, phases, "auto", compute=compute, device=device
        )
        products = choose_products(dtype, compute, device)
        storage = Storage(dtype, REASON, compute, REASON, device, REASON, attention, products)
        plans[device] = make_plan(model, load, storage=storage, budget=UNLIMITED)
    cpu, gpu = plans.values()
    return Needs(
        ram_bytes=cpu.peak_ram_bytes,
        smallest_ram_bytes=cpu.smallest_ram_bytes,
        vram_bytes=gpu.peak_vram_bytes,
        smallest_vram_bytes=gpu.smallest_vram_bytes,
        gpu_ram_bytes=gpu.peak_ram_bytes,
    )
