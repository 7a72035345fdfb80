"""What a model needs is what a plan of it takes."""

from dataclasses import fields

import pytest
from light import ONEVISION, SIGLIP, model_of

from vlmrun.job import Job, Placing
from vlmrun.memory.needs import Needs, needs_of
from vlmrun.memory.working import COMPILED_BYTES
from vlmrun.memory.workload import plan_job
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.model import Model

MODELS = [model_of(SIGLIP), model_of(ONEVISION)]
IDS = ["siglip", "onevision"]


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("model", MODELS, ids=IDS)
def test_needs_on_a_cpu_are_those_of_the_plan(model: Model, dtype: Dtype) -> None:
    task = model.family.task
    roomy = Job(task=task, placing=Placing(model="x", device="cpu", ram="1TiB", dtype=str(dtype)))
    plan = plan_job(model, roomy, [])
    needs = needs_of(model, dtype)
    assert plan.all_resident
    assert (needs.ram_bytes, needs.smallest_ram_bytes) == (
        plan.peak_ram_bytes,
        plan.smallest_ram_bytes,
    )


@pytest.mark.parametrize("model", MODELS, ids=IDS)
def test_on_a_gpu_weights_take_vram_and_one_of_them_ram(model: Model) -> None:
    needs = needs_of(model, Dtype.bfloat16)
    task = model.family.task
    plan = plan_job(model, Job(task=task, placing=Placing(model="x", device="cpu", ram="1TiB")), [])
    movable = [use.nbytes for use in plan.placements if not use.layer.gathered]
    assert needs.vram_bytes - needs.smallest_vram_bytes == sum(movable) - max(movable)
    assert needs.gpu_ram_bytes < needs.ram_bytes + (2 << 30)
    assert needs.gpu_ram_bytes > 2 << 30  # CUDA's libraries are mapped


@pytest.mark.parametrize("model", MODELS, ids=IDS)
def test_halves_need_less_and_the_least_is_less(model: Model) -> None:
    """But for the compiler of the loops that halves are multiplied by on a CPU."""
    whole, half = needs_of(model, Dtype.float32), needs_of(model, Dtype.bfloat16)
    for each in fields(Needs):
        compiler = COMPILED_BYTES if each.name == "smallest_ram_bytes" else 0
        assert getattr(half, each.name) < getattr(whole, each.name) + compiler
    assert half.smallest_ram_bytes < half.ram_bytes
    assert half.smallest_vram_bytes < half.vram_bytes


def test_weights_are_most_of_what_a_large_model_needs() -> None:
    """LLaVA-OneVision-0.5B holds 1.79 GB at two bytes; 27 MB of the vision tower are not used."""
    needs = needs_of(model_of(ONEVISION), Dtype.float16)
    assert 1.7e9 < needs.vram_bytes - needs.smallest_vram_bytes < 1.79e9
