"""Random checkpoints of real shapes are sound, and what they hold is what was asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

SCRIPT = Path(__file__).parents[1] / "scripts/make_checkpoint.py"


def make(name: str, folder: Path, dtype: str) -> Path:
    command = [sys.executable, SCRIPT, name, folder, "--dtype", dtype, "--layers", "1"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["siglip", "llava-onevision-0.5b", "llava-1.5-7b"])
def test_transformers_loads_every_tensor(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path, "float16")
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, said = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    assert model.dtype == torch.float16
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = tokenizer("A red apple?")["input_ids"]
    assert tokenizer.decode(words, skip_special_tokens=True).lower().strip(" ?") == "a red apple"
    if name != "siglip":
        assert tokenizer.convert_tokens_to_ids("<image>") == model.config.image_token_id
        assert tokenizer.decode([4000, 5000]) == " w4000 w5000"
    (folder / "model.safetensors").unlink()


@pytest.mark.slow
def test_bfloat16_is_rounded_to_nearest(tmp_path: Path) -> None:
    exact = make("siglip", tmp_path / "exact", "float32") / "model.safetensors"
    short = make("siglip", tmp_path / "short", "bfloat16") / "model.safetensors"
    with safe_open(exact, "pt") as one, safe_open(short, "pt") as other:
        names = set(one.keys())
        assert names == set(other.keys())
        for name in names:
            assert torch.equal(one.get_tensor(name).bfloat16(), other.get_tensor(name))
    exact.unlink()
    short.unlink()
