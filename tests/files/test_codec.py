import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from faults import both_fail
from PIL import Image

from vlmrun.errors import ImageError
from vlmrun.files import codec
from vlmrun.files.images import DecodeOptions, decode_image, read_size
from vlmrun.files.inputs import ImageInput

OPTIONS = DecodeOptions()
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def frames(size: tuple[int, int] = (20, 10)) -> list[Image.Image]:
    return [Image.new("RGB", size, colour) for colour in COLOURS]


def animation(save, name: str) -> ImageInput:
    first, *rest = frames()
    options = {"lossless": True} if name.endswith("webp") else {}
    return save(first, name, save_all=True, append_images=rest, **options)


@pytest.mark.parametrize("frame", [0, 1, 2])
@pytest.mark.parametrize("name", ["x.gif", "x.webp", "x.png", "x.tiff", "x.avif"])
def test_one_frame_of_an_animation_and_a_note(save, name, frame):
    image = animation(save, name)
    decoded = decode_image(image, options=DecodeOptions(frame=frame))
    assert decoded.notes == (f"has 3 frames; frame {frame} is used",)
    assert np.abs(np.subtract(decoded.image.getpixel((5, 5)), COLOURS[frame])).max() < 8
    assert read_size(image, options=DecodeOptions(frame=frame)) == (20, 10)


@pytest.mark.parametrize(("name", "count"), [("x.gif", 3), ("x.tiff", 3), ("still.png", 1)])
@pytest.mark.parametrize("frame", [3, -1])
def test_frame_that_does_not_exist(save, name, count, frame):
    image = animation(save, name) if count == 3 else save(frames()[0], name)
    words = f"has {count} frames?; frame {frame} does not exist"
    for read in (read_size, decode_image):
        with pytest.raises(ImageError, match=words) as caught:
            read(image, options=DecodeOptions(frame=frame))
        assert "--frame" in caught.value.message


def test_pages_of_a_tiff_have_their_own_sizes_and_limits(save):
    small, large = Image.new("RGB", (4, 4)), Image.new("RGB", (30, 20))
    image = save(small, "x.tiff", save_all=True, append_images=[large])
    options = DecodeOptions(frame=1)
    assert read_size(image, options=options) == (30, 20)
    assert decode_image(image, options=options).image.size == (30, 20)
    for read in (read_size, decode_image):
        with pytest.raises(ImageError, match="30x20 = 600 pixels, over the limit of 500"):
            read(image, options=DecodeOptions(frame=1, max_pixels=500))


def test_second_picture_of_a_phone_is_no_animation(save):
    first, second, _ = frames()
    image = save(first, "x.mpo", save_all=True, append_images=[second])
    phone = ImageInput(image.path.replace(".mpo", ".jpg"))
    Path(image.path).rename(phone.path)
    decoded = decode_image(phone, options=DecodeOptions())
    assert decoded.notes == ()
    assert np.abs(np.subtract(decoded.image.getpixel((5, 5)), COLOURS[0])).max() < 8


@pytest.mark.parametrize("read", [read_size, decode_image])
def test_truncated_animation(save, read):
    data = Path(animation(save, "x.gif").path).read_bytes()
    second = data.index(b"\x21\xf9", data.index(b"\x21\xf9") + 1)
    with pytest.raises(ImageError, match=r"^is truncated$"):
        read(ImageInput("-", data[: second + 12]), options=DecodeOptions())


def huge_png(width: int, height: int) -> bytes:
    """A PNG with the header of a large picture and hardly any pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    crc = struct.pack(">I", zlib.crc32(b"IHDR" + header))
    return b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + header + crc + b"\0\0\x0f\xffIDATxx"


@pytest.mark.parametrize(("width", "height"), [(20000, 20000), (178_956_971, 1), (60000, 65000)])
def test_pixel_limit(save, width, height):
    error = both_fail(
        save(huge_png(width, height), "x.png"), "over the limit of 178,956,970", OPTIONS
    )
    assert f"is {width}x{height} = {width * height:,} pixels" in error.message
    assert "--max-pixels" in error.message


def test_pixel_limit_is_inclusive(save):
    image = save(Image.new("RGB", (20, 10)), "x.png")
    assert read_size(image, options=DecodeOptions(max_pixels=200)) == (20, 10)
    both_fail(image, "20x10 = 200 pixels, over the limit of 199", DecodeOptions(max_pixels=199))


def test_no_warning_between_half_the_limit_and_the_limit(save):
    image = save(huge_png(13000, 13000), "x.png")
    assert read_size(image, options=OPTIONS) == (13000, 13000)


def test_limit_above_pillows_own(save, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # and back to its value afterwards
    image = save(Image.new("RGB", (40, 30), (1, 2, 3)), "x.webp", lossless=True)
    options = DecodeOptions(max_pixels=1200)
    assert decode_image(image, options=options).image.size == (40, 30)
    assert read_size(image, options=options) == (40, 30)


def test_limit_inside_a_reader_is_an_image_error(save, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    image = save(Image.new("RGB", (40, 30)), "x.webp")
    both_fail(image, r"limit of 150 pixels \(--max-pixels\)", DecodeOptions(max_pixels=150))


def test_header_is_enough_for_the_size(save):
    """The size of a picture whose pixels are missing is still read."""
    image = save(huge_png(300, 200), "x.png")
    assert read_size(image, options=DecodeOptions()) == (300, 200)
    with pytest.raises(ImageError, match="truncated"):
        decode_image(image, options=DecodeOptions())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("image file is truncated (3 bytes not processed)"), "is truncated"),
        (OSError("Truncated File Read"), "is truncated"),
        (struct.error("unpack needs a buffer"), "is truncated"),
        (IndexError("index out of range"), "is truncated"),
        (ValueError("bad table\nsecond line"), "is damaged or truncated (bad table)"),
        (KeyError(), "is damaged or truncated (KeyError)"),
        (MemoryError(), "does not fit in memory"),
        (Image.DecompressionBombError("x"), "unpacks to more than the limit of 99 pixels"),
        (ImageError("is odd"), "is odd"),
    ],
)
def test_whatever_a_reader_raises_becomes_an_image_error(error, words):
    with pytest.raises(ImageError) as caught, codec.errors_translated(99):
        raise error
    assert caught.value.message.startswith(words)
    assert "\n" not in caught.value.message
    if not isinstance(error, ImageError):
        assert caught.value.__cause__ is error


def test_interruption_is_not_translated():
    with pytest.raises(KeyboardInterrupt), codec.errors_translated(99):
        raise KeyboardInterrupt


def test_every_reader_left_out_is_one_of_pillows():
    Image.init()
    assert set(Image.OPEN) >= codec.LEFT_OUT
    assert set(Image.OPEN) | {"MPO"} >= codec.ANIMATED


def test_file_is_identified_by_content_not_by_name():
    buffer = BytesIO()
    frames()[0].save(buffer, "WEBP")
    assert codec.open_picture(buffer).format == "WEBP"
