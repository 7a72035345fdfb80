"""`scripts/nearest.py`: the nearest text of every picture, and one line where a file is missing."""

import subprocess
import sys
from pathlib import Path

from commands import Command

ROOT = Path(__file__).parents[1]
PICTURES = sorted((ROOT / "vlmrun/data/pictures").glob("*.png"))


def nearest(*argv: object) -> tuple[int, str, str]:
    line = [sys.executable, ROOT / "scripts/nearest.py", *argv]
    done = subprocess.run([str(word) for word in line], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_each_picture_has_its_text(vlmrun: Command, tmp_path: Path) -> None:
    texts = ["-t", "an elephant", "-t", "a strawberry"]
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    shown = [PICTURES[2], broken, PICTURES[5]]
    assert vlmrun("embed", "-m", "demo-siglip", *shown, *texts, "-o", tmp_path / "v.npy").code == 3
    code, out, err = nearest(tmp_path / "v.npy")
    assert (code, err) == (0, "")
    found = [line.split("\t")[:2] for line in out.splitlines()]
    assert found == [[str(PICTURES[2]), "an elephant"], [str(PICTURES[5]), "a strawberry"]]


def test_what_is_missing_is_one_line(vlmrun: Command, tmp_path: Path) -> None:
    assert nearest() == (1, "", "usage: nearest.py VECTORS.npy\n")
    vectors, junk = tmp_path / "v.npy", tmp_path / "junk.npy"
    junk.write_bytes(b"no array")
    assert vlmrun("embed", "-m", "demo-siglip", PICTURES[2], "-o", vectors).code == 0
    (tmp_path / "alone.npy").write_bytes(vectors.read_bytes())
    for name, words in (
        ("none.npy", "none.npy: No such file"),
        ("junk.npy", "junk.npy is no array"),
        ("alone.npy", "alone.npy.jsonl: No such file"),
        ("v.npy", "holds no vector of a text"),
    ):
        code, out, err = nearest(tmp_path / name)
        assert (code, out, err.count("\n")) == (1, "", 1), name
        assert err.startswith("nearest.py: ")
        assert words in err
