"""Write vlmrun/data/catalogue.json: configurations and stored dtypes of the aliases, by hub id.

`vlmrun mem-plan` answers from it where nothing of a model is on the machine. A configuration
holds what the repository's config.json says of shapes, class defaults spelled out. Where the
numbers are from:

- towers and decoders: the scripts that converted the checkpoints (convert_*_to_hf.py in
  transformers' repository) and the language models these name;
- vocabularies of llava-hf's models and of PaliGemma: those scripts add the image token and
  one or two more, then round up to 64: 32000 + 2 -> 32064, Yi's 64000 + 3 -> 64064, Llama 3's
  128256 + 2 -> 128320, Qwen2's 151936 + 2 -> 152000 and 152064 + 2 -> 152128, Gemma's
  257152 + 2 -> 257216. JoyCaption uses a token that Llama 3 keeps in reserve and adds none;
- SigLIP 2 giant-opt: a text tower of so400m, projected to the width of its vision tower;
- stored dtypes: the conversion scripts', else the repositories' model cards.

tests/test_make_catalogue.py holds all of them to the parameter counts that are published.
`--check` compares instead of writing.
"""

import json
import sys
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).parents[1] / "vlmrun" / "data" / "catalogue.json"
Config = dict[str, Any]

ENCODERS: dict[str, tuple[int, int, int, int]] = {  # width, width of the MLP, layers, heads
    "base": (768, 3072, 12, 12),
    "large": (1024, 4096, 24, 16),
    "so400m": (1152, 4304, 27, 16),
    "giant": (1536, 6144, 40, 16),
}
DECODERS: dict[str, tuple[int, int, int, int, int]] = {  # the same, and key-value heads
    "qwen2-0.5b": (896, 4864, 24, 14, 2),
    "qwen2-7b": (3584, 18944, 28, 28, 4),
    "qwen2-72b": (8192, 29568, 80, 64, 8),
    "vicuna-7b": (4096, 11008, 32, 32, 32),
    "vicuna-13b": (5120, 13824, 40, 40, 40),
    "mistral-7b": (4096, 14336, 32, 32, 8),
    "llama-8b": (4096, 14336, 32, 32, 8),
    "yi-34b": (7168, 20480, 60, 56, 8),
    "gemma-2b": (2048, 16384, 18, 8, 1),
    "gemma2-2b": (2304, 9216, 26, 8, 4),
    "gemma2-9b": (3584, 14336, 42, 16, 8),
    "gemma2-27b": (4608, 36864, 46, 32, 16),
}
SENTENCEPIECE, MULTILINGUAL, GEMMA = 32000, 250000, 256000  # vocabularies of the text towers
ONEVISION_GRID = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
NEXT_GRID = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def encoder(size: str, kind: str, **more: Any) -> Config:
    width, mlp_width, layers, heads = ENCODERS[size]
    return {
        "hidden_size": width,
        "intermediate_size": mlp_width,
        "model_type": kind,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        **more,
    }


def decoder(size: str, kind: str, vocabulary: int, **more: Any) -> Config:
    width, mlp_width, layers, heads, kv_heads = DECODERS[size]
    return {
        "hidden_size": width,
        "intermediate_size": mlp_width,
        "model_type": kind,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **more,
    }


def siglip(
    size: str, patch: int, image: int, vocabulary: int, *, text: str = "", **projected: int
) -> Config:
    """Both towers at one resolution; `text` is the size of the text tower, if another."""
    tower = encoder(size, "siglip_vision_model", image_size=image, patch_size=patch)
    return {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "text_config": text_tower(text or size, "siglip_text_model", vocabulary, **projected),
        "vision_config": tower,
    }


def text_tower(size: str, kind: str, vocabulary: int, **projected: int) -> Config:
    return encoder(size, kind, max_position_embeddings=64, vocab_size=vocabulary, **projected)


def naflex(size: str) -> Config:
    return {
        "architectures": ["Siglip2Model"],
        "model_type": "siglip2",
        "text_config": text_tower(size, "siglip2_text_model", GEMMA),
        "vision_config": encoder(size, "siglip2_vision_model", num_patches=256, patch_size=16),
    }


def so400m(image: int, **more: Any) -> Config:
    return encoder("so400m", "siglip_vision_model", image_size=image, patch_size=14, **more)


def clip() -> Config:
    """ViT-L/14 at 336 pixels."""
    return encoder("large", "clip_vision_model", image_size=336, patch_size=14, projection_dim=768)


def onevision(text: Config) -> Config:
    """The last block of the tower is left out, as is its head. The 0.5B model ties its head in
    the text part only, as its file does."""
    return {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "image_grid_pinpoints": ONEVISION_GRID,
        "image_token_index": 151646,
        "model_type": "llava_onevision",
        "projector_hidden_act": "gelu",
        "text_config": text,
        "tie_word_embeddings": False,
        "video_token_index": 151647,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": {**so400m(384, vision_use_head=False), "num_hidden_layers": 26},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def qwen2(size: str, vocabulary: int, *, tied: bool = False) -> Config:
    return decoder(
        size,
        "qwen2",
        vocabulary,
        max_position_embeddings=32768,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        tie_word_embeddings=tied,
        use_sliding_window=False,
    )


def llava(text: Config, vision: Config, *, strategy: str = "default", image: int = 32000) -> Config:
    """LLaVA 1.5: the decoder sees the last block but one of the tower."""
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": image,
        "model_type": "llava",
        "projector_hidden_act": "gelu",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": vision,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": strategy,
    }


def llava_next(text: Config, *, image: int = 32000) -> Config:
    return {
        **llava(text, clip(), image=image),
        "architectures": ["LlavaNextForConditionalGeneration"],
        "image_grid_pinpoints": NEXT_GRID,
        "model_type": "llava_next",
    }


