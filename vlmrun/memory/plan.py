"""Where every layer lives in every phase, what that costs, and whether it fits.

Arithmetic only: no weight is read, no module is built. The very same `Plan` is what `mem-plan`
prints and what the loader obeys.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from vlmrun.memory.attention import Attention
from vlmrun.memory.budget import Budget, parse_bytes
from vlmrun.memory.products import PYTORCH, Products
from vlmrun.memory.working import GPU_RUNTIME_BYTES, Working, Workload, working_memory
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.family import Phase
from vlmrun.models.layer import Layer
from vlmrun.models.model import Model

MAX_BATCH = 8


class Tier(StrEnum):
    """Where a layer lies, fastest first."""

    VRAM = "vram"
    RAM = "ram"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Storage:
    """How weights are kept and computed, decided once, with the reasons.

    attention: of every tower, by the phase it runs in.
    """

    dtype: Dtype
    dtype_reason: str
    compute_dtype: Dtype
    compute_reason: str
    device: str
    device_reason: str
    attention: Mapping[Phase, Attention] = field(default_factory=dict)
    products: Products = PYTORCH

    @property
    def compute_tier(self) -> Tier:
        return Tier.RAM if self.device == "cpu" else Tier.VRAM

    @property
    def eager(self) -> frozenset[Phase]:
        """Phases whose attention scores lie in memory."""
        return frozenset(p for p, each in self.attention.items() if each.backend == "eager")


@dataclass(frozen=True, slots=True)
class Placement:
    """A layer of the job: the phase it runs in, how often per batch, its tier in every phase."""

    layer: Layer
    nbytes: int
    runs_in: Phase
    passes: int
    tiers: Mapping[Phase, Tier] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision, made before any weight is read. Bytes throughout."""

    model: str
    storage: Storage
    budget: Budget
    workload: Workload
    placements: tuple[Placement, ...]
    unused_bytes: Mapping[str, int]
    working: Working
    slot_bytes: int
    peak_ram_bytes: int
    peak_vram_bytes: int
    smallest_ram_bytes: int
    smallest_vram_bytes: int

    @property
    def fits(self) -> bool:
        return (
            self.peak_ram_bytes <= self.budget.ram_bytes
            and self.peak_vram_bytes <= self.budget.vram_bytes
        )

    @property
    def weight_bytes(self) -> int:
        """Weights the job uses, ties once."""
        return sum(p.nbytes for p in self.placements)

    @property
    def all_resident(self) -> bool:
        return self.slot_bytes == 0

    def tier_bytes(self, tier: Tier, phase: Phase) -> int:
        """Weights that lie on a tier during a phase; gathered tables count as on disk."""
        return sum(p.nbytes for p in self.placements if p.tiers.get(phase) is tier)

    def stored_bytes(self, phase: Phase) -> int:
        """Weights that stay in memory during a phase, on the device or in RAM."""
        return self.weight_bytes - self.tier_bytes(Tier.DISK, phase)

    def streamed_bytes(self, phase: Phase, tiers: Iterable[Tier] = (Tier.DISK,)) -> int:
        """Weights that cross from those tiers in one pass over the layers of a phase."""
        return sum(
            p.nbytes
            for p in self.placements
            if p.runs_in == phase and not p.layer.gathered and p.tiers[phase] in tiers
        )

    @property
    def crossing_bytes(self) -> int:
        """Weights that cross to the compute tier in a whole batch, all passes counted."""
        tier = self.storage.compute_tier
        return sum(
            p.passes * p.nbytes
            for p in self.placements
            if not p.layer.gathered and p.tiers[p.runs_in] is not tier
        )

    def resident(self, phase: Phase) -> frozenset[str]:
        """Names of the layers that stay on the compute tier throughout a phase."""
        tier = self.storage.compute_tier
        return frozenset(p.layer.name for p in self.placements if p.tiers.get(phase) is tier)

    def held(self, phase: Phase) -> frozenset[str]:
        """Names of the layers that lie in RAM in a phase while a GPU computes."""
        if self.storage.compute_tier is Tier.RAM:
            return frozenset()
        return frozenset(p.layer.name for p in self.placements if p.tiers.get(phase) is Tier.RAM)


def working_of(model: Model, workload: Workload, storage: Storage) -> Working:
    """What is needed beside the weights, as they are kept and computed."""
    return working_memory(
        model.architecture,
        workload,
        storage.compute_dtype,
        device=storage.device,
        compiled=storage.products.compiled,
        eager=storage.eager,
    )


