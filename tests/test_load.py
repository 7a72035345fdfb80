"""From a plan to an entry: skeleton on meta, buffers, ties, heads in pieces."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from entries import (
    CUT_ROWS,
    Ready,
    build_cut_head,
    load_tiny,
    noise,
    plan_tiny,
    prompted,
    rows_of,
    trace,
)
from folders import model_at, weights
from tiny import build_onevision
from torch import Tensor, nn

from vlmrun import load as module
from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.load import build_skeleton, check_ties, load, materialise_buffers
from vlmrun.models.checkpoints.reading import WeightReader
from vlmrun.nn.embedding import TokenTable
from vlmrun.nn.linear import RowBlocks
from vlmrun.nn.swap import swap_layers

FIXTURES = ("tiny_siglip", "tiny_siglip2", "tiny_siglip_vision", "tiny_onevision")
TABLE = "language_model.model.embed_tokens.weight"
HEAD = "language_model.lm_head.weight"


def root_of(ready: Ready) -> nn.Module:
    """The module of an entry that keeps nothing resident."""
    with ready.entry.use(next(iter(ready.plan.workload.phases))) as module:
        return module


def stock(folder: Path, **options: Any) -> nn.Module:
    name = model_at(folder).family.model_class
    return getattr(transformers, name).from_pretrained(folder, **options)


def edited(folder: Path, change: Any) -> Path:
    """A tied checkpoint whose tensors were changed."""
    weights(change)(build_onevision(folder))
    return folder


def logits(folder: Path) -> Tensor:
    ready = load_tiny(folder, resident="30%")
    return trace(ready, rows_of(ready, [prompted(ready.model, [noise(1)])]))


@pytest.mark.parametrize("fixture", FIXTURES)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_nothing_is_materialised_by_loading(
    fixture: str, compute: str, request: pytest.FixtureRequest
) -> None:
    """No parameter and no byte; parameters are those of the file and keep their shapes."""
    ready = load_tiny(request.getfixturevalue(fixture), compute=compute, resident="0%")
    root = root_of(ready)
    assert ready.entry.bytes_read == 0
    assert not root.training
    assert all(value.is_meta for value in root.parameters())
    assert not any(value.is_meta for value in root.buffers())
    weights = [w for layer in ready.model.layers if not layer.gathered for w in layer.weights]
    assert {path: tuple(value.shape) for path, value in root.named_parameters()} == {
        weight.path: weight.shape for weight in weights
    }


@pytest.mark.parametrize("fixture", FIXTURES)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_buffers_are_stocks(fixture: str, compute: str, request: pytest.FixtureRequest) -> None:
    """Rotary frequencies in float32 whatever the compute dtype; position ids; no other."""
    folder = request.getfixturevalue(fixture)
    ours = dict(root_of(load_tiny(folder, compute=compute, resident="0%")).named_buffers())
    theirs = {
        name: value
        for name, value in stock(folder, dtype=torch.float32).named_buffers()
        if name.startswith("text_model") or not name.endswith("embeddings.position_ids")
    }
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        assert torch.equal(value, theirs[name]), name
    frequencies = [value for name, value in ours.items() if name.endswith("rotary_emb.inv_freq")]
    assert [value.dtype for value in frequencies] == [torch.float32] * (fixture == FIXTURES[-1])


def test_a_buffer_of_unknown_value_is_refused(tiny_onevision: Path) -> None:
    skeleton = build_skeleton(model_at(tiny_onevision), {})
    with torch.device("meta"):
        swap_layers(skeleton, torch.float32)
    skeleton.model.language_model.register_buffer("scale", torch.empty(1, device="meta"))
    with pytest.raises(UnsupportedModel, match=r"model\.language_model\.scale"):
        materialise_buffers(skeleton, "cpu")


def test_a_number_of_labels_is_never_written_out(tiny_siglip: Path) -> None:
    """transformers makes a dictionary of so many names: 10^12 of them fill any memory."""
    model = model_at(tiny_siglip)
    labels = {"num_labels": 10**12, "id2label": {str(i): "x" for i in range(3)}}
    text = {**model.config["text_config"], **labels}
    module = build_skeleton(
        replace(model, config={**model.config, **labels, "text_config": text}), {}
    )
    assert module.config.num_labels == module.config.text_config.num_labels == 2


def test_stored_dtype_never_reaches_the_skeleton(tmp_path: Path) -> None:
    """Of a bfloat16 checkpoint, frequencies are float32 and equal to those of any other."""
    found = []
    for dtype in "bfloat16", "float32":
        ready = load_tiny(build_onevision(tmp_path / dtype, dtype=dtype), resident="0%")
        found.append(root_of(ready).get_buffer("model.language_model.rotary_emb.inv_freq"))
    assert found[0].dtype == torch.float32
    assert torch.equal(*found)


def test_token_tables_are_gathered(tiny_onevision: Path, tiny_siglip: Path) -> None:
    for folder, path in (
        (tiny_onevision, "model.language_model.embed_tokens"),
        (tiny_siglip, "text_model.embeddings.token_embedding"),
    ):
        assert type(root_of(load_tiny(folder, resident="0%")).get_submodule(path)) is TokenTable


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_head_is_cut_into_rows(tmp_path: Path, tied: bool) -> None:
    """Pieces follow each other, cover the whole, and none is larger than the largest block."""
    ready = load_tiny(build_cut_head(tmp_path, tied=tied), resident="0%")
    layers = [layer for layer in ready.model.layers if layer.block == "head"]
    rows = [layer.weights[0].rows for layer in layers]
    assert len(rows) > 2
    assert [at for pair in rows for at in pair] == [
        0,
        *(at for _, stop in rows[:-1] for at in (stop, stop)),
        CUT_ROWS,
    ]
    others = [layer for layer in ready.model.layers if layer.block != "head" and not layer.gathered]
    dtype = ready.plan.storage.dtype
    assert max(layer.nbytes(dtype) for layer in layers) <= ready.plan.slot_bytes
    assert ready.plan.slot_bytes == max(layer.nbytes(dtype) for layer in others)
    head = root_of(ready).get_submodule("lm_head")
    assert type(head) is RowBlocks
    assert [block.weight.shape[0] for block in head.blocks] == [b - a for a, b in rows]


def test_an_equal_duplicate_head_is_accepted(tiny_onevision: Path, tmp_path: Path) -> None:
    folder = edited(tmp_path, lambda tensors: tensors.update({HEAD: tensors[TABLE].clone()}))
    assert torch.equal(logits(folder), logits(tiny_onevision))


def test_a_tied_pair_under_the_heads_name_is_accepted(tiny_onevision: Path, tmp_path: Path) -> None:
    folder = edited(tmp_path, lambda tensors: tensors.update({HEAD: tensors.pop(TABLE)}))
    assert torch.equal(logits(folder), logits(tiny_onevision))


@pytest.mark.parametrize("row", [0, 200, 407])
@pytest.mark.parametrize("at_once", [1024, 7])
def test_a_head_that_differs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int, at_once: int
) -> None:
    """In one number of one row; both names are told."""
    monkeypatch.setattr(module, "COMPARE_ROWS", at_once)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[TABLE].clone()
        tensors[HEAD][row, 31] += 1e-3

    model = model_at(edited(tmp_path, change))
    with pytest.raises(CheckpointError) as caught:
        load(model, plan_tiny(model))
    assert TABLE in caught.value.message
    assert HEAD in caught.value.message
    assert "tie_word_embeddings" in caught.value.hint


def test_a_head_of_another_dtype_is_refused(tmp_path: Path) -> None:
    change = lambda tensors: tensors.update({HEAD: tensors[TABLE].half()})  # noqa: E731
    model = model_at(edited(tmp_path, change))
    with pytest.raises(CheckpointError, match="differ"):
        load(model, plan_tiny(model))


def test_an_untied_head_is_not_compared(tiny_onevision_untied: Path) -> None:
    model = model_at(tiny_onevision_untied)
    with WeightReader() as reader:
        check_ties(model, reader)
        assert reader.bytes_read == 0


def test_a_truncated_file_is_noticed_while_ties_are_compared(tmp_path: Path) -> None:
    folder = edited(tmp_path, lambda tensors: tensors.update({HEAD: tensors[TABLE].clone()}))
    model = model_at(folder)
    plan = plan_tiny(model)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(CheckpointError, match="ended while"):
        load(model, plan)
