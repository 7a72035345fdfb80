"""What a refusal of a job says, and how a run begins."""

import gc
from dataclasses import replace

import pytest

from vlmrun.errors import OutOfBudget
from vlmrun.job import Job, Placing
from vlmrun.memory.budget import Budget
from vlmrun.memory.plan import Plan
from vlmrun.memory.workload import plan_job
from vlmrun.models.model import describe_model
from vlmrun.nn import parallel
from vlmrun.run import agreed, check_budget, uncollected

MIB = 1 << 20


def planned(ram: str, *sizes: tuple[int, int]) -> Plan:
    job = Job(task="caption", placing=Placing(model="demo", ram=ram, device="cpu"))
    return plan_job(describe_model("demo"), job, sizes)


def refused(plan: Plan) -> OutOfBudget:
    with pytest.raises(OutOfBudget) as caught:
        check_budget(plan)
    return caught.value


def test_the_budget_in_the_message_is_the_one_in_the_hint_and_would_do() -> None:
    error = refused(planned("9MiB"))
    size = error.message.rpartition("the smallest budget that would do is ")[2]
    assert error.hint == f"use --ram {size} or more; vlmrun mem-plan shows what takes it"
    check_budget(planned(size))


@pytest.mark.parametrize(
    ("width", "height", "words", "blamed"),
    [(40, 30, "1,200 pixels", False), (8000, 6000, "48.0 megapixels", True)],
)
def test_the_largest_picture_is_named(width: int, height: int, words: str, blamed: bool) -> None:
    error = refused(planned("9MiB", (20, 20), (width, height)))
    assert error.message.endswith(f"; the largest picture has {words}")
    assert ("--max-pixels" in error.hint) == blamed
    assert error.hint.startswith("use --ram ")


def test_every_budget_that_is_too_small_is_named() -> None:
    plan = replace(
        planned("9GiB"),
        budget=Budget(9 * MIB, "as given", 8 * MIB, "as given"),
        peak_vram_bytes=20 * MIB,
        smallest_vram_bytes=10 * MIB + 1,
    )
    ram = f"{-(-plan.smallest_ram_bytes // MIB)}MiB"
    error = refused(plan)
    assert "does not fit 9.0 MiB of RAM and 8.0 MiB of VRAM: the smallest budget that would " in (
        error.message
    )
    assert error.message.endswith(f"is {ram} and 11MiB")
    assert error.hint.startswith(f"use --ram {ram} --vram 11MiB or more")
    enough = replace(plan, budget=replace(plan.budget, ram_bytes=64 << 30))
    assert refused(enough).hint.startswith("use --vram 11MiB or more")


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_is_collected_after_as_it_was_before(collecting: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(OutOfBudget), uncollected():
            check_budget(planned("9MiB" if not gc.isenabled() else "9GiB"))
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize(
    ("room", "batch", "reason"), [(9, 3, "all rows"), (2, 2, "another process")]
)
def test_processes_agree_on_a_batch_that_all_have_room_for(
    room: int, batch: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "least_number", lambda own: min(own, room))
    placing = Placing(model="demo", ram="9GiB", device="cpu")
    job = Job(task="caption", placing=placing, images=("a", "b", "c"))
    model = describe_model("demo")
    plan = agreed(plan_job(model, job, []), model, job, [])
    assert plan.workload.batch_size == batch
    assert plan.workload.batch_reason.startswith(reason)
