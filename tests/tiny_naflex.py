"""A tiny SigLIP 2 NaFlex, as the hub has it: flattened patches, a position table of 4 x 4."""

from pathlib import Path
from typing import Any

from tiny import TEXT, VISION, write_model
from tiny_tokenizers import SIGLIP2_TOKENS, write_json, write_lower_case_tokenizer

NAFLEX_VISION = {
    **{name: value for name, value in VISION.items() if name != "image_size"},
    "model_type": "siglip2_vision_model",
    "num_patches": 16,
}
MAX_PATCHES = 24


def build_naflex(folder: Path, *, dtype: str = "float32", alone: bool = False) -> Path:
    """A `Siglip2Model`, or its vision tower alone."""
    text = {**TEXT, "model_type": "siglip2_text_model", "vocab_size": SIGLIP2_TOKENS}
    config: dict[str, Any] = {
        "architectures": ["Siglip2Model"],
        "model_type": "siglip2",
        "text_config": {**text, "pad_token_id": 0},
        "vision_config": NAFLEX_VISION,
        "torch_dtype": dtype,
    }
    if alone:
        config = {**NAFLEX_VISION, "architectures": ["Siglip2VisionModel"], "torch_dtype": dtype}
    renames = {"": "vision_model."} if alone else {}
    write_model(folder, config, dtype=dtype, shards=1, renames=renames)
    settings = {
        "image_processor_type": "Siglip2ImageProcessor",
        "processor_class": "Siglip2Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "patch_size": VISION["patch_size"],
        "max_num_patches": MAX_PATCHES,
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    write_json(folder / "preprocessor_config.json", settings)
    if not alone:
        write_lower_case_tokenizer(folder)
    return folder
