"""Faults that others reported of pictures, each by its number in the list of public faults or by
the row of transformers' edge cases, and the right value instead."""

import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from commands import Command, assert_refused
from folders import model_at, picture
from PIL import Image

from vlmrun.errors import ImageError
from vlmrun.files.images import DecodeOptions, decode_image, read_size
from vlmrun.files.inputs import ImageInput
from vlmrun.tasks.preprocess import PicturePreprocessor

Pixels = npt.NDArray[np.int64]
ORIENTATION = 0x0112
# Stored rows and columns of a picture [[a, b], [c, d]] by EXIF orientation (EXIF 2.32, 4.6.4).
STORED = {
    1: [[0, 1], [2, 3]],
    2: [[1, 0], [3, 2]],
    3: [[3, 2], [1, 0]],
    4: [[2, 3], [0, 1]],
    5: [[0, 2], [1, 3]],
    6: [[1, 3], [0, 2]],
    7: [[3, 1], [2, 0]],
    8: [[2, 0], [3, 1]],
}
GREYS = (0, 80, 160, 240)


def decoded(path: Path, **options: Any) -> Pixels:
    """Pixels [H, W, 3] of a file."""
    found = decode_image(ImageInput(str(path)), options=DecodeOptions(**options))
    assert found.image.mode == "RGB"
    return np.asarray(found.image).astype(np.int64)


def notes(path: Path) -> tuple[str, ...]:
    return decode_image(ImageInput(str(path)), options=DecodeOptions()).notes


def saved(image: Image.Image, path: Path, **options: Any) -> Path:
    image.save(path, **options)
    return path


def grey_row(*values: int) -> list[list[int]]:
    return [[value] * 3 for value in values]


def header_of(width: int, height: int) -> bytes:
    """A PNG of two colours that promises so many pixels and holds none of them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    ihdr = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"\0" * 99))
    return b"\x89PNG\r\n\x1a\n" + ihdr + data + chunk(b"IEND", b"")


def see_through(kind: str) -> tuple[Image.Image, dict[str, Any]]:
    """Two pixels, the second transparent over a hidden black, in each way a PNG has for it."""
    if kind == "RGBA":
        image = Image.new("RGBA", (2, 1), (200, 100, 50, 255))
        image.putpixel((1, 0), (0, 0, 0, 0))
        return image, {}
    if kind == "LA":
        image = Image.new("LA", (2, 1), (77, 255))
        image.putpixel((1, 0), (0, 0))
        return image, {}
    image = Image.new(kind, (2, 1))
    if kind == "P":
        image.putpalette([200, 100, 50, 0, 0, 0])
        image.putpixel((1, 0), 1)
        return image, {"transparency": 1}
    image.putpixel((0, 0), (200, 100, 50))
    return image, {"transparency": (0, 0, 0)}


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P", "RGB"])
def test_f44_what_is_transparent_is_white(tmp_path: Path, kind: str) -> None:
    """transformers#49003, #49005, MMMU#17, DIGITS#85: ignored, or black."""
    image, options = see_through(kind)
    path = saved(image, tmp_path / "x.png", **options)
    kept = [77] * 3 if kind == "LA" else [200, 100, 50]
    assert decoded(path)[0].tolist() == [kept, [255, 255, 255]]
    assert decoded(path, background=(1, 2, 3))[0].tolist() == [kept, [1, 2, 3]]


def test_row_a_colour_hidden_under_alpha_stays_hidden(tmp_path: Path) -> None:
    """`load_image` converts to RGB and drops alpha; what lay beneath shows."""
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    image.putpixel((0, 0), (0, 0, 255, 128))
    found = decoded(saved(image, tmp_path / "x.png"))
    assert found[0, 0].tolist() == [127, 127, 255]
    assert (found[1:] == 255).all()


