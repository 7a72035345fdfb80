"""Tiny LLaVAs and LLaVA-NeXTs in hub layout, with random weights, and their stock processors."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import transformers
from light import HUB_ONEVISION
from tiny import DECODER, IMAGE_SIZE, PATCH_SIZE, VISION, write_image_processor, write_model
from tiny_tokenizers import SPECIAL, write_chat_tokenizer, write_json
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

Tower = Literal["clip", "siglip"]
SQUARE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
START = "<|im_start|>"
ENDS = {
    "bos_token_id": SPECIAL[START],
    "eos_token_id": SPECIAL["<|im_end|>"],
    "pad_token_id": SPECIAL["<|endoftext|>"],
}
# (height, width); the smallest crop is a square of 28
PINPOINTS = ((28, 56), (56, 28), (56, 56), (84, 28), (28, 84))
TEMPLATE = (  # LLaVA 1.5's on the hub
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
LLAMA3_ROPE = {  # Llama 3.1's, with bounds low enough that tiny heads have frequencies of all kinds
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
PROCESSORS = {
    "CLIPImageProcessor": CLIPImageProcessorPil,
    "LlavaImageProcessor": LlavaImageProcessorPil,
    "LlavaNextImageProcessor": LlavaNextImageProcessorPil,
    "SiglipImageProcessor": SiglipImageProcessorPil,
}


def build_llava(
    folder: Path,
    *,
    tower: Tower = "clip",
    decoder: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    shards: int = 1,
    spelling: Literal["hub", "module"] = "hub",
    **more: Any,
) -> Path:
    """A `LlavaForConditionalGeneration`; without more it is LLaVA 1.5's layout.

    tower: CLIP, seen without its class token, or SigLIP with the head that JoyCaption's file
    holds and nothing uses, seen whole. decoder: other values of the decoder's configuration.
    more: other values of the configuration.
    """
    config = _config("llava", tower, decoder, dtype) | more
    config["image_seq_length"] = (IMAGE_SIZE // PATCH_SIZE) ** 2
    renames = HUB_ONEVISION if spelling == "hub" else {}
    write_model(folder, config, dtype=dtype, shards=shards, renames=renames)
    if tower == "clip":
        size = {"shortest_edge": IMAGE_SIZE}
        kind: dict[str, Any] = {"do_center_crop": True, "crop_size": SQUARE, "size": size}
        write_image_processor(folder, "CLIP", IMAGE_SIZE, **kind)
    else:
        write_image_processor(folder, "Siglip", IMAGE_SIZE)
    _write_companions(folder, "LlavaProcessor", config)
    return folder


def build_joycaption(folder: Path, **options: Any) -> Path:
    """A LLaVA over SigLIP and a Llama with Llama 3.1's scaled frequencies."""
    return build_llava(folder, tower="siglip", decoder=LLAMA3_ROPE, **options)


def build_llava_next(
    folder: Path,
    *,
    tower: Tower = "clip",
    decoder: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    shards: int = 1,
    spelling: Literal["hub", "module"] = "hub",
    pinpoints: Sequence[tuple[int, int]] = PINPOINTS,
    **more: Any,
) -> Path:
    """A `LlavaNextForConditionalGeneration`; without more it is LLaVA 1.6's layout."""
    grid = [list(resolution) for resolution in pinpoints]
    config = _config("llava_next", tower, decoder, dtype)
    config |= {"image_grid_pinpoints": grid, **more}
    renames = HUB_ONEVISION if spelling == "hub" else {}
    write_model(folder, config, dtype=dtype, shards=shards, renames=renames)
    kind = {
        "do_center_crop": True,
        "crop_size": SQUARE,
        "size": {"shortest_edge": IMAGE_SIZE},
        "image_grid_pinpoints": grid,
        "do_pad": True,
    }
    write_image_processor(folder, "LlavaNext", IMAGE_SIZE, **kind)
    _write_companions(folder, "LlavaNextProcessor", config)
    return folder


def stock_processor(folder: Path) -> Any:
    """The stock processor of a folder, with the image processor that needs no torchvision."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    kind = PROCESSORS[settings["image_processor_type"]]
    config = json.loads((folder / "processor_config.json").read_text())
    processor_class = getattr(transformers, config.pop("processor_class"))
    return processor_class(
        kind.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
        chat_template=(folder / "chat_template.jinja").read_text(),
        **config,
    )


def _config(
    kind: str, tower: Tower, decoder: Mapping[str, Any] | None, dtype: str
) -> dict[str, Any]:
    """JoyCaption's and LLaVA 1.5's configurations, class defaults left out as on the hub."""
    name = {"llava": "Llava", "llava_next": "LlavaNext"}[kind]
    config: dict[str, Any] = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "image_token_index": SPECIAL["<image>"],
        "text_config": {**DECODER, **ENDS, "model_type": "llama", **(decoder or {})},
        "torch_dtype": dtype,
        "vision_config": {**VISION, "model_type": f"{tower}_vision_model"},
    }
    if tower == "siglip":
        config["vision_feature_select_strategy"] = "full"
    return config


def _write_companions(folder: Path, processor: str, config: Mapping[str, Any]) -> None:
    write_json(folder / "generation_config.json", ENDS)
    clip = config["vision_config"]["model_type"] == "clip_vision_model"
    settings = {
        "processor_class": processor,
        "image_token": "<image>",
        "patch_size": PATCH_SIZE,
        "num_additional_image_tokens": int(clip),
        "vision_feature_select_strategy": config.get("vision_feature_select_strategy", "default"),
    }
    write_json(folder / "processor_config.json", settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_chat_tokenizer(folder, start=START)
