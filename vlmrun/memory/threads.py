"""How many threads compute, and who says so: a flag, OpenMP's variable, the kernel, cgroups."""

import math
import os
import re
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from vlmrun.errors import UsageError
from vlmrun.memory.cgroups import MEMBERSHIP, MOUNT, find_number, groups_above

VARIABLE = "OMP_NUM_THREADS"
TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads compute, and why so many."""

    count: int
    reason: str


UNDECIDED = Threads(1, "as nothing is known")


@dataclass(frozen=True, slots=True)
class Processors:
    """What this process may use. cpus: as the kernel counts them; cores: those of them that
    share no arithmetic units; quota: CPUs' worth of time a cgroup grants, None without limit."""

    cpus: int
    cores: int
    whole_machine: bool
    quota: float | None


def let_waiting_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have threads of GNU OpenMP that wait sleep at once, unless the user says how they wait. By
    default they run in circles for milliseconds: on cores that other programs use as well, that
    makes a decode step 4 times as long; on idle ones, sleeping adds some percent (measured).

    To be called before torch is imported, as its OpenMP reads this once.
    """
    if not environment.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        environment["GOMP_SPINCOUNT"] = "100"


def choose_threads(
    requested: int | None,
    *,
    processes: int = 1,
    environment: Mapping[str, str] = os.environ,
    found: Processors | None = None,
) -> Threads:
    """The flag's number, else OpenMP's, else an equal share of what this process may use.

    `processes` of one job share this machine. torchrun then gives each of them the variable with
    the value 1 where it is not set, so a 1 says nothing.

    Raises:
        UsageError: more are asked for than there are CPUs: they would wait for each other.
    """
    found = found or find_processors()
    if requested is not None:
        if requested > found.cpus:
            raise UsageError(
                f"--threads {requested}: the CPUs this process may use are {found.cpus}",
                f"use {found.cpus} or less, or leave it out",
            )
        return Threads(requested, "asked for")
    named = read_variable(environment)
    if named is not None and not (named == 1 and processes > 1):
        if named > found.cpus:
            return Threads(found.cpus, f"{VARIABLE} is {named}, more than there are CPUs")
        return Threads(named, f"{VARIABLE} says so")
    whole = usable(found)
    if processes == 1:
        return whole
    share = max(1, whole.count // processes)
    return Threads(share, f"{whole.reason}, shared by {processes} processes")


def usable(found: Processors) -> Threads:
    """One thread per core, as far as a quota reaches, to the nearest whole number. Measured, two
    threads against one: large products gain and small ones lose, 1.5 and 0.9 times the rate under
    a quota of 1.9 CPUs, 1.3 and 0.8 under 1.5, 1.0 and 0.5 under 1.1, where the threads' waiting
    for each other uses the quota up."""
    if found.quota is not None and found.quota < found.cores:
        count = max(1, math.ceil(found.quota - 0.5))
        return Threads(count, f"the cgroup's quota is {found.quota:g} CPUs")
    reason = "this machine's cores" if found.whole_machine else "the cores this process is bound to"
    return Threads(found.cores, reason)


def read_variable(environment: Mapping[str, str]) -> int | None:
    """The number of OpenMP's variable, the first of a list; None where it has none, as OpenMP
    takes it."""
    match = re.fullmatch(r"\s*0*([1-9]\d{0,8})\s*(,.*)?", environment.get(VARIABLE, ""))
    return int(match[1]) if match else None


def find_processors() -> Processors:
    """What the affinity mask and the cgroups leave of this machine."""
    bound = os.sched_getaffinity(0)
    whole = len(bound) == os.cpu_count()
    return Processors(len(bound), count_cores(bound), whole, cpu_quota())


def count_cores(cpus: Iterable[int], topology: Path = TOPOLOGY) -> int:
    """Cores that these CPUs are threads of; one each where the kernel does not say."""
    cores = set()
    for cpu in cpus:
        try:
            cores.add((topology / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def cpu_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs' worth of time that the tightest cgroup above this process grants."""
    quotas = []
    for version, folder in groups_above("cpu", mount, membership):
        if version == 2:
            quota = find_number(folder / "cpu.max", r"^(\d+) \d+$")
            period = find_number(folder / "cpu.max", r"^\d+ (\d+)$")
        else:
            quota = find_number(folder / "cpu.cfs_quota_us", r"^(\d+)$")  # -1: none
            period = find_number(folder / "cpu.cfs_period_us", r"^(\d+)$")
        if quota is not None and period:
            quotas.append(quota / period)
    return min(quotas, default=None)