def test_f45_a_ramp_of_16_bits_keeps_256_levels(tmp_path: Path) -> None:
    """Pillow#2574, #5991, unsloth#10094: all above 255 is white."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    found = decoded(saved(Image.fromarray(ramp), tmp_path / "x.png"))[..., 0].ravel()
    assert found.tolist() == [round(value / 257) for value in range(65536)]


def test_row_16_bit_png_through_the_preprocessor(tiny_siglip: Path, tmp_path: Path) -> None:
    """I;16: mid grey is 0, not 1, of what the tower sees."""
    path = saved(Image.fromarray(np.full((28, 28), 32896, np.uint16)), tmp_path / "x.png")
    image = decode_image(ImageInput(str(path)), options=DecodeOptions()).image
    seen = PicturePreprocessor(model_at(tiny_siglip)).pixels([image])
    expected = torch.tensor((128 / 255 - 0.5) / 0.5)
    torch.testing.assert_close(seen, expected.expand(1, 3, 28, 28), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("values", "greys"),
    [([0, 32896, 65535], (0, 128, 255)), ([-100, 0, 100], (0, 128, 255))],
)
def test_row_32_bit_integers(tmp_path: Path, values: list[int], greys: tuple[int, ...]) -> None:
    """I: clipped at 255."""
    image = Image.fromarray(np.array([values], dtype=np.int32))
    assert decoded(saved(image, tmp_path / "x.tiff"))[0].tolist() == grey_row(*greys)


def test_row_float_picture(tmp_path: Path) -> None:
    """F: 0.5 becomes black."""
    image = Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32))
    assert decoded(saved(image, tmp_path / "x.tiff"))[0].tolist() == grey_row(0, 128, 255)


@pytest.mark.parametrize("orientation", STORED)
def test_f46_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    """transformers.js#737, was-node-suite-comfyui#138: pictures of phones lie on their side."""
    stored = np.array(GREYS, dtype=np.uint8)[np.array(STORED[orientation])]
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    path = saved(Image.fromarray(stored).convert("RGB"), tmp_path / "x.png", exif=tags)
    assert decoded(path)[..., 0].tolist() == [[0, 80], [160, 240]]


def test_row_exif_turns_the_size_too(tmp_path: Path) -> None:
    """Tiles are chosen by the upright size."""
    tags = Image.Exif()
    tags[ORIENTATION] = 6
    path = saved(picture(40, 20), tmp_path / "x.jpg", exif=tags)
    assert read_size(ImageInput(str(path)), options=DecodeOptions()) == (20, 40)
    assert decoded(path).shape == (40, 20, 3)


@pytest.fixture
def ten(tmp_path: Path) -> list[Path]:
    """Ten good pictures."""
    sizes = [(20 + 3 * at, 30) for at in range(10)]
    return [saved(picture(*size), tmp_path / f"{at}.png") for at, size in enumerate(sizes)]


def vectors(vlmrun: Command, folder: Path, *args: object) -> dict[str, list[float]]:
    """Vectors of pictures by their paths."""
    told = vlmrun("embed", "--json", "-m", folder, *args)
    assert told.code == 0, told.err
    return {row["path"]: row["embedding"] for row in told.rows}


def check_nine_of_ten(
    vlmrun: Command, folder: Path, ten: list[Path], damaged: bytes, says: str
) -> None:
    """With the fifth damaged, the others keep their vectors and the fifth says what is wrong."""
    good = vectors(vlmrun, folder, *ten, "--batch-size", "4")
    ten[4].write_bytes(damaged)
    told = vlmrun("embed", "--json", "-m", folder, *ten, "--batch-size", "4")
    assert told.code == 3
    assert [row["path"] for row in told.rows] == [str(path) for path in ten]
    assert says in told.rows[4]["error"]["message"]
    for row in [*told.rows[:4], *told.rows[5:]]:  # a smaller batch may sum in another order
        assert row["embedding"] == pytest.approx(good[row["path"]], rel=0, abs=1e-6)


def test_f48_a_decompression_bomb_stops_nothing(
    vlmrun: Command, tiny_siglip: Path, ten: list[Path]
) -> None:
    """comfyui-art-venture#36, memery#10, dataset-viewer#1192: it stops the whole job."""
    says = "40000x40000 = 1,600,000,000 pixels, over the limit"
    check_nine_of_ten(vlmrun, tiny_siglip, ten, header_of(40_000, 40_000), says)


def test_f49_a_truncated_picture_stops_nothing(
    vlmrun: Command, tiny_siglip: Path, ten: list[Path]
) -> None:
    """clip-retrieval#257, ViLT#55, VLMEvalKit#1400: it hangs or kills the batch."""
    check_nine_of_ten(vlmrun, tiny_siglip, ten, ten[4].read_bytes()[:-60], "is truncated")


def test_f49_no_grey_bar_stands_for_what_is_missing(tmp_path: Path) -> None:
    """A JPEG cut in half opens, and fails only when its pixels are read."""
    path = saved(picture(200, 200), tmp_path / "x.jpg", quality=95)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ImageError, match="is truncated"):
        decoded(path)


