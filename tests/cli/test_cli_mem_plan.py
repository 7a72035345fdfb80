"""`vlmrun mem-plan`: its answer, its JSON, its exit codes, and what it must not touch."""

import json
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Command, assert_refused
from folders import copied, without
from PIL import Image

import vlmrun as package
from vlmrun.cli.command import Command as Parsed
from vlmrun.cli.program import parse
from vlmrun.models.family import View
from vlmrun.models.model import describe_model

DATA = Path(package.__file__).parent / "data"
PICTURES = DATA / "pictures"
MODELS = ("demo", "demo-siglip", "siglip", "llava-onevision-0.5b", "llava-onevision-7b")
KEYS = {
    "v": int,
    "model": str,
    "dtype": str,
    "dtype_reason": str,
    "device": str,
    "fits": bool,
    "budget": dict,
    "layers": list,
    "unused": dict,
    "working": dict,
    "peak": dict,
    "per_pass": dict,
    "floor": dict,
    "products": str,
    "attention": dict,
    "batch": int,
    "smallest_ram_bytes": int,
    "smallest_vram_bytes": int,
    "command": str,
}
TIERS = {"vram", "ram", "disk"}


def plan(vlmrun: Command, *argv: object) -> dict[str, Any]:
    done = vlmrun("mem-plan", "--json", *argv)
    assert done.err == ""
    fields: dict[str, Any] = json.loads(done.out)
    assert done.code == (0 if fields["fits"] else 4)
    return fields


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ram", ["600MiB", "1200MiB", "64GiB"])
def test_json_holds_the_whole_plan(vlmrun: Command, model: str, ram: str) -> None:
    found = plan(vlmrun, "-m", model, "--ram", ram)
    assert {key: type(value) for key, value in found.items()} == KEYS
    assert (found["v"], found["model"], found["device"]) == (1, model, "cpu")
    assert set(found["budget"]) == set(found["peak"]) == {"ram_bytes", "vram_bytes"}
    working = {"runtime_bytes", "picture_bytes", "activation_bytes", "kv_bytes", "slot_bytes"}
    assert set(found["working"]) == working
    assert set(found["per_pass"]) == {"disk_bytes", "link_bytes"}
    assert set(found["floor"]) == {"first_token_s", "decode_s_per_token", "image_s"}
    task = describe_model(model).family.task
    phases = {"vision", "decode"} if task == "caption" else {"vision"}
    for layer in found["layers"]:
        assert set(layer) == {"name", "tier", "bytes", "passes"}
        assert set(layer["tier"]) == phases
        assert set(layer["tier"].values()) <= TIERS
    assert found["fits"] == (found["peak"]["ram_bytes"] <= found["budget"]["ram_bytes"])
    if found["fits"]:
        assert found["command"] == f"vlmrun {task} -m {model} --ram {ram} INPUT..."


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_add_up_to_the_checkpoint_with_ties_once(
    vlmrun: Command, model: str, dtype: str
) -> None:
    found = plan(vlmrun, "-m", model, "--dtype", dtype)
    opened = describe_model(model)
    numbers = sum(
        info.nbytes // (4 if info.dtype == "F32" else 2)
        for name, info in opened.checkpoint.tensors.items()
        if not name.endswith("position_ids")
    )
    counted = sum(layer["bytes"] for layer in found["layers"]) + sum(found["unused"].values())
    assert counted == numbers * (4 if dtype == "float32" else 2)


@pytest.mark.parametrize("model", MODELS)
def test_the_smallest_budget_fits_and_less_does_not(vlmrun: Command, model: str) -> None:
    refused = vlmrun("mem-plan", "-m", model, "--ram", "100MiB")
    assert refused.code == 4
    flag = refused.text.split("the smallest that would do is --ram ")[1].split()[0]
    assert vlmrun("mem-plan", "-m", model, "--ram", flag).code == 0
    less = f"{int(flag.removesuffix('MiB')) - 1}MiB"
    assert vlmrun("mem-plan", "-m", model, "--ram", less).code == 4


def test_streamed_bytes_and_times_follow_the_budget(vlmrun: Command) -> None:
    roomy, tight = (
        plan(vlmrun, "-m", "llava-onevision-7b", "--ram", ram) for ram in ("64GiB", "4GiB")
    )
    assert roomy["per_pass"] == {"disk_bytes": 0, "link_bytes": 0}
    streamed = sum(
        layer["bytes"]
        for layer in tight["layers"]
        if layer["passes"] > 1 and layer["tier"]["decode"] == "disk"
    )
    gathered = next(x["bytes"] for x in tight["layers"] if x["name"] == "decoder.tokens")
    assert tight["per_pass"]["disk_bytes"] == streamed - gathered > 10e9
    assert tight["floor"]["decode_s_per_token"] >= (streamed - gathered) / 0.8e9
    assert tight["floor"]["decode_s_per_token"] > 10 * roomy["floor"]["decode_s_per_token"]


