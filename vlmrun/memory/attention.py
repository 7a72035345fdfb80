"""Which backend every tower's attention runs through, as far as that is known without torch.

`auto` takes the fastest that nothing speaks against; the loader tries it with a tiny call. A
backend that a flag names is used or refused, never replaced.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from vlmrun.errors import UsageError
from vlmrun.job import Backend
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.family import Phase
from vlmrun.models.shapes import Architecture

TOWERS: Mapping[Phase, str] = {"vision": "vision", "text": "text", "decode": "decoder"}
FLASH = "flash_attention_2"
FLASH_PACKAGE = "flash_attn"
FLASH_WIDEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Attention:
    """The backend of one tower, and why; `forced`: a flag names it, so no other will do."""

    backend: str
    reason: str
    forced: bool = False


def choose_attention(
    architecture: Architecture,
    phases: Iterable[Phase],
    requested: Backend,
    *,
    compute: Dtype,
    device: str,
) -> dict[Phase, Attention]:
    """Choose the backend of every tower that a job runs.

    Raises:
        UsageError: the one asked for cannot run one of them.
    """
    found: dict[Phase, Attention] = {}
    for phase in phases:
        if requested == "auto":
            found[phase] = best(architecture, phase, compute, device)
            continue
        against = refusal(requested, architecture, phase, compute, device)
        if against:
            raise UsageError(
                f"--attention {requested} does not work for {TOWERS[phase]} attention: {against}",
                hint_of(architecture, phase),
            )
        found[phase] = Attention(requested, "asked for", forced=True)
    return found


def best(architecture: Architecture, phase: Phase, compute: Dtype, device: str) -> Attention:
    """Flash attention where it runs, else PyTorch's fused kernels, else plain products."""
    no_flash = refusal(FLASH, architecture, phase, compute, device)
    no_fused = refusal("sdpa", architecture, phase, compute, device)
    if not no_flash:
        return Attention(FLASH, f"{FLASH_PACKAGE} is installed, and a GPU computes {compute}")
    if no_fused:
        return Attention("eager", no_fused)
    aside = "" if device == "cpu" else f"; {FLASH}: {no_flash}"
    return Attention("sdpa", f"PyTorch's fused kernels{aside}")


def refusal(
    backend: str, architecture: Architecture, phase: Phase, compute: Dtype, device: str
) -> str:
    """Why a backend cannot run a tower; empty where nothing known speaks against it."""
    return refusal_by_model(backend, architecture, phase) or refusal_by_machine(
        backend, compute, device
    )


def refusal_by_model(backend: str, architecture: Architecture, phase: Phase) -> str:
    decoder, vision = architecture.decoder, architecture.vision
    if phase == "decode" and decoder is not None:
        if decoder.soft_capped and backend in ("sdpa", "sdpa-efficient", FLASH):
            return "its scores are soft-capped, which fused kernels do not do"
        if decoder.prefix and backend == FLASH:
            return "its prompt sees itself in both directions, a mask that flash_attn drops"
    elif vision is not None and vision.naflex and backend in (FLASH, "flex_attention"):
        return "transformers has no such path for NaFlex models"
    if backend == FLASH and head_dim(architecture, phase) > FLASH_WIDEST_HEAD:
        return (
            f"its heads are {head_dim(architecture, phase)} wide, the most is {FLASH_WIDEST_HEAD}"
        )
    return ""


def refusal_by_machine(backend: str, compute: Dtype, device: str) -> str:
    if backend == "sdpa-efficient" and device == "cpu":
        return "PyTorch has that kernel for GPUs only"
    if backend != FLASH:
        return ""
    if device == "cpu":
        return "it is for GPUs only"
    if compute is Dtype.float32:
        return "it computes bfloat16 and float16, not float32"
    if find_spec(FLASH_PACKAGE) is None:
        return f"the package {FLASH_PACKAGE} is not installed"
    return ""


def one_row_only(attention: Mapping[Phase, Attention], device: str) -> bool:
    """Whether rows are decoded one by one: of a padded batch, PyTorch 2.14's flex attention
    writes C++ for the later steps that no compiler takes."""
    decoder = attention.get("decode")
    return device == "cpu" and decoder is not None and decoder.backend == "flex_attention"


def hint_of(architecture: Architecture, phase: Phase) -> str:
    """What works instead, on any machine."""
    fused = "" if refusal_by_model("sdpa", architecture, phase) else ", sdpa"
    return f"use --attention auto{fused} or eager"


def head_dim(architecture: Architecture, phase: Phase) -> int:
    """Numbers of one attention head of a tower, however many heads this process has."""
    towers = {
        "vision": architecture.vision,
        "text": architecture.text,
        "decode": architecture.decoder,
    }
    tower = towers[phase]
    assert tower is not None
    return tower.head_dim
