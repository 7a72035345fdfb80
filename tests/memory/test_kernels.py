"""Planned kernels reach every linear layer, compiled for what it holds."""

import json
from pathlib import Path

import pytest
import torch
from entries import Ready, load_tiny
from tiny import build_onevision, build_siglip
from torch import nn

from vlmrun.memory import kernels
from vlmrun.memory.kernels import kept_matrices
from vlmrun.memory.products import choose_products, tuned_path
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.nn.linear import CastLinear, native, tiled

SINGLE, HALF = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_siglip(tmp_path_factory.mktemp("siglip"), dtype="bfloat16")


@pytest.fixture(scope="module")
def onevision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_onevision(tmp_path_factory.mktemp("onevision"), dtype="bfloat16")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned_path().parent.mkdir()
    return tuned_path()


def module_of(ready: Ready) -> nn.Module:
    with ready.entry.use(next(iter(ready.plan.workload.phases))) as module:
        return module


def layers_of(ready: Ready) -> list[CastLinear]:
    return [each for each in module_of(ready).modules() if isinstance(each, CastLinear)]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_every_linear_layer_has_the_tables(onevision: Path, dtype: str) -> None:
    ready = load_tiny(onevision, dtype=dtype)
    layers = layers_of(ready)
    assert len(layers) > 30
    for layer in layers:
        assert layer.kernels is layers[0].kernels
    found = layers[0].kernels
    assert found.keys() == {
        (stored, SINGLE) for stored in (SINGLE, HALF, torch.float16, torch.int8)
    }
    assert found[SINGLE, SINGLE][0][1] is native
    assert found[HALF, SINGLE][0][1] not in (native, tiled)


def test_what_is_compiled_is_what_is_held(siglip: Path, onevision: Path) -> None:
    """Beside int8 matrices SigLIP's pooling head has floats; a captioner has none."""
    for folder, dtype, expected in (
        (siglip, "int8", [Dtype.bfloat16, Dtype.int8]),
        (siglip, "auto", [Dtype.bfloat16]),
        (siglip, "float32", []),
        (onevision, "int8", [Dtype.int8]),
    ):
        ready = load_tiny(folder, dtype=dtype)
        assert kept_matrices(module_of(ready), ready.plan) == expected


def test_a_table_may_name_the_loops_for_other_dtypes_alone(siglip: Path, table: Path) -> None:
    """As one that was measured here may; PyTorch serves those that are in the minority."""
    row = {"cpu": [], "compute": "any"}
    tiles = {**row, "stored": "int8", "kernels": [[None, "tiles"]]}
    rows = [tiles, {**row, "stored": "any", "kernels": [[None, "loops"]]}]
    table.write_text(json.dumps({"rows": rows}))
    ready = load_tiny(siglip, dtype="int8")
    found = layers_of(ready)[0].kernels
    assert not ready.entry.plan.storage.products.compiled
    assert {stored: kernels[0][1] for (stored, _), kernels in found.items()} == {torch.int8: tiled}


def test_where_the_loops_fail_pytorch_serves(siglip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_product", lambda: (None, "not in this test"))
    ready = load_tiny(siglip, dtype="int8")
    products = ready.entry.plan.storage.products
    assert (products.compiled, products.reason) == (False, "not in this test")
    assert not any(layer.kernels for layer in layers_of(ready))
    assert ready.plan.storage.products == choose_products(Dtype.int8, Dtype.float32, "cpu")
