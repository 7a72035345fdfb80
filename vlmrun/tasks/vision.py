"""The vision tower, layer by layer: one crossing of a block's weights serves all crops."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.memory.working import CROPS_AT_ONCE
from vlmrun.tasks.samples import batched


@dataclass(frozen=True, slots=True)
class Group:
    """Crops of one shape that pass each block together, which bounds activations.

    inputs: what the embeddings take, first the pixels [C, ...] float32; mask: [C, N] bool, which
    patches are a picture's own and not padding; None where all are.
    """

    inputs: tuple[Tensor, ...]
    mask: Tensor | None = None


def squares(pixels: Tensor) -> list[Group]:
    """Groups of crops [C, 3, S, S] that are all alike."""
    return [Group((part,)) for part in torch.split(pixels, CROPS_AT_ONCE)]


def joined(groups: Sequence[Group]) -> list[Group]:
    """Groups of neighbours of one shape, put together as far as they may pass a block together."""
    found: list[Group] = []
    for _, alike in groupby(groups, key=lambda group: group.inputs[0].shape[1:]):
        for part in batched(list(alike), CROPS_AT_ONCE):
            inputs = tuple(map(torch.cat, zip(*(group.inputs for group in part), strict=True)))
            masks = [group.mask for group in part if group.mask is not None]
            found.append(Group(inputs, torch.cat(masks) if masks else None))
    return found


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
    masks: list[Tensor | None] = [None] * len(groups)
    kept = {0: list(states)} if 0 in keep else {}
    for index in range(1, max(keep) + 1):
        with model.bound(f"vision.layers.{index - 1}") as block:
            if index == 1:
                pairs = zip(groups, states, strict=True)
                masks = [block_mask(block, group, state) for group, state in pairs]
            for i, mask in enumerate(masks):  # one group at a time: the old states go at once
                states[i] = block(states[i], mask)
        if index in keep:
            kept[index] = list(states)
    return [[kept[index][i] for index in keep] for i in range(len(groups))]


def block_mask(block: nn.Module, group: Group, states: Tensor) -> Tensor | None:
    """What the tower's blocks take as their attention mask, in the form of their backend."""
    if group.mask is None:
        return None
    config = block.self_attn.config  # type: ignore[union-attr]
    mask = group.mask.to(states.device)
    made: Tensor | None = create_bidirectional_mask(config, states, mask)
    return made