def vicuna(size: str) -> Config:
    return decoder(size, "llama", 32064, max_position_embeddings=4096, rms_norm_eps=1e-05)


def mistral(**more: Any) -> Config:
    text = decoder("mistral-7b", "mistral", 32064, max_position_embeddings=32768)
    return {**text, "rms_norm_eps": 1e-05, **more}


def llama3(vocabulary: int, positions: int, **more: Any) -> Config:
    text = decoder("llama-8b", "llama", vocabulary, max_position_embeddings=positions)
    return {**text, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, **more}


def yi() -> Config:
    text = decoder("yi-34b", "llama", 64064, max_position_embeddings=4096)
    return {**text, "rms_norm_eps": 1e-05, "rope_theta": 5000000.0}


LLAMA31_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def paligemma(text: Config, image: int) -> Config:
    return {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "image_token_index": 257152,
        "model_type": "paligemma",
        "projection_dim": text["hidden_size"],
        "text_config": text,
        "vision_config": so400m(image, vision_use_head=False),
    }


def gemma(size: str, kind: str, *, head: int = 256, **more: Any) -> Config:
    return decoder(size, kind, 257216, head_dim=head, max_position_embeddings=8192, **more)


def gemma2(size: str, *, head: int = 256, scale: int = 256) -> Config:
    return gemma(
        size,
        "gemma2",
        head=head,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=scale,
        sliding_window=4096,
    )


def embedders() -> dict[str, Config]:
    return {
        "google/siglip-so400m-patch14-384": siglip("so400m", 14, 384, SENTENCEPIECE),
        "google/siglip-base-patch16-224": siglip("base", 16, 224, SENTENCEPIECE),
        "google/siglip-large-patch16-384": siglip("large", 16, 384, SENTENCEPIECE),
        "google/siglip-base-patch16-256-multilingual": siglip("base", 16, 256, MULTILINGUAL),
        "google/siglip2-so400m-patch14-384": siglip("so400m", 14, 384, GEMMA),
        "google/siglip2-base-patch16-224": siglip("base", 16, 224, GEMMA),
        "google/siglip2-large-patch16-512": siglip("large", 16, 512, GEMMA),
        "google/siglip2-giant-opt-patch16-384": siglip(
            "giant", 16, 384, GEMMA, text="so400m", projection_size=1536
        ),
        "google/siglip2-so400m-patch16-naflex": naflex("so400m"),
        "google/siglip2-base-patch16-naflex": naflex("base"),
    }


def llavas() -> dict[str, Config]:
    """All of them are stored as float16, but JoyCaption."""
    hf = "llava-hf"
    return {
        f"{hf}/llava-onevision-qwen2-0.5b-ov-hf": onevision(qwen2("qwen2-0.5b", 152000, tied=True)),
        f"{hf}/llava-onevision-qwen2-7b-ov-hf": onevision(qwen2("qwen2-7b", 152128)),
        f"{hf}/llava-onevision-qwen2-72b-ov-hf": onevision(qwen2("qwen2-72b", 152128)),
        f"{hf}/llava-1.5-7b-hf": llava(vicuna("vicuna-7b"), clip()),
        f"{hf}/llava-1.5-13b-hf": llava(vicuna("vicuna-13b"), clip()),
        f"{hf}/bakLlava-v1-hf": llava(mistral(sliding_window=4096), clip()),
        f"{hf}/llava-v1.6-mistral-7b-hf": llava_next(
            mistral(rope_theta=1000000.0, sliding_window=None)
        ),
        f"{hf}/llava-v1.6-vicuna-7b-hf": llava_next(vicuna("vicuna-7b")),
        f"{hf}/llava-v1.6-vicuna-13b-hf": llava_next(vicuna("vicuna-13b")),
        f"{hf}/llava-v1.6-34b-hf": llava_next(yi(), image=64000),
        f"{hf}/llama3-llava-next-8b-hf": llava_next(llama3(128320, 8192), image=128256),
    }


def joycaption() -> Config:
    """SigLIP's tower has no class token, so the decoder sees all vectors."""
    text = llama3(128256, 131072, rope_scaling=LLAMA31_ROPE)
    return llava(text, so400m(384), strategy="full", image=128077)


def paligemmas() -> dict[str, tuple[Config, str]]:
    """PaliGemma 1 is stored as float32, 2 as bfloat16."""
    first = gemma("gemma-2b", "gemma")
    second = {
        "3b": gemma2("gemma2-2b"),
        "10b": gemma2("gemma2-9b"),
        "28b": gemma2("gemma2-27b", head=128, scale=144),
    }
    found = {
        f"google/paligemma-3b-{name}": (paligemma(first, int(name[-3:])), "float32")
        for name in ("mix-224", "mix-448", "pt-896")
    }
    for size, text in second.items():
        found[f"google/paligemma2-{size}-mix-224"] = paligemma(text, 224), "bfloat16"
    return found


def catalogue() -> dict[str, dict[str, Any]]:
    stored = {
        **{name: (config, "float32") for name, config in embedders().items()},
        **{name: (config, "float16") for name, config in llavas().items()},
        "fancyfeast/llama-joycaption-beta-one-hf-llava": (joycaption(), "bfloat16"),
        **paligemmas(),
    }
    return {name: {"config": config, "dtype": dtype} for name, (config, dtype) in stored.items()}


def written(found: dict[str, dict[str, Any]]) -> str:
    """One line per model."""
    lines = [f"{json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in found.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    text = written(catalogue())
    if sys.argv[1:] == ["--check"]:
        return int(not CATALOGUE.exists() or CATALOGUE.read_text(encoding="utf-8") != text)
    CATALOGUE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
