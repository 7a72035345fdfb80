"""The vision tower, layer by layer: one crossing of a block's weights serves all crops."""

from collections.abc import Iterable, Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class Hidden:
    """What became of a group: the hidden states that were kept, [C, N, D] each, and its mask."""

    states: list[Tensor]
    mask: Tensor | None


def squares(crops: Sequence[Tensor] | Tensor) -> Iterator[Group]:
    """Groups of crops [3, S, S] that are all alike."""
    for start in range(0, len(crops), CROPS_AT_ONCE):
        yield Group((torch.stack([*crops[start : start + CROPS_AT_ONCE]]),))


def joined(groups: Iterable[Group]) -> Iterator[Group]:
    """Groups of neighbours of one shape, put together as far as they may pass a block together."""
    for _, alike in groupby(groups, key=lambda group: group.inputs[0].shape[1:]):
        for part in batched(list(alike), CROPS_AT_ONCE):
            inputs = tuple(map(torch.cat, zip(*(group.inputs for group in part), strict=True)))
            masks = [group.mask for group in part if group.mask is not None]
            yield Group(inputs, torch.cat(masks) if masks else None)


def hidden_states(
    model: CachedModelWithPartialLoad,
    groups: Iterable[Group],
    keep: tuple[int, ...],
    *,
    prenorm: bool = False,
) -> list[Hidden]:
    """Run groups of crops through the tower up to the deepest layer in `keep`. Pixels are of no
    use after the embeddings: groups that are put together as they are asked for lie in memory
    one at a time.

    prenorm: a norm of its own follows the embeddings, as CLIP's does. Kept states are in the
    compute dtype, before the final norm; index 0 is the embeddings, K the output of block K.
    """
    device = model.compute_device
    states: list[Tensor] = []
    given: list[Tensor | None] = []
    with model.bound("vision.embeddings") as embed:
        for group in groups:
            states.append(embed(*(x.to(device) for x in group.inputs)))
            given.append(group.mask)
    if prenorm:
        with model.bound("vision.prenorm") as norm:
            states = [norm(state) for state in states]
    masks: list[Tensor | None] = []
    kept = {0: list(states)} if 0 in keep else {}
    for index in range(1, max(keep) + 1):
        with model.bound(f"vision.layers.{index - 1}") as block:
            if index == 1:
                pairs = zip(given, states, strict=True)
                masks = [block_mask(block, mask, state) for mask, state in pairs]
            for i, mask in enumerate(masks):  # one group at a time: the old states go at once
                states[i] = block(states[i], mask)
        if index in keep:
            kept[index] = list(states)
    return [Hidden([kept[index][i] for index in keep], mask) for i, mask in enumerate(given)]


def block_mask(block: nn.Module, given: Tensor | None, states: Tensor) -> Tensor | None:
    """What the tower's blocks take as their attention mask, in the form of their backend."""
    if given is None:
        return None
    config = block.self_attn.config  # type: ignore[union-attr]
    mask = given.to(states.device)
    made: Tensor | None = create_bidirectional_mask(config, states, mask)
    return made
