"""Work shared by the threads of one compiled call, in stages.

A stage is a number of tasks. A thread claims the next one until none is left, then waits until
all are done. Whoever runs a task computes the same bits, a thread that the system holds up
delays one task only (and the end of the call, which OpenMP's threads reach together), and where
the system gives fewer threads than were asked for, those that are there do all of it.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, prange, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.core.types import ExternalFunction
from numba.extending import intrinsic

from vlmrun.nn.kernels.blocks import inner

LINE = 8  # numbers between two counters, so that each has a cache line of its own
SPINS = 1000  # looks at a counter before the core is offered to others: some microseconds

sched_yield = ExternalFunction("sched_yield", types.int32())


@cache
def source_digest() -> int:
    """A number that stands for the source of all compiled code: numba keeps what it compiled
    under the text of one file, and code of all of them is in it."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return int(digest.hexdigest()[:15], 16) + 1


@inner
def claim(cells: Any, stage: int) -> Any:
    """The number of the next task of a stage, which nobody else gets."""
    return add_one(cells, 2 * LINE * stage)


@inner
def finish(cells: Any, stage: int) -> None:
    """Count a task as done: what it wrote can be read by whoever sees the count."""
    add_one(cells, 2 * LINE * stage + LINE)


@inner
def task_size(rows: int, threads: int) -> Any:
    """Rows of a weight for a task: long stretches of memory are read faster, and short tasks
    leave no thread waiting at the end. Measured; a multiple of 4."""
    return max(32, min(512, rows // (4 * threads) // 4 * 4))


@inner
def wait(cells: Any, stage: int, tasks: int) -> None:
    """Return when all tasks of a stage are done."""
    spins = 0
    while load(cells, 2 * LINE * stage + LINE) < tasks:
        spins += 1
        if spins > SPINS:
            sched_yield()


@intrinsic
def _add_one(_: Any, cells: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw(
            "add", _pointer(context, builder, signature, args), one, "seq_cst"
        )

    return types.int64(cells, types.intp), generate


@intrinsic
def _load(_: Any, cells: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, args), "seq_cst", 8)

    return types.int64(cells, types.intp), generate


@intrinsic
def _address(_: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(number), generate


@inner
def placed(at: int, shape: Any, dtype: Any) -> Any:
    """The contiguous array at an address."""
    return carray(address(at), shape, dtype)


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    kind = signature.args[0]
    array = context.make_array(kind)(context, builder, args[0])
    find: Any = cgutils.get_item_pointer
    return find(context, builder, kind, array, [args[1]], wraparound=False)


@intrinsic
def _call(_: Any, function: Any, job: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(function, job), generate


# to the type checker these take what their makers take
add_one: Any = _add_one
load: Any = _load
address: Any = _address
call: Any = _call


@njit(parallel=True, nogil=True, cache=True)
def launch(threads: int, function: int, job: int) -> None:
    """Call a compiled function, by its address, in so many threads at once."""
    for _ in prange(threads):
        call(function, job)


def kept(compile_it: Callable[[bool], Any]) -> int:
    """The address of what is compiled and kept for other runs, or where it cannot be kept (a full
    disk, a damaged cache), of what is compiled for this one."""
    try:
        made = compile_it(True)
    except Exception:  # of whatever a cache raises
        made = compile_it(False)
    address: int = made.address
    return address
