"""Patches of pictures that keep their shape."""

import torch
from torch import Tensor, nn

from vlmrun.nn.embedding import CastEmbedding, resampled
from vlmrun.nn.linear import CastLinear


class FlatPatchEmbedding(nn.Module):
    """NaFlex's patch and position embedding (transformers' Siglip2VisionEmbeddings), computed in
    `compute_dtype`. The table is resized to each picture's shape; padding gets no position."""

    def __init__(self, *, numbers: int, width: int, positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch_embedding = CastLinear(numbers, width, bias=True)
        self.position_embedding = CastEmbedding(positions, width, compute_dtype=dtype)
        self.compute_dtype = dtype

    def forward(self, pixel_values: Tensor, spatial_shapes: Tensor) -> Tensor:
        """pixel_values: [B, N, numbers of a patch], spatial_shapes: [B, 2] (rows, columns) of
        patches, the first rows * columns of N; gives [B, N, D]."""
        embedded: Tensor = self.patch_embedding(pixel_values.to(self.compute_dtype))
        for vectors, (rows, columns) in zip(embedded, spatial_shapes.tolist(), strict=True):
            table = resampled(self.position_embedding.weight, (rows, columns), "bilinear")
            vectors[: rows * columns] += table.to(self.compute_dtype)
        return embedded
