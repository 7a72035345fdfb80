"""`vlmrun models`: every short name, from packaged shapes and the hub cache alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Command, Done, assert_refused
from light import write_header
from PIL import Image

from vlmrun.models.checkpoints.aliases import ALIASES
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.listed import NAMES

NEEDS = {"ram_bytes", "smallest_ram_bytes", "vram_bytes", "smallest_vram_bytes", "gpu_ram_bytes"}

pytestmark = pytest.mark.usefixtures("cache", "no_network")


def rows(done: Done) -> dict[str, dict[str, Any]]:
    assert (done.code, done.err) == (0, "")
    return {row["model"]: row for row in done.rows}


def fill(cache: Path, repo_id: str, *files: str) -> None:
    """Some files of a repository in the hub cache."""
    entry = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = entry / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("c0ffee")
    for name in files:
        if name.endswith(".safetensors"):
            write_header(snapshot / name, {})
        else:
            (snapshot / name).write_text("{}")


def test_one_line_for_every_short_name(vlmrun: Command) -> None:
    done = vlmrun("models")
    assert (done.code, done.err) == (0, "")
    words = [line.split() for line in done.lines]
    listed = [line for line in words if line and line[0] in NAMES]
    assert tuple(line[0] for line in listed) == NAMES
    assert {len(line) for line in listed} == {9}
    assert ["siglip", "embed", "float32", "no", "3.27"] in [line[:5] for line in listed]
    assert ["demo", "caption", "bfloat16", "whole", "0.01"] in [line[:5] for line in listed]
    assert max(len(line) for line in done.lines) <= 80
    assert "…" not in done.text
    legend = done.text.rpartition("\n\n")[2]
    assert all(f"{column}: " in legend for column in ("size", "cached", "all", "least"))


def test_json_has_a_line_for_every_short_name(vlmrun: Command) -> None:
    found = rows(vlmrun("models", "--json"))
    assert tuple(found) == NAMES
    for name, row in found.items():
        assert (row["v"], row["repo_id"]) == (1, ALIASES.get(name))
        assert row["task"] in ("caption", "embed")
        assert row["bytes"] == row["parameters"] * (4 if row["dtype"] == "float32" else 2)
        assert set(row["needs"]) == set(Dtype)
        for dtype, needs in row["needs"].items():
            assert set(needs) == NEEDS
            assert needs["smallest_ram_bytes"] <= needs["ram_bytes"], dtype
            assert needs["smallest_vram_bytes"] <= needs["vram_bytes"], dtype
    assert found["demo"]["cached"] == found["demo-siglip"]["cached"] == "packaged"
    assert {found[name]["cached"] for name in ALIASES} == {"no"}


def test_a_name_tells_every_dtype(vlmrun: Command) -> None:
    done = vlmrun("models", "siglip", "demo")
    assert (done.code, done.err) == (0, "")
    assert "siglip: google/siglip-so400m-patch14-384, not in the hub cache" in done.lines
    assert "878.0 million parameters, 3.27 GiB stored as float32" in done.lines
    assert "demo: packaged with vlmrun" in done.lines
    needed = [line.split() for line in done.lines if line.split()[:1] in [[d] for d in Dtype]]
    assert [line[0] for line in needed] == [*Dtype, *Dtype]
    (row,) = rows(vlmrun("models", "--json", "siglip")).values()
    ram = row["needs"]["bfloat16"]["ram_bytes"]
    assert needed[1][1] == f"{ram / 2**30:.2f}"


def test_what_of_a_model_is_cached(vlmrun: Command, cache: Path) -> None:
    fill(cache, ALIASES["siglip"], "config.json", "model.safetensors")
    fill(cache, ALIASES["siglip-base"], "config.json")
    fill(cache, ALIASES["siglip2-naflex"], "model.safetensors")
    found = rows(vlmrun("models", "--json", "siglip", "siglip-base", "siglip2-naflex", "bakllava"))
    assert [row["cached"] for row in found.values()] == ["whole", "partly", "partly", "no"]
    table = [line.split()[:4] for line in vlmrun("models").lines]
    assert ["siglip-base", "embed", "float32", "partly"] in table
    assert "whole in the hub cache" in vlmrun("models", "siglip").text


@pytest.mark.parametrize("name", NAMES)
def test_the_least_is_what_mem_plan_asks_for(vlmrun: Command, name: str) -> None:
    (row,) = rows(vlmrun("models", "--json", name)).values()
    plan = json.loads(vlmrun("mem-plan", "--json", "-m", name, "--ram", "400GiB", "--offline").out)
    needs = row["needs"][row["dtype"]]
    assert plan["fits"]
    assert plan["smallest_ram_bytes"] == needs["smallest_ram_bytes"]
    assert plan["peak"]["ram_bytes"] == needs["ram_bytes"]
    whole = sum(layer["bytes"] for layer in plan["layers"]) + sum(plan["unused"].values())
    assert (plan["dtype"], whole) == (row["dtype"], row["bytes"])


def test_a_model_that_is_partly_cached_is_planned_from_its_shapes(
    vlmrun: Command, cache: Path
) -> None:
    """NaFlex: how many patches a picture has, stands in a file that is not there yet."""
    untouched = vlmrun("mem-plan", "--json", "-m", "siglip2-naflex", "--ram", "8GiB")
    fill(cache, ALIASES["siglip2-naflex"], "config.json")
    assert vlmrun("mem-plan", "--json", "-m", "siglip2-naflex", "--ram", "8GiB") == untouched
    assert untouched.code == 0


@pytest.mark.parametrize("name", ["nix", "", "google/siglip-so400m-patch14-384", "./siglip"])
def test_a_name_that_stands_for_nothing(vlmrun: Command, name: str) -> None:
    done = vlmrun("models", "siglip", name)
    assert_refused(done, repr(name), "not the short name", hint="vlmrun models lists", code=2)


@pytest.mark.parametrize(("command", "name"), [("caption", "siglip"), ("embed", "llava-1.5-7b")])
def test_the_other_command_is_named_before_the_hub_is_asked(
    vlmrun: Command, command: str, name: str, tmp_path: Path
) -> None:
    Image.new("RGB", (9, 9)).save(tmp_path / "x.png")
    other = {"caption": "embed", "embed": "caption"}[command]
    done = vlmrun(command, "-m", name, "--offline", tmp_path / "x.png")
    assert_refused(done, name, f"is made for vlmrun {other}", hint=f"use vlmrun {other}")


def test_a_name_near_others_is_told_them(vlmrun: Command) -> None:
    done = vlmrun("models", "PaliGemma")
    assert_refused(done, "'PaliGemma'", hint="as paligemma-3b or paligemma-3b-448 or", code=2)


def test_no_torch_and_no_hub_library_for_a_list() -> None:
    code = (
        "import sys; from vlmrun.cli import main; main(['models']); "
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
