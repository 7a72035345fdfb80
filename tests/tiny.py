"""Tiny checkpoints of the real architectures, in hub layout, with random weights.

Every tensor is random and non-zero, seeded by its name, so that a swapped, lost or misread
tensor changes the output. `config.json` leaves out what equals the class default, as hub files do.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from light import HUB_ONEVISION, renamed
from safetensors.torch import save_file
from seeded import random_tensor
from tiny_tokenizers import (
    CHAT_POSITIONS,
    SIGLIP2_TOKENS,
    SIGLIP_POSITIONS,
    SIGLIP_TOKENS,
    SPECIAL,
    write_chat_tokenizer,
    write_json,
    write_lower_case_tokenizer,
    write_sentencepiece_tokenizer,
)
from torch import Tensor

Spelling = Literal["hub", "module"]

IMAGE_SIZE, PATCH_SIZE = 28, 7
PINPOINTS = ((28, 28), (28, 56), (56, 28), (56, 56))  # (height, width)
VISION = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
    "model_type": "siglip_vision_model",
}
TEXT = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_size": 48,
    "max_position_embeddings": SIGLIP_POSITIONS,
    "model_type": "siglip_text_model",
    "bos_token_id": 2,
    "eos_token_id": 1,
}
DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 408,  # eight more than the tokenizer has, as the hub's are padded too
    "max_position_embeddings": CHAT_POSITIONS,
    "rope_theta": 1000000.0,
    "model_type": "qwen2",
}
CHAT_TEMPLATE = Path(__file__).parents[1] / "vlmrun/data/demo-llava/chat_template.jinja"


def build_siglip(
    folder: Path, *, dtype: str = "float32", shards: int = 1, version: Literal[1, 2] = 1
) -> Path:
    """A `SiglipModel`; version 2 has a fast lower-casing tokenizer in place of sentencepiece."""
    vocabulary = {"vocab_size": SIGLIP_TOKENS, "pad_token_id": 1}
    if version == 2:
        vocabulary = {"vocab_size": SIGLIP2_TOKENS, "pad_token_id": 0}
    config = {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "text_config": {**TEXT, **vocabulary},
        "vision_config": VISION,
        "torch_dtype": dtype,
    }
    write_model(folder, config, dtype=dtype, shards=shards, renames={})
    write_image_processor(folder, "Siglip", IMAGE_SIZE)
    if version == 1:
        write_sentencepiece_tokenizer(folder)
    else:
        write_lower_case_tokenizer(folder)
    return folder


def build_siglip_vision(
    folder: Path, *, dtype: str = "float32", shards: int = 1, spelling: Spelling = "hub"
) -> Path:
    """A `SiglipVisionModel`: the vision tower alone, with its pooling head and no tokenizer."""
    config = {**VISION, "architectures": ["SiglipVisionModel"], "torch_dtype": dtype}
    renames = {"": "vision_model."} if spelling == "hub" else {}
    write_model(folder, config, dtype=dtype, shards=shards, renames=renames)
    write_image_processor(folder, "Siglip", IMAGE_SIZE)
    return folder


def build_onevision(
    folder: Path,
    *,
    tied: bool = True,
    dtype: str = "float32",
    shards: int = 1,
    spelling: Spelling = "hub",
    feature_layer: int = -1,
    image_size: int = IMAGE_SIZE,
    pinpoints: Sequence[tuple[int, int]] = PINPOINTS,
) -> Path:
    """A `LlavaOnevisionForConditionalGeneration` over a SigLIP tower and a Qwen2 decoder.

    Tied, the configuration contradicts itself as the 0.5B model's does on the hub: false at the
    top, true in the text part, and no head in the file.
    """
    grid = [list(resolution) for resolution in pinpoints]
    ends = {"bos_token_id": SPECIAL["<|endoftext|>"], "eos_token_id": SPECIAL["<|im_end|>"]}
    config = {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "model_type": "llava_onevision",
        "image_token_index": SPECIAL["<image>"],
        "video_token_index": SPECIAL["<video>"],
        "image_grid_pinpoints": grid,
        "projector_hidden_act": "gelu",
        "text_config": {**DECODER, **ends, "tie_word_embeddings": tied},
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": {**VISION, "image_size": image_size, "vision_use_head": False},
        "vision_feature_layer": feature_layer,
        "vision_feature_select_strategy": "full",
    }
    renames = HUB_ONEVISION if spelling == "hub" else {}
    write_model(folder, config, dtype=dtype, shards=shards, renames=renames)
    write_json(
        folder / "generation_config.json", {**ends, "pad_token_id": SPECIAL["<|endoftext|>"]}
    )
    write_image_processor(folder, "LlavaOnevision", image_size, image_grid_pinpoints=grid)
    processor = {
        "processor_class": "LlavaOnevisionProcessor",
        "image_token": "<image>",
        "video_token": "<video>",
        "num_image_tokens": (image_size // PATCH_SIZE) ** 2,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
    }
    write_json(folder / "processor_config.json", processor)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())
    write_chat_tokenizer(folder)
    return folder


def build_vipllava(folder: Path, *, dtype: str = "float32") -> Path:
    """A `VipLlavaForConditionalGeneration` over a CLIP tower and a Llama decoder: a model that no
    family of vlmrun's runs. Its template and its tokenizer both write a start token."""
    start, end = SPECIAL["<|im_start|>"], SPECIAL["<|im_end|>"]
    ends = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": SPECIAL["<|endoftext|>"]}
    config = {
        "architectures": ["VipLlavaForConditionalGeneration"],
        "model_type": "vipllava",
        "image_token_index": SPECIAL["<image>"],
        "image_seq_length": (IMAGE_SIZE // PATCH_SIZE) ** 2,
        "text_config": {**DECODER, **ends, "model_type": "llama"},
        "torch_dtype": dtype,
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
        "vision_feature_layers": [-2, 1],
    }
    write_model(folder, config, dtype=dtype, shards=1, renames={})
    write_json(folder / "generation_config.json", ends)
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    write_image_processor(folder, "CLIP", IMAGE_SIZE, do_center_crop=True, crop_size=square)
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "patch_size": PATCH_SIZE,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    write_json(folder / "processor_config.json", processor)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())
    write_chat_tokenizer(folder, start="<|im_start|>")
    return folder


