"""What `vlmrun doctor` shows: tables and JSON."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vlmrun.memory.budget import format_bytes
from vlmrun.memory.machine import Choice, Machine
from vlmrun.memory.products import Table as Kernels
from vlmrun.memory.products import entry_of, tuned_path
from vlmrun.memory.rates import Rate

NONE = "-"
Found = tuple[Kernels | None, str]  # the table of kernels, and why that one, or what ails it


def diagnosis(
    machine: Machine, rates: Iterable[Rate], choices: Iterable[Choice], table: Found
) -> Group:
    """The machine, its rates, and what is chosen on it, with the reasons."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for row in fact_rows(machine):
        facts.add_row(*row)
    facts.add_row("kernels", table_words(*table))
    measured = make_table("measured", "", "how, or why not")
    for rate in rates:
        measured.add_row(rate.name.replace("_", " "), format_rate(rate), rate.words)
    chosen = make_table("", "for", "chosen", "because")
    last = ""
    for each in choices:
        if each.about != last:
            chosen.add_section()
        about = "" if each.about == last else each.about
        chosen.add_row(about, each.subject, each.choice, each.reason)
        last = each.about
    return Group(facts, Text(""), measured, Text(""), chosen)


def fact_rows(machine: Machine) -> Iterator[tuple[str, str]]:
    """What is known without measuring, one fact a line."""
    budget, found = machine.budget, machine.processors
    versions = (f"{name} {number or 'missing'}" for name, number in machine.versions.items())
    yield "versions", ", ".join(versions)
    quota = "" if found.quota is None else f", a quota of {found.quota:g} CPUs"
    counts = f"{counted(found.cores, 'core')}, {counted(found.cpus, 'CPU')} to use{quota}"
    yield "CPU", f"{machine.cpu}: {counts}"
    yield "load", f"{machine.load:.2f} in the last minute; rates below are what others leave"
    yield "features", ", ".join(machine.features) or "none that is looked for"
    yield "threads", f"{budget.threads.count} ({budget.threads.reason})"
    yield "device", f"{machine.device} ({machine.device_reason})"
    for at, gpu in enumerate(machine.gpus):
        sizes = f"{format_bytes(gpu.total_bytes)}, {format_bytes(gpu.free_bytes)} free"
        yield f"GPU {at}", f"{gpu.name}: {sizes}"
    available = f"{format_bytes(machine.available_bytes)} available"
    yield "memory", f"{format_bytes(machine.total_bytes)}, {available}"
    yield "memory limit", limit_words(machine)
    yield "RAM budget", f"{format_bytes(budget.ram_bytes)} ({budget.ram_reason})"
    yield "VRAM budget", f"{format_bytes(budget.vram_bytes)} ({budget.vram_reason})"


def table_words(table: Kernels | None, reason: str) -> str:
    if table is None:
        return reason
    return f"{table.name} ({table.measured}); {reason}"


def table_fields(table: Kernels | None, reason: str) -> dict[str, object]:
    """`path` is where this machine's own table lies, or would."""
    return {
        "table": None if table is None else table.name,
        "reason": reason,
        "measured": None if table is None else table.measured,
        "path": str(tuned_path()),
        "rows": None if table is None else [entry_of(row) for row in table.rows],
    }


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def limit_words(machine: Machine) -> str:
    limit = machine.limit
    if limit is None:
        return "no cgroup sets one"
    size, left = format_bytes(limit.limit_bytes), format_bytes(limit.free_bytes)
    return f"{size}, {left} left ({limit.file})"


def make_table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for head in heads[:-1]:
        table.add_column(head, no_wrap=True)
    table.add_column(heads[-1], overflow="fold")
    return table


def format_rate(rate: Rate) -> str:
    """Decimal units, as everywhere for rates: `31.4 GB/s`, `1.2 TFLOP/s`."""
    if rate.value is None:
        return NONE
    noun = "B/s" if rate.unit == "bytes_per_s" else "FLOP/s"
    value, prefix = rate.value / 1e9, "G"
    if value >= 1000:
        value, prefix = value / 1000, "T"
    return f"{value:.3g} {prefix}{noun}"


def diagnosis_fields(
    machine: Machine, rates: Iterable[Rate], choices: Iterable[Choice], table: Found
) -> dict[str, object]:
    """All of it as JSON (version 1); a rate that could not be measured is null, and says why."""
    budget, found, limit = machine.budget, machine.processors, machine.limit
    chosen: dict[str, dict[str, object]] = {}
    for each in choices:
        answer = {"choice": each.choice, "reason": each.reason}
        chosen.setdefault(each.about, {})[each.subject] = answer
    return {
        "v": 1,
        "versions": machine.versions,
        "cpu": {
            "name": machine.cpu,
            "cores": found.cores,
            "cpus": found.cpus,
            "quota": found.quota,
            "load": machine.load,
            "features": list(machine.features),
        },
        "threads": {"count": budget.threads.count, "reason": budget.threads.reason},
        "device": {"name": machine.device, "reason": machine.device_reason},
        "gpus": [asdict(gpu) for gpu in machine.gpus],
        "memory": {
            "total_bytes": machine.total_bytes,
            "available_bytes": machine.available_bytes,
            "limit_bytes": None if limit is None else limit.limit_bytes,
            "limit_free_bytes": None if limit is None else limit.free_bytes,
            "limit_file": None if limit is None else str(limit.file),
        },
        "budget": {
            "ram_bytes": budget.ram_bytes,
            "ram_reason": budget.ram_reason,
            "vram_bytes": budget.vram_bytes,
            "vram_reason": budget.vram_reason,
        },
        "measured": {
            rate.name: {
                rate.unit: None if rate.value is None else round(rate.value),
                "how": rate.words,
            }
            for rate in rates
        },
        "kernels": table_fields(*table),
        "choices": chosen,
    }
