"""Architectures are those of transformers: names, shapes, defaults, costs; bad ones are refused."""

from typing import Any

import pytest
from light import (
    ONEVISION,
    ONEVISION_7B,
    SIGLIP,
    TINY_ONEVISION,
    TINY_SIGLIP,
    TINY_VISION,
    changed,
    words,
)

from vlmrun.errors import CheckpointError, UnsupportedModel, UsageError
from vlmrun.models import decoders, multimodal, onevision, siglip, towers
from vlmrun.models.families import FAMILIES, family_of
from vlmrun.models.family import Config, Detail, View
from vlmrun.models.shapes import Architecture
from vlmrun.models.towers import filed_shapes

VISION_ALONE = {**SIGLIP["vision_config"]}
SHAPES: dict[str, Config] = {
    "siglip so400m": SIGLIP,
    "siglip of defaults": {"model_type": "siglip"},
    "siglip without pooling head": changed(TINY_SIGLIP, "vision_config", vision_use_head=False),
    "siglip, odd image size": changed(TINY_SIGLIP, "vision_config", image_size=30, num_channels=1),
    "siglip, other projection": changed(TINY_SIGLIP, "text_config", projection_size=20),
    "siglip, projection null": changed(TINY_SIGLIP, "text_config", projection_size=None),
    "vision so400m": VISION_ALONE,
    "vision of defaults": {"model_type": "siglip_vision_model"},
    "vision without pooling head": {**TINY_VISION, "vision_use_head": False},
    "onevision 0.5b": ONEVISION,
    "onevision 7b": ONEVISION_7B,
    "onevision of defaults": {"model_type": "llava_onevision"},
    "onevision, tower of defaults": {
        **ONEVISION,
        "vision_config": {},
        "image_grid_pinpoints": [[224, 448]],
    },
    "onevision, tower null": {**ONEVISION, "vision_config": None},
    "onevision, part of a tower": changed(
        {**TINY_ONEVISION, "vision_config": {"hidden_size": 96}},
        "",
        image_grid_pinpoints=[[224, 224]],
    ),
    "onevision, decoder null": {**TINY_ONEVISION, "text_config": None},
    "onevision, untied": changed(TINY_ONEVISION, "text_config", tie_word_embeddings=False),
    "onevision, tied at the top": {
        **changed(TINY_ONEVISION, "text_config", tie_word_embeddings=False),
        "tie_word_embeddings": True,
    },
    "onevision, inner layer": {**TINY_ONEVISION, "vision_feature_layer": -2},
    "onevision, embeddings": {**TINY_ONEVISION, "vision_feature_layer": 0},
    "onevision, several layers": {**TINY_ONEVISION, "vision_feature_layer": [-3, 1, 3]},
    "onevision, no projector bias": {**TINY_ONEVISION, "multimodal_projector_bias": False},
    "onevision, heads of another size": changed(TINY_ONEVISION, "text_config", head_dim=6),
    "onevision, one head per group": changed(
        TINY_ONEVISION, "text_config", num_key_value_heads=None
    ),
}


def meta_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the stock model's state, built without memory."""
    import torch
    import transformers

    config_class = transformers.CONFIG_MAPPING[config["model_type"]]
    model_class = getattr(transformers, family_of(config).model_class)
    with torch.device("meta"):
        model = model_class(config_class.from_dict(dict(config)))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_hold_every_tensor_of_the_stock_model_once(name: str) -> None:
    config = SHAPES[name]
    blocks = family_of(config).architecture(config).blocks
    paths = [path for block in blocks for path in block.tensors]
    assert len(paths) == len(set(paths))
    assert len({block.name for block in blocks}) == len(blocks)
    found = {path: shape for block in blocks for path, shape in block.tensors.items()}
    assert filed_shapes(found) == meta_shapes(config)


@pytest.mark.parametrize("name", ["siglip so400m", "vision so400m", "onevision, untied"])
def test_a_block_lies_below_the_module_that_runs_it(name: str) -> None:
    import torch
    import transformers

    config = SHAPES[name]
    family = family_of(config)
    with torch.device("meta"):
        config_class = transformers.CONFIG_MAPPING[config["model_type"]]
        module = getattr(transformers, family.model_class)(config_class.from_dict(dict(config)))
    for block in family.architecture(config).blocks:
        runner = module.get_submodule(block.module)
        own = {f"{block.module}.{name}" for name, _ in runner.named_parameters() if block.module}
        # what no module below it runs: the newline vector beside the projector, the two scores
        tensors = set(filed_shapes(block.tensors))
        assert tensors - own <= {"model.image_newline", "logit_scale", "logit_bias"}
        assert own <= tensors


