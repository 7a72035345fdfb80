"""Pictures and texts to vectors of one space."""

import torch
from torch import Tensor

from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.memory.working import CROPS_AT_ONCE, TEXTS_AT_ONCE
from vlmrun.models.shapes import Architecture
from vlmrun.models.siglip import hidden_state
from vlmrun.tasks.vision import hidden_states


@torch.inference_mode()
def embed_images(
    model: CachedModelWithPartialLoad, architecture: Architecture, pixels: Tensor, kind: str
) -> Tensor:
    """Embed pictures, in the order given.

    pixels: [B, 3, S, S] float32. Returns float32 on the CPU: [B, D] for `pooled` (the attention
    pooling head, Zhai et al. 2023, arXiv:2303.15343), [B, N, D] for `last-hidden` (after the
    final norm) and `hidden:K` (before it).
    """
    assert architecture.vision is not None
    layers = architecture.vision.layers
    at = hidden_state(kind, layers)
    with model.use("vision") as module:
        tower = module.get_submodule("vision_model" if hasattr(module, "vision_model") else "")
        [states] = hidden_states(model, tower, pixels, (layers if at is None else at,))
        if at is None:
            states = tower.get_submodule("post_layernorm")(states)
        if kind == "pooled":
            head = tower.get_submodule("head")
            with model.bound("vision.head"):
                states = torch.cat([head(group) for group in torch.split(states, CROPS_AT_ONCE)])
        return states.float().cpu()


@torch.inference_mode()
def embed_texts(model: CachedModelWithPartialLoad, ids: Tensor) -> Tensor:
    """Embed texts, in the order given.

    ids: [B, P] int64, padded to the position limit; returns [B, D] float32 on the CPU. The
    tower pools the last position, padding or not, as it was trained.
    """
    with model.use("text") as module:
        tower = module.get_submodule("text_model")
        groups = torch.split(ids.to(model.compute_device), TEXTS_AT_ONCE)
        pooled = [tower(input_ids=group).pooler_output for group in groups]
    return torch.cat(pooled).float().cpu()


def unit_length(vectors: Tensor) -> Tensor:
    """Scale vectors [..., D] to L2 norm 1, so that a dot product is a cosine."""
    scaled: Tensor = vectors / vectors.norm(dim=-1, keepdim=True)
    return scaled
