"""A checkpoint's tensors meet the configuration's, each in exactly one layer, or are named."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from light import (
    HUB_ONEVISION,
    ONEVISION,
    ONEVISION_7B,
    SIGLIP,
    TINY_ONEVISION,
    TINY_SIGLIP,
    TINY_VISION,
    changed,
    model_of,
    module_tensors,
    renamed,
    words,
    write_folder,
    write_safetensors,
)

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.checkpoints.dtype import SAFETENSORS, Dtype
from vlmrun.models.families import family_of
from vlmrun.models.family import Config
from vlmrun.models.layer import Layer
from vlmrun.models.model import (
    Model,
    Place,
    cut_layers,
    describe_model,
    largest_block,
    module_path,
    open_source,
    read_model,
    row_layers,
)
from vlmrun.models.towers import filed_shapes

UNTIED = changed(TINY_ONEVISION, "text_config", tie_word_embeddings=False)
TIED_AT_THE_TOP = {**UNTIED, "tie_word_embeddings": True}
TABLE, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
CONFIGS: dict[str, Config] = {
    "siglip": TINY_SIGLIP,
    "vision": TINY_VISION,
    "onevision": TINY_ONEVISION,
    "onevision untied": UNTIED,
    "siglip so400m": SIGLIP,
    "onevision 0.5b": ONEVISION,
    "onevision 7b": ONEVISION_7B,
}


def unfused(name: str, tensor: Any) -> list[tuple[str, Any]]:
    """A stock tensor by our module paths: the pooling head's projection is three of ours."""
    if ".in_proj_" not in name:
        return [(name, tensor)]
    thirds = tensor.chunk(3)
    return [(name.replace("in_proj_", f"{p}_proj."), t) for p, t in zip("qkv", thirds, strict=True)]


def write(folder: Path, config: Config, change: Callable[[dict[str, Any]], object]) -> str:
    tensors = module_tensors(config)
    change(tensors)
    return str(write_folder(folder / "model", config, tensors))


def weight_keys(model: Model) -> dict[str, str]:
    """Module path -> key, rows of one tensor brought back together."""
    whole = {layer.block: layer.weights[0].key for layer in model.layers if layer.weights[0].rows}
    found = {w.path: w.key for layer in model.layers for w in layer.weights if w.rows is None}
    assert set(whole) <= {"head"}
    return found | ({HEAD: whole["head"]} if whole else {})


def own_weights(model: Model) -> Counter[tuple[str, tuple[int, int] | None]]:
    """How often each tensor, or piece of rows, is in a layer; a tied table's name aside."""
    return Counter(
        (weight.key, weight.rows)
        for layer in model.layers
        if not layer.tied
        for weight in layer.weights
    )