def test_the_table_says_what_was_opened_and_why(vlmrun: Command) -> None:
    done = vlmrun("mem-plan", "-m", "llava-onevision-0.5b", "--ram", "1200MiB", "--count", "10")
    assert done.code == 0
    for words in (
        "llava-onevision-0.5b (LLaVA-OneVision): shapes from the packaged catalogue",
        "decoder weights",
        "key-value cache",
        "slot for a layer",
        "1.17 GiB (as given)",
        "float16 (as stored in the checkpoint)",
        "2 crops, 1485 tokens",
        "at most 128 tokens",
        "disk 0.8 GB/s",
        "10 pictures",
        "fits:",
        "vlmrun caption -m llava-onevision-0.5b --ram 1200MiB INPUT...",
    ):
        assert words in done.text
    assert max(map(len, done.text.splitlines())) <= 100
    assert done.text == "\n".join(map(str.rstrip, done.text.splitlines())) + "\n"


@pytest.mark.parametrize("flags", [["--ram", "9MiB"], ["--ram", "1%", "-b", "4"]])
@pytest.mark.parametrize("model", MODELS)
def test_where_nothing_fits_the_command_is_one_that_does(
    vlmrun: Command, model: str, flags: list[str]
) -> None:
    done = vlmrun("mem-plan", "-m", model, *flags)
    assert done.code == 4
    _, _, *words, _ = shlex.split(done.lines[-1])
    assert words[words.index("--ram") + 1] == done.lines[-2].rpartition("--ram ")[2]
    assert vlmrun("mem-plan", *words).code == 0


def test_pictures_to_embed_take_at_least_their_time(vlmrun: Command) -> None:
    assert re.search(
        r"7 pictures .* at the assumed rates",
        vlmrun("mem-plan", "-m", "siglip", "--count", "7").text,
    )


def test_a_budget_that_the_machine_has_not_is_marked(vlmrun: Command) -> None:
    done = vlmrun("mem-plan", "-m", "demo", "--ram", "9000GiB")
    assert re.search(r"9000\.00 GiB \(as given, more than the [0-9.]+ GiB ", done.text)


def test_a_long_command_stays_on_one_line(vlmrun: Command) -> None:
    done = vlmrun("mem-plan", "-m", "demo", "-p", "word " * 40 + "end")
    assert shlex.split(done.text.splitlines()[-1])[4:6] == ["-p", "word " * 40 + "end"]


def test_every_prompt_of_a_picture_takes_its_time(vlmrun: Command) -> None:
    def seconds(*flags: str) -> str:
        done = vlmrun("mem-plan", "-m", "llava-onevision-0.5b", "--ram", "8GiB", *flags)
        line = next(line for line in done.lines if "0 pictures" in line)
        assert line.endswith(" if every answer takes 128 tokens")
        return line.removesuffix(" if every answer takes 128 tokens").split("pictures")[1]

    once, twice = (seconds("--count", n, "-p", "a") for n in ("1000", "2000"))
    assert seconds("--count", "1000", "-p", "a", "-p", "b") == twice != once


def test_layers_have_a_row_each(vlmrun: Command) -> None:
    done = vlmrun("mem-plan", "-m", "demo", "--layers")
    for layer in describe_model("demo").layers:
        used = layer.block != "vision.norm"
        assert any(line.startswith(f"{layer.name} ") for line in done.text.splitlines()) == used


