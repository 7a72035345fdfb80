import json
import os
from io import BytesIO
from typing import Any

import numpy as np
import pytest

from vlmrun.errors import OutputError
from vlmrun.files.rows import Caption, Embedding, Failure
from vlmrun.files.writers import Writer, open_writer

FAILURE = Failure("bad.jpg", None, "ImageError", "is truncated")


def caption(path: str = "a.jpg", text: str = "A cat.", name: str | None = None) -> Caption:
    return Caption(path, f"ask {name}", text, "m", None, "float32", 3, "stop", 1.0, "00", name)


def embedding(path: str = "a.jpg", value: float = 1.0) -> Embedding:
    vector = np.full(3, value, np.float32)
    return Embedding(path, None, vector, "pooled", "m", None, "float32", 1.0, "00")


def writer(**options: Any) -> Writer:
    options = {"task": "caption", "stdout": BytesIO(), **options}
    return open_writer(None, **options)


def printed(rows: list[Any], **options: Any) -> bytes:
    """What the rows look like on standard output."""
    stdout = BytesIO()
    with writer(stdout=stdout, **options) as opened:
        for row in rows:
            opened.write(row)
        opened.commit()
    assert not stdout.closed
    return stdout.getvalue()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"single": True}, b"A cat.\nIt sleeps.\n"),
        ({"single": True, "one_line": True}, b"A cat. It sleeps.\n"),
        ({"single": True, "filenames": True}, b"a.jpg\tA cat. It sleeps.\n"),
        ({"single": True, "filenames": False}, b"A cat.\nIt sleeps.\n"),
        ({}, b"a.jpg\tA cat. It sleeps.\n"),
        ({"filenames": True}, b"a.jpg\tA cat. It sleeps.\n"),
        ({"filenames": False}, b"A cat. It sleeps.\n"),
        ({"single": True, "prompts": 2}, b"a.jpg\tlong\tA cat. It sleeps.\n"),
        ({"prompts": 2}, b"a.jpg\tlong\tA cat. It sleeps.\n"),
        ({"prompts": 2, "filenames": False}, b"long\tA cat. It sleeps.\n"),
    ],
)
def test_text(options, expected):
    row = caption(text="A cat.\nIt sleeps.", name="long")
    assert printed([row], **options) == expected


def test_text_of_prompts_without_a_name():
    assert printed([caption()], prompts=2) == b"a.jpg\task None\tA cat.\n"


def test_text_is_plain_bytes():
    odd = os.fsdecode(b"caf\xe9[bold].jpg")
    line = printed([caption(odd, "[bold]Käse[/bold] " + "x" * 500)])
    assert line == b"caf\xe9[bold].jpg\t[bold]K\xc3\xa4se[/bold] " + b"x" * 500 + b"\n"


def test_path_cannot_break_the_columns():
    assert printed([caption("a\tb\nc\rd.jpg")]) == b"a\\tb\\nc\\rd.jpg\tA cat.\n"


def test_failures_have_no_line_of_text():
    assert printed([FAILURE, caption(), FAILURE]) == b"a.jpg\tA cat.\n"


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("format", ["json", "jsonl"])
def test_json_is_one_object_per_line(format, single):
    rows = [caption(text="A cat.\nIt sleeps.", name="long"), FAILURE, caption("b.jpg")]
    lines = printed(rows, format=format, single=single).splitlines()
    assert [json.loads(line) for line in lines] == [row.row() for row in rows]


def test_one_line_holds_for_json_too():
    line = printed([caption(text="A cat.\nIt sleeps.")], format="json", one_line=True)
    assert json.loads(line)["caption"] == "A cat. It sleeps."


def test_vectors_without_a_file_are_json_lines():
    lines = printed([embedding(), FAILURE], task="embed").splitlines()
    assert json.loads(lines[0])["embedding"] == [1.0, 1.0, 1.0]
    assert json.loads(lines[1])["error"] == {"type": "ImageError", "message": "is truncated"}


class Stream(BytesIO):
    """Counts flushes, and fails on writing if told to."""

    def __init__(self, error: OSError | None = None) -> None:
        super().__init__()
        self.flushed: list[bytes] = []
        self.error = error

    def flush(self) -> None:
        if self.error is not None:
            raise self.error
        self.flushed.append(self.getvalue())


def test_every_row_is_flushed():
    stdout = Stream()
    with writer(stdout=stdout, filenames=False) as opened:
        opened.write(caption(text="one"))
        opened.write(caption(text="two"))
    assert stdout.flushed == [b"one\n", b"one\ntwo\n"]


def test_closed_pipe_is_left_to_the_caller():
    with writer(stdout=Stream(BrokenPipeError())) as opened, pytest.raises(BrokenPipeError):
        opened.write(caption())


def test_full_disk_behind_standard_output():
    opened = writer(stdout=Stream(OSError(28, "No space left on device")))
    with pytest.raises(OutputError, match="standard output cannot be written: No space") as caught:
        opened.write(caption())
    assert caught.value.exit_code == 1
