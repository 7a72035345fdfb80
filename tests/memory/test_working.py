"""Working memory follows the shapes: it grows with what is asked, and counts what is known."""

import random
from dataclasses import replace

import pytest
from light import ONEVISION, ONEVISION_7B, SIGLIP, TINY_VISION, model_of

from vlmrun.memory.working import (
    CROPS_AT_ONCE,
    GPU_RUNTIME_RAM_BYTES,
    RUNTIME_BYTES,
    SCORE_BYTES,
    TEXTS_AT_ONCE,
    TOKEN_ENTRY_BYTES,
    Working,
    Workload,
    working_memory,
)
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.family import ImageCost
from vlmrun.models.model import Model

MODELS = {
    "siglip": model_of(SIGLIP),
    "onevision": model_of(ONEVISION),
    "onevision 7b": model_of(ONEVISION_7B),
    "vision": model_of(TINY_VISION),
}
PLAIN = ImageCost(crops=2, tokens=1485)


def load_of(model: Model, **changes: object) -> Workload:
    phases = model.family.phases(model.architecture, "pooled")
    load = Workload(
        phases=phases,
        count=8,
        image=PLAIN,
        image_pixels=384 * 384,
        prompt_tokens=100,
        new_tokens=128,
    )
    return replace(load, **changes)


def working_of(
    model: Model, load: Workload, dtype: Dtype = Dtype.float32, device: str = "cpu"
) -> Working:
    return working_memory(model.architecture, load, dtype, device=device)


def figures(working: Working) -> list[int]:
    phases = sorted(working.activation_bytes)
    return [
        working.runtime_bytes,
        working.picture_bytes,
        working.kv_bytes,
        *(working.activation_bytes[phase] for phase in phases),
        *(working.phase_bytes(phase) for phase in phases),
    ]


def larger(source: random.Random, load: Workload) -> Workload:
    """A workload that asks for more in one way, of eight."""
    image, more = load.image, source.randint(1, 9)
    return source.choice(
        [
            replace(load, batch_size=load.batch_size + more),
            replace(load, image=replace(image, crops=image.crops + more)),
            replace(load, image=replace(image, tokens=image.tokens + 50 * more)),
            replace(load, image_pixels=load.image_pixels * (1 + more)),
            replace(load, prompt_tokens=load.prompt_tokens + 20 * more),
            replace(load, new_tokens=load.new_tokens + 20 * more),
        ]
    )


@pytest.mark.parametrize("name", MODELS)
def test_who_asks_for_more_never_needs_less(name: str) -> None:
    model, source = MODELS[name], random.Random(8)
    for _ in range(20):
        load = load_of(model)
        for _ in range(10):
            more = larger(source, load)
            before, after = figures(working_of(model, load)), figures(working_of(model, more))
            assert all(b <= a for b, a in zip(before, after, strict=True)), (load, more)
            load = more


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        ({"batch_size": 2}, "vision"),
        ({"image": ImageCost(10, 1485)}, "vision"),
        ({"batch_size": 2}, "decode"),
        ({"image": ImageCost(2, 3000)}, "decode"),
        ({"prompt_tokens": 500}, "decode"),
        ({"new_tokens": 500}, "decode"),
    ],
)
def test_each_need_is_counted(change: dict[str, object], phase: str) -> None:
    model = MODELS["onevision"]
    load = load_of(model)
    before, after = (working_of(model, replace(load, **c)) for c in ({}, change))
    assert after.phase_bytes(phase) > before.phase_bytes(phase)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "per_token"), [("onevision", 12_288), ("onevision 7b", 57_344)])
def test_keys_and_values_take_what_is_known_of_the_models(name: str, per_token: int) -> None:
    model = MODELS[name]
    load = load_of(model, batch_size=3)
    positions = 3 * (1485 + 100 + 128)
    for dtype in Dtype:
        expected = positions * per_token * dtype.itemsize // 2
        working = working_of(model, load, dtype)
        assert working.kv_bytes == expected
        extra = working.phase_bytes("decode") - working.activation_bytes["decode"]
        assert extra == expected
        assert working.phase_bytes("vision") == working.activation_bytes["vision"]


def test_logits_and_masks_are_counted() -> None:
    model = MODELS["onevision"]
    one, two, three = (
        working_of(model, load_of(model, batch_size=b)).activation_bytes["decode"]
        for b in (1, 2, 3)
    )
    logits, tokens = 4 * 152_000 * 4, 1485 + 100
    assert one > logits + tokens * 3 * 4864 * 4
    assert three - two > logits + tokens * 3 * 4864 * 4
    # a single row is not masked; every further one adds a mask of its own
    assert (two - one) - (three - two) == 2 * tokens**2 * 4


