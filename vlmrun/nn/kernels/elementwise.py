"""Functions of one number, and of a row by another, for compiled loops to call."""

from typing import Any

import numpy as np

from vlmrun.nn.kernels.blocks import inlined, inner, widened


@inlined
def exponential(x: Any) -> Any:
    """e**x in float32, within 3e-7 of it: a power of two times a polynomial of what is left
    (Cephes, expf). Bounded where float32 would overflow, or lose digits."""
    x = np.float32(88) if x > np.float32(88) else x  # not by min and max: what is no number
    x = np.float32(-87) if x < np.float32(-87) else x  # stays none
    biased = np.int32(x * np.float32(1.44269504) + np.float32(127.5))  # above 0, so rounded down
    whole = np.float32(biased - np.int32(127))
    x = x - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * x + np.float32(1.3981999507e-3)
    p = p * x + np.float32(8.3334519073e-3)
    p = p * x + np.float32(4.1665795894e-2)
    p = p * x + np.float32(1.6666665459e-1)
    p = p * x + np.float32(5.0000001201e-1)
    p = p * x * x + x + np.float32(1)
    power = np.uint32(np.uint32(biased) << np.uint32(23))
    return p * power.view(np.float32)


@inlined
def logistic(x: Any) -> Any:
    """1 / (1 + e**-x); x times it is silu."""
    return np.float32(1) / (np.float32(1) + exponential(-x))


@inlined
def gelu_share(x: Any) -> Any:
    """What x is multiplied by to give gelu in its tanh form, which is a logistic, too."""
    return logistic(np.float32(1.59576912) * (x + np.float32(0.044715) * x * x * x))


@inner
def times(row: Any, factors: Any) -> None:
    for n in range(row.shape[0]):
        row[n] *= factors[n]


@inner
def plus(row: Any, numbers: Any) -> None:
    for n in range(row.shape[0]):
        row[n] += widened(numbers[n])
