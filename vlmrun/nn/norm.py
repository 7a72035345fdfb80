"""Normalisation in the dtype of the input, over weights stored in any dtype."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class CastLayerNorm(nn.Module):
    weight: Tensor
    bias: Tensor

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)


class CastRMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467), the mean in float32."""

    weight: Tensor

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.to(x.dtype) * self.scaled(x).to(x.dtype)

    def scaled(self, x: Tensor) -> Tensor:
        """x over its root mean square, in float32."""
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)


class CastGemmaNorm(CastRMSNorm):
    """Gemma's root-mean-square norm: the weight is what is added to 1, and all of it is computed
    in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.scaled(x) * (1.0 + self.weight.float())).to(x.dtype)
