"""SigLIP (Zhai et al. 2023, arXiv:2303.15343) and SigLIP 2 at fixed resolution.

Both are `model_type: siglip`; a vision tower alone is `siglip_vision_model`. The text tower
pools the last position whatever it holds, so texts are always padded to the position limit.
"""

from collections.abc import Mapping
from typing import Any

from vlmrun.errors import UnsupportedModel, UsageError
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
from vlmrun.models.shapes import Architecture, TextTower, VisionTower

VISION_DEFAULTS: Config = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}
TEXT_DEFAULTS: Config = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
}


def linear(path: str, wide: int, narrow: int) -> dict[str, Shape]:
    """Tensors of a linear layer from `narrow` inputs to `wide` outputs."""
    return {f"{path}.weight": (wide, narrow), f"{path}.bias": (wide,)}


def norm(path: str, width: int) -> dict[str, Shape]:
    return {f"{path}.weight": (width,), f"{path}.bias": (width,)}


def encoder_layer(path: str, tower: VisionTower | TextTower) -> dict[str, Shape]:
    """Tensors of one encoder block, alike in both towers."""
    tensors = norm(f"{path}.layer_norm1", tower.width) | norm(f"{path}.layer_norm2", tower.width)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        tensors |= linear(f"{path}.self_attn.{name}", tower.width, tower.width)
    tensors |= linear(f"{path}.mlp.fc1", tower.mlp_width, tower.width)
    return tensors | linear(f"{path}.mlp.fc2", tower.width, tower.mlp_width)


def pooling_head(path: str, tower: VisionTower) -> dict[str, Shape]:
    """Tensors of the attention pooling head: one learned probe looks at all patches."""
    width = tower.width
    tensors: dict[str, Shape] = {f"{path}.probe": (1, 1, width)}
    tensors[f"{path}.attention.in_proj_weight"] = (3 * width, width)
    tensors[f"{path}.attention.in_proj_bias"] = (3 * width,)
    tensors |= linear(f"{path}.attention.out_proj", width, width)
    tensors |= norm(f"{path}.layernorm", width)
    tensors |= linear(f"{path}.mlp.fc1", tower.mlp_width, width)
    return tensors | linear(f"{path}.mlp.fc2", width, tower.mlp_width)


def vision_blocks(tower: VisionTower, prefix: str) -> list[Block]:
    """Blocks of a vision tower whose module path starts with `prefix` (with its dot)."""
    patch = (tower.width, tower.channels, tower.patch_size, tower.patch_size)
    embeddings: dict[str, Shape] = {
        f"{prefix}embeddings.patch_embedding.weight": patch,
        f"{prefix}embeddings.patch_embedding.bias": (tower.width,),
        f"{prefix}embeddings.position_embedding.weight": (tower.tokens, tower.width),
    }
    blocks = [Block("vision.embeddings", "vision", f"{prefix}embeddings", embeddings)]
    for i in range(tower.layers):
        path = f"{prefix}encoder.layers.{i}"
        blocks.append(Block(f"vision.layers.{i}", "vision", path, encoder_layer(path, tower)))
    last = f"{prefix}post_layernorm"
    blocks.append(Block("vision.norm", "vision", last, norm(last, tower.width)))
    if tower.pooled:
        head = f"{prefix}head"
        blocks.append(Block("vision.head", "vision", head, pooling_head(head, tower)))
    return blocks


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
        blocks.append(Block(f"text.layers.{i}", "text", path, encoder_layer(path, tower)))
    last, head = "text_model.final_layer_norm", "text_model.head"
    blocks.append(Block("text.norm", "text", last, norm(last, tower.width)))
    blocks.append(Block("text.head", "text", head, linear(head, tower.projection, tower.width)))
    return blocks


