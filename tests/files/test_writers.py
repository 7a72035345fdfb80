import json
import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from vlmrun.errors import OutputError, UsageError
from vlmrun.files.rows import Caption, Failure
from vlmrun.files.writers import Writer, choose_format, open_writer

FAILURE = Failure("bad.jpg", None, "ImageError", "is truncated")


def caption(path: str = "a.jpg", text: str = "A cat.", name: str | None = None) -> Caption:
    return Caption(path, f"ask {name}", text, "m", None, "float32", 3, "stop", 1.0, "00", name)


def writer(output: Path | None, **options: Any) -> Writer:
    options = {"task": "caption", "stdout": BytesIO(), **options}
    return open_writer(output, **options)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "format", "task", "chosen"),
    [
        (None, None, "caption", "text"),
        (None, None, "embed", "jsonl"),
        (None, "json", "caption", "json"),
        ("x.txt", None, "caption", "text"),
        ("x.tsv", None, "caption", "tsv"),
        (None, "tsv", "caption", "tsv"),
        ("x.tsv", "text", "caption", "text"),
        ("x.JSONL", None, "caption", "jsonl"),
        ("x.jsonl", None, "embed", "jsonl"),
        ("x.npy", None, "embed", "npy"),
        ("x.npz", None, "embed", "npz"),
        ("x.safetensors", None, "embed", "safetensors"),
        ("x.txt", "jsonl", "caption", "jsonl"),
        ("x", "npy", "embed", "npy"),
    ],
)
def test_suffix_or_flag_picks_the_format(name, format, task, chosen):
    assert choose_format(name and Path(name), format, task=task) == chosen


@pytest.mark.parametrize(
    ("name", "format", "task", "words", "hint"),
    [
        ("x.doc", None, "caption", r"x\.doc: unknown suffix '\.doc' for caption", ".jsonl"),
        ("x", None, "caption", "unknown suffix ''", "--format"),
        ("x.json", None, "caption", "unknown suffix '.json'", ".txt, .tsv, .jsonl"),
        ("x.npy", None, "caption", "unknown suffix '.npy' for caption", ".jsonl"),
        ("x.txt", None, "embed", "unknown suffix '.txt' for embed", ".npy, .npz, .safetensors"),
        ("x.parquet", None, "embed", "parquet is not written yet", "npy, npz, safetensors"),
        ("x.bin", "parquet", "embed", "parquet is not written yet", "npy"),
        (None, "csv", "caption", "unknown format 'csv' for caption", "text, tsv, jsonl, json"),
        (None, "text", "embed", "unknown format 'text' for embed", "jsonl"),
        (None, "npy", "embed", "npy is not written to standard output", "-o NAME.npy"),
    ],
)
def test_formats_that_do_not_fit(name, format, task, words, hint):
    with pytest.raises(UsageError, match=words) as caught:
        choose_format(name and Path(name), format, task=task)
    assert caught.value.exit_code == 2
    assert hint in caught.value.hint


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_lines_are_in_the_file_as_soon_as_written(tmp_path, name):
    output = tmp_path / name
    stdout = BytesIO()
    with writer(output, stdout=stdout) as opened:
        assert not output.exists()
        opened.write(caption())
        assert len(output.read_bytes().splitlines()) == 1
        opened.write(caption("b.jpg"))
        assert len(output.read_bytes().splitlines()) == 2
        opened.commit()
    assert left(tmp_path) == [name]
    assert stdout.getvalue() == b""


def test_text_file_looks_as_standard_output(tmp_path):
    with writer(tmp_path / "x.txt", single=True) as opened:
        opened.write(caption())
    assert (tmp_path / "x.txt").read_bytes() == b"A cat.\n"