FOLDERS = {
    "siglip": ("build_siglip", {}),
    "siglip 2 in shards": ("build_siglip", {"version": 2, "shards": 2}),
    "vision tower": ("build_siglip_vision", {}),
    "vision tower, module paths": ("build_siglip_vision", {"spelling": "module"}),
    "onevision": ("build_onevision", {}),
    "onevision, module paths": ("build_onevision", {"spelling": "module", "dtype": "float16"}),
    "onevision untied in shards": ("build_onevision", {"tied": False, "shards": 3}),
    "onevision untied, module paths": ("build_onevision", {"tied": False, "spelling": "module"}),
    "onevision, inner layer": ("build_onevision", {"feature_layer": -2}),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_every_tensor_lies_where_transformers_puts_it(name: str, tmp_path: Path) -> None:
    import tiny
    import torch
    import transformers
    from safetensors import safe_open

    build, options = FOLDERS[name]
    folder = getattr(tiny, build)(tmp_path / "model", **options)
    model = describe_model(str(folder))
    assert model.notes == ()
    stock_class = getattr(transformers, model.family.model_class)
    stock = stock_class.from_pretrained(folder).state_dict()
    weights = [weight for layer in model.layers for weight in layer.weights]
    whole = {re.sub(r"blocks\.\d+\.", "", weight.path): weight.shape for weight in weights}
    assert filed_shapes(whole).keys() == stock.keys()
    parts = {path: part for name, found in stock.items() for path, part in unfused(name, found)}
    for weight in weights:
        info = model.checkpoint.tensors[weight.key]
        assert info.file is not None
        with safe_open(info.file, "pt") as file:
            held = file.get_tensor(weight.key)
        held = held if weight.rows is None else held[slice(*weight.rows)]
        part = parts[re.sub(r"blocks\.\d+\.", "", weight.path)]
        if ".blocks." in weight.path and weight.rows is not None:
            part = part[slice(*weight.rows)]
        assert torch.equal(held, part), weight.path


@pytest.mark.parametrize("demo", ["demo", "demo-siglip"])
def test_packaged_models_open_as_any_folder(demo: str) -> None:
    model = describe_model(demo)
    assert model.source.complete
    assert sum(layer.nbytes(Dtype.bfloat16) for layer in model.layers) == sum(
        info.nbytes for info in model.checkpoint.tensors.values()
    )
    assert model.layer("vision.layers.1").weights[0].path.endswith("layers.1.layer_norm1.weight")


@pytest.mark.parametrize("config", [TINY_ONEVISION, UNTIED, TINY_VISION, TINY_SIGLIP])
def test_hub_and_module_names_mean_the_same(config: Config, tmp_path: Path) -> None:
    tensors = module_tensors(config)
    prefix = "vision_model." if config is TINY_VISION else ""
    named = {prefix + renamed(path, HUB_ONEVISION): entry for path, entry in tensors.items()}
    plain = describe_model(str(write_folder(tmp_path / "plain", config, tensors)))
    hub = describe_model(str(write_folder(tmp_path / "hub", config, named)))
    assert weight_keys(plain).keys() == weight_keys(hub).keys()
    for path, key in weight_keys(plain).items():
        assert weight_keys(hub)[path] == prefix + renamed(key, HUB_ONEVISION)
    if config in (TINY_ONEVISION, UNTIED):
        assert "vision_tower.vision_model.embeddings.patch_embedding.weight" in named
        assert "language_model.model.norm.weight" in named


def test_prefixes_end_at_their_dot() -> None:
    config = changed(TINY_SIGLIP, "vision_config", num_hidden_layers=12)
    model = model_of(config)
    one, ten = model.layer("vision.layers.1"), model.layer("vision.layers.10")
    assert {weight.path for weight in one.weights}.isdisjoint(w.path for w in ten.weights)
    assert all(w.path.startswith("vision_model.encoder.layers.1.") for w in one.weights)
    assert all(w.path.startswith("vision_model.encoder.layers.10.") for w in ten.weights)
    assert len(one.weights) == len(ten.weights) == 16


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.model.norm.weight", "model.language_model.norm.weight"),
        ("model.language_model.norm.weight", "model.language_model.norm.weight"),
        ("image_newline", "model.image_newline"),
        ("model.vision_tower.vision_model.head.probe", "model.vision_tower.head.probe"),
        ("vision_tower.post_layernorm.bias", "model.vision_tower.post_layernorm.bias"),
        ("language_model.models.norm.weight", "language_model.models.norm.weight"),
        ("other.vision_tower.x", "other.vision_tower.x"),
    ],
)
def test_module_paths_of_onevision(key: str, path: str) -> None:
    assert module_path(family_of(TINY_ONEVISION), key) == path


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_is_in_exactly_one_layer(name: str) -> None:
    model = model_of(CONFIGS[name])
    counted = own_weights(model)
    assert set(counted.values()) == {1}
    assert {key for key, _ in counted} == set(model.checkpoint.tensors)
    names = [layer.name for layer in model.layers]
    assert len(names) == len(set(names))
    blocks = [layer.block for layer in model.layers]
    assert list(dict.fromkeys(blocks)) == [block.name for block in model.architecture.blocks]


