"""timm's SigLIP towers (`vit_*_siglip_*`): configuration and keys as transformers spells them.

A timm folder holds `config.json` ({"architecture", "num_features", "global_pool", "model_args",
"pretrained_cfg"}) and `model.safetensors`. The architecture's name stands for arguments that timm
keeps in code; `model_args` overrides them, `pretrained_cfg` says how pictures are prepared.
Source: timm 1.0.31, models/vision_transformer.py, models/_hub.py, data/transforms_factory.py.
"""

from collections.abc import Mapping
from typing import Any

from vlmrun.errors import UnsupportedModel
from vlmrun.models.checkpoints.names import nearest
from vlmrun.models.family import Config, contradiction, number
from vlmrun.models.transforms import UNRUN, color_settings, missing, picture_settings

SIZES: Mapping[str, Config] = {
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12, "mlp_ratio": 4.0},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16, "mlp_ratio": 4.0},
    "so400m": {"embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_ratio": 3.7362},
    "giantopt": {"embed_dim": 1536, "depth": 40, "num_heads": 16, "mlp_ratio": 4.0},
}
# size, patch, activation, image sizes, image sizes that exist without the pooling head only.
# timm gives SigLIP 2 of base, large (but 512) and so400m-14 the error function too.
RELEASES = (
    ("base", 16, "gelu", (224, 256, 384, 512), ()),
    ("base", 32, "gelu_tanh", (256,), ()),
    ("large", 16, "gelu", (256, 384), ()),
    ("large", 16, "gelu_tanh", (512,), ()),
    ("so400m", 14, "gelu", (224, 378, 384), (448, 896)),
    ("so400m", 16, "gelu_tanh", (256, 384, 512), ()),
    ("giantopt", 16, "gelu_tanh", (256, 384), ()),
)
# timm's names on the left, transformers' on the right; "gelu" is the error function in both.
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
# Arguments that must be what a SigLIP tower has, where a file states them.
FIXED: Config = {
    "in_chans": 3,
    "class_token": False,
    "qkv_bias": True,
    "proj_bias": True,
    "qk_norm": False,
    "init_values": None,
    "pos_embed": "learn",
    "reg_tokens": 0,
    "pre_norm": False,
    "final_norm": True,
    "use_naflex": False,
}
# Arguments that change no output of a forward pass at the tower's own size.
HARMLESS = (
    "num_classes",
    "dynamic_img_size",
    "dynamic_img_pad",
    "strict_img_size",
    "pretrained_strict",
    "weight_init",
    "fix_init",
    "no_embed_class",  # of class tokens, of which there are none
    "pool_include_prefix",
)

