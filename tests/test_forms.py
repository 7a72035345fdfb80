"""One model in every form its weights come in gives the same bits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import Command
from PIL import Image
from safetensors.torch import load_file
from tiny import build_siglip_vision

FORMS = ("safetensors", "open_clip", "other", "bin", "views", "shards")


def write_form(folder: Path, form: str) -> None:
    """Replace model.safetensors of a folder by the same tensors in another form."""
    safetensors = folder / "model.safetensors"
    tensors = load_file(safetensors)
    if form == "safetensors":
        return
    if form in ("open_clip", "other"):
        safetensors.rename(folder / f"{form}_model.safetensors")
        return
    safetensors.unlink()
    if form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif form == "views":
        whole = torch.cat([tensor.flatten() for tensor in tensors.values()])
        pieces = whole.split([tensor.numel() for tensor in tensors.values()])
        views = zip(tensors, pieces, strict=True)
        state = {name: piece.view(tensors[name].shape) for name, piece in views}
        torch.save({"state_dict": state, "step": 7}, folder / "pytorch_model.bin")
    else:
        files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
        shard_of = {name: files[at % 2] for at, name in enumerate(tensors)}
        for file in files:
            torch.save({n: t for n, t in tensors.items() if shard_of[n] == file}, folder / file)
        index = json.dumps({"weight_map": shard_of})
        (folder / "pytorch_model.bin.index.json").write_text(index)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("forms")
    for form in FORMS:
        build_siglip_vision(root / form, dtype="bfloat16")
        write_form(root / form, form)
    Image.linear_gradient("L").convert("RGB").save(root / "picture.png")
    return root


@pytest.mark.parametrize("resident", ["100%", "0%"])
def test_every_form_gives_the_same_vector(resident: str, forms: Path, vlmrun: Command) -> None:
    told = {}
    for form in FORMS:
        flags = ["--json", "--resident", resident]
        done = vlmrun("embed", "-m", forms / form, forms / "picture.png", *flags)
        assert done.code == 0, done
        told[form] = json.loads(done.out)["embedding"]
        noted = "a pickle: tensors only, no code is run; safetensors is safer"
        assert (noted in done.err) == any((forms / form).glob("*.bin")), done.err
    assert all(vector == told["safetensors"] for vector in told.values())


def test_a_pickled_model_is_planned_without_torch(forms: Path) -> None:
    """The same layers of the same sizes, and torch is not imported."""
    code = (
        "import sys\nfrom vlmrun.cli import main\n"
        "assert main(['mem-plan', '-m', sys.argv[1], '--json']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    plans = []
    for form in ("safetensors", "shards"):
        run = [sys.executable, "-c", code, forms / form]
        done = subprocess.run(run, capture_output=True, text=True, check=True)
        plans.append(json.loads(done.stdout))
    assert plans[0]["layers"] == plans[1]["layers"]
