"""The vision tower, layer by layer: one crossing of a block's weights serves all crops."""

import torch
from torch import Tensor, nn

from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.memory.working import CROPS_AT_ONCE


def hidden_states(
    model: CachedModelWithPartialLoad, tower: nn.Module, pixels: Tensor, keep: tuple[int, ...]
) -> list[Tensor]:
    """Run crops through the tower up to the deepest layer in `keep`.

    pixels: [C, 3, S, S] float32; returns the kept hidden states, each [C, N, D] in the compute
    dtype, before the final norm. Index 0 is the embeddings, K the output of block K.
    Crops pass each block a few at a time, which bounds activations whatever C is.
    """
    starts = range(0, pixels.shape[0], CROPS_AT_ONCE)
    device = model.compute_device
    embed = tower.get_submodule("embeddings")
    blocks = list(tower.get_submodule("encoder.layers").children())
    with model.bound("vision.embeddings"):
        parts = [embed(pixels[i : i + CROPS_AT_ONCE].to(device)) for i in starts]
    states = torch.cat(parts)  # [C, N, D]
    kept = {0: states.clone()} if 0 in keep else {}
    for index in range(max(keep)):
        with model.bound(f"vision.layers.{index}"):
            for i in starts:
                group = states[i : i + CROPS_AT_ONCE]
                group.copy_(blocks[index](group, None))
        if index + 1 in keep:
            kept[index + 1] = states if index + 1 == max(keep) else states.clone()
    return [kept[index] for index in keep]
