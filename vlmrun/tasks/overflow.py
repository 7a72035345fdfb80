"""Which layer overflowed: the forward of one input again, this time looking at every output.

Only after a result was found not to be finite; the usual path looks at no layer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.models.family import Phase
from vlmrun.models.layer import Layer
from vlmrun.models.model import Model
from vlmrun.tasks.caption import Pictures, encode_pictures
from vlmrun.tasks.decode import DecodeRow, Steps, embed_prompts, left_padded


def first_overflow(
    entry: CachedModelWithPartialLoad, model: Model, phase: Phase, run: Callable[[], object]
) -> str | None:
    """The first layer whose output is not finite when `run` uses a phase; None if there is none."""
    with entry.use(phase) as module, watched(module, model.layers) as found:
        run()
    return found[0] if found else None


@contextmanager
def watched(module: nn.Module, layers: Sequence[Layer]) -> Iterator[list[str]]:
    """Note the names of layers whose output is not finite, in the order they run."""
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            states = output if isinstance(output, Tensor) else output[0]
            if not found and not torch.isfinite(states).all():
                found.append(name)

        return hook

    hooks = [
        module.get_submodule(layer.module).register_forward_hook(look(layer.name))
        for layer in layers
        if layer.module
    ]
    try:
        yield found
    finally:
        for each in hooks:
            each.remove()


def overflow_of_answer(
    entry: CachedModelWithPartialLoad,
    model: Model,
    pictures: Pictures,
    row: DecodeRow,
    tokens: Sequence[int],
    *,
    placeholder_id: int,
) -> str | None:
    """The first layer that overflows for a row: in its pictures' features, else in its prompt
    and the tokens it has given so far, in one pass."""
    if row.features is not None and not torch.isfinite(row.features).all():
        seen = partial(encode_pictures, entry, model.architecture, [pictures])
        return first_overflow(entry, model, "vision", seen)
    said = partial(prefill, entry, model, row, tokens, placeholder_id)
    return first_overflow(entry, model, "decode", said)


@torch.inference_mode()
def prefill(
    entry: CachedModelWithPartialLoad,
    model: Model,
    row: DecodeRow,
    tokens: Sequence[int],
    placeholder_id: int,
) -> Tensor:
    """Logits [1, V] after a row's prompt and further tokens."""
    assert model.architecture.decoder is not None
    ids, _ = left_padded([row], placeholder_id)
    with entry.use("decode") as module:
        embeds = embed_prompts(module, [row], ids, placeholder_id)
        table = module.get_submodule("model.language_model.embed_tokens")
        further = table(torch.tensor([tokens], dtype=torch.int64))
        embeds = torch.cat([embeds, further], dim=1).to(entry.compute_device)
        mask = torch.ones(embeds.shape[:2], dtype=torch.int64)
        steps = Steps(entry, module, model.architecture.decoder, embeds, mask, 0)
        return steps.prefill(embeds)