def test_defaults_are_those_of_the_stock_classes() -> None:
    import transformers

    def stock(config: Any, names: Config) -> dict[str, Any]:
        return {name: getattr(config, name) for name in names}

    stock_onevision = transformers.LlavaOnevisionConfig()
    for config, defaults in (
        (transformers.SiglipVisionConfig(), towers.SIGLIP_DEFAULTS),
        (transformers.CLIPVisionConfig(), towers.CLIP_DEFAULTS),
        (transformers.SiglipTextConfig(), siglip.TEXT_DEFAULTS),
        (stock_onevision.text_config, decoders.QWEN2_DEFAULTS),
        (stock_onevision.vision_config, onevision.VISION_DEFAULTS),
        *((transformers.CONFIG_MAPPING[k](), kind.defaults) for k, kind in decoders.KINDS.items()),
    ):
        found = stock(config, defaults)
        heads = found.get("num_attention_heads")
        # as many as there are heads, where a configuration names none
        assert found == {k: heads if v is None else v for k, v in defaults.items()}
    assert stock_onevision.image_grid_pinpoints == onevision.RESOLUTIONS
    assert stock_onevision.vision_aspect_ratio == "anyres_max_9"
    assert stock_onevision.vision_feature_layer == -1
    assert stock_onevision.vision_feature_select_strategy == "full"
    assert stock_onevision.multimodal_projector_bias
    assert not stock_onevision.tie_word_embeddings


def numbers(architecture: Architecture, *parts: str) -> int:
    """Parameters of some parts, ties once."""
    from vlmrun.models.layer import Weight

    shared = architecture.ties.values()
    return sum(
        Weight(path, path, shape).numel
        for block in architecture.blocks
        if block.part in parts
        for path, shape in block.tensors.items()
        if path not in shared
    )


@pytest.mark.parametrize(
    ("config", "parts", "millions"),
    [
        (SIGLIP, ("vision",), 428.2),
        (SIGLIP, ("text",), 449.7),
        (SIGLIP, ("vision", "text", "score"), 878.0),
        (ONEVISION, ("vision",), 397.7),
        (ONEVISION, ("decoder", "head"), 494.1),
        (ONEVISION, ("vision", "projector", "decoder", "head"), 893.7),
        (ONEVISION_7B, ("vision", "projector", "decoder", "head"), 8031),
    ],
)
def test_sizes_known_from_the_hub(config: Config, parts: tuple[str, ...], millions: float) -> None:
    found = numbers(family_of(config).architecture(config), *parts) / 1e6
    assert found == pytest.approx(millions, rel=5e-4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("siglip", "SigLIP"),
        ("siglip_vision_model", "SigLIP vision tower"),
        ("llava_onevision", "LLaVA-OneVision"),
    ],
)
def test_the_family_follows_from_the_model_type(kind: str, name: str) -> None:
    misleading = {"model_type": kind, "_name_or_path": "google/siglip2-llava_onevision"}
    assert family_of(misleading).name == name


def test_model_types_are_told_apart() -> None:
    kinds = [kind for family in FAMILIES for kind in family.model_types]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("kind", ["siglip3", "vipllava", "clip", "SigLIP", ""])
