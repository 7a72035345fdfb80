"""Headers are read and held to the files; whatever is damaged is named."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from light import words, write_header, write_index, write_safetensors

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.checkpoints.checkpoint import read_checkpoint, read_file, tensors_of
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.checkpoints.file_names import INDEX, OPEN_CLIP, PICKLE, PICKLE_INDEX, SINGLE
from vlmrun.models.checkpoints.folder import read_json

A, B, C = ("a", ("F32", (2, 3))), ("b", ("BF16", (4,))), ("c", ("F16", ()))
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1787\n"
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def shards(folder: Path) -> None:
    write_safetensors(folder / ONE, dict([A, B]))
    write_safetensors(folder / TWO, dict([C]))
    write_index(folder, {"a": ONE, "b": ONE, "c": TWO})


def test_single_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / SINGLE, dict([A, B, C]))
    found = read_checkpoint(tmp_path)
    assert list(found.tensors) == ["a", "b", "c"]
    assert found.notes == ()
    data = (tmp_path / SINGLE).read_bytes()
    for at, (name, (dtype, shape)) in enumerate([A, B, C], start=1):
        info = found.tensors[name]
        assert (info.dtype, info.shape, info.file) == (dtype, shape, tmp_path / SINGLE)
        assert data[info.offset : info.offset + info.nbytes] == bytes([at]) * info.nbytes
    assert [found.tensors[name].nbytes for name in "abc"] == [24, 8, 2]
    assert found.stored_bytes(["a", "b", "c"]) == {
        Dtype.float32: 24,
        Dtype.bfloat16: 8,
        Dtype.float16: 2,
    }
    assert found.stored_bytes(["b"]) == {Dtype.bfloat16: 8}


def test_shards(tmp_path: Path) -> None:
    shards(tmp_path)
    found = read_checkpoint(tmp_path)
    assert {name: info.file for name, info in found.tensors.items()} == {
        "a": tmp_path / ONE,
        "b": tmp_path / ONE,
        "c": tmp_path / TWO,
    }
    assert found.notes == ()


def test_a_single_file_is_taken_before_an_index(tmp_path: Path) -> None:
    shards(tmp_path)
    write_safetensors(tmp_path / SINGLE, dict([A]))
    assert list(read_checkpoint(tmp_path).tensors) == ["a"]


@pytest.mark.parametrize(
    ("names", "read"),
    [
        ([OPEN_CLIP], OPEN_CLIP),
        (["sigclip_vision_patch14_384.safetensors"], "sigclip_vision_patch14_384.safetensors"),
        ([OPEN_CLIP, "x.safetensors"], OPEN_CLIP),
        ([SINGLE, "x.safetensors", OPEN_CLIP, PICKLE, PICKLE_INDEX], SINGLE),
        (["x.safetensors", "training_args.bin"], "x.safetensors"),
    ],
)
def test_weights_of_other_names(names: list[str], read: str, tmp_path: Path) -> None:
    """Where none of transformers' names is there, the only safetensors file is the model."""
    for name in names:
        write_safetensors(tmp_path / name, {name: ("F32", (2,))})
    found = read_checkpoint(tmp_path)
    assert list(found.tensors) == [read]
    assert found.notes == ()


@pytest.mark.parametrize("others", [[], [SINGLE], ["b.safetensors", PICKLE]])
def test_a_file_that_is_named_is_the_one_read(others: list[str], tmp_path: Path) -> None:
    for name in ["a.safetensors", *others]:
        write_safetensors(tmp_path / name, {name: ("F32", (2,))})
    assert list(read_checkpoint(tmp_path, "a.safetensors").tensors) == ["a.safetensors"]
    with pytest.raises(CheckpointError, match=r"cannot read .*gone\.safetensors"):
        read_checkpoint(tmp_path, "gone.safetensors")


@pytest.mark.parametrize(("first", "second"), [(SINGLE, PICKLE), (INDEX, PICKLE), (PICKLE, "x")])
def test_safetensors_come_before_pickles(first: str, second: str, tmp_path: Path) -> None:
    """The first is what is read, so it is its damage that is told."""
    for name in (first, second):
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path)
    assert words(caught.value).startswith(first)


def test_the_index_says_which_of_two_copies_is_meant(tmp_path: Path) -> None:
    shards(tmp_path)
    write_safetensors(tmp_path / TWO, dict([C, A]))
    assert read_checkpoint(tmp_path).tensors["a"].file == tmp_path / ONE


