"""The least times of a plan, by hand."""

from dataclasses import replace

import pytest

from vlmrun.job import Generation, Job, Placing
from vlmrun.memory.floor import Rates, assumed_rates, floor
from vlmrun.memory.plan import Plan
from vlmrun.memory.threads import Threads
from vlmrun.memory.workload import plan_job
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.model import Model, describe_model

NEVER = 1 << 80  # a rate that is no limit


def planned(spec: str, **changes: str | int) -> tuple[Plan, Model]:
    model = describe_model(spec)
    placing = Placing(model=spec, **{"ram": "64GiB", "compute_dtype": "float32", **changes})
    job = Job(task=model.family.task, placing=placing, generation=Generation(max_new_tokens=11))
    return plan_job(model, job, []), model


def with_threads(plan: Plan, count: int) -> Plan:
    return replace(plan, budget=replace(plan.budget, threads=Threads(count, "for a test")))


def rates(**given: int) -> Rates:
    numbers = dict.fromkeys(("disk_bytes", "link_bytes", "memory_bytes", "flop"), NEVER)
    return Rates(**{**numbers, **given}, reason="")


def test_memory_sets_the_pace_of_decoding_in_ram() -> None:
    plan, model = planned("llava-onevision-0.5b")
    least = floor(plan, model, rates=rates(memory_bytes=1_000_000_000))
    decoder = sum(p.nbytes for p in plan.placements if p.layer.part in ("decoder", "head"))
    table = model.layer("decoder.tokens").nbytes(Dtype.float16)
    vision = sum(p.nbytes for p in plan.placements if p.layer.part in ("vision", "projector"))
    assert least.decode_s_per_token == pytest.approx(
        (decoder - table + plan.working.kv_bytes) / 1e9
    )
    assert least.first_token_s == pytest.approx((vision + decoder - table) / 1e9)
    assert least.image_s == pytest.approx(least.first_token_s + 10 * least.decode_s_per_token)


def test_the_disk_sets_the_pace_of_streaming() -> None:
    plan, model = planned("llava-onevision-7b", ram="4GiB")
    least = floor(plan, model, rates=rates(disk_bytes=1_000_000_000))
    assert least.decode_s_per_token == pytest.approx(plan.streamed_bytes("decode") / 1e9)
    assert plan.streamed_bytes("decode") > 10e9


def test_arithmetic_sets_the_pace_of_an_encoder() -> None:
    plan, model = planned("siglip")
    least = floor(plan, model, rates=rates(flop=10**9))
    assert (least.first_token_s, least.decode_s_per_token) == (None, None)
    vision = model.architecture.vision
    assert vision is not None
    # Linear layers of 27 blocks, scores and weighted sums; embeddings and the head are under 5 %.
    block = 4 * vision.width**2 + 2 * vision.width * vision.mlp_width
    linear = 2 * 27 * block * vision.tokens
    attention = 27 * 4 * vision.tokens**2 * vision.width
    assert linear + attention < least.image_s * 1e9 < 1.05 * (linear + attention)


def test_a_batch_shares_the_crossing_of_weights() -> None:
    one, model = planned("siglip", batch_size=1)
    four, _ = planned("siglip", batch_size=4)
    slow = rates(memory_bytes=10**9)
    assert floor(one, model, rates=slow).image_s == 4 * floor(four, model, rates=slow).image_s


def test_a_run_takes_the_time_of_the_tokens_it_made() -> None:
    for batch in (1, 4):
        plan, model = planned("llava-onevision-0.5b", batch_size=batch)
        least = floor(plan, model)
        assert least.run_s(8, tokens=8 * 11) == pytest.approx(8 * least.image_s)
        assert least.first_token_s is not None
        assert least.run_s(8, tokens=8) == pytest.approx(8 * least.first_token_s / batch)
        assert least.run_s(8, tokens=0) == least.run_s(8, tokens=8) < 8 * least.image_s
    least = floor(*planned("siglip"))
    assert least.run_s(8, tokens=0) == 8 * least.image_s


def test_the_link_counts_on_a_gpu_only() -> None:
    plan, model = planned("siglip", ram="1GiB")
    slow = rates(link_bytes=1)
    assert floor(plan, model, rates=slow).image_s < 1
    on_gpu = replace(plan, storage=replace(plan.storage, device="cuda:0"))
    assert floor(on_gpu, model, rates=slow).image_s > 1e8


def test_rates_name_what_they_assume() -> None:
    plan, _ = planned("siglip")
    whole = assumed_rates(with_threads(plan, 4))
    assert whole.flop == 4 * 50_000_000_000
    assert whole.reason == "disk 0.8 GB/s, memory 20 GB/s, 50 GFLOP/s on each of 4 cores"
    native = replace(plan, storage=replace(plan.storage, compute_dtype=Dtype.bfloat16))
    one = assumed_rates(with_threads(native, 1))
    assert one.flop == 100_000_000_000
    assert one.reason.endswith("100 GFLOP/s on each of 1 core")
    on_gpu = replace(plan, storage=replace(plan.storage, device="cuda:0"))
    assert "link 12 GB/s" in assumed_rates(on_gpu).reason
