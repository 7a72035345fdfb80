"""PaliGemma's architecture is that of transformers: names, shapes, defaults, costs, sizes."""

from typing import Any

import pytest
from light import TINY_VISION, changed, model_of, words

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models import paligemma
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.families import family_of
from vlmrun.models.family import Config, View
from vlmrun.models.layer import Weight
from vlmrun.models.shapes import Architecture

TABLE, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
TEXT = {
    "model_type": "gemma",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "vocab_size": 60,
}
TINY: Config = {
    "model_type": "paligemma",
    "projection_dim": 16,
    "text_config": TEXT,
    "vision_config": {**TINY_VISION, "vision_use_head": False},
}
SO400M = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "vision_use_head": False,
}
# width, MLP width, layers, heads, key-value heads, head_dim
DECODERS = {
    "gemma 2b": ("gemma", 2048, 16384, 18, 8, 1, 256),
    "gemma2 2b": ("gemma2", 2304, 9216, 26, 8, 4, 256),
    "gemma2 9b": ("gemma2", 3584, 14336, 42, 16, 8, 256),
    "gemma2 27b": ("gemma2", 4608, 36864, 46, 32, 16, 128),
}


def hub(decoder: str, image_size: int) -> Config:
    """A configuration as the hub's are."""
    kind, width, mlp_width, layers, heads, kv_heads, head_dim = DECODERS[decoder]
    text = {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": mlp_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 257216,
    }
    return {
        "model_type": "paligemma",
        "image_token_index": 257152,
        "projection_dim": width,
        "text_config": text,
        "vision_config": {**SO400M, "image_size": image_size},
    }


SHAPES: dict[str, Config] = {
    "tiny": TINY,
    "of defaults": {"model_type": "paligemma"},
    "parts null": {"model_type": "paligemma", "vision_config": None, "text_config": None},
    "tiny, gemma2": changed(TINY, "text_config", model_type="gemma2"),
    "tiny, no kind named": {**TINY, "text_config": {k: TEXT[k] for k in TEXT if k != "model_type"}},
    "tiny, biases": changed(TINY, "text_config", attention_bias=True),
    "tiny, a pooling head": changed(TINY, "vision_config", vision_use_head=True),
    "tiny, untied": {**TINY, "tie_word_embeddings": False},
    "224": hub("gemma 2b", 224),
    "28b": hub("gemma2 27b", 896),
}


def architecture_of(config: Config) -> Architecture:
    return family_of(config).architecture(config)


def stock_of(config: Config) -> Any:
    import torch
    import transformers

    with torch.device("meta"):
        made = transformers.PaliGemmaConfig.from_dict(dict(config))
        return transformers.PaliGemmaForConditionalGeneration(made)


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_and_ties_are_those_of_the_stock_model(name: str) -> None:
    architecture, stock = architecture_of(SHAPES[name]), stock_of(SHAPES[name])
    paths = [path for block in architecture.blocks for path in block.tensors]
    assert len(paths) == len(set(paths))
    found = {path: shape for block in architecture.blocks for path, shape in block.tensors.items()}
    fused = {path for path in found if ".head.attention." in path}
    found = {path: shape for path, shape in found.items() if path not in fused}
    state = {n: tuple(t.shape) for n, t in stock.state_dict().items()}
    assert found == {n: shape for n, shape in state.items() if ".head.attention." not in n}
    tied = stock.lm_head.weight is stock.model.language_model.embed_tokens.weight
    assert architecture.ties == ({TABLE: HEAD} if tied else {})
    assert tied == (name != "tiny, untied")


def test_a_tie_that_only_the_text_part_names_holds() -> None:
    config = changed(
        {**TINY, "tie_word_embeddings": False}, "text_config", tie_word_embeddings=True
    )
    assert architecture_of(config).ties == {TABLE: HEAD}


def test_defaults_are_those_of_the_stock_class() -> None:
    import transformers

    stock = transformers.PaliGemmaConfig()
    for part, defaults in (
        (stock.vision_config, paligemma.VISION_DEFAULTS),
        (stock.text_config, paligemma.TEXT_DEFAULTS),
    ):
        assert {name: getattr(part, name) for name in defaults} == defaults
    assert stock.projection_dim == paligemma.PROJECTION
    assert stock.tie_word_embeddings


