"""The program inside a pickled weight file, followed without running it.

A pickle is a program. `pickle.Unpickler` runs it, and even one that may name nothing can be made
to take any memory or to overwrite what it is given. So the few instructions that a state dict of
tensors is written with are followed here; a program with any other is refused, and nothing it
names is ever imported or called.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from vlmrun.errors import CheckpointError

STORAGES = {  # storage class -> dtype as safetensors spells it, bytes per number
    "torch.DoubleStorage": ("F64", 8),
    "torch.FloatStorage": ("F32", 4),
    "torch.HalfStorage": ("F16", 2),
    "torch.BFloat16Storage": ("BF16", 2),
    "torch.LongStorage": ("I64", 8),
    "torch.IntStorage": ("I32", 4),
    "torch.ShortStorage": ("I16", 2),
    "torch.CharStorage": ("I8", 1),
    "torch.ByteStorage": ("U8", 1),
    "torch.BoolStorage": ("BOOL", 1),
    "torch.storage.UntypedStorage": ("U8", 1),
}
DICT = "collections.OrderedDict"
TENSOR = "torch._utils._rebuild_tensor_v2"
PARAMETER = "torch._utils._rebuild_parameter"
KNOWN = {DICT, TENSOR, PARAMETER, *STORAGES}
LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the program names, known by that name alone."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    kind: str
    key: str
    numbers: int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as the program describes it. Nothing is checked yet; offset and strides count
    numbers."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


class Interpreter:
    """Follows a pickle that describes a state dict. `name` is the file's, for errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # the stacks below each mark
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> object:
        """What the program leaves.

        Raises:
            CheckpointError: it holds an instruction, or names something, that no state dict
                needs.
            ValueError, LookupError, TypeError: it is damaged.
        """
        for op, argument, _ in pickletools.genops(program):
            if op.name == "STOP":
                return self.stack.pop()
            if op.name in LITERALS:
                self.stack.append(argument)
            elif op.name in STEPS:
                STEPS[op.name](self, argument)
            else:
                self.refuse(f"the instruction {op.name}")
        raise ValueError("its pickle has no end")

    def refuse(self, what: str) -> NoReturn:
        raise CheckpointError(
            f"{self.name} is refused: its pickle holds {what}, which plain weights do not need",
            "such a file can run code where it is loaded; get a safetensors version",
        )

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop_marked(self) -> list[Any]:
        """What was pushed since the last mark."""
        found, self.stack = self.stack, self.outer.pop()
        return found

    def pop_tuple(self, length: int) -> None:
        items = tuple(self.stack.pop() for _ in range(length))
        self.stack.append(items[::-1])

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def name_global(self, name: str) -> None:
        if name not in KNOWN:
            self.refuse(ascii(name)[1:-1][:100])
        self.stack.append(Global(name))

    def name_from_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("its pickle names something without a name")
        self.name_global(f"{module}.{name}")

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(target, dict) or not isinstance(key, str | int):
                raise ValueError("its pickle sets an item of what is no dict of names")
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("its pickle extends what is no list")
        self.stack[-1].extend(items)

    def set_state(self) -> None:
        """A state dict carries `_metadata`, versions of its modules: left out."""
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):
            self.refuse("a change to an object")

    def find_storage(self) -> None:
        kind, place = "", self.stack.pop()
        if isinstance(place, tuple) and len(place) == 5 and isinstance(place[1], Global):
            kind = place[1].name
        if kind not in STORAGES or place[0] != "storage" or not isinstance(place[2], str):
            raise ValueError("its pickle points to what is no storage")
        self.stack.append(Storage(kind, place[2], place[4]))

    def call(self) -> None:
        arguments, callee = self.stack.pop(), self.stack.pop()
        if not isinstance(callee, Global) or not isinstance(arguments, tuple):
            raise ValueError("its pickle calls what is no function")
        if callee.name == DICT and not arguments:
            self.stack.append({})
        elif callee.name == TENSOR and len(arguments) in (6, 7):
            if arguments[6:] not in ((), ({},), (None,)):  # such as conjugated or negated
                self.refuse("a tensor that is more than its numbers")
            self.stack.append(View(*arguments[:4]))
        elif callee.name == PARAMETER and len(arguments) == 3:
            self.stack.append(arguments[0])
        else:
            self.refuse(f"a call of {callee.name}")


STEPS: Mapping[str, Callable[[Interpreter, Any], object]] = {
    "PROTO": lambda machine, version: None,
    "FRAME": lambda machine, length: None,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": lambda machine, _: machine.pop_tuple(1),
    "TUPLE2": lambda machine, _: machine.pop_tuple(2),
    "TUPLE3": lambda machine, _: machine.pop_tuple(3),
    "MARK": lambda machine, _: machine.mark(),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_marked())),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_marked()),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_marked()),
    "BINPUT": lambda machine, at: machine.memo.__setitem__(at, machine.stack[-1]),
    "LONG_BINPUT": lambda machine, at: machine.memo.__setitem__(at, machine.stack[-1]),
    "MEMOIZE": lambda machine, _: machine.memo.__setitem__(len(machine.memo), machine.stack[-1]),
    "BINGET": lambda machine, at: machine.push(machine.memo[at]),
    "LONG_BINGET": lambda machine, at: machine.push(machine.memo[at]),
    "GLOBAL": lambda machine, name: machine.name_global(name.replace(" ", ".", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name_from_stack(),
    "BINPERSID": lambda machine, _: machine.find_storage(),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.set_state(),
}
