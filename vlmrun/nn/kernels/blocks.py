"""Blocks of a matrix product over stored weights, compiled by numba.

A block is R rows of the weight by C rows of the input, with a sum in a register for each pair:
every number that is read is used C or R times, and a stored one is widened once. Written out,
because the compiler keeps plain variables in registers and caches functions with a source only.
x: [M, K] float32; w: [N, K] as stored; out: [M, N] float32; m, n: where the block begins.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit, types
from numba.extending import overload

FAST = {"reassoc", "contract", "nsz"}  # sums in any order; what is not finite stays so
Function = TypeVar("Function", bound=Callable[..., Any])


def inner(function: Function) -> Function:
    """Compile what compiled code alone calls: nothing is made for Python, and nothing is raised."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
    compiled: Function = njit(fastmath=FAST, **options)(function)  # type: ignore[call-overload]
    return compiled


def inlined(function: Function) -> Function:
    """The same, written into whatever calls it: cheaper to compile where that is one place."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
    compiled: Function = njit(inline="always", **options)(function)  # type: ignore[call-overload]
    return compiled


def widened(stored: Any) -> Any:
    """One stored number as float32. bfloat16 comes as the bits of an unsigned number, float16
    as those of a signed one."""
    raise NotImplementedError("compiled code only")


@overload(widened)
def _widened(stored: Any) -> Any:
    if stored == types.uint16:
        return _of_bfloat16
    if stored == types.int16:
        return _of_float16
    return _of_number


def _of_bfloat16(stored: Any) -> Any:
    return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)


def _of_number(stored: Any) -> Any:
    return np.float32(stored)


def _of_float16(stored: Any) -> Any:
    """Its exponent is moved by a product, which subnormal numbers need; what is not finite keeps
    the highest exponent there is."""
    bits = np.uint32(stored) & np.uint32(0xFFFF)
    size = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    wide = np.float32(size.view(np.float32) * np.float32(2.0**112)).view(np.uint32)
    wide = wide | np.uint32(0x7F800000) if size >= np.uint32(0x0F800000) else wide
    return np.uint32(wide | ((bits & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


@inner
def block_1x1(x: Any, w: Any, out: Any, m: int, n: int) -> None:
    w0 = w[n]
    x0 = x[m]
    s00 = np.float32(0)
    for k in range(w0.shape[0]):
        v0 = widened(w0[k])
        u = x0[k]
        s00 += v0 * u
    out[m, n] = s00


@inner
def block_1x2(x: Any, w: Any, out: Any, m: int, n: int) -> None:
    w0 = w[n]
    x0, x1 = x[m], x[m + 1]
    s00 = s01 = np.float32(0)
    for k in range(w0.shape[0]):
        v0 = widened(w0[k])
        s00 += v0 * x0[k]
        s01 += v0 * x1[k]
    out[m, n], out[m + 1, n] = s00, s01


@inner
def block_1x4(x: Any, w: Any, out: Any, m: int, n: int) -> None:
    w0 = w[n]
    x0, x1, x2, x3 = x[m], x[m + 1], x[m + 2], x[m + 3]
    s00 = s01 = s02 = s03 = np.float32(0)
    for k in range(w0.shape[0]):
        v0 = widened(w0[k])
        s00 += v0 * x0[k]
        s01 += v0 * x1[k]
        s02 += v0 * x2[k]
        s03 += v0 * x3[k]
    out[m, n], out[m + 1, n], out[m + 2, n], out[m + 3, n] = s00, s01, s02, s03


@inner
def block_4x2(x: Any, w: Any, out: Any, m: int, n: int) -> None:
    w0, w1, w2, w3 = w[n], w[n + 1], w[n + 2], w[n + 3]
    x0, x1 = x[m], x[m + 1]
    s00 = s01 = np.float32(0)
    s10 = s11 = np.float32(0)
    s20 = s21 = np.float32(0)
    s30 = s31 = np.float32(0)
    for k in range(w0.shape[0]):
        v0 = widened(w0[k])
        v1 = widened(w1[k])
        v2 = widened(w2[k])
        v3 = widened(w3[k])
        u = x0[k]
        s00 += v0 * u
        s10 += v1 * u
        s20 += v2 * u
        s30 += v3 * u
        u = x1[k]
        s01 += v0 * u
        s11 += v1 * u
        s21 += v2 * u
        s31 += v3 * u
    out[m, n], out[m, n + 1], out[m, n + 2], out[m, n + 3] = s00, s10, s20, s30
    out[m + 1, n], out[m + 1, n + 1], out[m + 1, n + 2], out[m + 1, n + 3] = s01, s11, s21, s31


@inner
def block_3x4(x: Any, w: Any, out: Any, m: int, n: int) -> None:
    w0, w1, w2 = w[n], w[n + 1], w[n + 2]
    x0, x1, x2, x3 = x[m], x[m + 1], x[m + 2], x[m + 3]
    s00 = s01 = s02 = s03 = np.float32(0)
    s10 = s11 = s12 = s13 = np.float32(0)
    s20 = s21 = s22 = s23 = np.float32(0)
    for k in range(w0.shape[0]):
        v0 = widened(w0[k])
        v1 = widened(w1[k])
        v2 = widened(w2[k])
        u = x0[k]
        s00 += v0 * u
        s10 += v1 * u
        s20 += v2 * u
        u = x1[k]
        s01 += v0 * u
        s11 += v1 * u
        s21 += v2 * u
        u = x2[k]
        s02 += v0 * u
        s12 += v1 * u
        s22 += v2 * u
        u = x3[k]
        s03 += v0 * u
        s13 += v1 * u
        s23 += v2 * u
    out[m, n], out[m, n + 1], out[m, n + 2] = s00, s10, s20
    out[m + 1, n], out[m + 1, n + 1], out[m + 1, n + 2] = s01, s11, s21
    out[m + 2, n], out[m + 2, n + 1], out[m + 2, n + 2] = s02, s12, s22
    out[m + 3, n], out[m + 3, n + 1], out[m + 3, n + 2] = s03, s13, s23


@inner
def block_4x4(x: Any, w: Any, out: Any, m: int, n: int) -> None:
    w0, w1, w2, w3 = w[n], w[n + 1], w[n + 2], w[n + 3]
    x0, x1, x2, x3 = x[m], x[m + 1], x[m + 2], x[m + 3]
    s00 = s01 = s02 = s03 = np.float32(0)
    s10 = s11 = s12 = s13 = np.float32(0)
    s20 = s21 = s22 = s23 = np.float32(0)
    s30 = s31 = s32 = s33 = np.float32(0)
    for k in range(w0.shape[0]):
        v0 = widened(w0[k])
        v1 = widened(w1[k])
        v2 = widened(w2[k])
        v3 = widened(w3[k])
        u = x0[k]
        s00 += v0 * u
        s10 += v1 * u
        s20 += v2 * u
        s30 += v3 * u
        u = x1[k]
        s01 += v0 * u
        s11 += v1 * u
        s21 += v2 * u
        s31 += v3 * u
        u = x2[k]
        s02 += v0 * u
        s12 += v1 * u
        s22 += v2 * u
        s32 += v3 * u
        u = x3[k]
        s03 += v0 * u
        s13 += v1 * u
        s23 += v2 * u
        s33 += v3 * u
    out[m, n], out[m, n + 1], out[m, n + 2], out[m, n + 3] = s00, s10, s20, s30
    out[m + 1, n], out[m + 1, n + 1], out[m + 1, n + 2], out[m + 1, n + 3] = s01, s11, s21, s31
    out[m + 2, n], out[m + 2, n + 1], out[m + 2, n + 2], out[m + 2, n + 3] = s02, s12, s22, s32
    out[m + 3, n], out[m + 3, n + 1], out[m + 3, n + 2], out[m + 3, n + 3] = s03, s13, s23, s33


@inner
def block_4x6(x: Any, w: Any, out: Any, m: int, n: int) -> None:
    w0, w1, w2, w3 = w[n], w[n + 1], w[n + 2], w[n + 3]
    x0, x1, x2, x3, x4, x5 = x[m], x[m + 1], x[m + 2], x[m + 3], x[m + 4], x[m + 5]
    s00 = s01 = s02 = s03 = s04 = s05 = np.float32(0)
    s10 = s11 = s12 = s13 = s14 = s15 = np.float32(0)
    s20 = s21 = s22 = s23 = s24 = s25 = np.float32(0)
    s30 = s31 = s32 = s33 = s34 = s35 = np.float32(0)
    for k in range(w0.shape[0]):
        v0 = widened(w0[k])
        v1 = widened(w1[k])
        v2 = widened(w2[k])
        v3 = widened(w3[k])
        u = x0[k]
        s00 += v0 * u
        s10 += v1 * u
        s20 += v2 * u
        s30 += v3 * u
        u = x1[k]
        s01 += v0 * u
        s11 += v1 * u
        s21 += v2 * u
        s31 += v3 * u
        u = x2[k]
        s02 += v0 * u
        s12 += v1 * u
        s22 += v2 * u
        s32 += v3 * u
        u = x3[k]
        s03 += v0 * u
        s13 += v1 * u
        s23 += v2 * u
        s33 += v3 * u
        u = x4[k]
        s04 += v0 * u
        s14 += v1 * u
        s24 += v2 * u
        s34 += v3 * u
        u = x5[k]
        s05 += v0 * u
        s15 += v1 * u
        s25 += v2 * u
        s35 += v3 * u
    out[m, n], out[m, n + 1], out[m, n + 2], out[m, n + 3] = s00, s10, s20, s30
    out[m + 1, n], out[m + 1, n + 1], out[m + 1, n + 2], out[m + 1, n + 3] = s01, s11, s21, s31
    out[m + 2, n], out[m + 2, n + 1], out[m + 2, n + 2], out[m + 2, n + 3] = s02, s12, s22, s32
    out[m + 3, n], out[m + 3, n + 1], out[m + 3, n + 2], out[m + 3, n + 3] = s03, s13, s23, s33
    out[m + 4, n], out[m + 4, n + 1], out[m + 4, n + 2], out[m + 4, n + 3] = s04, s14, s24, s34
    out[m + 5, n], out[m + 5, n + 1], out[m + 5, n + 2], out[m + 5, n + 3] = s05, s15, s25, s35
