"""LLaVA-OneVision (Li et al. 2024, arXiv:2408.03326): SigLIP tower, MLP projector, Qwen2.

A single picture is seen as a base view and a grid of tiles; several pictures of one prompt
are seen as one view each, the form the model was trained on.
"""

import math
import re

from vlmrun.errors import UnsupportedModel
from vlmrun.models import anyres, decoders, multimodal, templates, towers
from vlmrun.models.family import Config, Family, ImageCost, View
from vlmrun.models.shapes import Architecture

VISION_DEFAULTS: Config = {  # of a configuration without vision_config; else SigLIP's hold
    **towers.SIGLIP_DEFAULTS,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "vision_use_head": False,
}
RESOLUTIONS = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]
OTHER = "LLaVA-OneVision as its authors published it is; give such a checkpoint"


def architecture(config: Config) -> Architecture:
    """Vision tower, projector with its newline vector, decoder, head."""
    if config.get("vision_config") is None:
        config = {**config, "vision_config": VISION_DEFAULTS}
    vision = towers.read_vision(config, "siglip_vision_model")
    decoder, text = decoders.read_decoder(config, ("qwen2",))
    if config.get("vision_feature_select_strategy", "full") != "full":
        raise UnsupportedModel(
            "vision_feature_select_strategy other than full is not supported", OTHER
        )
    if text.get("use_sliding_window"):
        raise UnsupportedModel("a decoder with sliding-window attention is not supported", OTHER)
    features = multimodal.feature_layers(config, vision.layers, default=-1)
    projector = multimodal.mlp_projector(config, vision, len(features), decoder, newline=True)
    tiling = anyres.read_tiling(config, RESOLUTIONS, vision.image_size, max_tiles(config))
    return Architecture(
        multimodal.blocks(vision, decoder, text, projector),
        vision=vision,
        decoder=decoder,
        tiling=tiling,
        feature_layers=features,
        ties=decoders.ties(config, text),
    )


def max_tiles(config: Config) -> int:
    aspect = str(config.get("vision_aspect_ratio", "anyres_max_9"))
    match = re.fullmatch(r"anyres_max_([1-9]\d*)", aspect)
    if match is None:
        raise UnsupportedModel(f"vision_aspect_ratio {aspect!r} is not supported", OTHER)
    return int(match[1])


def image_cost(architecture: Architecture, width: int, height: int, view: View) -> ImageCost:
    """Crops and tokens of one picture of width × height pixels.

    High detail: the base view, the tiles of the fitted resolution without their padding,
    shrunk when they exceed `max_tiles`, and one newline token per row.
    Low detail: one view and one newline.
    """
    vision, tiling = architecture.vision, architecture.tiling
    assert vision is not None
    assert tiling is not None
    assert tiling.max_tiles is not None
    if view.detail == "low":
        return ImageCost(crops=1, tokens=vision.tokens + 1)
    rows, columns = anyres.unpadded(tiling, vision, width, height)
    shrink = math.sqrt(rows * columns / (tiling.max_tiles * vision.tokens))
    if shrink > 1.1:
        rows, columns = int(rows // shrink), int(columns // shrink)
    crops = 1 + anyres.tile_count(tiling, vision, width, height)
    return ImageCost(crops=crops, tokens=vision.tokens + rows * columns + rows)


LLAVA_ONEVISION = Family(
    name="LLaVA-OneVision",
    model_types=("llava_onevision",),
    model_class="LlavaOnevisionForConditionalGeneration",
    task="caption",
    architecture=architecture,
    renames=multimodal.RENAMES,
    fused=towers.FUSED_HEAD,
    ignored=multimodal.OLD_KEYS,
    image_processors=("LlavaOnevisionImageProcessor",),
    image_cost=image_cost,
    phases=multimodal.phases,
    image_token_id=151646,
    default_prompt="Describe this image.",
    chat_template=lambda _: templates.ONEVISION,
)
