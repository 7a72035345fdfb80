"""How many threads compute, and why: flag, variable, affinity, quotas, processes."""

import os
from pathlib import Path

import pytest
from light import words

from vlmrun.errors import UsageError
from vlmrun.memory.threads import (
    Processors,
    choose_threads,
    count_cores,
    cpu_quota,
    find_processors,
    let_waiting_threads_sleep,
)

EIGHT = Processors(8, 8, True, None)


@pytest.mark.parametrize(
    ("found", "count", "reason"),
    [
        (EIGHT, 8, "this machine's cores"),
        (Processors(8, 4, True, None), 4, "this machine's cores"),
        (Processors(3, 3, False, None), 3, "the cores this process is bound to"),
        (Processors(8, 8, True, 1.5), 1, "the cgroup's quota is 1.5 CPUs"),
        (Processors(2, 2, True, 1.9), 2, "the cgroup's quota is 1.9 CPUs"),
        (Processors(8, 8, True, 3.4), 3, "the cgroup's quota is 3.4 CPUs"),
        (Processors(8, 8, True, 0.5), 1, "the cgroup's quota is 0.5 CPUs"),
        (Processors(8, 4, True, 6), 4, "this machine's cores"),
        (Processors(2, 2, False, 2), 2, "the cores this process is bound to"),
    ],
)
def test_without_a_word_from_anyone(found: Processors, count: int, reason: str) -> None:
    chosen = choose_threads(None, environment={}, found=found)
    assert (chosen.count, chosen.reason) == (count, reason)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        *((value, 3) for value in ("3", " 3 ", "03", "3,2")),
        *((value, 8) for value in ("", "0", "-1", "x", "3x", "2.5", "9" * 5000)),
    ],
)
def test_the_variable_beats_the_default(value: str, count: int) -> None:
    chosen = choose_threads(None, environment={"OMP_NUM_THREADS": value}, found=EIGHT)
    assert chosen.count == count
    assert ("OMP_NUM_THREADS" in chosen.reason) == (count < 8)


def test_the_variable_beats_a_quota_but_not_the_number_of_cpus() -> None:
    environment = {"OMP_NUM_THREADS": "6"}
    limited = Processors(8, 4, True, 1)
    assert choose_threads(None, environment=environment, found=limited).count == 6
    few = choose_threads(None, environment=environment, found=Processors(2, 2, True, None))
    assert (few.count, few.reason) == (2, "OMP_NUM_THREADS is 6, more than there are CPUs")


def test_the_flag_beats_everything_else() -> None:
    limited = Processors(8, 4, True, 1)
    for count in (1, 5, 8):
        chosen = choose_threads(count, environment={"OMP_NUM_THREADS": "2"}, found=limited)
        assert (chosen.count, chosen.reason) == (count, "asked for")
    with pytest.raises(UsageError) as error:
        choose_threads(9, environment={}, found=limited)
    assert words(error.value) == (
        "--threads 9: the CPUs this process may use are 8 | use 8 or less, or leave it out"
    )


@pytest.mark.parametrize(
    ("processes", "variable", "count"),
    [
        (2, None, 4),
        (3, None, 2),
        (8, None, 1),
        (100, None, 1),
        (2, "1", 4),  # torchrun says 1 where nobody says anything
        (1, "1", 1),
        (2, "2", 2),
    ],
)
def test_processes_share_the_default(processes: int, variable: str | None, count: int) -> None:
    environment = {} if variable is None else {"OMP_NUM_THREADS": variable}
    chosen = choose_threads(None, processes=processes, environment=environment, found=EIGHT)
    assert chosen.count == count
    shared = f"this machine's cores, shared by {processes} processes"
    assert chosen.reason == ("OMP_NUM_THREADS says so" if variable == str(count) else shared)
    assert choose_threads(8, processes=processes, environment=environment, found=EIGHT).count == 8


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert count_cores(range(4), tmp_path) == 2
    assert count_cores([0, 2], tmp_path) == 1
    assert count_cores([0, 1], tmp_path) == 2
    assert count_cores([0, 7, 8], tmp_path) == 3  # of two, the kernel does not say


def write_quota(folder: Path, version: int, quota: object, period: int = 100_000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota} {period}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{-1 if quota == 'max' else quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_quota_of_the_whole_path_counts(version: int, tmp_path: Path) -> None:
    mount, member = tmp_path / "fs", tmp_path / "membership"
    root = mount if version == 2 else mount / "cpu"
    line = "0::/outer/inner" if version == 2 else "4:cpu,cpuacct:/outer/inner"
    member.write_text(f"7:memory:/outer\n{line}\n")
    assert cpu_quota(mount, member) is None
    write_quota(root / "outer" / "inner", version, 300_000)
    assert cpu_quota(mount, member) == 3
    write_quota(root / "outer", version, 75_000, 50_000)
    assert cpu_quota(mount, member) == 1.5
    write_quota(root, version, 120_000)  # a container sees its own group as the root
    assert cpu_quota(mount, member) == 1.2
    for folder in (root, root / "outer", root / "outer" / "inner"):
        write_quota(folder, version, "max")
    assert cpu_quota(mount, member) is None
    assert cpu_quota(mount, tmp_path / "nowhere") is None


def test_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_processors()
    assert 1 <= found.cores <= found.cpus == len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "cpu_count", lambda: found.cpus)
    assert find_processors().whole_machine
    monkeypatch.setattr(os, "cpu_count", lambda: found.cpus + 1)
    assert not find_processors().whole_machine


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_who_says_how_threads_wait_is_heard(said: dict[str, str]) -> None:
    found = dict(said)
    let_waiting_threads_sleep(found)
    assert found == said
    let_waiting_threads_sleep(other := {})
    assert other == {"GOMP_SPINCOUNT": "100"}