def test_other_models_are_refused_with_what_works(kind: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        family_of({"model_type": kind})
    said = words(caught.value)
    for expected in (repr(kind), "siglip", "siglip_vision_model", "llava_onevision"):
        assert expected in said
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": ["siglip"]}])
def test_a_configuration_without_a_model_type(config: Config) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json names no model_type$"):
        family_of(config)


POSITIVE = [
    (TINY_SIGLIP, "vision_config", "num_hidden_layers"),
    (TINY_SIGLIP, "vision_config", "hidden_size"),
    (TINY_SIGLIP, "vision_config", "intermediate_size"),
    (TINY_SIGLIP, "vision_config", "num_attention_heads"),
    (TINY_SIGLIP, "vision_config", "image_size"),
    (TINY_SIGLIP, "vision_config", "patch_size"),
    (TINY_SIGLIP, "vision_config", "num_channels"),
    (TINY_SIGLIP, "text_config", "projection_size"),
    (TINY_SIGLIP, "text_config", "vocab_size"),
    (TINY_SIGLIP, "text_config", "max_position_embeddings"),
    (TINY_VISION, "", "hidden_size"),
    (TINY_ONEVISION, "text_config", "num_key_value_heads"),
    (TINY_ONEVISION, "text_config", "head_dim"),
    (TINY_ONEVISION, "text_config", "max_position_embeddings"),
]


@pytest.mark.parametrize(("config", "section", "name"), POSITIVE)
def test_numbers_that_no_model_has(config: Config, section: str, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is 1000000000, more than"):
        family_of(config).architecture(changed(config, section, **{name: 10**9}))


@pytest.mark.parametrize("value", [0, -1, 2.5, "12", True, [16, 16], {}])
@pytest.mark.parametrize(("config", "section", "name"), POSITIVE)
def test_numbers_that_are_none(config: Config, section: str, name: str, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        family_of(config).architecture(changed(config, section, **{name: value}))
    assert caught.value.message == (
        f"config.json: {name} should be a positive number, not {value!r}"
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (changed(TINY_SIGLIP, "vision_config", num_attention_heads=3), "3 heads do not divide"),
        (changed(TINY_SIGLIP, "text_config", num_attention_heads=5), "5 heads do not divide"),
        (changed(TINY_VISION, "", num_attention_heads=32), "32 heads do not divide the width 16"),
        (changed(TINY_ONEVISION, "text_config", num_attention_heads=6), "6 heads do not divide"),
        (
            changed(TINY_ONEVISION, "text_config", num_key_value_heads=3),
            "3 key-value heads do not divide 4 heads",
        ),
        (
            changed(TINY_SIGLIP, "vision_config", patch_size=32),
            "no patch of 32 fits an image of 28",
        ),
        ({**TINY_SIGLIP, "vision_config": [16]}, "vision_config is not an object"),
        ({**TINY_SIGLIP, "vision_config": []}, "vision_config is not an object"),
        ({**TINY_SIGLIP, "text_config": "qwen2"}, "text_config is not an object"),
        ({**TINY_ONEVISION, "vision_feature_layer": 4}, "vision_feature_layer 4 names no layer"),
        ({**TINY_ONEVISION, "vision_feature_layer": -5}, "vision_feature_layer -5 names no layer"),
        (
            {**TINY_ONEVISION, "vision_feature_layer": [1, 4]},
            "[1, 4] names no layer of a tower of 3",
        ),
        ({**TINY_ONEVISION, "vision_feature_layer": []}, "[] names no layer"),
        ({**TINY_ONEVISION, "vision_feature_layer": "last"}, "'last' names no layer"),
        ({**TINY_ONEVISION, "vision_feature_layer": None}, "None names no layer"),
        ({**TINY_ONEVISION, "vision_feature_layer": 1.0}, "1.0 names no layer"),
        (
            {**TINY_ONEVISION, "image_grid_pinpoints": [28, 56]},
            "should be pairs of multiples of 28",
        ),
        ({**TINY_ONEVISION, "image_grid_pinpoints": []}, "should be pairs of multiples of 28"),
        ({**TINY_ONEVISION, "image_grid_pinpoints": [[28, 40]]}, "pairs of multiples of 28"),
        ({**TINY_ONEVISION, "image_grid_pinpoints": [[0, 28]]}, "pairs of multiples of 28"),
        ({**TINY_ONEVISION, "image_grid_pinpoints": [["a", "b"]]}, "pairs of multiples of 28"),
        ({**TINY_ONEVISION, "image_grid_pinpoints": 28}, "pairs of multiples of 28"),
    ],
)
def test_configurations_that_cannot_be(config: Config, expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        family_of(config).architecture(config)
    assert words(caught.value).startswith("config.json: ")
    assert expected in caught.value.message
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**TINY_ONEVISION, "vision_feature_select_strategy": "default"}, "select_strategy"),
        (
            changed(TINY_ONEVISION, "vision_config", model_type="clip_vision_model"),
            "vision_config.model_type is 'clip_vision_model', and this family needs 'siglip_vis",
        ),
        (changed(TINY_ONEVISION, "text_config", use_sliding_window=True), "sliding-window"),
        ({**TINY_ONEVISION, "vision_aspect_ratio": "pad"}, "'pad' is not supported"),
        ({**TINY_ONEVISION, "vision_aspect_ratio": "anyres_max_0"}, "anyres_max_0"),
        ({**TINY_ONEVISION, "vision_aspect_ratio": "anyres"}, "'anyres' is not supported"),
        ({**TINY_ONEVISION, "vision_aspect_ratio": None}, "'None' is not supported"),
    ],
)
def test_configurations_that_are_sound_but_not_run(config: Config, expected: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        family_of(config).architecture(config)
    assert expected in words(caught.value)


@pytest.mark.parametrize(
    ("named", "indices"),
    [(-1, (3,)), (-2, (2,)), (-4, (0,)), (0, (0,)), (3, (3,)), ([-1, 0], (3, 0)), ([2], (2,))],
)
def test_feature_layers_count_from_the_embeddings(named: object, indices: tuple[int, ...]) -> None:
    assert multimodal.feature_layers({"vision_feature_layer": named}, 3, default=-1) == indices


@pytest.mark.parametrize(
    ("config", "detail", "cost"),
    [
        (ONEVISION, "high", (2, 1485)),
        (ONEVISION, "low", (1, 730)),
        (TINY_ONEVISION, "high", (2, 16 + 16 + 4)),
        (TINY_ONEVISION, "low", (1, 17)),
        (SIGLIP, "high", (1, 729)),
        (SIGLIP, "low", (1, 729)),
    ],
)
def test_cost_of_a_square(config: Config, detail: Detail, cost: tuple[int, int]) -> None:
    family = family_of(config)
    side = config["vision_config"]["image_size"]
    found = family.image_cost(family.architecture(config), side, side, View(detail))
    assert (found.crops, found.tokens) == cost


@pytest.mark.parametrize(
    ("kind", "vision", "phases"),
    [
        ("pooled", ["embeddings", "layers.0", "layers.1", "layers.2", "norm", "head"], 2),
        ("last-hidden", ["embeddings", "layers.0", "layers.1", "layers.2", "norm"], 1),
        ("hidden:-1", ["embeddings", "layers.0", "layers.1", "layers.2"], 1),
        ("hidden:3", ["embeddings", "layers.0", "layers.1", "layers.2"], 1),
        ("hidden:-2", ["embeddings", "layers.0", "layers.1"], 1),
        ("hidden:-4", ["embeddings"], 1),
        ("hidden:0", ["embeddings"], 1),
    ],
)
def test_blocks_that_run_for_a_kind_of_output(kind: str, vision: list[str], phases: int) -> None:
    family = family_of(TINY_SIGLIP)
    found = family.phases(family.architecture(TINY_SIGLIP), kind)
    assert found["vision"] == tuple(f"vision.{name}" for name in vision)
    assert len(found) == phases
    if phases == 2:
        assert found["text"] == (
            "text.tokens",
            "text.positions",
            "text.layers.0",
            "text.layers.1",
            "text.norm",
            "text.head",
        )
    alone = family_of(TINY_VISION)
    assert alone.phases(alone.architecture(TINY_VISION), kind) == {"vision": found["vision"]}


@pytest.mark.parametrize(
    "kind", ["", "hidden", "hidden:", "hidden:x", "hidden:--1", "mean", "hidden:4"]
)
def test_unknown_kinds_of_output(kind: str) -> None:
    family = family_of(TINY_SIGLIP)
    with pytest.raises(UsageError) as caught:
        family.phases(family.architecture(TINY_SIGLIP), kind)
    assert "hidden:-" in words(caught.value)


def test_no_pooled_output_without_a_pooling_head() -> None:
    config = changed(TINY_VISION, "", vision_use_head=False)
    family = family_of(config)
    with pytest.raises(UnsupportedModel, match="no pooling head") as caught:
        family.phases(family.architecture(config), "pooled")
    assert "last-hidden" in words(caught.value)
    assert family.phases(family.architecture(config), "last-hidden")


@pytest.mark.parametrize(
    ("layer", "deepest"), [(-1, 3), (-2, 2), (0, 0), ([-4, -2], 2), ([3, 0], 3)]
)
def test_the_tower_runs_as_deep_as_the_decoder_sees(layer: object, deepest: int) -> None:
    config = {**TINY_ONEVISION, "vision_feature_layer": layer}
    found = multimodal.phases(onevision.architecture(config), "pooled")
    layers = [f"vision.layers.{i}" for i in range(deepest)]
    assert found["vision"] == ("vision.embeddings", *layers, "projector")
    assert found["decode"] == (
        "decoder.tokens",
        *(f"decoder.layers.{i}" for i in range(3)),
        "decoder.norm",
        "head",
    )


@pytest.mark.parametrize("config", [SIGLIP, VISION_ALONE, ONEVISION, ONEVISION_7B])
def test_phases_name_blocks_there_are(config: Config) -> None:
    family = family_of(config)
    shape = family.architecture(config)
    named = [name for names in family.phases(shape, "pooled").values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) <= {block.name for block in shape.blocks}
