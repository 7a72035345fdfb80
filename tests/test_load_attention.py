"""Every backend gives the same numbers, at SigLIP so400m's head size of 72, and batches of
unequal rows keep their masks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from entries import Prompted, Ready, load_tiny, noise, plan_tiny, prompted, rows_of, trace
from folders import model_at
from paligemmas import ask, logits
from tiny import VISION, build_onevision, build_siglip
from tiny_paligemma import build_paligemma
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers import (
    AttentionInterface,
    PaliGemmaForConditionalGeneration,
    SiglipModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vlmrun.errors import UsageError
from vlmrun.job import Backend
from vlmrun.load import load
from vlmrun.memory.attention import FLASH, Attention
from vlmrun.nn import backends
from vlmrun.tasks.embed import embed_images, embed_texts
from vlmrun.tasks.vision import squares

HEADS_OF_72 = {"hidden_size": 144, "num_attention_heads": 2}
CLOSE = {"atol": 2e-5, "rtol": 0.0}


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with patch.dict(VISION, HEADS_OF_72):
        return build_siglip(tmp_path_factory.mktemp("siglip72"))


@pytest.fixture(scope="module")
def onevision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with patch.dict(VISION, HEADS_OF_72):
        return build_onevision(tmp_path_factory.mktemp("onevision72"))


@pytest.fixture
def efficient_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no memory-efficient kernel; the plain one stands for it."""
    monkeypatch.setattr(backends, "EFFICIENT_KERNEL", SDPBackend.MATH)


def loaded(folder: Path, backend: str, *, texts: bool = False) -> Ready:
    """A model whose every tower takes a backend, whatever a plan would say of it."""
    model = model_at(folder)
    plan = plan_tiny(model, texts=texts)
    taken = dict.fromkeys(plan.storage.attention, Attention(backend, "for a test", forced=True))
    plan = replace(plan, storage=replace(plan.storage, attention=taken))
    return Ready(model, plan, load(model, plan))


def unequal(ready: Ready) -> list[Prompted]:
    """Rows of two lengths, so that one is padded on the left."""
    texts = ("what?", "what is in the picture, and what is beside it?")
    return [prompted(ready.model, [noise(i)], text) for i, text in enumerate(texts)]


def traced(ready: Ready) -> Tensor:
    return trace(ready, rows_of(ready, unequal(ready)))


def vectors(ready: Ready) -> tuple[Tensor, Tensor]:
    pixels, ids = pictures_and_texts()
    seen = embed_images(ready.entry, ready.model.architecture, squares(pixels), "pooled")
    return torch.stack(seen), embed_texts(ready.entry, ids)


def pictures_and_texts() -> Sequence[Tensor]:
    draw = torch.Generator().manual_seed(3)
    pixels = torch.rand(3, 3, 28, 28, generator=draw) * 2 - 1
    return pixels, torch.randint(2, 200, (3, 16), generator=draw)


@pytest.mark.usefixtures("efficient_on_cpu")
@pytest.mark.parametrize("backend", ["eager", "sdpa", "sdpa-efficient"])
def test_vectors_are_stocks_through_every_backend(siglip: Path, backend: str) -> None:
    stock = SiglipModel.from_pretrained(siglip, dtype=torch.float32).eval()
    pixels, ids = pictures_and_texts()
    with torch.no_grad():
        seen = stock.vision_model(pixels).pooler_output
        said = stock.text_model(ids).pooler_output
    found = vectors(loaded(siglip, backend, texts=True))
    torch.testing.assert_close(found[0], seen, **CLOSE)
    torch.testing.assert_close(found[1], said, **CLOSE)


def assert_agree(one: Ready, other: Ready, *, steps: int, most: int = 2) -> None:
    """Features to their own size, and from the same features logits of a padded batch: the
    attention of tiny towers is sharp, and a chain of two would multiply what rounding leaves."""
    rows, others = rows_of(one, unequal(one)[:most]), rows_of(other, unequal(other)[:most])
    for mine, theirs in zip(rows, others, strict=True):
        assert mine.features is not None
        largest = mine.features.abs().max()
        torch.testing.assert_close(mine.features / largest, theirs.features / largest, **CLOSE)
    found = trace(one, rows, steps=steps)
    torch.testing.assert_close(found, trace(other, rows, steps=steps), **CLOSE)


@pytest.mark.usefixtures("efficient_on_cpu")
@pytest.mark.parametrize("backend", ["eager", "sdpa-efficient"])
def test_logits_of_a_padded_batch_agree(onevision: Path, backend: str) -> None:
    assert_agree(loaded(onevision, backend), loaded(onevision, "sdpa"), steps=4)


