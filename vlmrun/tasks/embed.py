"""Pictures and texts to vectors of one space."""

from collections.abc import Iterable

import torch
from torch import Tensor

from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.memory.working import TEXTS_AT_ONCE
from vlmrun.models.shapes import Architecture
from vlmrun.models.towers import hidden_state
from vlmrun.tasks.vision import Group, hidden_states


@torch.inference_mode()
def embed_images(
    model: CachedModelWithPartialLoad,
    architecture: Architecture,
    groups: Iterable[Group],
    kind: str,
) -> list[Tensor]:
    """Embed pictures, in the order given; a tensor of float32 on the CPU for each.

    [D] for `pooled` (the attention pooling head, Zhai et al. 2023, arXiv:2303.15343), [N, D]
    for `last-hidden` (after the final norm) and `hidden:K` (before it): as many as the picture
    has patches; NaFlex's padding stays, its vectors are zero.
    """
    assert architecture.vision is not None
    layers = architecture.vision.layers
    at = hidden_state(kind, layers)
    with model.use("vision"):
        found = hidden_states(model, groups, (layers if at is None else at,))
        masks = [hidden.mask for hidden in found]
        states = [state for hidden in found for state in hidden.states]
        del found
        if at is None:
            with model.bound("vision.norm") as norm:
                states = [norm(state) for state in states]
        if kind == "pooled":
            with model.bound("vision.head") as head:
                states = [pooled(head, *each) for each in zip(states, masks, strict=True)]
        else:
            states = [unpadded(*each) for each in zip(states, masks, strict=True)]
        return [vector for state in states for vector in state.float().cpu()]


def pooled(head: torch.nn.Module, states: Tensor, mask: Tensor | None) -> Tensor:
    """One vector [C, D] of patches [C, N, D]; padding is not seen."""
    seen = () if mask is None else (mask.to(states.device),)
    vectors: Tensor = head(states, *seen)
    return vectors


def unpadded(states: Tensor, mask: Tensor | None) -> Tensor:
    """Patches [C, N, D] with padding set to zero."""
    if mask is None:
        return states
    return states.masked_fill(~mask.to(states.device)[..., None], 0)


@torch.inference_mode()
def embed_texts(model: CachedModelWithPartialLoad, ids: Tensor) -> Tensor:
    """Embed texts, in the order given.

    ids: [B, P] int64, padded to the position limit; returns [B, D] float32 on the CPU. The
    tower pools the last position, padding or not, as it was trained.
    """
    with model.use("text") as module:
        tower = module.get_submodule("text_model")
        groups = torch.split(ids.to(model.compute_device), TEXTS_AT_ONCE)
        vectors = [tower(input_ids=group, return_dict=True).pooler_output for group in groups]
    return torch.cat(vectors).float().cpu()


def unit_length(vectors: Tensor) -> Tensor:
    """Scale vectors [..., D] to L2 norm 1, so that a dot product is a cosine; zeros, as padding
    is, stay zeros."""
    lengths = vectors.norm(dim=-1, keepdim=True)
    scaled: Tensor = vectors / lengths.masked_fill(lengths == 0, 1)
    return scaled
