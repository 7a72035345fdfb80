"""What timm and open_clip made of tiny models (scripts/make_timm_goldens.py), and their folders."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from vlmrun.models.family import Family
from vlmrun.models.model import places_of
from vlmrun.models.timm import ARCHITECTURES

GOLDENS: dict[str, Any] = json.loads((Path(__file__).parent / "data/timm.json").read_text("utf-8"))
# open_clip builds its tower by name alone: the goldens' is registered here as it was there.
TRUNK = "vit_tiny_patch7_siglip_28"
TRUNK_ARGUMENTS: Mapping[str, Any] = {
    "embed_dim": 48,
    "depth": 3,
    "num_heads": 4,
    "mlp_ratio": 1.5,
    "patch_size": 7,
    "act_layer": "gelu",
    "img_size": 28,
    "global_pool": "map",
}


def register_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, TRUNK, TRUNK_ARGUMENTS)


def write_timm(folder: Path, name: str) -> Path:
    """A timm folder: "map", "map, tanh" or "gap"."""
    return write_folder(folder, GOLDENS["models"][name], "config.json", "model.safetensors")


def write_open_clip(folder: Path) -> Path:
    """An open_clip folder without its tokenizer."""
    names = "open_clip_config.json", "open_clip_model.safetensors"
    return write_folder(folder, GOLDENS["open_clip"], *names)


def write_folder(folder: Path, golden: Mapping[str, Any], config: str, weights: str) -> Path:
    from safetensors.torch import save_file
    from seeded import random_weights

    folder.mkdir(parents=True, exist_ok=True)
    (folder / config).write_text(json.dumps(golden["config"], indent=2))
    save_file(random_weights(golden["weights"]), folder / weights)
    return folder


def load_stock(model: Any, family: Family, shapes: Mapping[str, Sequence[int]]) -> None:
    """Give a stock model the goldens' weights, by the family's renames and fused rows."""
    import torch
    from seeded import random_weights

    state = {}
    for key, tensor in random_weights(shapes).items():
        for path, place in places_of(family, key, tuple(tensor.shape)):
            state[path] = tensor if place.rows is None else tensor[slice(*place.rows)]
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in [name for name in wanted if ".in_proj_" in name]:  # the pooling head, in one
        before, kind = name.split(".in_proj_")
        parts = [state.pop(f"{before}.{part}_proj.{kind}") for part in "qkv"]
        state[name] = torch.cat(parts)
    assert state.keys() == wanted.keys()
    model.load_state_dict({name: state[name].reshape(shape) for name, shape in wanted.items()})
