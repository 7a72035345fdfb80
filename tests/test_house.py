"""The house stands: imports go down, functions fit on a screen, the light half stays light."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from vlmrun import errors

ROOT = Path(__file__).parents[1]
FLOORS = (  # bottom first; rooms of one floor do not import each other
    {"errors"},
    {"models", "nn", "files", "job"},
    {"memory"},
    {"load", "tasks", "report"},
    {"run"},
    {"cli"},
    {"__main__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
FORBIDDEN = ("manager", "handler", "helper", "utils", "common", "misc")
KINDS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.VlmrunError)
}
ROWS = {"ImageError", "NotFinite"}  # become rows, except where a command raises them itself
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    file: Path
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The part after the package's name; empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]


def read_modules(package: Path) -> list[Module]:
    modules = []
    for file in sorted(package.rglob("*.py")):
        parts = [package.name, *file.relative_to(package).with_suffix("").parts]
        name = ".".join(part for part in parts if part != "__init__")
        modules.append(Module(name, file, file.read_text(), ast.parse(file.read_text())))
    return modules


def imported(module: Module, known: set[str]) -> set[str]:
    """Modules of the package that a module names, late and type-only imports included."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module)
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in known else base for name in names}
    return (found & known) - {module.name}


def absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    up = node.level - (module.file.name == "__init__.py")
    parts = module.name.split(".")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def import_graph(modules: list[Module]) -> dict[str, set[str]]:
    known = {module.name for module in modules}
    return {module.name: imported(module, known) for module in modules}


def climbing(modules: list[Module]) -> list[str]:
    rooms = {module.name: module.room for module in modules}
    return [
        f"{name} -> {other}"
        for name, others in import_graph(modules).items()
        for other in sorted(others)
        if rooms[other] and rooms[name] != rooms[other]
        if FLOOR_OF.get(rooms[name], -1) <= FLOOR_OF.get(rooms[other], -1)
    ]


def ring(modules: list[Module]) -> list[str]:
    try:
        graphlib.TopologicalSorter(import_graph(modules)).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def functions(modules: list[Module]) -> Iterator[tuple[str, Function]]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, Function):
                yield f"{module.name}:{node.lineno} {node.name}", node


def length(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Depth of blocks in blocks; an elif is as deep as its if, inner functions start anew."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        is_elif = isinstance(node, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, depth + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


def unannotated(function: Function) -> bool:
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    typed = all(
        argument.annotation or argument.arg in ("self", "cls") for argument in arguments if argument
    )
    return function.returns is None or not typed


def badly_named(modules: list[Module]) -> list[str]:
    names = [(module.name, module.name) for module in modules]
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, Function | ast.ClassDef):
                names.append((f"{module.name}:{node.lineno} {node.name}", node.name))
    return [where for where, name in names if any(word in name.lower() for word in FORBIDDEN)]


def unhinted(modules: list[Module]) -> list[str]:
    """Errors without a hint, and rows with one, which nobody would see."""
    return [
        f"{module.name}:{node.lineno} {node.func.id}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in KINDS
        if has_hint(node) == (node.func.id in ROWS and module.room != "cli")
    ]


def has_hint(error: ast.Call) -> bool:
    """Whether a second argument is given, no part of which is an empty text."""
    hints = [*error.args[1:], *(word.value for word in error.keywords)]
    parts = [part for hint in hints for part in ast.walk(hint)]
    return len(hints) == 1 and not any(isinstance(p, ast.Constant) and p.value == "" for p in parts)


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return read_modules(ROOT / "vlmrun")


def test_every_room_has_a_floor(modules: list[Module]) -> None:
    assert {module.room for module in modules if module.room} <= set(FLOOR_OF)


def test_imports_go_down(modules: list[Module]) -> None:
    assert climbing(modules) == []
    assert ring(modules) == []


def test_files_are_read_without_knowing_families(modules: list[Module]) -> None:
    """Checkpoints are the ground of their room: nothing in it asks what a model is."""
    inner = "vlmrun.models.checkpoints"
    for name, others in import_graph(modules).items():
        if name.startswith(inner):
            assert all(each.startswith((inner, "vlmrun.errors")) for each in others), name


def test_functions_fit_on_a_screen(modules: list[Module]) -> None:
    assert [where for where, function in functions(modules) if length(function) > 60] == []
    assert [where for where, function in functions(modules) if nesting(function) > 3] == []
    long_files = [module.name for module in modules if len(module.text.splitlines()) > 300]
    assert long_files == []


def test_everything_is_annotated_and_named(modules: list[Module]) -> None:
    assert [where for where, function in functions(modules) if unannotated(function)] == []
    assert badly_named(modules) == []


def test_errors_say_what_to_do(modules: list[Module]) -> None:
    assert unhinted(modules) == []


def test_the_rules_see_a_bad_house(tmp_path: Path) -> None:
    package = tmp_path / "vlmrun"
    for file, text in {
        "__init__.py": "",
        "models/__init__.py": "from . import misc",
        "models/misc.py": "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from .. import cli",
        "cli/__init__.py": "def deep(x):\n"
        " for a in x:\n  if a:\n   while a:\n    with a:\n     from vlmrun.models import misc",
        "errors.py": "raise UsageError('a')\nraise UsageError('a', 'b')\n"
        "raise OutputError('a', '')\nraise SourceError('a', hint='b' if x else '')\n"
        "raise ImageError('a')\nraise NotFinite('a', 'b')",
        "nn/__init__.py": "import vlmrun.models" + "\ndef long() -> None:\n" + " x = 1\n" * 60,
    }.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(text)
    bad = read_modules(package)
    assert climbing(bad) == ["vlmrun.models.misc -> vlmrun.cli", "vlmrun.nn -> vlmrun.models"]
    assert set(ring(bad)) == {"vlmrun.models.misc", "vlmrun.cli"}
    shapes = {
        function.name: (length(function), nesting(function), unannotated(function))
        for _, function in functions(bad)
    }
    assert shapes == {"deep": (6, 4, True), "long": (61, 0, False)}
    assert badly_named(bad) == ["vlmrun.models.misc"]
    assert unhinted(bad) == [
        "vlmrun.errors:1 UsageError",
        "vlmrun.errors:3 OutputError",
        "vlmrun.errors:4 SourceError",
        "vlmrun.errors:6 NotFinite",
    ]


@pytest.mark.parametrize("arguments", [["--help"], ["mem-plan", "-m", "demo"]])
def test_the_light_half_imports_no_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "vlmrun", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    names = {line.rsplit("|", 1)[1].strip() for line in lines}
    assert "vlmrun.cli" in names
    assert names.isdisjoint({"torch", "transformers"})
