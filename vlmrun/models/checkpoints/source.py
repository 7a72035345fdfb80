"""Where a model comes from: a short name, a hub id, a folder, a single file or a packaged demo.

What a spec means, first match wins:
1. a short name or a packaged demo, even where a folder of that name lies in the working directory,
   so that a name means the same model wherever a script runs; `./name` means the folder;
2. a folder that exists, or a `.safetensors` file that does;
3. `owner/name`: a model on the hub, looked up in the user's own hub cache first.

A model that is whole in the cache is used as it is: the hub is asked only for what is not there.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vlmrun.errors import CheckpointError, SourceError, UsageError
from vlmrun.models.checkpoints import hub
from vlmrun.models.checkpoints.aliases import ALIASES
from vlmrun.models.checkpoints.file_names import SHARD
from vlmrun.models.checkpoints.folder import check_folder
from vlmrun.models.checkpoints.hub_cache import (
    find_snapshot,
    has_configuration,
    is_complete,
    newest_snapshot,
    repo_of_snapshot,
)
from vlmrun.models.checkpoints.names import nearest

DEMOS: Mapping[str, str] = {"demo": "demo-llava", "demo-siglip": "demo-siglip"}
DATA = Path(__file__).parents[2] / "data"
FAMILIAR = ("siglip", "llava-onevision-0.5b", "paligemma-3b", *DEMOS)
# The hub's own rule for names (huggingface_hub, validate_repo_id), with an owner.
HUB_ID = re.compile(r"(?!.*(?:--|\.\.))\b[\w\-.]+\b/\b[\w\-.]{1,96}\b")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's files are. Nothing of them has been read."""

    spec: str  # as the user wrote it
    name: str  # short name, hub id, folder or file name, as rows print it
    repo_id: str | None
    revision: str | None  # the commit where it is known, else what was asked for
    folder: Path | None  # holds a configuration, except where `file` is set; None: nothing local
    complete: bool  # nothing is left to download; always so for a folder
    offline: bool = False  # the network must not be asked
    file: str | None = None  # the one weight file in `folder` that is meant, where one was named


def resolve_source(spec: str, *, revision: str | None = None, offline: bool = False) -> Source:
    """Find a model's files on this machine; the network is not asked.

    Raises:
        SourceError: the spec names nothing: no short name, no folder, no weight file, no possible
            hub id.
        CheckpointError: the folder holds no configuration, cannot be listed, or holds a pipe in
            place of a file.
        UsageError: a revision is asked of a folder or a file.
    """
    if spec in DEMOS:
        return _folder_source(spec, DATA / DEMOS[spec], revision)
    if spec in ALIASES:
        return _hub_source(spec, ALIASES[spec], revision, offline)
    path = Path(os.path.expanduser(spec))
    _check_name(spec)
    if spec and os.path.isdir(path):
        return _folder_source(spec, path, revision)
    if os.path.isfile(path):
        return _file_source(spec, path, revision)
    if HUB_ID.fullmatch(spec) and path.suffix != ".safetensors":
        return _hub_source(spec, spec, revision, offline)
    raise _unknown(spec)


def fetch_configuration(source: Source) -> Source:
    """Download the configuration, no weight, of a model on the hub; its folder is set after.

    Raises:
        SourceError: offline, or the hub cannot be reached or refuses.
        CheckpointError: the repository holds no config.json.
    """
    repo_id = _repo_to_ask(source)
    folder = hub.download_configuration(repo_id, source.revision)
    return replace(source, folder=folder, revision=folder.name, complete=is_complete(folder))


def fetch_headers(source: Source) -> dict[str, dict[str, object]]:
    """Read the safetensors headers of a model on the hub by HTTP range requests.

    Returns:
        file name -> tensor name -> {"dtype", "shape", "data_offsets"}, as in the header.

    Raises:
        SourceError: offline, or the hub cannot be reached or refuses.
        CheckpointError: a header is damaged, or the index names a file that is not there.
        UnsupportedModel: the repository holds no weights, or pickled ones only.
    """
    return hub.read_headers(_repo_to_ask(source), source.revision)


