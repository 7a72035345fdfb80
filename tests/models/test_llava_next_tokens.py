"""Crops and tokens of a LLaVA-NeXT picture are what the stock model packs for it."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from test_llava_tokens import DECODER as SMALL
from test_llava_tokens import EXTREMES, HEADS, sizes
from transformers import LlavaNextConfig
from transformers.models.llava_next.modeling_llava_next import (
    LlavaNextModel,
    image_size_to_num_patches,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from vlmrun.models.family import View
from vlmrun.models.llava_next import LLAVA_NEXT

TEXT = {**SMALL, **HEADS, "model_type": "llama"}
BLOCKS = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8}
BLOCKS |= {"num_attention_heads": 1, "patch_size": 14}
GRANITE = [[384 * i, 384 * j] for i in range(1, 11) for j in range(1, 11) if i * j <= 10]
CONFIGS = {
    "CLIP, the hub's five resolutions": {
        "vision_config": {**BLOCKS, "model_type": "clip_vision_model", "image_size": 336},
    },
    "SigLIP seen whole, many resolutions": {
        "vision_config": {**BLOCKS, "model_type": "siglip_vision_model", "image_size": 384},
        "vision_feature_select_strategy": "full",
        "image_grid_pinpoints": GRANITE,
    },
}


class FormulaOnly(LlavaNextProcessor):
    """The stock token count, without tokenizer and image processor."""

    def __init__(self, config: LlavaNextConfig) -> None:
        self.patch_size = 14
        self.num_additional_image_tokens = int(config.vision_feature_select_strategy == "default")
        self.image_processor = SimpleNamespace(image_grid_pinpoints=config.image_grid_pinpoints)


def packer(config: LlavaNextConfig) -> Callable[[int, int, int], int]:
    """Count the features that the stock model packs for a picture of that many crops."""
    with torch.device("meta"):
        model = LlavaNextModel(config)
    patches = (config.vision_config.image_size // 14) ** 2

    def count(width: int, height: int, crops: int) -> int:
        features = torch.zeros(crops, patches, 1)
        strategy = config.vision_feature_select_strategy
        packed, lengths = model.pack_image_features(
            [features], [(height, width)], strategy, torch.zeros(1)
        )
        assert len(packed[0]) == lengths[0]
        return int(lengths[0])

    return count


@pytest.mark.parametrize("name", CONFIGS)
def test_costs_equal_the_stock_processor_and_model(name: str) -> None:
    own = {**CONFIGS[name], "text_config": TEXT}
    stock = LlavaNextConfig(**own)
    processor, packed = FormulaOnly(stock), packer(stock)
    dropped = int(stock.vision_feature_select_strategy == "default")
    side = stock.vision_config.image_size
    architecture = LLAVA_NEXT.architecture(own)
    for width, height in sizes():
        cost = LLAVA_NEXT.image_cost(architecture, width, height, View())
        crops = image_size_to_num_patches((height, width), stock.image_grid_pinpoints, side)
        tokens = processor._get_number_of_features(height, width, side, side) - dropped
        assert (cost.crops, cost.tokens) == (crops, tokens), (width, height)
        assert cost.tokens == packed(width, height, cost.crops), (width, height)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("width", "height"), EXTREMES[:4])
def test_low_detail_costs_one_view(name: str, width: int, height: int) -> None:
    own = {**CONFIGS[name], "text_config": TEXT}
    low = View(detail="low")
    cost = LLAVA_NEXT.image_cost(LLAVA_NEXT.architecture(own), width, height, low)
    assert cost.crops == 1
    assert cost.tokens == packer(LlavaNextConfig(**own))(width, height, 1)


def test_costs_known_by_hand() -> None:
    """The base view of 24 × 24; the grid of 672 × 672 cut to the picture's shape, and line ends."""
    architecture = LLAVA_NEXT.architecture({"text_config": TEXT})

    def cost(width: int, height: int) -> tuple[int, int]:
        found = LLAVA_NEXT.image_cost(architecture, width, height, View())
        return found.crops, found.tokens

    assert cost(672, 672) == (5, 576 + 48 * 48 + 48)
    assert cost(1024, 899) == (5, 576 + 42 * 48 + 42)
    assert cost(10_000, 1) == (3, 576)  # nothing is left of the strip's tiles