def vision_tower(config: Config) -> VisionTower:
    """Read the numbers of a vision tower, class defaults filled in.

    Raises:
        CheckpointError: a number is missing or cannot be (heads that do not divide the width).
    """
    tower = VisionTower(
        layers=number(config, "num_hidden_layers", most=MOST_LAYERS),
        width=number(config, "hidden_size"),
        mlp_width=number(config, "intermediate_size"),
        heads=number(config, "num_attention_heads"),
        image_size=number(config, "image_size"),
        patch_size=number(config, "patch_size"),
        channels=number(config, "num_channels"),
        pooled=bool(config.get("vision_use_head", True)),
    )
    check_heads(tower.width, tower.heads)
    if not tower.tokens:
        raise contradiction(f"no patch of {tower.patch_size} fits an image of {tower.image_size}")
    return tower


def text_tower(config: Config) -> TextTower:
    width, projection = number(config, "hidden_size"), config.get("projection_size")
    tower = TextTower(
        layers=number(config, "num_hidden_layers", most=MOST_LAYERS),
        width=width,
        mlp_width=number(config, "intermediate_size"),
        heads=number(config, "num_attention_heads"),
        positions=number(config, "max_position_embeddings"),
        vocabulary=number(config, "vocab_size"),
        projection=width if projection is None else number(config, "projection_size"),
    )
    check_heads(tower.width, tower.heads)
    return tower


def check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise contradiction(f"{heads} heads do not divide the width {width}")


def architecture(config: Config) -> Architecture:
    """Both towers and the two scalars that turn a cosine into a score."""
    vision = vision_tower(section(config, "vision_config", VISION_DEFAULTS, "siglip_vision_model"))
    text = text_tower(section(config, "text_config", TEXT_DEFAULTS, "siglip_text_model"))
    score = Block("score", "score", "", {"logit_scale": (1,), "logit_bias": (1,)})
    blocks = (*vision_blocks(vision, "vision_model."), *text_blocks(text), score)
    return Architecture(blocks, vision=vision, text=text)


def vision_only_architecture(config: Config) -> Architecture:
    vision = vision_tower(section({"vision": config}, "vision", VISION_DEFAULTS))
    return Architecture(tuple(vision_blocks(vision, "")), vision=vision)


def image_cost(architecture: Architecture, width: int, height: int, detail: Detail) -> ImageCost:
    """A picture is squashed to the tower's square, whatever its shape."""
    assert architecture.vision is not None
    return ImageCost(crops=1, tokens=architecture.vision.tokens)


def hidden_state(kind: str, layers: int) -> int | None:
    """The index into the hidden states that `hidden:K` names (0 = embeddings), None for the
    other kinds.

    Raises:
        UsageError: no such kind, or the tower has no such layer.
    """
    if kind in ("pooled", "last-hidden"):
        return None
    head, _, index = kind.partition(":")
    if head != "hidden" or not index.removeprefix("-").isdigit():
        raise UsageError(f"unknown output kind {kind!r}", "use pooled, last-hidden or hidden:-2")
    at = int(index) + (layers + 1 if index.startswith("-") else 0)
    if not 0 <= at <= layers:
        raise UsageError(
            f"{kind} names no layer: the tower has hidden:0 (embeddings) to hidden:{layers}",
            "hidden:-1 is the last of them, hidden:-2 the one before it",
        )
    return at


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
    names = ["vision.embeddings"]
    names += [f"vision.layers.{i}" for i in range(vision.layers if at is None else at)]
    names += ["vision.norm"] if at is None else []
    names += ["vision.head"] if kind == "pooled" else []
    found: dict[Phase, tuple[str, ...]] = {"vision": tuple(names)}
    if architecture.text is not None and kind == "pooled":
        found["text"] = tuple(b.name for b in architecture.blocks if b.part == "text")
    return found


def row(name: str, model_type: str, model_class: str, **parts: Any) -> Family:
    return Family(
        name=name,
        model_types=(model_type,),
        model_class=model_class,
        task="embed",
        ignored=(r"(^|\.)position_ids$",),
        image_cost=image_cost,
        phases=phases,
        **parts,
    )


SIGLIP = row("SigLIP", "siglip", "SiglipModel", architecture=architecture, renames=())
SIGLIP_VISION = row(
    "SigLIP vision tower",
    "siglip_vision_model",
    "SiglipVisionModel",
    architecture=vision_only_architecture,
    renames=((r"^vision_model\.", ""),),
)
