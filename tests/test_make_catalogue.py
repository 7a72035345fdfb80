"""The packaged shapes are those of the models the aliases name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from light import stock_shapes

from vlmrun.models.families import family_of
from vlmrun.models.model import CATALOGUE, describe_model, read_catalogue
from vlmrun.models.source import ALIASES

SCRIPT = Path(__file__).parents[1] / "scripts" / "make_catalogue.py"
MILLIONS = {"siglip": 878.0, "llava-onevision-0.5b": 893.7, "llava-onevision-7b": 8031}


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


@pytest.mark.parametrize("alias", ALIASES)
def test_parameters_as_transformers_counts_them(alias: str) -> None:
    entry = json.loads(CATALOGUE.read_text())[ALIASES[alias]]
    module = stock(entry["config"])
    architecture = family_of(entry["config"]).architecture(entry["config"])
    expected = {path: s for block in architecture.blocks for path, s in block.tensors.items()}
    named = module.named_parameters(remove_duplicate=False)
    assert {name: tuple(parameter.shape) for name, parameter in named} == stock_shapes(expected)
    unique = sum(parameter.numel() for parameter in module.parameters())
    layers = describe_model(alias).layers
    assert unique == sum(w.numel for layer in layers if not layer.tied for w in layer.weights)
    assert unique / 1e6 == pytest.approx(MILLIONS[alias], abs=0.5 if alias.endswith("7b") else 0.05)
