"""What is known of attention before torch is imported: choices, reasons and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from light import ONEVISION, SIGLIP, TINY_ONEVISION, TINY_SIGLIP, model_of

from vlmrun.errors import UsageError
from vlmrun.job import Backend, Job, Placing
from vlmrun.memory.attention import choose_attention, head_dim
from vlmrun.memory.workload import plan_job
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.family import Phase
from vlmrun.models.shapes import Architecture
from vlmrun.models.sharding import part_of

SO400M = model_of(ONEVISION).architecture  # SigLIP so400m, 16 heads of 72
PHASES: tuple[Phase, ...] = ("vision", "decode")
HALF = Dtype.bfloat16


def having(**changes: Any) -> Architecture:
    assert SO400M.decoder is not None
    return replace(SO400M, decoder=replace(SO400M.decoder, **changes))


def naflex() -> Architecture:
    siglip = model_of(SIGLIP).architecture
    assert siglip.vision is not None
    return replace(siglip, vision=replace(siglip.vision, naflex=True))


def chosen(
    requested: Backend = "auto",
    architecture: Architecture = SO400M,
    phases: tuple[Phase, ...] = PHASES,
    compute: Dtype = HALF,
    device: str = "cuda:0",
) -> dict[Phase, tuple[str, str]]:
    found = choose_attention(architecture, phases, requested, compute=compute, device=device)
    assert all(each.forced == (requested != "auto") for each in found.values())
    return {phase: (each.backend, each.reason) for phase, each in found.items()}


@pytest.fixture
def flash_attn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)


def test_f21_flash_without_its_package_is_an_error_when_asked_for_else_a_reason() -> None:
    """vllm#12656, flash-attention#1542: heads of 72."""
    assert head_dim(SO400M, "vision") == 72
    with pytest.raises(UsageError, match=r"flash_attention_2 .*flash_attn is not installed") as why:
        chosen("flash_attention_2")
    assert why.value.hint == "use --attention auto, sdpa or eager"
    reason = "PyTorch's fused kernels; flash_attention_2: the package flash_attn is not installed"
    assert chosen() == dict.fromkeys(PHASES, ("sdpa", reason))


@pytest.mark.usefixtures("flash_attn")
def test_flash_is_taken_where_it_runs() -> None:
    assert {backend for backend, _ in chosen().values()} == {"flash_attention_2"}
    assert chosen("flash_attention_2") == dict.fromkeys(PHASES, ("flash_attention_2", "asked for"))
    assert "not float32" in chosen(compute=Dtype.float32)["vision"][1]
    assert chosen(device="cpu")["vision"] == ("sdpa", "PyTorch's fused kernels")
    wide = chosen(architecture=having(head_dim=264))
    assert wide["vision"][0] == "flash_attention_2"
    assert wide["decode"][0] == "sdpa"
    assert "264" in wide["decode"][1]


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    ("backend", "architecture", "options", "words"),
    [
        ("flash_attention_2", SO400M, {"device": "cpu"}, "GPUs only"),
        ("sdpa-efficient", SO400M, {"device": "cpu"}, "GPUs only"),
        ("flash_attention_2", SO400M, {"compute": Dtype.float32}, "not float32"),
        ("flash_attention_2", having(prefix=True), {}, "both directions"),
        ("flash_attention_2", having(head_dim=264), {}, "264"),
        ("sdpa", having(soft_capped=True), {}, "soft-capped"),
        ("sdpa-efficient", having(soft_capped=True), {}, "soft-capped"),
        ("flash_attention_2", naflex(), {"phases": ("vision",)}, "NaFlex"),
        ("flex_attention", naflex(), {"phases": ("text",)}, "NaFlex"),
    ],
)
def test_what_cannot_work_is_refused(
    backend: Backend, architecture: Architecture, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as why:
        chosen(backend, architecture, **options)
    capped = words == "soft-capped"
    assert why.value.hint == f"use --attention auto{'' if capped else ', sdpa'} or eager"


def test_f22_a_soft_capped_decoder_takes_plain_products_and_its_tower_does_not() -> None:
    """transformers#32390: Gemma 2 through sdpa with padding gives NaN."""
    found = chosen(architecture=having(soft_capped=True), device="cpu")
    assert found["vision"][0] == "sdpa"
    assert found["decode"] == ("eager", "its scores are soft-capped, which fused kernels do not do")
    assert chosen("flex_attention", having(soft_capped=True))["decode"][0] == "flex_attention"


def test_processes_that_share_a_model_have_fewer_heads_of_the_same_width() -> None:
    part = part_of(SO400M, 2)
    assert part.vision is not None
    assert part.vision.heads == 8
    assert head_dim(part, "vision") == 72


def test_only_the_towers_of_the_job_count() -> None:
    siglip = model_of(SIGLIP).architecture
    assert chosen("flex_attention", siglip, ("text",)).keys() == {"text"}


def test_flex_attention_on_a_cpu_decodes_one_row_at_a_time() -> None:
    """PyTorch 2.14 compiles no later step of a padded batch there."""
    placing = Placing(model="x", device="cpu", ram="64GiB", attention="flex_attention")
    job = Job(task="caption", placing=placing, images=("x",) * 5)
    model = model_of(TINY_ONEVISION)
    assert plan_job(model, job, []).workload.batch_size == 1
    with pytest.raises(UsageError, match=r"one row at a time.* --batch-size is 2"):
        plan_job(model, replace(job, placing=replace(placing, batch_size=2)), [])
    siglip = replace(job, task="embed")
    assert plan_job(model_of(TINY_SIGLIP), siglip, []).workload.batch_size == 5


@pytest.mark.parametrize("config", [TINY_SIGLIP, TINY_ONEVISION])
def test_the_plan_counts_what_was_asked_for(config: Any) -> None:
    """Scores lie in memory in eager phases, and in no others."""
    model = model_of(config)
    texts = ("x",) * (model.family.task == "embed")
    plans = {}
    for backend in ("auto", "sdpa", "eager"):
        placing = Placing(model="x", device="cpu", ram="64GiB", attention=backend, batch_size=3)
        job = Job(task=model.family.task, placing=placing, images=("x",), texts=texts)
        plans[backend] = plan_job(model, job, [])
    auto, sdpa, eager = (plans[name].working.activation_bytes for name in plans)
    assert auto == sdpa
    assert auto.keys() == plans["eager"].storage.eager == eager.keys()
    assert all(eager[phase] > auto[phase] for phase in auto)
    assert plans["eager"].peak_ram_bytes > plans["auto"].peak_ram_bytes