def fetch_model(source: Source, *, progress: bool) -> Source:
    """Download what is not yet in the hub cache of a model: everything a run needs, no more.

    `progress` shows the library's own bars and notes on stderr, if that is a terminal.
    Files that are whole are kept when a download is cut; running it again goes on from there.

    Raises:
        SourceError: offline, the hub cannot be reached or refuses, the disk is full.
        CheckpointError: no config.json, or the index names a file that is not there.
        UnsupportedModel: the repository holds no weights that are read.
    """
    folder = hub.download_model(_repo_to_ask(source), source.revision, progress=progress)
    return replace(source, folder=folder, revision=folder.name, complete=True)


def _hub_source(spec: str, repo_id: str, revision: str | None, offline: bool) -> Source:
    offline = offline or hub.network_is_off()
    snapshot = find_snapshot(repo_id, revision)
    if snapshot is None or not has_configuration(snapshot):
        return Source(spec, spec, repo_id, revision, None, False, offline)
    return Source(spec, spec, repo_id, snapshot.name, snapshot, is_complete(snapshot), offline)


def _folder_source(spec: str, folder: Path, revision: str | None) -> Source:
    if revision is not None:
        raise UsageError(
            f"{spec} is a folder, which has no revisions",
            "leave out --revision, or give the model's id on the hub",
        )
    check_folder(folder)
    if not has_configuration(folder):
        raise CheckpointError(f"{folder} holds no config.json", _what_folder_is_meant(folder))
    if spec in DEMOS:
        return Source(spec, spec, None, None, folder, True)
    cached = repo_of_snapshot(folder)
    if cached is not None:
        return Source(spec, cached, cached, folder.name, folder, True)
    return Source(spec, os.path.basename(os.path.abspath(folder)), None, None, folder, True)


def _check_name(spec: str) -> None:
    """Refuse bytes that tokenizers, which take their paths as UTF-8, could not open."""
    try:
        spec.encode()
    except UnicodeEncodeError as error:
        raise SourceError(
            f"{spec}: the name of a model is not valid UTF-8",
            "rename it, or make a link to it with another name",
        ) from error


def _what_folder_is_meant(folder: Path) -> str:
    snapshot = newest_snapshot(folder)
    if snapshot is not None:
        return f"it is a hub cache entry; the model lies in {snapshot}"
    return "give the folder that holds config.json, the weights and the processor's files"


def _repo_to_ask(source: Source) -> str:
    """The hub id, when the network may be asked for it."""
    assert source.repo_id is not None, "a folder is complete"
    if source.offline:
        raise hub.not_cached(source.repo_id, partly=source.folder is not None)
    return source.repo_id


def _file_source(spec: str, path: Path, revision: str | None) -> Source:
    if path.suffix != ".safetensors":
        raise SourceError(
            f"{spec} is a file, not a model",
            "give a .safetensors file, or the folder that holds config.json",
        )
    if revision is not None:
        raise UsageError(f"{spec} is a file, which has no revisions", "leave out --revision")
    if SHARD.fullmatch(path.name):
        raise SourceError(
            f"{spec} is one of several shards", "give the folder that holds them and their index"
        )
    return Source(spec, path.name, None, None, path.parent, True, file=path.name)


def _unknown(spec: str) -> SourceError:
    if "/" in spec or "\\" in spec or spec.startswith(("~", ".")) or spec.endswith(".safetensors"):
        what = "file" if spec.endswith(".safetensors") else "folder"
        near = _beside(spec)
        return SourceError(
            f"no such {what}: {spec}",
            f"beside it {'lies' if len(near) == 1 else 'lie'} {', '.join(near)}"
            if near
            else "a model is a folder or .safetensors file that exists, a short name, or "
            "owner/name on the hub",
        )
    known = ", ".join(nearest(spec, (*ALIASES, *DEMOS)) or FAMILIAR)
    return SourceError(
        f"unknown model {spec!r}",
        f"`vlmrun models` lists the short names, as {known}; else a folder, a .safetensors file, "
        "or owner/name on the hub",
    )


def _beside(spec: str) -> list[str]:
    """What lies where a file or folder does not, of its kind and with a name like its own; of
    weight files the first few, whatever their names."""
    path = Path(os.path.expanduser(spec))
    weights = spec.endswith(".safetensors")
    try:
        found = [each for each in path.parent.iterdir() if each.is_dir() != weights]
    except (OSError, ValueError):  # ValueError: no name that a file can have
        return []
    names = sorted(each.name for each in found if not weights or each.suffix == path.suffix)
    return nearest(path.name, names) or (names[:3] if weights else [])
