"""Short names of models that many people use, and the repositories on the hub they stand for.

A name without a size is the middle one of its family. What each of them is, is written by
scripts/make_catalogue.py into data/catalogue.json; `vlmrun models` shows it.
"""

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "siglip": "google/siglip-so400m-patch14-384",
    "siglip-base": "google/siglip-base-patch16-224",
    "siglip-large": "google/siglip-large-patch16-384",
    "siglip-multilingual": "google/siglip-base-patch16-256-multilingual",
    "siglip2": "google/siglip2-so400m-patch14-384",
    "siglip2-base": "google/siglip2-base-patch16-224",
    "siglip2-large": "google/siglip2-large-patch16-512",
    "siglip2-giant": "google/siglip2-giant-opt-patch16-384",
    "siglip2-naflex": "google/siglip2-so400m-patch16-naflex",
    "siglip2-naflex-base": "google/siglip2-base-patch16-naflex",
    "llava-onevision-0.5b": "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
    "llava-onevision-7b": "llava-hf/llava-onevision-qwen2-7b-ov-hf",
    "llava-onevision-72b": "llava-hf/llava-onevision-qwen2-72b-ov-hf",
    "llava-1.5-7b": "llava-hf/llava-1.5-7b-hf",
    "llava-1.5-13b": "llava-hf/llava-1.5-13b-hf",
    "bakllava": "llava-hf/bakLlava-v1-hf",
    "joycaption": "fancyfeast/llama-joycaption-beta-one-hf-llava",
    "llava-next-mistral-7b": "llava-hf/llava-v1.6-mistral-7b-hf",
    "llava-next-vicuna-7b": "llava-hf/llava-v1.6-vicuna-7b-hf",
    "llava-next-vicuna-13b": "llava-hf/llava-v1.6-vicuna-13b-hf",
    "llava-next-34b": "llava-hf/llava-v1.6-34b-hf",
    "llava-next-llama3-8b": "llava-hf/llama3-llava-next-8b-hf",
    "paligemma-3b": "google/paligemma-3b-mix-224",
    "paligemma-3b-448": "google/paligemma-3b-mix-448",
    "paligemma-3b-896": "google/paligemma-3b-pt-896",
    "paligemma2-3b": "google/paligemma2-3b-mix-224",
    "paligemma2-10b": "google/paligemma2-10b-mix-224",
    "paligemma2-28b": "google/paligemma2-28b-mix-224",
}