def test_colour_is_for_terminals(vlmrun: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert b"\x1b[" not in vlmrun("mem-plan", "-m", "demo").out
    assert b"\x1b[" in vlmrun("mem-plan", "-m", "demo", terminals="stdout").out
    done = vlmrun("mem-plan", "-m", "demo", "--no-color", terminals="stdout")
    assert b"\x1b[3" not in done.out
    monkeypatch.setenv("NO_COLOR", "1")
    assert b"\x1b[3" not in vlmrun("mem-plan", "-m", "demo", terminals="stdout").out


def test_it_is_as_wide_as_the_terminal(vlmrun: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    done = vlmrun("mem-plan", "-m", "demo", "--no-color", terminals="stdout")
    assert max(map(len, done.text.splitlines())) <= 72


@pytest.mark.parametrize(
    ("flags", "key", "larger"),
    [
        (["--max-new-tokens", "4000"], "kv_bytes", True),
        (["-p", "word " * 500], "kv_bytes", True),
        (["--system", "word " * 500], "kv_bytes", True),
        (["--detail", "low"], "kv_bytes", False),
        (["-b", "4"], "activation_bytes", True),
        (["--resident", "50%"], "slot_bytes", True),
        (["--compute-dtype", "bfloat16"], "activation_bytes", False),
    ],
)
def test_flags_that_change_the_plan(
    vlmrun: Command, flags: list[str], key: str, larger: bool
) -> None:
    model = ["-m", "llava-onevision-0.5b", "--ram", "64GiB"]
    usual = plan(vlmrun, *model)["working"][key]
    changed = plan(vlmrun, *model, *flags)["working"][key]
    assert (changed > usual) if larger else (changed < usual)


def test_scores_are_planned_as_their_texts(vlmrun: Command) -> None:
    argv = ["-m", "demo-siglip", "-t", "a cat", PICTURES]
    assert plan(vlmrun, *argv, "--scores", "--no-normalize")["peak"] == plan(vlmrun, *argv)["peak"]
    told = vlmrun("mem-plan", *argv, "--scores").text.splitlines()[-1]
    assert told.startswith("vlmrun embed -m demo-siglip -t 'a cat' --scores ")


def test_a_plan_for_one_of_several_processes(vlmrun: Command) -> None:
    """Half of the cut matrices each; a number that does not divide the heads is refused."""
    model = ["-m", "llava-onevision-0.5b", "--ram", "8GiB"]
    whole, half = plan(vlmrun, *model), plan(vlmrun, *model, "--tp", "2")
    decoder = [
        sum(each["bytes"] for each in found["layers"] if each["name"].startswith("decoder.layers"))
        for found in (whole, half)
    ]
    assert 0.5 < decoder[1] / decoder[0] < 0.51  # norms are whole
    assert half["command"] == (
        "torchrun --nproc-per-node 2 --no-python vlmrun caption --tp -m llava-onevision-0.5b "
        "--ram 8GiB INPUT..."
    )
    told = "one of 2 processes: every figure is for one of them"
    assert vlmrun("mem-plan", *model, "--tp", "2").lines[1] == told
    assert "processes" not in vlmrun("mem-plan", *model).text
    refused = vlmrun("mem-plan", *model, "--tp", "3")
    assert_refused(refused, "3 processes do not divide the 16 vision heads", code=2)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["-m", "siglip"], "729 tokens (of the tower's own size)"),
        (["-m", "siglip", "--dynamic-size"], "784 tokens (of the tower's own size)"),
        (["-m", "siglip2-naflex"], "256 tokens (the default of --max-patches)"),
        (["-m", "siglip2-naflex", "--max-patches", "99"], "99 tokens (as --max-patches asks)"),
        (["-m", "llava-1.5-7b"], "576 tokens (of the tower's own size)"),
    ],
)
def test_without_pictures_it_says_what_it_takes_one_for(
    vlmrun: Command, flags: list[str], told: str
) -> None:
    """And that a larger one costs more: its decoding, where it is seen as the same square."""
    larger = "a larger one costs more: name pictures to plan for them"
    done = vlmrun("mem-plan", *flags)
    at = next(i for i, line in enumerate(done.lines) if line.startswith("a picture"))
    assert done.lines[at].endswith(f" 1 crop, {told}")
    assert done.lines[at + 1].split("  ")[-1].strip() == larger
    assert larger not in vlmrun("mem-plan", *flags, PICTURES).text


def test_a_batch_says_why(vlmrun: Command) -> None:
    model = ["mem-plan", "-m", "llava-onevision-0.5b"]
    for flags, why in (
        (["--ram", "64GiB"], "1 (all rows of the job)"),
        (["--ram", "64GiB", PICTURES], "6 (all rows of the job)"),
        (["--ram", "64GiB", PICTURES, "-p", "a", "-p", "b"], "8 (the most that is tried)"),
        (["--ram", "1500MiB", PICTURES], "(more would not fit, or read more for each row)"),
        (["-b", "2"], "2 (asked for)"),
    ):
        assert re.search(rf"^batch +.*{re.escape(why)}$", vlmrun(*model, *flags).text, re.M), why


