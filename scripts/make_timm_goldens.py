"""Write tests/data/timm.json: what timm and open_clip make of tiny SigLIP models.

They need torchvision, which the tested torch does not load, so this runs in an environment of its
own and the tests read the file:

    python3 -m venv goldens && goldens/bin/pip install torch==2.14.1 torchvision==0.29.1 \
        timm==1.0.31 open_clip_torch==3.3.0
    OMP_NUM_THREADS=1 goldens/bin/python scripts/make_timm_goldens.py

Weights and pixels are named and made anew by tests/seeded.py, on both sides; "sha256" holds the
two to each other. Outputs are float32, written so that they read back bit for bit.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import timm
import torch
import torchvision
from open_clip.model import CustomTextCLIP
from open_clip.tokenizer import get_clean_fn
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from timm.data import create_transform
from timm.models import generate_default_cfgs, register_model
from timm.models._hub import save_config_for_hf
from timm.models.vision_transformer import _cfg, _create_vision_transformer

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

from seeded import random_pixels, random_weights, sha256  # noqa: E402

GOLDENS = REPOSITORY / "tests" / "data" / "timm.json"
PICTURE = REPOSITORY / "vlmrun" / "data" / "pictures" / "elephant.png"
TINY: dict[str, Any] = {
    "img_size": 28,
    "patch_size": 7,
    "embed_dim": 48,
    "depth": 3,
    "num_heads": 4,
    "mlp_ratio": 1.5,
}
# The architecture of a real release each, made tiny by arguments: erf, tanh, no pooling head.
MODELS = {
    "map": "vit_base_patch16_siglip_224",
    "map, tanh": "vit_so400m_patch16_siglip_256",
    "gap": "vit_base_patch16_siglip_gap_224",
}
DYNAMIC = ((28, 28), (30, 45), (70, 40), (14, 20))  # (height, width)
# The trunk's error function beside the text tower's tanh, as in open_clip's SigLIP 2.
CLIP_CONFIG: dict[str, Any] = {
    "embed_dim": 48,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {
        "image_size": 28,
        "timm_model_name": "vit_tiny_patch7_siglip_28",
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
    },
    "text_cfg": {
        "context_length": 16,
        "vocab_size": 300,
        "hf_tokenizer_name": "tiny",
        "tokenizer_kwargs": {"clean": "canonicalize"},
        "width": 40,
        "heads": 4,
        "layers": 2,
        "mlp_ratio": 1.4,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
        "act_kwargs": {"approximate": "tanh"},
    },
}
TOKENS = [[(7 * at + 31 * row) % 300 for at in range(16)] for row in range(3)]
TEXTS = (
    "  A photo\tof a_cat,  sitting.  ",
    "It\u2019s \u201cquoted\u201d; isn't it?",  # curly quotes
    "cafe\u0301 &amp; na&iuml;ve &lt;b&gt;",  # a combining accent, entities
    "\uff2c\uff2f\uff35\uff24\u3000noise \ufb01ne",  # full width, a ligature
    "Größe: 10 % — ÇA VA!",
    "schÃ¶n",  # UTF-8 read as Latin-1
    "",
)
# timm's preparation of pictures: crop mode, share, side, (left, top, right, bottom) of the picture.
CROPS = (
    ("center", 0.9, 28, (0, 0, 192, 120)),
    ("center", 0.9, 28, (10, 3, 101, 190)),
    ("center", 1.0, 28, (0, 0, 192, 120)),
    ("squash", 1.0, 28, (0, 0, 192, 120)),
    ("squash", 0.9, 28, (10, 3, 101, 190)),
)

default_cfgs = generate_default_cfgs(
    {"vit_tiny_patch7_siglip_28": _cfg(input_size=(3, 28, 28), num_classes=0)}
)


@register_model
def vit_tiny_patch7_siglip_28(pretrained: bool = False, **given: Any) -> Any:
    """What open_clip builds by name, as it passes no sizes on."""
    sizes = {name: value for name, value in TINY.items() if name != "img_size"}
    args = {**sizes, "class_token": False, "global_pool": "map", **given}
    return _create_vision_transformer("vit_tiny_patch7_siglip_28", pretrained, **args)


def main() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        goldens = {
            "versions": {
                library.__name__: library.__version__.partition("+")[0]
                for library in (torch, torchvision, timm, open_clip)
            },
            "architectures": architectures(),
            "models": {name: timm_model(known) for name, known in MODELS.items()},
            "open_clip": clip_model(),
            "crops": [crop(*settings) for settings in CROPS],
            "squash": squash(),
            "texts": {
                kind: [[text, get_clean_fn(kind)(text)] for text in TEXTS]
                for kind in ("canonicalize", "lower", "whitespace")
            },
        }
    written = json.dumps(goldens, ensure_ascii=False, separators=(",", ":"))
    GOLDENS.parent.mkdir(exist_ok=True)
    GOLDENS.write_text(written.replace('},"', '},\n"') + "\n", encoding="utf-8")
    print(f"{GOLDENS}: {GOLDENS.stat().st_size} bytes")


def architectures() -> dict[str, list[Any]]:
    """Every SigLIP that timm's VisionTransformer knows, as timm builds it."""
    found = {}
    for name in timm.list_models("vit_*siglip*"):
        if name in default_cfgs:
            continue
        with torch.device("meta"):
            model = timm.create_model(name)
        mlp = model.blocks[0].mlp
        found[name] = [
            model.embed_dim,
            len(model.blocks),
            model.blocks[0].attn.num_heads,
            mlp.fc1.out_features,
            model.patch_embed.patch_size[0],
            model.patch_embed.img_size[0],
            {"GELU": "gelu", "GELUTanh": "gelu_pytorch_tanh"}[type(mlp.act).__name__],
            model.attn_pool is not None,
            model.norm.eps,
        ]
    return found


