"""A plan keeps its promises at every budget: it fits, spreads, puts first what runs most."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from light import (
    ONEVISION,
    ONEVISION_7B,
    ROOMY,
    SIGLIP,
    TINY_ONEVISION,
    TINY_SIGLIP,
    changed,
    model_of,
    storage,
)

from vlmrun.memory.budget import Budget
from vlmrun.memory.plan import Placement, Plan, Tier, choose, make_plan, spread
from vlmrun.memory.working import GPU_RUNTIME_BYTES, Workload
from vlmrun.models.checkpoints.checkpoint import TensorInfo
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.family import Phase, View
from vlmrun.models.layer import Layer, Weight
from vlmrun.models.model import Model

GIB = 1 << 30
UNTIED = changed(TINY_ONEVISION, "text_config", tie_word_embeddings=False)
MODELS = {
    "siglip": model_of(SIGLIP),
    "onevision": model_of(ONEVISION),
    "onevision 7b": model_of(ONEVISION_7B),
    "tiny siglip": model_of(TINY_SIGLIP),
    "tiny onevision": model_of(TINY_ONEVISION),
    "tiny untied": model_of(UNTIED),
}


def load_of(model: Model, kind: str = "pooled", *, batch: int = 1, side: int = 384) -> Workload:
    """One picture per row, and for models that decode 100 tokens of prompt and 128 new ones."""
    decodes = model.family.task == "caption"
    return Workload(
        phases=model.family.phases(model.architecture, kind),
        count=batch,
        image=model.family.image_cost(model.architecture, side, side, View()),
        image_pixels=side * side,
        prompt_tokens=100 if decodes else 0,
        new_tokens=128 if decodes else 0,
        batch_size=batch,
    )


def plan_of(
    model: Model, ram: int, load: Workload | None = None, *, resident: str | None = None
) -> Plan:
    budget = Budget(ram, "for a test")
    load = load or load_of(model)
    return make_plan(model, load, storage=storage(), budget=budget, resident=resident)


def gpu_plan(model: Model, ram: int, vram: int, load: Workload | None = None) -> Plan:
    kept = storage(device="cuda:0")
    budget = Budget(ram, "for a test", vram, "for a test")
    return make_plan(model, load or load_of(model), storage=kept, budget=budget)


def movable(plan: Plan, phase: Phase | None = None) -> list[Placement]:
    return [p for p in plan.placements if not p.layer.gathered and phase in (None, p.runs_in)]


def blocks(plan: Plan, phase: Phase) -> list[Placement]:
    """Layers of a phase that are no norms or the like, in execution order."""
    uses = movable(plan, phase)
    largest = max(use.nbytes for use in uses)
    return [use for use in uses if 16 * use.nbytes >= largest]


def weights(uses: Sequence[Placement]) -> int:
    return sum(use.nbytes for use in uses)


def needed(model: Model, load: Workload | None = None) -> int:
    """RAM with which everything stays."""
    return plan_of(model, ROOMY.ram_bytes, load).peak_ram_bytes


def budgets(model: Model, load: Workload | None = None, *, count: int = 40) -> Iterator[int]:
    """From just below what can be done at all to just above what everything takes."""
    lowest = plan_of(model, 0, load).smallest_ram_bytes
    whole = needed(model, load)
    source = random.Random(5)
    yield from (lowest - 1, lowest, lowest + 1, whole - 1, whole, whole + 1)
    yield from (source.randrange(lowest, whole) for _ in range(count))


def check_promises(plan: Plan) -> None:
    """What holds for every plan on a CPU."""
    fixed = {
        phase: plan.working.runtime_bytes
        + plan.working.picture_bytes
        + plan.working.phase_bytes(phase)
        for phase in plan.workload.phases
    }
    kept = {phase: plan.tier_bytes(Tier.RAM, phase) for phase in fixed}
    assert plan.peak_ram_bytes == plan.slot_bytes + max(fixed[p] + kept[p] for p in fixed)
    assert plan.peak_vram_bytes == plan.smallest_vram_bytes == 0
    assert plan.fits == (plan.budget.ram_bytes >= plan.smallest_ram_bytes)
    assert plan.fits == (plan.peak_ram_bytes <= plan.budget.ram_bytes)
    streamed = sum(plan.streamed_bytes(phase) for phase in fixed)
    largest = max(use.nbytes for use in movable(plan))
    assert plan.slot_bytes in ((0, largest) if not streamed else (largest,))
    assert all(set(p.tiers) == set(fixed) for p in plan.placements)
    assert all(set(p.tiers.values()) == {Tier.DISK} for p in plan.placements if p.layer.gathered)
    for phase in fixed:
        check_spread(plan, phase)


def check_spread(plan: Plan, phase: Phase) -> None:
    gone = [use.tiers[phase] is not plan.storage.compute_tier for use in blocks(plan, phase)]
    if sum(gone) <= len(gone) / 2:
        assert not any(one and other for one, other in pairwise(gone))


@pytest.mark.parametrize("name", MODELS)
def test_everything_stays_where_there_is_room(name: str) -> None:
    model = MODELS[name]
    plan = plan_of(model, needed(model))
    check_promises(plan)
    assert plan.fits
    assert plan.all_resident
    for phase in plan.workload.phases:
        assert plan.resident(phase) == {p.layer.name for p in movable(plan)}
        assert plan.streamed_bytes(phase) == 0
        assert plan.held(phase) == frozenset()
        assert (
            plan.tier_bytes(Tier.RAM, phase) == weights(movable(plan)) == plan.stored_bytes(phase)
        )


@pytest.mark.parametrize("name", MODELS)
def test_one_byte_less_than_everything_needs_and_something_streams(name: str) -> None:
    model = MODELS[name]
    plan = plan_of(model, needed(model) - 1)
    check_promises(plan)
    assert not plan.all_resident
    assert sum(plan.streamed_bytes(phase) for phase in plan.workload.phases) > 0


@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_budget_is_the_smallest(name: str) -> None:
    model = MODELS[name]
    smallest = plan_of(model, ROOMY.ram_bytes).smallest_ram_bytes
    enough, short = plan_of(model, smallest), plan_of(model, smallest - 1)
    assert enough.fits
    assert not short.fits
    assert enough.smallest_ram_bytes == short.smallest_ram_bytes == smallest
    for plan in (enough, short, plan_of(model, 0)):
        check_promises(plan)
        assert plan.peak_ram_bytes >= smallest


@pytest.mark.parametrize("name", MODELS)
def test_no_budget_is_exceeded_by_a_plan_that_fits(name: str) -> None:
    for ram in budgets(MODELS[name]):
        check_promises(plan_of(MODELS[name], ram))


@pytest.mark.parametrize("name", ["siglip", "onevision", "onevision 7b"])
def test_sixty_percent(name: str) -> None:
    model = MODELS[name]
    plan = plan_of(model, needed(model) * 60 // 100)
    check_promises(plan)
    assert plan.fits
    streamed = sum(plan.streamed_bytes(phase) for phase in plan.workload.phases)
    assert streamed >= needed(model) * 40 // 100
    # no more is left on disk than the budget asks for, but for the slot and what a block leaves
    assert streamed < needed(model) * 40 // 100 + 3 * plan.slot_bytes


@pytest.mark.parametrize("name", MODELS)
def test_more_memory_never_streams_more(name: str) -> None:
    model = MODELS[name]
    crossed, moved = [], []
    for ram in sorted(budgets(model)):
        plan = plan_of(model, ram)
        crossed.append(plan.crossing_bytes)
        once = {p: plan.streamed_bytes(p) for p in plan.workload.phases}
        assert plan.crossing_bytes == sum(
            nbytes * (128 if phase == "decode" else 1) for phase, nbytes in once.items()
        )
        moved.append(sum(plan.streamed_bytes(phase) for phase in plan.workload.phases))
    assert crossed == sorted(crossed, reverse=True)
    assert moved == sorted(moved, reverse=True)
    assert crossed[0] > crossed[-1] == 0


@pytest.mark.parametrize("name", ["onevision", "onevision 7b", "tiny onevision", "tiny untied"])
def test_the_decoder_keeps_its_layers_before_the_tower_does(name: str) -> None:
    model = MODELS[name]
    seen = set()
    for ram in budgets(model):
        plan = plan_of(model, ram)
        tower = [p for p in movable(plan, "vision") if p.tiers["vision"] is Tier.RAM]
        decoder = [p for p in movable(plan, "decode") if p.tiers["decode"] is Tier.DISK]
        seen.add((bool(tower), bool(decoder)))
        if tower and decoder:  # into what no decoder layer fits
            assert weights(tower) < max(p.nbytes for p in decoder)
    assert {(True, False), (False, True)} <= seen


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("side", [384, 2304])
@pytest.mark.parametrize("name", ["onevision", "onevision 7b"])
def test_the_same_layers_stay_in_every_phase(name: str, side: int, batch: int) -> None:
    model = MODELS[name]
    load = load_of(model, batch=batch, side=side)
    for ram in budgets(model, load, count=15):
        plan = plan_of(model, ram, load)
        check_promises(plan)
        assert plan.resident("vision") == plan.resident("decode")
        assert plan.held("vision") == plan.held("decode") == frozenset()


MATRICES = r"\.layers\.\d+\.(self_attn|mlp)\.|multi_modal_projector|text_model\.head|lm_head"


def kept_bytes(model: Model, path: str, info: TensorInfo, dtype: Dtype) -> int:
    """Bytes of a tensor that is stored in halves; a tied table counts as the head."""
    numbers = info.nbytes // 2
    if dtype is not Dtype.int8:
        return numbers * dtype.itemsize
    linear = re.search(MATRICES, path) or path in model.architecture.ties
    return numbers + 4 * info.shape[0] if linear and len(info.shape) == 2 else 2 * numbers


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["pooled", "last-hidden", "hidden:-2"])
@pytest.mark.parametrize("dtype", Dtype)
def test_bytes_add_up_to_the_checkpoint(name: str, kind: str, dtype: Dtype) -> None:
    model = MODELS[name]
    plan = make_plan(model, load_of(model, kind), storage=storage(dtype), budget=ROOMY)
    kept = sum(kept_bytes(model, *each, dtype) for each in model.checkpoint.tensors.items())
    assert plan.weight_bytes + sum(plan.unused_bytes.values()) == kept
    used = {p.layer.name for p in plan.placements}
    assert len(used) == len(plan.placements)
    for phase in plan.workload.phases:
        assert sum(plan.tier_bytes(tier, phase) for tier in Tier) == plan.weight_bytes


def test_a_tied_table_counts_once_and_an_untied_one_stays_on_disk() -> None:
    tied, untied = MODELS["tiny onevision"], MODELS["tiny untied"]
    table = 2 * 301 * 16
    sizes = {p.layer.name: p.nbytes for p in plan_of(tied, 0).placements}
    assert sizes["decoder.tokens"] == 0
    assert sum(size for name, size in sizes.items() if name.startswith("head.")) == table
    plan = plan_of(untied, ROOMY.ram_bytes)
    sizes = {p.layer.name: p.nbytes for p in plan.placements}
    assert sizes["decoder.tokens"] == table
    assert plan.tier_bytes(Tier.DISK, "decode") == table
    assert plan.peak_ram_bytes == needed(tied)


def test_pictures_leave_the_text_tower_alone() -> None:
    model = MODELS["siglip"]
    load = load_of(model)
    images = replace(load, phases={"vision": load.phases["vision"]})
    plan = make_plan(model, images, storage=storage(), budget=ROOMY)
    assert {p.layer.part for p in plan.placements} == {"vision"}
    assert plan.unused_bytes.keys() == {"text", "score"}
    assert plan.unused_bytes["text"] == pytest.approx(2 * 449.7e6, rel=5e-4)
    assert plan.weight_bytes == pytest.approx(2 * 428.2e6, rel=5e-4)
    texts = replace(load, phases={"text": load.phases["text"]})
    plan = make_plan(model, texts, storage=storage(), budget=ROOMY)
    assert plan.unused_bytes.keys() == {"vision", "score"}
    assert plan.working.picture_bytes == 0


def test_an_inner_hidden_state_leaves_out_what_lies_behind_it() -> None:
    model = MODELS["siglip"]
    plan = make_plan(model, load_of(model, "hidden:-2"), storage=storage(), budget=ROOMY)
    gone = {layer.name for layer in model.layers if layer.part == "vision"} - {
        p.layer.name for p in plan.placements
    }
    assert gone == {"vision.layers.26", "vision.norm", "vision.head"}
    assert plan.unused_bytes["vision"] == sum(model.layer(n).nbytes(Dtype.bfloat16) for n in gone)


def test_the_decoder_does_not_see_the_norm_of_the_tower() -> None:
    plan = plan_of(MODELS["onevision"], ROOMY.ram_bytes)
    assert plan.unused_bytes == {"vision": 2 * 2 * 1152}
    inner = model_of({**ONEVISION, "vision_feature_layer": -2})
    used = {p.layer.name for p in plan_of(inner, ROOMY.ram_bytes).placements}
    assert "vision.layers.24" in used
    assert "vision.layers.25" not in used


@pytest.mark.parametrize("name", MODELS)
def test_how_often_a_layer_runs(name: str) -> None:
    plan = plan_of(MODELS[name], ROOMY.ram_bytes)
    for p in plan.placements:
        assert p.passes == (128 if p.runs_in == "decode" else 1)
        assert (p.runs_in == "decode") == (p.layer.part in ("decoder", "head"))
    model = MODELS["tiny onevision"]
    load = replace(load_of(model), new_tokens=0)
    assert {p.passes for p in plan_of(model, ROOMY.ram_bytes, load).placements} == {1}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [100, 75, 50, 25, 0])
def test_a_share_that_may_stay(name: str, share: int) -> None:
    model = MODELS[name]
    plan = plan_of(model, ROOMY.ram_bytes, resident=f"{share}%")
    check_promises(plan)
    assert plan.fits
    total = weights(movable(plan))
    assert plan.all_resident == (share == 100)
    for phase in plan.workload.phases:
        kept = plan.stored_bytes(phase)
        assert kept <= total * share // 100
        assert kept > total * share // 100 - max(p.nbytes for p in movable(plan))
    if share == 0:
        assert sum(plan.streamed_bytes(phase) for phase in plan.workload.phases) == total


def test_a_size_that_may_stay() -> None:
    model = MODELS["onevision"]
    plan = plan_of(model, ROOMY.ram_bytes, resident="400MiB")
    check_promises(plan)
    assert 370 << 20 < plan.stored_bytes("decode") <= 400 << 20
    everything = plan_of(model, ROOMY.ram_bytes, resident="400G")
    assert everything == plan_of(model, ROOMY.ram_bytes)
    short = plan_of(model, needed(model) // 2, resident="100%")
    check_promises(short)
    assert short == plan_of(model, needed(model) // 2)


@pytest.mark.parametrize("name", ["onevision", "siglip"])
def test_the_same_question_has_the_same_answer(name: str) -> None:
    model = MODELS[name]
    ram = needed(model) * 3 // 5
    assert plan_of(model, ram) == plan_of(model, ram)
    assert gpu_plan(model, GIB, GIB) == gpu_plan(model, GIB, GIB)


def check_gpu(plan: Plan) -> None:
    """What holds for every plan on a GPU."""
    host = plan.working.runtime_bytes + plan.working.picture_bytes
    held = weights([p for p in plan.placements if Tier.RAM in p.tiers.values()])
    largest = max(p.nbytes for p in movable(plan))
    assert plan.peak_ram_bytes == host + largest + held
    assert plan.peak_vram_bytes == plan.slot_bytes + max(
        GPU_RUNTIME_BYTES + plan.working.phase_bytes(phase) + plan.tier_bytes(Tier.VRAM, phase)
        for phase in plan.workload.phases
    )
    budget = plan.budget
    enough_ram = budget.ram_bytes >= plan.smallest_ram_bytes
    enough_vram = budget.vram_bytes >= plan.smallest_vram_bytes
    assert plan.fits == (enough_ram and enough_vram)
    assert not enough_ram or plan.peak_ram_bytes <= budget.ram_bytes
    assert not enough_vram or plan.peak_vram_bytes <= budget.vram_bytes
    for phase in plan.workload.phases:
        assert plan.resident(phase).isdisjoint(plan.held(phase))
        left = [p.nbytes for p in movable(plan) if p.tiers[phase] is Tier.DISK]
        if left and enough_ram:  # RAM is full before the disk is used
            assert min(left) > budget.ram_bytes - plan.peak_ram_bytes - largest
        assert plan.stored_bytes(phase) == plan.weight_bytes - weights(
            [p for p in plan.placements if p.tiers[phase] is Tier.DISK]
        )


@pytest.mark.parametrize("name", ["siglip", "onevision", "onevision 7b"])
def test_on_a_gpu_layers_take_vram_then_ram_then_disk(name: str) -> None:
    model = MODELS[name]
    whole = gpu_plan(model, ROOMY.ram_bytes, ROOMY.vram_bytes)
    check_gpu(whole)
    assert whole.all_resident
    assert whole.fits
    assert {p.tiers[p.runs_in] for p in movable(whole)} == {Tier.VRAM}
    small = gpu_plan(model, 0, 0)
    source = random.Random(6)
    seen = set()
    for _ in range(40):
        ram = source.randrange(small.smallest_ram_bytes, whole.peak_ram_bytes + 2 * GIB)
        vram = source.randrange(small.smallest_vram_bytes, whole.peak_vram_bytes + GIB)
        plan = gpu_plan(model, ram, vram)
        check_gpu(plan)
        assert plan.fits
        seen |= {p.tiers[p.runs_in] for p in movable(plan)}
    assert seen == set(Tier)
    check_gpu(small)
    assert not small.fits


@pytest.mark.parametrize("name", ["siglip", "onevision", "onevision 7b"])
def test_the_smallest_budgets_of_a_gpu(name: str) -> None:
    model = MODELS[name]
    small = gpu_plan(model, 0, 0)
    ram, vram = small.smallest_ram_bytes, small.smallest_vram_bytes
    for less_ram, less_vram in ((0, 0), (1, 0), (0, 1)):
        plan = gpu_plan(model, ram - less_ram, vram - less_vram)
        check_gpu(plan)
        assert plan.fits == (not less_ram and not less_vram)
    for enough in (ROOMY.ram_bytes, ram):
        plan = gpu_plan(model, enough, ROOMY.vram_bytes)
        check_gpu(plan)
        assert plan.fits
        assert plan.all_resident


@pytest.mark.parametrize("name", ["siglip", "onevision", "onevision 7b"])
def test_with_enough_ram_a_gpu_never_waits_for_the_disk(name: str) -> None:
    model = MODELS[name]
    small = gpu_plan(model, 0, 0)
    for part in range(10):
        plan = gpu_plan(model, ROOMY.ram_bytes, small.smallest_vram_bytes + part * (200 << 20))
        check_gpu(plan)
        assert all(plan.streamed_bytes(phase) == 0 for phase in plan.workload.phases)
        if not plan.all_resident:
            phases = plan.workload.phases
            assert any(plan.streamed_bytes(phase, [Tier.RAM]) > 0 for phase in phases)


def placed(nbytes: int, at: int, passes: int = 1) -> Placement:
    layer = Layer(f"b.{at}", f"b.{at}", "b", "b", (Weight("w", "w", (nbytes // 2,)),))
    return Placement(layer, nbytes, "vision", passes)


@pytest.mark.parametrize("count", [1, 2, 3, 9, 24, 27])
def test_streamed_blocks_are_spread(count: int) -> None:
    uses = [placed(100, at) for at in range(count)]
    for room in range(-50, 100 * count + 50, 50):
        stay = spread(uses, room)
        assert stay == [use for use in uses if use in stay]
        fitting = min(count, max(0, room // 100))
        assert len(stay) == fitting
        gone = [at for at, use in enumerate(uses) if use not in stay]
        gaps = [b - a for a, b in pairwise(gone)]
        if gaps:  # as far apart as whole numbers allow, across the wrap too
            gaps.append(gone[0] + count - gone[-1])
            assert max(gaps) - min(gaps) <= 2
            assert min(gaps) >= count // len(gone) - 1
            assert min(gaps) >= 2 or len(gone) > count / 2


def test_blocks_of_unlike_size_use_the_room_there_is() -> None:
    source = random.Random(7)
    for _ in range(200):
        uses = [placed(2 * source.randint(10, 100), at) for at in range(source.randint(1, 12))]
        total = weights(uses)
        kept = [weights(spread(uses, room)) for room in range(0, total + 10, 10)]
        assert kept == sorted(kept)
        assert all(size <= room for size, room in zip(kept, range(0, total + 10, 10), strict=True))
        assert kept[-1] == total


def test_norms_stay_first_and_frequent_layers_before_rare_ones() -> None:
    norms = [placed(2, at, passes=9) for at in (0, 2)]
    large = [placed(100, at, passes=9) for at in (1, 3)]
    rare = [placed(40, at, passes=1) for at in (4, 5)]
    uses = [norms[0], large[0], norms[1], large[1], *rare]
    assert choose(uses, 1) == []
    assert choose(uses, 3) == [norms[0]]
    assert choose(uses, 83) == [*norms, rare[0]]
    assert choose(uses, 84) == [*norms, *rare]
    assert choose(uses, 104) == [*norms, large[0]]
    assert choose(uses, 204) == [*norms, *large]
    assert set(map(id, choose(uses, 284))) == set(map(id, uses))
