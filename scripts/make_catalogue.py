"""Write vlmrun/data/catalogue.json: configurations and stored dtypes of the aliases, by hub id.

`vlmrun mem-plan` answers from it where nothing of a model is on the machine. Values are those
of the repositories' config.json files, class defaults spelled out; the 0.5B model ties its head
in the text part only, as its file does. `--check` compares instead of writing.
"""

import json
import sys
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).parents[1] / "vlmrun" / "data" / "catalogue.json"
GRID = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
SO400M: dict[str, Any] = {
    "hidden_size": 1152,
    "image_size": 384,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "patch_size": 14,
}


def siglip() -> dict[str, Any]:
    tower = {**SO400M, "num_hidden_layers": 27}
    text = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "max_position_embeddings": 64,
        "model_type": "siglip_text_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "vocab_size": 32000,
    }
    return {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "text_config": text,
        "vision_config": {**tower, "model_type": "siglip_vision_model"},
    }


def onevision(*, tied: bool, **decoder: int) -> dict[str, Any]:
    vision = {**SO400M, "num_hidden_layers": 26, "vision_use_head": False}
    text = {
        **decoder,
        "max_position_embeddings": 32768,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
    }
    return {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "image_grid_pinpoints": GRID,
        "image_token_index": 151646,
        "model_type": "llava_onevision",
        "projector_hidden_act": "gelu",
        "text_config": text,
        "tie_word_embeddings": False,
        "video_token_index": 151647,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": {**vision, "model_type": "siglip_vision_model"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def catalogue() -> dict[str, dict[str, Any]]:
    half = onevision(
        tied=True,
        hidden_size=896,
        intermediate_size=4864,
        num_attention_heads=14,
        num_hidden_layers=24,
        num_key_value_heads=2,
        vocab_size=152000,
    )
    seven = onevision(
        tied=False,
        hidden_size=3584,
        intermediate_size=18944,
        num_attention_heads=28,
        num_hidden_layers=28,
        num_key_value_heads=4,
        vocab_size=152128,
    )
    return {
        "google/siglip-so400m-patch14-384": {"config": siglip(), "dtype": "float32"},
        "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": {"config": half, "dtype": "float16"},
        "llava-hf/llava-onevision-qwen2-7b-ov-hf": {"config": seven, "dtype": "float16"},
    }


def main() -> int:
    text = json.dumps(catalogue(), indent=1, sort_keys=True) + "\n"
    if sys.argv[1:] == ["--check"]:
        return int(not CATALOGUE.exists() or CATALOGUE.read_text(encoding="utf-8") != text)
    CATALOGUE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
