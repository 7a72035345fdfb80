"""Vision and text towers: SigLIP's (arXiv:2303.15343) and CLIP's (arXiv:2103.00020).

Both are the same stack of encoder blocks; CLIP puts a class token before the patches and a norm
before the first block.
"""

import math
import re
from collections.abc import Mapping

from vlmrun.errors import UnsupportedModel, UsageError
from vlmrun.models.family import MOST_LAYERS, Config, contradiction, number, section
from vlmrun.models.layer import Block, Shape
from vlmrun.models.shapes import TextTower, VisionTower

SIGLIP_DEFAULTS: Config = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}
CLIP_DEFAULTS: Config = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
}
DEFAULTS = {"siglip_vision_model": SIGLIP_DEFAULTS, "clip_vision_model": CLIP_DEFAULTS}
# our pooling head keeps the three apart, as every other attention does
FUSED_HEAD = (
    (
        r"(.*head\.attention)\.in_proj_(weight|bias)$",
        (r"\1.q_proj.\2", r"\1.k_proj.\2", r"\1.v_proj.\2"),
    ),
)


def filed_path(path: str) -> str:
    """A module path of ours as files spell it."""
    return re.sub(r"(head\.attention)\.[qkv]_proj\.(\w+)$", r"\1.in_proj_\2", path)


