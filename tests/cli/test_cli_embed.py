"""`vlmrun embed` with the packaged model: vectors, arrays with their index, texts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Command, Done

TEXTS = ("an elephant", "a strawberry", "a red apple")


@pytest.fixture
def embed(vlmrun: Command) -> Command:
    def run(*argv: object, **streams: Any) -> Done:
        return vlmrun("embed", "-m", "demo-siglip", *argv, **streams)

    return run


def vectors(done: Done) -> Any:
    return np.array([row["embedding"] for row in done.rows])


def test_rows_hold_unit_vectors_of_pictures_and_texts(embed: Command, three: list[Path]) -> None:
    done = embed(*three, *(word for text in TEXTS for word in ("-t", text)))
    assert (done.code, done.err) == (0, "")
    found = done.rows
    assert [row.get("path") or row["text"] for row in found] == [*map(str, three), *TEXTS]
    assert {row["model"] for row in found} == {"demo-siglip"}
    numbers = vectors(done)
    assert np.linalg.norm(numbers, axis=1) == pytest.approx(1, abs=1e-6)
    assert (numbers[:3] @ numbers[3:].T).argmax(axis=1).tolist() == [0, 1, 2]


def test_texts_alone_leave_stdin_alone(embed: Command, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("an elephant\n\na strawberry\n")
    done = embed("--texts-from", tmp_path / "texts", stdin=b"nowhere.png\n")
    assert (done.code, done.err) == (0, "")
    assert [row["text"] for row in done.rows] == list(TEXTS[:2])
    piped = embed("--texts-from", "-", stdin=b"an elephant\r\na strawberry\n")
    assert vectors(piped).tolist() == vectors(done).tolist()
    assert embed("-t", "an elephant", terminals="stdin").code == 0


def test_paths_come_from_stdin_without_texts(embed: Command, three: list[Path]) -> None:
    done = embed(stdin="\n".join(map(str, three)).encode())
    assert [row["path"] for row in done.rows] == [str(path) for path in three]


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_an_array_has_a_row_per_success_and_an_index(
    embed: Command, three: list[Path], tmp_path: Path, suffix: str
) -> None:
    output = tmp_path / f"v.{suffix}"
    done = embed(three[0], "nowhere.png", three[1], "-o", output)
    assert (done.code, done.out) == (3, b"")
    index = [json.loads(line) for line in (tmp_path / f"v.{suffix}.jsonl").read_text().splitlines()]
    assert [row.get("index") for row in index] == [0, None, 1]
    assert index[1]["error"]["message"] == "no such file"
    if suffix == "safetensors":
        from safetensors.numpy import load_file  # late: one of three cases

        array = load_file(output)["embeddings"]
    else:
        loaded = np.load(output)
        array = loaded if suffix == "npy" else loaded["embeddings"]
    assert array.dtype == np.float32
    assert array == pytest.approx(vectors(embed(three[0], three[1])), abs=1e-7)
    assert embed(three[0], "-o", output).code == 1


def test_vectors_are_normalised_unless_told_otherwise(embed: Command, three: list[Path]) -> None:
    raw = vectors(embed(three[0], "--no-normalize"))[0]
    unit = vectors(embed(three[0]))[0]
    assert np.linalg.norm(raw) != pytest.approx(1, abs=1e-3)
    assert raw / np.linalg.norm(raw) == pytest.approx(unit, abs=1e-6)


def test_other_outputs_of_the_tower(embed: Command, three: list[Path], tmp_path: Path) -> None:
    shapes = {}
    for kind in ("last-hidden", "hidden:-2"):
        output = tmp_path / f"{kind}.npy"
        assert embed(*three[:2], "--output-kind", kind, "-o", output).code == 0
        shapes[kind] = np.load(output).shape
    assert shapes["last-hidden"] == shapes["hidden:-2"]
    assert len(shapes["last-hidden"]) == 3


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (
            ["-t", "a cat", "--output-kind", "last-hidden"],
            2,
            "texts are embedded as pooled vectors only",
        ),
        (
            ["--output-kind", "hidden:99"],
            2,
            "hidden:99 names no layer: the tower has hidden:0 (embeddings) to hidden:6",
        ),
        (["--output-kind", "tokens"], 2, "unknown output kind 'tokens'"),
        (["-m", "demo"], 1, "vlmrun caption"),
    ],
)
def test_what_the_model_cannot_give(
    embed: Command, three: list[Path], argv: list[str], code: int, words: str
) -> None:
    done = embed(three[0], *argv)
    assert (done.code, done.out) == (code, b"")
    assert words in done.err


def test_statistics_of_an_encoder(embed: Command, three: list[Path]) -> None:
    done = embed(three[0], "--stats", "--json")
    told = json.loads(done.err)
    assert told["plan"]["floor"]["first_token_s"] is None
    assert told["measured"]["tokens"] == 0
    assert "tokens per second" not in embed(three[0], "--stats").err
