import json
import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import full_disk
from safetensors import safe_open

from vlmrun.errors import OutputError
from vlmrun.files.rows import Embedding, Failure
from vlmrun.files.writers import Writer, open_writer

FAILURE = Failure("bad.jpg", None, "ImageError", "is truncated")
ODD = os.fsdecode(b"caf\xe9.jpg")


def embedding(
    path: str | None = "a.jpg", text: str | None = None, shape: tuple[int, ...] = (5,)
) -> Embedding:
    """A vector of its own for every name."""
    seed = len(path or text or "")
    vector = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return Embedding(path, text, vector, "pooled", "org/model", "abc", "bfloat16", 1.0, "00")


def writer(output: Path, **options: Any) -> Writer:
    return open_writer(output, task="embed", stdout=BytesIO(), **options)


def index_of(output: Path) -> list[dict[str, Any]]:
    lines = (output.parent / (output.name + ".jsonl")).read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read(output: Path) -> np.ndarray:
    """The array of any of the formats."""
    if output.suffix == ".safetensors":
        with safe_open(output, "np") as file:
            return file.get_tensor("embeddings")
    loaded = np.load(output)
    return loaded["embeddings"] if output.suffix == ".npz" else loaded


ROWS = [embedding("a.jpg"), FAILURE, embedding("bb.jpg"), embedding(None, "a cat"), embedding(ODD)]
VECTORS = np.stack([row.vector for row in ROWS if isinstance(row, Embedding)])


@pytest.mark.parametrize("name", ["v.npy", "v.npz", "v.safetensors"])
@pytest.mark.parametrize("committed", [True, False])
def test_array_has_the_finished_rows_and_the_index_all(tmp_path, name, committed):
    output = tmp_path / name
    with writer(output) as opened:
        for row in ROWS:
            opened.write(row)
        assert left(tmp_path) == [
            f"{name}{ending}" for ending in (".jsonl", ".jsonl.lock", ".lock", ".part")
        ]
        assert len(index_of(output)) == len(ROWS), "appended row by row"
        assert (tmp_path / f"{name}.part").read_bytes() == VECTORS.tobytes()
        if committed:
            opened.commit()
            assert read(output).tobytes() == VECTORS.tobytes()
    found = read(output)
    assert found.dtype == np.float32
    assert found.shape == (4, 5)
    assert found.tobytes() == VECTORS.tobytes()
    index = index_of(output)
    assert [row.get("index") for row in index] == [0, None, 1, 2, 3]
    assert index[1] == FAILURE.row()
    assert [row.get("path", row.get("text")) for row in index[2:]] == [
        "bb.jpg",
        "a cat",
        "caf\\xe9.jpg",
    ]
    assert left(tmp_path) == [name, f"{name}.jsonl"]


def test_npz_has_the_paths_and_texts(tmp_path):
    with writer(tmp_path / "v.npz") as opened:
        for row in ROWS:
            opened.write(row)
    paths = np.load(tmp_path / "v.npz")["paths"]
    assert paths.tolist() == ["a.jpg", "bb.jpg", "a cat", "caf\\xe9.jpg"]


def test_safetensors_says_what_made_it(tmp_path):
    with writer(tmp_path / "v.safetensors") as opened:
        opened.write(embedding())
    with safe_open(tmp_path / "v.safetensors", "np") as file:
        assert file.metadata() == {
            "model": "org/model",
            "revision": "abc",
            "dtype": "bfloat16",
            "output_kind": "pooled",
        }


@pytest.mark.parametrize("name", ["v.npy", "v.npz", "v.safetensors"])
def test_matrices_of_one_shape(tmp_path, name):
    rows = [embedding("a.jpg", shape=(7, 4)), embedding("bb.jpg", shape=(7, 4))]
    with writer(tmp_path / name) as opened:
        for row in rows:
            opened.write(row)
    assert np.array_equal(read(tmp_path / name), np.stack([row.vector for row in rows]))


def test_vectors_that_are_not_contiguous(tmp_path):
    whole = embedding(shape=(4, 6))
    columns = Embedding("a", None, whole.vector[:, ::2].T, "k", "m", None, "d", 1.0, None)
    with writer(tmp_path / "v.npy") as opened:
        opened.write(columns)
    assert np.array_equal(read(tmp_path / "v.npy")[0], columns.vector)


