"""open_clip's SigLIP files: configuration, keys and texts are what open_clip makes of them."""

from dataclasses import replace
from typing import Any

import pytest
from light import changed
from timm_goldens import GOLDENS, load_stock, register_trunk

from vlmrun.errors import CheckpointError, UnsupportedModel, VlmrunError
from vlmrun.models.model import places_of
from vlmrun.models.open_clip import (
    OPEN_CLIP_FUSED,
    OPEN_CLIP_RENAMES,
    clean_text,
    translate_open_clip,
)
from vlmrun.models.siglip import SIGLIP

OPEN_CLIP = replace(SIGLIP, renames=OPEN_CLIP_RENAMES, fused=OPEN_CLIP_FUSED)
TINY: dict[str, Any] = GOLDENS["open_clip"]["config"]
PREPARATION = TINY["preprocess_cfg"]
TEXT = {
    "context_length": 64,
    "vocab_size": 32000,
    "hf_tokenizer_name": "timm/ViT-B-16-SigLIP",
    "tokenizer_kwargs": {"clean": "canonicalize"},
    "width": 1152,
    "heads": 16,
    "layers": 27,
    "mlp_ratio": 3.7362,
    "no_causal_mask": True,
    "proj_bias": True,
    "pool_type": "last",
    "norm_kwargs": {"eps": 1e-6},
}
VISION = {
    "image_size": 384,
    "timm_model_name": "vit_so400m_patch14_siglip_384",
    "timm_model_pretrained": False,
    "timm_pool": "map",
    "timm_proj": "none",
}


def config(
    text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **model: Any
) -> dict[str, Any]:
    """ViT-SO400M-14-SigLIP-384's file, with other values."""
    return {
        "model_cfg": {
            "embed_dim": 1152,
            "init_logit_bias": -10,
            "custom_text": True,
            "vision_cfg": {**VISION, **(vision or {})},
            "text_cfg": {**TEXT, **(text or {})},
            **model,
        },
        "preprocess_cfg": PREPARATION,
    }


def test_siglip_so400m() -> None:
    found = translate_open_clip(config())
    assert found["model_type"] == "open_clip_siglip"
    assert found["vision_config"]["intermediate_size"] == 4304
    assert found["vision_config"]["hidden_act"] == "gelu"
    assert found["text_config"] == {
        "model_type": "siglip_text_model",
        "vocab_size": 32000,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "max_position_embeddings": 64,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "projection_size": 1152,
    }
    assert found["tokenizer"] == {"clean": "canonicalize", "context_length": 64}
    assert found["image_processor"] == {
        "image_processor_type": "SiglipImageProcessor",
        "do_resize": True,
        "size": {"height": 384, "width": 384},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def test_giant_siglip2_projects_its_texts_to_the_width_of_pictures() -> None:
    giant = {"timm_model_name": "vit_giantopt_patch16_siglip_384"}
    tanh = {"act_kwargs": {"approximate": "tanh"}}
    found = translate_open_clip(config(tanh, giant, embed_dim=1536))
    assert found["vision_config"]["hidden_size"] == found["text_config"]["projection_size"] == 1536
    assert found["text_config"]["hidden_size"] == 1152
    assert found["text_config"]["hidden_act"] == "gelu_pytorch_tanh"


def test_a_text_tower_that_projects_nothing_says_so() -> None:
    found = translate_open_clip(config({"proj_type": "none", "proj_bias": False}))
    assert found["text_config"]["use_head"] is False
    with pytest.raises(CheckpointError, match="nothing projects"):
        translate_open_clip(config({"proj_type": "none"}, embed_dim=768))


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (
            config(vision={"timm_model_name": "vit_base_patch16_224"}),
            UnsupportedModel,
            "patch16_224",
        ),
        (config(vision={"timm_model_name": None}), UnsupportedModel, "None"),
        (config(vision={"timm_pool": "avg"}), UnsupportedModel, "timm_pool 'avg'"),
        (config(vision={"timm_proj": "linear"}), UnsupportedModel, "timm_proj 'linear'"),
        (config(vision={"image_size": 378}), UnsupportedModel, "image_size 378"),
        (config({"hf_model_name": "facebook/nllb"}), UnsupportedModel, "facebook/nllb"),
        (config({"no_causal_mask": False}), UnsupportedModel, "no_causal_mask False"),
        (config({"pool_type": "argmax"}), UnsupportedModel, "pool_type 'argmax'"),
        (config({"proj_bias": False}), UnsupportedModel, "proj_bias False"),
        (config({"tokenizer_kwargs": {"clean": "x"}}), UnsupportedModel, "'x'"),
        (config({"tokenizer_kwargs": {"language": "de"}}), UnsupportedModel, "language"),
        (config({"hf_tokenizer_name": None}), UnsupportedModel, "no hf_tokenizer_name"),
        (config({"norm_kwargs": 3}), CheckpointError, "norm_kwargs"),
        (config({"layers": 0}), CheckpointError, "layers"),
        (config(quick_gelu=True), UnsupportedModel, "quick_gelu True"),
        (config(custom_text=False), UnsupportedModel, "custom_text False"),
        (config(init_logit_bias=None), UnsupportedModel, "init_logit_bias"),
        ({"preprocess_cfg": PREPARATION}, CheckpointError, "model_cfg"),
        (changed(config(), "preprocess_cfg", mean=None), CheckpointError, "mean"),
        (changed(config(), "preprocess_cfg", resize_mode=None), CheckpointError, "resize_mode"),
        (changed(config(), "preprocess_cfg", resize_mode="shortest"), UnsupportedModel, "shortest"),
    ],
)
def test_what_is_not_siglip_is_refused_by_name(
    given: dict[str, Any], kind: type[VlmrunError], words: str
) -> None:
    with pytest.raises(kind) as told:
        translate_open_clip(given)
    assert words in told.value.message
    assert told.value.hint


