"""Sizes are read, limits are found wherever they are set, devices are asked of the driver."""

import os
import random
from pathlib import Path

import pytest
from light import words

from vlmrun.errors import UsageError
from vlmrun.job import Placing
from vlmrun.memory.budget import (
    Gpu,
    Limit,
    budget_of,
    cpu_features,
    find_device,
    format_bytes,
    free_device_bytes,
    free_ram,
    memory_limits,
    parse_bytes,
    process_memory,
    query_driver,
    read_budget,
    size_flag,
)
from vlmrun.memory.threads import Threads

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1", 1),
        ("512B", 512),
        ("2K", 2 * KIB),
        ("2KB", 2000),
        ("2KiB", 2 * KIB),
        ("2kib", 2 * KIB),
        ("400MiB", 400 * MIB),
        ("400M", 400 * MIB),
        ("400MB", 400_000_000),
        ("8G", 8 * GIB),
        ("8GiB", 8 * GIB),
        ("8GB", 8_000_000_000),
        ("8gb", 8_000_000_000),
        ("1.5 GiB", 3 * GIB // 2),
        (".5G", GIB // 2),
        (" 1T ", 1 << 40),
        ("1TB", 10**12),
        ("2TiB", 2 << 40),
        ("0.3B", 0),
        ("75%", 750),
        ("100%", 1000),
        ("0%", 0),
        ("0.1%", 1),
        (" 50 % ", 500),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text, whole=1000) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "G", "%", "-1G", "+1G", "8 G B", "8GiBs", "8X", "1e9", "1,5G", "0x10", "1.G"),
        *("8G 8G", "nan", "inf", "auto", "9" * 400, "9" * 400 + "G"),
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text, whole=1000)
    assert words(caught.value) == f"{text!r} is not a size | write 8GiB, 8G, 8GB, 512MiB or 75%"
    assert caught.value.exit_code == 2


def test_percentages() -> None:
    with pytest.raises(UsageError, match="'75%' is not a size"):
        parse_bytes("75%")
    with pytest.raises(UsageError, match="'101%' is more than everything") as caught:
        parse_bytes("101%", whole=1000)
    assert words(caught.value)
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes("9" * 400 + "%", whole=1000)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (100 * KIB, "100 KiB"),
        (MIB, "1.0 MiB"),
        (480 * MIB, "480 MiB"),
        (GIB, "1.00 GiB"),
        (1_787_400_000, "1.66 GiB"),
        (5 << 40, "5120.00 GiB"),
    ],
)
def test_sizes_in_words(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_words_read_back_as_nearly_the_same_size() -> None:
    source = random.Random(3)
    for _ in range(500):
        nbytes = int(2 ** source.uniform(0, 42))
        assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.05, abs=0.5)


LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
USED = {1: "memory.usage_in_bytes", 2: "memory.current"}


def write_group(
    folder: Path, version: int, limit: object, used: int, *, inactive: int | None = 0
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LIMIT[version]).write_text(f"{limit}\n")
    (folder / USED[version]).write_text(f"{used}\n")
    if inactive is not None:
        lines = ["anon 12345", f"inactive_file {inactive}", "active_file 999"]
        if version == 1:  # of the group alone, then of all below it
            lines = ["inactive_file 1", f"total_inactive_file {inactive}", "hierarchical 7"]
        (folder / "memory.stat").write_text("\n".join(lines) + "\n")