def write_weights(folder: Path, tensors: Mapping[str, Tensor], *, shards: int = 1) -> None:
    """Write tensors under the names given, in one file or in shards with their index."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    shard_of = {name: at * shards // len(names) + 1 for at, name in enumerate(names)}
    file_of = {name: f"model-{n:05}-of-{shards:05}.safetensors" for name, n in shard_of.items()}
    for file in set(file_of.values()):
        part = {name: tensors[name] for name in names if file_of[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    write_json(folder / "model.safetensors.index.json", index)


def write_model(
    folder: Path, config: Mapping[str, Any], *, dtype: str, shards: int, renames: Mapping[str, str]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    model_class = getattr(transformers, config["architectures"][0])
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # other people's, on some versions of torch
        model = model_class(model_class.config_class.from_pretrained(folder))
    # Parameters, not the state dict: a tied head is one parameter and stands once in the file.
    tensors = {
        renamed(path, renames): random_tensor(path, parameter.shape).to(getattr(torch, dtype))
        for path, parameter in model.named_parameters()
    }
    write_weights(folder, tensors, shards=shards)


def write_image_processor(folder: Path, family: str, image_size: int, **more: Any) -> None:
    settings = {
        "image_processor_type": f"{family}ImageProcessor",
        "processor_class": f"{family}Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": image_size, "width": image_size},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        **more,
    }
    write_json(folder / "preprocessor_config.json", settings)
