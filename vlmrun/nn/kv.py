"""Keys and values of a decoder, allocated once, written by position."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class KVLayer(CacheLayerMixin):  # type: ignore[misc]
    """One decoder block's keys and values, [B, H, positions, D] each.

    A forward writes behind `length` and does not move it, so a step that failed may be
    repeated; `KVCache.advance` moves it once the step is done.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.keys: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self.values: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self.is_initialized = True
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("allocated when made")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, n, D] behind what is there; returns views of all of it."""
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return int(self.keys.shape[-2])


class KVCache(Cache):  # type: ignore[misc]
    """The cache of all blocks, through transformers' interface."""

    def __init__(
        self,
        blocks: int,
        shape: tuple[int, int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        starts: Tensor | None = None,
    ) -> None:
        """starts: [B] int64, the positions at the left of each row that are padding; None for no
        padding."""
        self.starts = torch.zeros(shape[0], dtype=torch.int64) if starts is None else starts
        super().__init__(layers=[KVLayer(shape, dtype, device) for _ in range(blocks)])

    def advance(self, count: int) -> None:
        """Count positions that a finished step has written."""
        for layer in self.layers:
            layer.length += count