# Keys become module paths of `SiglipVisionModel`; then the fused ones are cut into rows.
TIMM_RENAMES = (
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^pos_embed$", "embeddings.position_embedding.weight"),
    (r"^blocks\.(\d+)\.norm([12])\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.\1.self_attn.qkv."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.out_proj."),
    (r"^blocks\.(\d+)\.mlp\.", r"encoder.layers.\1.mlp."),
    (r"^norm\.", "post_layernorm."),
    (r"^attn_pool\.latent$", "head.probe"),
    (r"^attn_pool\.q\.", "head.attention.q_proj."),
    (r"^attn_pool\.kv\.", "head.attention.kv."),
    (r"^attn_pool\.proj\.", "head.attention.out_proj."),
    (r"^attn_pool\.norm\.", "head.layernorm."),
    (r"^attn_pool\.mlp\.", "head.mlp."),
)
TIMM_FUSED = (
    (
        r"(.*encoder\.layers\.\d+\.self_attn)\.qkv\.(weight|bias)",
        (r"\1.q_proj.\2", r"\1.k_proj.\2", r"\1.v_proj.\2"),
    ),
    (r"(.*head\.attention)\.kv\.(weight|bias)", (r"\1.k_proj.\2", r"\1.v_proj.\2")),
)
TIMM_IGNORED = (r"^head\.(weight|bias)$",)  # the classifier of a fine-tuned model


def releases() -> dict[str, Config]:
    """Architectures by name: the arguments that timm's constructor is called with."""
    found: dict[str, Config] = {}
    for size, patch, activation, sizes, gap_sizes in RELEASES:
        common = {**SIZES[size], "patch_size": patch, "act_layer": activation}
        name = f"vit_{size}_patch{patch}_siglip"
        for side in sizes:
            found[f"{name}_{side}"] = {**common, "img_size": side, "global_pool": "map"}
        for side in (*sizes, *gap_sizes):
            gap = {"img_size": side, "global_pool": "avg", "fc_norm": False}
            found[f"{name}_gap_{side}"] = {**common, **gap}
    return found


ARCHITECTURES = releases()


def translate_timm(config: Config) -> Config:
    """A timm folder's config.json in transformers' spelling, `model_type: timm_siglip`.

    Raises:
        CheckpointError: a setting is missing, or two contradict each other.
        UnsupportedModel: the architecture, or an argument of it, is not one that is known.
    """
    given = config.get("model_args") or {}
    # Before timm 0.9.17 the settings of `pretrained_cfg` lay at the top.
    pictures = config.get("pretrained_cfg", config)
    if not isinstance(given, Mapping) or not isinstance(pictures, Mapping):
        raise contradiction("model_args and pretrained_cfg should be objects")
    args = {**named_arguments(config.get("architecture")), **checked_arguments(given)}
    side = input_side(given, pictures)
    tower = vision_settings({**args, "img_size": side})
    return {
        "model_type": "timm_siglip",
        **tower,
        "image_processor": preparation(given, pictures, side),
    }


def named_arguments(name: object) -> Config:
    """What an architecture's name stands for.

    Raises:
        UnsupportedModel: the name is not known.
    """
    known = ARCHITECTURES.get(str(name))
    if known is None:
        near = nearest(str(name), ARCHITECTURES) or ["vit_so400m_patch14_siglip_384"]
        raise UnsupportedModel(
            f"timm architecture {name!r} is not supported",
            f"towers of SigLIP are, as {' or '.join(near)}",
        )
    return known


def checked_arguments(given: Config) -> Config:
    """Those of `model_args` that override the architecture's.

    Raises:
        UnsupportedModel: an argument would make another kind of tower.
    """
    known = {"fc_norm"}.union(*ARCHITECTURES.values())
    for name, value in given.items():
        if name in known or name in HARMLESS or name.endswith("_rate"):
            continue
        if name not in FIXED or value != FIXED[name]:
            raise UnsupportedModel(
                f"model_args sets {name} to {value!r}",
                "that makes a tower which is not SigLIP's; it is not run",
            )
    return {name: value for name, value in given.items() if name in known and value is not None}


def input_side(given: Config, pictures: Config) -> int:
    """Side of the square that the position table is made for.

    `model_args` goes before the size that pictures are prepared at, as in timm.

    Raises:
        CheckpointError: no size is named, or what is named is none.
        UnsupportedModel: it is no square.
    """
    size = given.get("img_size")
    return prepared_side(pictures) if size is None else square_side(size)


def prepared_side(pictures: Config) -> int:
    """Side of the squares that `pretrained_cfg` has of pictures; raises the same."""
    size = pictures.get("input_size")
    if size is None:
        raise missing("input_size")
    return square_side(size[1:] if isinstance(size, list | tuple) else size)  # channels first


def preparation(given: Config, pictures: Config, side: int) -> dict[str, Any]:
    """How squares are made of pictures for a tower of that `side`; a tower for any size is shown
    what `pretrained_cfg` says, and another size than its own is not run."""
    if given.get("dynamic_img_size") or given.get("dynamic_img_pad"):
        shown = prepared_side(pictures)
        if shown != side:
            why = f"img_size is {side} and input_size {shown}, with dynamic_img_size"
            return {**color_settings(pictures), UNRUN: why}
    return picture_settings(pictures, side)


def square_side(size: object) -> int:
    """Raises UnsupportedModel for sides of two lengths, CheckpointError for what is no size."""
    if isinstance(size, list | tuple) and len(size) == 2 and size[0] == size[1]:
        size = size[0]
    if isinstance(size, list | tuple):
        raise UnsupportedModel(f"the tower takes pictures of {list(size)}", "it should be a square")
    return number({"img_size": size}, "img_size")


def vision_settings(args: Config) -> dict[str, Any]:
    """The arguments of timm's constructor as settings of a `SiglipVisionConfig`.

    `global_pool` stays: without the head timm means the normed tokens ("avg") or pools nothing
    ("").

    Raises:
        CheckpointError: a number is missing or is none.
        UnsupportedModel: the activation or the pooling is not SigLIP's.
    """
    pool, activation, moved = (args.get(name) for name in ("global_pool", "act_layer", "fc_norm"))
    if activation not in list(ACTIVATIONS):
        raise UnsupportedModel(
            f"the tower's activation is {activation!r}", f"supported: {', '.join(ACTIVATIONS)}"
        )
    # A tower that averages has its last norm behind the average, unless fc_norm says no.
    if pool not in ("map", "avg", "") or (pool == "avg" if moved is None else moved):
        raise UnsupportedModel(
            f"the tower pools by {pool!r} with fc_norm {moved!r}",
            "supported: 'map' and '', and 'avg' with fc_norm false",
        )
    return {
        "hidden_size": number(args, "embed_dim"),
        "intermediate_size": mlp_width(number(args, "embed_dim"), args.get("mlp_ratio")),
        "num_hidden_layers": number(args, "depth"),
        "num_attention_heads": number(args, "num_heads"),
        "num_channels": 3,
        "image_size": number(args, "img_size"),
        "patch_size": number(args, "patch_size"),
        "hidden_act": ACTIVATIONS[activation],
        "layer_norm_eps": 1e-6,
        "vision_use_head": pool == "map",
        "global_pool": pool,
    }


def mlp_width(width: int, ratio: object) -> int:
    """Rounded down, as in both libraries: so400m's 3.7362 makes 4304 of 1152."""
    if not isinstance(ratio, int | float) or not 0 < ratio < 100:
        raise contradiction(f"mlp_ratio should be a positive number, not {ratio!r}")
    return int(width * ratio)
