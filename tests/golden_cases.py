"""What tests/goldens.json is about: a tiny checkpoint of every layout, one picture, one question.

scripts/make_goldens.py asks stock transformers, tests/test_goldens.py asks vlmrun.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from tiny import build_onevision, build_siglip, build_siglip_vision
from tiny_llava import build_joycaption, build_llava, build_llava_next
from tiny_naflex import build_naflex
from tiny_paligemma import build_paligemma
from torch import Tensor

GOLDENS = Path(__file__).parent / "goldens.json"
PICTURE = Path(__file__).parents[1] / "vlmrun/data/pictures/elephant.png"
BOX = (0, 0, 192, 120)  # not a square: a square cannot show how a picture is made one
TEXT = "A red apple"
QUESTION = "what is in the picture?"
TASK = "caption en"  # what PaliGemma is asked
NEW_TOKENS = 16
MISTRAL = {"model_type": "mistral", "rope_theta": 10000.0, "sliding_window": 20}

Build = Callable[[Path], Path]
ENCODERS: Mapping[str, Build] = {
    "siglip": build_siglip,
    "siglip, shards": partial(build_siglip, shards=3),
    "siglip 2": partial(build_siglip, version=2),
    "siglip tower": build_siglip_vision,
    "siglip tower, module paths": partial(build_siglip_vision, spelling="module"),
    "siglip 2 naflex": build_naflex,
    "siglip 2 naflex tower": partial(build_naflex, alone=True),
}
CAPTIONERS: Mapping[str, Build] = {
    "llava 1.5": build_llava,
    "joycaption": build_joycaption,
    "bakllava": partial(build_llava, decoder=MISTRAL),
    "llava next, llama": build_llava_next,
    "llava next, mistral": partial(build_llava_next, decoder=MISTRAL),
    "onevision, tied": build_onevision,
    "onevision, untied": partial(build_onevision, tied=False),
    "onevision, module paths": partial(build_onevision, spelling="module"),
    "paligemma 1": build_paligemma,
    "paligemma 2": partial(build_paligemma, version=2),
}
# Made by timm and open_clip (scripts/make_timm_goldens.py), on random pixels and token ids.
TIMM = {"timm": "map", "timm, tanh": "map, tanh", "timm, gap": "gap"}
OPEN_CLIP = "open_clip"


def picture() -> Image.Image:
    return Image.open(PICTURE).crop(BOX)


def numbers(tensor: Tensor) -> dict[str, Any]:
    """The first values of an output, its L2 norm and the sum of its absolute values."""
    values = tensor.detach().double().flatten()
    return {
        "shape": list(tensor.shape),
        "first": [round(value, 9) for value in values[:8].tolist()],
        "norm": round(values.norm().item(), 9),
        "sum": round(values.abs().sum().item(), 9),
    }
