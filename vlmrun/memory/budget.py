"""How much memory a job may take, and who says so: flags, cgroups, the kernel, the driver.

`--ram` bounds RssAnon + RssFile + RssShmem of the process; `--vram` what the allocator reserves.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vlmrun.errors import UsageError
from vlmrun.job import Placing
from vlmrun.memory.cgroups import MEMBERSHIP, MOUNT, find_number, groups_above
from vlmrun.memory.threads import UNDECIDED, Threads, choose_threads

SHARE = 0.8  # of what is free; the rest stays for everything else on the machine
UNITS = {
    "": 1,
    "B": 1,
    **{unit: 1024 ** (i + 1) for i, unit in enumerate(("K", "M", "G", "T"))},
    **{unit + "IB": 1024 ** (i + 1) for i, unit in enumerate(("K", "M", "G", "T"))},
    **{unit + "B": 1000 ** (i + 1) for i, unit in enumerate(("K", "M", "G", "T"))},
}
NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes a number near 2^63 for "none"


@dataclass(frozen=True, slots=True)
class Budget:
    """What a job may use: bytes on each tier and CPU threads, and where each figure comes from."""

    ram_bytes: int
    ram_reason: str
    vram_bytes: int = 0
    vram_reason: str = "no accelerator"
    threads: Threads = UNDECIDED


@dataclass(frozen=True, slots=True)
class Limit:
    """A cgroup's limit: the file that says so, its bytes, and how many of them are left."""

    file: Path
    limit_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver shows it."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of a process by kind, as the kernel counts it."""

    anon_bytes: int
    file_bytes: int
    shmem_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.anon_bytes + self.file_bytes + self.shmem_bytes


