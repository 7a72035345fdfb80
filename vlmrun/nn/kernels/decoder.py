"""One block of a decoder for one new token of every row, as a single compiled call.

Between two products there is little to compute and much to start, so what lies between is part
of the call. All of it is float32; weights, and keys and values, are widened where they are used.
Which thread computes what changes no bit.
"""

import math
from typing import Any

import numpy as np
from numba import cfunc

from vlmrun.nn.kernels.attention import narrowed, rotate, scores, softmax, weighted
from vlmrun.nn.kernels.blocks import (
    FAST,
    block_1x1,
    block_1x2,
    block_1x4,
    block_4x2,
    block_4x4,
    inlined,
    inner,
    widened,
)
from vlmrun.nn.kernels.claims import LINE, claim, finish, placed, source_digest, task_size, wait
from vlmrun.nn.kernels.elementwise import gelu_share, logistic, plus, times
from vlmrun.nn.kernels.products import SHORT, WIDE

STAGES = 6
STRETCH = 64  # keys
CELLS = 2 * LINE * STAGES
# what a call is told, by place: sizes and addresses
ROWS, WIDTH, HEAD, GROUPS, CAPACITY, LENGTH, WINDOW, PARTS, GELU, THREADS = range(10)
X, RESULT, COS, SIN, KEYS, VALUES, STARTS, SCRATCH, FACTORS = range(10, 19)
BEFORE, AFTER, SECOND, LAST = range(19, 23)  # norms; 0 for none
# of each: rows, weight, scale, bias; 0 for none
QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN = range(23, 51, 4)
NUMBERS = 51
EPS, OFFSET, SCALING, CAP = range(4)  # factors


@inner
def norm(x: Any, weight: Any, eps: Any, offset: Any, out: Any) -> None:
    """Root-mean-square norm of every row [B, D]; `offset` is added to the weight."""
    for m in range(x.shape[0]):
        squares = np.float32(0)
        for k in range(x.shape[1]):
            squares += x[m, k] * x[m, k]
        scale = np.float32(1) / np.float32(math.sqrt(squares / np.float32(x.shape[1]) + eps))
        for k in range(x.shape[1]):
            out[m, k] = x[m, k] * scale * (widened(weight[k]) + offset)


@inner
def multiply(
    x: Any, linear: Any, stored: Any, vector: Any, several: Any, task: int, out: Any
) -> None:
    """The columns of out [B, N] that are a task's: rows of a weight by all rows of x."""
    count, size, at, scale_at, bias_at = linear
    weight = placed(at, (count, x.shape[1]), stored)
    start, stop = size * task, min(size * (task + 1), count)
    if several is None:
        for n in range(start, stop):
            block_1x1(x, weight, out, 0, n)
    else:
        span(x, weight, start, stop, out)
    for m in range(out.shape[0]):
        row = out[m, start:stop]
        if scale_at:
            times(row, placed(scale_at, (count,), np.float32)[start:stop])
        if bias_at:
            plus(row, placed(bias_at, (count,), vector)[start:stop])


@inner
def span(x: Any, weight: Any, start: int, stop: int, out: Any) -> None:
    """Several rows of x by some rows of a weight: short ones one at a time, which reads memory in
    one stream, long ones in blocks, which read x less often."""
    rows = x.shape[0]
    short, few = weight.shape[1] <= SHORT, rows < 4
    for n in range(start, stop, 1 if short else 4):
        for m in range(0, rows, 2 if few or not (short or WIDE) else 4):
            if short and few:
                block_1x2(x, weight, out, min(m, rows - 2), n)
            elif short:
                block_1x4(x, weight, out, min(m, rows - 4), n)
            elif few or not WIDE:
                block_4x2(x, weight, out, min(m, rows - 2), n)
            else:
                block_4x4(x, weight, out, min(m, rows - 4), n)


@inner
def shut(g: Any, u: Any, gelu: int) -> None:
    """silu(g) * u, or gelu(g) * u in its tanh form, in place of g."""
    for n in range(g.shape[0]):
        x = g[n]
        g[n] = x * (gelu_share(x) if gelu else logistic(x)) * u[n]


