"""The tiny checkpoints are what stock transformers takes them for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from entries import noise
from safetensors import safe_open
from tiny import SPECIAL, build_onevision, build_siglip, build_siglip_vision, build_vipllava
from tiny_llava import build_llava, build_llava_next

# transformers' own image processor by name: the automatic choice depends on what is installed.
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

BUILDS = {
    "siglip": (build_siglip, {}),
    "siglip in shards": (build_siglip, {"shards": 3}),
    "siglip bfloat16": (build_siglip, {"dtype": "bfloat16"}),
    "siglip2": (build_siglip, {"version": 2}),
    "vision tower": (build_siglip_vision, {}),
    "vision tower, module paths": (build_siglip_vision, {"spelling": "module"}),
    "onevision": (build_onevision, {}),
    "onevision float16 in shards": (build_onevision, {"dtype": "float16", "shards": 2}),
    "onevision, module paths": (build_onevision, {"spelling": "module"}),
    "onevision untied": (build_onevision, {"tied": False}),
    "onevision untied, module paths": (build_onevision, {"tied": False, "spelling": "module"}),
    "onevision, inner layer": (build_onevision, {"feature_layer": -2}),
    "vipllava": (build_vipllava, {}),
    "llava": (build_llava, {}),
    "llava, module paths, in shards": (build_llava, {"spelling": "module", "shards": 2}),
    "llava of siglip": (build_llava, {"tower": "siglip"}),
    "llava-next": (build_llava_next, {}),
    "llava-next, module paths": (build_llava_next, {"spelling": "module"}),
}


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, said = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    return model.eval(), said


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


@pytest.mark.parametrize("name", BUILDS)
def test_transformers_loads_every_tensor(name: str, tmp_path: Path) -> None:
    build, options = BUILDS[name]
    folder = build(tmp_path, **options)
    model, said = load(folder)
    assert not any(said.values()), said
    tensors = read_tensors(folder)
    dtype = getattr(torch, options.get("dtype", "float32"))
    assert all(tensor.dtype == dtype and tensor.all() for tensor in tensors.values())
    assert len(tensors) == len(list(model.parameters()))
    assert len(list(folder.glob("*.safetensors"))) == options.get("shards", 1)


def test_onevision_is_spelled_as_on_the_hub(
    tiny_onevision: Path, tiny_onevision_untied: Path
) -> None:
    tied, untied = read_tensors(tiny_onevision), read_tensors(tiny_onevision_untied)
    assert set(untied) - set(tied) == {"language_model.lm_head.weight"}
    assert {
        "image_newline",
        "multi_modal_projector.linear_1.weight",
        "language_model.model.embed_tokens.weight",
        "vision_tower.vision_model.encoder.layers.2.mlp.fc1.weight",
    } <= set(tied)
    config = json.loads((tiny_onevision / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    assert config["text_config"]["tie_word_embeddings"]


def test_siglip_text_is_lowered_and_ended(tiny_siglip: Path, tiny_siglip2: Path) -> None:
    for folder, kind in (tiny_siglip, "SiglipTokenizer"), (tiny_siglip2, "TokenizersBackend"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert type(tokenizer).__name__ == kind
        words = tokenizer(["A Red Apple", "a red apple"], padding="max_length")
        assert list(words) == ["input_ids"]
        assert words["input_ids"][0] == words["input_ids"][1]
        assert len(words["input_ids"][0]) == tokenizer.model_max_length == 16
        assert tokenizer.eos_token_id in words["input_ids"][0]
        assert tokenizer.unk_token_id not in words["input_ids"][0]
        model, _ = load(folder)
        assert len(tokenizer) == model.config.text_config.vocab_size


@pytest.mark.parametrize("fixture", ["tiny_onevision", "tiny_onevision_untied"])
def test_captions_follow_the_picture(fixture: str, request: pytest.FixtureRequest) -> None:
    """Greedy tokens differ between pictures and within one caption, so comparing them means
    something."""
    folder = request.getfixturevalue(fixture)
    model, _ = load(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = LlavaOnevisionImageProcessorPil.from_pretrained(folder)
    captions = []
    for seed in range(4):
        pixels = processor(noise(seed), return_tensors="pt")
        # 16 of the base view, 64 + 8 line ends of the 56 x 56 tiles
        prompt = "<|im_start|>user " + "<image>" * 88 + "\nWhat is this?<|im_end|>"
        tokens = tokenizer(prompt, return_tensors="pt")
        assert (tokens["input_ids"] == SPECIAL["<image>"]).sum() == 88
        made = model.generate(**tokens, **pixels, max_new_tokens=12, do_sample=False)
        captions.append(tuple(made[0, tokens["input_ids"].shape[1] :].tolist()))
    assert len(set(captions)) == 4
    assert all(len(set(caption)) > 3 for caption in captions)
