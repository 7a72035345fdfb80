"""Tensor parallel (Shoeybi et al. 2019, arXiv:1909.08053): of every block's matrices each
process keeps an equal part, cut while it is read; everything else is whole in all of them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from vlmrun.errors import UsageError
from vlmrun.models.family import Family
from vlmrun.models.layer import Layer, Weight
from vlmrun.models.model import Model
from vlmrun.models.shapes import Architecture

KV_HEADS = "decoder key-value heads"
SHARED = r"language_model\..*\.[kv]_proj\."  # by the heads that several of the query share
LAUNCH = "torchrun --nproc-per-node N --no-python vlmrun caption --tp INPUT..."


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of the processes this is. `local`: among those of this machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def read_shard(environment: Mapping[str, str]) -> Shard:
    """The place of this process among those that torchrun started.

    Raises:
        UsageError: torchrun did not start it.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        rank, size, local_rank, local_size = (int(environment[name]) for name in names)
    except (KeyError, ValueError) as error:
        raise UsageError("--tp needs several processes", f"start them: {LAUNCH}") from error
    return Shard(rank, size, local_rank, local_size)


def shard_model(model: Model, shard: Shard) -> Model:
    """The model as one process has it: its part of every weight that is cut, its heads.

    Raises:
        UsageError: the number of processes does not divide the model.
    """
    check_division(model.source.name, model.architecture, shard.size)
    decoder = model.architecture.decoder
    shared = decoder.kv_heads if decoder is not None else shard.size
    layers = tuple(cut_layer(layer, model.family, shard, shared) for layer in model.layers)
    return replace(model, layers=layers, architecture=part_of(model.architecture, shard.size))


def cut_layer(layer: Layer, family: Family, shard: Shard, kv_heads: int) -> Layer:
    weights = (cut(weight, family, shard, kv_heads) for weight in layer.weights)
    return replace(layer, weights=tuple(weights))


def cut(weight: Weight, family: Family, shard: Shard, kv_heads: int) -> Weight:
    """The rows or columns of a weight that this process keeps. Where there are fewer key-value
    heads than processes, as with Gemma's one, several processes keep the same."""
    if re.search(family.by_rows, weight.path):
        parts = kv_heads if re.search(SHARED, weight.path) else shard.size
        length = weight.shape[0] // parts * max(1, parts // shard.size)
        start = weight.shape[0] // parts * (shard.rank * parts // shard.size)
        first = (weight.rows[0] if weight.rows else 0) + start
        return replace(weight, shape=(length, *weight.shape[1:]), rows=(first, first + length))
    if re.search(family.by_columns, weight.path):
        length = weight.shape[1] // shard.size
        first = shard.rank * length
        return replace(weight, shape=(weight.shape[0], length), columns=(first, first + length))
    return weight


def check_division(name: str, architecture: Architecture, size: int) -> None:
    """Raises UsageError, with the numbers that would do, where `size` does not divide all."""
    counts = dict(divided(architecture))
    wrong = undivided(counts, size)
    if not wrong:
        return
    most = min(count for what, count in counts.items() if what != KV_HEADS)
    fit = [str(n) for n in range(2, most + 1) if not undivided(counts, n)]
    raise UsageError(
        f"--tp: {size} processes do not divide the {counts[wrong[0]]} {wrong[0]} of {name}",
        f"use {' or '.join(fit)} processes" if fit else "this model runs in one process only",
    )


def undivided(counts: Mapping[str, int], size: int) -> list[str]:
    """What `size` processes cannot share out equally; one key-value head may serve several."""
    wrong = [what for what, count in counts.items() if count % size]
    return [what for what in wrong if what != KV_HEADS or size % counts[what]]


def divided(architecture: Architecture) -> Iterator[tuple[str, int]]:
    """What is shared out between processes, and how many of it there are."""
    towers = {"vision": architecture.vision, "text": architecture.text}
    for name, tower in towers.items():
        if tower is not None:
            yield f"{name} heads", tower.heads
            yield f"{name} MLP columns", tower.mlp_width
    decoder = architecture.decoder
    if decoder is not None:
        yield "decoder heads", decoder.heads
        yield KV_HEADS, decoder.kv_heads
        yield "decoder MLP columns", decoder.mlp_width


def part_of(architecture: Architecture, size: int) -> Architecture:
    """The architecture as memory is reckoned with: one process's heads and MLP columns."""
    vision, text, decoder = architecture.vision, architecture.text, architecture.decoder
    if vision is not None:
        vision = replace(vision, heads=vision.heads // size, mlp_width=vision.mlp_width // size)
    if text is not None:
        text = replace(text, heads=text.heads // size, mlp_width=text.mlp_width // size)
    if decoder is not None:
        decoder = replace(
            decoder,
            heads=decoder.heads // size,
            kv_heads=max(1, decoder.kv_heads // size),
            mlp_width=decoder.mlp_width // size,
        )
    return replace(architecture, vision=vision, text=text, decoder=decoder)
