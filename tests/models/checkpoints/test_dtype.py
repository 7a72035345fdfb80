"""Names of dtypes, and the choice of the one that weights are kept in."""

import json
from pathlib import Path

import pytest
from light import TINY_SIGLIP, model_of, module_tensors, words, write_folder, write_header

from vlmrun.errors import CheckpointError, UnsupportedModel, UsageError
from vlmrun.job import Placing
from vlmrun.memory.workload import decide_storage
from vlmrun.models.checkpoints.checkpoint import ITEMSIZES
from vlmrun.models.checkpoints.dtype import (
    LOSSY,
    SAFETENSORS,
    Dtype,
    float_dtype,
    parse_compute_dtype,
    parse_dtype,
    resolve_dtype,
)
from vlmrun.models.model import describe_model


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", None),
        ("float32", Dtype.float32),
        ("fp32", Dtype.float32),
        ("bfloat16", Dtype.bfloat16),
        ("bf16", Dtype.bfloat16),
        ("float16", Dtype.float16),
        ("fp16", Dtype.float16),
        ("int8", Dtype.int8),
    ],
)
def test_names(name: str, dtype: Dtype | None) -> None:
    assert parse_dtype(name) is dtype
    if dtype is not Dtype.int8:
        assert parse_compute_dtype(name) is dtype


def test_nothing_is_computed_in_int8() -> None:
    with pytest.raises(UsageError, match=r"^--compute-dtype int8: ") as caught:
        parse_compute_dtype("int8")
    assert words(caught.value)


def test_arithmetic_beside_int8_is_chosen_by_the_checkpoints_floats() -> None:
    stored = {Dtype.float32: 10, Dtype.bfloat16: 90}
    assert float_dtype(Dtype.int8, stored) is Dtype.bfloat16
    assert float_dtype(Dtype.float16, stored) is Dtype.float16


@pytest.mark.parametrize("name", ["", "int4", "half", "Float16", "BF16", "f32", "float64"])
def test_other_names(name: str) -> None:
    with pytest.raises(UsageError, match=f"^unknown dtype '{name}'$") as caught:
        parse_dtype(name)
    assert "auto, float32, bfloat16, float16, int8, fp32, bf16, fp16" in words(caught.value)
    assert caught.value.exit_code == 2


def test_sizes_are_those_of_torch() -> None:
    import torch

    for dtype in Dtype:
        assert getattr(torch, dtype.value).itemsize == dtype.itemsize
    for spelled, dtype in SAFETENSORS.items():
        assert ITEMSIZES[spelled] == dtype.itemsize


@pytest.mark.parametrize(
    ("requested", "stored", "chosen", "reason"),
    [
        (None, {Dtype.float16: 10}, Dtype.float16, "as stored in the checkpoint"),
        (Dtype.float32, {Dtype.float16: 10}, Dtype.float32, "asked for"),
        (Dtype.int8, {Dtype.float16: 10}, Dtype.int8, LOSSY),
        (
            None,
            {Dtype.float32: 4, Dtype.bfloat16: 996},
            Dtype.bfloat16,
            "99.6% of the checkpoint's bytes are stored so",
        ),
        (
            None,
            {Dtype.float32: 60, Dtype.float16: 40},
            Dtype.float32,
            "60.0% of the checkpoint's bytes are stored so",
        ),
    ],
)
def test_the_dtype_of_most_bytes_is_kept(
    requested: Dtype | None, stored: dict[Dtype, int], chosen: Dtype, reason: str
) -> None:
    assert resolve_dtype(requested, stored) == (chosen, reason)


def test_no_weights_have_no_dtype() -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_dtype(Dtype.float32, {})
    assert words(caught.value)


def test_a_mixed_checkpoint(tmp_path: Path) -> None:
    """What counts is what the job uses: here the text tower is float32, the rest float16."""
    tensors = module_tensors(TINY_SIGLIP, "F16")
    tensors |= {p: ("F32", s) for p, (_, s) in tensors.items() if p.startswith("text_model")}
    tensors["logit_scale"] = tensors["logit_bias"] = ("F32", (1,))
    model = describe_model(str(write_folder(tmp_path, TINY_SIGLIP, tensors)))
    placing = Placing(model="x", device="cpu")
    phases = model.family.phases(model.architecture, "pooled")
    images = decide_storage(model, placing, {"vision": phases["vision"]})
    assert images.dtype is Dtype.float16
    assert images.dtype_reason == "as stored in the checkpoint"
    texts = decide_storage(model, placing, {"text": phases["text"]})
    assert texts.dtype is Dtype.float32
    assert texts.compute_dtype is Dtype.float32
    bytes_of = {
        dtype: sum(info.nbytes for p, info in model.checkpoint.tensors.items() if p[:4] == start)
        for dtype, start in ((Dtype.float16, "visi"), (Dtype.float32, "text"))
    }
    both = decide_storage(model, placing, dict(phases))
    assert both.dtype is max(bytes_of, key=lambda dtype: bytes_of[dtype])
    share = max(bytes_of.values()) / sum(bytes_of.values())
    assert both.dtype_reason == f"{share:.1%} of the checkpoint's bytes are stored so"


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "F64"])
def test_a_quantised_tensor_is_refused_by_name_where_it_is_used(dtype: str, tmp_path: Path) -> None:
    tensors = module_tensors(TINY_SIGLIP)
    name = "text_model.encoder.layers.1.mlp.fc1.weight"
    tensors[name] = (dtype, tensors[name][1])
    model = describe_model(str(write_folder(tmp_path, TINY_SIGLIP, tensors)))
    placing = Placing(model="x", device="cpu")
    phases = model.family.phases(model.architecture, "pooled")
    assert decide_storage(model, placing, {"vision": phases["vision"]}).dtype is Dtype.float32
    for asked in (placing, Placing(model="x", device="cpu", dtype="float16")):
        with pytest.raises(UnsupportedModel) as caught:
            decide_storage(model, asked, dict(phases))
        assert words(caught.value).startswith(f"{name} is stored as {dtype} | ")


def test_a_dtype_without_a_known_size_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TINY_SIGLIP, module_tensors(TINY_SIGLIP))
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["logit_bias"]["dtype"] = "F8_E4M3FNUZ"
    write_header(folder / "model.safetensors", header, data[8 + length :])
    with pytest.raises(UnsupportedModel, match=r"^logit_bias is stored as F8_E4M3FNUZ$"):
        describe_model(str(folder))


@pytest.mark.parametrize("dtype", SAFETENSORS.values())
def test_a_model_from_the_catalogue_is_stored_as_it_says(dtype: Dtype) -> None:
    model = model_of(TINY_SIGLIP, dtype.value)
    assert set(model.checkpoint.stored_bytes(model.checkpoint.tensors)) == {dtype}
