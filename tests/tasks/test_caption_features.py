"""Picture features: the same bits wherever the tower lies, and stock's values."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from entries import DTYPES, RESIDENCIES, Prompted, load_tiny, noise, prompted, shifted
from folders import model_at
from tiny import build_onevision
from torch import Tensor
from transformers import LlavaOnevisionForConditionalGeneration

from vlmrun.memory.working import CROPS_AT_ONCE
from vlmrun.tasks import caption
from vlmrun.tasks.caption import encode_pictures
from vlmrun.tasks.vision import squares

# (width, height) of the pictures of one prompt
PROMPTS = {
    "square": [(40, 40)],
    "wide, shrunk": [(90, 20)],
    "tall": [(20, 90)],
    "smaller than a crop": [(9, 7)],
    "several": [(40, 40), (90, 20), (9, 7)],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {
        dtype: build_onevision(tmp_path_factory.mktemp(dtype), dtype=dtype)
        for dtype in ("float32", "bfloat16", "float16")
    }
    for name, layers in ("inner", -2), ("two", [-4, -2]), ("all", [0, 1, 2, 3]):
        made[name] = build_onevision(tmp_path_factory.mktemp(name), feature_layer=layers)
    return made


@pytest.fixture(scope="module")
def prompts(tiny_onevision: Path) -> dict[str, Prompted]:
    model = model_at(tiny_onevision)
    return {
        name: prompted(model, [noise(i, *size) for i, size in enumerate(sizes)])
        for name, sizes in PROMPTS.items()
    }


def encode(folder: Path, batch: list[Prompted], **options: str) -> list[Tensor]:
    """Features of every prompt; the batch passes the tower twice, to the same bits."""
    ready = load_tiny(folder, **options)
    pictures = [prompt.pictures for prompt in batch if prompt.pictures is not None]
    found = encode_pictures(ready.entry, ready.model.architecture, pictures)
    again = encode_pictures(ready.entry, ready.model.architecture, pictures)
    assert all(map(torch.equal, found, again))
    return found


@lru_cache
def stock(folder: Path) -> LlavaOnevisionForConditionalGeneration:
    return LlavaOnevisionForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def stock_features(model: Any, prompt: Prompted) -> Tensor:
    wanted = ("pixel_values", "image_sizes", "batch_num_images")
    seen = model.get_image_features(**{name: prompt.stock[name] for name in wanted})
    return torch.cat(seen.pooler_output)


@pytest.mark.parametrize(("stored", "dtype", "compute"), DTYPES)
def test_residency_never_changes_the_bits(
    folders: dict[str, Path], prompts: dict[str, Prompted], stored: str, dtype: str, compute: str
) -> None:
    batch = list(prompts.values())
    options = {"dtype": dtype, "compute": compute}
    whole = encode(folders[stored], batch, resident="100%", **options)
    assert all(features.dtype == getattr(torch, compute) for features in whole)
    for resident in RESIDENCIES[1:]:
        parts = encode(folders[stored], batch, resident=resident, **options)
        assert all(map(torch.equal, whole, parts)), resident


@pytest.mark.parametrize("nbytes", [8, 16, 24])
def test_the_place_in_the_file_never_changes_the_bits(
    folders: dict[str, Path], prompts: dict[str, Prompted], tmp_path: Path, nbytes: int
) -> None:
    batch = [prompts["smaller than a crop"]]
    for stored in "float32", "bfloat16":
        [whole] = encode(folders[stored], batch)
        moved = shifted(folders[stored], tmp_path / stored, nbytes)
        for resident in RESIDENCIES:
            assert torch.equal(whole, encode(moved, batch, resident=resident)[0]), resident


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("depth", ["float32", "inner", "two", "all"])
def test_features_equal_stock(
    folders: dict[str, Path], prompts: dict[str, Prompted], name: str, depth: str
) -> None:
    [mine] = encode(folders[depth], [prompts[name]], resident="50%")
    torch.testing.assert_close(
        mine, stock_features(stock(folders[depth]), prompts[name]), atol=2e-5, rtol=0
    )


def test_the_same_pixels_pass_the_tower_once(
    tiny_onevision: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A square picture's base view is its only tile; a picture may come twice in a batch."""
    model, passed = model_at(tiny_onevision), []

    def counted(pixels: Tensor) -> Any:
        passed.append(len(pixels))
        return squares(pixels)

    monkeypatch.setattr(caption, "squares", counted)
    square, tall = noise(1, 28, 28), noise(2, 20, 90)
    batch = [prompted(model, [each]) for each in (square, tall, square)]
    crops = [len(prompt.pictures.pixel_values) for prompt in batch]
    found = encode(tiny_onevision, batch)
    assert passed == [1 + crops[1]] * 2
    assert crops == [2, crops[1], 2]
    assert torch.equal(found[0], found[2])
    for features, prompt in zip(found, batch, strict=True):
        expected = stock_features(stock(tiny_onevision), prompt)
        torch.testing.assert_close(features, expected, atol=2e-5, rtol=0)


def test_crops_that_differ_in_one_bit_are_two() -> None:
    one = torch.zeros(3, 4, 4)
    other, again = one.clone(), one.clone()
    other[2, 3, 3] = -0.0
    kept, places = caption.distinct([one, other, again])
    assert places == [0, 1, 0]
    found, expected = (torch.stack(each).view(torch.int32) for each in (kept, [one, other]))
    assert torch.equal(found, expected)


def test_a_batch_gives_what_each_prompt_gives(
    tiny_onevision: Path, prompts: dict[str, Prompted]
) -> None:
    """Crops of different prompts share one pass and its groups."""
    batch = list(prompts.values())
    crops = sum(sum(prompt.pictures.crops) for prompt in batch if prompt.pictures is not None)
    assert crops > 2 * CROPS_AT_ONCE
    together = encode(tiny_onevision, batch, resident="0%")
    for prompt, features in zip(batch, together, strict=True):
        [alone] = encode(tiny_onevision, [prompt])
        torch.testing.assert_close(features, alone, atol=1e-5, rtol=0)


def test_all_crops_share_one_crossing(tiny_onevision: Path, prompts: dict[str, Prompted]) -> None:
    """At 0 %, each layer of the tower is read once, however many groups of crops pass it."""
    ready = load_tiny(tiny_onevision, resident="0%")
    pictures = [prompt.pictures for prompt in prompts.values() if prompt.pictures is not None]
    encode_pictures(ready.entry, ready.model.architecture, pictures)
    assert ready.entry.bytes_read == ready.plan.streamed_bytes("vision")
