"""What `vlmrun models` shows: tables and JSON."""

from collections.abc import Iterable
from dataclasses import asdict

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vlmrun.memory.needs import Needs, needs_of
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.listed import Listed

NEEDS = ("RAM\nall", "RAM\nleast", "VRAM\nall", "VRAM\nleast", "RAM with\na GPU")
CACHED = {
    "whole": "whole in the hub cache",
    "partly": "partly in the hub cache",
    "no": "not in the hub cache",
    "packaged": "packaged with vlmrun",
}
COLUMNS = "size: of the weights as they are stored. cached: how much is on this machine."
NOTES = (
    "GiB. all: one picture, with every weight it takes kept in that memory.",
    "least: the same, with the weights read from disk whenever they run.",
    "vlmrun mem-plan -m NAME plans a job.",
)
MORE = "vlmrun models NAME tells every dtype."
WITH_GPU = "RAM with a GPU: what stays in RAM while all weights are kept in VRAM."


def listing(models: Iterable[Listed]) -> Group:
    """One line per model, at the dtype it is stored in; 80 columns."""
    table = make_table("model", "task", "dtype", "cached", sizes=("\nsize", *NEEDS[:4]))
    for each in models:
        cached = "whole" if each.cached == "packaged" else each.cached
        sizes = (each.nbytes, *figures(needs_of(each.model, each.dtype))[:4])
        words = (each.name, each.model.family.task, str(each.dtype), cached)
        table.add_row(*words, *map(gibibytes, sizes))
    return Group(table, Text(""), *map(Text, (COLUMNS, *NOTES, MORE)))


def details(models: Iterable[Listed]) -> Group:
    """What each model is, and what it needs at every dtype."""
    parts: list[RenderableType] = []
    for each in models:
        family, repo_id = each.model.family, each.model.source.repo_id
        for line in (
            f"{each.name}: {', '.join(filter(None, (repo_id, CACHED[each.cached])))}",
            f"{family.name}, for vlmrun {family.task}",
            f"{each.parameters / 1e6:,.1f} million parameters, "
            f"{gibibytes(each.nbytes)} GiB stored as {each.dtype}",
            "",
        ):
            parts.append(Text(line))
        table = make_table("dtype", sizes=NEEDS)
        for dtype in Dtype:
            table.add_row(str(dtype), *map(gibibytes, figures(needs_of(each.model, dtype))))
        parts += [table, Text("")]
    return Group(*parts, *map(Text, (*NOTES, WITH_GPU)))


def figures(needs: Needs) -> tuple[int, ...]:
    """What stands under NEEDS."""
    return (
        needs.ram_bytes,
        needs.smallest_ram_bytes,
        needs.vram_bytes,
        needs.smallest_vram_bytes,
        needs.gpu_ram_bytes,
    )


def make_table(*words: str, sizes: Iterable[str]) -> Table:
    """A table of columns of words, then of sizes."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in words:
        table.add_column(f"\n{head}", overflow="fold")
    for head in sizes:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def gibibytes(nbytes: int) -> str:
    """A size in four characters: `0.53`, `1.36`, `25.8`, `136`."""
    size = nbytes / (1 << 30)
    return f"{size:.{2 if size < 10 else 1 if size < 100 else 0}f}"


def listed_fields(listed: Listed) -> dict[str, object]:
    """One model as JSON (version 1), with its needs at every dtype."""
    return {
        "v": 1,
        "model": listed.name,
        "repo_id": listed.model.source.repo_id,
        "family": listed.model.family.name,
        "task": listed.model.family.task,
        "parameters": listed.parameters,
        "dtype": str(listed.dtype),
        "bytes": listed.nbytes,
        "cached": listed.cached,
        "needs": {str(dtype): asdict(needs_of(listed.model, dtype)) for dtype in Dtype},
    }
