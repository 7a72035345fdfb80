"""Attention of one new position over keys and values that are stored, by compiled loops."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from vlmrun.nn.kernels.blocks import inlined, inner, widened
from vlmrun.nn.kernels.elementwise import exponential, logistic


@inner
def rotate(x: Any, row: int, at: int, cos: Any, sin: Any, scale: Any, out: Any) -> None:
    """Turn the halves of a head [D], which begins at a place of a row, against each other
    (Su et al. 2021, arXiv:2104.09864)."""
    half = out.shape[0] // 2
    for d in range(half):
        low, high = x[row, at + d], x[row, at + d + half]
        out[d] = (low * cos[row, d] - high * sin[row, d]) * scale
        out[d + half] = (high * cos[row, d + half] + low * sin[row, d + half]) * scale


def narrowed(number: Any, like: Any) -> Any:
    """A float32 as the number that is stored beside `like`."""
    raise NotImplementedError("compiled code only")


@overload(narrowed)
def _narrowed(number: Any, like: Any) -> Any:
    return _to_bfloat16 if like == types.uint16 else _as_it_is


def _to_bfloat16(number: Any, like: Any) -> Any:
    """Rounded to the nearest, to even where two are as near; what is no number stays none."""
    bits = np.float32(number).view(np.uint32)
    if number != number:
        return np.uint16((bits >> np.uint32(16)) | np.uint32(64))
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


def _as_it_is(number: Any, like: Any) -> Any:
    return number


@inlined
def scores(q: Any, keys: Any, base: int, first: int, stop: int, out: Any) -> None:
    """Products of a head [D] with the keys [D] from first to stop behind a base, by fours."""
    for t in range(first, stop - 3, 4):
        at = base + t
        k0, k1, k2, k3 = keys[at], keys[at + 1], keys[at + 2], keys[at + 3]
        s0 = s1 = s2 = s3 = np.float32(0)
        for d in range(q.shape[0]):
            u = q[d]
            s0 += u * widened(k0[d])
            s1 += u * widened(k1[d])
            s2 += u * widened(k2[d])
            s3 += u * widened(k3[d])
        out[t], out[t + 1], out[t + 2], out[t + 3] = s0, s1, s2, s3
    for t in range(stop - (stop - first) % 4, stop):
        k0 = keys[base + t]
        s0 = np.float32(0)
        for d in range(q.shape[0]):
            s0 += q[d] * widened(k0[d])
        out[t] = s0


@inlined
def softmax(out: Any, cap: Any) -> Any:
    """Scores [T] to weights, which are to be divided by what is returned. `cap`: Gemma 2's bound
    on scores; 0 for none."""
    if cap > 0:
        for t in range(out.shape[0]):  # tanh(x) = 2 * logistic(2 * x) - 1
            out[t] = cap * (np.float32(2) * logistic(np.float32(2) * out[t] / cap) - np.float32(1))
    top = out[0]
    for t in range(out.shape[0]):
        top = max(top, out[t])
    total = np.float32(0)
    for t in range(out.shape[0]):
        x = out[t] - top
        # too small to change a sum, and slow: a CPU takes longer for products of such numbers
        e = np.float32(0) if x < np.float32(-60) else exponential(x)
        out[t] = e
        total += e
    return total


@inlined
def weighted(s: Any, values: Any, base: int, first: int, stop: int, out: Any) -> None:
    """Add the values [D] from first to stop behind a base, each by its weight, to out [D]."""
    for t in range(first, stop - 3, 4):
        a, b, c, e, at = s[t], s[t + 1], s[t + 2], s[t + 3], base + t
        v0, v1, v2, v3 = values[at], values[at + 1], values[at + 2], values[at + 3]
        for d in range(out.shape[0]):
            one = a * widened(v0[d]) + b * widened(v1[d])
            out[d] += one + (c * widened(v2[d]) + e * widened(v3[d]))
    for t in range(stop - (stop - first) % 4, stop):
        a, v0 = s[t], values[base + t]
        for d in range(out.shape[0]):
            out[d] += a * widened(v0[d])
