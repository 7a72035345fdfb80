"""Settings that a search through configurations found ignored or ending in a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command, assert_refused
from entries import Ready, load_tiny, noise, trace
from folders import changed, copied, picture, setting
from light import TINY_ONEVISION
from light import changed as with_values
from safetensors.torch import load_file, save_file
from tiny_llava import build_llava
from tiny_paligemma import build_paligemma
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.families import family_of
from vlmrun.tasks.chat import Chat
from vlmrun.tasks.decode import DecodeRow
from vlmrun.tasks.preprocess import PicturePreprocessor


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding layers"),
        ({"is_causal": False}, "is_causal false"),
    ],
)
def test_attention_that_is_not_run_is_refused(values: dict[str, Any], words: str) -> None:
    config = with_values(TINY_ONEVISION, "text_config", **values)
    with pytest.raises(UnsupportedModel, match=f"a qwen2 decoder with {words}"):
        family_of(config).architecture(config)


@pytest.mark.parametrize(
    "values", [{"rope_type": "linear", "factor": 2.0}, {"type": "yarn", "factor": 4.0}]
)
def test_scaled_angles_that_depend_on_nothing_else_are_run(values: dict[str, Any]) -> None:
    config = with_values(TINY_ONEVISION, "text_config", rope_scaling=values)
    assert family_of(config).architecture(config).decoder is not None


def test_a_paligemma_that_transformers_wrote_is_run(tmp_path: Path) -> None:
    """Its configuration class writes `use_bidirectional_attention` into every decoder."""
    folder = build_paligemma(tmp_path / "m")
    values = {"use_bidirectional_attention": True}
    text = json.loads((folder / "config.json").read_text())["text_config"] | values
    found = [
        trace(load_tiny(each), [DecodeRow((5, 9, 12), None)])
        for each in (
            folder,
            copied(folder, tmp_path / "c", setting("config.json", text_config=text)),
        )
    ]
    assert torch.equal(*found)


def test_only_a_family_that_bounds_its_logits_does(tmp_path: Path) -> None:
    """Stock LLaVA leaves its decoder's `final_logit_softcapping` alone."""
    found = []
    for at, values in enumerate(({}, {"final_logit_softcapping": 1.0, "return_dict": False})):
        folder = build_llava(tmp_path / str(at), decoder=values)
        ready = load_tiny(folder)
        found.append(logits(ready))
    assert torch.equal(*found)


def logits(ready: Ready) -> torch.Tensor:
    return trace(ready, [DecodeRow((5, 9, 12), None)])


@pytest.mark.parametrize("channels", [1, 4])
def test_pictures_have_three_channels(
    vlmrun: Command, tiny_siglip: Path, tmp_path: Path, channels: int
) -> None:
    vision = {"num_channels": channels}

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"] |= vision
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        name = "vision_model.embeddings.patch_embedding.weight"
        tensors[name] = torch.zeros(tensors[name].shape[0], channels, 7, 7)
        save_file(tensors, folder / "model.safetensors")

    folder = copied(tiny_siglip, tmp_path / "m", change)
    noise(1).save(tmp_path / "p.png")
    told = vlmrun("embed", "-m", folder, tmp_path / "p.png")
    assert_refused(told, f"takes pictures of {channels} channels")


def test_one_mean_for_all_channels(tmp_path: Path) -> None:
    """As transformers takes it."""
    folder = build_llava(tmp_path / "m")
    change = setting("preprocessor_config.json", image_mean=0.3, image_std=0.5)
    model = changed(folder, tmp_path / "c", change)
    image = picture(50, 30)
    stock = CLIPImageProcessorPil.from_pretrained(tmp_path / "c")
    expected = stock([image], return_tensors="pt")["pixel_values"]
    assert torch.equal(PicturePreprocessor(model).pixels([image]), expected)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"resample": 3.0}, "resample is 3.0, no filter"),
        ({"do_resize": 0}, "does not squash"),
        ({"size": {"shortest_edge": 28.0}}, "no whole number"),
    ],
)
def test_settings_of_another_type(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    folder = build_llava(tmp_path / "m")
    model = changed(folder, tmp_path / "c", setting("preprocessor_config.json", **values))
    with pytest.raises(CheckpointError, match=words):
        PicturePreprocessor(model)


@pytest.mark.parametrize("token", [1, True, [1], 0.5])
def test_an_image_token_that_is_no_text(tmp_path: Path, token: object) -> None:
    folder = build_llava(tmp_path / "m")
    change = setting("processor_config.json", image_token=token)
    with pytest.raises(CheckpointError, match=r"image_token is .*, no text"):
        Chat(changed(folder, tmp_path / "c", change))


def test_generation_settings_that_are_not_followed_are_told(
    vlmrun: Command, tiny_onevision: Path, tmp_path: Path
) -> None:
    change = setting(
        "generation_config.json",
        num_beams=4,
        max_time=0,
        force_words_ids=[[5]],
        constraints=[],
        prefill_chunk_size=3,
        guidance_scale=1.0,
    )
    folder = copied(tiny_onevision, tmp_path / "m", change)
    noise(1).save(tmp_path / "p.png")
    told = vlmrun("caption", "-m", folder, tmp_path / "p.png", "--max-new-tokens", "2")
    assert told.code == 0
    assert (
        "generation_config.json sets num_beams, force_words_ids, prefill_chunk_size, max_time: "
        "not followed" in told.err
    )