def test_unlisted_tensors_are_noted(tmp_path: Path) -> None:
    shards(tmp_path)
    write_index(tmp_path, {"a": ONE, "c": TWO})
    found = read_checkpoint(tmp_path)
    assert "b" in found.tensors
    assert found.notes == ("1 tensors are in the shards but not in the index",)


def test_every_absent_shard_is_named(tmp_path: Path) -> None:
    names = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    write_safetensors(tmp_path / names[1], dict([A]))
    write_index(tmp_path, {letter: name for letter, name in zip("wxyz", names, strict=True)})
    with pytest.raises(CheckpointError, match="3 of 4 shards are missing") as caught:
        read_checkpoint(tmp_path)
    said = words(caught.value)
    assert [name in said for name in names] == [True, False, True, True]
    assert str(tmp_path) in said


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        (
            {"a": ONE, "b": ONE, "gone": TWO},
            f"{INDEX} lists gone in {TWO}, which does not hold it | "
            "the index and the shards are of different versions; download both again",
        ),
        (
            {"a": ONE, "x": ONE, "y": ONE, "z": TWO},
            f"lists x in {ONE}, which does not hold it (and 2",
        ),
        ({"a": ONE, "b": "../outside"}, "names a file outside the folder: ../outside"),
        ({"a": ONE, "b": "/etc/passwd"}, "names a file outside the folder: /etc/passwd"),
        ({"a": ONE, "b": f"sub/{TWO}"}, f"names a file outside the folder: sub/{TWO}"),
        ({"a": ONE, "b": ".."}, "names a file outside the folder: .."),
        ({"a": ONE, "b": ""}, "names a file outside the folder"),
        ({}, "has no weight_map | download it again"),
        ([ONE], "has no weight_map"),
        (None, "has no weight_map"),
        ({"a": "no\0file"}, "1 of 1 shards are missing"),
    ],
)
def test_an_index_that_contradicts(weight_map: object, expected: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shards(folder)
    write_safetensors(tmp_path / "outside", dict([B]))  # there, and not to be read
    (folder / "sub").mkdir()
    write_safetensors(folder / "sub" / TWO, dict([B]))
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    assert expected in words(caught.value)
    assert INDEX in words(caught.value) or "shards" in words(caught.value)
    assert caught.value.exit_code == 1


def cut_data(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:30])


def garbage(path: Path) -> None:
    path.write_bytes(b"<!doctype html><html>not found</html>")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def contents(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def header(value: object) -> Callable[[Path], None]:
    return lambda path: write_header(path, value)


def entry(**values: object) -> Callable[[Path], None]:
    return lambda path: write_header(path, {"a": {**ENTRY, **values}}, bytes(8))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (cut_data, "is truncated: "),
        (cut_header, "is truncated: 30 bytes on disk, its header promises "),
        (contents(b""), "(0 bytes) is not a safetensors file | download it again"),
        (contents(bytes(4)), "(4 bytes) is not a safetensors file | download it again"),
        (contents(bytes(64)), "(64 bytes) is not a safetensors file"),
        (contents(b"\xff" * 64), "(64 bytes) is not a safetensors file"),
        (garbage, "is not a safetensors file"),
        (contents(POINTER), "is a Git-LFS pointer, not the weights | run git lfs pull"),
        (contents(POINTER[:7]), "is a Git-LFS pointer"),
        (directory, f"{SINGLE}: Is a directory | it should be a file that you may read"),
        (header(b'{"a": '), "has a damaged header: not valid JSON | download it again"),
        (header(b"\xff\xfe{}"), "has a damaged header: not valid JSON"),
        (header(b'{"a": ' + b"9" * 5000 + b"}"), "has a damaged header: not valid JSON"),
        (header(b"[" * 100_000), "has a damaged header: not valid JSON"),
        (header([]), "has a damaged header: no object | download it again"),
        (header({"a": None}), "has a damaged entry for a | download it again"),
        (header({"a": {"dtype": "F32", "shape": [2]}}), "has a damaged entry for a"),
        (entry(shape=None), "has a damaged entry for a"),
        (entry(shape="2"), "has a damaged entry for a"),
        (entry(shape=[2.0]), "has a damaged entry for a"),
        (entry(shape=[-1, -2]), "has a damaged entry for a"),
        (entry(dtype=None), "has a damaged entry for a"),
        (entry(dtype=["F32"]), "has a damaged entry for a"),
        (entry(data_offsets=[8]), "has a damaged entry for a"),
        (entry(data_offsets=["0", "8"]), "has a damaged entry for a"),
        (entry(data_offsets=[-8, 0]), "has a damaged entry for a"),
        (entry(shape=[3]), f"{SINGLE}: a spans 8 bytes, its shape needs 12 | download it again"),
        (entry(dtype="F16"), "a spans 8 bytes, its shape needs 4"),
        (entry(data_offsets=[8, 0]), "a spans -8 bytes, its shape needs 8"),
        (entry(data_offsets=[4, 12]), "is truncated"),
    ],
)
def test_a_damaged_file(damage: Callable[[Path], None], expected: str, tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    write_safetensors(path, dict([A, B]))
    damage(path)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path)
    assert expected in words(caught.value)
    assert SINGLE in words(caught.value)
    assert caught.value.exit_code == 1