@pytest.mark.parametrize("name", ["x.tsv", "X.TSV"])
def test_table_has_its_path_column_for_one_picture_too(tmp_path, name):
    with writer(tmp_path / name, single=True) as opened:
        opened.write(caption("a.jpg", "A\ncat."))
    assert (tmp_path / name).read_bytes() == b"a.jpg\tA cat.\n"
    with writer(tmp_path / f"bare-{name}", single=True, filenames=False) as opened:
        opened.write(caption("a.jpg"))
    assert (tmp_path / f"bare-{name}").read_bytes() == b"A cat.\n"


def test_failures_are_rows_of_a_json_file(tmp_path):
    with writer(tmp_path / "x.jsonl") as opened:
        opened.write(FAILURE)
        assert rows_of(tmp_path / "x.jsonl") == [FAILURE.row()]
        opened.write(caption())
    assert rows_of(tmp_path / "x.jsonl") == [FAILURE.row(), caption().row()]


def test_interruption_keeps_finished_rows(tmp_path):
    def run() -> None:
        with writer(tmp_path / "x.jsonl") as opened:
            opened.write(caption())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert rows_of(tmp_path / "x.jsonl") == [caption().row()]
    assert left(tmp_path) == ["x.jsonl"]


def test_run_without_rows_leaves_nothing(tmp_path):
    with writer(tmp_path / "x.jsonl") as opened:
        opened.commit()
    assert left(tmp_path) == []


def refused(output: Path, words: str, hint: str = "", **options: Any) -> None:
    before = left(output.parent) if output.parent.is_dir() else None
    with pytest.raises(OutputError, match=words) as caught:
        writer(output, **options)
    assert caught.value.exit_code == 1
    assert str(output) in caught.value.message
    assert hint in caught.value.hint
    assert before == (left(output.parent) if output.parent.is_dir() else None)


@pytest.mark.parametrize(
    ("name", "there", "task"),
    [
        ("x.txt", "x.txt", "caption"),
        ("x.jsonl", "x.jsonl", "embed"),
        ("x.npy", "x.npy", "embed"),
        ("x.npy", "x.npy.jsonl", "embed"),
    ],
)
def test_output_that_exists(tmp_path, name, there, task):
    (tmp_path / there).write_bytes(b"old")
    refused(tmp_path / name, f"{there} exists already", "--exists overwrite", task=task)
    assert (tmp_path / there).read_bytes() == b"old"


def test_folder_that_does_not_exist(tmp_path):
    output = tmp_path / "gone" / "x.txt"
    refused(output, f"cannot be written: there is no folder {output.parent}")


def test_output_that_is_a_folder(tmp_path):
    (tmp_path / "x.txt").mkdir()
    refused(tmp_path / "x.txt", "it is not a regular file", exists="overwrite")


def test_output_that_is_a_device(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    refused(tmp_path / "pipe.txt", "it is not a regular file", exists="overwrite")


def test_folder_that_may_not_be_written(tmp_path, monkeypatch):
    tmp_path.chmod(0o555)
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    if user == 0:  # root may write everywhere, so try as somebody else
        os.seteuid(65534)
    try:
        refused(Path("x.txt"), r"^x\.txt cannot be written: Permission denied$")
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o755)


def test_overwriting_waits_for_the_first_finished_row(tmp_path):
    output = tmp_path / "x.jsonl"
    output.write_bytes(b"old\n")
    with writer(output, exists="overwrite") as opened:
        assert output.read_bytes() == b"old\n"
        opened.write(FAILURE)
        assert output.read_bytes() == b"old\n"
        opened.write(caption())
        assert rows_of(output) == [FAILURE.row(), caption().row()]
        opened.write(FAILURE)
    assert rows_of(output) == [FAILURE.row(), caption().row(), FAILURE.row()]
    assert left(tmp_path) == ["x.jsonl"]


def test_failures_alone_never_replace_old_results(tmp_path):
    output = tmp_path / "x.jsonl"
    output.write_bytes(b"old\n")
    with writer(output, exists="overwrite") as opened:
        opened.write(FAILURE)
        opened.commit()
    assert output.read_bytes() == b"old\n"


