from pathlib import Path

import pytest
from faults import full_disk

from vlmrun.errors import OutputError
from vlmrun.files.growing import FileSink


def test_full_disk_leaves_no_half_row(tmp_path):
    with full_disk(100):
        sink = FileSink(tmp_path / "x", replaces=False)
        sink.write(b"a" * 59 + b"\n", finished=True)
        for _ in range(2):
            with pytest.raises(OutputError, match="x cannot be written: File too large"):
                sink.write(b"b" * 59 + b"\n", finished=True)
        sink.write(b"c" * 19 + b"\n", finished=True)
        sink.close()
    assert (tmp_path / "x").read_bytes() == b"a" * 59 + b"\n" + b"c" * 19 + b"\n"


def test_full_disk_at_the_first_row_keeps_the_old_file(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    sink = FileSink(tmp_path / "x", replaces=True)
    with full_disk(100), pytest.raises(OutputError, match="File too large"):
        sink.write(b"b" * 200, finished=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"
    sink.write(b"short", finished=True)
    sink.close()
    assert (tmp_path / "x").read_bytes() == b"short"


@pytest.mark.parametrize(("replaces", "name"), [(False, "x"), (True, "x.new")])
def test_a_file_that_came_meanwhile_is_not_touched(tmp_path, replaces, name):
    sink = FileSink(tmp_path / "x", replaces=replaces)
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(OutputError, match="x cannot be written: File exists"):
        sink.write(b"row\n", finished=True)
    sink.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: b"precious"}


def deleted(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    path.rename(path.with_name("y"))
    path.write_bytes(b"another")


def cut(path: Path) -> None:
    path.write_bytes(b"")


LOSSES = {deleted: "deleted", replaced: "replaced", cut: "cut short"}


@pytest.mark.parametrize(("lose", "word"), LOSSES.items())
@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_file_that_was_lost_is_an_error(tmp_path, lose, word, at_the_end):
    sink = FileSink(tmp_path / "x", replaces=False)
    sink.write(b"row\n", finished=True)
    lose(tmp_path / "x")
    with pytest.raises(OutputError, match=f"x was {word} while it was being written"):
        sink.close() if at_the_end else sink.write(b"row\n", finished=True)
    if lose is replaced:
        assert (tmp_path / "y").read_bytes() == b"row\n"
        assert (tmp_path / "x").read_bytes() == b"another"
