"""How matrix products with stored weights are computed: by a table of what was measured to be
fastest, so that results do not change from run to run. Decided before numba is imported."""

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from vlmrun.errors import VlmrunError
from vlmrun.memory.budget import cpu_features
from vlmrun.models.checkpoints.dtype import Dtype

Kernel = Literal["loops", "tiles", "native"]
Kernels = tuple[tuple[int | None, Kernel], ...]  # up to so many rows of the input, None: any

FEATURES = (  # those that products and libraries choose by; x86, then ARM
    *("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "sve", "bf16", "i8mm"),
)
PACKAGED = Path(__file__).parent.parent / "data" / "products.json"
WORDS: Mapping[Kernel, str] = {
    "loops": "loops",
    "tiles": "PyTorch over tiles that are converted before",
    "native": "PyTorch",
}


@dataclass(frozen=True, slots=True)
class Products:
    """compiled: by our loops, for few rows at least, or else by PyTorch. kernels: by the dtype of
    a weight; without, PyTorch converts what it must. table: the name of what they come from;
    ignored: why this machine's own does not count, though there is one."""

    compiled: bool
    reason: str
    kernels: Mapping[Dtype, Kernels] = field(default_factory=dict)
    table: str = "PyTorch"
    ignored: str = ""

    def __str__(self) -> str:
        why = f"{self.reason}; {self.ignored}" if self.ignored else self.reason
        return f"{'compiled loops' if self.compiled else 'PyTorch'} ({why})"


@dataclass(frozen=True, slots=True)
class Cpu:
    """What a table is measured on: the CPU as the kernel calls it, and its features that count.
    Virtual machines give one name to CPUs that differ."""

    name: str
    features: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} with {', '.join(self.features) or 'no feature that counts'}"


@dataclass(frozen=True, slots=True)
class Row:
    """Kernels for weights of one dtype and arithmetic in one, "any" for all others, on CPUs with
    one of these features, or on all where none is named."""

    cpu: frozenset[str]
    stored: str
    compute: str
    kernels: Kernels

    def fits(self, stored: Dtype, compute: Dtype, features: frozenset[str]) -> bool:
        return (
            self.stored in (stored, "any")
            and self.compute in (compute, "any")
            and (not self.cpu or bool(self.cpu & features))
        )


@dataclass(frozen=True, slots=True)
class Table:
    """Rows, of which the first that fits counts. name: says where it is from, and what it holds.

    measured: when and how, in words; cpu: on which, None for a table that is for all; ignored:
    why this machine's own table does not count instead of this one, though there is one.
    """

    name: str
    rows: tuple[Row, ...]
    measured: str = ""
    cpu: Cpu | None = None
    ignored: str = ""

    def kernels(self, stored: Dtype, compute: Dtype, features: frozenset[str]) -> Kernels:
        return next(row.kernels for row in self.rows if row.fits(stored, compute, features))


PYTORCH = Products(False, "as nothing is known")


def choose_products(
    stored: Dtype,
    compute: Dtype,
    device: str,
    *,
    table: Table | None = None,
    features: frozenset[str] | None = None,
) -> Products:
    """Choose kernels for a model that is stored and computed so; `table`, `features` = None take
    this machine's.

    Raises:
        VlmrunError: this machine's own table is damaged.
    """
    if device != "cpu":
        return Products(False, "a GPU has its own")
    table = read_table() if table is None else table
    features = cpu_features() if features is None else features
    kernels = {each: table.kernels(each, compute, features) for each in Dtype}
    if all(kernel == "native" for _, kernel in kernels[stored]):
        measured = "" if stored is Dtype.float32 else f"; {table.name}"
        words = f"{stored} is computed as it is stored{measured}"
        return Products(False, words, table=table.name, ignored=table.ignored)
    if find_spec("numba") is None:
        return Products(False, "numba is not installed")
    compiled = any(kernel == "loops" for _, kernel in kernels[stored])
    words = described(kernels[stored], table)
    return Products(compiled, words, kernels, table.name, table.ignored)


