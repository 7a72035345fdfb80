"""timm's SigLIP configurations and keys, held to what timm itself makes of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from light import changed
from timm_goldens import GOLDENS, load_stock

from vlmrun.errors import CheckpointError, UnsupportedModel, VlmrunError
from vlmrun.models.model import places_of
from vlmrun.models.siglip import SIGLIP_VISION
from vlmrun.models.timm import (
    ARCHITECTURES,
    TIMM_FUSED,
    TIMM_IGNORED,
    TIMM_RENAMES,
    translate_timm,
)
from vlmrun.models.transforms import picture_settings

TIMM = replace(SIGLIP_VISION, renames=TIMM_RENAMES, fused=TIMM_FUSED, ignored=TIMM_IGNORED)
MAP: dict[str, Any] = GOLDENS["models"]["map"]["config"]
PICTURE = Path(__file__).parents[2] / "vlmrun/data/pictures/elephant.png"
HUB: dict[str, Any] = {  # as files on the hub are: no model_args
    "architecture": "vit_so400m_patch14_siglip_384",
    "num_classes": 0,
    "num_features": 1152,
    "global_pool": "map",
    "pretrained_cfg": {**MAP["pretrained_cfg"], "input_size": [3, 384, 384]},
}


def test_every_architecture_is_as_timm_builds_it() -> None:
    assert ARCHITECTURES.keys() == GOLDENS["architectures"].keys()
    for name, numbers in GOLDENS["architectures"].items():
        size = {"input_size": [3, numbers[5], numbers[5]]}
        found = translate_timm({**changed(HUB, "pretrained_cfg", **size), "architecture": name})
        assert [
            found["hidden_size"],
            found["num_hidden_layers"],
            found["num_attention_heads"],
            found["intermediate_size"],
            found["patch_size"],
            found["image_size"],
            found["hidden_act"],
            found["vision_use_head"],
            found["layer_norm_eps"],
        ] == numbers, name


def test_a_file_of_the_hub() -> None:
    found = translate_timm(HUB)
    assert (found["model_type"], found["intermediate_size"]) == ("timm_siglip", 4304)
    assert found["image_processor"] == {
        "image_processor_type": "CLIPImageProcessor",
        "halves_rounded": True,
        "do_resize": True,
        "size": {"shortest_edge": 426},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": 384, "width": 384},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def test_a_file_from_before_pretrained_cfg() -> None:
    flat = {"architecture": HUB["architecture"], **HUB["pretrained_cfg"]}
    assert translate_timm(flat) == translate_timm(HUB)


def test_arguments_of_the_file_go_before_the_name() -> None:
    found = translate_timm(changed(MAP, "model_args", act_layer="gelu_tanh", drop_path_rate=0.1))
    assert found["hidden_act"] == "gelu_pytorch_tanh"
    assert (found["hidden_size"], found["intermediate_size"], found["image_size"]) == (48, 72, 28)


def test_a_squash_without_margin_is_no_crop() -> None:
    settings = picture_settings({**HUB["pretrained_cfg"], "crop_mode": "squash", "crop_pct": 1}, 28)
    assert settings["size"] == {"height": 28, "width": 28}
    assert "do_center_crop" not in settings


@pytest.mark.parametrize(
    ("key", "paths"),
    [
        ("patch_embed.proj.weight", ["embeddings.patch_embedding.weight"]),
        ("pos_embed", ["embeddings.position_embedding.weight"]),
        ("blocks.12.norm1.bias", ["encoder.layers.12.layer_norm1.bias"]),
        ("blocks.0.attn.proj.weight", ["encoder.layers.0.self_attn.out_proj.weight"]),
        ("blocks.0.mlp.fc2.bias", ["encoder.layers.0.mlp.fc2.bias"]),
        ("norm.weight", ["post_layernorm.weight"]),
        ("attn_pool.latent", ["head.probe"]),
        ("attn_pool.q.bias", ["head.attention.q_proj.bias"]),
        ("attn_pool.norm.weight", ["head.layernorm.weight"]),
        ("attn_pool.mlp.fc1.weight", ["head.mlp.fc1.weight"]),
        (
            "blocks.3.attn.qkv.bias",
            [f"encoder.layers.3.self_attn.{part}_proj.bias" for part in "qkv"],
        ),
        ("attn_pool.kv.weight", [f"head.attention.{part}_proj.weight" for part in "kv"]),
    ],
)
def test_keys_become_module_paths(key: str, paths: list[str]) -> None:
    found = list(places_of(TIMM, key, (12, 4)))
    assert [path for path, _ in found] == paths
    if len(paths) > 1:
        rows = 12 // len(paths)
        expected = [(at, at + rows) for at in range(0, 12, rows)]
        assert [place.rows for _, place in found] == expected


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ({**HUB, "architecture": "vit_base_patch16_224"}, UnsupportedModel, "vit_base_patch16_224"),
        ({"model_args": {}}, UnsupportedModel, "architecture None"),
        ({**HUB, "model_args": {"class_token": True}}, UnsupportedModel, "class_token"),
        ({**HUB, "model_args": {"qkv_bias": False}}, UnsupportedModel, "qkv_bias"),
        ({**HUB, "model_args": {"block_fn": "x"}}, UnsupportedModel, "block_fn"),
        ({**HUB, "model_args": {"img_size": [384, 224]}}, UnsupportedModel, "[384, 224]"),
        ({**HUB, "model_args": {"act_layer": "quick_gelu"}}, UnsupportedModel, "quick_gelu"),
        ({**HUB, "model_args": {"act_layer": ["gelu"]}}, UnsupportedModel, "['gelu']"),
        ({**HUB, "model_args": {"global_pool": "avg"}}, UnsupportedModel, "fc_norm None"),
        ({**HUB, "model_args": {"global_pool": "max"}}, UnsupportedModel, "'max'"),
        ({**HUB, "model_args": {"mlp_ratio": "4"}}, CheckpointError, "mlp_ratio"),
        ({**HUB, "model_args": {"embed_dim": 0}}, CheckpointError, "embed_dim"),
        ({**HUB, "model_args": 3}, CheckpointError, "model_args"),
        (changed(HUB, "pretrained_cfg", mean=None), CheckpointError, "mean"),
        (changed(HUB, "pretrained_cfg", std=[0.5]), CheckpointError, "std"),
        (changed(HUB, "pretrained_cfg", interpolation="random"), UnsupportedModel, "random"),
        (changed(HUB, "pretrained_cfg", input_size=None), CheckpointError, "input_size"),
        (changed(HUB, "pretrained_cfg", input_size="384"), CheckpointError, "img_size"),
        (changed(HUB, "pretrained_cfg", crop_pct=1.5), CheckpointError, "crop_pct"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    config: dict[str, Any], kind: type[VlmrunError], words: str
) -> None:
    with pytest.raises(kind) as told:
        translate_timm(config)
    assert words in told.value.message
    assert told.value.hint


@pytest.mark.parametrize(
    "given",
    [{"img_size": 384, "dynamic_img_size": True}, {"dynamic_img_size": True}, {"img_size": 384}],
    ids=str,
)
def test_a_tower_of_any_size_is_shown_its_own(given: dict[str, Any]) -> None:
    found = translate_timm({**HUB, "model_args": given})
    assert found["image_size"] == found["image_processor"]["crop_size"]["height"] == 384


@pytest.mark.parametrize(
    ("config", "words", "side"),
    [
        (changed(HUB, "pretrained_cfg", crop_mode="border"), "crop_mode is 'border'", 384),
        (changed(HUB, "pretrained_cfg", crop_mode="squash"), "crop_mode is 'squash'", 384),
        (
            {**HUB, "model_args": {"img_size": 448, "dynamic_img_size": True}},
            "img_size is 448 and input_size 384",
            448,
        ),
    ],
    ids=["border", "squash", "two sizes"],
)
def test_squares_that_are_not_made_are_named_and_leave_the_colours(
    config: dict[str, Any], words: str, side: int
) -> None:
    found = translate_timm(config)
    assert words in found["image_processor"]["unrun"]
    assert "size" not in found["image_processor"]
    assert found["image_processor"]["image_mean"] == [0.5, 0.5, 0.5]
    assert found["image_size"] == side


def test_an_unknown_architecture_is_told_what_is_near() -> None:
    with pytest.raises(UnsupportedModel) as told:
        translate_timm({**HUB, "architecture": "vit_base_patch16_siglip_gap_999"})
    assert "vit_base_patch16_siglip_gap_256" in told.value.hint
    assert len(told.value.hint) < 200


def test_the_recipe_makes_the_weights_that_timm_ran() -> None:
    from seeded import random_weights, sha256

    for golden in (*GOLDENS["models"].values(), GOLDENS["open_clip"]):
        assert sha256(random_weights(golden["weights"]).values()) == golden["sha256"]


@pytest.mark.parametrize("name", GOLDENS["models"])
def test_the_stock_tower_gives_timms_numbers(name: str) -> None:
    import torch
    import transformers
    from seeded import random_pixels

    golden = GOLDENS["models"][name]
    settings = translate_timm(golden["config"])
    config = transformers.SiglipVisionConfig(
        **{key: value for key, value in settings.items() if key != "model_type"}
    )
    model = transformers.SiglipVisionModel(config).eval()
    load_stock(model, TIMM, golden["weights"])
    with torch.inference_mode():
        found = model(random_pixels(28, 28), output_hidden_states=True)
    hidden = found.last_hidden_state[0]
    pooled = found.pooler_output[0] if settings["vision_use_head"] else hidden.mean(0)
    near(found.hidden_states[-2][0], golden["hidden:-2"])
    near(hidden, golden["last-hidden"])
    near(pooled, golden["pooled"])


def near(found: Any, golden: Any) -> None:
    import torch

    torch.testing.assert_close(found, torch.tensor(golden), rtol=0, atol=5e-6)