def test_truncation_is_told_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    write_safetensors(path, dict([A, B]))
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[: whole - 9])  # all of `b` and a byte of `a` are gone
    said = f"{SINGLE} is truncated: {whole - 9} bytes on disk, its header promises {whole}"
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path)
    assert caught.value.message == said


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / TWO).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=f"{TWO} is a Git-LFS pointer"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", ["F8_E4M3FNUZ", "F8_E8M0", "F4", "F6_E2M3", "C64", "Q4_0"])
def test_a_dtype_of_unknown_size_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    write_header(tmp_path / SINGLE, {"a": ENTRY, "odd": {**ENTRY, "dtype": dtype}}, bytes(8))
    with pytest.raises(UnsupportedModel) as caught:
        read_checkpoint(tmp_path)
    assert words(caught.value).startswith(f"odd is stored as {dtype} | checkpoints of F32, BF16")
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3", "F8_E5M2", "F64", "I32", "BOOL"])
def test_weights_of_another_dtype_are_refused_where_they_are_used(
    dtype: str, tmp_path: Path
) -> None:
    write_safetensors(tmp_path / SINGLE, {"a": ("F32", (2,)), "odd": (dtype, (2,))})
    found = read_checkpoint(tmp_path)
    assert found.stored_bytes(["a"]) == {Dtype.float32: 8}
    with pytest.raises(UnsupportedModel, match=f"^odd is stored as {dtype}$") as caught:
        found.stored_bytes(["a", "odd"])
    assert "quantised" in words(caught.value)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], "download the model's weights into the folder"),
        (["weights.pt"], "weights.pt is not read under this name or in this format; look for mo"),
        (["training_args.bin"], "training_args.bin is not read under this name"),
        (["x.safetensors", "y.safetensors"], "found x.safetensors, y.safetensors: give the one"),
        ([ONE], f"found {ONE}, but no {INDEX} that lists them"),
        ([ONE, TWO], f"found {ONE}, {TWO}, but no {INDEX} that lists them"),
    ],
)
def test_no_weights(files: list[str], expected: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path)
    assert words(caught.value).startswith(f"{tmp_path} holds no {SINGLE} | ")
    assert expected in words(caught.value)


def test_a_link_to_nowhere_is_no_weight_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE).symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(CheckpointError, match=f"holds no {SINGLE}"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"model_type": "siglip"', "config.json is not valid JSON | download it again"),
        (b"", "config.json is not valid JSON"),
        (b"\xff\xfe", "config.json is not valid JSON"),
        (b'{"model_type": ["\\ud800"]}', "config.json is not valid JSON"),
        (b"[" * 100_000, "config.json is not valid JSON"),
        (POINTER, "config.json is not valid JSON | it is a Git-LFS pointer: run git lfs pull"),
        (b"[1]", "config.json is not a JSON object"),
        (None, "config.json: No such file or directory"),
    ],
)
def test_a_damaged_configuration(data: bytes | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_json(path)
    assert expected in words(caught.value)
    assert caught.value.exit_code == 1


def test_a_header_from_the_hub_has_no_file() -> None:
    found = tensors_of(json.loads(json.dumps({"a": ENTRY, "__metadata__": {"x": "y"}})), None, 0)
    assert list(found) == ["a"]
    assert (found["a"].file, found["a"].shape, found["a"].nbytes) == (None, (2,), 8)
    with pytest.raises(
        CheckpointError, match=r"^the safetensors header has a damaged entry for b$"
    ):
        tensors_of({"b": {}}, None, 0)


@pytest.mark.parametrize("read", [read_json, read_file])
@pytest.mark.parametrize("name", ["a.safetensors", "a.bin", "a.json"])
def test_a_pipe_is_not_waited_for(
    tmp_path: Path, read: Callable[[Path], object], name: str
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        read(tmp_path / name)
