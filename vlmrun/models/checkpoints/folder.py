"""A model's folder: what lies in it, and the JSON files that say what it is."""

import json
import os
from pathlib import Path
from typing import Any

from vlmrun.errors import CheckpointError

AGAIN = "download it again; into the hub cache with hf download --force-download"
LFS_POINTER = b"version https://git-lfs"
READ = (".json", ".safetensors", ".bin", ".model", ".jinja", ".txt")  # by us or transformers


def list_files(folder: Path) -> list[str]:
    """What lies in a folder, by name; links to nowhere are left out."""
    try:
        return sorted(name for name in os.listdir(folder) if (folder / name).exists())
    except OSError as error:
        raise unreadable(folder, error) from error


def check_folder(folder: Path) -> None:
    """Look at the files of a model's folder before any library reads them.

    Raises:
        CheckpointError: as `refuse_special`, or the folder cannot be listed.
    """
    for name in list_files(folder):
        if name.endswith(READ):
            refuse_special(folder / name)


def refuse_special(path: Path) -> None:
    """Refuse a pipe and the like, whose reader would wait for ever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise CheckpointError(
            f"{path} is not a regular file", "put the file itself there, or remove it"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model's folder."""
    refuse_special(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(found, ensure_ascii=False).encode()  # an escape may be half a character
    except (ValueError, RecursionError) as error:
        pointer = path.read_bytes()[: len(LFS_POINTER)] == LFS_POINTER
        hint = "it is a Git-LFS pointer: run git lfs pull" if pointer else AGAIN
        raise CheckpointError(f"{path.name} is not valid JSON", hint) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.name} is not a JSON object", AGAIN)
    return found


def refuse_pointer(path: Path, start: bytes) -> None:
    if start and LFS_POINTER.startswith(start):
        raise CheckpointError(
            f"{path.name} is a Git-LFS pointer, not the weights",
            "run git lfs pull in the model's folder",
        )


def unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot read {path}: {error.strerror}", "it should be a file that you may read"
    )
