"""How matrix products with stored weights are computed: by a table of what was measured to be
fastest, so that results do not change from run to run. Decided before numba is imported."""

import hashlib
import json
import math
import os
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

PACKAGED = Path(__file__).parent.parent / "data" / "products.json"
WORDS: Mapping[Kernel, str] = {
    "loops": "loops",
    "tiles": "PyTorch over tiles that are converted before",
    "native": "PyTorch",
}


@dataclass(frozen=True, slots=True)
class Products:
    """compiled: by our loops, for few rows at least, or else by PyTorch. kernels: by the dtype of
    a weight; without, PyTorch converts what it must. table: the name of what they come from."""

    compiled: bool
    reason: str
    kernels: Mapping[Dtype, Kernels] = field(default_factory=dict)
    table: str = "PyTorch"

    def __str__(self) -> str:
        return f"{'compiled loops' if self.compiled else 'PyTorch'} ({self.reason})"


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
    """Rows, of which the first that fits counts. name: says where it is from, and which it is."""

    name: str
    rows: tuple[Row, ...]

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
        return Products(False, f"{stored} is computed as it is stored", table=table.name)
    if find_spec("numba") is None:
        return Products(False, "numba is not installed")
    compiled = any(kernel == "loops" for _, kernel in kernels[stored])
    return Products(compiled, described(kernels[stored], table), kernels, table.name)


def described(kernels: Kernels, table: Table) -> str:
    """Which kernel serves how many rows, and by which table."""
    *few, (_, last) = kernels
    said = [f"{WORDS[kernel]} for up to {most} rows" for most, kernel in few] + [WORDS[last]]
    alone = not few and last == "loops"
    words = "a number is widened where it is used" if alone else ", then ".join(said)
    return f"{words}; {table.name}"


def tuned_path() -> Path:
    """Where a table that was measured on this machine lies."""
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(caches) / "vlmrun" / "products.json"


def read_table() -> Table:
    """The table of this machine where there is one, else the packaged one.

    Raises:
        VlmrunError: it is damaged.
    """
    path = tuned_path()
    try:
        raw, origin = path.read_bytes(), "tuned"
    except OSError:
        path, raw, origin = PACKAGED, PACKAGED.read_bytes(), "packaged"
    try:
        rows = tuple(row_of(entry) for entry in json.loads(raw)["rows"])
        if rows[-1] != replace(rows[-1], cpu=frozenset(), stored="any", compute="any"):
            raise ValueError("the last row is not for all that is left")
    except (ValueError, LookupError, TypeError) as error:
        raise VlmrunError(
            f"{path} is no table of kernels: {type(error).__name__}: {error}", "delete it"
        ) from error
    return Table(f"{origin} table {hashlib.sha256(raw).hexdigest()[:8]}", rows)


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
    if bounds[-1] != math.inf or bounds != sorted(set(bounds)) or not names <= WORDS.keys():
        raise ValueError(f"kernels {entry['kernels']}")
    if "native" in names and row.stored != row.compute:
        raise ValueError(f"PyTorch has no product of {row.stored} in {row.compute}")
    return row