def membership(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "membership"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def tree(tmp_path: Path, version: int) -> tuple[Path, Path, Path]:
    """(mount, root of the hierarchy, membership of /outer/inner)."""
    mount = tmp_path / "fs"
    line = "0::/outer/inner" if version == 2 else "9:memory,hugetlb:/outer/inner"
    root = mount if version == 2 else mount / "memory"
    return mount, root, membership(tmp_path, "4:cpu,cpuacct:/elsewhere", line)


def free_bytes(mount: Path, member: Path) -> list[int]:
    return [limit.free_bytes for limit in memory_limits(mount, member)]


NO_LIMIT = {1: 9223372036854771712, 2: "max"}


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_every_level_count(version: int, tmp_path: Path) -> None:
    mount, root, member = tree(tmp_path, version)
    write_group(root / "outer" / "inner", version, 500, 100)
    write_group(root / "outer", version, 450, 200)
    assert list(memory_limits(mount, member)) == [
        Limit(root / "outer" / "inner" / LIMIT[version], 500, 400),
        Limit(root / "outer" / LIMIT[version], 450, 250),
    ]
    write_group(root / "outer" / "inner", version, NO_LIMIT[version], 100)
    assert free_bytes(mount, member) == [250]
    write_group(root / "outer", version, NO_LIMIT[version], 200)
    assert free_bytes(mount, member) == []


@pytest.mark.parametrize("version", [1, 2])
def test_inactive_file_pages_count_as_left(version: int, tmp_path: Path) -> None:
    mount, root, member = tree(tmp_path, version)
    group = root / "outer" / "inner"
    write_group(group, version, 1000, 900, inactive=300)
    assert free_bytes(mount, member) == [400]
    write_group(group, version, 1000, 200, inactive=300)  # read a moment later than the rest
    assert free_bytes(mount, member) == [1000]
    write_group(group, version, 1000, 1200, inactive=0)
    assert free_bytes(mount, member) == [0]


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_are_missing(version: int, tmp_path: Path) -> None:
    mount, root, member = tree(tmp_path, version)
    assert free_bytes(mount, member) == []
    group = root / "outer" / "inner"
    write_group(group, version, 1000, 900, inactive=None)
    assert free_bytes(mount, member) == [100]  # a limit holds without statistics, too
    for file in group.iterdir():
        if "limit" not in file.name and "max" not in file.name:
            file.unlink()
    assert free_bytes(mount, member) == [1000]
    assert free_bytes(mount, tmp_path / "nowhere") == []


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_own_group_as_the_root(version: int, tmp_path: Path) -> None:
    mount, root, member = tree(tmp_path, version)
    write_group(root, version, 800, 300)
    assert free_bytes(mount, member) == [500]
    line = "0::/" if version == 2 else "9:memory:/"
    assert free_bytes(mount, membership(tmp_path, line)) == [500]


def test_mixed_hierarchies_and_nothing_above_the_mount(tmp_path: Path) -> None:
    mount = tmp_path / "fs"
    write_group(tmp_path, 2, 1, 0)
    write_group(mount / "memory" / "job", 1, 700, 200)
    write_group(mount / "unified", 2, 1, 0)
    member = membership(tmp_path, "5:memory:/job", "3:cpuset:/job", "0::/user.slice")
    assert free_bytes(mount, member) == [500]


def test_free_memory_is_some_of_the_machines() -> None:
    import psutil

    free, reason = free_ram()
    assert 0 < free <= psutil.virtual_memory().total
    assert reason in ("available on this machine", "left under the cgroup's limit")


def test_a_budget_for_the_cpu() -> None:
    free, source = free_ram()
    found = read_budget(None, None, device="cpu")
    assert found.ram_bytes == pytest.approx(0.8 * free, rel=0.1)
    assert found.ram_reason.startswith("80% of ")
    assert found.ram_reason.endswith(source)
    assert (found.vram_bytes, found.vram_reason) == (0, "no accelerator")
    given = read_budget("3GiB", None, device="cpu")
    assert (given.ram_bytes, given.ram_reason) == (3 * GIB, "as given")
    share = read_budget("25%", None, device="cpu")
    assert share.ram_bytes == pytest.approx(0.25 * free, rel=0.1)
    assert share.ram_reason.startswith("25% of ")


def test_a_budget_counts_threads_too() -> None:
    found = budget_of(Placing(model="demo", ram="3GiB", threads=1), device="cpu")
    assert (found.ram_bytes, found.threads) == (3 * GIB, Threads(1, "asked for"))


def test_a_budget_that_is_more_than_there_is() -> None:
    given = read_budget("900000GiB", None, device="cpu")
    assert given.ram_bytes == 900_000 * GIB
    assert given.ram_reason.startswith("as given, more than the ")
    assert given.ram_reason.endswith(free_ram()[1])


@pytest.mark.parametrize(
    ("nbytes", "flag"), [(1, "1MiB"), (1 << 20, "1MiB"), ((1 << 20) + 1, "2MiB")]
)
def test_a_size_as_a_flag_is_enough(nbytes: int, flag: str) -> None:
    assert size_flag(nbytes) == flag


def test_vram_is_no_budget_of_a_cpu() -> None:
    with pytest.raises(UsageError, match="--vram is given, but the job runs on the CPU") as caught:
        read_budget(None, "8G", device="cpu")
    assert words(caught.value)


SHOWN = "GPU-1a2b-x, 80000, 81559, A GPU", "GPU-9c8d-y, 1000, 81559, Another, by name"
FIRST, SECOND = (
    Gpu("A GPU", 80000 * MIB, 81559 * MIB),
    Gpu("Another, by name", 1000 * MIB, 81559 * MIB),
)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in nvidia-smi's place that shows two GPUs; a CUDA build of torch."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    answer(program, *SHOWN)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install_torch(tmp_path / "cuda", "2.13.0+cu130", monkeypatch)
    return program


def install_torch(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an installer leaves of a build of torch, found before the one that is there."""
    package = folder / f"torch-{version}.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)


def answer(program: Path, *lines: str, status: int = 0) -> None:
    """Answer the query that is asked, and no other."""
    asked = "--query-gpu=uuid,memory.free,memory.total,name --format=csv,noheader,nounits"
    shown = "\n".join(f"echo '{line}'" for line in lines)
    program.write_text(f'#!/bin/sh\n[ "$*" = "{asked}" ] || exit 9\n{shown}\nexit {status}\n')
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, [FIRST, SECOND]),
        ("0,1", [FIRST, SECOND]),
        ("1,0", [SECOND, FIRST]),
        (" 1 ", [SECOND]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [FIRST]),
        ("1,7,0", [SECOND]),
        ("GPU-9c8d-y", [SECOND]),
        ("GPU-9", [SECOND]),
        ("GPU-", []),
        ("GPU-9c8d-y,0", [SECOND, FIRST]),
        ("MIG-1a2b", []),
        ("none", []),
    ],
)
def test_the_driver_is_asked_for_the_gpus_that_may_be_used(
    visible: str | None,
    gpus: list[Gpu],
    driver: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert query_driver() == gpus
    if gpus:
        assert find_device("auto") == ("cuda:0", "the first GPU the driver shows")
        assert free_device_bytes("cuda:0") == gpus[0].free_bytes
    else:
        assert find_device("auto") == ("cpu", "the driver shows no GPU")


@pytest.mark.parametrize(
    "lines", [("No devices were found",), ("GPU-1, [N/A], [N/A], A GPU",), ("GPU-1, 10",), ()]
)
def test_an_answer_without_gpus(lines: tuple[str, ...], driver: Path) -> None:
    answer(driver, *lines)
    assert query_driver() == []


def test_a_driver_that_fails(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(driver, SHOWN[0], status=9)
    assert query_driver() == []
    driver.write_bytes(b"\x7fELF, not really")
    assert query_driver() == []
    driver.chmod(0o644)
    monkeypatch.setenv("PATH", str(driver.parent))
    assert query_driver() == []
    assert find_device("auto") == ("cpu", "the driver shows no GPU")


@pytest.mark.parametrize(
    ("requested", "device"), [("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_a_gpu_that_is_asked_for(requested: str, device: str, driver: Path) -> None:
    assert find_device(requested) == (device, "asked for")


@pytest.mark.parametrize("requested", ["gpu", "cuda:x", "cuda:", "CUDA", "mps", "", "cuda:-1"])
def test_unknown_devices(requested: str) -> None:
    with pytest.raises(UsageError, match=f"^unknown device '{requested}'$") as caught:
        find_device(requested)
    assert "use auto, cpu, cuda or cuda:N" in words(caught.value)


def test_a_gpu_that_is_not_there(driver: Path) -> None:
    with pytest.raises(UsageError, match="--device cuda:2: the driver shows 2 GPUs"):
        find_device("cuda:2")
    answer(driver, status=1)
    with pytest.raises(UsageError, match="--device cuda: the driver shows 0 GPUs") as caught:
        find_device("cuda")
    assert "use --device cpu or auto" in words(caught.value)


@pytest.mark.parametrize(
    ("version", "is_cpu"), [("2.13.0+cpu", True), ("2.13.0+cu130", False), ("2.13.0", False)]
)
def test_a_cpu_build_of_torch_is_told_by_its_version(
    version: str, is_cpu: bool, driver: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_torch(tmp_path / "other", version, monkeypatch)
    if not is_cpu:
        assert find_device("auto")[0] == find_device("cuda")[0] == "cuda:0"
        return
    assert find_device("auto") == ("cpu", "the installed torch is a CPU build")
    with pytest.raises(UsageError, match="the installed torch is a CPU build") as caught:
        find_device("cuda")
    assert "CUDA build" in words(caught.value)


def test_the_cpu_needs_no_driver(driver: Path) -> None:
    called = driver.parent / "called"
    driver.write_text(f"#!/bin/sh\ntouch {called}\n")
    assert find_device("cpu") == ("cpu", "asked for")
    assert not called.exists()
    assert query_driver() == []
    assert called.exists()


def test_a_budget_for_a_gpu(driver: Path) -> None:
    found = read_budget("2G", None, device="cuda:1")
    assert found.ram_bytes == 2 * GIB
    assert found.vram_bytes == int(0.8 * 1000 * MIB)
    assert found.vram_reason == "80% of 1000 MiB free on cuda:1"
    assert read_budget(None, "512MiB", device="cuda:0").vram_bytes == 512 * MIB
    share = read_budget(None, "50%", device="cuda:0")
    assert share.vram_bytes == 40000 * MIB
    assert share.vram_reason == "50% of 78.12 GiB free on cuda:0"
    large = read_budget(None, "2GiB", device="cuda:1")
    assert large.vram_reason == "as given, more than the 1000 MiB free on cuda:1"


def test_memory_of_a_process_by_kind(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text(
        "Name:\tpython\nVmRSS:\t  999 kB\nRssAnon:\t    120 kB\nRssFile:\t     30 kB\n"
        "RssShmem:\t      4 kB\nThreads:\t1\n"
    )
    found = process_memory(status)
    assert (found.anon_bytes, found.file_bytes, found.shmem_bytes) == (120 * KIB, 30 * KIB, 4 * KIB)
    assert found.total_bytes == 154 * KIB
    status.write_text("Name:\tkthread\n")
    assert process_memory(status).total_bytes == 0


def test_memory_of_this_process() -> None:
    before = process_memory()
    block = bytearray(32 * MIB)
    block[::4096] = b"x" * (len(block) // 4096)
    assert process_memory().anon_bytes - before.anon_bytes > 24 * MIB
    assert before.file_bytes > 0


@pytest.mark.parametrize(
    ("text", "features"),
    [
        (
            "processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\nbugs\t\t: x\n",
            {"fpu", "avx2", "avx512_bf16"},
        ),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", {"fp", "asimd", "bf16"}),
        ("processor : 0\n", set()),
        (None, set()),
    ],
)
def test_features_of_a_cpu(text: str | None, features: set[str], tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if text is not None:
        cpuinfo.write_text(text)
    assert cpu_features(cpuinfo) == features
