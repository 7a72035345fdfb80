"""SigLIP 2 of flexible resolution, NaFlex (Tschannen et al. 2025, arXiv:2502.14786).

Repositories of fixed resolution are `model_type: siglip` whatever they are called; these are
`siglip2`, a vision tower alone is `siglip2_vision_model`. A picture keeps its shape: it is scaled
to at most so many patches, and its row of patches is padded to exactly that many.
"""

import math
from dataclasses import replace

from vlmrun.models.family import Config, ImageCost, View, contradiction, number, section
from vlmrun.models.shapes import Architecture, VisionTower
from vlmrun.models.siglip import TEXT_DEFAULTS, both_towers, row, text_tower
from vlmrun.models.towers import vision_blocks, vision_tower

VISION_DEFAULTS: Config = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "patch_size": 16,
    "num_patches": 256,
    "vision_use_head": True,
}
MAX_PATCHES = 256  # the image processor's own default


def naflex_tower(config: Config) -> VisionTower:
    """A tower whose position table is a square of `num_patches`, resized to every picture's shape.

    Raises:
        CheckpointError: a number cannot be, or the table is no square.
    """
    positions, patch = number(config, "num_patches"), number(config, "patch_size")
    side = math.isqrt(positions)
    if side**2 != positions:
        raise contradiction(f"num_patches is {positions}, and the position table is a square")
    return replace(vision_tower({**config, "image_size": side * patch}), naflex=True)


def architecture(config: Config) -> Architecture:
    vision = naflex_tower(section(config, "vision_config", VISION_DEFAULTS, "siglip2_vision_model"))
    text = text_tower(section(config, "text_config", TEXT_DEFAULTS, "siglip2_text_model"))
    return both_towers(vision, text)


def vision_only_architecture(config: Config) -> Architecture:
    vision = naflex_tower(section({"vision": config}, "vision", VISION_DEFAULTS))
    return Architecture(tuple(vision_blocks(vision, "")), vision=vision)


def image_cost(architecture: Architecture, width: int, height: int, view: View) -> ImageCost:
    """Every picture is padded to the same number of patches."""
    return ImageCost(crops=1, tokens=view.max_patches or MAX_PATCHES)


SIGLIP2 = row(
    "SigLIP 2 NaFlex",
    "siglip2",
    "Siglip2Model",
    architecture=architecture,
    image_processors=("Siglip2ImageProcessor",),
    image_cost=image_cost,
)
SIGLIP2_VISION = row(
    "SigLIP 2 NaFlex vision tower",
    "siglip2_vision_model",
    "Siglip2VisionModel",
    architecture=vision_only_architecture,
    renames=((r"^vision_model\.", ""),),
    image_processors=("Siglip2ImageProcessor",),
    image_cost=image_cost,
)
