"""Layers come and go by plan: what is resident, what is read, what is given back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from entries import (
    RESIDENCIES,
    Ready,
    load_tiny,
    noise,
    plan_tiny,
    prompted,
    rows_of,
    shifted,
    trace,
)
from folders import model_at
from torch import Tensor, nn

from vlmrun.errors import CheckpointError
from vlmrun.load import load
from vlmrun.memory.cached_model import CachedModelOnlyFullLoad
from vlmrun.memory.plan import Placement, Plan, Tier
from vlmrun.models.family import Phase
from vlmrun.models.layer import Layer
from vlmrun.tasks.embed import embed_images
from vlmrun.tasks.vision import squares

PIXELS = torch.rand(2, 3, 28, 28, generator=torch.Generator().manual_seed(1)) * 2 - 1


def embed(ready: Ready) -> Tensor:
    groups = list(squares(PIXELS))
    return torch.stack(embed_images(ready.entry, ready.model.architecture, groups, "pooled"))


def caption(ready: Ready, *, steps: int = 3) -> Tensor:
    return trace(ready, rows_of(ready, [prompted(ready.model, [noise(1)])]), steps=steps)


def reads(ready: Ready) -> int:
    return ready.entry.bytes_read


def movable(plan: Plan) -> list[Placement]:
    return [use for use in plan.placements if not use.layer.gathered]


def paths(layers: list[Layer]) -> set[str]:
    return {weight.path for layer in layers for weight in layer.weights}


def kept(plan: Plan, phase: Phase) -> list[Layer]:
    return [use.layer for use in movable(plan) if use.layer.name in plan.resident(phase)]


def present(module: nn.Module) -> set[str]:
    """Paths of the parameters that point at weights at this moment."""
    return {name for name, value in module.named_parameters() if not value.is_meta}


def in_memory(ready: Ready, phase: Phase) -> set[str]:
    with ready.entry.use(phase) as module:
        return present(module)


@contextmanager
def failing(ready: Ready, phase: Phase, path: str) -> Iterator[None]:
    """The module at `path` raises instead of running."""

    def fail(*_: object) -> None:
        raise ArithmeticError(path)

    with ready.entry.use(phase) as module:
        hook = module.get_submodule(path).register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("resident", RESIDENCIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_lies_in_memory_is_what_the_plan_says(
    tiny_onevision: Path, resident: str, dtype: str
) -> None:
    """Between calls no other parameter points at a weight, and the bytes are the plan's."""
    ready = load_tiny(tiny_onevision, resident=resident, dtype=dtype)
    phases = tuple(ready.plan.workload.phases)
    assert ready.entry.resident_bytes == 0
    most = max(ready.plan.tier_bytes(Tier.RAM, phase) for phase in phases)
    assert ready.entry.wanted_bytes == most
    caption(ready)
    for phase in (*phases, *phases):
        assert in_memory(ready, phase) == paths(kept(ready.plan, phase))
        assert ready.entry.resident_bytes == ready.plan.tier_bytes(Tier.RAM, phase)
    assert (ready.entry.resident_bytes == 0) == (resident == "0%")
    whole = sum(use.nbytes for use in movable(ready.plan))
    assert (ready.entry.resident_bytes == whole) == (resident == "100%")


@pytest.mark.parametrize("resident", ["0%", "50%"])
def test_a_layer_runs_alone(tiny_onevision: Path, resident: str) -> None:
    """While a layer runs its own weights are bound, those that stay, and no others."""
    ready = load_tiny(tiny_onevision, resident=resident)
    ran = set()

    def watch(use: Placement, root: nn.Module) -> None:
        def look(*_: object) -> None:
            expected = paths([use.layer, *kept(ready.plan, use.runs_in)])
            assert present(root) == expected, use.layer.name
            ran.add(use.layer.name)

        root.get_submodule(use.layer.module).register_forward_pre_hook(look)

    for use in movable(ready.plan):
        with ready.entry.use(use.runs_in) as module:
            watch(use, module)
    caption(ready)
    assert ran == {use.layer.name for use in movable(ready.plan)}


