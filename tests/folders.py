"""Folders of models with something changed, and pictures to show them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from vlmrun.models.checkpoints.source import resolve_source
from vlmrun.models.model import Model, read_model

Change = Callable[[Path], None]
Tensors = dict[str, Tensor]
WEIGHTS = "model.safetensors"


def picture(width: int, height: int) -> Image.Image:
    """Noise over a slope: every pixel matters, and a wrong filter or offset shows."""
    noise = np.random.default_rng(width * 7 + height).integers(0, 100, (height, width, 3))
    slope = np.linspace(0, 155, width)[None, :, None] * np.linspace(1, 0.5, height)[:, None, None]
    return Image.fromarray((noise + slope).astype(np.uint8))


def copied(folder: Path, target: Path, change: Change) -> Path:
    """A copy of a folder after a change to its files."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    change(target)
    return target


def changed(folder: Path, target: Path, change: Change) -> Model:
    return model_at(copied(folder, target, change))


def model_at(folder: Path) -> Model:
    return read_model(resolve_source(str(folder)))


def setting(file: str, **values: Any) -> Change:
    """Set keys of a JSON file; None takes the key out."""

    def change(folder: Path) -> None:
        path = folder / file
        found = {**(json.loads(path.read_text()) if path.exists() else {}), **values}
        path.write_text(json.dumps({key: v for key, v in found.items() if v is not None}))

    return change


def without(file: str) -> Change:
    return lambda folder: (folder / file).unlink()


def replaced(file: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / file).write_bytes(content)

    return change


def weights(change: Callable[[Tensors], object]) -> Change:
    """Change the tensors of a folder's only weight file."""

    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / WEIGHTS, {"format": "pt"})

    return rewrite


def all_of(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change
