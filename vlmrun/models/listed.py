"""Models that have a short name: what each is, and how much of it is on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vlmrun.errors import UsageError
from vlmrun.models.checkpoints.aliases import ALIASES
from vlmrun.models.checkpoints.dtype import Dtype, resolve_dtype
from vlmrun.models.checkpoints.hub_cache import find_snapshot, is_complete
from vlmrun.models.checkpoints.names import nearest
from vlmrun.models.checkpoints.source import DEMOS, Source
from vlmrun.models.model import Model, describe_model, read_shapes

NAMES = (*ALIASES, *DEMOS)
Cached = Literal["whole", "partly", "no", "packaged"]


@dataclass(frozen=True, slots=True)
class Listed:
    """A model with a short name; `cached` says how much of it lies in the hub cache."""

    name: str
    model: Model
    cached: Cached

    @property
    def stored_bytes(self) -> Mapping[Dtype, int]:
        """Bytes of its weights in the files, by dtype."""
        keys = {weight.key for layer in self.model.layers for weight in layer.weights}
        return self.model.checkpoint.stored_bytes(sorted(keys))

    @property
    def nbytes(self) -> int:
        return sum(self.stored_bytes.values())

    @property
    def dtype(self) -> Dtype:
        """What most of it is stored in."""
        return resolve_dtype(None, self.stored_bytes)[0]

    @property
    def parameters(self) -> int:
        """Numbers in its weights, ties once."""
        layers = [layer for layer in self.model.layers if not layer.tied]
        return sum(weight.numel for layer in layers for weight in layer.weights)


def look_up(name: str) -> Listed:
    """Find what a short name stands for, by the packaged shapes whatever is cached.

    Raises:
        UsageError: it stands for nothing.
        SourceError: the hub cache cannot be read.
    """
    if name in DEMOS:
        return Listed(name, describe_model(name), "packaged")
    if name not in ALIASES:
        near = nearest(name, NAMES)
        hint = f"as {' or '.join(near)}; " if near else ""
        raise UsageError(
            f"{name!r} is not the short name of a model",
            f"{hint}vlmrun models lists them, vlmrun mem-plan -m plans any other model",
        )
    source = Source(name, name, ALIASES[name], None, None, False)
    return Listed(name, read_shapes(source), cached(ALIASES[name]))


def cached(repo_id: str) -> Cached:
    """How much of a repository's main branch lies in the hub cache."""
    snapshot = find_snapshot(repo_id, None)
    if snapshot is None:
        return "no"
    return "whole" if is_complete(snapshot) else "partly"
