"""The configuration of a SigLIP vision tower that comes as a single file, without one.

ComfyUI's `sigclip_vision_patch14_384.safetensors` is such a file: transformers' names, with or
without `vision_model.` in front. Shapes say all but the number of heads, the activation, the size
of the picture in pixels and how it is prepared. Those are SigLIP's published ones, and the note
says so.
"""

import math
import re
from collections.abc import Mapping

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.checkpoints.checkpoint import TensorInfo
from vlmrun.models.checkpoints.folder import AGAIN
from vlmrun.models.family import Config

HEADS = {768: 12, 1024: 16, 1152: 16, 1536: 16}  # by width: base, large, so400m, giant-opt
SIDES = {14: (224, 384), 16: (224, 256, 384, 512), 32: (256,)}  # pixels, by patch: as published
BICUBIC = 3  # as Pillow numbers them
PREFIX = "vision_model."
PATCHES = "embeddings.patch_embedding.weight"
POSITIONS = "embeddings.position_embedding.weight"
BESIDE = "put its config.json beside it, or give the folder of the model it is from"
COMPLETE = "give the whole model's folder, with its config.json"
TOWER = "give a SigLIP vision tower, such as sigclip_vision_patch14_384.safetensors"
LOOKS = (  # pattern of a tensor's name, what such a file is, what to do; the first match wins
    (r"^redux_(up|down)\.", "a FLUX Redux projector, which a SigLIP vision tower feeds", TOWER),
    (r"(^|[._])lora[._]", "a LoRA, a change to another model", TOWER),
    (r"(^|\.)(double_blocks|single_blocks|joint_blocks)\.", "a diffusion model", TOWER),
    (r"(^|\.)(diffusion_model|down_blocks|transformer_blocks)\.", "a diffusion model", TOWER),
    (r"^(encoder|decoder)\.(down|up|mid|conv_in)\b", "an image autoencoder (VAE)", TOWER),
    (
        r"(^|\.)(language_model|multi_modal_projector|mm_projector)\.",
        "a LLaVA or another captioner",
        COMPLETE,
    ),
    (r"^(visual|text)\.(trunk|transformer)\.", "a model in open_clip's layout", BESIDE),
    (r"(^|\.)blocks\.0\.attn\.qkv\.", "a vision tower in timm's layout", BESIDE),
    (r"(^|\.)embeddings\.class_embedding$", "a CLIP, not a SigLIP", BESIDE),
    (r"^logit_(scale|bias)$", "a whole SigLIP or CLIP, text tower included", COMPLETE),
    (r"^text_model\.|(^|\.)token_embedding\.|(^|\.)embed_tokens\.", "a text encoder", TOWER),
    (r"^(encoder\.block\.0|shared|model\.layers\.0)\.", "a text encoder", TOWER),
)


def infer_config(tensors: Mapping[str, TensorInfo]) -> tuple[Config, str]:
    """The configuration of a vision tower known by its tensors alone, and what was assumed.

    The picture's size is the published one whose patches are as many as the positions (729 at
    patch 14 are 384 pixels, of which 378 are seen), else the square of exactly these patches.

    Raises:
        UnsupportedModel: the file is no SigLIP vision tower, or one of an unknown width.
        CheckpointError: it is one, but not whole.
    """
    for pattern, what, hint in LOOKS:
        if any(re.search(pattern, name) for name in tensors):
            raise UnsupportedModel(f"without a config.json this file looks like {what}", hint)
    shapes = {name.removeprefix(PREFIX): info.shape for name, info in tensors.items()}
    patches = shapes.get(PATCHES, ())
    if len(patches) != 4:
        what = "is a SigLIP 2 NaFlex tower" if patches else "is none of a SigLIP vision tower"
        raise UnsupportedModel(f"this file without a config.json {what}", BESIDE)
    width, channels, patch, _ = patches
    if width not in HEADS:
        known = ", ".join(map(str, HEADS))
        raise UnsupportedModel(
            f"the file does not say how many heads its tower of width {width} has",
            f"known of the widths {known}; else put its config.json beside it",
        )
    side, reason = picture_side(rows_of(shapes, POSITIONS), patch)
    config = {
        "model_type": "siglip_vision_model",
        "hidden_size": width,
        "intermediate_size": rows_of(shapes, "encoder.layers.0.mlp.fc1.weight"),
        "num_hidden_layers": count_layers(shapes),
        "num_attention_heads": HEADS[width],
        "num_channels": channels,
        "image_size": side,
        "patch_size": patch,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vision_use_head": any(name.startswith("head.") for name in shapes),
        "image_processor": picture_settings(side),
    }
    return config, (
        f"no config.json: assumed {HEADS[width]} heads and tanh GELU as SigLIP's, {reason}, "
        "pictures squashed to it bicubically, mean and deviation 0.5"
    )


def rows_of(shapes: Mapping[str, tuple[int, ...]], name: str) -> int:
    if not shapes.get(name):
        raise incomplete(f"no {name}")
    return shapes[name][0]


def count_layers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    found = (re.match(r"encoder\.layers\.(\d{1,4})\.", name) for name in shapes)
    numbers = {int(match[1]) for match in found if match}
    if numbers != set(range(len(numbers))):
        absent = min(set(range(max(numbers))) - numbers)
        raise incomplete(f"no layer {absent}, but a layer {max(numbers)}")
    return len(numbers)


def picture_side(positions: int, patch: int) -> tuple[int, str]:
    """Pixels of the square a tower was trained on, and how that is known."""
    for side in SIDES.get(patch, ()):
        if (side // patch) ** 2 == positions:
            return side, f"{side} pixels as published for {positions} patches of {patch}"
    edge = math.isqrt(positions)
    if not edge or edge**2 != positions or not patch:
        raise incomplete(f"{positions} positions, which make no square")
    return edge * patch, f"{edge * patch} pixels, {edge} x {edge} patches of {patch}"


def picture_settings(side: int) -> Config:
    """What the published models' preprocessor_config.json says."""
    return {
        "image_processor_type": "SiglipImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": side, "width": side},
        "resample": BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def incomplete(what: str) -> CheckpointError:
    return CheckpointError(f"the file looks like a SigLIP vision tower, but has {what}", AGAIN)