def test_pictures_are_counted_in_ram_whatever_the_device() -> None:
    model = MODELS["onevision"]
    load = load_of(model, batch_size=2, image_pixels=10_000_000)
    cpu, gpu = (working_of(model, load, device=device) for device in ("cpu", "cuda:0"))
    crop = 3 * 384 * 384 * 4
    assert cpu.picture_bytes == gpu.picture_bytes == 200_000_000 + (4 + 4 + 2 * 4) * crop
    assert gpu.runtime_bytes - cpu.runtime_bytes == GPU_RUNTIME_RAM_BYTES - RUNTIME_BYTES > 0
    assert cpu.activation_bytes == gpu.activation_bytes


@pytest.mark.parametrize(
    ("count", "ahead"), [(1, 0), (3, 0), (4, 1), (5, 2), (6, 3), (7, 3), (900, 3)]
)
def test_pixels_of_the_next_batch_are_counted_where_there_is_one(count: int, ahead: int) -> None:
    model = MODELS["onevision"]
    load = load_of(model, count=count, batch_size=3)
    crop = 3 * 384 * 384 * 4
    together = 2 * CROPS_AT_ONCE  # of the six crops of the batch
    expected = 20 * 384 * 384 + (2 * 3 + 2 * ahead + together) * crop
    assert working_of(model, load).picture_bytes == expected


def test_what_does_not_run_needs_nothing() -> None:
    model = MODELS["siglip"]
    load = load_of(model)
    images = working_of(model, replace(load, phases={"vision": load.phases["vision"]}))
    texts = working_of(model, replace(load, phases={"text": load.phases["text"]}))
    assert images.activation_bytes.keys() == {"vision"}
    assert texts.activation_bytes.keys() == {"text"}
    assert images.runtime_bytes == RUNTIME_BYTES
    assert texts.runtime_bytes == RUNTIME_BYTES + 32_000 * TOKEN_ENTRY_BYTES
    assert (texts.picture_bytes, texts.kv_bytes, images.kv_bytes) == (0, 0, 0)


def test_a_captioning_model_loads_its_tokenizer() -> None:
    model = MODELS["onevision"]
    working = working_of(model, load_of(model))
    assert working.runtime_bytes == RUNTIME_BYTES + 152_000 * TOKEN_ENTRY_BYTES


def test_crops_and_texts_pass_a_block_a_few_at_a_time() -> None:
    model = MODELS["siglip"]
    tokens, width, wide = 729, 1152, 4304

    def vision(crops: int) -> int:
        load = load_of(model, image=ImageCost(crops, 729))
        return working_of(model, load).activation_bytes["vision"]

    inside = (6 * width + 2 * wide) * tokens * 4  # of one crop
    kept = 2 * width * tokens * 4
    assert vision(CROPS_AT_ONCE) - vision(CROPS_AT_ONCE - 1) == inside + kept
    assert vision(CROPS_AT_ONCE + 1) - vision(CROPS_AT_ONCE) == kept
    texts = [
        working_of(model, load_of(model, batch_size=b)).activation_bytes["text"]
        for b in (TEXTS_AT_ONCE - 1, TEXTS_AT_ONCE, TEXTS_AT_ONCE + 1)
    ]
    assert texts[0] < texts[1] == texts[2]


def test_several_feature_layers_are_kept_side_by_side() -> None:
    two = model_of({**ONEVISION, "vision_feature_layer": [-2, -5]})
    one = MODELS["onevision"]
    states = 2 * 729 * 1152 * 4
    more = (
        working_of(two, load_of(two)).activation_bytes["vision"]
        - working_of(one, load_of(one)).activation_bytes["vision"]
    )
    assert more == 2 * states


@pytest.mark.parametrize("name", MODELS)
def test_halves_take_half_of_the_numbers(name: str) -> None:
    model = MODELS[name]
    full, half = (working_of(model, load_of(model), d) for d in (Dtype.float32, Dtype.bfloat16))
    for phase in full.activation_bytes:
        assert half.activation_bytes[phase] < full.activation_bytes[phase]
        assert 2 * half.activation_bytes[phase] > full.activation_bytes[phase]
    assert 2 * half.kv_bytes == full.kv_bytes


def test_eager_scores_lie_in_memory_for_what_passes_a_block_together() -> None:
    """Of four crops at once, not of all 37; of a whole batch in the decoder, with its mask."""
    model = MODELS["onevision 7b"]
    load = load_of(model, image=ImageCost(crops=37, tokens=8721), batch_size=2)
    scores = {"vision": CROPS_AT_ONCE * 16 * 729**2, "decode": 2 * (28 + 1) * 8821**2}
    fused = working_of(model, load).activation_bytes
    for phase, count in scores.items():
        eager = working_memory(
            model.architecture, load, Dtype.float32, device="cpu", eager=frozenset({phase})
        ).activation_bytes
        assert eager == {**fused, phase: fused[phase] + SCORE_BYTES * count}
