"""All that is known of a model without reading a weight."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.checkpoints.checkpoint import Checkpoint, TensorInfo, read_checkpoint, tensors_of
from vlmrun.models.checkpoints.dtype import SAFETENSORS
from vlmrun.models.checkpoints.source import (
    Source,
    fetch_configuration,
    fetch_headers,
    fetch_model,
    resolve_source,
)
from vlmrun.models.configuration import read_configuration
from vlmrun.models.families import family_of
from vlmrun.models.family import Config, Family, Task
from vlmrun.models.layer import Block, Layer, Shape, Weight
from vlmrun.models.shapes import Architecture
from vlmrun.models.towers import filed_path

CATALOGUE = Path(__file__).parent.parent / "data" / "catalogue.json"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lies in the checkpoint: a tensor, or the rows `start:stop` of one."""

    key: str
    shape: Shape
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model's source, configuration, family, tensors and layers."""

    source: Source
    config: Config
    family: Family
    architecture: Architecture
    checkpoint: Checkpoint
    layers: tuple[Layer, ...]
    notes: tuple[str, ...] = ()

    def layer(self, name: str) -> Layer:
        return next(layer for layer in self.layers if layer.name == name)


def open_source(
    spec: str,
    *,
    task: Task,
    revision: str | None = None,
    offline: bool = False,
    progress: bool = False,
    untested: bool = False,
) -> tuple[Source, Config]:
    """Bring a model's files to this machine, downloaded first where they must be, and read its
    configuration. `progress` draws the download on stderr; `untested` lets any family pass.

    Raises:
        SourceError: it cannot be found or reached.
        CheckpointError: its configuration cannot be read.
        UnsupportedModel: no family runs it, or one made for another task; said before a weight
            is downloaded, and of what the catalogue knows before the hub is asked.
    """
    source = resolve_source(spec, revision=revision, offline=offline)
    known = read_catalogue().get(source.repo_id or "")
    if known is not None and revision is None:
        check_task(family_of(known["config"]), source.name, task)
    if source.folder is None:
        source = fetch_configuration(source)
    config, _ = read_configuration(source)
    if not untested:
        check_task(family_of(config), source.name, task)
    if not source.complete:
        source = fetch_model(source, progress=progress)
    return source, config


def check_task(family: Family, name: str, task: Task) -> None:
    """Raises UnsupportedModel, with the command to use, where a family is made for another task."""
    if family.task != task:
        raise UnsupportedModel(
            f"{name} ({family.name}) is made for vlmrun {family.task}",
            f"choose another --model for {task}, or use vlmrun {family.task}",
        )


def describe_model(spec: str, *, revision: str | None = None, offline: bool = False) -> Model:
    """Open a model for planning: what is not local is learned from the packaged catalogue or
    from the hub's headers by range requests; no weight is read or downloaded."""
    source = resolve_source(spec, revision=revision, offline=offline)
    if source.complete:
        return read_model(source)
    if revision is None and source.repo_id in read_catalogue():
        return read_shapes(source)
    source = fetch_configuration(source)
    config, _ = read_configuration(source)
    family_of(config)  # refused before any header is asked for
    tensors: dict[str, TensorInfo] = {}
    for header in fetch_headers(source).values():
        tensors |= tensors_of(header, None, 0)
    return assemble(source, config, Checkpoint(tensors), "headers read from the hub")


def read_shapes(source: Source) -> Model:
    """Describe a model from the packaged catalogue alone, whatever of it lies on this machine."""
    assert source.repo_id is not None
    known = read_catalogue()[source.repo_id]
    config, dtype = known["config"], str(known["dtype"])
    checkpoint = shapes_only(family_of(config).architecture(config), dtype)
    note = "shapes from the packaged catalogue"
    return assemble(replace(source, folder=None), config, checkpoint, note)


def read_model(source: Source) -> Model:
    """Read a complete local folder or file.

    Raises:
        CheckpointError: its files are damaged, incomplete or contradict each other.
        UnsupportedModel: no family runs it.
    """
    assert source.folder is not None
    config, notes = read_configuration(source)
    family_of(config)  # an unsupported model is refused before its files are looked at
    checkpoint = read_checkpoint(source.folder, source.file)
    return assemble(source, config, checkpoint, *notes, *checkpoint.notes)


def assemble(source: Source, config: Config, checkpoint: Checkpoint, *notes: str) -> Model:
    family = family_of(config)
    architecture = family.architecture(config)
    places = match_keys(family, architecture, checkpoint)
    layers = tuple(cut_layers(architecture, places, checkpoint))
    return Model(source, config, family, architecture, checkpoint, layers, notes)


@lru_cache(maxsize=1)
def read_catalogue() -> Mapping[str, Mapping[str, Config]]:
    """Configurations and stored dtypes of models with a short name, by hub id; made by a script."""
    found: dict[str, dict[str, Config]] = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    return found


def shapes_only(architecture: Architecture, dtype: str) -> Checkpoint:
    """A checkpoint that holds exactly the architecture's tensors, nowhere on disk."""
    stored = {str(name): spelled for spelled, name in SAFETENSORS.items()}[dtype]
    return Checkpoint(
        {
            path: TensorInfo(stored, shape)
            for block in architecture.blocks
            for path, shape in block.tensors.items()
            if path not in architecture.ties.values()
        }
    )


