"""Vectors: the same bits wherever the weights lie, and the values of stock transformers."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from entries import DTYPES, RESIDENCIES, Ready, load_tiny, shifted
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny import VISION, build_siglip, build_siglip_vision
from torch import Tensor
from transformers import SiglipModel
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

import vlmrun
from vlmrun.errors import UsageError
from vlmrun.memory.working import CROPS_AT_ONCE, TEXTS_AT_ONCE
from vlmrun.tasks.embed import embed_images, embed_texts, unit_length
from vlmrun.tasks.vision import squares

DEMO = Path(vlmrun.__file__).parent / "data/demo-siglip"
PICTURES = DEMO.parent / "pictures"
KINDS = ("pooled", "last-hidden", "hidden:-2", "hidden:0")


def pixels(count: int = 3) -> Tensor:
    return torch.rand(count, 3, 28, 28, generator=torch.Generator().manual_seed(7)) * 2 - 1


def texts(count: int = 3) -> Tensor:
    return torch.randint(2, 200, (count, 16), generator=torch.Generator().manual_seed(8))


def run_pixels(ready: Ready, seen: Tensor, kind: str) -> Tensor:
    found = embed_images(ready.entry, ready.model.architecture, squares(seen), kind)
    return torch.stack(found)


def vectors(ready: Ready, kind: str, count: int = 3) -> tuple[Tensor, ...]:
    """Pictures twice, so that a second pass over the weights counts too, then texts."""
    seen = run_pixels(ready, pixels(count), kind)
    again = run_pixels(ready, pixels(count), kind)
    assert torch.equal(seen, again)
    if kind != "pooled" or ready.model.architecture.text is None:
        return (seen,)
    return seen, embed_texts(ready.entry, texts(count))


def run(
    folder: Path, resident: str, kind: str = "pooled", count: int = 3, **options: str
) -> tuple[Tensor, ...]:
    texts = kind == "pooled" and (folder / "tokenizer_config.json").exists()
    ready = load_tiny(folder, resident=resident, kind=kind, texts=texts, **options)
    assert ready.plan.all_resident == (resident == "100%")
    return vectors(ready, kind, count)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        dtype: build_siglip(tmp_path_factory.mktemp(dtype), dtype=dtype)
        for dtype in ("float32", "bfloat16", "float16")
    }


@pytest.fixture(scope="module")
def stock(tiny_siglip: Path) -> SiglipModel:
    return SiglipModel.from_pretrained(tiny_siglip, dtype=torch.float32).eval()


@torch.no_grad()
def stock_vision(stock: SiglipModel, kind: str, count: int) -> Tensor:
    out = stock.vision_model(pixels(count), output_hidden_states=True)
    if kind == "pooled":
        return out.pooler_output
    if kind == "last-hidden":
        return out.last_hidden_state
    return out.hidden_states[int(kind.removeprefix("hidden:"))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stored", "dtype", "compute"), DTYPES)
def test_residency_never_changes_the_bits(
    folders: dict[str, Path], stored: str, dtype: str, compute: str, kind: str
) -> None:
    whole = run(folders[stored], "100%", kind, dtype=dtype, compute=compute)
    assert all(torch.isfinite(vector).all() and vector.std() > 0.01 for vector in whole)
    for resident in RESIDENCIES[1:]:
        parts = run(folders[stored], resident, kind, dtype=dtype, compute=compute)
        assert all(map(torch.equal, whole, parts)), resident


@pytest.mark.parametrize("nbytes", [1, 4, 8, 16, 24])
@pytest.mark.parametrize(
    ("stored", "compute"),
    [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")],
)
def test_the_place_in_the_file_never_changes_the_bits(
    folders: dict[str, Path], tmp_path: Path, stored: str, compute: str, nbytes: int
) -> None:
    """One picture at a time: matrix-vector kernels are the ones that mind addresses."""
    whole = run(folders[stored], "100%", count=1, compute=compute)
    moved = shifted(folders[stored], tmp_path, nbytes)
    for resident in RESIDENCIES:
        parts = run(moved, resident, count=1, compute=compute)
        assert all(map(torch.equal, whole, parts)), resident


def test_odd_widths_never_change_the_bits(tmp_path: Path) -> None:
    """A weight of 71 numbers lies before others, in the file and in the slot."""
    with patch.dict(VISION, intermediate_size=71):
        folder = build_siglip_vision(tmp_path)
    found = [run(folder, resident, count=1) for resident in RESIDENCIES]
    assert all(torch.equal(vectors, found[0][0]) for [vectors] in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, CROPS_AT_ONCE + 2])
def test_pictures_equal_stock(tiny_siglip: Path, stock: SiglipModel, kind: str, count: int) -> None:
    mine = run(tiny_siglip, "50%", kind, count)[0]
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, stock_vision(stock, kind, count), atol=2e-5, rtol=0)


@pytest.mark.parametrize("count", [1, TEXTS_AT_ONCE + 2])
def test_texts_equal_stock(tiny_siglip: Path, stock: SiglipModel, count: int) -> None:
    mine = run(tiny_siglip, "50%", count=count)[1]
    with torch.no_grad():
        theirs = stock.text_model(input_ids=texts(count)).pooler_output
    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_halves_are_no_farther_from_float32_than_stock(
    folders: dict[str, Path], stock: SiglipModel, stored: str, compute: str
) -> None:
    halved = SiglipModel.from_pretrained(folders[stored], dtype=torch.bfloat16)
    mine = run(folders[stored], "50%", count=16, compute=compute)
    with torch.no_grad():
        seen = halved.vision_model(pixels(16).bfloat16()).pooler_output
        said = [tower.text_model(input_ids=texts(16)).pooler_output for tower in (stock, halved)]
    reference = stock_vision(stock, "pooled", 16), said[0]
    for one, theirs, exact in zip(mine, (seen, said[1]), reference, strict=True):
        far, stock_far = (1 - torch.cosine_similarity(x.float(), exact) for x in (one, theirs))
        assert far.mean() < 1.5 * stock_far.mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_a_trained_model_in_halves(dtype: str, compute: str) -> None:
    photos = [Image.open(file).convert("RGB") for file in sorted(PICTURES.glob("*.png"))]
    processor = SiglipImageProcessorPil.from_pretrained(DEMO)
    seen = processor(photos, return_tensors="pt")["pixel_values"]
    found = []
    for options in {"compute": "float32", "dtype": "float32"}, {"compute": compute, "dtype": dtype}:
        ready = load_tiny(DEMO, resident="40%", **options)
        found.append(run_pixels(ready, seen, "pooled"))
    assert torch.cosine_similarity(*found).min() > 0.999


@pytest.mark.parametrize(
    "options",
    [{"shards": 3}, {"spelling": "module"}, {"spelling": "module", "shards": 2}],
    ids=str,
)
def test_the_form_of_the_checkpoint_never_changes_the_bits(
    tiny_siglip_vision: Path, tmp_path: Path, options: dict
) -> None:
    other = build_siglip_vision(tmp_path, **options)
    for kind in ("pooled", "last-hidden"):
        assert torch.equal(run_vision(tiny_siglip_vision, kind), run_vision(other, kind))


def run_vision(folder: Path, kind: str) -> Tensor:
    return vectors(load_tiny(folder, resident="25%", kind=kind), kind)[0]


def test_a_tower_alone_gives_the_vectors_of_the_whole_model(
    tiny_siglip: Path, tmp_path: Path
) -> None:
    alone = build_siglip_vision(tmp_path)
    whole = load_file(tiny_siglip / "model.safetensors")
    tower = {name: tensor for name, tensor in whole.items() if name.startswith("vision_model.")}
    save_file(tower, alone / "model.safetensors")
    assert torch.equal(run_vision(alone, "pooled"), run(tiny_siglip, "25%")[0])


def test_only_what_the_job_uses_is_read(tiny_siglip: Path) -> None:
    """At 0 % every layer is read once per pass: the sum of the planned layers, no more."""
    ready = load_tiny(tiny_siglip, resident="0%", kind="hidden:1")
    names = {"vision.embeddings", "vision.layers.0"}
    assert {p.layer.name for p in ready.plan.placements} == names
    run_pixels(ready, pixels(), "hidden:1")
    assert ready.entry.bytes_read == ready.plan.weight_bytes
    whole = sum(info.nbytes for info in ready.model.checkpoint.tensors.values())
    assert ready.entry.bytes_read < whole / 4


def test_unknown_kinds_are_refused(tiny_siglip: Path) -> None:
    for kind in ("pixels", "hidden:9", "hidden:-5"):
        with pytest.raises(UsageError):
            load_tiny(tiny_siglip, kind=kind)


def test_unit_length() -> None:
    found = unit_length(torch.tensor([[3.0, 4.0], [0.0, -1e-9]]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.0, -1.0]]))
