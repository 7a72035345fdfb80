"""Every process has its part of a block's matrices, all of them together the whole."""

import pytest
from light import (
    ONEVISION,
    ONEVISION_7B,
    SIGLIP,
    TINY_ONEVISION,
    TINY_SIGLIP,
    changed,
    model_of,
    words,
)

from vlmrun.errors import UsageError
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.family import Config
from vlmrun.models.layer import Weight
from vlmrun.models.model import Model
from vlmrun.models.sharding import Shard, read_shard, shard_model

ENVIRONMENT = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def parts_of(config: Config, size: int) -> tuple[Model, list[Model]]:
    model = model_of(config)
    return model, [shard_model(model, Shard(rank, size, rank, size)) for rank in range(size)]


def weights(model: Model) -> dict[str, Weight]:
    return {weight.path: weight for layer in model.layers for weight in layer.weights}


@pytest.mark.parametrize("config", [TINY_SIGLIP, TINY_ONEVISION, SIGLIP, ONEVISION])
def test_the_parts_are_the_whole(config: Config) -> None:
    """Each number of a cut weight is in one process, each other weight in every one."""
    whole, parts = parts_of(config, 2)
    for path, weight in weights(whole).items():
        own = [weights(part)[path] for part in parts]
        if own[0].columns is not None:
            assert [w.columns for w in own] == [
                (i * weight.shape[1] // 2, (i + 1) * weight.shape[1] // 2) for i in range(2)
            ]
        elif own[0].rows != weight.rows:
            start = weight.rows[0] if weight.rows else 0
            half = weight.shape[0] // 2
            assert [w.rows for w in own] == [
                (start, start + half),
                (start + half, start + 2 * half),
            ]
        else:
            assert own == [weight, weight]
            continue
        assert sum(w.numel for w in own) == weight.numel


def test_what_is_cut_and_what_is_whole() -> None:
    _, [first, _] = parts_of(SIGLIP, 2)
    rows = {path for path, weight in weights(first).items() if weight.rows is not None}
    columns = {path for path, weight in weights(first).items() if weight.columns is not None}
    block = "vision_model.encoder.layers.3"
    named = {path for path in rows | columns if path.startswith(f"{block}.")}
    assert named == {
        *(f"{block}.self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")),
        f"{block}.self_attn.out_proj.weight",
        f"{block}.mlp.fc1.weight",
        f"{block}.mlp.fc1.bias",
        f"{block}.mlp.fc2.weight",
    }
    assert not any(".head." in path for path in columns)
    assert columns == {p for p in named | columns if p.endswith(("out_proj.weight", "fc2.weight"))}


def test_a_process_of_the_large_model_keeps_about_its_share() -> None:
    whole, parts = parts_of(ONEVISION_7B, 4)
    sizes = [sum(layer.nbytes(Dtype.bfloat16) for layer in m.layers) for m in (whole, *parts)]
    assert len(set(sizes[1:])) == 1
    tables = 2 * 152128 * 3584 * 2  # the token table and the head are whole
    assert sizes[1] - tables == pytest.approx((sizes[0] - tables) / 4, rel=0.01)
    decoder = parts[0].architecture.decoder
    assert decoder is not None
    assert (decoder.heads, decoder.kv_heads, decoder.head_dim) == (7, 1, 128)


@pytest.mark.parametrize(
    ("config", "size", "expected"),
    [
        (SIGLIP, 3, "3 processes do not divide the 16 vision heads of a-model | use 2 or 4 or 8"),
        (ONEVISION, 4, "4 processes do not divide the 14 decoder heads of a-model | use 2 proc"),
        (ONEVISION_7B, 8, "do not divide the 28 decoder heads of a-model | use 2 or 4 processes"),
        (changed(TINY_SIGLIP, "vision_config", intermediate_size=25), 2, "one process only"),
    ],
)
def test_numbers_that_do_not_divide(config: Config, size: int, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        parts_of(config, size)
    assert expected in words(caught.value)


@pytest.mark.parametrize(("kv_heads", "size"), [(1, 2), (1, 4), (2, 4), (4, 2)])
def test_key_value_heads_that_several_processes_share(kv_heads: int, size: int) -> None:
    """Every process has the heads that its own query heads look through."""
    config = changed(TINY_ONEVISION, "text_config", num_key_value_heads=kv_heads, head_dim=4)
    vision = {**config["vision_config"], "num_attention_heads": 4}
    _, parts = parts_of({**config, "vision_config": vision}, size)
    for rank, part in enumerate(parts):
        decoder = part.architecture.decoder
        assert decoder is not None
        per_process = 4 // size  # query heads, of four
        wanted = [h * kv_heads // 4 for h in range(rank * per_process, (rank + 1) * per_process)]
        weight = weights(part)["model.language_model.layers.1.self_attn.v_proj.weight"]
        assert weight.rows == (4 * wanted[0], 4 * wanted[-1] + 4)
        assert decoder.kv_heads == max(1, kv_heads // size)


def test_the_place_among_the_processes() -> None:
    assert read_shard(ENVIRONMENT) == Shard(3, 4, 1, 2)
    for missing in ENVIRONMENT:
        with pytest.raises(UsageError, match="needs several processes"):
            read_shard({k: v for k, v in ENVIRONMENT.items() if k != missing})
    with pytest.raises(UsageError, match="needs several processes"):
        read_shard({**ENVIRONMENT, "RANK": "first"})
