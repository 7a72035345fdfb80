"""Blocks of a matrix product over stored weights, compiled by numba.

A block is R rows of the weight by C rows of the input, with a sum in a register for each pair:
every number that is read is used C or R times, and a stored one is widened once. Written out,
because the compiler keeps plain variables in registers and caches functions with a source only.
x: [M, K] float32; w: [N, K] as stored; out: [M, N] float32; m, n: where the block begins.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

FAST = {"reassoc", "contract", "nsz"}  # sums in any order; what is not finite stays so


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


@njit(fastmath=FAST)
def block_1x1(x: Any, w: Any, out: Any, m: int, n: int) -> None:
    w0 = w[n]
    x0 = x[m]
    s00 = np.float32(0)
    for k in range(w0.shape[0]):
        v0 = widened(w0[k])
        u0 = x0[k]
        s00 += v0 * u0
    out[m, n] = s00


@njit(fastmath=FAST)
def block_4x2(x: Any, w: Any, out: Any, m: int, n: int) -> None:
    w0 = w[n]
    w1 = w[n + 1]
    w2 = w[n + 2]
    w3 = w[n + 3]
    x0 = x[m]
    x1 = x[m + 1]
    s00 = s01 = np.float32(0)
    s10 = s11 = np.float32(0)
    s20 = s21 = np.float32(0)
    s30 = s31 = np.float32(0)
    for k in range(w0.shape[0]):
        v0 = widened(w0[k])
        v1 = widened(w1[k])
        v2 = widened(w2[k])
        v3 = widened(w3[k])
        u0 = x0[k]
        s00 += v0 * u0
        s10 += v1 * u0
        s20 += v2 * u0
        s30 += v3 * u0
        u1 = x1[k]
        s01 += v0 * u1
        s11 += v1 * u1
        s21 += v2 * u1
        s31 += v3 * u1
    out[m, n] = s00
    out[m, n + 1] = s10
    out[m, n + 2] = s20
    out[m, n + 3] = s30
    out[m + 1, n] = s01
    out[m + 1, n + 1] = s11
    out[m + 1, n + 2] = s21
    out[m + 1, n + 3] = s31


@njit(fastmath=FAST)
def block_3x4(x: Any, w: Any, out: Any, m: int, n: int) -> None:
    w0 = w[n]
    w1 = w[n + 1]
    w2 = w[n + 2]
    x0 = x[m]
    x1 = x[m + 1]
    x2 = x[m + 2]
    x3 = x[m + 3]
    s00 = s01 = s02 = s03 = np.float32(0)
    s10 = s11 = s12 = s13 = np.float32(0)
    s20 = s21 = s22 = s23 = np.float32(0)
    for k in range(w0.shape[0]):
        v0 = widened(w0[k])
        v1 = widened(w1[k])
        v2 = widened(w2[k])
        u0 = x0[k]
        s00 += v0 * u0
        s10 += v1 * u0
        s20 += v2 * u0
        u1 = x1[k]
        s01 += v0 * u1
        s11 += v1 * u1
        s21 += v2 * u1
        u2 = x2[k]
        s02 += v0 * u2
        s12 += v1 * u2
        s22 += v2 * u2
        u3 = x3[k]
        s03 += v0 * u3
        s13 += v1 * u3
        s23 += v2 * u3
    out[m, n] = s00
    out[m, n + 1] = s10
    out[m, n + 2] = s20
    out[m + 1, n] = s01
    out[m + 1, n + 1] = s11
    out[m + 1, n + 2] = s21
    out[m + 2, n] = s02
    out[m + 2, n + 1] = s12
    out[m + 2, n + 2] = s22
    out[m + 3, n] = s03
    out[m + 3, n + 1] = s13
    out[m + 3, n + 2] = s23


@njit(fastmath=FAST)
def block_4x4(x: Any, w: Any, out: Any, m: int, n: int) -> None:
    w0 = w[n]
    w1 = w[n + 1]
    w2 = w[n + 2]
    w3 = w[n + 3]
    x0 = x[m]
    x1 = x[m + 1]
    x2 = x[m + 2]
    x3 = x[m + 3]
    s00 = s01 = s02 = s03 = np.float32(0)
    s10 = s11 = s12 = s13 = np.float32(0)
    s20 = s21 = s22 = s23 = np.float32(0)
    s30 = s31 = s32 = s33 = np.float32(0)
    for k in range(w0.shape[0]):
        v0 = widened(w0[k])
        v1 = widened(w1[k])
        v2 = widened(w2[k])
        v3 = widened(w3[k])
        u0 = x0[k]
        s00 += v0 * u0
        s10 += v1 * u0
        s20 += v2 * u0
        s30 += v3 * u0
        u1 = x1[k]
        s01 += v0 * u1
        s11 += v1 * u1
        s21 += v2 * u1
        s31 += v3 * u1
        u2 = x2[k]
        s02 += v0 * u2
        s12 += v1 * u2
        s22 += v2 * u2
        s32 += v3 * u2
        u3 = x3[k]
        s03 += v0 * u3
        s13 += v1 * u3
        s23 += v2 * u3
        s33 += v3 * u3
    out[m, n] = s00
    out[m, n + 1] = s10
    out[m, n + 2] = s20
    out[m, n + 3] = s30
    out[m + 1, n] = s01
    out[m + 1, n + 1] = s11
    out[m + 1, n + 2] = s21
    out[m + 1, n + 3] = s31
    out[m + 2, n] = s02
    out[m + 2, n + 1] = s12
    out[m + 2, n + 2] = s22
    out[m + 2, n + 3] = s32
    out[m + 3, n] = s03
    out[m + 3, n + 1] = s13
    out[m + 3, n + 2] = s23
    out[m + 3, n + 3] = s33


@njit(fastmath=FAST)
def block_4x6(x: Any, w: Any, out: Any, m: int, n: int) -> None:
    w0 = w[n]
    w1 = w[n + 1]
    w2 = w[n + 2]
    w3 = w[n + 3]
    x0 = x[m]
    x1 = x[m + 1]
    x2 = x[m + 2]
    x3 = x[m + 3]
    x4 = x[m + 4]
    x5 = x[m + 5]
    s00 = s01 = s02 = s03 = s04 = s05 = np.float32(0)
    s10 = s11 = s12 = s13 = s14 = s15 = np.float32(0)
    s20 = s21 = s22 = s23 = s24 = s25 = np.float32(0)
    s30 = s31 = s32 = s33 = s34 = s35 = np.float32(0)
    for k in range(w0.shape[0]):
        v0 = widened(w0[k])
        v1 = widened(w1[k])
        v2 = widened(w2[k])
        v3 = widened(w3[k])
        u0 = x0[k]
        s00 += v0 * u0
        s10 += v1 * u0
        s20 += v2 * u0
        s30 += v3 * u0
        u1 = x1[k]
        s01 += v0 * u1
        s11 += v1 * u1
        s21 += v2 * u1
        s31 += v3 * u1
        u2 = x2[k]
        s02 += v0 * u2
        s12 += v1 * u2
        s22 += v2 * u2
        s32 += v3 * u2
        u3 = x3[k]
        s03 += v0 * u3
        s13 += v1 * u3
        s23 += v2 * u3
        s33 += v3 * u3
        u4 = x4[k]
        s04 += v0 * u4
        s14 += v1 * u4
        s24 += v2 * u4
        s34 += v3 * u4
        u5 = x5[k]
        s05 += v0 * u5
        s15 += v1 * u5
        s25 += v2 * u5
        s35 += v3 * u5
    out[m, n] = s00
    out[m, n + 1] = s10
    out[m, n + 2] = s20
    out[m, n + 3] = s30
    out[m + 1, n] = s01
    out[m + 1, n + 1] = s11
    out[m + 1, n + 2] = s21
    out[m + 1, n + 3] = s31
    out[m + 2, n] = s02
    out[m + 2, n + 1] = s12
    out[m + 2, n + 2] = s22
    out[m + 2, n + 3] = s32
    out[m + 3, n] = s03
    out[m + 3, n + 1] = s13
    out[m + 3, n + 2] = s23
    out[m + 3, n + 3] = s33
    out[m + 4, n] = s04
    out[m + 4, n + 1] = s14
    out[m + 4, n + 2] = s24
    out[m + 4, n + 3] = s34
    out[m + 5, n] = s05
    out[m + 5, n + 1] = s15
    out[m + 5, n + 2] = s25
    out[m + 5, n + 3] = s35
