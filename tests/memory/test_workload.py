"""From a job to its plan: phases, dtypes, the largest of everything, the batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from light import (
    ONEVISION,
    ONEVISION_7B,
    SIGLIP,
    TINY_ONEVISION,
    TINY_SIGLIP,
    TINY_VISION,
    model_of,
    words,
)

from vlmrun.errors import UnsupportedModel, UsageError
from vlmrun.job import Generation, Job, Placing, Prompt
from vlmrun.memory.plan import MAX_BATCH, Plan, make_plan
from vlmrun.memory.workload import (
    TEMPLATE_TOKENS,
    describe,
    plan_job,
    resolve_compute_dtype,
    used_phases,
)
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.family import View
from vlmrun.models.model import Model

SIGLIP_MODEL, VISION_MODEL = model_of(SIGLIP), model_of(TINY_VISION)
CAPTION_MODEL, TINY_CAPTION = model_of(ONEVISION), model_of(TINY_ONEVISION)
PICTURES = tuple(f"{i}.jpg" for i in range(20))


def placing(**changes: Any) -> Placing:
    return Placing(**{"model": "x", "device": "cpu", "ram": "64GiB", **changes})


def caption(place: Placing | None = None, **changes: Any) -> Job:
    return Job(task="caption", placing=place or placing(), **changes)


def embed(place: Placing | None = None, **changes: Any) -> Job:
    return Job(task="embed", placing=place or placing(), **changes)


def workload(model: Model, job: Job, sizes: list[tuple[int, int]]) -> Any:
    return describe(model, job, used_phases(model, job), sizes)


@pytest.mark.parametrize(
    ("job", "phases"),
    [
        (embed(images=("a",)), {"vision"}),
        (embed(texts=("a",)), {"text"}),
        (embed(images=("a",), texts=("b",)), {"vision", "text"}),
        (embed(), {"vision"}),
        (embed(images=("a",), output_kind="last-hidden"), {"vision"}),
        (embed(images=("a",), output_kind="hidden:-2"), {"vision"}),
    ],
)
def test_only_the_towers_that_are_asked_for_run(job: Job, phases: set[str]) -> None:
    assert set(used_phases(SIGLIP_MODEL, job)) == phases
    plan = plan_job(SIGLIP_MODEL, job, [])
    assert {p.layer.part for p in plan.placements} == phases
    assert plan.unused_bytes.keys() >= {"vision", "text"} - phases


@pytest.mark.parametrize(
    ("model", "kind", "expected"),
    [
        (VISION_MODEL, "pooled", "cannot embed texts: it has no text tower"),
        (VISION_MODEL, "last-hidden", "cannot embed texts: it has no text tower"),
        (SIGLIP_MODEL, "last-hidden", "texts are embedded as pooled vectors only"),
        (SIGLIP_MODEL, "hidden:-2", "texts are embedded as pooled vectors only"),
    ],
)
def test_texts_that_cannot_be_embedded(model: Model, kind: str, expected: str) -> None:
    kinds = UnsupportedModel if model is VISION_MODEL else UsageError
    with pytest.raises(kinds) as caught:
        plan_job(model, embed(texts=("a",), output_kind=kind), [])
    assert expected in words(caught.value)


def test_scores_need_vectors_of_one_length() -> None:
    """Said by the plan, before a weight is read."""
    text = {**TINY_SIGLIP["text_config"], "projection_size": 20}
    model = model_of({**TINY_SIGLIP, "text_config": text})
    job = embed(images=("a",), texts=("b",))
    assert plan_job(model, job, []).fits
    assert plan_job(model, replace(job, images=(), one_array=True), []).fits
    with pytest.raises(UnsupportedModel, match="vectors of 16 numbers of pictures and of 20"):
        plan_job(model, replace(job, one_array=True), [])
    with pytest.raises(UnsupportedModel, match="vectors of 16 numbers of pictures and of 20"):
        plan_job(model, replace(job, scores=True), [])
    assert plan_job(model_of(TINY_SIGLIP), replace(job, scores=True), []).fits


@pytest.mark.parametrize(
    ("model", "job", "other"),
    [(SIGLIP_MODEL, caption(), "vlmrun embed"), (CAPTION_MODEL, embed(), "vlmrun caption")],
)
def test_the_other_command_is_named(model: Model, job: Job, other: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"made for {other}$") as caught:
        plan_job(model, job, [])
    assert other in words(caught.value).split(" | ")[1]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (placing(dtype="int4"), "unknown dtype 'int4'"),
        (placing(compute_dtype="tf32"), "unknown dtype 'tf32'"),
        (placing(device="tpu"), "unknown device 'tpu'"),
        (placing(ram="much"), "'much' is not a size"),
        (placing(resident="half"), "'half' is not a size"),
        (placing(resident="101%"), "'101%' is more than everything"),
        (placing(vram="1G"), "--vram is given, but the job runs on the CPU"),
    ],
)
def test_flags_that_cannot_be(place: Placing, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_job(SIGLIP_MODEL, embed(place), [])
    assert expected in words(caught.value)


@pytest.mark.parametrize(
    ("asked", "stored", "device", "features", "chosen", "reason"),
    [
        (None, "float32", "cpu", {"amx_bf16"}, "float32", "as stored"),
        (None, "bfloat16", "cpu", {"avx2"}, "float32", "this CPU has no bfloat16 units"),
        (None, "bfloat16", "cpu", set(), "float32", "this CPU has no bfloat16 units"),
        (
            None,
            "bfloat16",
            "cpu",
            {"amx_bf16", "avx512_bf16"},
            "bfloat16",
            "this CPU has bfloat16 units (amx_bf16)",
        ),
        (None, "bfloat16", "cpu", {"bf16"}, "bfloat16", "this CPU has bfloat16 units (bf16)"),
        (None, "float16", "cpu", {"avx512_bf16"}, "float32", "this CPU has no float16 units"),
        (None, "float16", "cpu", {"avx512_fp16"}, "float16", "units (avx512_fp16)"),
        (None, "float16", "cuda:0", set(), "float16", "a GPU computes halves natively"),
        (None, "float32", "cuda:0", set(), "float32", "as stored"),
        ("bfloat16", "float32", "cpu", set(), "bfloat16", "asked for"),
        ("float32", "float16", "cuda:0", set(), "float32", "asked for"),
    ],
)
def test_what_arithmetic_runs_in(
    asked: str | None, stored: str, device: str, features: set[str], chosen: str, reason: str
) -> None:
    found = resolve_compute_dtype(
        None if asked is None else Dtype(asked), Dtype(stored), device, frozenset(features)
    )
    assert found[0] is Dtype(chosen)
    assert reason in found[1]


def test_this_cpu_is_asked_where_no_features_are_given() -> None:
    from vlmrun.memory.budget import cpu_features

    given = resolve_compute_dtype(None, Dtype.bfloat16, "cpu", cpu_features())
    assert resolve_compute_dtype(None, Dtype.bfloat16, "cpu") == given


def test_dtypes_are_decided_once() -> None:
    plan = plan_job(SIGLIP_MODEL, embed(placing(dtype="fp16", compute_dtype="fp32")), [])
    storage = plan.storage
    assert (storage.dtype, storage.dtype_reason) == (Dtype.float16, "asked for")
    assert (storage.compute_dtype, storage.compute_reason) == (Dtype.float32, "asked for")
    assert (storage.device, storage.device_reason) == ("cpu", "asked for")
    stored = plan_job(SIGLIP_MODEL, embed(), []).storage
    assert (stored.dtype, stored.dtype_reason) == (Dtype.bfloat16, "as stored in the checkpoint")


def test_the_largest_of_everything() -> None:
    sizes = [(100, 4000), (384, 384), (2000, 1500)]
    job = caption(
        images=("a", "b", "c"),
        prompts=(Prompt("short"), Prompt("é" * 30, name="long")),
        system="be brief",
        generation=Generation(max_new_tokens=7),
    )
    load = workload(CAPTION_MODEL, job, sizes)
    costs = [
        CAPTION_MODEL.family.image_cost(CAPTION_MODEL.architecture, w, h, View()) for w, h in sizes
    ]
    assert load.image.crops == max(cost.crops for cost in costs)
    assert load.image.tokens == max(cost.tokens for cost in costs)
    assert load.image_pixels == 3_000_000
    assert load.prompt_tokens == 60 + len("be brief") + TEMPLATE_TOKENS
    assert load.new_tokens == 7
    assert load.count == 6


def test_a_job_without_pictures_is_planned_for_one() -> None:
    load = workload(CAPTION_MODEL, caption(), [])
    assert (load.count, load.image.crops, load.image.tokens) == (1, 2, 1485)
    assert load.image_pixels == 384 * 384
    assert load.prompt_tokens == len("Describe this image.") + TEMPLATE_TOKENS
    assert load.new_tokens == 128
    low = workload(CAPTION_MODEL, caption(detail="low"), [])
    assert (low.image.crops, low.image.tokens) == (1, 730)


def test_vectors_need_no_prompt_and_make_no_tokens() -> None:
    load = workload(SIGLIP_MODEL, embed(images=("a", "b"), texts=("x", "y", "z")), [(10, 20)])
    assert (load.count, load.prompt_tokens, load.new_tokens) == (3, 0, 0)
    assert (load.image.crops, load.image_pixels) == (1, 200)


@pytest.mark.parametrize(
    "words_of_prompt", ["a red apple", "Größe?", "日本語の説明", "🍎🍎🍎", "\n\n"]
)
def test_a_prompt_has_no_more_tokens_than_its_bound(
    words_of_prompt: str, tiny_onevision: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_onevision)
    content = [{"type": "image"}, {"type": "text", "text": words_of_prompt}]
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    chat = [system, {"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert words_of_prompt.strip() in text
    job = caption(prompts=(Prompt(words_of_prompt),), system="Be brief.")
    bound = workload(TINY_CAPTION, job, []).prompt_tokens
    assert len(tokenizer(text)["input_ids"]) <= bound


def plan_with(job_model: Model, job: Job, ram: int | str) -> Plan:
    placed = placing(ram=str(ram), resident=job.placing.resident, batch_size=job.placing.batch_size)
    return plan_job(job_model, Job(task=job.task, placing=placed, images=job.images), [(384, 384)])


def test_the_batch_is_as_large_as_the_job() -> None:
    for count, batch in ((1, 1), (2, 2), (5, 5), (MAX_BATCH, MAX_BATCH), (20, MAX_BATCH)):
        job = caption(images=PICTURES[:count])
        assert plan_with(CAPTION_MODEL, job, "64GiB").workload.batch_size == batch


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_a_batch_that_is_asked_for_is_kept(batch: int) -> None:
    job = caption(placing(batch_size=batch), images=PICTURES)
    assert plan_with(CAPTION_MODEL, job, "64GiB").workload.batch_size == batch
    short = plan_with(CAPTION_MODEL, job, "700MiB")
    assert short.workload.batch_size == batch
    assert not short.fits


def by_batch(job: Job, ram: int) -> list[Plan]:
    return [
        plan_with(CAPTION_MODEL, caption(placing(batch_size=b), images=job.images), ram)
        for b in range(1, MAX_BATCH + 1)
    ]


def test_the_batch_never_costs_residency() -> None:
    job = caption(images=PICTURES)
    roomy = by_batch(job, 64 << 30)
    assert all(plan.all_resident for plan in roomy)
    for fitting, plan in enumerate(roomy, start=1):
        chosen = plan_with(CAPTION_MODEL, job, plan.peak_ram_bytes)
        assert chosen.all_resident
        assert chosen.workload.batch_size == fitting
        just_less = plan_with(CAPTION_MODEL, job, plan.peak_ram_bytes - 1)
        if fitting > 1:
            assert just_less.workload.batch_size == fitting - 1
            assert just_less.all_resident


def test_where_layers_stream_a_batch_shares_the_crossing() -> None:
    job = caption(images=PICTURES)
    streaming = by_batch(job, 0)
    for fitting, plan in enumerate(streaming, start=1):
        chosen = plan_with(CAPTION_MODEL, job, plan.smallest_ram_bytes)
        assert chosen.fits
        assert not chosen.all_resident
        assert chosen.workload.batch_size == fitting
    nothing = plan_with(CAPTION_MODEL, job, streaming[0].smallest_ram_bytes - 1)
    assert not nothing.fits
    assert nothing.workload.batch_size == 1


@pytest.mark.parametrize("side", [384, 2304])
def test_a_batch_does_not_push_out_more_than_it_saves(side: int) -> None:
    model = model_of(ONEVISION_7B)

    def plan_at(ram: int, batch: int | None) -> Plan:
        place = placing(ram=str(ram), batch_size=batch, compute_dtype="float32")
        return plan_job(model, caption(place, images=PICTURES), [(side, side)])

    def cost(plan: Plan) -> float:
        return plan.crossing_bytes / plan.workload.batch_size

    batches = set()
    lowest, whole = plan_at(0, 1).smallest_ram_bytes, plan_at(10**12, 1).peak_ram_bytes
    for ram in range(lowest, whole, (whole - lowest) // 12):
        chosen = plan_at(ram, None)
        others = [plan_at(ram, batch) for batch in range(1, MAX_BATCH + 1)]
        assert chosen.fits
        assert cost(chosen) == min(cost(plan) for plan in others if plan.fits)
        batches.add(chosen.workload.batch_size)
    assert len(batches) > 1
    assert 1 in batches or side == 384


def test_the_smallest_budget_is_that_of_one_row() -> None:
    job = caption(images=PICTURES)
    short = plan_with(CAPTION_MODEL, job, 1)
    assert plan_with(CAPTION_MODEL, job, short.smallest_ram_bytes).fits
    assert not plan_with(CAPTION_MODEL, job, short.smallest_ram_bytes - 1).fits


def test_the_share_that_stays_is_handed_on() -> None:
    job = embed(placing(resident="50%"), images=("a",))
    plan = plan_job(SIGLIP_MODEL, job, [(384, 384)])
    same = make_plan(
        SIGLIP_MODEL, plan.workload, storage=plan.storage, budget=plan.budget, resident="50%"
    )
    assert plan == same
    assert 0 < plan.streamed_bytes("vision") < plan.weight_bytes


def test_a_vision_tower_alone_is_planned_for_pictures() -> None:
    plan = plan_job(VISION_MODEL, embed(images=("a",)), [(30, 40)])
    assert plan.unused_bytes == {}
    assert plan.fits
    assert model_of(TINY_SIGLIP).architecture.vision == VISION_MODEL.architecture.vision
