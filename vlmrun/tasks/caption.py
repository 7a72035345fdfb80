"""Pictures to the features a decoder sees (Liu et al. 2023, arXiv:2304.08485)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.models.shapes import Architecture
from vlmrun.tasks.vision import hidden_states, squares


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of one prompt, ready for the tower.

    pixel_values: [C, 3, S, S] float32, the crops of all pictures in order; sizes: (height,
    width) of every picture; crops: how many each has, C in sum; tokens: what each costs.
    """

    pixel_values: Tensor
    sizes: tuple[tuple[int, int], ...]
    crops: tuple[int, ...]
    tokens: tuple[int, ...]


@torch.inference_mode()
def encode_pictures(
    model: CachedModelWithPartialLoad, architecture: Architecture, batch: Sequence[Pictures]
) -> list[Tensor]:
    """Encode a batch's pictures in one crossing of the tower: for each of `batch` the features
    [T, D] of its pictures one after the other, in the compute dtype. Crops of the same pixels
    pass the tower and the projector once."""
    crops, places = distinct([crop for pictures in batch for crop in pictures.pixel_values])
    tower, first = architecture.vision, int(architecture.first_dropped)
    assert tower is not None
    with model.use("vision") as module:
        kept = hidden_states(
            model, squares(crops), architecture.feature_layers, prenorm=tower.class_token
        )
        seen = [torch.cat(hidden.states, dim=-1)[:, first:] for hidden in kept]
        if architecture.normed:
            with model.bound("vision.norm") as norm:
                seen = [norm(states) for states in seen]
        with model.bound("projector") as project:
            features = torch.cat([project(states) for states in seen])[places]  # [C, N, D]
            counts = [count for pictures in batch for count in pictures.crops]
            packed = pack(
                module.get_submodule("model"),
                architecture,
                list(torch.split(features, counts)),
                [list(size) for pictures in batch for size in pictures.sizes],
            )
    found, at = [], 0
    for pictures in batch:
        own = packed[at : at + len(pictures.sizes)]
        assert tuple(len(features) for features in own) == pictures.tokens
        found.append(torch.cat(own))
        at += len(own)
    return found


def distinct(crops: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The crops that differ, in order, and for every crop given which of them it is. A
    square picture's base view and its only tile are the same pixels, bit for bit."""
    numbers: dict[bytes, int] = {}
    kept: list[Tensor] = []
    places = []
    for crop in crops:
        key = hashlib.sha256(crop.contiguous().numpy().data).digest()
        if key not in numbers:
            numbers[key] = len(kept)
            kept.append(crop)
        places.append(numbers[key])
    return kept, places


def pack(
    root: nn.Module,
    architecture: Architecture,
    features: list[Tensor],
    sizes: list[list[int]],
) -> list[Tensor]:
    """The features [T, D] of each picture from those of its crops, [C, N, D] each: the crops one
    after the other, or where pictures are tiled, the base view and the unpadded grid."""
    tiling = architecture.tiling
    if tiling is None:
        return [crops.flatten(0, 1) for crops in features]
    own = {"vision_aspect_ratio": f"anyres_max_{tiling.max_tiles}"}
    if tiling.max_tiles is None:
        own = {
            "vision_feature_select_strategy": "default" if architecture.first_dropped else "full"
        }
    packed, _ = root.pack_image_features(  # type: ignore[operator]
        features, sizes, image_newline=root.image_newline, **own
    )
    return list(packed)
