"""open_clip's SigLIP models: configuration and keys as transformers spells them.

An open_clip folder holds `open_clip_config.json` ({"model_cfg": {"embed_dim", "init_logit_bias",
"custom_text", "vision_cfg", "text_cfg"}, "preprocess_cfg"}), `open_clip_model.safetensors` and the
tokenizer's files; the vision tower is timm's, under `visual.trunk.`.
Source: open_clip 3.3.0, model.py, timm_model.py, transformer.py, transform.py, tokenizer.py.
"""

import html
import string
from collections.abc import Mapping
from typing import Any

from vlmrun.errors import UnsupportedModel
from vlmrun.models.family import Config, contradiction, number
from vlmrun.models.timm import (
    TIMM_FUSED,
    TIMM_RENAMES,
    mlp_width,
    named_arguments,
    vision_settings,
)
from vlmrun.models.transforms import color_settings, missing

CLEANINGS = ("canonicalize", "lower", "whitespace")
# What SigLIP's text tower is, by the names of open_clip's settings: their values, the default
# first where the setting may be left out.
TEXT_NEEDS: Mapping[str, tuple[object, ...]] = {
    "hf_model_name": (None,),
    "no_causal_mask": (True,),
    "pool_type": ("last",),
    "embed_cls": (None, False),
    "ls_init_value": (None,),
    "block_type": (None, "default"),
    "tokenizer_mode": (None, ""),
    "qk_norm": (None, False),
    "scaled_cosine_attn": (None, False),
    "scale_heads": (None, False),
    "scale_attn_inner": (None, False),
    "scale_attn": (None, False),
    "scale_fc": (None, False),
}
VISION_NEEDS: Mapping[str, tuple[object, ...]] = {"timm_pool": ("map",), "timm_proj": ("none",)}
MODEL_NEEDS: Mapping[str, tuple[object, ...]] = {
    "custom_text": (True,),
    "quick_gelu": (None, False),
}

OPEN_CLIP_RENAMES = (
    (r"^module\.", ""),
    *((rf"^visual\.trunk\.{old[1:]}", f"vision_model.{new}") for old, new in TIMM_RENAMES),
    (r"^text\.token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^text\.positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^text\.transformer\.resblocks\.(\d+)\.", r"text_model.encoder.layers.\1."),
    (r"^(text_model\.encoder\.layers\.\d+)\.ln_([12])\.", r"\1.layer_norm\2."),
    (r"^(text_model\.encoder\.layers\.\d+)\.attn\.", r"\1.self_attn."),
    (r"^(text_model\.encoder\.layers\.\d+)\.mlp\.c_fc\.", r"\1.mlp.fc1."),
    (r"^(text_model\.encoder\.layers\.\d+)\.mlp\.c_proj\.", r"\1.mlp.fc2."),
    (r"^text\.ln_final\.", "text_model.final_layer_norm."),
    (r"^text\.text_projection\.", "text_model.head."),
)
OPEN_CLIP_FUSED = (
    *TIMM_FUSED,
    (
        r"(.*encoder\.layers\.\d+\.self_attn)\.in_proj_(weight|bias)",
        (r"\1.q_proj.\2", r"\1.k_proj.\2", r"\1.v_proj.\2"),
    ),
)


def translate_open_clip(config: Config) -> Config:
    """An open_clip_config.json in transformers' spelling, `model_type: open_clip_siglip`.

    Raises:
        CheckpointError: a setting is missing, or two contradict each other.
        UnsupportedModel: the model is not one of open_clip's SigLIPs.
    """
    model = part(config, "model_cfg")
    vision, text = part(model, "vision_cfg"), part(model, "text_cfg")
    hold("model_cfg", model, MODEL_NEEDS)
    if model.get("init_logit_bias") is None:
        raise UnsupportedModel(
            "model_cfg has no init_logit_bias", "it is a CLIP model, scored by softmax; not run"
        )
    tower = vision_part(vision)
    return {
        "model_type": "open_clip_siglip",
        "vision_config": tower,
        "text_config": text_part(text, number(model, "embed_dim")),
        "image_processor": picture_part(part(config, "preprocess_cfg"), tower["image_size"]),
        "tokenizer": tokenizer_part(text),
    }


def part(config: Config, name: str) -> Config:
    found = config.get(name)
    if not isinstance(found, Mapping):
        raise missing(name)
    return found


