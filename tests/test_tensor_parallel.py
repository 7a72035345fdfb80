"""Two processes that share a model give what one gives (gloo, on the CPU)."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from commands import Command
from tiny import build_onevision, build_siglip
from tiny_paligemma import build_paligemma

from vlmrun.cli import processes
from vlmrun.errors import OutOfBudget, ProcessLost

WORKER = Path(__file__).parent / "parallel_worker.py"
PICTURES = sorted((Path(__file__).parents[1] / "vlmrun/data/pictures").glob("*.png"))[:3]
TEXTS = ["-t", "a red apple", "-t", "two cats"]
CAPTION = ["caption", "--max-new-tokens", "8", "--prompt", "what is in the picture?", *PICTURES]
EMBED = ["embed", *PICTURES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "siglip": build_siglip(root / "siglip"),
        "onevision": build_onevision(root / "onevision"),
        "paligemma": build_paligemma(root / "paligemma"),
    }


@pytest.fixture(scope="module")
def commands(folders: Mapping[str, Path]) -> dict[str, list[str]]:
    """Command lines by a name, all but where their output goes."""
    broken = folders["siglip"].parent / "broken.png"
    broken.write_bytes(b"no picture")
    lines: dict[str, list[object]] = {
        "vectors": [*EMBED, *TEXTS, "-m", folders["siglip"]],
        "vectors, streamed": [*EMBED, *TEXTS, "-m", folders["siglip"], "--resident", "0%"],
        "vectors, halves": [*EMBED, *TEXTS, "-m", folders["siglip"], "--dtype", "bfloat16"],
        "vectors, int8": [*EMBED, *TEXTS, "-m", folders["siglip"], "--dtype", "int8"],
        "patches": [*EMBED, "-m", folders["siglip"], "--output-kind", "hidden:-2"],
        "onevision": [*CAPTION, "-m", folders["onevision"]],
        "onevision, streamed": [*CAPTION, "-m", folders["onevision"], "--resident", "0%"],
        "onevision, int8": [*CAPTION, "-m", folders["onevision"], "--dtype", "int8"],
        "onevision, drawn": [*CAPTION, "-m", folders["onevision"], "--temperature", "1"],
        "paligemma": [*CAPTION, "-m", folders["paligemma"]],
        "a broken picture": [*CAPTION, broken, "-m", folders["onevision"]],
    }
    return {name: [str(word) for word in line] for name, line in lines.items()}


def output(folder: Path, name: str, line: Sequence[str]) -> Path:
    kind = "npy" if line[0] == "embed" else "jsonl"
    return folder / f"{name}.{kind}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, commands: dict[str, list[str]]) -> Path:
    """What two processes wrote, and in `codes.RANK` what else came of it."""
    folder = tmp_path_factory.mktemp("shared")
    lines = [
        [*line, "--tp", "-o", str(output(folder, name, line))] for name, line in commands.items()
    ]
    listed = folder / "codes"
    listed.write_text("\n".join(json.dumps(line) for line in lines))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "--standalone", WORKER, listed],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (folder / "told").write_text(done.stderr)
    return folder


def found_by(folder: Path, rank: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / f"codes.{rank}").read_text())
    return found


def single(vlmrun: Command, folder: Path, name: str, line: list[str]) -> Path:
    path = output(folder, name, line)
    assert vlmrun(*line, "-o", path).code in (0, 3)
    return path


def test_vectors_are_those_of_one_process(
    vlmrun: Command, shared: Path, commands: dict[str, list[str]], tmp_path: Path
) -> None:
    for name in ("vectors", "vectors, streamed", "vectors, int8", "patches"):
        line = commands[name]
        found = np.load(output(shared, name, line))
        expected = np.load(single(vlmrun, tmp_path, name, line))
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    halves = commands["vectors, halves"]
    found = np.load(output(shared, "vectors, halves", halves))
    expected = np.load(single(vlmrun, tmp_path, "vectors, halves", halves))
    assert np.sum(found * expected, axis=1).min() > 0.999


@pytest.mark.parametrize(
    "name", ["onevision", "onevision, streamed", "onevision, int8", "onevision, drawn", "paligemma"]
)
def test_f19_tokens_are_those_of_one_process(
    vlmrun: Command, shared: Path, commands: dict[str, list[str]], tmp_path: Path, name: str
) -> None:
    """vllm#6910, #7186: PaliGemma crashes and LLaVA is wrong where processes share them."""
    line = commands[name]
    texts = [
        [json.loads(row)["caption"] for row in path.read_text().splitlines()]
        for path in (output(shared, name, line), single(vlmrun, tmp_path, name, line))
    ]
    assert len(texts[0]) == len(PICTURES)
    assert texts[0] == texts[1]