@inlined
def attend(job: Any, factors: Any, cached: Any, task: int, qkv: Any, out: Any) -> None:
    """What a task's heads of one row see: turn and store the new key, then attend to all."""
    q, k, v = qkv
    groups, width, length, parts = job[GROUPS], job[HEAD], job[LENGTH], job[PARTS]
    row, part = task // (groups * parts), task % (groups * parts)
    group, share = part // parts, q.shape[1] // (groups * parts)
    base = (row * groups + group) * job[CAPACITY]
    shape = (job[ROWS] * groups * job[CAPACITY], width)
    keys, values = placed(job[KEYS], shape, cached), placed(job[VALUES], shape, cached)
    cos, sin = (
        placed(job[COS], (job[ROWS], width), np.float32),
        placed(job[SIN], (job[ROWS], width), np.float32),
    )
    turned = np.empty((share // width, width), np.float32)
    rotate(k, row, group * width, cos, sin, np.float32(1), turned[0])
    for d in range(width):
        keys[base + length, d] = narrowed(turned[0, d], keys[base + length, d])
        values[base + length, d] = narrowed(v[row, group * width + d], values[base + length, d])
    start = placed(job[STARTS], (job[ROWS],), np.int64)[row]
    first, stop = max(start, length + 1 - job[WINDOW]), length + 1
    for h in range(share // width):
        rotate(q, row, part * share + h * width, cos, sin, factors[SCALING], turned[h])
    see(turned, (keys, values), base, first, stop, factors[CAP], out[row, part * share :])


@inner
def see(heads: Any, cached: Any, base: int, first: int, stop: int, cap: Any, out: Any) -> None:
    """What heads [H, D] see of the keys and values from first to stop behind a base: a stretch of
    them at a time, which stays in the core's first cache while all heads look at it."""
    keys, values = cached
    count, width = heads.shape
    s = np.empty((count, stop), np.float32)
    totals = np.empty(count, np.float32)
    for t in range(first, stop, STRETCH):
        for h in range(count):
            scores(heads[h], keys, base, t, min(t + STRETCH, stop), s[h])
    for h in range(count):
        totals[h] = softmax(s[h, first:stop], cap)
    out[: count * width] = np.float32(0)
    for t in range(first, stop, STRETCH):
        for h in range(count):
            part = out[h * width : (h + 1) * width]
            weighted(s[h], values, base, t, min(t + STRETCH, stop), part)
    for h in range(count):
        for d in range(width):
            out[h * width + d] /= totals[h]


@inlined
def linear_of(job: Any, first: int) -> Any:
    """Rows of a weight, rows that a thread takes at a time, and the addresses of its parts."""
    size = task_size(job[first], job[THREADS])
    return job[first], size, job[first + 1], job[first + 2], job[first + 3]


@inlined
def tasks_of(linear: Any) -> Any:
    return (linear[0] + linear[1] - 1) // linear[1]


@inlined
def project(
    cells: Any, job: Any, stored: Any, vector: Any, several: Any, x: Any, outs: Any
) -> None:
    """Queries, keys and values of every row."""
    q, k, v = outs
    query, key, value = linear_of(job, QUERY), linear_of(job, KEY), linear_of(job, VALUE)
    first, second = tasks_of(query), tasks_of(key)
    task = claim(cells, 0)
    while task < first + 2 * second:
        if task < first:
            multiply(x, query, stored, vector, several, task, q)
        elif task < first + second:
            multiply(x, key, stored, vector, several, task - first, k)
        else:
            multiply(x, value, stored, vector, several, task - first - second, v)
        finish(cells, 0)
        task = claim(cells, 0)
    wait(cells, 0, first + 2 * second)


@inlined
def look(cells: Any, job: Any, factors: Any, cached: Any, qkv: Any, out: Any) -> None:
    """Attention of every row's heads."""
    tasks = job[ROWS] * job[GROUPS] * job[PARTS]
    task = claim(cells, 1)
    while task < tasks:
        attend(job, factors, cached, task, qkv, out)
        finish(cells, 1)
        task = claim(cells, 1)
    wait(cells, 1, tasks)


@inlined
def open_gate(
    cells: Any, job: Any, stored: Any, vector: Any, several: Any, x: Any, outs: Any
) -> None:
    """One input through a layer and its gate."""
    g, u = outs
    gate, up = linear_of(job, GATE), linear_of(job, UP)
    tasks, size = tasks_of(gate), gate[1]
    task = claim(cells, 3)
    while task < tasks:
        multiply(x, gate, stored, vector, several, task, g)
        multiply(x, up, stored, vector, several, task, u)
        start, stop = size * task, min(size * (task + 1), g.shape[1])
        for m in range(g.shape[0]):
            shut(g[m, start:stop], u[m, start:stop], job[GELU])
        finish(cells, 3)
        task = claim(cells, 3)
    wait(cells, 3, tasks)


@inlined
def pass_on(
    cells: Any, stage: int, linear: Any, stored: Any, vector: Any, several: Any, x: Any, out: Any
) -> None:
    """One input through one layer."""
    tasks = tasks_of(linear)
    task = claim(cells, stage)
    while task < tasks:
        multiply(x, linear, stored, vector, several, task, out)
        finish(cells, stage)
        task = claim(cells, stage)
    wait(cells, stage, tasks)


@inlined
def add(job: Any, factors: Any, vector: Any, x: Any, y: Any, weight: int, out: Any) -> None:
    """x + y [B, D]; y is normed before where there is a weight for that."""
    if weight:
        norm(y, placed(weight, (job[WIDTH],), vector), factors[EPS], factors[OFFSET], out)
    for m in range(x.shape[0]):
        for k in range(x.shape[1]):
            out[m, k] = x[m, k] + (out[m, k] if weight else y[m, k])


@inlined
def work(
    cells: Any, job: Any, factors: Any, stored: Any, vector: Any, several: Any, cached: Any
) -> None:
    """All that one thread does for a block; norms are cheaper computed by each than waited for."""
    numbers, rows, width = np.float32, job[ROWS], job[WIDTH]
    x, out = placed(job[X], (rows, width), numbers), placed(job[RESULT], (rows, width), numbers)
    at = job[SCRATCH]
    q, at = placed(at, (rows, job[QUERY]), numbers), at + 4 * rows * job[QUERY]
    k, at = placed(at, (rows, job[KEY]), numbers), at + 4 * rows * job[KEY]
    v, at = placed(at, (rows, job[KEY]), numbers), at + 4 * rows * job[KEY]
    seen, at = placed(at, (rows, job[QUERY]), numbers), at + 4 * rows * job[QUERY]
    g, at = placed(at, (rows, job[GATE]), numbers), at + 4 * rows * job[GATE]
    u, at = placed(at, (rows, job[GATE]), numbers), at + 4 * rows * job[GATE]
    y, at = placed(at, (rows, width), numbers), at + 4 * rows * width
    z = placed(at, (rows, width), numbers)
    normed, mid = np.empty_like(x), np.empty_like(x)
    norm(x, placed(job[BEFORE], (width,), vector), factors[EPS], factors[OFFSET], normed)
    project(cells, job, stored, vector, several, normed, (q, k, v))
    look(cells, job, factors, cached, (q, k, v), seen)
    pass_on(cells, 2, linear_of(job, OUTPUT), stored, vector, several, seen, y)
    add(job, factors, vector, x, y, job[AFTER], mid)
    norm(mid, placed(job[SECOND], (width,), vector), factors[EPS], factors[OFFSET], normed)
    open_gate(cells, job, stored, vector, several, normed, (g, u))
    down = linear_of(job, DOWN)
    pass_on(cells, 4, down, stored, vector, several, g, z)
    if claim(cells, 5) == 0:
        add(job, factors, vector, mid, z, job[LAST], out)


def entry(stored: Any, vector: Any, cached: Any, several: bool, *, keep: bool = True) -> Any:
    """What `launch` calls for weights, biases and norms, and keys and values of these numbers,
    compiled, or read from the cache it is kept in."""
    many, source = True if several else None, source_digest()

    @cfunc("void(int64)", fastmath=FAST, error_model="numpy", cache=keep)
    def run(at: int) -> None:
        if source == 0:  # never: by this number, other code is kept apart
            return
        job = placed(at, (NUMBERS,), np.int64)
        cells = placed(at + 8 * NUMBERS, (CELLS,), np.int64)
        factors = placed(job[FACTORS], (4,), np.float32)
        work(cells, job, factors, stored, vector, many, cached)

    return run
