"""What this machine is taken to be, and what is chosen on it."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from vlmrun.memory import machine
from vlmrun.memory.budget import Gpu
from vlmrun.memory.machine import Choice, best_of, buffer_bytes, cache_bytes, look_around
from vlmrun.memory.products import cpu_name
from vlmrun.memory.threads import Threads


def test_this_machine() -> None:
    found = look_around(device="cpu", threads=1)
    assert found.versions["vlmrun"] == "0.1.0"
    assert (found.device, found.device_reason) == ("cpu", "asked for")
    assert found.budget.threads == Threads(1, "asked for")
    assert 0 < found.available_bytes <= found.total_bytes == psutil.virtual_memory().total
    assert found.load >= 0
    assert machine.installed("no-such-package-as-this") is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: A CPU @ 3 GHz \nflags\t: x\nmodel name\t: B\n", "A CPU"),
        ("CPU implementer\t: 0x41\n", None),
        (None, None),
    ],
)
def test_the_name_of_a_cpu(text: str | None, name: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    found = cpu_name(tmp_path / "cpuinfo")
    assert found == (f"{name} @ 3 GHz" if name else machine.platform.machine())


def test_caches_count_once(tmp_path: Path) -> None:
    for cpu in range(4):
        for index, (level, kind, shared, size) in enumerate(
            [
                ("1", "Data", f"{cpu}", "32K"),
                ("1", "Instruction", f"{cpu}", "16K"),
                ("3", "Unified", "0-1" if cpu < 2 else "2-3", "1024K"),
            ]
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("type", kind), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{value}\n")
            (folder / "size").write_text(f"{size}\n")
    (tmp_path / "cpu4" / "cache" / "index0").mkdir(parents=True)  # the kernel says nothing of it
    assert cache_bytes(tmp_path) == (4 * 48 + 2 * 1024) << 10
    assert cache_bytes(tmp_path / "nowhere") == 0


def test_the_buffer_is_larger_than_the_caches_and_leaves_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = look_around(device="cpu", threads=None)
    roomy = replace(found, available_bytes=1 << 40, budget=replace(found.budget, ram_bytes=1 << 40))
    for cache, wanted in ((1 << 20, 256 << 20), (1 << 30, 4 << 30)):
        monkeypatch.setattr(machine, "cache_bytes", lambda cache=cache: cache)
        assert buffer_bytes(roomy) == wanted
    tight = replace(roomy, budget=replace(found.budget, ram_bytes=100 << 20))
    assert buffer_bytes(tight) == 25 << 20
    on_gpu = replace(
        roomy, device="cuda:1", gpus=(Gpu("one", 1, 1), Gpu("other", 400 << 20, 1 << 40))
    )
    assert buffer_bytes(on_gpu) == 100 << 20


def test_the_folder_that_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    assert machine.scratch_folder() == tmp_path
    (tmp_path / "not" / "yet").mkdir(parents=True)
    assert machine.scratch_folder() == tmp_path / "not" / "yet"
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: "/elsewhere")
    assert machine.scratch_folder() == Path("/elsewhere")


def test_flash_attention_is_the_best_where_it_works() -> None:
    sdpa = Choice("attention", "sdpa", "works", "a kernel")
    for answer, best in (("works", "flash_attention_2"), ("fails", "sdpa"), ("refused", "sdpa")):
        flash = Choice("attention", "flash_attention_2", answer, "tried")
        assert best_of([sdpa, flash])[0] == best
