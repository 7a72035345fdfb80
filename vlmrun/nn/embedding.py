"""Embeddings: position tables, patches, and token tables whose rows are gathered where they lie."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

RowReader = Callable[[list[int]], Tensor]


class CastEmbedding(nn.Module):
    """A small table, resident while it is used; gives rows in `compute_dtype`.

    scale: what Gemma multiplies them by, rounded to that dtype as stock does.
    """

    weight: Tensor

    def __init__(
        self, rows: int, width: int, *, compute_dtype: torch.dtype, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width), requires_grad=False)
        self.compute_dtype = compute_dtype
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        rows = functional.embedding(ids, self.weight).to(self.compute_dtype)
        return scaled(rows, self.scale)


def scaled(rows: Tensor, scale: float) -> Tensor:
    return rows if scale == 1 else rows * torch.tensor(scale).to(rows.dtype)


class TokenTable(nn.Module):
    """A token table that is never loaded: the rows a text needs are read from the checkpoint.

    `read_rows` (set when the model is loaded) gives rows by index, at the dtype weights are
    stored in; a prompt touches few of the table's hundreds of megabytes.
    """

    def __init__(self, width: int, *, compute_dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.width = width
        self.compute_dtype = compute_dtype
        self.scale = scale
        self.read_rows: RowReader | None = None

    def forward(self, ids: Tensor) -> Tensor:
        assert self.read_rows is not None
        unique, places = torch.unique(ids, return_inverse=True)
        rows = self.read_rows(unique.tolist()).to(ids.device, self.compute_dtype)
        return scaled(rows, self.scale)[places]  # [..., width]


class PatchEmbedding(nn.Module):
    """SigLIP's patch and position embedding (transformers' SiglipVisionEmbeddings), computed in
    `compute_dtype`: the stock module rounds pixels to the dtype of the stored weight. Pictures of
    another size get a resized position table, as timm's `dynamic_img_size` does it."""

    def __init__(
        self, *, channels: int, width: int, patch_size: int, positions: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.patch_embedding = CastPatches(channels, width, patch_size, dtype)
        self.position_embedding = CastEmbedding(positions, width, compute_dtype=dtype)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches: Tensor = self.patch_embedding(pixel_values)  # [B, D, rows, columns]
        grid = patches.shape[2], patches.shape[3]
        table = resampled(self.position_embedding.weight, grid, "bicubic")
        return patches.flatten(2).transpose(1, 2) + table.to(patches.dtype)


def resampled(table: Tensor, grid: tuple[int, int], mode: str) -> Tensor:
    """A square position table [side * side, D] resized to a grid (rows, columns), [N, D] float32,
    antialiased; as it is where the grid is its own.

    In float32: antialiasing is not implemented for halves on the CPU (pytorch#175489).
    """
    side = math.isqrt(table.shape[0])
    if grid == (side, side):
        return table
    square = table.float().view(1, side, side, -1).permute(0, 3, 1, 2)  # [1, D, side, side]
    wide = functional.interpolate(square, grid, mode=mode, align_corners=False, antialias=True)
    return wide[0].flatten(1).transpose(0, 1)


class ClassEmbedding(nn.Module):
    """CLIP's class token, patches and positions (transformers' CLIPVisionEmbeddings), computed
    in `compute_dtype`, as above."""

    class_embedding: Tensor

    def __init__(
        self, *, channels: int, width: int, patch_size: int, positions: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(width), requires_grad=False)
        self.patch_embedding = CastPatches(channels, width, patch_size, dtype, bias=False)
        self.position_embedding = CastEmbedding(positions, width, compute_dtype=dtype)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)  # [B, N, D]
        first = self.class_embedding.to(patches.dtype).expand(patches.shape[0], 1, -1)
        vectors = torch.cat([first, patches], dim=1)  # [B, 1 + N, D]
        positions = torch.arange(vectors.shape[1], device=vectors.device)
        embedded: Tensor = vectors + self.position_embedding(positions)
        return embedded


class CastPatches(nn.Module):
    """A convolution whose stride is its kernel: one linear map per patch."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, channels: int, width: int, patch: int, dtype: torch.dtype, *, bias: bool = True
    ) -> None:
        super().__init__()
        shape = (width, channels, patch, patch)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False) if bias else None
        self.patch = patch
        self.compute_dtype = dtype

    def forward(self, pixels: Tensor) -> Tensor:
        dtype = self.compute_dtype
        weight = self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.conv2d(pixels.to(dtype), weight, bias, stride=self.patch)
