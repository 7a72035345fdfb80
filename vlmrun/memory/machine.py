"""What this machine is, what it does per second, and what vlmrun chooses on it."""

import os
import platform
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from vlmrun.errors import VlmrunError
from vlmrun.job import Backend, Placing
from vlmrun.memory.attention import FLASH, FLASH_PACKAGE, refusal_by_machine
from vlmrun.memory.budget import (
    Budget,
    Gpu,
    Limit,
    budget_of,
    find_device,
    memory_limits,
    query_driver,
)
from vlmrun.memory.disk import measure_disk
from vlmrun.memory.products import (
    Kernels,
    Table,
    choose_products,
    packaged_table,
    read_table,
    this_cpu,
    tuned_path,
)
from vlmrun.memory.threads import TOPOLOGY, Processors, find_processors
from vlmrun.memory.workload import resolve_compute_dtype
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.checkpoints.hub_cache import cache_folder

if TYPE_CHECKING:
    from vlmrun.memory.rates import Rate
    from vlmrun.memory.tuning import Timing

PACKAGES = ("vlmrun", "torch", "transformers", "safetensors", "numpy", "numba", FLASH_PACKAGE)
LEAST_BUFFER_BYTES = 256 << 20
HEAD = 64  # numbers of an attention head that kernels are tried with


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known without measuring. load: threads that ran or waited to, on average over the
    last minute; limit: the tightest of the cgroups above this process."""

    versions: dict[str, str | None]
    cpu: str
    features: tuple[str, ...]
    processors: Processors
    load: float
    total_bytes: int
    available_bytes: int
    limit: Limit | None
    gpus: tuple[Gpu, ...]
    device: str
    device_reason: str
    budget: Budget


@dataclass(frozen=True, slots=True)
class Choice:
    """What `about` chooses for `subject`, and why."""

    about: str
    subject: str
    choice: str
    reason: str


def look_around(*, device: str, threads: int | None) -> Machine:
    """Ask the kernel, the driver and the installed packages.

    Raises:
        UsageError: as `find_device` and `choose_threads`.
    """
    import psutil  # late, as in budget.py

    found, reason = find_device(device)
    memory = psutil.virtual_memory()
    cpu = this_cpu()
    return Machine(
        versions={"python": platform.python_version(), **{p: installed(p) for p in PACKAGES}},
        cpu=cpu.name,
        features=cpu.features,
        processors=find_processors(),
        load=os.getloadavg()[0],
        total_bytes=memory.total,
        available_bytes=memory.available,
        limit=min(memory_limits(), key=lambda limit: limit.free_bytes, default=None),
        gpus=tuple(query_driver()),
        device=found,
        device_reason=reason,
        budget=budget_of(Placing(model="", device=device, threads=threads), device=found),
    )


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def measure(machine: Machine) -> "Iterator[Rate]":
    """Measure one thing after the other, each for less than a second or two."""
    from vlmrun.memory.rates import Rate, measure_rates  # late: imports torch

    yield from measure_rates(
        machine.device,
        buffer_bytes=buffer_bytes(machine),
        threads=machine.budget.threads.count,
    )
    folder = scratch_folder()
    try:
        disk = measure_disk(folder)
    except OSError as error:
        yield Rate("disk_read", "bytes_per_s", None, f"{folder}: {error.strerror}")
        return
    how = "direct I/O" if disk.direct else "no direct I/O there, memory may have helped"
    words = f"{disk.file_bytes >> 20} MiB in {folder}, {how}"
    yield Rate("disk_read", "bytes_per_s", disk.bytes_per_s, words)


def tune(machine: Machine) -> "Iterator[tuple[Timing, int]]":
    """Measure which kernels multiply fastest on this CPU, for about a minute, and write the table
    that counts from then on; gives every timing, and how many there may be in all.

    Raises:
        OutputError: the table cannot be written.
        VlmrunError: there are no compiled loops, and so no choice, or too little was measured.
    """
    from vlmrun.memory import tuning  # late: imports torch

    path, threads = tuned_path(), machine.budget.threads.count
    tuning.check_writable(path)
    pairs, timings = tuning.pairs_to_time(), []
    for timing in tuning.time_kernels(pairs, threads=threads, buffer_bytes=cold_bytes(machine)):
        timings.append(timing)
        yield timing, tuning.count_timings(pairs)
    text = tuning.tuned_text(timings, packaged_table(), this_cpu(), threads)
    tuning.write_table(path, text)


def buffer_bytes(machine: Machine) -> int:
    """So much that caches hold little of it, as far as memory allows."""
    if machine.device == "cpu":
        return cold_bytes(machine)
    return cold_share(machine.gpus[int(machine.device[5:])].free_bytes)


def cold_bytes(machine: Machine) -> int:
    """The same of RAM, whatever the device."""
    return cold_share(min(machine.available_bytes, machine.budget.ram_bytes))


def cold_share(free: int) -> int:
    wanted = max(LEAST_BUFFER_BYTES, 4 * cache_bytes())
    return max(1 << 20, min(wanted, free // 4) >> 20 << 20)


def cache_bytes(cpus: Path = TOPOLOGY) -> int:
    """All caches of all CPUs, each counted once; 0 where the kernel does not say."""
    caches = {}
    for cache in cpus.glob("cpu[0-9]*/cache/index*"):
        try:
            kind = tuple((cache / name).read_text() for name in ("level", "type"))
            shared, size = ((cache / name).read_text() for name in ("shared_cpu_list", "size"))
        except OSError:
            continue
        found = re.match(r"(\d+)K", size)
        caches[*kind, shared] = int(found[1]) << 10 if found else 0
    return sum(caches.values())


def scratch_folder() -> Path:
    """The hub cache, or the nearest folder above it that is there; one for temporary files where
    nothing can be written there."""
    cache = cache_folder()
    folder = next(each for each in (cache, *cache.parents) if each.is_dir())
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


def choices(machine: Machine) -> Iterator[Choice]:
    """What jobs of every dtype compute in here, what multiplies, and what attention takes."""
    device = machine.device
    for stored in Dtype:
        if stored is not Dtype.int8:  # computed in as its checkpoint's floats are
            compute, reason = resolve_compute_dtype(None, stored, device)
            yield Choice("arithmetic", stored, compute, reason)
    for stored in Dtype:
        floats = Dtype.bfloat16 if stored is Dtype.int8 else stored
        compute, _ = resolve_compute_dtype(None, floats, device)
        yield Choice("products", stored, *products_choice(stored, compute, device))
    yield from kernel_choices()
    yield from attention_choices(resolve_compute_dtype(None, Dtype.bfloat16, device)[0], device)


def products_choice(stored: Dtype, compute: Dtype, device: str) -> tuple[str, str]:
    """What multiplies, and why: what a run would find of what is planned."""
    from vlmrun.nn.kernels import find_product  # late: imports torch

    try:
        planned = choose_products(stored, compute, device)
    except VlmrunError as error:
        return "refused", f"{error.message}: {error.hint}"
    product, why = find_product() if planned.compiled else (None, planned.reason)
    return ("PyTorch", why) if product is None else ("compiled loops", planned.reason)


def find_table() -> tuple[Table | None, str]:
    """The table that kernels are chosen by here, and why that one."""
    try:
        table = read_table()
    except VlmrunError as error:
        return None, f"{error.message}: {error.hint}"
    if table.name.startswith("tuned"):
        return table, f"{tuned_path()}; delete it for the packaged one"
    return table, f"{table.ignored or 'this machine has none of its own'}; --tune measures one"


def kernel_choices() -> Iterator[Choice]:
    """Where this machine's own table differs from the packaged one, if it has one."""
    table, _ = find_table()
    if table is None:
        return
    features, packaged = frozenset(this_cpu().features), packaged_table()
    for compute in Dtype:
        for stored in Dtype:
            own, default = (each.kernels(stored, compute, features) for each in (table, packaged))
            if own != default and compute is not Dtype.int8:  # nothing is computed in it
                reason = f"measured here; packaged: {kernel_words(default)}"
                yield Choice("kernels", f"{stored} in {compute}", kernel_words(own), reason)


