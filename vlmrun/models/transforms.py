"""How timm and open_clip prepare pictures, as settings of transformers' image processors.

Source: timm 1.0.31, data/transforms_factory.py; open_clip 3.3.0, transform.py.
"""

import math
from typing import Any

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.family import Config, contradiction

# Settings of ours: the crop's corner is torchvision's; why pictures are not made squares, which
# does not matter where they are shown at their own size.
HALVES_ROUNDED, UNRUN = "halves_rounded", "unrun"
RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


def picture_settings(given: Config, side: int) -> dict[str, Any]:
    """timm's evaluation transform as settings of a `SiglipImageProcessor`.

    Most files say crop_mode "center" with crop_pct 0.9, though SigLIP was trained on squashed
    pictures; what the file says is what timm does, with torchvision's rounding of the corner.
    A way to crop that is not run is named under UNRUN, and no size is.

    Raises:
        CheckpointError: a setting is missing; colours and filter are never taken for granted.
        UnsupportedModel: the filter is not known.
    """
    mode, share = given.get("crop_mode") or "center", given.get("crop_pct") or 0.875
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise contradiction(f"crop_pct should be above 0 and at most 1, not {share!r}")
    edge = math.floor(side / share)
    square = {"height": side, "width": side}
    settings = color_settings(given)
    if mode not in ("center", "squash"):
        return {**settings, UNRUN: f"crop_mode is {mode!r}, which is neither center nor squash"}
    if mode == "squash" and edge == side:
        return {**settings, "size": square}
    if mode == "squash":
        return {**settings, UNRUN: "crop_mode is 'squash' with crop_pct below 1"}
    return {
        **settings,
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": edge},
        "do_center_crop": True,
        "crop_size": square,
        HALVES_ROUNDED: True,
    }


def color_settings(given: Config) -> dict[str, Any]:
    """Filter, mean and standard deviation, from either library's file.

    Raises:
        CheckpointError: one is missing or not one number per channel.
        UnsupportedModel: the filter is not known.
    """
    absent = [name for name in ("mean", "std", "interpolation") if given.get(name) is None]
    if absent:
        raise missing(*absent)
    for name in ("mean", "std"):
        if not isinstance(given[name], list | tuple) or len(given[name]) != 3:
            raise contradiction(f"{name} should be three numbers, not {given[name]!r}")
    if given["interpolation"] not in list(RESAMPLE):
        raise UnsupportedModel(
            f"interpolation is {given['interpolation']!r}", f"supported: {', '.join(RESAMPLE)}"
        )
    return {
        "image_processor_type": "SiglipImageProcessor",
        "do_resize": True,
        "resample": RESAMPLE[given["interpolation"]],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(given["mean"]),
        "image_std": list(given["std"]),
    }


def missing(*names: str) -> CheckpointError:
    return CheckpointError(
        f"the configuration does not say {', '.join(names)}",
        "copy config.json from where the model comes from; it is not guessed",
    )
