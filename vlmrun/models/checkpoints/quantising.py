"""Matrices in 8 bits: whole numbers, and a scale for each row. Needs torch.

A row is the weights of one output, so its scale is multiplied by after the product. Symmetric, and
a row is quantised by itself: the same bits come of any cut into rows, at every reading.
"""

import torch
from torch import Tensor

MOST = 127  # -128 is left out, so that the range is symmetric


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [N, K] of any floating dtype to multiples of their largest number / 127.

    Returns int8 [N, K] and float32 scales [N]; a scale is not finite where a row is not.
    """
    wide = matrix.to(torch.float32, copy=True)
    scale = quantise_(wide)
    return wide.to(torch.int8), scale


def quantise_(wide: Tensor) -> Tensor:
    """The same in place: float32 rows become whole numbers. Returns their scales."""
    scale = torch.maximum(wide.amax(dim=1), -wide.amin(dim=1)) / MOST
    steps = torch.where(scale == 0, 1, scale)  # of a row of zeros
    wide.div_(steps[:, None]).round_().clamp_(-MOST, MOST)
    return scale


def dequantised(numbers: Tensor, scale: Tensor) -> Tensor:
    """The float32 rows [N, K] that quantised ones stand for."""
    return numbers.float().mul_(scale[:, None])