def kernel_words(kernels: Kernels) -> str:
    """The kernel for up to so many rows, as `loops 4, native`: the last one for all above."""
    return ", ".join(f"{name}" + f" {most}" * (most is not None) for most, name in kernels)


def attention_choices(compute: Dtype, device: str) -> Iterator[Choice]:
    """What of the attention backends works here, and which of them `auto` is; a model may speak
    against one."""
    import torch  # late: seconds

    from vlmrun.nn.backends import is_fused, try_backend

    kernel = {"head_dim": HEAD, "dtype": getattr(torch, compute), "device": torch.device(device)}
    heads = f"heads of {HEAD} in {compute}"
    found = []
    for backend in get_args(Backend)[1:]:
        against = refusal_by_machine(backend, compute, device)
        if against or backend == "eager":
            choice, reason = ("refused", against) if against else ("works", "every model has it")
        elif backend == "sdpa":
            has = "a" if is_fused(**kernel) else "no"
            choice, reason = "works", f"PyTorch has {has} fused kernel for {heads}"
        elif backend == "flex_attention":
            choice, reason = "not tried", "it is compiled for a minute, on a CPU by a C++ compiler"
        else:
            failure = try_backend(backend, **kernel)
            choice, reason = ("fails", failure) if failure else ("works", f"tried with {heads}")
        found.append(Choice("attention", backend, choice, reason))
    yield Choice("attention", "auto", *best_of(found))
    yield from found


def best_of(found: Iterable[Choice]) -> tuple[str, str]:
    """Flash attention where it works, else PyTorch's own, as for every model that allows it."""
    by_name = {each.subject: each for each in found}
    best = FLASH if by_name[FLASH].choice == "works" else "sdpa"
    return best, by_name[best].reason
