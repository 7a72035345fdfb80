"""`--max-patches`, `--dynamic-size` and `--scores` from the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Command, assert_refused
from folders import picture
from timm_goldens import write_timm

SIZES = ((60, 40), (300, 6), (28, 28))


@pytest.fixture(scope="module")
def naflex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_naflex import build_naflex

    return build_naflex(tmp_path_factory.mktemp("naflex"))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    files = [folder / f"{width}x{height}.png" for width, height in SIZES]
    for file, size in zip(files, SIZES, strict=True):
        picture(*size).save(file)
    return files


def stock_vectors(folder: Path, most: int) -> Any:
    """Pooled vectors of the pictures by stock transformers, of unit length."""
    import torch
    from transformers import Siglip2Model
    from transformers.models.siglip2 import image_processing_pil_siglip2 as stock

    processor = stock.Siglip2ImageProcessorPil.from_pretrained(folder)
    images = [picture(*size) for size in SIZES]
    inputs = processor(images, return_tensors="pt", max_num_patches=most)
    model = Siglip2Model.from_pretrained(folder).eval()
    with torch.no_grad():
        found = model.get_image_features(**inputs).pooler_output
    return (found / found.norm(dim=-1, keepdim=True)).numpy()


@pytest.mark.parametrize(("flags", "most"), [([], 24), (["--max-patches", "9"], 9)])
@pytest.mark.parametrize("resident", ["100%", "0%"])
def test_vectors_are_those_of_stock(
    vlmrun: Command,
    naflex: Path,
    shown: list[Path],
    tmp_path: Path,
    flags: list[str],
    most: int,
    resident: str,
) -> None:
    output = tmp_path / "v.npy"
    argv = ["-m", naflex, "--resident", resident, *flags, *shown, "-o", output]
    done = vlmrun("embed", *argv)
    assert (done.code, done.out, done.err) == (0, b"", "")
    assert np.load(output) == pytest.approx(stock_vectors(naflex, most), abs=1e-5)


def test_patches_of_any_shape_fit_one_array(
    vlmrun: Command, naflex: Path, shown: list[Path], tmp_path: Path
) -> None:
    """Padded to the number that was asked for, with zeros."""
    output = tmp_path / "v.npy"
    argv = ["-m", naflex, "--output-kind", "last-hidden", "--max-patches", "23", "-o", output]
    assert vlmrun("embed", *argv, "--normalize", *shown).code == 0
    lengths = np.linalg.norm(np.load(output), axis=-1)
    assert lengths.shape == (3, 23)
    counts = [int((row > 0.5).sum()) for row in lengths]
    assert counts == [20, 23, 16]
    for row, count in zip(lengths, counts, strict=True):
        assert row[:count] == pytest.approx(1, abs=1e-5)
        assert not row[count:].any()


def test_the_plan_counts_patches(vlmrun: Command, naflex: Path, shown: list[Path]) -> None:
    peaks = []
    for most in (9, 4000):
        argv = ["-m", naflex, "--max-patches", most, "--ram", "64GiB", shown[0]]
        told = vlmrun("mem-plan", *argv)
        assert f"1 crop, {most} tokens" in told.text
        assert f"--max-patches {most}" in told.text
        peaks.append(json.loads(vlmrun("mem-plan", "--json", *argv).out)["peak"]["ram_bytes"])
    assert peaks[1] - peaks[0] > 4000**2 * 4
    assert "1 crop, 24 tokens" in vlmrun("mem-plan", "-m", naflex).text
    refused = vlmrun("embed", "-m", naflex, "--max-patches", 10**9, shown[0])
    assert_refused(refused, "does not fit", code=4)


def test_pictures_at_their_own_size(
    vlmrun: Command, tiny_siglip_vision: Path, shown: list[Path], tmp_path: Path
) -> None:
    argv = ["embed", "-m", tiny_siglip_vision, "--dynamic-size", "--output-kind", "last-hidden"]
    rows = vlmrun(*argv, *shown).rows
    assert [np.shape(row["embedding"]) for row in rows] == [(9 * 6, 48), (43, 48), (16, 48)]
    squashed = vlmrun(*[word for word in argv if word != "--dynamic-size"], *shown).rows
    assert rows[2]["embedding"] == squashed[2]["embedding"]
    assert rows[0]["embedding"][:16] != squashed[0]["embedding"]
    output = tmp_path / "v.npy"
    ragged = vlmrun(*argv, *shown[:2], "-o", output)
    said = f"{shown[0]} makes 54 vectors and {shown[1]} 43: one array holds one shape"
    assert_refused(ragged, said, hint="--format jsonl", code=2)
    assert list(tmp_path.iterdir()) == []
    assert vlmrun(*argv, shown[0], shown[0], "-o", output).code == 0
    assert np.load(output).shape == (2, 54, 48)
    plan = vlmrun("mem-plan", "-m", tiny_siglip_vision, "--dynamic-size", *shown).text
    assert "1 crop, 54 tokens" in plan


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        ("siglip", ["--max-patches", "9"], "sees every picture as a square"),
        ("naflex", ["--dynamic-size"], "is no SigLIP tower of a fixed size"),
        ("siglip", ["--scores"], "--scores: there are no texts"),
    ],
)
def test_flags_that_cannot_be_meant(
    vlmrun: Command,
    naflex: Path,
    tiny_siglip: Path,
    shown: list[Path],
    model: str,
    flags: list[str],
    words: str,
) -> None:
    folder = {"siglip": tiny_siglip, "naflex": naflex}[model]
    assert_refused(vlmrun("embed", "-m", folder, *flags, shown[0]), words, code=2)


def test_captioning_models_take_no_such_flags(vlmrun: Command) -> None:
    for flags in (["--max-patches", "9"], ["--dynamic-size"]):
        assert_refused(vlmrun("mem-plan", "-m", "demo", *flags), flags[0], "captions", code=2)


def test_scores_stand_in_the_rows_of_pictures(
    vlmrun: Command, three: list[Path], tmp_path: Path
) -> None:
    texts = ("an elephant", "a strawberry", "a red apple")
    asked = [word for text in texts for word in ("-t", text)]
    argv = ["embed", "-m", "demo-siglip", *asked, *three]
    done = vlmrun(*argv, "--scores", "--no-normalize")
    assert (done.code, done.err) == (0, "")
    plain = vlmrun(*argv, "--no-normalize").rows
    assert [row.get("path") or row["text"] for row in done.rows] == [*map(str, three), *texts]
    vectors = [np.array(row["embedding"]) for row in plain]
    units = np.array([vector / np.linalg.norm(vector) for vector in vectors])
    for at, row in enumerate(done.rows):
        assert row["embedding"] == plain[at]["embedding"]
        assert ("scores" in row) == (at < 3)
        if at >= 3:
            continue
        assert [score["text"] for score in row["scores"]] == list(texts)
        found = [score["cosine"] for score in row["scores"]]
        assert found == pytest.approx(units[3:] @ units[at], abs=1e-5)
        assert int(np.argmax([score["probability"] for score in row["scores"]])) == at
    output = tmp_path / "v.npy"
    assert vlmrun(*argv, "--scores", "-o", output).code == 0
    index = [json.loads(line) for line in (tmp_path / "v.npy.jsonl").read_text().splitlines()]
    assert ["scores" in row for row in index] == [True] * 3 + [False] * 3


def test_scores_need_pictures(vlmrun: Command, tiny_siglip: Path) -> None:
    told = vlmrun("embed", "-m", tiny_siglip, "--scores", "-t", "a cat")
    assert_refused(told, "--scores: there are no pictures", code=2)


def test_what_is_cut_off_is_told_where_it_is(
    vlmrun: Command, shown: list[Path], tmp_path: Path
) -> None:
    """timm's files say the middle of a picture; at its own size all of it is seen."""
    folder = write_timm(tmp_path / "m", "map")
    cut = vlmrun("embed", "-m", folder, shown[0])
    assert "the middle of every picture is seen" in cut.err
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"]["crop_pct"] = 1.0
    (folder / "config.json").write_text(json.dumps(config))
    told = vlmrun("embed", "-m", folder, shown[0])
    assert "the middle of a picture that is not square is seen" in told.err
    whole = vlmrun("embed", "-m", folder, "--dynamic-size", shown[0])
    assert (whole.code, whole.err) == (0, "")
    assert whole.rows != cut.rows


def test_own_size_needs_no_way_to_make_squares(
    vlmrun: Command, shown: list[Path], tmp_path: Path
) -> None:
    """A crop of timm's that is not run matters only where pictures are cut."""
    folder, same = (write_timm(tmp_path / name, "map") for name in ("border", "map"))
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"]["crop_mode"] = "border"
    (folder / "config.json").write_text(json.dumps(config))
    told = vlmrun("embed", "-m", folder, shown[0])
    assert_refused(told, "crop_mode is 'border'", hint="embed --dynamic-size")
    assert "would refuse it" in vlmrun("mem-plan", "-m", folder).err
    done, plain = (vlmrun("embed", "-m", f, "--dynamic-size", shown[0]) for f in (folder, same))
    assert (done.code, done.err) == (0, "")
    assert done.rows[0]["embedding"] == plain.rows[0]["embedding"]
    planned = vlmrun("mem-plan", "-m", folder, "--task", "embed", "--dynamic-size")
    assert "would refuse it" not in planned.err
