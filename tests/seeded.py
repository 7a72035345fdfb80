"""Random numbers that are the same wherever torch makes them, so that goldens made in another
environment name their weights and their inputs instead of holding them."""

import hashlib
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


def random_tensor(path: str, shape: Sequence[int]) -> Tensor:
    """Float32 values seeded by the path.

    Matrices keep the size of what passes through them. Queries and keys are drawn wider, so that
    attention chooses: with flat attention greedy decoding repeats one token whatever the picture.
    """
    values = torch.randn(tuple(shape), generator=seeded(path))
    if "norm" in path and path.endswith("weight"):
        return 1 + 0.1 * values
    if len(shape) < 2 or "embed" in path:
        return 0.1 * values
    width = 3 if any(name in path for name in ("q_proj", "k_proj", "qkv", "attn_pool.q")) else 1
    return width * values / math.sqrt(math.prod(shape[1:]))


def random_weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    return {name: random_tensor(name, shape) for name, shape in shapes.items()}


def random_pixels(height: int, width: int) -> Tensor:
    """Pixels as a tower takes them, from -1 to 1: [1, 3, H, W] float32."""
    source = seeded(f"pixels {height}x{width}")
    return 2 * torch.rand((1, 3, height, width), generator=source) - 1


def sha256(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def seeded(path: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(path.encode()))
