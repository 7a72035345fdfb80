"""LLaVA-OneVision (Li et al. 2024, arXiv:2408.03326): SigLIP tower, MLP projector, Qwen2.

A single picture is seen as a base view and a grid of tiles; several pictures of one prompt
are seen as one view each, the form the model was trained on.
"""

import math
import re
from collections.abc import Mapping

from vlmrun.errors import UnsupportedModel
from vlmrun.models import siglip
from vlmrun.models.family import (
    MOST_LAYERS,
    Config,
    Detail,
    Family,
    ImageCost,
    Phase,
    contradiction,
    number,
    section,
)
from vlmrun.models.layer import Block, Shape
from vlmrun.models.shapes import Architecture, Decoder, Tiling, VisionTower

VISION_DEFAULTS: Config = {  # of a configuration without vision_config; else siglip's hold
    **siglip.VISION_DEFAULTS,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "vision_use_head": False,
}
TEXT_DEFAULTS: Config = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
RESOLUTIONS = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]
TABLE = "model.language_model.embed_tokens.weight"
HEAD = "lm_head.weight"
OTHER = "LLaVA-OneVision as its authors published it is; give such a checkpoint"


def qwen2_layer(path: str, decoder: Decoder) -> dict[str, Shape]:
    width, head_dim = decoder.width, decoder.head_dim
    attention = f"{path}.self_attn"
    tensors = siglip.linear(f"{attention}.q_proj", decoder.heads * head_dim, width)
    tensors |= siglip.linear(f"{attention}.k_proj", decoder.kv_heads * head_dim, width)
    tensors |= siglip.linear(f"{attention}.v_proj", decoder.kv_heads * head_dim, width)
    tensors[f"{attention}.o_proj.weight"] = (width, decoder.heads * head_dim)
    tensors[f"{path}.mlp.gate_proj.weight"] = (decoder.mlp_width, width)
    tensors[f"{path}.mlp.up_proj.weight"] = (decoder.mlp_width, width)
    tensors[f"{path}.mlp.down_proj.weight"] = (width, decoder.mlp_width)
    tensors[f"{path}.input_layernorm.weight"] = (width,)
    tensors[f"{path}.post_attention_layernorm.weight"] = (width,)
    return tensors


def projector(vision: VisionTower, features: int, decoder: Decoder, bias: bool) -> Block:
    path = "model.multi_modal_projector"
    tensors = siglip.linear(f"{path}.linear_1", decoder.width, vision.width * features)
    tensors |= siglip.linear(f"{path}.linear_2", decoder.width, decoder.width)
    if not bias:
        tensors = {name: shape for name, shape in tensors.items() if name.endswith(".weight")}
    tensors["model.image_newline"] = (decoder.width,)
    return Block("projector", "projector", path, tensors)


def decoder_blocks(decoder: Decoder) -> list[Block]:
    prefix = "model.language_model"
    table = (decoder.vocabulary, decoder.width)
    blocks = [
        Block("decoder.tokens", "decoder", f"{prefix}.embed_tokens", {TABLE: table}, gathered=True)
    ]
    for i in range(decoder.layers):
        path = f"{prefix}.layers.{i}"
        blocks.append(Block(f"decoder.layers.{i}", "decoder", path, qwen2_layer(path, decoder)))
    last: dict[str, Shape] = {f"{prefix}.norm.weight": (decoder.width,)}
    blocks.append(Block("decoder.norm", "decoder", f"{prefix}.norm", last))
    blocks.append(Block("head", "head", "lm_head", {HEAD: table}, row_blocks=True))
    return blocks