@pytest.mark.parametrize("dtype", SAFETENSORS.values())
@pytest.mark.parametrize("name", CONFIGS)
def test_ties_count_once(name: str, dtype: Dtype) -> None:
    model = model_of(CONFIGS[name], dtype.value)
    in_files = sum(info.nbytes for info in model.checkpoint.tensors.values())
    assert sum(layer.nbytes(dtype) for layer in model.layers) == in_files
    tied = [layer.name for layer in model.layers if layer.tied]
    assert tied == (["decoder.tokens"] if name in ("onevision", "onevision 0.5b") else [])


@pytest.mark.parametrize(
    "name", ["onevision", "onevision untied", "onevision 0.5b", "onevision 7b"]
)
def test_the_head_is_cut_into_pieces_that_fit_a_slot(name: str) -> None:
    model = model_of(CONFIGS[name])
    whole = next(block for block in model.architecture.blocks if block.name == "head")
    rows, width = whole.tensors[HEAD]
    pieces = [layer for layer in model.layers if layer.block == "head"]
    assert_pieces(pieces, rows, width, largest_block(model.architecture))
    moving = [layer for layer in model.layers if not layer.gathered]
    largest = max(layer.nbytes(Dtype.float16) for layer in moving)
    assert largest == 2 * largest_block(model.architecture)
    assert len(pieces) == {"onevision 0.5b": 9, "onevision 7b": 3}.get(name, len(pieces))


def assert_pieces(pieces: list[Layer], rows: int, width: int, bound: int) -> None:
    at = 0
    for i, piece in enumerate(pieces):
        [weight] = piece.weights
        assert (piece.name, piece.block, piece.module) == (
            f"head.{i}",
            "head",
            f"lm_head.blocks.{i}",
        )
        assert weight.path == f"{piece.module}.weight"
        assert weight.rows is not None
        start, stop = weight.rows
        assert start == at < stop
        assert weight.shape == (stop - start, width)
        assert weight.numel <= max(bound, width)
        at = stop
    assert at == rows


@pytest.mark.parametrize("rows", [1, 2, 7, 10, 21, 100, 101, 997])
@pytest.mark.parametrize("bound", [1, 7, 10, 21, 64, 6979, 10_000])
def test_row_blocks_cover_all_rows_without_overlap(rows: int, bound: int) -> None:
    shape = model_of(UNTIED).architecture
    head = next(block for block in shape.blocks if block.name == "head")
    width = 7
    weight = model_of(UNTIED).layer("head.0").weights[0]
    whole = type(weight)(HEAD, HEAD, (rows, width))
    pieces = list(row_layers(head, whole, bound))
    assert_pieces(pieces, rows, width, bound)
    sizes = [piece.weights[0].shape[0] for piece in pieces]
    assert max(sizes) - min(sizes) < max(2, len(sizes))  # even, but for what the last one lacks
    if rows * width <= bound:
        assert len(pieces) == 1


def test_the_cut_does_not_depend_on_what_is_tied() -> None:
    for one, other in ((TINY_ONEVISION, UNTIED), (TINY_ONEVISION, TIED_AT_THE_TOP)):
        cuts = [
            [w.rows for layer in model_of(c).layers for w in layer.weights] for c in (one, other)
        ]
        assert cuts[0] == cuts[1]