def match_keys(
    family: Family, architecture: Architecture, checkpoint: Checkpoint
) -> dict[str, Place]:
    """Match the checkpoint's keys to the architecture's module paths.

    A parameter that shares its storage with another takes the place of whichever is there.

    Raises:
        CheckpointError: tensors are missing, surplus, misshapen, or two keys name one module
            path; all of a kind are counted, the first few named.
    """
    places: dict[str, Place] = {}
    for key, info in checkpoint.tensors.items():
        if any(re.search(pattern, key) for pattern in family.ignored):
            continue
        for path, place in places_of(family, key, info.shape):
            if path in places:
                raise CheckpointError(
                    f"{places[path].key} and {key} both hold {path}",
                    "the file mixes two spellings of one tensor; remove the one that is not meant",
                )
            places[path] = place
    for one, other in architecture.ties.items():
        found = places.get(one, places.get(other))
        if found is not None:
            places.setdefault(one, found)
            places.setdefault(other, found)
    check_places(architecture, places)
    return places


def places_of(family: Family, key: str, shape: Shape) -> Iterable[tuple[str, Place]]:
    """The module paths that a key stands for; a fused one stands for several by rows."""
    path = module_path(family, key)
    for pattern, replacements in family.fused:
        match = re.fullmatch(pattern, path)
        if match is None:
            continue
        rows = shape[0] // len(replacements) if shape else 0
        if not rows or shape[0] % len(replacements):
            raise CheckpointError(
                f"{key} has {shape[0] if shape else 0} rows, which make no {len(replacements)} "
                "equal blocks",
                "config.json is of another model or another version",
            )
        for i, replacement in enumerate(replacements):
            place = Place(key, (rows, *shape[1:]), (i * rows, (i + 1) * rows))
            yield match.expand(replacement), place
        return
    yield path, Place(key, shape)


def check_places(architecture: Architecture, places: Mapping[str, Place]) -> None:
    """Hold what the checkpoint has to what the architecture needs. Axes of length 1 may differ:
    timm and open_clip write a position table as [1, N, D], a scalar as []."""
    expected = {path: s for block in architecture.blocks for path, s in block.tensors.items()}
    complain(
        "missing from the checkpoint",
        sorted({filed_path(path) for path in expected.keys() - places.keys()}),
        "the download is incomplete, or config.json is of another model",
    )
    complain(
        "in the checkpoint that config.json does not account for",
        sorted({places[path].key for path in places.keys() - expected.keys()}),
        "config.json is of another model or another version",
    )
    wrong = [
        f"{places[path].key} (is {list(places[path].shape)}, config.json needs {list(shape)})"
        for path, shape in expected.items()
        if squeezed(places[path].shape) != squeezed(shape)
    ]
    complain("of another shape", wrong, "config.json is of another model or another version")


def squeezed(shape: Shape) -> Shape:
    return tuple(length for length in shape if length != 1)


def module_path(family: Family, key: str) -> str:
    for pattern, replacement in family.renames:
        key = re.sub(pattern, replacement, key)
    return key


def complain(what: str, names: list[str], hint: str) -> None:
    """Stop the load when there are any such tensors, naming the first three."""
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        noun = "tensor is" if len(names) == 1 else "tensors are"
        raise CheckpointError(f"{len(names)} {noun} {what}: {', '.join(names[:3])}{more}", hint)


def cut_layers(
    architecture: Architecture, places: Mapping[str, Place], checkpoint: Checkpoint
) -> Iterable[Layer]:
    """Layers in execution order. A matrix larger than the largest decoder block is cut into
    row blocks no larger than it, so that everything that moves fits the same buffer."""
    bound = largest_block(architecture)
    for block in architecture.blocks:
        weights = tuple(
            Weight(
                path,
                places[path].key,
                shape,
                places[path].rows,
                stored=checkpoint.tensors[places[path].key].dtype,
                quantised=block.quantised and len(shape) == 2,
            )
            for path, shape in block.tensors.items()
        )
        if block.row_blocks:
            yield from row_layers(block, weights[0], bound)
        else:
            tied = any(path in architecture.ties for path in block.tensors)
            yield Layer(
                block.name, block.name, block.part, block.module, weights, block.gathered, tied
            )


def largest_block(architecture: Architecture) -> int:
    """Numbers in the largest block that always moves whole."""
    movable = [b for b in architecture.blocks if not b.gathered and not b.row_blocks]
    return max(sum(Weight("", "", shape).numel for shape in b.tensors.values()) for b in movable)


def row_layers(block: Block, weight: Weight, bound: int) -> Iterable[Layer]:
    rows, width = weight.shape
    most = max(1, bound // width)  # rows of one piece
    step = -(-rows // -(-rows // most))
    for i, start in enumerate(range(0, rows, step)):
        stop = min(rows, start + step)
        module = f"{block.module}.blocks.{i}"
        shape, path = (stop - start, width), f"{module}.weight"
        piece = replace(weight, path=path, shape=shape, rows=(start, stop))
        yield Layer(f"{block.name}.{i}", block.name, block.part, module, (piece,))
