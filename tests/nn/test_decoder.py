"""A decoder's block in one call: what the stock modules compute, for every kind of block."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from vlmrun.nn.decoder import DecoderBlock, parts_of, runs_call
from vlmrun.nn.kernels.call import BlockCall, parts
from vlmrun.nn.kv import KVCache
from vlmrun.nn.parallel import RowParallelLinear
from vlmrun.nn.swap import swap_layers

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "mistral, no window": {"sliding_window": None},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 5},
    "wide": {"hidden_size": 200, "intermediate_size": 264},
}
LENGTH, STEPS = 7, 4


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def stock(kind: str) -> nn.Module:
    """A decoder of random weights, none of them zero, that bfloat16 holds."""
    name = {"wide": "qwen2"}.get(kind, kind.split(",")[0])
    config = transformers.CONFIG_MAPPING[name](**SIZES | KINDS[kind])
    config._attn_implementation = "eager"  # which bounds scores, where sdpa would not
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    for weight in model.parameters():
        weight.copy_((0.3 * torch.randn(weight.shape)).bfloat16())
    return model


def ours(model: nn.Module, stored: torch.dtype = torch.bfloat16) -> nn.Module:
    """The same with layers of ours, whose steps run as calls."""
    other = copy.deepcopy(model)
    config = other.config
    swap_layers(other, torch.float32)
    of_stock = dict(model.named_parameters())
    for name, weight in other.named_parameters():
        weight.data = of_stock[name].to(stored)
    for block in other.layers:
        found = parts_of(block)
        assert found is not None
        block.call = BlockCall(**found)
    assert other.config is config
    return other


def padded(batch: int) -> Tensor:
    """A mask [B, T] whose rows begin at different places."""
    starts = torch.tensor([0, 3, 1, 2, 0, 4, 2, 1][:batch])
    return (torch.arange(LENGTH + STEPS) >= starts[:, None]).long()


def cache_for(model: nn.Module, mask: Tensor, dtype: torch.dtype = torch.float32) -> KVCache:
    shape = (len(mask), SIZES["num_key_value_heads"], LENGTH + STEPS + 1, SIZES["head_dim"])
    cache = KVCache(2, shape, dtype=dtype, device=torch.device("cpu"), starts=(1 - mask).sum(1))
    for layer in cache.layers:  # what lies behind the end is never to be seen
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    return cache


def states(model: nn.Module, x: Tensor, mask: Tensor, cache: KVCache | None = None) -> Tensor:
    """The last states [B, STEPS, D]: at once, or with a cache a prompt and then step by step."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    if cache is None:
        out = model(inputs_embeds=x, attention_mask=mask, position_ids=positions, use_cache=False)
        return out.last_hidden_state[:, LENGTH:]
    found = []
    for start, stop in [(0, LENGTH), *((at, at + 1) for at in range(LENGTH, LENGTH + STEPS))]:
        out = model(
            inputs_embeds=x[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            cache=cache,
            use_cache=True,
        )
        cache.advance(stop - start)
        found.append(out.last_hidden_state)
    return torch.cat(found[1:], dim=1)


def inputs(batch: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, LENGTH + STEPS, width, generator=generator)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_gives_what_the_stock_block_gives(kind: str, batch: int) -> None:
    model, mask = stock(kind), padded(batch)
    x = inputs(batch, model.config.hidden_size)
    expected = states(model, x, mask)
    found = states(ours(model), x, mask, cache_for(model, mask))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_weights_of_every_dtype_are_widened(stored: torch.dtype) -> None:
    model, mask = stock("qwen2"), padded(3)
    x = inputs(3, SIZES["hidden_size"])
    for weight in model.parameters():
        weight.copy_(weight.to(stored))
    found = states(ours(model, stored), x, mask, cache_for(model, mask))
    torch.testing.assert_close(found, states(model, x, mask), atol=2e-5, rtol=2e-5)


def test_keys_and_values_in_bfloat16_are_rounded_as_torch_rounds() -> None:
    model, mask = ours(stock("qwen2")), torch.ones(2, LENGTH + STEPS, dtype=torch.int64)
    x = inputs(2, SIZES["hidden_size"])
    wide, narrow = cache_for(model, mask), cache_for(model, mask, torch.bfloat16)
    for cache in (wide, narrow):
        model.layers[0](
            x[:, :1],
            position_embeddings=model.rotary_emb(x, torch.zeros(2, 1, dtype=torch.int64)),
            cache=cache,
        )
    for one, other in zip(wide.layers[:1], narrow.layers[:1], strict=True):
        assert torch.equal(one.keys[:, :, 0].bfloat16(), other.keys[:, :, 0])
        assert torch.equal(one.values[:, :, 0].bfloat16(), other.values[:, :, 0])


def test_threads_change_no_bit() -> None:
    model, mask, threads = ours(stock("wide")), padded(2), torch.get_num_threads()
    x, found = inputs(2, 200), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(states(model, x, mask, cache_for(model, mask)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_what_is_not_finite_stays_so() -> None:
    model, mask = ours(stock("gemma2")), padded(1)
    x = inputs(1, SIZES["hidden_size"])
    x[0, LENGTH, 3] = torch.inf
    found = states(model, x, mask, cache_for(model, mask))
    assert not torch.isfinite(found[0, 0]).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_stored_key_that_is_not_finite_does_what_it_does_in_stock(value: float) -> None:
    model, mask = ours(stock("qwen2")), torch.ones(1, LENGTH + STEPS, dtype=torch.int64)
    x, cache = inputs(1, SIZES["hidden_size"]), cache_for(model, mask)
    angles = model.rotary_emb(x, torch.tensor([[2]]))
    for layer in cache.layers:
        layer.keys.zero_()
        layer.values.zero_()
    cache.advance(2)
    cache.layers[0].keys[0, 0, 1, 3] = value
    block, found = model.layers[0], []
    for call in (block.call, None):
        block.call = call
        found.append(block(x[:, :1], position_embeddings=angles, cache=cache))
    torch.testing.assert_close(*found, equal_nan=True, atol=2e-5, rtol=2e-5)


def test_only_one_new_token_of_a_few_rows_is_a_call() -> None:
    model, mask = stock("qwen2"), padded(1)
    cache = cache_for(model, mask)
    assert runs_call(torch.zeros(8, 1, 4), cache)
    assert not runs_call(torch.zeros(9, 1, 4), cache)
    assert not runs_call(torch.zeros(1, 2, 4), cache)
    assert not runs_call(torch.zeros(1, 1, 4, dtype=torch.float16), cache)
    assert not runs_call(torch.zeros(1, 1, 4), transformers.DynamicCache())


def test_a_block_of_other_parts_has_no_call() -> None:
    model = stock("qwen2")
    swap_layers(model, torch.float32)
    block = model.layers[0]
    assert isinstance(block, DecoderBlock)
    assert parts_of(block) is not None
    block.self_attn.o_proj = RowParallelLinear(48, 24, bias=False)
    assert parts_of(block) is None
    block = model.layers[1]
    block.mlp.act_fn = nn.ReLU()
    assert parts_of(block) is None


def test_heads_are_shared_out_among_threads() -> None:
    assert parts(7, 2, 2) == 1
    assert parts(8, 1, 2) == 2
    assert parts(8, 1, 3) == 4
    assert parts(7, 1, 2) == 7
    assert parts(4, 1, 64) == 4