@pytest.mark.parametrize("resident", ["0%", "10%", "20%", "100%"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_reads_the_streamed_layers_and_a_row(
    tiny_onevision: Path, resident: str, dtype: str
) -> None:
    """Exactly; what stays is not read again after the first pass. The file is float32."""
    ready = load_tiny(tiny_onevision, resident=resident, dtype=dtype)
    decoder = ready.model.architecture.decoder
    assert decoder is not None
    rows = rows_of(ready, [prompted(ready.model, [noise(1)])])
    trace(ready, rows)
    read = []
    for steps in 1, 2, 5:
        before = reads(ready)
        trace(ready, rows, steps=steps)
        read.append(reads(ready) - before)
    streamed = 4 // ready.plan.storage.dtype.itemsize * ready.plan.streamed_bytes("decode")
    assert (streamed == 0) == (resident == "100%")
    row = 4 * decoder.width
    prompt = len(set(rows[0].input_ids)) * row
    assert read == [streamed + prompt, 2 * streamed + prompt + row, 5 * streamed + prompt + 4 * row]


@pytest.mark.parametrize("resident", RESIDENCIES)
def test_a_pass_of_the_tower_reads_the_streamed_layers(tiny_siglip: Path, resident: str) -> None:
    ready = load_tiny(tiny_siglip, resident=resident)
    embed(ready)
    for _ in range(2):
        before = reads(ready)
        embed(ready)
        assert reads(ready) - before == ready.plan.streamed_bytes("vision")


def test_what_fits_is_mapped_and_not_read(tiny_siglip: Path, tmp_path: Path) -> None:
    """Float32 on aligned addresses; the same file 8 bytes on is read, once."""
    found = {}
    for shift in 0, 8:
        ready = load_tiny(shifted(tiny_siglip, tmp_path / str(shift), shift))
        tensors = ready.model.checkpoint.tensors
        keys = {weight.key for use in ready.plan.placements for weight in use.layer.weights}
        [place] = {tensors[key].offset % 16 for key in keys}
        embed(ready)
        found[place] = reads(ready)
        assert ready.entry.resident_bytes == ready.plan.weight_bytes
    assert found == {0: 0, 8: ready.plan.weight_bytes}


def test_what_stays_beside_streamed_layers_is_not_mapped(tiny_siglip: Path) -> None:
    """Mapped pages are the kernel's to evict: what the plan keeps lies in memory of its own."""
    ready = load_tiny(tiny_siglip, resident="50%")
    embed(ready)
    assert reads(ready) == ready.plan.weight_bytes
    with ready.entry.use("vision") as module:
        held = [value.data_ptr() for value in module.parameters() if not value.is_meta]
    assert held
    ranges = [
        [int(part, 16) for part in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(".safetensors")
    ]
    assert not any(start <= at < stop for at in held for start, stop in ranges)


@pytest.mark.parametrize("resident", ["0%", "50%", "100%"])
@pytest.mark.parametrize(
    "path",
    [
        "vision_model.embeddings.patch_embedding",
        "vision_model.encoder.layers.0",
        "vision_model.encoder.layers.1.mlp.fc2",
        "vision_model.encoder.layers.2.self_attn.q_proj",
        "vision_model.post_layernorm",
        "vision_model.head.mlp",
    ],
)
def test_after_an_error_inside_a_layer_the_next_call_works(
    tiny_siglip: Path, path: str, resident: str
) -> None:
    ready = load_tiny(tiny_siglip, resident=resident)
    expected = embed(ready)
    with failing(ready, "vision", path), pytest.raises(ArithmeticError, match=path):
        embed(ready)
    assert in_memory(ready, "vision") == paths(kept(ready.plan, "vision"))
    assert torch.equal(embed(ready), expected)


@pytest.mark.parametrize("path", ["model.multi_modal_projector.linear_2", "lm_head.blocks.0"])
def test_after_an_error_between_layers_the_next_call_works(tiny_onevision: Path, path: str) -> None:
    ready = load_tiny(tiny_onevision, resident="0%")
    expected = caption(ready)
    with failing(ready, "vision", path), pytest.raises(ArithmeticError):
        caption(ready)
    assert in_memory(ready, "decode") == set()
    assert torch.equal(caption(ready), expected)


@pytest.mark.parametrize("resident", ["0%", "50%"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_after_a_failed_read_the_next_call_works(
    tiny_siglip: Path, tmp_path: Path, resident: str, share: float
) -> None:
    """The file shrinks before the first use, and is whole again later."""
    folder = shifted(tiny_siglip, tmp_path, 0)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    expected = embed(load_tiny(tiny_siglip))
    ready = load_tiny(folder, resident=resident)
    with file.open("r+b") as opened:
        opened.truncate(int(share * len(whole)))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="ended while"):
            embed(ready)
    with file.open("r+b") as opened:
        opened.write(whole)
    assert torch.equal(embed(ready), expected)
    assert ready.entry.resident_bytes == ready.plan.tier_bytes(Tier.RAM, "vision")


def test_bound_may_be_nested(tiny_siglip: Path) -> None:
    """The outermost decides; the layer is read once, whatever runs inside."""
    ready = load_tiny(tiny_siglip, resident="0%")
    layer = ready.model.layer("vision.layers.1")
    states = torch.zeros(1, 16, 48)
    with torch.inference_mode(), ready.entry.use("vision") as module:
        block = module.get_submodule(layer.module)
        with ready.entry.bound(layer.name):
            first = block(states, None)
            with ready.entry.bound(layer.name):
                assert present(module) == paths([layer])
            assert present(module) == paths([layer])
            assert torch.equal(block(states, None), first)
        assert present(module) == set()
        assert reads(ready) == layer.nbytes(ready.plan.storage.dtype)
        with ready.entry.bound("vision.layers.0"):  # the slot is free
            assert present(module) == paths([ready.model.layer("vision.layers.0")])


def test_shrink_gives_back_the_last_layers(tiny_siglip: Path) -> None:
    ready = load_tiny(tiny_siglip)
    expected = embed(ready)
    held = ready.entry.resident_bytes
    last = kept(ready.plan, "vision")[-1]
    assert ready.entry.shrink(0) == 0
    assert ready.entry.resident_bytes == held
    freed = ready.entry.shrink(1)
    assert freed == last.nbytes(ready.plan.storage.dtype)
    assert ready.entry.resident_bytes == ready.entry.wanted_bytes == held - freed
    assert in_memory(ready, "vision") == paths(kept(ready.plan, "vision")[:-1])
    before = reads(ready)
    assert torch.equal(embed(ready), expected)
    assert reads(ready) - before == freed
    assert ready.entry.resident_bytes == held - freed


@pytest.mark.parametrize("resident", ["100%", "60%"])
def test_shrink_to_nothing(tiny_onevision: Path, resident: str) -> None:
    """In every phase: what was given back streams from then on, to the same bits."""
    ready = load_tiny(tiny_onevision, resident=resident)
    expected = caption(ready)
    held = ready.entry.resident_bytes
    assert ready.entry.shrink(held + 1) == held
    assert ready.entry.resident_bytes == 0
    assert ready.entry.shrink(1) == 0
    for _ in range(2):
        assert torch.equal(caption(ready), expected)
    assert in_memory(ready, "decode") == set()


def by_turns(folder: Path) -> Ready:
    """A plan under which each phase keeps its own layers and none of the other's."""
    model = model_at(folder)
    plan = plan_tiny(model, resident="50%")

    def moved(use: Placement) -> Placement:
        tiers = {p: Tier.RAM if p == use.runs_in else Tier.DISK for p in plan.workload.phases}
        return replace(use, tiers=tiers)

    plan = replace(plan, placements=tuple(moved(use) for use in plan.placements))
    return Ready(model, plan, load(model, plan))


def test_a_phase_sends_away_what_it_does_not_keep(tiny_onevision: Path) -> None:
    """The tower leaves before decode starts and comes back for the next pictures."""
    ready, expected = by_turns(tiny_onevision), caption(load_tiny(tiny_onevision))
    for _ in range(2):
        before = reads(ready)
        assert torch.equal(caption(ready), expected)
        assert reads(ready) > before + ready.plan.weight_bytes
        for phase in "vision", "decode":
            own = [use.layer for use in movable(ready.plan) if use.runs_in == phase]
            assert in_memory(ready, phase) == paths(own)


def test_a_phase_that_could_not_be_entered_is_none(tiny_onevision: Path, tmp_path: Path) -> None:
    """The phase before has lost its layers by then, and reads them again."""
    ready = by_turns(shifted(tiny_onevision, tmp_path, 0))
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    expected = caption(ready)
    in_decode = in_memory(ready, "decode")
    with file.open("r+b") as opened:
        opened.truncate(0)
        with pytest.raises(CheckpointError), ready.entry.use("vision"):
            pass
        opened.write(whole)
    assert in_memory(ready, "decode") == in_decode
    assert torch.equal(caption(ready), expected)


def test_close_gives_everything_back(tiny_siglip: Path) -> None:
    ready = load_tiny(tiny_siglip, resident="60%")
    embed(ready)
    with ready.entry.use("vision") as module:
        pass
    ready.entry.close()
    assert ready.entry.resident_bytes == 0
    assert present(module) == set()


def test_a_full_load_comes_and_goes_whole() -> None:
    made = []

    def make() -> nn.Module:
        made.append(nn.Linear(4, 4))
        return made[-1]

    entry = CachedModelOnlyFullLoad(make, nbytes=80, device="cpu")
    assert (entry.resident_bytes, entry.wanted_bytes, len(made)) == (0, 80, 0)
    assert entry.peak_vram_bytes == 0
    for _ in range(2):
        with entry.use() as module:
            assert module is made[0]
    assert entry.resident_bytes == 80
    assert entry.shrink(0) == 0
    assert entry.resident_bytes == 80
    assert entry.shrink(1) == 80
    assert (entry.resident_bytes, entry.shrink(1)) == (0, 0)
    with entry.use() as module:
        assert module is made[1]
    entry.close()
    assert entry.resident_bytes == 0
