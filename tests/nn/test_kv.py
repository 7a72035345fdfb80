"""Preallocated keys and values: the numbers of DynamicCache, repeatable, masked."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import DECODER
from torch import Tensor
from transformers import DynamicCache, LlavaOnevisionForConditionalGeneration

from vlmrun.nn.kv import KVCache

BLOCKS, HEADS, WIDTH = 3, 2, DECODER["hidden_size"]
HEAD_DIM = DECODER["hidden_size"] // DECODER["num_attention_heads"]


@pytest.fixture(scope="module")
def decoder(tiny_onevision: Path) -> torch.nn.Module:
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(
        tiny_onevision, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.model.language_model.eval()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_cache(batch: int, positions: int = 12) -> KVCache:
    shape = (batch, HEADS, positions, HEAD_DIM)
    cache = KVCache(BLOCKS, shape, dtype=torch.float32, device=torch.device("cpu"))
    for layer in cache.layers:  # what lies behind the end is never to be seen
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    return cache


def embeds(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def run(
    decoder: torch.nn.Module, cache: object, x: Tensor, mask: Tensor | None, positions: Tensor
) -> Tensor:
    return decoder(None, mask, positions, cache, x, use_cache=True).last_hidden_state


def left_mask(length: int, *pads: int) -> Tensor:
    return torch.stack([(torch.arange(length) >= pad).long() for pad in pads])


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


@pytest.mark.parametrize("pads", [(0,), (0, 0), (0, 3), (4, 0, 1)])
def test_steps_equal_dynamic_cache(decoder: torch.nn.Module, pads: tuple[int, ...]) -> None:
    """Prefill of seven, then three steps; rows of different length are padded on the left."""
    ours, theirs = make_cache(len(pads)), DynamicCache()
    mask = left_mask(7, *pads)
    x, positions = embeds(len(pads), 7), positions_of(mask)
    for step in range(4):
        seen = mask if any(pads) else None
        mine = run(decoder, ours, x, seen, positions)
        stock = run(decoder, theirs, x, seen, positions)
        real = mask[:, -x.shape[1] :].bool()
        torch.testing.assert_close(mine[real], stock[real], atol=1e-5, rtol=0)
        assert torch.isfinite(mine[real]).all()
        ours.advance(x.shape[1])
        assert ours.get_seq_length() == theirs.get_seq_length()
        x, positions = embeds(len(pads), 1, seed=step + 1), mask.sum(dim=1, keepdim=True)
        mask = torch.cat([mask, mask.new_ones(len(pads), 1)], dim=1)


def test_a_step_repeated_without_advance_gives_the_same_bits(decoder: torch.nn.Module) -> None:
    cache = make_cache(1)
    run(decoder, cache, embeds(1, 5), None, torch.arange(5)[None])
    cache.advance(5)
    x, at = embeds(1, 1, seed=1), torch.tensor([[5]])
    first = run(decoder, cache, x, None, at)
    other = run(decoder, cache, embeds(1, 1, seed=2), None, at)  # a failed step leaves traces
    assert not torch.equal(first, other)
    assert torch.equal(run(decoder, cache, x, None, at), first)
    assert cache.get_seq_length() == 5
    cache.advance(1)
    assert cache.get_seq_length() == 6
    assert not torch.equal(run(decoder, cache, x, None, torch.tensor([[6]])), first)


def test_padding_is_not_seen(decoder: torch.nn.Module) -> None:
    """What stands in a row's padding changes nothing, in prefill and in the steps after."""
    mask = left_mask(6, 0, 3)
    results = []
    for seed in 0, 1:
        cache, x = make_cache(2), embeds(2, 6)
        x[1, :3] = embeds(1, 3, seed=seed + 10)[0]
        prefill = run(decoder, cache, x, mask, positions_of(mask))
        cache.advance(6)
        longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        step = run(decoder, cache, embeds(2, 1, 5), longer, mask.sum(dim=1, keepdim=True))
        results.append((prefill[1, 3:], step[1]))
    assert all(map(torch.equal, *results))


def test_update_writes_behind_the_end_and_returns_all() -> None:
    cache = make_cache(1, positions=4)
    layer = cache.layers[1]
    keys, values = torch.rand(2, 1, HEADS, 3, HEAD_DIM)
    assert layer.get_mask_sizes(3) == (3, 0)
    found = cache.update(keys, values, 1)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)
    assert found[0].data_ptr() == layer.keys.data_ptr()  # a view, not a copy
    assert layer.get_seq_length() == 0
    cache.advance(3)
    assert (layer.get_seq_length(), layer.get_max_length()) == (3, 4)
    assert layer.get_mask_sizes(1) == (4, 0)
    grown, _ = cache.update(keys[:, :, :1], values[:, :, :1], 1)
    assert torch.equal(grown, torch.cat([keys, keys[:, :, :1]], dim=2))