def test_row_large_pictures_neither_warn_nor_pass_the_limit(tmp_path: Path) -> None:
    """Above 89 million pixels Pillow warns, above 179 million it raises, of any picture."""
    path = tmp_path / "x.png"
    path.write_bytes(header_of(13_000, 13_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        size = read_size(ImageInput(str(path)), options=DecodeOptions())
    assert size == (13_000, 13_000)
    path.write_bytes(header_of(14_000, 13_000))
    with pytest.raises(ImageError, match=r"over the limit of 178,956,970 \(--max-pixels\)"):
        decoded(path)
    size = read_size(ImageInput(str(path)), options=DecodeOptions(max_pixels=200_000_000))
    assert size == (14_000, 13_000)


def frames(*greys: int) -> list[Image.Image]:
    return [Image.new("RGB", (4, 4), (grey,) * 3) for grey in greys]


@pytest.mark.parametrize("name", ["x.gif", "x.webp", "x.png", "x.tiff"])
def test_f50_the_first_frame_and_a_note(tmp_path: Path, name: str) -> None:
    """meme-search#191, llama-hub#325: what becomes of an animation is left open; transformers
    takes the first frame and does not say so."""
    first, *others = frames(0, 120, 240)
    exact = {"lossless": True} if name == "x.webp" else {}
    path = saved(first, tmp_path / name, save_all=True, append_images=others, **exact)
    assert (decoded(path) == 0).all()
    assert notes(path) == ("has 3 frames; frame 0 is used",)
    assert (decoded(path, frame=2) == 240).all()
    with pytest.raises(ImageError, match="has 3 frames; frame 3 does not exist"):
        decoded(path, frame=3)


@pytest.mark.parametrize(
    ("mode", "colour", "name", "expected"),
    [
        ("CMYK", (0, 255, 255, 0), "x.tiff", (255, 0, 0)),
        ("CMYK", (0, 0, 0, 255), "x.jpg", (0, 0, 0)),
        ("YCbCr", (76, 85, 255), "x.jpg", (254, 0, 0)),
        ("1", 1, "x.png", (255, 255, 255)),
        ("L", 77, "x.png", (77, 77, 77)),
        ("LAB", (128, 128, 128), "x.tiff", (119, 119, 119)),  # CIE L* 50: sRGB's grey of 119
    ],
)
def test_row_other_modes(tmp_path: Path, mode: str, colour: Any, name: str, expected: Any) -> None:
    """CMYK, YCbCr, LAB, 1, L; LAB looked odd."""
    path = saved(Image.new(mode, (16, 16), colour), tmp_path / name)
    assert np.abs(decoded(path) - expected).max() <= 2


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 3), (60, 3), (3, 60), (1, 5000), (5000, 1)])
def test_row_narrow_pictures_are_not_taken_for_channels(
    tiny_siglip: Path, size: tuple[int, int]
) -> None:
    """1x1, 3x1, 1x3, and arrays [3, 60, 3]: the layout is guessed, and guessed wrong."""
    image = picture(*size)
    seen = PicturePreprocessor(model_at(tiny_siglip)).pixels([image])
    scaled = np.asarray(image.resize((28, 28), Image.Resampling.BICUBIC), dtype=np.float64)
    expected = torch.from_numpy((scaled / 255 - 0.5) / 0.5).permute(2, 0, 1)[None].float()
    torch.testing.assert_close(seen, expected, atol=1e-6, rtol=0)


def test_row_pictures_are_rescaled_once(tiny_siglip: Path) -> None:
    """Arrays of 0 to 1 are divided by 255 again, and nearly black."""
    black, white = Image.new("RGB", (9, 9)), Image.new("RGB", (9, 9), (255, 255, 255))
    seen = PicturePreprocessor(model_at(tiny_siglip)).pixels([black, white])
    assert (seen[0] == -1).all()
    assert (seen[1] == 1).all()


def test_row_two_sizes_in_a_batch(vlmrun: Command, tiny_siglip: Path, ten: list[Path]) -> None:
    """Each has the vector that it has alone."""
    together = vectors(vlmrun, tiny_siglip, *ten, "--batch-size", "10")
    for path in ten[:3]:
        alone = vectors(vlmrun, tiny_siglip, path)
        assert together[str(path)] == pytest.approx(alone[str(path)], rel=0, abs=1e-6)
    assert len({tuple(vector) for vector in together.values()}) == len(ten)


def test_row_bytes_that_are_no_picture(vlmrun: Command, tiny_siglip: Path, tmp_path: Path) -> None:
    """A name that does not exist is usage, a file that is no picture is a row."""
    page = tmp_path / "page.jpg"
    page.write_bytes(b"<!doctype html>")
    told = vlmrun("embed", "--json", "-m", tiny_siglip, page)
    assert told.code == 1
    [row] = told.rows
    assert "is not a picture Pillow can read" in row["error"]["message"]
    told = vlmrun("embed", "-m", tiny_siglip, tmp_path / "nowhere.jpg")
    assert_refused(told, "nowhere.jpg", code=2)
