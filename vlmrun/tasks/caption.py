"""Pictures to the features a decoder sees (LLaVA-OneVision, arXiv:2408.03326)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.memory.working import CROPS_AT_ONCE
from vlmrun.models.shapes import Architecture
from vlmrun.tasks.vision import hidden_states


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
    [T, D] of its pictures one after the other, in the compute dtype."""
    pixels = torch.cat([pictures.pixel_values for pictures in batch])
    assert architecture.tiling is not None
    aspect = f"anyres_max_{architecture.tiling.max_tiles}"
    with model.use("vision") as module:
        root = module.get_submodule("model")
        states = hidden_states(
            model, root.get_submodule("vision_tower"), pixels, architecture.feature_layers
        )
        seen = states[0] if len(states) == 1 else torch.cat(states, dim=-1)
        with model.bound("projector"):
            groups = torch.split(seen, CROPS_AT_ONCE)
            project = root.get_submodule("multi_modal_projector")
            features = torch.cat([project(group) for group in groups])
            counts = [count for pictures in batch for count in pictures.crops]
            packed, _ = root.pack_image_features(  # type: ignore[operator]
                torch.split(features, counts),
                [list(size) for pictures in batch for size in pictures.sizes],
                image_newline=root.image_newline,
                vision_aspect_ratio=aspect,
            )
    found, at = [], 0
    for pictures in batch:
        own = packed[at : at + len(pictures.sizes)]
        assert tuple(len(features) for features in own) == pictures.tokens
        found.append(torch.cat(own))
        at += len(own)
    return found
