"""Tables add up, sizes and times read well."""

import itertools
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from vlmrun.job import Job, Placing
from vlmrun.memory.budget import Budget, format_bytes
from vlmrun.memory.floor import Floor
from vlmrun.memory.plan import Plan, Tier, make_plan
from vlmrun.memory.workload import plan_job
from vlmrun.models.model import describe_model
from vlmrun.report import (
    comparison,
    decisions,
    format_seconds,
    layer_table,
    memory_table,
    peaks,
    plan_fields,
    verdict,
)


def planned(spec: str, ram: str) -> Plan:
    model = describe_model(spec)
    job = Job(task=model.family.task, placing=Placing(model=spec, ram=ram))
    return plan_job(model, job, [])


def planned_on_gpu(spec: str, vram_bytes: int, ram_bytes: int) -> Plan:
    model = describe_model(spec)
    usual = planned(spec, "64GiB")
    storage = replace(usual.storage, device="cuda:0", compute_dtype=usual.storage.dtype)
    budget = Budget(ram_bytes, "as given", vram_bytes, "as given")
    return make_plan(model, usual.workload, storage=storage, budget=budget)


def shown(renderable: RenderableType) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().splitlines()


@pytest.mark.parametrize("spec", ["demo", "demo-siglip", "siglip", "llava-onevision-7b"])
@pytest.mark.parametrize("ram", ["1GiB", "4GiB", "64GiB"])
def test_the_highest_column_is_the_peak(spec: str, ram: str) -> None:
    plan = planned(spec, ram)
    columns = list(itertools.product(plan.workload.phases, (Tier.RAM,)))
    assert max(peaks(plan, columns).values()) == plan.peak_ram_bytes
    last = shown(memory_table(plan))[-1]
    assert format_bytes(plan.peak_ram_bytes) in last


@pytest.mark.parametrize("vram_bytes", [3 << 30, 8 << 30, 40 << 30])
@pytest.mark.parametrize("ram_bytes", [4 << 30, 32 << 30])
def test_on_a_gpu_both_tiers_add_up(vram_bytes: int, ram_bytes: int) -> None:
    plan = planned_on_gpu("llava-onevision-7b", vram_bytes, ram_bytes)
    columns = list(itertools.product(plan.workload.phases, (Tier.VRAM, Tier.RAM)))
    found = peaks(plan, columns)
    highest = [
        max(found[phase, tier] for phase in plan.workload.phases) for tier in (Tier.VRAM, Tier.RAM)
    ]
    assert highest == [plan.peak_vram_bytes, plan.peak_ram_bytes]
    fields = plan_fields(plan, Floor(1.0, 1.0, 1.0), "")
    crossing = sum(
        use.nbytes
        for use in plan.placements
        if use.runs_in == "decode"
        and use.tiers["decode"] is not Tier.VRAM
        and not use.layer.gathered
    )
    assert fields["per_pass"] == {
        "disk_bytes": plan.streamed_bytes("decode"),
        "link_bytes": crossing,
    }
    assert verdict(plan).plain.startswith("fits: " if plan.fits else "does not fit: ")
    assert "VRAM" in verdict(plan).plain or "--vram" in verdict(plan).plain


def test_every_part_has_its_bytes_on_each_tier() -> None:
    plan = planned("llava-onevision-7b", "4GiB")
    row = next(line for line in shown(memory_table(plan)) if line.startswith("decoder weights"))
    cells = [cell.strip() for cell in row.removeprefix("decoder weights").split("  ") if cell]
    uses = [
        use for use in plan.placements if use.layer.part == "decoder" and not use.layer.gathered
    ]
    tiers = [("vision", "ram"), ("vision", "disk"), ("decode", "ram"), ("decode", "disk")]
    expected = [sum(use.nbytes for use in uses)]
    expected += [sum(use.nbytes for use in uses if use.tiers[p] == tier) for p, tier in tiers]
    assert [cell for cell in cells if cell] == [format_bytes(n) if n else "-" for n in expected]


def test_a_token_table_lies_on_no_tier() -> None:
    plan = planned("llava-onevision-7b", "64GiB")
    table = shown(memory_table(plan))
    row = next(line for line in table if line.startswith("token table (rows are read)"))
    (gathered,) = [use.nbytes for use in plan.placements if use.layer.gathered]
    cells = row.removeprefix("token table (rows are read)").split("  ")
    assert [cell.strip() for cell in cells if cell.strip()] == [format_bytes(gathered), *"----"]
    assert plan.all_resident
    decoder = next(line for line in table if line.startswith("decoder weights"))
    assert decoder.endswith(" -")
    assert not any(
        "token table" in line for line in shown(memory_table(planned("siglip", "64GiB")))
    )


def test_tables_of_rows_are_marked() -> None:
    lines = shown(layer_table(planned("demo", "1GiB")))
    assert any(line.startswith("decoder.tokens") and line.count("rows") == 2 for line in lines)
    assert lines[-1].startswith("rows: only the rows that are looked up")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0034567, "3.46 ms"),
        (1.5, "1.5 s"),
        (119.0, "119 s"),
        (150.0, "2.5 min"),
        (3 * 3600.0, "3 h"),
        (2.5 * 86400, "2.5 days"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_comparison_has_both_sides() -> None:
    line = shown(comparison([("RAM peak", "1.00 GiB", "900 MiB")]))[-1]
    assert [cell.strip() for cell in line.split("  ") if cell] == [
        "RAM peak",
        "1.00 GiB",
        "900 MiB",
    ]


def test_attention_has_a_line_and_a_field_for_every_tower() -> None:
    plan = planned("llava-onevision-0.5b", "64GiB")
    lines = [line for line in decisions(plan) if line[0].endswith("attention")]
    assert lines == [
        ("vision attention", "sdpa (PyTorch's fused kernels)"),
        ("decoder attention", "sdpa (PyTorch's fused kernels)"),
    ]
    fields = plan_fields(plan, Floor(1.0, 1.0, 1.0), "")
    sdpa = {"backend": "sdpa", "reason": "PyTorch's fused kernels"}
    assert fields["attention"] == {"vision": sdpa, "decoder": sdpa}