def test_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "x.jsonl").symlink_to("real/x.jsonl")
    for _ in range(2):
        with writer(tmp_path / "x.jsonl", exists="overwrite") as opened:
            opened.write(caption())
    assert (tmp_path / "x.jsonl").is_symlink()
    assert rows_of(tmp_path / "real/x.jsonl") == [caption().row()]


def test_commit_and_close_may_be_repeated(tmp_path):
    opened = writer(tmp_path / "x.jsonl")
    opened.write(caption())
    for _ in range(2):
        opened.commit()
        opened.close()
    assert rows_of(tmp_path / "x.jsonl") == [caption().row()]


HOLDER = """
import sys
from pathlib import Path
from vlmrun.files.writers import open_writer
with open_writer(Path(sys.argv[1]), task="caption", stdout=sys.stdout.buffer):
    print("locked", flush=True)
    sys.stdin.read()
"""


def hold(output: Path) -> "subprocess.Popen[bytes]":
    """A second process that has the output open until its standard input ends."""
    command = [sys.executable, "-c", HOLDER, str(output)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    return process


def test_second_run_is_told_of_the_first(tmp_path):
    output = tmp_path / "x.jsonl"
    with hold(output) as first:
        words = rf"is being written by another run \(process {first.pid}\)"
        refused(output, words, "wait for it", exists="overwrite")
        first.communicate()
    assert left(tmp_path) == []
    with writer(output) as opened:
        opened.write(caption())
    assert left(tmp_path) == ["x.jsonl"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.txt"])
def test_overwriting_keeps_the_mode(tmp_path, name):
    (tmp_path / name).write_bytes(b"old\n")
    (tmp_path / name).chmod(0o640)
    with writer(tmp_path / name, exists="overwrite") as opened:
        opened.write(caption())
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o640


def test_read_only_results_are_not_replaced(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"old\n")
    (tmp_path / "x.txt").chmod(0o400)
    refused(tmp_path / "x.txt", "is read-only", "chmod u+w", exists="overwrite")


def test_overwriting_needs_a_name_that_is_free(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"old\n")
    (tmp_path / "x.txt.new").write_bytes(b"precious")
    refused(tmp_path / "x.txt", r"x\.txt\.new is in the way", exists="overwrite")
    assert (tmp_path / "x.txt.new").read_bytes() == b"precious"


@pytest.mark.parametrize("length", [248, 300])
def test_a_name_that_is_too_long_is_refused_before_the_run(tmp_path, length):
    """248 letters would do, were it not for the files that lie beside an array."""
    refused(tmp_path / ("x" * (length - 4) + ".npy"), "File name too long", task="embed")


def test_links_that_lead_nowhere(tmp_path):
    (tmp_path / "a.txt").symlink_to("b.txt")
    (tmp_path / "b.txt").symlink_to("a.txt")
    refused(tmp_path / "a.txt", "Too many levels of symbolic links")


def test_a_link_to_a_device_is_named_as_it_was_given(tmp_path):
    (tmp_path / "x.txt").symlink_to("/dev/null")
    refused(tmp_path / "x.txt", "it is not a regular file", exists="overwrite")


def test_lock_of_a_killed_run_is_taken_over(tmp_path):
    output = tmp_path / "x.jsonl"
    with hold(output) as first:
        first.kill()
        first.communicate()
    assert left(tmp_path) == ["x.jsonl.lock"]
    with writer(output):
        assert (tmp_path / "x.jsonl.lock").read_text() == f"{os.getpid()}\n"
    assert left(tmp_path) == []


def test_importing_this_room_imports_neither_numpy_nor_pillow():
    code = (
        "import sys, vlmrun.files.images, vlmrun.files.writers\n"
        "sys.exit(' '.join({'numpy', 'PIL', 'torch', 'safetensors'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