@pytest.mark.parametrize("config", [TINY_ONEVISION, TIED_AT_THE_TOP])
@pytest.mark.parametrize("held", ["table", "head", "both"])
def test_a_tied_head_takes_whichever_tensor_is_there(
    config: Config, held: str, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["language_model.lm_head.weight"] = tensors[TABLE]
        if held == "table":
            del tensors["language_model.lm_head.weight"]
        if held == "head":
            del tensors[TABLE]

    model = describe_model(write(tmp_path, config, change))
    keys = weight_keys(model)
    assert keys[TABLE] == ("language_model.lm_head.weight" if held == "head" else TABLE)
    assert keys[HEAD] == (TABLE if held == "table" else "language_model.lm_head.weight")
    sizes = {layer.name: layer.nbytes(Dtype.float32) for layer in model.layers}
    assert sizes["decoder.tokens"] == 0
    assert sum(size for name, size in sizes.items() if name.startswith("head.")) == 4 * 301 * 16
    assert model.layer("decoder.tokens").gathered


@pytest.mark.parametrize(
    ("config", "lost", "named"),
    [
        (UNTIED, HEAD, "lm_head.weight"),
        (UNTIED, TABLE, TABLE),
        (TINY_ONEVISION, TABLE, "2 tensors are missing from the checkpoint: lm_head.weight, model"),
        (TIED_AT_THE_TOP, TABLE, "lm_head.weight, model.language_model.embed_tokens.weight"),
        (TINY_ONEVISION, "model.image_newline", "model.image_newline"),
        (TINY_SIGLIP, "vision_model.head.probe", "vision_model.head.probe"),
        (TINY_SIGLIP, "logit_scale", "1 tensor is missing from the checkpoint: logit_scale"),
    ],
)
def test_missing_tensors(config: Config, lost: str, named: str, tmp_path: Path) -> None:
    folder = write(tmp_path, config, lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError) as caught:
        describe_model(folder)
    said = words(caught.value)
    assert named in said
    assert "missing from the checkpoint" in said
    assert "the download is incomplete, or config.json is of another model" in said
    assert caught.value.exit_code == 1


def test_missing_tensors_are_counted(tmp_path: Path) -> None:
    config = changed(TINY_VISION, "", num_hidden_layers=4)
    with pytest.raises(CheckpointError) as caught:
        describe_model(str(write_folder(tmp_path, config, module_tensors(TINY_VISION))))
    assert caught.value.message == (
        "16 tensors are missing from the checkpoint: encoder.layers.3.layer_norm1.bias, "
        "encoder.layers.3.layer_norm1.weight, encoder.layers.3.layer_norm2.bias and 13 more"
    )


def test_surplus_tensors_are_named_as_the_file_spells_them(tmp_path: Path) -> None:
    named = {f"vision_model.{p}": e for p, e in module_tensors(TINY_VISION).items()}
    config = changed(TINY_VISION, "", num_hidden_layers=2)
    with pytest.raises(CheckpointError) as caught:
        describe_model(str(write_folder(tmp_path, config, named)))
    said = words(caught.value)
    assert said.startswith(
        "16 tensors are in the checkpoint that config.json does not account for: "
        "vision_model.encoder.layers.2.layer_norm1.bias, "
    )
    assert "and 13 more | config.json is of another model or another version" in said


def test_misshapen_tensors_are_named_with_both_shapes(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.image_newline"] = ("F32", (2, 8))

    with pytest.raises(CheckpointError) as caught:
        describe_model(write(tmp_path, TINY_ONEVISION, change))
    assert caught.value.message == (
        "1 tensor is of another shape: model.image_newline (is [2, 8], config.json needs [16])"
    )
    wider = changed(TINY_ONEVISION, "text_config", intermediate_size=25)
    with pytest.raises(CheckpointError, match=r"^9 tensors are of another shape: .* and 6 more$"):
        describe_model(str(write_folder(tmp_path / "b", wider, module_tensors(TINY_ONEVISION))))


@pytest.mark.parametrize("held", [HEAD, TABLE])
def test_a_tied_tensor_of_another_shape(held: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        del tensors[TABLE]
        tensors[held] = ("F32", (300, 16))

    with pytest.raises(CheckpointError, match="of another shape") as caught:
        describe_model(write(tmp_path, TINY_ONEVISION, change))
    assert f"{held} (is [300, 16], config.json needs [301, 16])" in words(caught.value)


def test_two_keys_for_one_module(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["language_model.model.norm.weight"] = ("F32", (16,))

    with pytest.raises(CheckpointError) as caught:
        describe_model(write(tmp_path, TINY_ONEVISION, change))
    said = words(caught.value)
    for name in ("language_model.model.norm.weight", "model.language_model.norm.weight"):
        assert name in said


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (TINY_SIGLIP, "vision_model.embeddings.position_ids"),
        (TINY_SIGLIP, "text_model.embeddings.position_ids"),
        (TINY_VISION, "vision_model.embeddings.position_ids"),
        (TINY_VISION, "embeddings.position_ids"),
        (TINY_ONEVISION, "vision_tower.vision_model.embeddings.position_ids"),
        (TINY_ONEVISION, "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"),
        (TINY_ONEVISION, "language_model.model.rotary_emb.inv_freq"),
    ],
)
def test_buffers_of_older_files_are_ignored(config: Config, key: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors[key] = ("I64", (1, 16))

    model = describe_model(write(tmp_path, config, change))
    assert key not in weight_keys(model).values()
    assert key in model.checkpoint.tensors


@pytest.mark.parametrize("key", ["position_idsx", "x_position_ids", "inv_freq"])
def test_only_those_buffers_are_ignored(key: str, tmp_path: Path) -> None:
    folder = write(tmp_path, TINY_ONEVISION, lambda t: t.update({key: ("F32", (1,))}))
    with pytest.raises(CheckpointError, match=f"does not account for: {key}$"):
        describe_model(folder)


def test_an_unsupported_model_is_refused_before_its_weights_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="'clip'"):
        describe_model(str(tmp_path))


def test_a_vision_tower_of_a_whole_model_says_what_is_missing(tmp_path: Path) -> None:
    """transformers would open it with random weights for the text tower."""
    named = {f"vision_model.{path}": entry for path, entry in module_tensors(TINY_VISION).items()}
    with pytest.raises(CheckpointError, match="missing from the checkpoint: logit_bias, logit_sc"):
        describe_model(str(write_folder(tmp_path, TINY_SIGLIP, named)))


def test_notes_of_the_checkpoint_are_kept(tmp_path: Path) -> None:
    tensors = module_tensors(TINY_VISION)
    folder = write_folder(tmp_path, TINY_VISION, tensors)
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "all.safetensors", tensors)
    some = dict.fromkeys(list(tensors)[:5], "all.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": some}))
    assert describe_model(str(folder)).notes == (
        f"{len(tensors) - 5} tensors are in the shards but not in the index",
    )