def test_row_of_another_shape_is_named_and_the_others_kept(tmp_path):
    output = tmp_path / "v.npy"
    with writer(output) as opened:
        opened.write(embedding("a.jpg", shape=(7, 4)))
        with pytest.raises(OutputError, match=r"bb\.jpg: its vector of shape \(9, 4\)") as caught:
            opened.write(embedding("bb.jpg", shape=(9, 4)))
    assert caught.value.exit_code == 1
    assert "(7, 4)" in caught.value.message
    assert "--format jsonl" in caught.value.hint
    assert read(output).shape == (1, 7, 4)
    assert len(index_of(output)) == 1


def test_interruption_gives_a_valid_array(tmp_path):
    output = tmp_path / "v.npy"

    def run() -> None:
        with writer(output) as opened:
            opened.write(embedding("a.jpg"))
            opened.write(embedding("bb.jpg"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert read(output).shape == (2, 5)
    assert left(tmp_path) == ["v.npy", "v.npy.jsonl"]


def test_failures_alone_make_an_index_and_no_array(tmp_path):
    with writer(tmp_path / "v.npy") as opened:
        opened.write(FAILURE)
        opened.commit()
    assert index_of(tmp_path / "v.npy") == [FAILURE.row()]
    assert left(tmp_path) == ["v.npy.jsonl"]


@pytest.mark.parametrize("old", [["v.npy", "v.npy.jsonl"], ["v.npy"], ["v.npy.jsonl"]])
def test_overwriting_waits_for_the_whole_array(tmp_path, old):
    output = tmp_path / "v.npy"
    for name in old:
        (tmp_path / name).write_bytes(b"old")
        (tmp_path / name).chmod(0o600)
    opened = writer(output, exists="overwrite")
    opened.write(FAILURE)
    opened.write(embedding())
    mine = {path.name for path in tmp_path.iterdir()} - set(old)
    locks = {"v.npy.lock", "v.npy.jsonl.lock"}
    assert mine == {"v.npy.part", "v.npy.jsonl.part"} | locks
    assert {(tmp_path / name).read_bytes() for name in old} == {b"old"}
    with full_disk(10), pytest.raises(OutputError, match="File too large"):
        opened.commit()
    opened.close()
    assert {path.name for path in tmp_path.iterdir()} - set(old) == mine - locks
    assert {(tmp_path / name).read_bytes() for name in old} == {b"old"}

    for name in mine - locks:
        (tmp_path / name).unlink()
    with writer(output, exists="overwrite") as opened:
        opened.write(FAILURE)
        opened.write(embedding())
    assert read(output).shape == (1, 5)
    assert len(index_of(output)) == 2
    assert left(tmp_path) == ["v.npy", "v.npy.jsonl"]
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in old} == {0o600}


@pytest.mark.parametrize("ending", [".part", ".new", ".lock", ".jsonl.part", ".jsonl.lock"])
def test_what_bears_a_name_that_a_run_needs_stays(tmp_path, ending):
    (tmp_path / f"v.npy{ending}").write_bytes(b"precious")
    with pytest.raises(OutputError, match=rf"v\.npy{ending} is in the way: .* writes v\.npy"):
        writer(tmp_path / "v.npy", exists="overwrite")
    assert left(tmp_path) == [f"v.npy{ending}"]
    assert (tmp_path / f"v.npy{ending}").read_bytes() == b"precious"


def test_vectors_of_a_killed_run_are_named_before_anything_else(tmp_path):
    for name in ["v.npy.jsonl", "v.npy.part"]:
        (tmp_path / name).write_bytes(b"rows")
    with pytest.raises(OutputError, match=r"v\.npy\.part is in the way") as caught:
        writer(tmp_path / "v.npy")
    assert "a run that was killed, and --exists overwrite leaves it" in caught.value.hint


def test_an_array_and_its_index_are_not_written_by_two_runs(tmp_path):
    with (
        writer(tmp_path / "v.npy"),
        pytest.raises(OutputError, match=r"v\.npy\.jsonl is being written by another run"),
    ):
        writer(tmp_path / "v.npy.jsonl")
    with (
        writer(tmp_path / "v.npy.jsonl"),
        pytest.raises(OutputError, match=r"v\.npy\.jsonl is being written by another run"),
    ):
        writer(tmp_path / "v.npy")
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["v.npy.part", "v.npy.jsonl"])
@pytest.mark.parametrize("emptied", [True, False])
def test_files_that_are_lost_during_a_run_are_an_error(tmp_path, name, emptied):
    opened = writer(tmp_path / "v.npy")
    opened.write(embedding())
    (tmp_path / name).write_bytes(b"") if emptied else (tmp_path / name).unlink()
    words = "cut short" if emptied else "deleted"
    with pytest.raises(OutputError, match=f"{name} was {words} while it was being written"):
        opened.commit()
    opened.close()
    assert not (tmp_path / "v.npy").exists()
    assert (tmp_path / "v.npy.part").exists() == (emptied or name != "v.npy.part")


