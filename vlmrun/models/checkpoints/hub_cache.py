"""The user's own hub cache, looked into without the network and without huggingface_hub, whose
import costs 0.2 s.

The layout is models--owner--name/{blobs,refs,snapshots}: refs/<branch or tag> holds a commit,
snapshots/<commit>/ the files, as links into blobs
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
"""

import os
from pathlib import Path

from vlmrun.errors import CheckpointError, SourceError
from vlmrun.models.checkpoints.file_names import (
    CONFIGURATIONS,
    INDEX,
    PICKLE_INDEX,
    SINGLE,
    find_weights,
)
from vlmrun.models.checkpoints.folder import read_json


def cache_folder() -> Path:
    """The folder huggingface_hub would use: HF_HUB_CACHE, else `hub` in HF_HOME, else in
    ~/.cache/huggingface."""
    environment = os.environ
    caches = environment.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = environment.get("HF_HOME") or os.path.join(caches, "huggingface")
    legacy = environment.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    folder = environment.get("HF_HUB_CACHE") or legacy
    return Path(os.path.expandvars(os.path.expanduser(folder))).resolve()


def find_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """The cached snapshot of a branch, tag or commit, whole or not.

    Raises:
        SourceError: the cache cannot be read.
    """
    return _snapshot(cache_folder() / f"models--{repo_id.replace('/', '--')}", revision or "main")


def newest_snapshot(entry: Path) -> Path | None:
    """The snapshot someone means who names a cache entry's folder: main, else the last written."""
    main = _snapshot(entry, "main")
    if main is not None:
        return main
    snapshots = [folder for folder in entry.glob("snapshots/*") if folder.is_dir()]
    return max(snapshots, key=lambda folder: folder.stat().st_mtime, default=None)


def repo_of_snapshot(folder: Path) -> str | None:
    """The hub id, if a folder is a snapshot in a hub cache."""
    above = Path(os.path.abspath(folder)).parent
    if above.name != "snapshots" or not above.parent.name.startswith("models--"):
        return None
    return above.parent.name.removeprefix("models--").replace("--", "/")


def has_configuration(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in CONFIGURATIONS)


def is_complete(snapshot: Path) -> bool:
    """Whether a configuration and every weight file are there."""
    names = _weight_files(snapshot)
    return has_configuration(snapshot) and all(os.path.isfile(snapshot / name) for name in names)


def _weight_files(snapshot: Path) -> set[str]:
    """Files that must be there. Some other model.*.safetensors does not do: it may be a variant
    or a shard that another program fetched, of a model whose own file is only on the hub."""
    found = find_weights(os.listdir(snapshot))  # links to nowhere count as names
    if found not in (INDEX, PICKLE_INDEX):
        other = found is not None and found.startswith("model")
        return {SINGLE} if found is None or other else {found}
    try:
        weight_map = read_json(snapshot / found).get("weight_map")
    except CheckpointError:
        return set()  # damaged: whoever reads the checkpoint says so
    return {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()


def _snapshot(entry: Path, revision: str) -> Path | None:
    ref = entry / "refs" / revision
    try:
        commit = ref.read_text(encoding="utf-8").strip() if os.path.isfile(ref) else revision
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"cannot read the hub cache: {ref}", "delete that file, or set HF_HUB_CACHE elsewhere"
        ) from error
    snapshot = entry / "snapshots" / commit
    return snapshot if os.path.isdir(snapshot) else None