def test_only_what_the_job_uses_is_counted(vlmrun: Command) -> None:
    def parts(*flags: object) -> set[str]:
        found = plan(vlmrun, "-m", "demo-siglip", *flags)
        return {layer["name"].partition(".")[0] for layer in found["layers"]}

    assert parts() == {"vision"}
    assert parts("-t", "a cat") == {"text"}
    assert parts("-t", "a cat", PICTURES) == {"vision", "text"}
    last = plan(vlmrun, "-m", "demo-siglip", "--output-kind", "hidden:-2")
    names = [layer["name"] for layer in last["layers"]]
    assert "vision.head" not in names
    assert "vision.norm" not in names


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-m", "demo-siglip", "-p", "x"], "-p: demo-siglip embeds"),
        (["-m", "demo-siglip", "--detail", "low"], "--detail: demo-siglip embeds"),
        (["-m", "demo", "-t", "x"], "-t: demo captions"),
        (["-m", "demo", "--output-kind", "last-hidden"], "--output-kind: demo captions"),
        (["-m", "demo", "--count", "0"], "--count"),
        (["-m", "demo", "-"], "standard input cannot be read here"),
        (["-m", "demo", "--files-from", "-"], "standard input cannot be read here"),
        (["-m", "demo-siglip", "--texts-from", "-"], "standard input is not read here"),
        (["-m", "demo", "nowhere.png"], "no such file"),
        (["-m", "demo", "--vram", "6GiB", "--device", "cpu"], "--vram is given"),
        (["-m", "demo", "--temperature", "1"], "No such option"),
    ],
)
def test_bad_usage_of_mem_plan_exits_2(vlmrun: Command, argv: list[str], words: str) -> None:
    done = vlmrun("mem-plan", *argv)
    assert (done.code, done.out) == (2, b"")
    assert words in done.err


def test_a_flag_of_the_other_task_names_a_model_for_it(vlmrun: Command) -> None:
    for argv, hint in (
        (["-t", "hi"], "name a model that embeds, as -m siglip"),
        (["-m", "demo-siglip", "-p", "x"], "a model that captions, as -m llava-onevision-0.5b"),
    ):
        words = hint.split()
        done = vlmrun("mem-plan", *argv)
        assert_refused(done, argv[-2], hint=hint, code=2)
        assert vlmrun("mem-plan", *argv[-2:], *words[-2:]).code == 0


def test_of_pictures_only_headers_are_read(vlmrun: Command, tmp_path: Path) -> None:
    Image.new("RGB", (3000, 2000)).save(tmp_path / "large.png")
    whole = (tmp_path / "large.png").read_bytes()
    (tmp_path / "large.png").write_bytes(whole[:60])  # header only: its pixels are gone
    (tmp_path / "broken.png").write_bytes(b"no picture")
    done = vlmrun("mem-plan", "-m", "llava-onevision-0.5b", tmp_path)
    assert done.code == 0
    image = describe_model("llava-onevision-0.5b").family.image_cost(
        describe_model("llava-onevision-0.5b").architecture, 3000, 2000, View()
    )
    assert f"{image.crops} crops, {image.tokens} tokens" in done.text
    assert f"{tmp_path}/broken.png: " in done.err
    assert "left out of the plan" in done.err
    (tmp_path / "large.png").unlink()
    done = vlmrun("mem-plan", "-m", "demo", tmp_path)
    assert done.code == 1
    assert "none of the pictures can be read" in done.err


def test_standard_input_is_not_read(vlmrun: Command) -> None:
    planned = ("mem-plan", "-m", "demo", "--ram", "1GiB")
    assert vlmrun(*planned, stdin=b"x.png\n") == vlmrun(*planned)


