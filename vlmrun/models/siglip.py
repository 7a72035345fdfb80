"""SigLIP (Zhai et al. 2023, arXiv:2303.15343) and SigLIP 2 at fixed resolution.

Both are `model_type: siglip`; a vision tower alone is `siglip_vision_model`. The text tower
pools the last position whatever it holds, so texts are always padded to the position limit.
"""

from collections.abc import Mapping
from typing import Any

from vlmrun.errors import UnsupportedModel
from vlmrun.models.family import (
    MOST_LAYERS,
    Config,
    Family,
    ImageCost,
    Phase,
    View,
    number,
    section,
)
from vlmrun.models.layer import Block
from vlmrun.models.shapes import Architecture, TextTower, VisionTower
from vlmrun.models.towers import (
    FUSED_HEAD,
    SIGLIP_DEFAULTS,
    check_heads,
    encoder_layer,
    hidden_state,
    linear,
    norm,
    vision_blocks,
    vision_names,
    vision_tower,
)

TEXT_DEFAULTS: Config = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
}
OLD_KEYS = (r"(^|\.)position_ids$",)


def text_blocks(tower: TextTower) -> list[Block]:
    table = "text_model.embeddings.token_embedding"
    positions = "text_model.embeddings.position_embedding"
    blocks = [
        Block(
            "text.tokens",
            "text",
            table,
            {f"{table}.weight": (tower.vocabulary, tower.width)},
            gathered=True,
        ),
        Block(
            "text.positions",
            "text",
            positions,
            {f"{positions}.weight": (tower.positions, tower.width)},
        ),
    ]
    for i in range(tower.layers):
        path = f"text_model.encoder.layers.{i}"
        tensors = encoder_layer(path, tower)
        blocks.append(Block(f"text.layers.{i}", "text", path, tensors, quantised=True))
    last, head = "text_model.final_layer_norm", "text_model.head"
    blocks.append(Block("text.norm", "text", last, norm(last, tower.width)))
    if tower.projection is not None:
        tensors = linear(head, tower.projection, tower.width)
        blocks.append(Block("text.head", "text", head, tensors, quantised=True))
    return blocks


def text_tower(config: Config) -> TextTower:
    width, projection = number(config, "hidden_size"), config.get("projection_size")
    projected = width if projection is None else number(config, "projection_size")
    tower = TextTower(
        layers=number(config, "num_hidden_layers", most=MOST_LAYERS),
        width=width,
        mlp_width=number(config, "intermediate_size"),
        heads=number(config, "num_attention_heads"),
        head_dim=width // number(config, "num_attention_heads"),
        positions=number(config, "max_position_embeddings"),
        vocabulary=number(config, "vocab_size"),
        projection=projected if config.get("use_head", True) else None,
    )
    check_heads(tower.width, tower.heads)
    return tower


def architecture(config: Config) -> Architecture:
    vision = vision_tower(section(config, "vision_config", SIGLIP_DEFAULTS, "siglip_vision_model"))
    text = text_tower(section(config, "text_config", TEXT_DEFAULTS, "siglip_text_model"))
    return both_towers(vision, text)


def both_towers(vision: VisionTower, text: TextTower) -> Architecture:
    """Both towers and the two scalars that turn a cosine into a score."""
    score = Block("score", "score", "", {"logit_scale": (1,), "logit_bias": (1,)})
    blocks = (*vision_blocks(vision, "vision_model."), *text_blocks(text), score)
    return Architecture(blocks, vision=vision, text=text)


def vision_only_architecture(config: Config) -> Architecture:
    vision = vision_tower(section({"vision": config}, "vision", SIGLIP_DEFAULTS))
    return Architecture(tuple(vision_blocks(vision, "")), vision=vision)


def image_cost(architecture: Architecture, width: int, height: int, view: View) -> ImageCost:
    """A picture is squashed to the tower's square, or at its own size padded to whole patches."""
    tower = architecture.vision
    assert tower is not None
    if not view.dynamic:
        return ImageCost(crops=1, tokens=tower.tokens)
    across, down = (-(-side // tower.patch_size) for side in (width, height))
    return ImageCost(crops=1, tokens=across * down)


def phases(architecture: Architecture, kind: str) -> Mapping[Phase, tuple[str, ...]]:
    """Blocks that run for pictures and for texts."""
    vision = architecture.vision
    assert vision is not None
    at = hidden_state(kind, vision.layers)
    if kind == "pooled" and not vision.pooled:
        raise UnsupportedModel(
            "this checkpoint has no pooling head, so it has no pooled output",
            "use --output-kind last-hidden or hidden:-2",
        )
    names = vision_names(vision, vision.layers if at is None else at)
    names += ["vision.norm"] if at is None else []
    names += ["vision.head"] if kind == "pooled" else []
    found: dict[Phase, tuple[str, ...]] = {"vision": tuple(names)}
    if architecture.text is not None and kind == "pooled":
        found["text"] = tuple(b.name for b in architecture.blocks if b.part == "text")
    return found


def row(name: str, model_type: str, model_class: str, **parts: Any) -> Family:
    """A family of one or both towers; `parts` are those of it that are not SigLIP's own."""
    common: dict[str, Any] = {
        "fused": FUSED_HEAD,
        "ignored": OLD_KEYS,
        "image_processors": ("SiglipImageProcessor",),
        "image_cost": image_cost,
        "phases": phases,
    }
    return Family(
        name=name,
        model_types=(model_type,),
        model_class=model_class,
        task="embed",
        **{**common, **parts},
    )


SIGLIP = row("SigLIP", "siglip", "SiglipModel", architecture=architecture)
SIGLIP_VISION = row(
    "SigLIP vision tower",
    "siglip_vision_model",
    "SiglipVisionModel",
    architecture=vision_only_architecture,
    renames=((r"^vision_model\.", ""),),
)