def timm_model(known: str) -> dict[str, Any]:
    """Outputs at the tower's size; then of any size, padded, with resampled positions."""
    model = timm.create_model(known, **TINY).eval()
    weights = fill(model)
    pixels = random_pixels(28, 28)
    tokens, hidden = model.forward_intermediates(pixels, norm=False, output_fmt="NLC")
    dynamic = timm.create_model(known, **TINY, dynamic_img_size=True, dynamic_img_pad=True).eval()
    dynamic.load_state_dict(model.state_dict())
    assert torch.equal(dynamic.forward_features(pixels), tokens)
    sizes = DYNAMIC if known == MODELS["map"] else ()
    return {
        "config": written_config(model),
        **weights,
        "pooled": numbers(model(pixels)),
        "last-hidden": numbers(tokens),
        "hidden:-2": numbers(hidden[-2]),
        "dynamic": {f"{h}x{w}": dynamic_outputs(dynamic, h, w) for h, w in sizes},
    }


def dynamic_outputs(model: Any, height: int, width: int) -> dict[str, Any]:
    tokens = model.forward_features(random_pixels(height, width))
    return {"pooled": numbers(model.forward_head(tokens)), "last-hidden": numbers(tokens)}


def written_config(model: Any) -> dict[str, Any]:
    """config.json as timm writes it for the hub."""
    with tempfile.TemporaryDirectory() as folder:
        save_config_for_hf(model, str(Path(folder) / "config.json"))
        return dict(json.loads((Path(folder) / "config.json").read_text()))


def clip_model() -> dict[str, Any]:
    arguments = {name: value for name, value in CLIP_CONFIG.items() if name != "custom_text"}
    model = CustomTextCLIP(**arguments).eval()
    weights = fill(model)
    pixels, ids = random_pixels(28, 28), torch.tensor(TOKENS)
    preparation = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
    return {
        "config": {
            "model_cfg": CLIP_CONFIG,
            "preprocess_cfg": {**preparation, "resize_mode": "squash"},
        },
        **weights,
        "ids": TOKENS,
        "image": numbers(model.encode_image(pixels)),
        "text": numbers(model.encode_text(ids)),
        "logits": numbers(model.get_logits(pixels, ids)[0]),
    }


def crop(mode: str, share: float, side: int, box: tuple[int, ...]) -> dict[str, Any]:
    transform = create_transform(
        (3, side, side), interpolation="bicubic", crop_pct=share, crop_mode=mode, normalize=False
    )
    levels = transform(Image.open(PICTURE).crop(box)).numpy()  # [3, S, S] uint8
    settings = {"crop_mode": mode, "crop_pct": share, "side": side, "box": box}
    return {**settings, "sha256": hashlib.sha256(levels.tobytes()).hexdigest()}


def squash() -> dict[str, Any]:
    """open_clip's preparation, to numbers."""
    settings = PreprocessCfg(size=28, mean=(0.5,) * 3, std=(0.5,) * 3, resize_mode="squash")
    box = (0, 0, 192, 120)
    pixels = image_transform_v2(settings, is_train=False)(Image.open(PICTURE).crop(box))
    return {
        "side": 28,
        "box": box,
        "corner": numbers(pixels[:, :3, :3]),
        "sha256": sha256([pixels]),
    }


def fill(model: torch.nn.Module) -> dict[str, Any]:
    """Give a model its named weights; return their shapes and what they add up to."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = random_weights(shapes)
    model.load_state_dict(weights)
    return {"weights": shapes, "sha256": sha256(weights.values())}


def numbers(tensor: torch.Tensor) -> Any:
    """Nested lists of the shortest decimals that read back as the same float32."""
    array = tensor.squeeze(0).numpy()
    assert array.dtype == np.float32
    return [numbers(row) for row in tensor.squeeze(0)] if array.ndim > 1 else shortest(array)


def shortest(array: Any) -> list[float]:
    return [float(np.format_float_positional(value)) for value in array]


if __name__ == "__main__":
    main()
