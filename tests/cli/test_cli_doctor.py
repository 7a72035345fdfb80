"""`vlmrun doctor`: its rows, its JSON, what it measures and what it must not touch."""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import PROGRAM, Command, assert_refused

from vlmrun.memory import disk, machine
from vlmrun.memory.budget import Limit
from vlmrun.memory.products import PACKAGED, tuned_path

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
        *("measured", "kernels", "choices"),
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
    found = examined(vlmrun)
    products = found["choices"]["products"]
    assert {each["choice"] for each in products.values()} == {"refused"}
    path = f"{tmp_path}/vlmrun/products.json"
    assert f"{path} is no table" in products["float32"]["reason"]
    kernels = found["kernels"]
    assert (kernels["table"], kernels["rows"], kernels["path"]) == (None, None, path)
    assert kernels["reason"].endswith(": delete it")
    assert any(line.startswith("kernels ") for line in vlmrun("doctor").lines)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where a table of this machine lies, once it is measured: little of it, with tiny shapes."""
    from vlmrun.memory import tuning
    from vlmrun.models.checkpoints.dtype import Dtype

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "BLOCKS", ((((16, 8), (8, 16)), (1, 32)), (((24, 8),), (64,))))
    monkeypatch.setattr(tuning, "STORED", (Dtype.bfloat16,))
    monkeypatch.setattr(machine, "cold_bytes", lambda found: 1 << 16)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return tuned_path()


def test_tune_writes_the_table_that_counts_from_then_on(
    vlmrun: Command, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = examined(vlmrun)["kernels"]
    assert before["table"].startswith("packaged table ")
    assert before["reason"] == "this machine has none of its own; --tune measures one"
    assert before["path"] == str(own)
    assert not own.exists()
    found = examined(vlmrun, "--tune", "--threads", "1")
    kernels, written = found["kernels"], json.loads(own.read_bytes())
    assert kernels["table"].startswith("tuned table ")
    assert kernels["reason"] == f"{own}; delete it for the packaged one"
    assert kernels["measured"] == written["measured"]
    pairs = ", ".join(f"bfloat16 in {compute}" for compute in FLOATS)
    words = f", {found['cpu']['name']}, 1 thread: "
    assert sorted(kernels["measured"].partition(words)[2].split(", ")) == sorted(pairs.split(", "))
    assert written["machine"]["features"] == found["cpu"]["features"]
    assert kernels["rows"] == written["rows"]
    packaged = len(before["rows"])
    assert written["rows"][-packaged:] == before["rows"]
    differing = [f"{row['stored']} in {row['compute']}" for row in written["rows"][:-packaged]]
    assert sorted(found["choices"].get("kernels", {})) == sorted(differing)
    assert set(differing) <= set(pairs.split(", "))
    assert kernels["table"] in found["choices"]["products"]["float16"]["reason"]
    planned = vlmrun("mem-plan", "-m", "demo-siglip", "--dtype", "bfloat16").text
    assert kernels["table"] in " ".join(planned.split())
    own.unlink()
    assert examined(vlmrun)["kernels"] == before


def test_differences_from_the_packaged_table_are_shown(vlmrun: Command, own: Path) -> None:
    own.parent.mkdir()
    row = {"cpu": [], "stored": "float16", "compute": "float32"}
    rows = [{**row, "kernels": [[8, "tiles"], [None, "loops"]]}, *packaged_rows()]
    own.write_text(json.dumps({"measured": "last summer", "rows": rows}))
    chosen = examined(vlmrun)["choices"]
    assert chosen["kernels"] == {
        "float16 in float32": {
            "choice": "tiles 8, loops",
            "reason": "measured here; packaged: loops",
        }
    }
    text = " ".join(vlmrun("doctor", "--no-color").text.split())
    assert "(last summer); " in text
    assert "float16 in float32 tiles 8, loops measured here; packaged: loops" in text


def packaged_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(PACKAGED.read_bytes())["rows"]
    return rows


def test_a_table_of_another_cpu_is_said(vlmrun: Command, own: Path) -> None:
    own.parent.mkdir()
    machine = {"cpu": "Elsewhere 3000", "features": []}
    own.write_text(json.dumps({"machine": machine, "rows": packaged_rows()}))
    reason = f"{own} was measured on another CPU, Elsewhere 3000"
    kernels = examined(vlmrun)["kernels"]
    assert kernels["reason"] == f"{reason}; --tune measures one"
    assert kernels["table"].startswith("packaged table ")
    planned = vlmrun("mem-plan", "-m", "demo-siglip", "--json").text
    assert reason in json.loads(planned)["products"]


def test_tuning_that_ends_early_or_is_disturbed_says_so(
    vlmrun: Command, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlmrun.memory import tuning
    from vlmrun.models.checkpoints.dtype import Dtype

    pair, counts = (Dtype.bfloat16, Dtype.float32), [1, 32, 64, 1, 32, 64]
    found = [tuning.Timing(pair, rows, {"loops": 0.002, "tiles": 0.001}) for rows in counts]
    monkeypatch.setattr(os, "getloadavg", lambda: (9.87, 1.0, 1.0))
    monkeypatch.setattr(tuning, "time_kernels", lambda pairs, **_: iter(found))
    done = vlmrun("doctor", "--tune", "-v", "--json", terminals="stderr")
    assert done.code == 0
    for line in (
        "vlmrun: other programs compute as well (load 9.87): ",
        "vlmrun: measuring kernels for about a minute",
        "vlmrun: bfloat16 in float32, 32 rows: loops 2 ms, tiles 1 ms\n",
        "6/18",
        "vlmrun: the time was up after 6 of 18 measurements: ",
    ):
        assert line in done.err
    kernels = json.loads(done.out)["choices"]["kernels"]
    assert {name: each["choice"] for name, each in kernels.items()} == {
        "bfloat16 in float32": "tiles"
    }
    before = own.read_bytes()
    monkeypatch.setattr(tuning, "time_kernels", lambda pairs, **_: iter(found[:5]))
    assert_refused(vlmrun("doctor", "--tune", "-q"), "5 measurements in 60 s are too few")
    assert own.read_bytes() == before
    assert [each.name for each in own.parent.iterdir()] == [own.name]


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
        (["--tuna"], "No such option: --tuna"),
    ],
)
def test_bad_usage(
    vlmrun: Command, flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert_refused(vlmrun("doctor", *flags), words, code=2)