@pytest.mark.parametrize(
    ("environment", "argv", "key", "value"),
    [
        ({"VLMRUN_MODEL": "demo-siglip"}, [], "model", "demo-siglip"),
        ({"VLMRUN_MODEL": "demo-siglip"}, ["-m", "demo"], "model", "demo"),
        ({"VLMRUN_EMBED_MODEL": "demo-siglip"}, [], "model", "llava-onevision-0.5b"),
        ({}, [], "model", "llava-onevision-0.5b"),
        ({"VLMRUN_DTYPE": "fp32"}, [], "dtype", "float32"),
        ({"VLMRUN_DTYPE": "fp32"}, ["--dtype", "bf16"], "dtype", "bfloat16"),
        ({"VLMRUN_RAM": "9GiB"}, [], "budget", {"ram_bytes": 9 << 30, "vram_bytes": 0}),
        ({"VLMRUN_RAM": "9GiB"}, ["--ram", "8G"], "budget", {"ram_bytes": 8 << 30}),
        ({"VLMRUN_VRAM": "6GiB"}, ["--device", "cpu"], "device", "cpu"),
    ],
)
def test_environment(
    vlmrun: Command,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    argv: list[str],
    key: str,
    value: Any,
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    found = plan(vlmrun, *argv)[key]
    assert (found | value if isinstance(value, dict) else found) == (
        found if isinstance(value, dict) and value.items() <= found.items() else value
    )


@pytest.mark.parametrize(
    "flags",
    [
        ["-m", "demo-siglip", "-t", "two words", "-t", "it's", "--output-kind", "pooled"],
        ["-m", "demo", "-p", "a=one two", "-p", "b", "--max-new-tokens", "7", "--detail", "low"],
        ["-m", "demo", "--ram", "2GiB", "-b", "2", "--resident", "50%", "--dtype", "fp32"],
        ["-m", "demo", "-r", "--max-pixels", "1000000", "--offline"],
    ],
)
def test_the_command_runs_what_was_planned(vlmrun: Command, flags: list[str]) -> None:
    command = plan(vlmrun, *flags, "--count", "3", PICTURES)["command"]
    program, name, *words = shlex.split(command)
    assert (program, words[-1]) == ("vlmrun", str(PICTURES))
    assert isinstance(parse([name, *words]), Parsed)
    kept = [word for word in flags if word not in ("--output-kind", "pooled")]
    assert sorted(words[:-1]) == sorted(kept)


def test_the_command_names_a_model_that_the_environment_chose(
    vlmrun: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan(vlmrun)["command"] == "vlmrun caption INPUT..."
    monkeypatch.setenv("VLMRUN_MODEL", "demo-siglip")
    assert plan(vlmrun)["command"] == "vlmrun embed -m demo-siglip INPUT..."


def test_what_a_run_would_refuse_is_noted(vlmrun: Command, tmp_path: Path) -> None:
    """The plan is the same; a script that runs at night should know before."""
    folder = copied(DATA / "demo-llava", tmp_path / "m", without("tokenizer.json"))
    done = vlmrun("mem-plan", "-m", folder)
    assert done.code == 0
    assert done.err == "vlmrun: vlmrun caption would refuse it: tokenizer.json is missing\n"
    assert vlmrun("mem-plan", "-m", "demo").err == ""


def test_quiet_leaves_notes_out(vlmrun: Command, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "fine.png").write_bytes((PICTURES / "elephant.png").read_bytes())
    assert "broken.png" in vlmrun("mem-plan", "-m", "demo", tmp_path).err
    assert vlmrun("mem-plan", "-q", "-m", "demo", tmp_path).err == ""


@pytest.mark.parametrize(
    ("argv", "absent", "seconds"),
    [
        (["--help"], "torch transformers numpy PIL huggingface_hub pydantic", 0.4),
        (["mem-plan", "-m", "demo"], "torch transformers numpy PIL huggingface_hub", 0.5),
        (["mem-plan", "-m", "siglip"], "torch transformers numpy PIL huggingface_hub", 0.5),
        (["mem-plan", "-m", "demo", str(PICTURES)], "torch transformers huggingface_hub", 0.8),
        (["caption", "-m", str(DATA / "pictures"), str(PICTURES)], "torch transformers", 0.8),
        (["caption", "-m", "demo", "--ram", "9MiB", str(PICTURES)], "torch transformers", 0.8),
        (["embed", "--output-kind", "mean", str(PICTURES)], "torch transformers", 0.8),
    ],
)
def test_light_commands_are_light_and_fast(argv: list[str], absent: str, seconds: float) -> None:
    program = (
        "import sys; from vlmrun.cli import main; main(sys.argv[1:]); "
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    loaded = set(done.stderr.decode().splitlines()[-1].split())
    assert {"vlmrun", "typer"} <= loaded
    assert loaded.isdisjoint(absent.split())
    # CPU time, because the tests share the machine's cores.
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < seconds


def test_so_many_pictures_run_in_the_batch_that_they_would(vlmrun: Command) -> None:
    def batch(*flags: str) -> str:
        lines = vlmrun("mem-plan", "-m", "llava-onevision-0.5b", "--ram", "16GiB", *flags).lines
        return next(" ".join(line.split()[1:]) for line in lines if line.startswith("batch "))

    assert batch() == "1 (all rows of the job)"
    assert batch("--count", "3") == "3 (all rows of the job)"
    assert batch("--count", "100") == "8 (the most that is tried)"