@pytest.mark.parametrize(
    ("key", "paths"),
    [
        ("logit_scale", ["logit_scale"]),
        ("module.logit_bias", ["logit_bias"]),
        ("visual.trunk.pos_embed", ["vision_model.embeddings.position_embedding.weight"]),
        ("module.visual.trunk.attn_pool.latent", ["vision_model.head.probe"]),
        ("text.token_embedding.weight", ["text_model.embeddings.token_embedding.weight"]),
        ("text.positional_embedding", ["text_model.embeddings.position_embedding.weight"]),
        (
            "text.transformer.resblocks.11.ln_2.weight",
            ["text_model.encoder.layers.11.layer_norm2.weight"],
        ),
        (
            "text.transformer.resblocks.1.attn.out_proj.bias",
            ["text_model.encoder.layers.1.self_attn.out_proj.bias"],
        ),
        (
            "text.transformer.resblocks.1.mlp.c_fc.weight",
            ["text_model.encoder.layers.1.mlp.fc1.weight"],
        ),
        (
            "text.transformer.resblocks.1.mlp.c_proj.weight",
            ["text_model.encoder.layers.1.mlp.fc2.weight"],
        ),
        ("text.ln_final.bias", ["text_model.final_layer_norm.bias"]),
        ("text.text_projection.weight", ["text_model.head.weight"]),
        (
            "text.transformer.resblocks.1.attn.in_proj_weight",
            [f"text_model.encoder.layers.1.self_attn.{part}_proj.weight" for part in "qkv"],
        ),
        (
            "visual.trunk.blocks.1.attn.qkv.bias",
            [f"vision_model.encoder.layers.1.self_attn.{part}_proj.bias" for part in "qkv"],
        ),
        (
            "visual.trunk.attn_pool.kv.weight",
            [f"vision_model.head.attention.{part}_proj.weight" for part in "kv"],
        ),
    ],
)
def test_keys_become_module_paths(key: str, paths: list[str]) -> None:
    assert [path for path, _ in places_of(OPEN_CLIP, key, (12, 4))] == paths


@pytest.mark.parametrize("kind", GOLDENS["texts"])
def test_texts_are_cleaned_as_open_clip_does(kind: str) -> None:
    for text, cleaned in GOLDENS["texts"][kind]:
        assert clean_text(text, kind) == cleaned
    assert clean_text("&rsquo;\x92\x1b[31m Ŀ\x07", "whitespace") == "'' Ŀ"


def test_the_stock_model_gives_open_clips_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import transformers
    from seeded import random_pixels

    register_trunk(monkeypatch)
    golden, settings = GOLDENS["open_clip"], translate_open_clip(TINY)
    assert settings["vision_config"]["hidden_act"] != settings["text_config"]["hidden_act"]
    towers = {name: settings[name] for name in ("vision_config", "text_config")}
    model = transformers.SiglipModel(transformers.SiglipConfig(**towers)).eval()
    load_stock(model, OPEN_CLIP, golden["weights"])
    with torch.inference_mode():
        found = model(input_ids=torch.tensor(golden["ids"]), pixel_values=random_pixels(28, 28))
    near(found.vision_model_output.pooler_output[0], golden["image"])
    near(found.text_model_output.pooler_output, golden["text"])
    near(found.logits_per_image[0], golden["logits"])


def near(found: Any, golden: Any) -> None:
    import torch

    torch.testing.assert_close(found, torch.tensor(golden), rtol=0, atol=5e-6)
