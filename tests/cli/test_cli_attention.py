"""`--attention`: what is taken is said, what cannot work is refused in two lines."""

import json
from pathlib import Path

import pytest
from commands import Command, assert_refused

FUSED = "PyTorch has a fused kernel for heads of 48 in float32 on cpu"
IN_FLOAT32 = ("--compute-dtype", "float32", "--device", "cpu")


@pytest.mark.parametrize(
    ("name", "said"),
    [("auto", f"sdpa ({FUSED})"), ("sdpa", "sdpa (asked for)"), ("eager", "eager (asked for)")],
)
def test_the_caption_is_the_same_and_the_backend_is_told(
    vlmrun: Command, three: list[Path], name: str, said: str
) -> None:
    argv = ("caption", "-m", "demo", three[0], *IN_FLOAT32, "--attention", name)
    done = vlmrun(*argv, "-v")
    assert done.text == "an elephant\n"
    lines = [line for line in done.err.splitlines() if " attention: " in line]
    assert lines == [f"vlmrun: {part} attention: {said}" for part in ("vision", "decoder")]


def test_statistics_hold_what_was_found(vlmrun: Command, three: list[Path]) -> None:
    done = vlmrun("embed", "-m", "demo-siglip", three[0], *IN_FLOAT32, "--stats", "--json")
    told = json.loads(done.err.splitlines()[-1])
    assert told["plan"]["attention"]["vision"]["backend"] == "sdpa"
    assert "fused kernel for heads of" in told["plan"]["attention"]["vision"]["reason"]


def test_a_plan_says_what_it_expects_and_counts_it(vlmrun: Command) -> None:
    plans = {}
    for name in ("auto", "eager"):
        done = vlmrun("mem-plan", "-m", "llava-onevision-0.5b", "--attention", name, "--json")
        plans[name] = json.loads(done.out)
        assert ("--attention eager" in plans[name]["command"]) == (name == "eager")
    fused = {"backend": "sdpa", "reason": "PyTorch's fused kernels"}
    assert plans["auto"]["attention"] == {"vision": fused, "decoder": fused}
    assert plans["eager"]["attention"]["decoder"]["backend"] == "eager"
    needed = [plan["working"]["activation_bytes"] for plan in plans.values()]
    assert needed[1] > 2 * needed[0]


@pytest.mark.parametrize("name", ["sdpa-efficient", "flash_attention_2"])
@pytest.mark.parametrize("command", ["caption", "mem-plan"])
def test_what_cannot_work_is_refused(
    vlmrun: Command, three: list[Path], command: str, name: str
) -> None:
    refused = vlmrun(command, "-m", "demo", three[0], "--device", "cpu", "--attention", name)
    assert_refused(refused, f"--attention {name}", "GPUs only", code=2)
    assert "use --attention auto, sdpa or eager" in refused.err


def test_an_unknown_name_is_bad_usage(vlmrun: Command, three: list[Path]) -> None:
    refused = vlmrun("caption", "-m", "demo", three[0], "--attention", "flash")
    assert refused.code == 2
    assert "'flash' is not one of 'auto', 'eager'" in refused.err
