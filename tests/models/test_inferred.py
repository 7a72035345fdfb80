"""A vision tower in a single file: its shapes say what it is; what they do not say is told."""

from collections.abc import Mapping

import pytest
from light import SIGLIP, module_tensors, words

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.checkpoints.checkpoint import TensorInfo
from vlmrun.models.checkpoints.source import Source
from vlmrun.models.families import family_of
from vlmrun.models.inferred import HEADS, infer_config
from vlmrun.models.model import assemble, shapes_only

BASE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 16,
}
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
}
SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}
GIANT = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "patch_size": 16,
}


def tower(prefix: str = "vision_model.", **config: object) -> dict[str, TensorInfo]:
    """A file of the tower this configuration describes."""
    tensors = module_tensors({"model_type": "siglip_vision_model", **config}, "F16")
    return {f"{prefix}{path}": TensorInfo(dtype, shape) for path, (dtype, shape) in tensors.items()}


def named(*names: str) -> dict[str, TensorInfo]:
    return {name: TensorInfo("F16", (4, 4)) for name in names}


@pytest.mark.parametrize("prefix", ["vision_model.", ""])
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(
    ("shape", "side"),
    [
        *((BASE, side) for side in (224, 256, 384, 512)),
        ({**BASE, "patch_size": 32}, 256),
        *((LARGE, side) for side in (256, 384, 512)),
        *((SO400M, side) for side in (224, 384)),
        *(({**SO400M, "patch_size": 16}, side) for side in (256, 384, 512)),
        *((GIANT, side) for side in (256, 384)),
        *((SO400M, side) for side in (448, 896, 980)),  # PaliGemma's and Idefics' own sizes
    ],
)
def test_every_published_tower(
    shape: Mapping[str, int], side: int, head: bool, prefix: str
) -> None:
    whole = {**shape, "image_size": side, "vision_use_head": head}
    tensors = tower(prefix, **whole)
    config, note = infer_config(tensors)
    assert {name: config[name] for name in whole} == whole
    assert config["hidden_act"] == "gelu_pytorch_tanh"
    assert config["image_processor"]["size"] == {"height": side, "width": side}
    family = family_of(config)
    assert shapes_only(family.architecture(config), "float16").tensors.keys() == {
        name.removeprefix(prefix) for name in tensors
    }
    for said in (f"{shape['num_attention_heads']} heads", f"{side} pixels", "tanh GELU", "0.5"):
        assert said in note
    assert "\n" not in note


def test_the_real_one_is_the_alias_s_tower() -> None:
    """As ComfyUI's sigclip_vision_patch14_384: 729 positions are 384 pixels, not 27 x 14."""
    config, note = infer_config(tower(**SIGLIP["vision_config"]))
    assert config["image_size"] == 384
    assert "384 pixels as published for 729 patches of 14" in note
    stated = {k: v for k, v in SIGLIP["vision_config"].items() if k in config}
    assert {name: config[name] for name in stated} == {
        **stated,
        "model_type": "siglip_vision_model",
    }


def test_what_was_inferred_is_held_to_the_file() -> None:
    """Inference looks at a few tensors; the load at all of them."""
    tensors = tower(**BASE, image_size=224)
    tensors["vision_model.encoder.layers.3.mlp.fc1.weight"] = TensorInfo("F16", (3000, 768))
    config, _ = infer_config(tensors)
    from vlmrun.models.checkpoints.checkpoint import Checkpoint

    source = Source("x", "x", None, None, None, True)
    with pytest.raises(CheckpointError, match=r"of another shape: vision_model.encoder.layers.3"):
        assemble(source, config, Checkpoint(tensors))


@pytest.mark.parametrize(
    ("names", "what", "hint"),
    [
        (
            ["redux_up.weight", "redux_up.bias", "redux_down.weight", "redux_down.bias"],
            "a FLUX Redux projector",
            "give a SigLIP vision tower",
        ),
        (
            ["logit_scale", "text_model.head.weight", "vision_model.head.probe"],
            "a whole SigLIP",
            "config.json",
        ),
        (
            ["language_model.model.layers.0.mlp.up_proj.weight", "multi_modal_projector.bias"],
            "a LLaVA or another captioner",
            "config.json",
        ),
        (["model.mm_projector.0.weight", "model.layers.0.mlp.up.weight"], "a LLaVA", "folder"),
        (["model.language_model.layers.0.a", "model.vision_tower.b"], "a LLaVA", "folder"),
        (["text_model.embeddings.token_embedding.weight"], "a text encoder", "vision tower"),
        (["encoder.block.0.layer.0.SelfAttention.q.weight", "shared.weight"], "a text encoder", ""),
        (["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"], "a text encoder", ""),
        (["double_blocks.0.img_attn.qkv.weight"], "a diffusion model", "vision tower"),
        (["model.diffusion_model.input_blocks.0.0.weight"], "a diffusion model", ""),
        (["transformer_blocks.0.attn.to_q.weight"], "a diffusion model", ""),
        (["down_blocks.0.resnets.0.conv1.weight"], "a diffusion model", ""),
        (["decoder.conv_in.weight", "encoder.down.0.block.0.conv1.weight"], "VAE", ""),
        (["lora_unet_double_blocks_0.lora_up.weight"], "a LoRA", ""),
        (["visual.trunk.patch_embed.proj.weight", "logit_scale"], "open_clip's layout", "beside"),
        (["blocks.0.attn.qkv.weight", "patch_embed.proj.weight"], "timm's layout", "beside it"),
        (["vision_model.embeddings.class_embedding"], "a CLIP, not a SigLIP", "config.json"),
    ],
)
def test_what_else_it_may_be_is_named(names: list[str], what: str, hint: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        infer_config(named(*names))
    assert "looks like " in caught.value.message
    assert what in caught.value.message
    assert hint in caught.value.hint
    assert words(caught.value)


def test_naflex_and_the_unknown() -> None:
    patches = "vision_model.embeddings.patch_embedding.weight"
    with pytest.raises(UnsupportedModel, match="is a SigLIP 2 NaFlex tower"):
        infer_config({patches: TensorInfo("F16", (768, 768))})
    for tensors in ({}, named("weight", "bias")):
        with pytest.raises(UnsupportedModel, match="is none of a SigLIP") as caught:
            infer_config(tensors)
        assert "put its config.json beside it" in caught.value.hint


def test_an_unknown_width_is_refused() -> None:
    shape = {**BASE, "hidden_size": 384, "num_attention_heads": 6}
    with pytest.raises(UnsupportedModel, match="how many heads its tower of width 384") as caught:
        infer_config(tower(**shape))
    assert all(str(width) in caught.value.hint for width in HEADS)
    assert "config.json beside it" in caught.value.hint


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("embeddings.position_embedding.weight", "no embeddings.position_embedding.weight"),
        ("encoder.layers.0.mlp.fc1.weight", "no encoder.layers.0.mlp.fc1.weight"),
        ("encoder.layers.7.", "no layer 7, but a layer 11"),
    ],
)
def test_a_tower_that_is_not_whole(lost: str, said: str) -> None:
    tensors = {name: info for name, info in tower("", **BASE).items() if not name.startswith(lost)}
    with pytest.raises(CheckpointError) as caught:
        infer_config(tensors)
    assert said in caught.value.message


def test_positions_that_make_no_square() -> None:
    tensors = tower("", **BASE)
    tensors["embeddings.position_embedding.weight"] = TensorInfo("F16", (197, 768))
    with pytest.raises(CheckpointError, match="197 positions, which make no square"):
        infer_config(tensors)
