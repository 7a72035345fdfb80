"""The comparison with peers: what it says of numbers, and that it runs at tiny sizes."""

import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)


def bench(*flags: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, SCRIPTS / "bench.py", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True)


def test_unknown_names_and_no_rounds_are_refused() -> None:
    for flags in (["--only", "everything"], ["--rounds", "0"]):
        done = bench(*flags)
        assert done.returncode == 2
        assert flags[0] in done.stderr


def test_marks_are_ratios_of_medians() -> None:
    from peers.table import marks_table

    rounds = {
        "vlmrun bf16": [{"first_s": s, "peak_bytes": 2**30} for s in (9.0, 2.0, 3.0)],
        "transformers bf16": [{"first_s": 21.0}],
        "transformers fp32": [{"first_s": 4.5, "peak_bytes": 2**31}, {"peak_bytes": 2**31}],
    }
    rows = "\n".join(marks_table({"caption": rounds}))
    assert "| vlmrun bf16: 3.00 | transformers bf16: 21.00 | 7.00 | ≥ 7 | yes |" in rows
    assert "| vlmrun bf16: 3.00 | transformers fp32: 4.50 | 1.50 | ≥ 1.6 | no |" in rows
    assert "| vlmrun bf16: 1.00 | transformers fp32: 2.00 | 0.50 | ≤ 0.5 | yes |" in rows
    assert "| vlmrun bf16: not measured |" in rows  # tokens/s


def test_what_could_not_be_measured_says_why() -> None:
    from peers.table import marks_table

    rounds = {"a": [], "vlmrun bf16": [{"tokens_s": 20.0}]}
    missing = {"llama.cpp bf16": [{"missing": "llama_cpp is not installed"}]}
    rows = marks_table({"decode-long": {**rounds, **missing}})
    assert "| vlmrun bf16: 20.00 | llama.cpp bf16: llama_cpp is not installed |  |" in rows[2]


def test_a_later_first_run_and_a_cosine_need_no_ratio() -> None:
    from peers.table import marks_table

    start = {
        "vlmrun, nothing compiled": [{"whole_s": 14.5}],
        "vlmrun, a later run": [{"whole_s": 10}],
    }
    cosine = {"vlmrun bf16": [{"cosine": 0.99991}]}
    rows = marks_table({"start": start, "cosine": cosine})
    assert rows[2].endswith("| 4.50 s | ≤ 3 s | no |")
    assert rows[3].endswith("| 0.999910 | > 0.9999 | yes |")


def test_tokens_of_a_batch_are_timed_by_step() -> None:
    from peers.task import Task, Ticks, rates

    ticks = Ticks()
    assert [bool(ticks) for _ in range(6)] == [False] * 6
    assert len(ticks.times) == 6
    task = Task(peer="vlmrun", kind="decode", folder="", dtype="", rows=2, new_tokens=3)
    found = rates([1, 1, 1.5, 1.5, 2, 2], ready=0.25, task=task)
    assert found["first_s"] == 0.75
    assert found["tokens_s"] == 4  # two rows, two steps, in a second
    with pytest.raises(RuntimeError, match="5 tokens were timed, not 6"):
        rates([1] * 5, ready=0, task=task)


def test_gguf_holds_the_same_decoder(tiny_onevision: Path, tmp_path: Path) -> None:
    """As read back by transformers, which knows what llama.cpp's own converter writes."""
    pytest.importorskip("gguf")
    from peers.gguf_file import write_gguf
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    write_gguf(tiny_onevision, tmp_path / "text.gguf", "bfloat16")
    whole = transformers.LlavaOnevisionForConditionalGeneration.from_pretrained(tiny_onevision)
    wanted = whole.config.text_config
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="text.gguf")
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "rope_parameters"):
        assert getattr(config, name) == getattr(wanted, name), name
    with torch.device("meta"):
        module = transformers.Qwen2ForCausalLM(config)
    read = load_gguf_checkpoint(tmp_path / "text.gguf", return_tensors=True, model_to_load=module)
    tensors = {name.removeprefix("model."): value for name, value in read["tensors"].items()}
    stock = dict(whole.model.language_model.named_parameters())
    assert tensors.keys() == stock.keys()  # the head is tied
    for name, value in stock.items():
        kept = value.bfloat16().float() if value.ndim > 1 else value
        assert torch.equal(tensors[name].float(), kept), name


@pytest.mark.parametrize("peer", ["vlmrun", "transformers"])
def test_a_peer_measures_what_it_is_asked(
    peer: Any, tiny_onevision: Path, tiny_siglip: Path, tmp_path: Path
) -> None:
    from bench import pictures
    from peers.measure import measured
    from peers.task import Task

    (tmp_path / "siglip").symlink_to(tiny_siglip)
    four = pictures(tmp_path, "siglip", 4)
    task = Task(
        peer=peer, kind="decode", folder=str(tiny_onevision), dtype="bfloat16", new_tokens=3
    )
    found = measured(replace(task, context=5, rows=2))
    assert 0 < found["first_s"] < found["whole_first_s"]
    assert found["tokens_s"] > 0
    assert found["peak_bytes"] > 2**20
    assert measured(replace(task, kind="caption", pictures=four[:1]))["tokens_s"] > 0
    vectors = tmp_path / "vectors.npy"
    towers = replace(task, kind="embed", folder=str(tiny_siglip), pictures=four, batch=2)
    assert measured(replace(towers, vectors=str(vectors)))["images_s"] > 0
    assert np.load(vectors).shape == (4, 48)


@pytest.mark.skipif(
    find_spec("openvino") is not None, reason="it is about a peer that is not there"
)
def test_a_peer_that_is_not_installed_is_asked_once(tmp_path: Path) -> None:
    from bench import child_environment, parsed, rounds_of
    from peers.comparisons import OPENVINO, Comparison
    from peers.task import Task

    task = Task(peer="openvino", kind="embed", folder="", dtype="float32")
    comparison = Comparison("base", "towers", {OPENVINO: task}, prepared=(OPENVINO,))
    environment = child_environment(parsed(["--folder", str(tmp_path)]))
    found = rounds_of(comparison, 3, environment)
    assert found == {OPENVINO: [{"missing": "openvino is not installed"}]}


@pytest.mark.slow
def test_peers_take_turns(tiny_onevision: Path, tiny_siglip: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_onevision, tmp_path / "onevision-0.5b")
    for name in ("siglip-so400m", "siglip-base"):
        shutil.copytree(tiny_siglip, tmp_path / name)
    page = tmp_path / "page.md"
    names = ("--only", "caption", "decode-short", "start", "cosine", "--rounds", 1)
    tiny = ("--folder", tmp_path, "--contexts", 4, 12, "--new-tokens", 3, "--output", page)
    done = bench(*names, *tiny)
    assert done.returncode == 0, done.stderr
    assert done.stdout == page.read_text() + "\n"
    assert "failed" not in done.stdout
    [same] = [line for line in done.stdout.splitlines() if line.startswith("| same weights")]
    assert same.endswith("| yes |")