@pytest.mark.usefixtures("efficient_on_cpu")
@pytest.mark.parametrize("backend", ["eager", "sdpa-efficient"])
def test_a_padded_row_is_what_it_is_alone(onevision: Path, backend: str) -> None:
    ready = loaded(onevision, backend)
    rows = rows_of(ready, unequal(ready))
    alone = torch.cat([trace(ready, [row]) for row in rows], dim=1)
    torch.testing.assert_close(trace(ready, rows), alone, **CLOSE)


@pytest.mark.usefixtures("efficient_on_cpu")
@pytest.mark.parametrize(
    ("backend", "stocks", "atol"), [("eager", "eager", 2e-5), ("sdpa-efficient", "sdpa", 1e-4)]
)
def test_a_prompt_that_sees_both_ways_is_stocks(
    tmp_path: Path, backend: str, stocks: str, atol: float
) -> None:
    """PaliGemma, its prefix masked in the form of each backend. Without a mask logits would be
    others altogether; the plain kernel rounds otherwise than the one that stock takes."""
    ready = loaded(build_paligemma(tmp_path), backend)
    asked = ask(tmp_path, "caption en", noise(1, 40, 30))
    stock = PaliGemmaForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation=stocks
    )
    inputs = {name: value for name, value in asked.stock.items() if name != "labels"}
    with torch.no_grad():
        expected = stock(**inputs).logits[:, -1]
    [found] = logits(ready, rows_of(ready, [asked]), steps=1)
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def test_f22_a_soft_capped_decoder_is_eager_beside_a_fused_tower(tmp_path: Path) -> None:
    found = load_tiny(build_paligemma(tmp_path, version=2)).entry.plan.storage.attention
    assert (found["vision"].backend, found["decode"].backend) == ("sdpa", "eager")
    assert found["decode"].reason == "its scores are soft-capped, which fused kernels do not do"


@pytest.mark.slow  # compiles, half a minute
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention_agrees(onevision: Path) -> None:
    """A row at a time, see `one_row_only`."""
    flex, sdpa = loaded(onevision, "flex_attention"), loaded(onevision, "sdpa")
    assert_agree(flex, sdpa, steps=3, most=1)


@pytest.fixture
def unmasked() -> Iterator[str]:
    AttentionInterface.register("unmasked", sdpa_attention_forward)
    yield "unmasked"
    AttentionInterface._global_mapping.pop("unmasked")


@pytest.mark.usefixtures("efficient_on_cpu")
def test_a_backend_unknown_to_masks_would_lose_them(onevision: Path, unmasked: str) -> None:
    """What registering a name for masks, too, prevents: padding is seen, without an error."""
    expected = traced(loaded(onevision, "sdpa"))
    assert (traced(loaded(onevision, unmasked)) - expected).abs().max() > 1e-3
    assert (traced(loaded(onevision, "sdpa-efficient")) - expected).abs().max() < 1e-4


def test_the_entrys_plan_says_what_was_found(onevision: Path) -> None:
    ready = load_tiny(onevision)
    found = ready.entry.plan.storage.attention
    assert found["vision"].reason == "PyTorch has a fused kernel for heads of 72 in float32 on cpu"
    assert found["decode"].reason == "PyTorch has a fused kernel for heads of 8 in float32 on cpu"
    assert {each.backend for each in found.values()} == {"sdpa"}
    assert ready.plan.storage.attention["vision"].reason == "PyTorch's fused kernels"


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_what_is_asked_for_reaches_every_tower(onevision: Path, backend: Backend) -> None:
    ready = load_tiny(onevision, attention=backend)
    with ready.entry.use("decode") as module:
        for path in ("model.vision_tower", "model.language_model"):
            assert module.get_submodule(path).config._attn_implementation == backend


def test_f21_flash_that_fails_falls_back_with_its_reason(onevision: Path) -> None:
    """Where it was expected and not asked for; the package is not there."""
    model = model_at(onevision)
    plan = plan_tiny(model)
    expected = dict.fromkeys(plan.storage.attention, Attention(FLASH, "expected"))
    entry = load(model, replace(plan, storage=replace(plan.storage, attention=expected)))
    found = entry.plan.storage.attention["vision"]
    assert found.backend == "sdpa"
    assert "flash_attention_2: ModuleNotFoundError: No module named 'flash_attn'" in found.reason
    with pytest.raises(UsageError, match=r"heads of 72 in float32 on cpu: Module.*flash") as why:
        loaded(onevision, FLASH)
    assert why.value.hint == "use --attention auto, sdpa or eager"
