"""`vlmrun doctor`: its rows, its JSON, what it measures and what it must not touch."""

import errno
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import PROGRAM, Command, assert_refused

from vlmrun.memory import disk, machine
from vlmrun.memory.budget import Limit

UNITS = {
    "memory_read": "bytes_per_s",
    "matrix_float32": "flops_per_s",
    "matrix_bfloat16": "flops_per_s",
    "loops_one_row": "bytes_per_s",
    "loops_many_rows": "flops_per_s",
    "disk_read": "bytes_per_s",
}
FLOATS = ["float32", "bfloat16", "float16"]
BACKENDS = ["auto", "eager", "sdpa", "sdpa-efficient", "flash_attention_2", "flex_attention"]


@pytest.fixture(autouse=True)
def small(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Little is measured, for a moment, in an empty folder; then threads are as before."""
    import torch

    from vlmrun.memory import rates

    monkeypatch.setattr(machine, "buffer_bytes", lambda found: 8 << 20)
    monkeypatch.setattr(rates, "SECONDS", 0.0)
    monkeypatch.setattr(rates, "CPU_SHAPE", (64, 128, 256))
    monkeypatch.setattr(disk, "MOST_BYTES", disk.PIECE_BYTES)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def examined(vlmrun: Command, *flags: object) -> dict[str, Any]:
    done = vlmrun("doctor", "--json", *flags)
    assert (done.code, done.err) == (0, "")
    assert done.out.count(b"\n") == 1
    fields: dict[str, Any] = json.loads(done.out)
    return fields


def test_json_holds_it_all(vlmrun: Command, no_network: None, cache: Path) -> None:
    found = examined(vlmrun, "--threads", "1", "--device", "cpu")
    assert list(found) == [
        *("v", "versions", "cpu", "threads", "device", "gpus", "memory", "budget"),
        *("measured", "choices"),
    ]
    assert found["v"] == 1
    packages = {"python", "vlmrun", "torch", "transformers", "safetensors", "numpy", "numba"}
    assert set(found["versions"]) == packages | {"flash_attn"}
    assert set(found["cpu"]) == {"name", "cores", "cpus", "quota", "load", "features"}
    assert found["threads"] == {"count": 1, "reason": "asked for"}
    assert found["device"] == {"name": "cpu", "reason": "asked for"}
    limits = {"limit_bytes", "limit_free_bytes", "limit_file"}
    assert set(found["memory"]) == {"total_bytes", "available_bytes"} | limits
    assert 0 < found["budget"]["ram_bytes"] < found["memory"]["total_bytes"]
    assert found["budget"]["vram_bytes"] == 0
    assert {name: [*rate] for name, rate in found["measured"].items()} == {
        name: [unit, "how"] for name, unit in UNITS.items()
    }
    for name, unit in UNITS.items():
        assert 1e6 < found["measured"][name][unit] < 1e15, name
    assert str(cache.parent) in found["measured"]["disk_read"]["how"]
    assert not cache.exists()
    chosen = found["choices"]
    assert [*chosen] == ["arithmetic", "products", "attention"]
    assert [*chosen["arithmetic"]] == FLOATS
    assert [*chosen["products"]] == [*FLOATS, "int8"]
    assert [*chosen["attention"]] == BACKENDS
    assert all(each["reason"] for about in chosen.values() for each in about.values())
    assert chosen["attention"]["auto"]["choice"] == "sdpa"
    assert chosen["attention"]["flex_attention"]["choice"] == "not tried"


def test_the_installed_command_measures_in_full(cache: Path) -> None:
    done = subprocess.run([PROGRAM, "doctor", "--json"], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    measured = json.loads(done.stdout)["measured"]
    assert 1e8 < measured["memory_read"]["bytes_per_s"] < 1e13
    assert 1e6 < measured["disk_read"]["bytes_per_s"] < 1e13
    assert 1e8 < measured["matrix_float32"]["flops_per_s"] < 1e15
    assert [path for path in cache.parent.iterdir() if path.name.startswith(".vlmrun-")] == []


def test_the_choices_are_those_of_a_plan(vlmrun: Command) -> None:
    chosen = examined(vlmrun)["choices"]
    for dtype in FLOATS:
        text = " ".join(vlmrun("mem-plan", "-m", "demo-siglip", "--dtype", dtype).text.split())
        arithmetic, products = chosen["arithmetic"][dtype], chosen["products"][dtype]
        assert f" arithmetic {arithmetic['choice']} ({arithmetic['reason']})" in text
        assert f" products {products['choice']} ({products['reason']})" in text


def test_tables_say_what_json_says(vlmrun: Command) -> None:
    done = vlmrun("doctor", "-v", "--no-color")
    assert (done.code, done.err) == (0, "")
    for start in ("versions ", "CPU ", "features ", "threads ", "memory ", "RAM budget "):
        assert any(line.startswith(start) for line in done.lines), start
    for name, unit in UNITS.items():
        (row,) = [line for line in done.lines if line.startswith(f"{name.replace('_', ' ')} ")]
        assert ("FLOP/s" if unit == "flops_per_s" else "B/s") in row
    assert max(map(len, done.lines)) <= 100
    for word in (*FLOATS, *BACKENDS):
        assert word in done.text


def test_what_is_missing_is_a_row(vlmrun: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmrun.memory import rates
    from vlmrun.nn import kernels

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def absent() -> tuple[None, str]:
        return None, "numba does not work here"

    monkeypatch.setattr(machine, "measure_disk", full)
    for room in (rates, kernels):
        monkeypatch.setattr(room, "find_product", absent)
    found = examined(vlmrun)
    measured = found["measured"]
    assert measured["disk_read"]["bytes_per_s"] is None
    assert measured["disk_read"]["how"].endswith(": No space left on device")
    for name in ("loops_one_row", "loops_many_rows"):
        assert measured[name] == {UNITS[name]: None, "how": "numba does not work here"}
    assert found["choices"]["products"]["float16"] == {
        "choice": "PyTorch",
        "reason": "numba does not work here",
    }
    lines = vlmrun("doctor").lines
    (row,) = [line for line in lines if line.startswith("loops one row")]
    assert " ".join(row.split()) == "loops one row - numba does not work here"


def test_a_damaged_table_of_kernels_is_a_row(
    vlmrun: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "vlmrun").mkdir()
    (tmp_path / "vlmrun" / "products.json").write_text("[")
    products = examined(vlmrun)["choices"]["products"]
    assert {each["choice"] for each in products.values()} == {"refused"}
    assert f"{tmp_path}/vlmrun/products.json is no table" in products["float32"]["reason"]


def test_gpus_and_limits_are_shown(
    vlmrun: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'GPU-1, 1000, 2000, Some GPU'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    above = Limit(Path("/sys/fs/cgroup/outer/memory.max"), 9 << 30, 8 << 30)
    limit = Limit(Path("/sys/fs/cgroup/memory.max"), 3 << 30, 1 << 30)
    monkeypatch.setattr(machine, "memory_limits", lambda: iter([above, limit]))
    found = examined(vlmrun, "--device", "cpu")
    gpu = {"name": "Some GPU", "free_bytes": 1000 << 20, "total_bytes": 2000 << 20}
    assert found["gpus"] == [gpu]
    assert found["memory"]["limit_file"] == "/sys/fs/cgroup/memory.max"
    assert found["memory"]["limit_bytes"] == 3 << 30
    text = vlmrun("doctor", "--device", "cpu").text
    assert "GPU 0         Some GPU: 1.95 GiB, 1000 MiB free" in text
    assert "memory limit  3.00 GiB, 1.00 GiB left (/sys/fs/cgroup/memory.max)" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--threads", "0"], "--threads 0: not 1 or more"),
        (["--threads", "1000000"], "--threads 1000000: the CPUs this process may use are"),
        (["--device", "cuda"], "--device cuda: the driver shows 0 GPUs"),
        (["--tune"], "No such option: --tune"),
    ],
)
def test_bad_usage(
    vlmrun: Command, flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert_refused(vlmrun("doctor", *flags), words, code=2)
