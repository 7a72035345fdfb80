"""The control groups above this process: whose limits hold for it, v1 and v2 alike."""

import re
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups_above(
    controller: str, mount: Path = MOUNT, membership: Path = MEMBERSHIP
) -> Iterator[tuple[int, Path]]:
    """Version and folder of every group that a controller may limit this process in, from its own
    up to the root. Folders and files may be missing: a container sees its own group as the root.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, base = 2, mount
        elif controller in controllers.split(","):
            version, base = 1, mount / controller
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *(p for p in group.parents if p.is_relative_to(base))):
            yield version, folder


def find_number(path: Path, pattern: str) -> int | None:
    """The number that a kernel file shows, None where it does not."""
    try:
        match = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