def described(kernels: Kernels, table: Table) -> str:
    """Which kernel serves how many rows, and by which table."""
    *few, (_, last) = kernels
    said = [f"{WORDS[kernel]} for up to {most} rows" for most, kernel in few] + [WORDS[last]]
    alone = not few and last == "loops"
    words = "a number is widened where it is used" if alone else ", then ".join(said)
    return f"{words}; {table.name}"


def tuned_path() -> Path:
    """Where a table that was measured on this machine lies."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return Path(os.path.expanduser(caches)) / "vlmrun" / "products.json"


def read_table() -> Table:
    """The table of this machine where there is one, else the packaged one. Home directories are
    shared between machines: one that was measured on another CPU does not count.

    Raises:
        VlmrunError: it is damaged.
    """
    path = tuned_path()
    if path.exists() and not path.is_file():  # a pipe would be waited for
        return replace(packaged_table(), ignored=f"{path} is no file")
    try:
        own = table_of(path.read_bytes(), path, "tuned")
    except (FileNotFoundError, NotADirectoryError):
        return packaged_table()
    except OSError as error:
        return replace(packaged_table(), ignored=f"{path} cannot be read: {error.strerror}")
    if own.cpu is None or own.cpu == (here := this_cpu()):
        return own
    other = own.cpu if own.cpu.name == here.name else own.cpu.name
    return replace(packaged_table(), ignored=f"{path} was measured on another CPU, {other}")


def packaged_table() -> Table:
    return table_of(PACKAGED.read_bytes(), PACKAGED, "packaged")


def table_of(raw: bytes, path: Path, origin: str) -> Table:
    """A table as its file spells it; two that hold the same rows have one name.

    Raises:
        VlmrunError: it is damaged.
    """
    try:
        fields = json.loads(raw)
        rows = tuple(row_of(entry) for entry in fields["rows"])
        if rows[-1] != replace(rows[-1], cpu=frozenset(), stored="any", compute="any"):
            raise ValueError("the last row is not for all that is left")
        on = fields.get("machine")
        cpu = None if on is None else Cpu(str(on["cpu"]), tuple(map(str, on["features"])))
        measured = str(fields.get("measured", ""))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise VlmrunError(
            f"{path} is no table of kernels: {type(error).__name__}: {error}", "delete it"
        ) from error
    spelled = json.dumps([entry_of(row) for row in rows], sort_keys=True)
    digest = hashlib.sha256(spelled.encode()).hexdigest()[:8]
    return Table(f"{origin} table {digest}", rows, measured, cpu)


def this_cpu() -> Cpu:
    found = cpu_features()
    return Cpu(cpu_name(), tuple(name for name in FEATURES if name in found))


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the kernel calls it, else what kind of processor it is."""
    try:
        match = re.search(r"^model name\s*:\s*(.*\S)", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.machine()


def entry_of(row: Row) -> dict[str, object]:
    """A row as a file spells it."""
    kernels = [[most, kernel] for most, kernel in row.kernels]
    return {
        "cpu": sorted(row.cpu),
        "stored": str(row.stored),
        "compute": str(row.compute),
        "kernels": kernels,
    }


def row_of(entry: Mapping[str, Any]) -> Row:
    """A row as the file spells it.

    Raises:
        ValueError, LookupError, TypeError: it does not say one kernel for every number of rows.
    """
    row = Row(
        frozenset(entry["cpu"]),
        entry["stored"],
        entry["compute"],
        tuple((most, kernel) for most, kernel in entry["kernels"]),
    )
    bounds = [math.inf if most is None else most for most, _ in row.kernels]
    names = {kernel for _, kernel in row.kernels}
    ordered = bounds == sorted(set(bounds)) and bounds[0] >= 1 and bounds[-1] == math.inf
    if not ordered or not names <= WORDS.keys():
        raise ValueError(f"kernels {entry['kernels']}")
    known = {*Dtype, "any"}
    if not isinstance(entry["cpu"], list) or row.stored not in known or row.compute not in known:
        raise ValueError(f"a row for {entry['cpu']}, {row.stored} in {row.compute}")
    if "native" in names and (row.stored != row.compute or row.stored == "any"):
        raise ValueError(f"PyTorch has no product of {row.stored} in {row.compute}")
    return row
