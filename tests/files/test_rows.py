import json
import os

import numpy as np
import pytest

from vlmrun.files.rows import Caption, Embedding, Failure, fold, readable, to_json

ODD = os.fsdecode(b"caf\xe9.jpg")
CAPTION = Caption(
    path="a.jpg",
    prompt="Describe this image.",
    caption="A cat.",
    model="org/model",
    revision="abc",
    dtype="bfloat16",
    tokens=3,
    finish="stop",
    ms=12.34567,
    sha256="00",
)


def embedding(vector: np.ndarray, path: str | None = "a.jpg", text: str | None = None) -> Embedding:
    return Embedding(path, text, vector, "pooled", "org/model", None, "float32", 5.0, "00")


def test_caption_row():
    row = CAPTION.row()
    assert " ".join(row) == "v path prompt caption model revision dtype tokens finish ms sha256"
    assert row["v"] == 1
    assert row["ms"] == 12.346
    assert to_json(row) == (
        b'{"v": 1, "path": "a.jpg", "prompt": "Describe this image.", "caption": "A cat.", '
        b'"model": "org/model", "revision": "abc", "dtype": "bfloat16", "tokens": 3, '
        b'"finish": "stop", "ms": 12.346, "sha256": "00"}\n'
    )


def test_named_prompt_is_in_the_row():
    named = Caption("a.jpg", "p", "c", "m", None, "float32", 1, "length", 1.0, "00", "short")
    assert named.row()["prompt_name"] == "short"
    assert json.loads(to_json(named.row()))["revision"] is None


def test_embedding_row():
    row = embedding(np.array([0.1, -2.5], dtype=np.float32)).row()
    assert " ".join(row) == "v path embedding output_kind model revision dtype ms sha256"
    assert b'"embedding": [0.1, -2.5]' in to_json(row), "the shortest digits"


@pytest.mark.parametrize("shape", [(1152,), (3, 7)])
def test_numbers_come_back_exactly(shape):
    vector = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    back = json.loads(to_json(embedding(vector).row()))["embedding"]
    assert np.array(back, dtype=np.float32).tobytes() == vector.tobytes()


def test_embedding_row_with_an_index_has_no_numbers():
    row = embedding(np.zeros(2, np.float32)).row(index=7)
    assert row["index"] == 7
    assert "embedding" not in row


def test_embedding_of_a_text():
    row = embedding(np.zeros(2, np.float32), path=None, text="a cat").row()
    assert row["text"] == "a cat"
    assert "path" not in row


def test_numbers_that_json_has_no_word_for_are_not_written():
    with pytest.raises(ValueError, match="JSON"):
        to_json(embedding(np.array([np.nan], np.float32)).row())


@pytest.mark.parametrize("source", ["path", "text"])
def test_failure_row(source):
    failure = Failure(**{"path": None, "text": None, source: "x"}, type="ImageError", message="is")
    assert failure.row() == {"v": 1, source: "x", "error": {"type": "ImageError", "message": "is"}}


@pytest.mark.parametrize(("path", "text"), [(None, None), ("a", "b")])
def test_row_is_about_one_thing(path, text):
    with pytest.raises(AssertionError):
        Failure(path, text, "ImageError", "is").row()


@pytest.mark.parametrize(
    "row",
    [
        Caption(ODD, ODD, "c", "m", None, "float32", 1, "stop", 1.0, "00", ODD).row(),
        embedding(np.zeros(1, np.float32), path=ODD).row(),
        embedding(np.zeros(1, np.float32), path=None, text=ODD).row(),
        Failure(ODD, None, "ImageError", f"odd {ODD}").row(),
    ],
)
def test_bytes_that_are_not_utf8_are_spelt_out(row):
    line = to_json(row)
    assert "caf\\\\xe9.jpg" in line.decode("utf-8")
    values = json.loads(line)
    assert values.get("path", values.get("text")) == "caf\\xe9.jpg"


@pytest.mark.parametrize("text", ["", "plain", "Käse 漢字 🙂", "back\\slash", "two\nlines"])
def test_other_text_stays_as_it_is(text):
    assert readable(text) == text
    assert json.loads(to_json({"text": text})) == {"text": text}


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("one line", "one line"),
        ("two\nlines", "two lines"),
        ("  three \r\n\r\n  lines\n", "three lines"),
        ("a\u2028b\x0bc\x85d", "a b c d"),
        ("inner  blanks\tstay", "inner  blanks\tstay"),
        ("\n\n", ""),
    ],
)
def test_fold(text, folded):
    assert fold(text) == folded


def test_no_byte_of_any_field_makes_invalid_json():
    """As in the name of a model that is a folder."""
    line = to_json({"model": ODD, "nested": [{"command": f"-m {ODD}"}]})
    assert json.loads(line) == {
        "model": "caf\\xe9.jpg",
        "nested": [{"command": "-m caf\\xe9.jpg"}],
    }