def read_decoder(config: Config) -> Decoder:
    width, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    if config.get("head_dim") is None:
        siglip.check_heads(width, heads)
        config = {**config, "head_dim": width // heads}
    if config["num_key_value_heads"] is None:
        config = {**config, "num_key_value_heads": heads}
    decoder = Decoder(
        layers=number(config, "num_hidden_layers", most=MOST_LAYERS),
        width=width,
        mlp_width=number(config, "intermediate_size"),
        heads=heads,
        kv_heads=number(config, "num_key_value_heads"),
        head_dim=number(config, "head_dim"),
        vocabulary=number(config, "vocab_size"),
        positions=number(config, "max_position_embeddings"),
    )
    if heads % decoder.kv_heads:
        raise contradiction(f"{decoder.kv_heads} key-value heads do not divide {heads} heads")
    return decoder


def feature_layers(config: Config, layers: int) -> tuple[int, ...]:
    """Indices into the tower's hidden states (0 = embeddings, `layers` = the last block)."""
    named = config.get("vision_feature_layer", -1)
    chosen = named if isinstance(named, list) else [named]
    known = range(-layers - 1, layers + 1)
    if not chosen or not all(isinstance(i, int) and i in known for i in chosen):
        raise contradiction(f"vision_feature_layer {named!r} names no layer of a tower of {layers}")
    return tuple(i % (layers + 1) for i in chosen)


def read_tiling(config: Config, crop: int) -> Tiling:
    """The grid that pictures are fitted to, in pieces of `crop` × `crop` pixels."""
    aspect = str(config.get("vision_aspect_ratio", "anyres_max_9"))
    match = re.fullmatch(r"anyres_max_([1-9]\d*)", aspect)
    if match is None:
        raise UnsupportedModel(f"vision_aspect_ratio {aspect!r} is not supported", OTHER)
    grid = config.get("image_grid_pinpoints")
    try:
        pairs = tuple((int(h), int(w)) for h, w in (RESOLUTIONS if grid is None else grid))
    except (TypeError, ValueError):
        pairs = ()
    if not pairs or any(side < crop or side % crop for pair in pairs for side in pair):
        raise contradiction(f"image_grid_pinpoints should be pairs of multiples of {crop}")
    return Tiling(pairs, int(match[1]))


def architecture(config: Config) -> Architecture:
    """Vision tower, projector with its newline vector, decoder, head.

    The head is tied to the token table when either part of the configuration says so: hub
    files of the 0.5B model say it in the text part only.
    """
    absent = config.get("vision_config") is None
    defaults = VISION_DEFAULTS if absent else siglip.VISION_DEFAULTS
    vision_config = section(config, "vision_config", defaults, "siglip_vision_model")
    text_config = section(config, "text_config", TEXT_DEFAULTS, "qwen2")
    if config.get("vision_feature_select_strategy", "full") != "full":
        raise UnsupportedModel(
            "vision_feature_select_strategy other than full is not supported", OTHER
        )
    if text_config.get("use_sliding_window"):
        raise UnsupportedModel("a decoder with sliding-window attention is not supported", OTHER)
    vision, decoder = siglip.vision_tower(vision_config), read_decoder(text_config)
    features = feature_layers(config, vision.layers)
    bias = bool(config.get("multimodal_projector_bias", True))
    tied = bool(config.get("tie_word_embeddings")) or bool(text_config["tie_word_embeddings"])
    blocks = (
        *siglip.vision_blocks(vision, "model.vision_tower."),
        projector(vision, len(features), decoder, bias),
        *decoder_blocks(decoder),
    )
    return Architecture(
        blocks,
        vision=vision,
        decoder=decoder,
        tiling=read_tiling(config, vision.image_size),
        feature_layers=features,
        ties={TABLE: HEAD} if tied else {},
    )


def fitted_resolution(tiling: Tiling, width: int, height: int) -> tuple[int, int]:
    """The (height, width) of the grid that keeps most of a picture, then wastes least."""

    def kept_and_wasted(resolution: tuple[int, int]) -> tuple[int, int]:
        rows, columns = resolution
        scale = min(columns / width, rows / height)
        fitted = int(width * scale) * int(height * scale)
        kept = min(fitted, width * height)
        return kept, kept - rows * columns

    return max(tiling.resolutions, key=kept_and_wasted)


def image_cost(architecture: Architecture, width: int, height: int, detail: Detail) -> ImageCost:
    """Crops and tokens of one picture of width × height pixels.

    High detail: the base view, the tiles of the fitted resolution without their padding,
    shrunk when they exceed `max_tiles`, and one newline token per row.
    Low detail: one view and one newline.
    """
    vision, tiling = architecture.vision, architecture.tiling
    assert vision is not None
    assert tiling is not None
    if detail == "low":
        return ImageCost(crops=1, tokens=vision.tokens + 1)
    side = vision.image_size // vision.patch_size
    best_height, best_width = fitted_resolution(tiling, width, height)
    tiles = (best_height // vision.image_size) * (best_width // vision.image_size)
    rows = side * (best_height // vision.image_size)
    columns = side * (best_width // vision.image_size)
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        rows -= (rows - kept) // 2 * 2
    else:
        kept = int(round(width * (rows / height), 7))
        columns -= (columns - kept) // 2 * 2
    shrink = math.sqrt(rows * columns / (tiling.max_tiles * side**2))
    if shrink > 1.1:
        rows, columns = int(rows // shrink), int(columns // shrink)
    return ImageCost(crops=1 + tiles, tokens=vision.tokens + rows * columns + rows)


def phases(architecture: Architecture, kind: str) -> Mapping[Phase, tuple[str, ...]]:
    """The tower up to the layer the decoder sees, and the projector; then the decoder."""
    deepest = max(architecture.feature_layers)
    vision = ("vision.embeddings", *(f"vision.layers.{i}" for i in range(deepest)), "projector")
    decode = tuple(b.name for b in architecture.blocks if b.part in ("decoder", "head"))
    return {"vision": vision, "decode": decode}


LLAVA_ONEVISION = Family(
    name="LLaVA-OneVision",
    model_types=("llava_onevision",),
    model_class="LlavaOnevisionForConditionalGeneration",
    task="caption",
    architecture=architecture,
    renames=(
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^(vision_tower|multi_modal_projector|image_newline)", r"model.\1"),
        (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."),
    ),
    ignored=(r"(^|\.)position_ids$", r"\.rotary_emb\.inv_freq$"),
    image_cost=image_cost,
    phases=phases,
    default_prompt="Describe this image.",
)
