import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from vlmrun.errors import ImageError
from vlmrun.files.images import DecodeOptions, decode_image
from vlmrun.files.inputs import ImageInput

GREEN = (0, 128, 0)


def decoded(image: ImageInput, **options: Any) -> np.ndarray:
    """Pixels [H, W, 3] of the decoded file, as integers that can be subtracted."""
    result = decode_image(image, options=DecodeOptions(**options)).image
    assert result.mode == "RGB"
    return np.asarray(result).astype(int)


def rgba() -> Image.Image:
    """Three pixels of red: opaque, half transparent, transparent with a colour hidden below."""
    image = Image.new("RGBA", (3, 1), (200, 0, 0, 255))
    image.putpixel((1, 0), (200, 0, 0, 128))
    image.putpixel((2, 0), (0, 0, 250, 0))
    return image


@pytest.mark.parametrize("name", ["x.png", "x.webp", "x.tiff", "x.tga"])
def test_alpha_is_laid_on_white(save, name):
    exact = {"lossless": True, "exact": True} if name == "x.webp" else {}
    pixels = decoded(save(rgba(), name, **exact))[0]
    assert np.abs(pixels - [(200, 0, 0), (227, 127, 127), (255, 255, 255)]).max() <= 1


def test_alpha_is_laid_on_the_background_asked_for(save):
    pixels = decoded(save(rgba(), "x.png"), background=GREEN)[0]
    assert pixels.tolist() == [[200, 0, 0], [100, 64, 0], [0, 128, 0]]


def test_grey_with_alpha(save):
    image = Image.new("LA", (2, 1), (40, 255))
    image.putpixel((1, 0), (40, 0))
    assert decoded(save(image, "x.png"), background=GREEN)[0].tolist() == [[40] * 3, [*GREEN]]


def palette(colours: list[int], mode: str = "RGB") -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette(colours, mode)
    image.putpixel((1, 0), 1)
    return image


@pytest.mark.parametrize("name", ["x.png", "x.gif", "x.bmp", "x.tiff"])
def test_palette(save, name):
    image = palette([10, 20, 30, 200, 100, 50])
    assert decoded(save(image, name))[0].tolist() == [[10, 20, 30], [200, 100, 50]]


@pytest.mark.parametrize(
    ("transparency", "second"),
    [(1, [0, 128, 0]), (b"\xff\x00", [0, 128, 0]), (b"\xff\x80", [100, 114, 25])],
)
def test_palette_with_transparency(save, transparency, second):
    image = save(palette([10, 20, 30, 200, 100, 50]), "x.png", transparency=transparency)
    assert decoded(image, background=GREEN)[0].tolist() == [[10, 20, 30], second]


def test_gif_with_a_transparent_colour(save):
    image = save(palette([10, 20, 30, 200, 100, 50]), "x.gif", transparency=1)
    assert decoded(image)[0].tolist() == [[10, 20, 30], [255, 255, 255]]


@pytest.mark.parametrize(
    ("mode", "clear", "kept"),
    [("RGB", (9, 9, 9), (9, 9, 8)), ("L", 9, 8), ("1", 0, 255), ("I;16", 9, 2570)],
)
def test_one_colour_stands_for_transparent(save, mode, clear, kept):
    image = Image.new(mode, (2, 1), clear)
    image.putpixel((1, 0), kept)
    pixels = decoded(save(image, "x.png", transparency=clear), background=GREEN)[0].tolist()
    expected = {"RGB": [9, 9, 8], "L": [8] * 3, "1": [255] * 3, "I;16": [10] * 3}
    assert pixels == [[*GREEN], expected[mode]]


