"""The machine and the versions that a table is about."""

import os
import platform
import re
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("vlmrun", "torch", "transformers", "numba", "llama_cpp_python", "openvino")
BF16 = ("avx512_bf16", "amx_bf16", "bf16")
FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", *BF16)


def machine_lines(threads: int, isa: str) -> list[str]:
    """Date, processor with what it can, memory, versions, and how busy the machine was."""
    info = read("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    known = [each for each in FEATURES if flags and each in flags[1].split()]
    kernel = re.search(r"^MemTotal:\s+(\d+) kB", read("/proc/meminfo"), re.MULTILINE)
    memory = f", {int(kernel[1]) / 2**20:.0f} GiB" if kernel else ""
    held = "" if isa == "native" else f", held to {isa} (see below)"
    if isa == "native" and set(known).intersection(BF16):
        held = "; the marks are for a CPU without bf16 units, which this one has"
    return [
        f"- {time.strftime('%Y-%m-%d')}; {name[1] if name else platform.machine()}, "
        f"{os.cpu_count()} CPUs, {threads} threads used{memory}",
        f"- features: {', '.join(known) or 'none of those that matter'}{held}",
        f"- {versions()}",
    ]


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found) + commit()


def commit() -> str:
    """Which commit of vlmrun, where this is a clone of it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"; commit {done.stdout.strip()}"