def options(config: Config, name: str) -> Config:
    """A part that may be left out."""
    return {} if config.get(name) is None else part(config, name)


def hold(where: str, given: Config, needs: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse a setting that makes another model than SigLIP."""
    for name, values in needs.items():
        if given.get(name) not in values:
            raise UnsupportedModel(
                f"{where} has {name} {given.get(name)!r}",
                f"a SigLIP has {values[-1]!r}; other models of open_clip's are not run",
            )


def vision_part(given: Config) -> dict[str, Any]:
    """The tower that timm builds by name; open_clip passes its size on by that name only."""
    named = named_arguments(given.get("timm_model_name"))
    hold("vision_cfg", given, VISION_NEEDS)
    if given.get("image_size", named["img_size"]) != named["img_size"]:
        raise UnsupportedModel(
            f"vision_cfg has image_size {given['image_size']} "
            f"and a tower for {named['img_size']} ({given['timm_model_name']})",
            "open_clip_config.json is of another model, or of a resized one, which is not run",
        )
    return {"model_type": "siglip_vision_model", **vision_settings(named)}


def text_part(given: Config, width: int) -> dict[str, Any]:
    """The text tower as settings of a `SiglipTextConfig`; it projects to `width`.

    `use_head` is false where the tower projects nothing, as so400m i18n's.
    """
    hold("text_cfg", given, TEXT_NEEDS)
    settings = {
        "model_type": "siglip_text_model",
        "vocab_size": number(given, "vocab_size"),
        "hidden_size": number(given, "width"),
        "intermediate_size": mlp_width(number(given, "width"), given.get("mlp_ratio", 4.0)),
        "num_hidden_layers": number(given, "layers"),
        "num_attention_heads": number(given, "heads"),
        "max_position_embeddings": number(given, "context_length"),
        "hidden_act": activation(given),
        "layer_norm_eps": options(given, "norm_kwargs").get("eps", 1e-5),
        "projection_size": width,
    }
    if given.get("proj_type") == "none":
        if settings["hidden_size"] != width:
            raise contradiction(f"embed_dim is {width}, and nothing projects the text to it")
        return {**settings, "use_head": False}
    hold("text_cfg", given, {"proj_type": (None, "linear"), "proj_bias": (True,)})
    return settings


def activation(given: Config) -> str:
    """The text tower's, of its own: the error function for SigLIP, tanh for SigLIP 2."""
    approximate = options(given, "act_kwargs").get("approximate", "none")
    if approximate not in ("none", "tanh"):
        raise contradiction(f"act_kwargs.approximate is {approximate!r}")
    return "gelu_pytorch_tanh" if approximate == "tanh" else "gelu"


def picture_part(given: Config, side: int) -> dict[str, Any]:
    """open_clip's transform as settings of a `SiglipImageProcessor`: a squash to the square."""
    mode = given.get("resize_mode")
    if mode is None:
        raise missing("resize_mode")
    if mode != "squash":
        raise UnsupportedModel(
            f"preprocess_cfg has resize_mode {mode!r}", "SigLIP's is 'squash', and no other is run"
        )
    return {**color_settings(given), "size": {"height": side, "width": side}}


def tokenizer_part(given: Config) -> dict[str, Any]:
    """How a text is cleaned before it is tokenized, and the length it is padded or cut to."""
    settings = options(given, "tokenizer_kwargs")
    if not given.get("hf_tokenizer_name"):
        raise UnsupportedModel(
            "text_cfg names no hf_tokenizer_name", "open_clip then takes CLIP's, which is not run"
        )
    clean = settings.get("clean", "whitespace")
    if clean not in CLEANINGS or settings.keys() - {"clean"}:
        raise UnsupportedModel(
            f"tokenizer_kwargs is {dict(settings)!r}", f"clean is read: {', '.join(CLEANINGS)}"
        )
    return {"clean": clean, "context_length": number(given, "context_length")}


def clean_text(text: str, kind: str) -> str:
    """A text as open_clip cleans it before it is tokenized.

    kind: "whitespace" joins words by one space; "lower" also lowers; "canonicalize", SigLIP's,
        also takes _ for a space and drops ASCII punctuation.
    """
    import ftfy  # late: only texts of open_clip's models need it

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    if kind == "canonicalize":
        text = text.replace("_", " ").translate(str.maketrans("", "", string.punctuation))
    text = text if kind == "whitespace" else text.lower()
    return " ".join(text.split())
