"""Runs one task in this process and prints what it found as the last line: `-m peers.measure`."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

from peers.task import Found, Task


def peak_bytes() -> int:
    """The most memory this process had at once (not `getrusage`, which counts its parent's)."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(match[1]) if match else 0


def measured(task: Task) -> Found:
    """What the peer's module finds, and the memory it took; `missing` where it is not there."""
    module = f"peers.with_{task.peer.replace('.', '_')}"
    try:
        found: Found = getattr(import_module(module), task.kind)(task)
    except ModuleNotFoundError as error:
        return {"missing": f"{error.name} is not installed"}
    return {**found, "peak_bytes": peak_bytes()}


if __name__ == "__main__":
    print("\n" + json.dumps(measured(Task.load(sys.argv[1]))))