def filed_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Tensors as files hold them: the three projections of the pooling head are one there."""
    found: dict[str, Shape] = {}
    for path, shape in shapes.items():
        filed = filed_path(path)
        found[filed] = shape if filed == path else (3 * shape[0], *shape[1:])
    return found


def linear(path: str, wide: int, narrow: int) -> dict[str, Shape]:
    """Tensors of a linear layer from `narrow` inputs to `wide` outputs."""
    return {f"{path}.weight": (wide, narrow), f"{path}.bias": (wide,)}


def norm(path: str, width: int) -> dict[str, Shape]:
    return {f"{path}.weight": (width,), f"{path}.bias": (width,)}


def encoder_layer(path: str, tower: VisionTower | TextTower) -> dict[str, Shape]:
    """Tensors of one encoder block, alike in all towers."""
    tensors = norm(f"{path}.layer_norm1", tower.width) | norm(f"{path}.layer_norm2", tower.width)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        tensors |= linear(f"{path}.self_attn.{name}", tower.width, tower.width)
    tensors |= linear(f"{path}.mlp.fc1", tower.mlp_width, tower.width)
    return tensors | linear(f"{path}.mlp.fc2", tower.width, tower.mlp_width)


def pooling_head(path: str, tower: VisionTower) -> dict[str, Shape]:
    """Tensors of the attention pooling head: one learned probe looks at all patches."""
    tensors: dict[str, Shape] = {f"{path}.probe": (1, 1, tower.width)}
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        tensors |= linear(f"{path}.attention.{name}", tower.width, tower.width)
    tensors |= norm(f"{path}.layernorm", tower.width)
    tensors |= linear(f"{path}.mlp.fc1", tower.mlp_width, tower.width)
    return tensors | linear(f"{path}.mlp.fc2", tower.width, tower.mlp_width)


def embeddings(path: str, tower: VisionTower) -> dict[str, Shape]:
    """Tensors that turn pixels into patch vectors with their positions."""
    patch: Shape = (tower.channels, tower.patch_size, tower.patch_size)
    patch = (math.prod(patch),) if tower.naflex else patch
    tensors: dict[str, Shape] = {f"{path}.patch_embedding.weight": (tower.width, *patch)}
    if tower.class_token:
        tensors[f"{path}.class_embedding"] = (tower.width,)
    else:
        tensors[f"{path}.patch_embedding.bias"] = (tower.width,)
    tensors[f"{path}.position_embedding.weight"] = (tower.positions, tower.width)
    return tensors


def vision_blocks(tower: VisionTower, prefix: str) -> list[Block]:
    """Blocks of a vision tower whose module path starts with `prefix` (with its dot)."""
    first = f"{prefix}embeddings"
    blocks = [Block("vision.embeddings", "vision", first, embeddings(first, tower))]
    if tower.class_token:
        before = f"{prefix}pre_layrnorm"  # spelled so
        blocks.append(Block("vision.prenorm", "vision", before, norm(before, tower.width)))
    for i in range(tower.layers):
        path = f"{prefix}encoder.layers.{i}"
        tensors = encoder_layer(path, tower)
        blocks.append(Block(f"vision.layers.{i}", "vision", path, tensors, quantised=True))
    last = f"{prefix}post_layernorm"
    blocks.append(Block("vision.norm", "vision", last, norm(last, tower.width)))
    if tower.pooled:
        head = f"{prefix}head"
        blocks.append(Block("vision.head", "vision", head, pooling_head(head, tower)))
    return blocks


def vision_names(tower: VisionTower, layers: int) -> list[str]:
    """Names of the blocks that run, in order, up to the output of block `layers`."""
    before = ["vision.embeddings"] + ["vision.prenorm"] * tower.class_token
    return before + [f"vision.layers.{i}" for i in range(layers)]


def read_vision(config: Config, *supported: str) -> VisionTower:
    """Read the tower that `vision_config` describes, class defaults filled in.

    supported: model_types the family is known with; the first is meant where none is named.

    Raises:
        UnsupportedModel: it is another.
        CheckpointError: a number of it cannot be.
    """
    given = config.get("vision_config")
    named = given.get("model_type") if isinstance(given, Mapping) else None
    kind = supported[0] if named is None else named
    if kind not in supported:
        raise UnsupportedModel(
            f"vision_config.model_type is {kind!r}, and this family needs "
            f"{' or '.join(map(repr, supported))}",
            "vlmrun caption --allow-untested tries others, without a promise",
        )
    part = section(config, "vision_config", DEFAULTS[kind])
    return vision_tower(part, class_token=kind == "clip_vision_model")


def vision_tower(config: Config, *, class_token: bool = False) -> VisionTower:
    """Read the numbers of a vision tower.

    Raises:
        CheckpointError: a number is missing or cannot be (heads that do not divide the width).
    """
    tower = VisionTower(
        layers=number(config, "num_hidden_layers", most=MOST_LAYERS),
        width=number(config, "hidden_size"),
        mlp_width=number(config, "intermediate_size"),
        heads=number(config, "num_attention_heads"),
        head_dim=number(config, "hidden_size") // number(config, "num_attention_heads"),
        image_size=number(config, "image_size"),
        patch_size=number(config, "patch_size"),
        channels=number(config, "num_channels"),
        pooled=not class_token and bool(config.get("vision_use_head", True)),
        class_token=class_token,
    )
    check_heads(tower.width, tower.heads)
    if not tower.tokens:
        raise contradiction(f"no patch of {tower.patch_size} fits an image of {tower.image_size}")
    return tower


def check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise contradiction(f"{heads} heads do not divide the width {width}")


def hidden_state(kind: str, layers: int) -> int | None:
    """The index into the hidden states that `hidden:K` names (0 = embeddings), None for the
    other kinds.

    Raises:
        UsageError: no such kind, or the tower has no such layer.
    """
    if kind in ("pooled", "last-hidden"):
        return None
    index = re.fullmatch(r"hidden:(-?)([0-9]{1,9})", kind)
    if index is None:
        raise UsageError(f"unknown output kind {kind!r}", "use pooled, last-hidden or hidden:-2")
    at = layers + 1 - int(index[2]) if index[1] else int(index[2])
    if not 0 <= at <= layers:
        raise UsageError(
            f"{kind} names no layer: the tower has hidden:0 (embeddings) to hidden:{layers}",
            "hidden:-1 is the last of them, hidden:-2 the one before it",
        )
    return at