@pytest.mark.parametrize("alias", ["siglip", "llava-onevision-0.5b", "llava-onevision-7b"])
def test_an_alias_is_described_without_a_network(alias: str) -> None:
    model = describe_model(alias, offline=True)
    assert model.notes == ("shapes from the packaged catalogue",)
    assert model.source.folder is None
    assert all(info.file is None for info in model.checkpoint.tensors.values())
    assert math.isclose(
        sum(info.nbytes for info in model.checkpoint.tensors.values()),
        {"siglip": 4 * 878.0e6, "llava-onevision-0.5b": 2 * 893.7e6}.get(alias, 2 * 8031e6),
        rel_tol=5e-4,
    )


def test_a_folder_is_described_as_it_is_opened(tmp_path: Path) -> None:
    folder = write(tmp_path, TINY_SIGLIP, lambda _: None)
    source, config = open_source(folder, task="embed")
    assert config == TINY_SIGLIP
    assert source.name == "model"
    assert read_model(source) == describe_model(folder)


def test_an_unsupported_model_is_opened_only_as_untested(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(UnsupportedModel, match="'clip'"):
        open_source(str(tmp_path), task="embed")
    source, config = open_source(str(tmp_path), task="embed", untested=True)
    assert (source.folder, config) == (tmp_path, {"model_type": "clip"})


def test_layers_follow_execution(tmp_path: Path) -> None:
    model = model_of(TINY_SIGLIP)
    shape = model.architecture
    places = {
        path: Place(path, length)
        for block in shape.blocks
        for path, length in block.tensors.items()
    }
    assert [layer.name for layer in cut_layers(shape, places, model.checkpoint)] == [
        "vision.embeddings",
        *(f"vision.layers.{i}" for i in range(3)),
        "vision.norm",
        "vision.head",
        "text.tokens",
        "text.positions",
        *(f"text.layers.{i}" for i in range(2)),
        "text.norm",
        "text.head",
        "score",
    ]