def parse_bytes(text: str, *, whole: int | None = None) -> int:
    """Read a size: `8GiB`, `8G` (= GiB), `8GB` (decimal), `512MiB`, or `75%` of `whole`.

    Raises:
        UsageError: it is no size, or a percentage above 100 or where none makes sense.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?|\.\d+)\s*([A-Za-z%]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or (unit != "%" and unit not in UNITS) or (unit == "%" and whole is None):
        raise UsageError(f"{text!r} is not a size", "write 8GiB, 8G, 8GB, 512MiB or 75%")
    if unit == "%":
        assert whole is not None
        if float(match[1]) > 100:
            raise UsageError(f"{text!r} is more than everything", "write 100% or less")
        return int(float(match[1]) / 100 * whole)
    return int(float(match[1]) * UNITS[unit])


def format_bytes(nbytes: int) -> str:
    """Print a size in the largest binary unit that gives at least 1: `1.66 GiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def size_flag(nbytes: int) -> str:
    """A size as a flag takes it, rounded up so that it is enough."""
    return f"{-(-nbytes // UNITS['M'])}MiB"


def budget_of(placing: Placing, *, device: str) -> Budget:
    """What a job may use of this machine; `device` as below.

    Raises:
        UsageError: as below, or more threads are asked for than there are CPUs.
    """
    threads = choose_threads(placing.threads, processes=placing.processes)
    return read_budget(placing.ram, placing.vram, device=device, threads=threads)


def read_budget(
    ram: str | None, vram: str | None, *, device: str, threads: Threads = UNDECIDED
) -> Budget:
    """Budgets from flags, else a share of what is free.

    `device` is `cpu` or `cuda:N`, already resolved, and so is `threads`.

    Raises:
        UsageError: a flag is no size, or `--vram` is given without an accelerator.
    """
    free, source = free_ram()
    if ram is None:
        ram_bytes, ram_reason = int(SHARE * free), f"{SHARE:.0%} of {format_bytes(free)} {source}"
    else:
        ram_bytes, ram_reason = given(ram, free, source)
    if device == "cpu":
        if vram is not None:
            raise UsageError("--vram is given, but the job runs on the CPU", "drop it")
        return Budget(ram_bytes, ram_reason, threads=threads)
    free_vram = free_device_bytes(device)
    if vram is None:
        vram_bytes = int(SHARE * free_vram)
        vram_reason = f"{SHARE:.0%} of {format_bytes(free_vram)} free on {device}"
    else:
        vram_bytes, vram_reason = given(vram, free_vram, f"free on {device}")
    return Budget(ram_bytes, ram_reason, vram_bytes, vram_reason, threads)


def given(flag: str, free: int, source: str) -> tuple[int, str]:
    """The bytes a flag asks for, and how they compare with what is free."""
    nbytes = parse_bytes(flag, whole=free)
    if flag.strip().endswith("%"):
        return nbytes, f"{flag.strip()} of {format_bytes(free)} {source}"
    if nbytes > free:
        return nbytes, f"as given, more than the {format_bytes(free)} {source}"
    return nbytes, "as given"


def free_ram() -> tuple[int, str]:
    """Bytes this process may still take, its own included, and what sets that bound."""
    import psutil  # late: only commands that plan need it

    held = psutil.Process().memory_info()
    own = held.rss - getattr(held, "shared", 0)  # file pages count as available already
    bound, reason = psutil.virtual_memory().available + own, "available on this machine"
    for limit in memory_limits():
        if limit.free_bytes + own < bound:
            bound, reason = limit.free_bytes + own, "left under the cgroup's limit"
    return bound, reason


def memory_limits(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> Iterator[Limit]:
    """Every memory limit above this process, cgroup v1 and v2 alike.

    Memory the kernel can take back at once (inactive file pages) counts as left.
    """
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("memory.max", "memory.current"),
    }
    for version, folder in groups_above("memory", mount, membership):
        limit, used = (folder / name for name in names[version])
        nbytes = find_number(limit, r"^(\d+)$")  # v2 writes "max" for none
        if nbytes is not None and nbytes < NO_LIMIT_BYTES:
            taken = used_bytes(used, folder / "memory.stat")
            yield Limit(limit, nbytes, max(0, nbytes - taken))


def used_bytes(used: Path, stat: Path) -> int:
    """Bytes that a group holds and the kernel cannot take back at once."""
    inactive = (r"^total_inactive_file (\d+)$", r"^inactive_file (\d+)$")  # v1 has both
    reclaimable = next((n for n in (find_number(stat, p) for p in inactive) if n is not None), 0)
    return max(0, (find_number(used, r"^(\d+)$") or 0) - reclaimable)


def find_device(requested: str) -> tuple[str, str]:
    """Resolve `--device` to `cpu` or `cuda:N` without importing torch, and say why.

    Raises:
        UsageError: the name is unknown, or a GPU is asked for where the driver shows none.
    """
    if requested == "cpu":
        return "cpu", "asked for"
    index = re.fullmatch(r"cuda(?::([0-9]{1,9}))?", requested)
    if requested != "auto" and index is None:
        raise UsageError(f"unknown device {requested!r}", "use auto, cpu, cuda or cuda:N")
    gpus = len(query_driver())
    if requested == "auto":
        if not gpus:
            return "cpu", "the driver shows no GPU"
        if torch_is_cpu_build():
            return "cpu", "the installed torch is a CPU build"
        return "cuda:0", "the first GPU the driver shows"
    wanted = int(index[1] or 0) if index else 0
    if wanted >= gpus:
        raise UsageError(
            f"--device {requested}: the driver shows {gpus} GPUs", "use --device cpu or auto"
        )
    if torch_is_cpu_build():
        raise UsageError(
            f"--device {requested}: the installed torch is a CPU build",
            "install a CUDA build of torch, or use --device cpu",
        )
    return f"cuda:{wanted}", "asked for"


def torch_is_cpu_build() -> bool:
    from importlib.metadata import version  # late: 5 ms, and only asked where a GPU is

    return version("torch").endswith("+cpu")


def query_driver() -> list[Gpu]:
    """Every GPU this process may see, in its order.

    CUDA_VISIBLE_DEVICES lists them by index or UUID; CUDA ignores what follows an unknown one.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    shown = "uuid,memory.free,memory.total,name"
    query = [program, f"--query-gpu={shown}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        rows = [line.split(", ", 3) for line in answer.stdout.splitlines() if line.strip()]
        found = {
            uuid: Gpu(name, int(free) << 20, int(total) << 20) for uuid, free, total, name in rows
        }
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(found.values())
    chosen: list[Gpu] = []
    for entry in map(str.strip, visible.split(",")):
        named = [u for i, u in enumerate(found) if entry == str(i) or u.startswith(entry or "?")]
        if len(named) != 1:
            break
        chosen.append(found[named[0]])
    return chosen


def free_device_bytes(device: str) -> int:
    return query_driver()[int(device.rpartition(":")[2])].free_bytes


def process_memory(status: Path = Path("/proc/self/status")) -> Memory:
    """Resident memory of this process by kind."""
    kinds = dict(re.findall(r"^(Rss\w+):\s+(\d+) kB$", status.read_text(), re.MULTILINE))
    anon, file, shmem = (int(kinds.get(k, 0)) << 10 for k in ("RssAnon", "RssFile", "RssShmem"))
    return Memory(anon, file, shmem)


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The CPU's feature flags as the kernel spells them; empty where it does not say."""
    try:
        match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(match[1].split()) if match else frozenset()