def test_residency_under_two_processes_never_changes_the_bits(
    shared: Path, commands: dict[str, list[str]]
) -> None:
    files = [output(shared, n, commands[n]) for n in ("vectors", "vectors, streamed")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_only_the_first_process_talks(shared: Path, commands: dict[str, list[str]]) -> None:
    """One error line for the broken picture, and from the first process the code for it: after
    another's, torchrun would end the first while it writes."""
    told = (shared / "told").read_text()
    assert told.count("broken.png") == 1
    for rank, code in enumerate((3, 0)):
        expected = [code if name == "a broken picture" else 0 for name in commands]
        assert found_by(shared, rank)["codes"] == expected


def test_a_process_that_has_ended_is_no_fault_of_the_others(shared: Path) -> None:
    assert str(found_by(shared, 0)["lost"]).startswith("ProcessLost: lost another process of --tp")


def test_processes_agree_on_the_least_and_on_what_they_read(shared: Path) -> None:
    for rank in (0, 1):
        found = found_by(shared, rank)
        assert found["least"] == 6
        assert str(found["differ"]).startswith("ImageError: the processes of --tp read different")


@pytest.mark.parametrize(
    ("line", "environment", "expected"),
    [
        (["caption", "--tp", *PICTURES], {}, "--tp needs several processes"),
        (
            ["embed", "--tp", "--files-from", "-"],
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "standard input",
        ),
        (
            ["caption", *PICTURES],
            {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
            "each would do the whole job",
        ),
        (
            ["caption", "-m", "demo", "--tp", *PICTURES],
            {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"},
            "--tp: 3 processes do not divide",
        ),
    ],
)
def test_misuse_is_told_before_anything_is_loaded(
    line: list[object],
    environment: dict[str, str],
    expected: str,
    vlmrun: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = vlmrun(*line)
    assert done.code == 2
    assert expected in done.err


def test_another_process_leaves_the_telling_to_the_first(
    vlmrun: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tells what the first did not: where it does, torchrun has ended this one by then."""
    waited: list[float] = []
    monkeypatch.setattr(processes.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    done = vlmrun("caption", "--tp", "no-such-file.png")
    assert waited == [processes.PATIENCE]
    assert done.code == 2
    assert done.err.startswith("vlmrun: error: process 1: ")


@pytest.mark.parametrize(
    "line", [["caption", *PICTURES], ["caption", "--fly"], ["caption", "--tp", "--fly"]]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_misuse_under_torchrun_is_told_once(
    line: list[object], rank: int, vlmrun: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once by the first process, whose end ends the others while they wait."""
    waited: list[float] = []
    monkeypatch.setattr(processes.time, "sleep", waited.append)
    for name, value in (("RANK", str(rank)), ("WORLD_SIZE", "2"), ("TORCHELASTIC_RUN_ID", "x")):
        monkeypatch.setenv(name, value)
    assert vlmrun(*line).code == 2
    assert waited == [processes.PATIENCE] * rank


def test_the_first_process_leaves_the_telling_to_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(processes.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "0")
    assert processes.let_others_tell(["embed", "--tp"], OutOfBudget("too little")) == ""
    assert waited == []
    assert processes.let_others_tell(["embed", "--tp"], ProcessLost("it")) == ""
    assert waited == [2 * processes.PATIENCE]
