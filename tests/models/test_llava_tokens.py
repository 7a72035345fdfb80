"""Crops and tokens of a picture are what stock transformers makes of it."""

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from transformers.models.llava_onevision.configuration_llava_onevision import LlavaOnevisionConfig
from transformers.models.llava_onevision.modeling_llava_onevision import (
    LlavaOnevisionModel,
    image_size_to_num_patches,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from vlmrun.models.family import ImageCost, View
from vlmrun.models.onevision import LLAVA_ONEVISION

EXTREMES = [(1, 10000), (10000, 1), (700, 840), (840, 700), (899, 1024), (1024, 899), (1, 1)]
EXTREMES += [(20000, 100), (100, 20000), (384, 384), (385, 384), (2304, 2304), (2305, 2305)]
TOWER = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8}
TOWER |= {"image_size": 384, "patch_size": 14}
DECODER = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1}
GRIDS = {
    "the 36 resolutions of the hub's models": None,
    "a small grid": [[384, 384], [384, 768], [768, 384], [768, 768]],
    "the demo's shape of grid": [[384, 384], [384, 768], [768, 384]],
}


class FormulaOnly(LlavaOnevisionProcessor):
    """The stock token count, without the parts that need torchvision."""

    def __init__(self, config: LlavaOnevisionConfig) -> None:
        self.num_image_tokens = 27 * 27
        self.vision_aspect_ratio = config.vision_aspect_ratio
        self.image_processor = SimpleNamespace(image_grid_pinpoints=config.image_grid_pinpoints)


def sizes() -> list[tuple[int, int]]:
    source = random.Random(4)
    return [(source.randint(1, 4000), source.randint(1, 4000)) for _ in range(200)] + EXTREMES


def stock_config(grid: list[list[int]] | None, aspect: str) -> LlavaOnevisionConfig:
    more = {} if grid is None else {"image_grid_pinpoints": grid}
    return LlavaOnevisionConfig(
        vision_config={**TOWER, "num_attention_heads": 1, "model_type": "siglip_vision_model"},
        text_config={**DECODER, **HEADS, "model_type": "qwen2"},
        vision_aspect_ratio=aspect,
        **more,
    )


def packer(config: LlavaOnevisionConfig) -> Callable[[int, int, int], int]:
    """Count the features that the stock model packs for a picture of that many crops."""
    with torch.device("meta"):
        model = LlavaOnevisionModel(config)

    def count(width: int, height: int, crops: int) -> int:
        features = torch.zeros(crops, 27 * 27, 1)
        packed, lengths = model.pack_image_features(
            [features], [(height, width)], torch.zeros(1), config.vision_aspect_ratio
        )
        assert len(packed) == 1
        return int(lengths[0])

    return count


@pytest.mark.parametrize("aspect", ["anyres_max_9", "anyres_max_4"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_costs_equal_the_stock_processor_and_model(
    grid: list[list[int]] | None, aspect: str
) -> None:
    stock = stock_config(grid, aspect)
    processor, packed = FormulaOnly(stock), packer(stock)
    own = {"vision_aspect_ratio": aspect} | ({} if grid is None else {"image_grid_pinpoints": grid})
    architecture = LLAVA_ONEVISION.architecture(own)
    for width, height in sizes():
        cost = LLAVA_ONEVISION.image_cost(architecture, width, height, View())
        crops = image_size_to_num_patches((height, width), stock.image_grid_pinpoints, 384)
        tokens = processor._get_number_of_features(height, width, 384, 384)
        assert (cost.crops, cost.tokens) == (crops, tokens), (width, height)
        assert cost.tokens == packed(width, height, cost.crops), (width, height)


def test_costs_known_by_hand() -> None:
    """A base view and one tile with 27 line ends; of a strip's tile one row or line is kept."""
    architecture, cost = LLAVA_ONEVISION.architecture({}), LLAVA_ONEVISION.image_cost
    assert cost(architecture, 384, 384, View()) == ImageCost(crops=2, tokens=729 + 27 * 28)
    assert cost(architecture, 10000, 1, View()) == ImageCost(crops=2, tokens=729 + 28)
    assert cost(architecture, 1, 10000, View()) == ImageCost(crops=2, tokens=729 + 27 * 2)
    assert cost(architecture, 2304, 2304, View()).crops == 37


@pytest.mark.parametrize(("width", "height"), EXTREMES)
def test_low_detail_costs_one_view(width: int, height: int) -> None:
    stock = stock_config(None, "anyres_max_9")
    cost = LLAVA_ONEVISION.image_cost(
        LLAVA_ONEVISION.architecture({}), width, height, View(detail="low")
    )
    assert (cost.crops, cost.tokens) == (1, 730)
    assert packer(stock)(width, height, 1) == 730