def make_plan(
    model: Model,
    workload: Workload,
    *,
    storage: Storage,
    budget: Budget,
    resident: str | None = None,
) -> Plan:
    """Put every layer the job uses on the fastest tier that has room for it.

    Layers that run most often choose first; of layers alike, those that stream are spread
    evenly between those that stay. The same layers stay in every phase: what one phase could
    keep beside them would be read again whenever it begins. `resident` caps the weights on the
    compute tier: a size or a share of them.
    """
    used = used_layers(model, workload, storage.dtype)
    movable = [use for use in used if not use.layer.gathered]
    working = working_of(model, workload, storage)
    host = working.runtime_bytes + working.picture_bytes
    base = host if storage.compute_tier is Tier.RAM else GPU_RUNTIME_BYTES
    limit = budget.ram_bytes if storage.compute_tier is Tier.RAM else budget.vram_bytes
    fixed = base + max(working.phase_bytes(phase) for phase in workload.phases)
    total, largest = total_bytes(movable), max(use.nbytes for use in movable)
    cap = total if resident is None else min(total, parse_bytes(resident, whole=total))
    slot = 0 if cap == total and fixed + total <= limit else largest
    stay = choose(movable, min(cap, limit - fixed - slot))
    peak = fixed + total_bytes(stay) + slot
    smallest = fixed + largest
    plan = Plan(
        model=model.source.name,
        storage=storage,
        budget=budget,
        workload=workload,
        placements=place(used, workload, {storage.compute_tier: stay}),
        unused_bytes=unused_bytes(model, used, storage.dtype),
        working=working,
        slot_bytes=slot,
        peak_ram_bytes=peak,
        peak_vram_bytes=0,
        smallest_ram_bytes=smallest,
        smallest_vram_bytes=0,
    )
    if storage.compute_tier is Tier.RAM:
        return plan
    staging = largest  # every layer passes through RAM on its way to the device
    held = choose([use for use in movable if use not in stay], budget.ram_bytes - host - staging)
    return replace(
        plan,
        placements=place(used, workload, {Tier.VRAM: stay, Tier.RAM: held}),
        peak_ram_bytes=host + staging + total_bytes(held),
        peak_vram_bytes=peak,
        smallest_ram_bytes=host + staging,
        smallest_vram_bytes=smallest,
    )


def used_layers(model: Model, workload: Workload, dtype: Dtype) -> list[Placement]:
    """Layers of the job in execution order. A decoder runs once for the prompt and once per
    new token after the first; everything else once per batch."""
    phase_of = {block: phase for phase, blocks in workload.phases.items() for block in blocks}
    runs: dict[Phase, int] = {"vision": 1, "text": 1, "decode": max(1, workload.new_tokens)}
    return [
        Placement(layer, layer.nbytes(dtype), phase_of[layer.block], runs[phase_of[layer.block]])
        for layer in model.layers
        if layer.block in phase_of
    ]


def total_bytes(uses: Iterable[Placement]) -> int:
    return sum(use.nbytes for use in uses)


def choose(uses: Sequence[Placement], room: int) -> list[Placement]:
    """Layers that stay within `room` bytes, most often used first."""
    stay: list[Placement] = []
    for passes in sorted({use.passes for use in uses}, reverse=True):
        alike = [use for use in uses if use.passes == passes]
        stay += spread(alike, room - total_bytes(stay))
    return stay


def spread(alike: Sequence[Placement], room: int) -> list[Placement]:
    """As many layers as fit, those that stream evenly spaced: a reader then has the time of
    the resident ones to fetch the next. Norms and the like stay before any block does."""
    largest = max(use.nbytes for use in alike)
    small = take_in_order([use for use in alike if 16 * use.nbytes < largest], room)
    blocks = [use for use in alike if 16 * use.nbytes >= largest]
    left = room - total_bytes(small)
    for streamed in range(len(blocks) + 1):
        gone = {int((i + 0.5) * len(blocks) / streamed) for i in range(streamed)}
        stay = [use for i, use in enumerate(blocks) if i not in gone]
        if total_bytes(stay) <= left:
            return small + stay
    return small


def take_in_order(uses: Sequence[Placement], room: int) -> list[Placement]:
    """The first layers that fit together; what does not fit ends the taking."""
    taken: list[Placement] = []
    for use in uses:
        room -= use.nbytes
        if room < 0:
            break
        taken.append(use)
    return taken


def place(
    used: Sequence[Placement], workload: Workload, kept: Mapping[Tier, Sequence[Placement]]
) -> tuple[Placement, ...]:
    """Write each layer's tier in every phase; what no tier keeps lies on disk."""
    tiers = {use.layer.name: tier for tier, uses in kept.items() for use in uses}
    return tuple(
        replace(use, tiers=dict.fromkeys(workload.phases, tiers.get(use.layer.name, Tier.DISK)))
        for use in used
    )


def unused_bytes(model: Model, used: Sequence[Placement], dtype: Dtype) -> dict[str, int]:
    """Bytes of the checkpoint that this job leaves alone, by part."""
    names = {use.layer.name for use in used}
    left: dict[str, int] = {}
    for layer in model.layers:
        if layer.name not in names:
            left[layer.part] = left.get(layer.part, 0) + layer.nbytes(dtype)
    return left