def test_what_the_decoder_sees_and_when_it_runs() -> None:
    """The tower after its last norm, without a pooling head; prompts both ways, from 1."""
    config = changed(TINY, "vision_config", vision_use_head=True)
    architecture = architecture_of(config)
    phases = family_of(config).phases(architecture, "pooled")
    layers = tuple(f"vision.layers.{i}" for i in range(3))
    assert phases["vision"] == ("vision.embeddings", *layers, "vision.norm", "projector")
    assert phases["decode"][-2:] == ("decoder.norm", "head")
    assert architecture.decoder is not None
    assert (architecture.decoder.prefix, architecture.decoder.first_position) == (True, 1)
    assert not architecture.decoder.soft_capped
    two = architecture_of(changed(TINY, "text_config", model_type="gemma2"))
    assert two.decoder is not None
    assert two.decoder.soft_capped


@pytest.mark.parametrize(("size", "tokens"), [(224, 256), (448, 1024), (896, 4096)])
def test_every_picture_costs_the_towers_tokens(size: int, tokens: int) -> None:
    config = hub("gemma 2b", size)
    architecture = architecture_of(config)
    for width, height, view in (1, 1, View()), (3000, 10, View()), (size, size, View("low")):
        cost = family_of(config).image_cost(architecture, width, height, view)
        assert (cost.crops, cost.tokens) == (1, tokens)


@pytest.mark.parametrize(
    ("decoder", "size", "vision", "text", "whole"),
    [
        ("gemma 2b", 224, 412.4, 2509, 2923),
        ("gemma 2b", 448, 413.3, 2509, 2925),
        ("gemma 2b", 896, 416.9, 2509, 2928),
        ("gemma2 2b", 224, 412.4, 2617, 3032),
        ("gemma2 9b", 448, 413.3, 9246, 9664),
        ("gemma2 27b", 896, 416.9, 27233, 27655),
    ],
)
def test_sizes_known_from_the_hub(
    decoder: str, size: int, vision: float, text: float, whole: float
) -> None:
    """Millions of parameters, a tied head once; and what a plan counts of them."""
    config = hub(decoder, size)
    architecture = architecture_of(config)
    counts: dict[str, float] = {}
    for block in architecture.blocks:
        for path, shape in block.tensors.items():
            if path not in architecture.ties.values():
                numel = Weight(path, path, shape).numel
                counts[block.part] = counts.get(block.part, 0) + numel / 1e6
    assert counts["vision"] == pytest.approx(vision, rel=5e-4)
    assert counts["decoder"] == pytest.approx(text, rel=5e-4)
    assert sum(counts.values()) == pytest.approx(whole, rel=5e-4)
    model = model_of(config)
    nbytes = sum(layer.nbytes(Dtype.bfloat16) for layer in model.layers)
    assert nbytes == pytest.approx(whole * 2e6, rel=5e-4)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**TINY, "projection_dim": 24}, "projection_dim is 24, and the decoder is 16 wide"),
        ({k: TINY[k] for k in TINY if k != "projection_dim"}, "projection_dim is 2048"),
        ({**TINY, "projection_dim": None}, "projection_dim should be a positive number"),
        ({**TINY, "text_config": "gemma"}, "text_config is not an object"),
        (changed(TINY, "text_config", num_key_value_heads=3), "3 key-value heads do not divide"),
    ],
)
def test_configurations_that_cannot_be(config: Config, expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        architecture_of(config)
    assert expected in words(caught.value)


@pytest.mark.parametrize(
    ("part", "kind", "works"),
    [
        ("text_config", "gemma3_text", "'gemma' or 'gemma2'"),
        ("vision_config", "clip_vision_model", "'siglip_vision_model'"),
    ],
)
def test_another_part_is_refused_by_name(part: str, kind: str, works: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        architecture_of(changed(TINY, part, model_type=kind))
    assert repr(kind) in words(caught.value)
    assert works in words(caught.value)