def test_an_array_that_came_meanwhile_is_not_touched(tmp_path):
    opened = writer(tmp_path / "v.npy")
    opened.write(embedding())
    (tmp_path / "v.npy").write_bytes(b"precious")
    with pytest.raises(OutputError, match=r"v\.npy exists now") as caught:
        opened.commit()
    opened.close()
    assert (tmp_path / "v.npy").read_bytes() == b"precious"
    assert f"kept in {tmp_path / 'v.npy.part'}" in caught.value.message
    assert left(tmp_path) == ["v.npy", "v.npy.jsonl", "v.npy.part"]


def test_failures_alone_never_replace_old_results(tmp_path):
    for name in ["v.npy", "v.npy.jsonl"]:
        (tmp_path / name).write_bytes(b"old")
    with writer(tmp_path / "v.npy", exists="overwrite") as opened:
        opened.write(FAILURE)
        opened.commit()
    assert left(tmp_path) == ["v.npy", "v.npy.jsonl"]
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"old"}


@pytest.mark.parametrize("limit", [10, 25])
def test_full_disk_while_writing(tmp_path, limit):
    """No room for the vector (20 bytes), or room for it, but not for its line of the index."""
    output = tmp_path / "v.npy"
    output.write_bytes(b"old")
    opened = writer(output, exists="overwrite")
    with full_disk(limit), pytest.raises(OutputError, match="written: File too large"):
        opened.write(embedding())
    opened.close()
    assert output.read_bytes() == b"old"
    assert left(tmp_path) == ["v.npy"]


@pytest.mark.parametrize("name", ["v.npy", "v.npz", "v.safetensors"])
def test_full_disk_while_the_array_is_built(tmp_path, name):
    opened = writer(tmp_path / name)
    row = embedding(shape=(300,))
    opened.write(row)
    with full_disk(600), pytest.raises(OutputError, match=f"{name} cannot be written") as caught:
        opened.commit()
    opened.close()
    assert caught.value.exit_code == 1
    assert left(tmp_path) == [f"{name}.jsonl", f"{name}.part"], "the vectors are kept"
    assert (tmp_path / f"{name}.part").read_bytes() == row.vector.tobytes()
    assert caught.value.message.endswith(f"its vectors are kept in {tmp_path / name}.part")
    call = caught.value.hint.partition("; ")[2].removesuffix(" reads them")
    assert np.array_equal(eval(call, {"numpy": np}), row.vector[None])


def test_row_that_failed_half_way_does_not_shift_the_next(tmp_path):
    output = tmp_path / "v.npy"
    with writer(output) as opened:
        opened.write(embedding("a.jpg"))
        room = (tmp_path / "v.npy.jsonl").stat().st_size + 10
        with full_disk(room), pytest.raises(OutputError):
            opened.write(embedding("bb.jpg"))
        opened.write(embedding("ccc.jpg"))
    assert [row["path"] for row in index_of(output)] == ["a.jpg", "ccc.jpg"]
    expected = np.stack([embedding(name).vector for name in ["a.jpg", "ccc.jpg"]])
    assert np.array_equal(read(output), expected)


FLAT = """
import resource, sys
from pathlib import Path
import numpy as np
from vlmrun.files.rows import Embedding
from vlmrun.files.writers import open_writer
vector = np.ones((64, 4096), np.float32)  # 1 MiB
row = Embedding("a", None, vector, "k", "m", None, "d", 1.0, None)
with open_writer(Path(sys.argv[1]), task="embed", stdout=sys.stdout.buffer) as writer:
    for _ in range(8):
        writer.write(row)
    held = open("/proc/self/status").read()
    for _ in range(56):
        writer.write(row)
    limit = int(held.split("VmData:")[1].split()[0]) * 1024 + (32 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    writer.commit()
"""


@pytest.mark.parametrize("name", ["v.npy", "v.npz", "v.safetensors"])
def test_memory_stays_flat(tmp_path, name):
    """64 MiB of vectors are put in place by a process that may take 32 MiB for it."""
    subprocess.run([sys.executable, "-c", FLAT, str(tmp_path / name)], check=True)
    assert (tmp_path / name).stat().st_size > 64 << 20
    (tmp_path / name).unlink()  # pytest keeps the folders of three runs
