"""The packaged shapes are those of the models the aliases name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from vlmrun.models.checkpoints.aliases import ALIASES
from vlmrun.models.families import family_of
from vlmrun.models.listed import look_up
from vlmrun.models.model import CATALOGUE, read_catalogue
from vlmrun.models.towers import filed_shapes

SCRIPT = Path(__file__).parents[1] / "scripts" / "make_catalogue.py"
MILLIONS: dict[str, float] = {  # of parameters, ties once, counted elsewhere
    "siglip": 878.0,
    "siglip-base": 203.2,
    "siglip-large": 652.5,
    "siglip-multilingual": 370.6,
    "siglip2": 1136.0,
    "siglip2-base": 375.2,
    "siglip2-large": 882.3,
    "siglip2-giant": 1871.9,
    "siglip2-naflex": 1135.7,
    "siglip2-naflex-base": 375.2,
    "llava-onevision-0.5b": 893.7,
    "llava-onevision-7b": 8031,
    "llava-onevision-72b": 73182,
    "llava-1.5-7b": 7063,
    "llava-1.5-13b": 13351,
    "bakllava": 7567,  # as llava-next-mistral-7b, without a newline vector
    "joycaption": 8480,
    "llava-next-mistral-7b": 7567,
    "llava-next-vicuna-7b": 7063,  # as LLaVA 1.5, with one
    "llava-next-vicuna-13b": 13351,
    "llava-next-34b": 34752,
    # Llama 3's 8030.3 and 64 more tokens in and out, CLIP's 303.5, a projector
    "llava-next-llama3-8b": 8030.3 + (2 * 64 + 1024 + 4096) * 4096 / 1e6 + 303.5,
    "paligemma-3b": 2923,
    "paligemma-3b-448": 2923.5 + 768 * 1152 / 1e6,
    "paligemma-3b-896": 2928,
    "paligemma2-3b": 3032,
    # counted at 448 and at 896 pixels, which take 768 and 3840 more positions of 1152 numbers
    "paligemma2-10b": 9664 - 768 * 1152 / 1e6,
    "paligemma2-28b": 27655 - 3840 * 1152 / 1e6,
}
KV_BYTES = {  # of one token in a half format, counted elsewhere
    "llava-onevision-0.5b": 12_288,
    "llava-onevision-7b": 57_344,
    "llava-onevision-72b": 327_680,
    "llava-1.5-7b": 524_288,
    "llava-1.5-13b": 819_200,
    "joycaption": 131_072,
    "llava-next-mistral-7b": 131_072,
    "llava-next-34b": 245_760,
    "paligemma-3b": 18_432,
    "paligemma2-3b": 106_496,
    "paligemma2-10b": 344_064,
    "paligemma2-28b": 376_832,
}


def stock(config: dict[str, Any]) -> torch.nn.Module:
    """transformers' own module of a configuration, without any memory for its weights."""
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device("meta"):
        module: torch.nn.Module = getattr(transformers, config["architectures"][0])(made)
    return module


def test_the_file_is_what_the_script_writes() -> None:
    subprocess.run([sys.executable, SCRIPT, "--check"], check=True)


def test_every_alias_is_in_it() -> None:
    assert set(read_catalogue()) == set(ALIASES.values())
    assert json.loads(CATALOGUE.read_text()).keys() == read_catalogue().keys()
    assert len(set(ALIASES.values())) == len(ALIASES)


@pytest.mark.parametrize("alias", ALIASES)
def test_parameters_as_transformers_counts_them(alias: str) -> None:
    entry = json.loads(CATALOGUE.read_text())[ALIASES[alias]]
    module = stock(entry["config"])
    architecture = family_of(entry["config"]).architecture(entry["config"])
    expected = {path: s for block in architecture.blocks for path, s in block.tensors.items()}
    named = module.named_parameters(remove_duplicate=False)
    assert {name: tuple(parameter.shape) for name, parameter in named} == filed_shapes(expected)
    unique = sum(parameter.numel() for parameter in module.parameters())
    assert unique == look_up(alias).parameters
    exact = 0.05 if MILLIONS[alias] < 2000 else 0.5
    assert unique / 1e6 == pytest.approx(MILLIONS[alias], abs=exact)


@pytest.mark.parametrize("alias", KV_BYTES)
def test_keys_and_values_of_a_token(alias: str) -> None:
    decoder = look_up(alias).model.architecture.decoder
    assert decoder is not None
    assert 2 * 2 * decoder.layers * decoder.kv_heads * decoder.head_dim == KV_BYTES[alias]


@pytest.mark.parametrize(
    ("alias", "tokens"),
    [
        ("siglip", 729),
        ("siglip2-large", 1024),
        ("siglip2-naflex", 256),
        ("joycaption", 729),
        ("llava-1.5-7b", 576),
        ("paligemma-3b-448", 1024),
        ("paligemma-3b-896", 4096),
    ],
)
def test_vectors_of_a_picture(alias: str, tokens: int) -> None:
    assert look_up(alias).model.architecture.crop_tokens == tokens
