"""The vision tower, layer by layer: one crossing of a block's weights serves all crops."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.memory.working import CROPS_AT_ONCE


@dataclass(frozen=True, slots=True)
class Group:
    """Crops of one shape that pass each block together, which bounds activations.

    inputs: what the embeddings take, first the pixels [C, ...] float32; mask: what the blocks
    take as their attention mask, None where every patch is seen.
    """

    inputs: tuple[Tensor, ...]
    mask: Tensor | None = None


def squares(pixels: Tensor) -> list[Group]:
    """Groups of crops [C, 3, S, S] that are all alike."""
    return [Group((part,)) for part in torch.split(pixels, CROPS_AT_ONCE)]


def hidden_states(
    model: CachedModelWithPartialLoad,
    groups: Sequence[Group],
    keep: tuple[int, ...],
    *,
    prenorm: bool = False,
) -> list[list[Tensor]]:
    """Run groups of crops through the tower up to the deepest layer in `keep`.

    prenorm: a norm of its own follows the embeddings, as CLIP's does. Returns for each group
    the kept hidden states, [C, N, D] each in the compute dtype, before the final norm; index 0
    is the embeddings, K the output of block K.
    """
    device = model.compute_device
    with model.bound("vision.embeddings") as embed:
        states = [embed(*(x.to(device) for x in group.inputs)) for group in groups]
    if prenorm:
        with model.bound("vision.prenorm") as norm:
            states = [norm(state) for state in states]
    masks = [None if group.mask is None else group.mask.to(device) for group in groups]
    kept = {0: list(states)} if 0 in keep else {}
    for index in range(1, max(keep) + 1):
        with model.bound(f"vision.layers.{index - 1}") as block:
            for i, mask in enumerate(masks):  # one group at a time: the old states go at once
                states[i] = block(states[i], mask)
        if index in keep:
            kept[index] = list(states)
    return [[kept[index][i] for index in keep] for i in range(len(groups))]
