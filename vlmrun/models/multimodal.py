"""What models of a vision tower, a projector and a decoder share (Liu et al. 2023,
arXiv:2304.08485): where their parts lie, and which run when."""

from collections.abc import Mapping

from vlmrun.models.decoders import KINDS, decoder_blocks
from vlmrun.models.family import Config, Phase, contradiction
from vlmrun.models.layer import Block, Shape
from vlmrun.models.shapes import Architecture, Decoder, VisionTower
from vlmrun.models.towers import linear, vision_blocks, vision_names

TOWER = "model.vision_tower"
PROJECTOR = "model.multi_modal_projector"
# keys as the hub's files spell them, which transformers wrote before its version 5
RENAMES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^(vision_tower|multi_modal_projector|image_newline)", r"model.\1"),
    (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."),
)
OLD_KEYS = (r"(^|\.)position_ids$", r"\.rotary_emb\.inv_freq$")


def blocks(
    vision: VisionTower, decoder: Decoder, text: Config, projector: Block
) -> tuple[Block, ...]:
    """All blocks in execution order; `text` is the filled-in text part of the configuration."""
    return (*vision_blocks(vision, f"{TOWER}."), projector, *decoder_blocks(decoder, text))


def mlp_projector(
    config: Config, vision: VisionTower, features: int, decoder: Decoder, *, newline: bool
) -> Block:
    """LLaVA's two linear layers, and the vector that ends a row of tiles where there is one."""
    tensors: dict[str, Shape] = linear(
        f"{PROJECTOR}.linear_1", decoder.width, vision.width * features
    )
    tensors |= linear(f"{PROJECTOR}.linear_2", decoder.width, decoder.width)
    if not config.get("multimodal_projector_bias", True):
        tensors = {name: shape for name, shape in tensors.items() if name.endswith(".weight")}
    if newline:
        tensors["model.image_newline"] = (decoder.width,)
    return Block("projector", "projector", PROJECTOR, tensors, quantised=True)


def feature_layers(config: Config, layers: int, *, default: int) -> tuple[int, ...]:
    """Indices into the tower's hidden states (0 = embeddings, `layers` = the last block)."""
    named = config.get("vision_feature_layer", default)
    chosen = named if isinstance(named, list) else [named]
    known = range(-layers - 1, layers + 1)
    if not chosen or not all(isinstance(i, int) and i in known for i in chosen):
        raise contradiction(f"vision_feature_layer {named!r} names no layer of a tower of {layers}")
    return tuple(i % (layers + 1) for i in chosen)


def drops_first(config: Config, *, default: str) -> bool:
    """Whether the decoder is shown a crop without its first vector: CLIP's class token, or a
    patch of a tower that has none, as stock models do."""
    strategy = config.get("vision_feature_select_strategy", default)
    if strategy not in ("default", "full"):
        raise contradiction(
            f"vision_feature_select_strategy is {strategy!r}, neither 'default' nor 'full'"
        )
    return bool(strategy == "default")


def decoder_facts(config: Config) -> tuple[str, int, str]:
    """What tells chat forms apart: the decoder's model_type, its vocabulary, and the name of the
    model it was made from, where the configuration says it."""
    text = config.get("text_config") or {}
    kind = str(text.get("model_type") or "llama")
    vocabulary = int({**KINDS[kind].defaults, **text}["vocab_size"])
    return kind, vocabulary, str(text.get("_name_or_path") or "")


def phases(architecture: Architecture, kind: str) -> Mapping[Phase, tuple[str, ...]]:
    """The tower up to what the decoder sees of it, and the projector; then the decoder."""
    assert architecture.vision is not None
    vision = vision_names(architecture.vision, max(architecture.feature_layers))
    vision += ["vision.norm"] * architecture.normed
    decode = tuple(b.name for b in architecture.blocks if b.part in ("decoder", "head"))
    return {"vision": (*vision, "projector"), "decode": decode}
