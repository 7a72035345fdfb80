"""NaFlex architectures are those of transformers; what a picture costs; bad ones are refused."""

from typing import Any

import pytest
from light import TINY_TEXT, TINY_VISION, changed, model_of, words

from vlmrun.errors import CheckpointError
from vlmrun.models import siglip, siglip2
from vlmrun.models.families import family_of
from vlmrun.models.family import Config, View
from vlmrun.models.towers import filed_shapes

TINY_NAFLEX_VISION = {
    **{name: value for name, value in TINY_VISION.items() if name != "image_size"},
    "model_type": "siglip2_vision_model",
    "num_patches": 16,
}
TINY_NAFLEX = {
    "model_type": "siglip2",
    "vision_config": TINY_NAFLEX_VISION,
    "text_config": {**TINY_TEXT, "model_type": "siglip2_text_model"},
}
SHAPES: dict[str, Config] = {
    "tiny": TINY_NAFLEX,
    "of defaults": {"model_type": "siglip2"},
    "of defaults, vision": {"model_type": "siglip2_vision_model"},
    "without pooling head": {**TINY_NAFLEX_VISION, "vision_use_head": False},
    "grey, other table": {**TINY_NAFLEX_VISION, "num_channels": 1, "num_patches": 25},
    "other projection": changed(TINY_NAFLEX, "text_config", projection_size=20),
}


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_hold_every_tensor_of_the_stock_model_once(name: str) -> None:
    import torch
    import transformers

    config = SHAPES[name]
    family = family_of(config)
    with torch.device("meta"):
        config_class = transformers.CONFIG_MAPPING[config["model_type"]]
        stock = getattr(transformers, family.model_class)(config_class.from_dict(dict(config)))
    paths = [path for b in family.architecture(config).blocks for path in b.tensors]
    found = {path: s for b in family.architecture(config).blocks for path, s in b.tensors.items()}
    assert len(paths) == len(found)
    assert filed_shapes(found) == {k: tuple(t.shape) for k, t in stock.state_dict().items()}


def test_defaults_are_those_of_the_stock_classes() -> None:
    import transformers
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    for config, defaults in (
        (transformers.Siglip2VisionConfig(), siglip2.VISION_DEFAULTS),
        (transformers.Siglip2TextConfig(), siglip.TEXT_DEFAULTS),
    ):
        assert {name: getattr(config, name) for name in defaults} == dict(defaults)
    assert Siglip2ImageProcessorPil.max_num_patches == siglip2.MAX_PATCHES


@pytest.mark.parametrize("size", [(16, 16), (1000, 10), (4000, 3000)])
@pytest.mark.parametrize(("most", "tokens"), [(None, 256), (1024, 1024), (1, 1)])
def test_a_picture_of_any_shape_costs_what_it_is_padded_to(
    size: tuple[int, int], most: int | None, tokens: int
) -> None:
    model = model_of(TINY_NAFLEX)
    cost = model.family.image_cost(model.architecture, *size, View(max_patches=most))
    assert (cost.crops, cost.tokens) == (1, tokens)


@pytest.mark.parametrize(
    ("size", "tokens"),
    [((384, 384), 784), ((72, 72), 36), ((70, 100), 40), ((1, 1), 1), ((15, 14), 2)],
)
def test_a_picture_at_its_own_size_costs_its_patches(size: tuple[int, int], tokens: int) -> None:
    """timm's rule for a patch of 14; squashed, 384 make 27 x 27."""
    vision = {**TINY_VISION, "patch_size": 14, "image_size": 384}
    model = model_of(vision)
    cost = model.family.image_cost(model.architecture, *size, View(dynamic=True))
    assert (cost.crops, cost.tokens) == (1, tokens)
    assert model.family.image_cost(model.architecture, *size, View()).tokens == 729


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_patches": 15}, "num_patches is 15, and the position table is a square"),
        ({"num_patches": 0}, "num_patches should be a positive number"),
        ({"patch_size": [7, 7]}, "patch_size should be a positive number, not [7, 7]"),
        ({"num_attention_heads": 3}, "3 heads do not divide the width 16"),
        ({"model_type": "siglip_vision_model"}, "this family needs 'siglip2_vision_model'"),
    ],
)
def test_configurations_that_cannot_be(values: dict[str, Any], expected: str) -> None:
    config = changed(TINY_NAFLEX, "vision_config", **values)
    with pytest.raises(CheckpointError) as caught:
        family_of(config).architecture(config)
    assert expected in words(caught.value)