def png16(colour_type: int, samples: list[int], extra: bytes = b"") -> bytes:
    """A PNG of one row with 16 bits per channel."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour_type]
    width = len(samples) // channels
    header = struct.pack(">IIBBBBB", width, 1, 16, colour_type, 0, 0, 0)
    row = b"\0" + struct.pack(f">{len(samples)}H", *samples)
    parts = [(b"IHDR", header), (b"tRNS", extra), (b"IDAT", zlib.compress(row)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
        if data or kind != b"tRNS"
    )


def test_transparent_colour_of_sixteen_bits(save):
    clear = (0x1234, 0x5678, 0x9ABC)
    data = png16(2, [*clear, 0xFFFF, 0, 0x8080], struct.pack(">3H", *clear))
    assert decoded(save(data, "x.png"), background=GREEN)[0].tolist() == [[*GREEN], [255, 0, 128]]


@pytest.mark.parametrize(("colour_type", "clear"), [(4, [0x8000, 0]), (6, [1, 2, 3, 0])])
def test_alpha_of_sixteen_bits(save, colour_type, clear):
    opaque = [0x8000] * (len(clear) - 1) + [0xFFFF]
    pixels = decoded(save(png16(colour_type, [*opaque, *clear]), "x.png"), background=GREEN)
    assert pixels[0].tolist() == [[128] * 3, [*GREEN]]


RAMP = np.arange(65536).reshape(256, 256)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("x.png", "<u2"),
        ("x.tiff", "<u2"),
        ("x.tiff", ">u2"),
        ("x.jp2", "<u2"),
        ("x.tiff", "<i4"),
        ("x.pgm", "<u2"),
    ],
)
def test_ramp_of_sixteen_bits_keeps_256_levels(save, name, dtype):
    image = Image.fromarray(RAMP.astype(dtype))
    pixels = decoded(save(image, name))
    assert np.array_equal(pixels[..., 0].ravel(), np.round(np.arange(65536) / 257).astype(int))
    assert np.array_equal(pixels[..., 0], pixels[..., 2])


def test_mid_grey_of_sixteen_bits_stays_mid_grey(save):
    image = save(Image.fromarray(np.full((4, 4), 32896, dtype="<u2")), "x.png")
    assert np.unique(decoded(image)).tolist() == [128]


def tiff(image: Image.Image, **tags: int) -> bytes:
    """A TIFF whose header says something else than Pillow would write."""
    buffer = BytesIO()
    image.save(buffer, "TIFF")
    data = bytearray(buffer.getvalue())
    for name, value in tags.items():
        number = {"bits": 258, "photometric": 262}[name]
        at = data.index(struct.pack("<HHI", number, 3, 1)) + 8
        data[at : at + 2] = struct.pack("<H", value)
    return bytes(data)


def test_tiff_whose_zero_is_white(save):
    image = Image.fromarray(np.array([[0, 65535]], dtype="<u2"))
    assert decoded(save(tiff(image, photometric=0), "x.tiff"))[0, :, 0].tolist() == [255, 0]


def test_tiff_of_twelve_bits(save):
    # Two values of twelve bits in three bytes: 0xFFF and 0x800.
    image = Image.fromarray(np.frombuffer(b"\xff\xf8\x00\x00", "<u2").reshape(1, 2))
    assert decoded(save(tiff(image, bits=12), "x.tiff"))[0, :, 0].tolist() == [255, 128]


@pytest.mark.parametrize(
    ("values", "grey"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.25, 0.5, 0.5], [64, 128, 128]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, 300.0, 1000.0], [0, 77, 255]),
        ([7.0, 7.0, 7.0], [0, 0, 0]),
        ([-3e38, 0.0, 3e38], [0, 128, 255]),
    ],
)
def test_floats_are_scaled_and_never_clipped(save, values, grey):
    image = save(Image.fromarray(np.array([values], dtype="<f4")), "x.tiff")
    assert decoded(image)[0, :, 0].tolist() == grey


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_floats_that_are_no_numbers(save, odd):
    image = save(Image.fromarray(np.array([[0.5, odd]], dtype="<f4")), "x.tiff")
    with pytest.raises(ImageError, match="NaN or infinity") as caught:
        decode_image(image, options=DecodeOptions())
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("values", "grey"),
    [
        ([0, 32896, 65535], [0, 128, 255]),
        ([-100, 0, 100], [0, 128, 255]),
        ([0, 500_000, 1_000_000], [0, 128, 255]),
        ([-(2**31), 0, 2**31 - 1], [0, 128, 255]),
    ],
)
def test_integers_of_32_bits_are_scaled_and_never_clipped(save, values, grey):
    image = save(Image.fromarray(np.array([values], dtype="<i4")), "x.tiff")
    assert decoded(image)[0, :, 0].tolist() == grey


@pytest.mark.parametrize(
    ("mode", "colour", "name", "expected"),
    [
        ("1", 255, "x.png", (255, 255, 255)),
        ("L", 77, "x.jpg", (77, 77, 77)),
        ("YCbCr", (128, 128, 128), "x.jpg", (128, 128, 128)),
        ("YCbCr", (76, 85, 255), "x.tiff", (254, 0, 0)),
        ("LAB", (255, 128, 128), "x.tiff", (255, 255, 255)),
        ("CMYK", (255, 0, 0, 0), "x.jpg", (0, 255, 255)),
        ("CMYK", (0, 0, 0, 255), "x.jpg", (0, 0, 0)),
        ("CMYK", (0, 0, 0, 0), "x.tiff", (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), "x.tiff", (255, 0, 0)),
    ],
)
def test_other_modes(save, mode, colour, name, expected):
    pixels = decoded(save(Image.new(mode, (16, 16), colour), name))
    assert np.abs(pixels - expected).max() <= 2


def cmyk_profile() -> bytes:
    """The smallest CMYK profile: a table with two points per ink, in which cyan prints orange.

    International Color Consortium, ICC.1:2001-04, 6.5.8 lut8Type.
    """
    lab = {False: (255, 128, 128), True: (170, 180, 200)}  # [L a b] of paper, and of cyan ink
    black = (0, 128, 128)
    identity = bytes(range(256))
    points = [(c, k) for c in (0, 1) for _ in range(4) for k in (0, 1)]  # K varies fastest
    table = b"".join(bytes(black if k else lab[bool(c)]) for c, k in points)
    unit = b"".join(struct.pack(">i", 65536 if i % 4 == 0 else 0) for i in range(9))
    lut = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + unit + identity * 4 + table + identity * 3
    white = b"XYZ \0\0\0\0" + struct.pack(">iii", 63190, 65536, 54061)
    text = b"text\0\0\0\0none\0\0\0\0"
    words = b"test\0"
    desc = b"desc\0\0\0\0" + struct.pack(">I", len(words)) + words + b"\0" * 79
    body, tags, at = b"", b"", 128 + 4 + 12 * 4
    for name, data in [(b"desc", desc), (b"cprt", text), (b"wtpt", white), (b"A2B0", lut)]:
        tags += name + struct.pack(">II", at + len(body), len(data))
        body += data + b"\0" * (-len(data) % 4)
    size = at + len(body)
    header = struct.pack(">I4xI4s4s4s", size, 0x02400000, b"prtr", b"CMYK", b"Lab ")
    header += struct.pack(">6H", 2000, 1, 1, 0, 0, 0) + b"acsp"
    header = header.ljust(68, b"\0") + struct.pack(">iii", 63190, 65536, 54061)
    return header.ljust(128, b"\0") + struct.pack(">I", 4) + tags + body


@pytest.mark.parametrize("name", ["x.jpg", "x.tiff"])
def test_cmyk_goes_through_its_profile(save, name):
    ink = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    image = save(ink, name, icc_profile=cmyk_profile())
    red, green, blue = decoded(image)[0, 0]
    assert red > green > blue, "the profile prints cyan ink orange"
    assert decode_image(image, options=DecodeOptions()).notes == ()
    paper = Image.new("CMYK", (16, 16), (0, 0, 0, 0))
    white = decoded(save(paper, "paper-" + name, icc_profile=cmyk_profile()))
    assert white.min() >= 253


@pytest.mark.parametrize("kind", ["noise", "rgb"])
def test_cmyk_with_a_useless_profile(save, kind):
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    profile = b"not a profile" * 20 if kind == "noise" else srgb
    ink = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    result = decode_image(save(ink, "x.jpg", icc_profile=profile), options=DecodeOptions())
    assert result.notes == ("its CMYK profile is damaged; converted without it",)
    assert result.image.getpixel((3, 3)) == (0, 255, 255)


def test_rgb_profile_leaves_pixels_as_they_are(save):
    swapped = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = swapped.replace(b"rXYZ", b"tmp_").replace(b"gXYZ", b"rXYZ").replace(b"tmp_", b"gXYZ")
    image = save(Image.new("RGB", (2, 2), (10, 200, 30)), "x.png", icc_profile=swapped)
    assert decoded(image)[0, 0].tolist() == [10, 200, 30]
