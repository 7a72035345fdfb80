import hashlib
import os
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from faults import both_fail
from PIL import Image, ImageFile

from vlmrun.errors import ImageError, UsageError
from vlmrun.files.images import DecodeOptions, decode_image, parse_background, read_size
from vlmrun.files.inputs import ImageInput

OPTIONS = DecodeOptions()
ORIENTATION = 0x0112
CORNERS = {  # where the four corners of the upright picture lie in the stored one
    1: "abcd",
    2: "badc",
    3: "dcba",
    4: "cdab",
    5: "acbd",
    6: "bdac",
    7: "dbca",
    8: "cadb",
}
COLOURS = {"a": (250, 0, 0), "b": (0, 250, 0), "c": (0, 0, 250), "d": (250, 250, 0)}


def corners(image: Image.Image) -> str:
    """Names of the colours in the corners: top left, top right, bottom left, bottom right."""
    right, bottom = image.width - 1, image.height - 1
    found = [image.getpixel(at) for at in [(0, 0), (right, 0), (0, bottom), (right, bottom)]]
    return "".join(
        min(COLOURS, key=lambda name: np.abs(np.subtract(COLOURS[name], pixel)).sum())
        for pixel in found
    )


def stored(orientation: int) -> Image.Image:
    """A picture that is 48x32 with corners a b / c d once its orientation is applied."""
    size = (32, 48) if orientation >= 5 else (48, 32)
    image = Image.new("RGB", size)
    for index, name in enumerate(CORNERS[orientation]):
        box = (index % 2 * size[0] // 2, index // 2 * size[1] // 2)
        image.paste(COLOURS[name], (*box, box[0] + size[0] // 2, box[1] + size[1] // 2))
    return image


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    return tags


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_late_chunk(png: bytes, kind: bytes, data: bytes) -> bytes:
    """The PNG with one more chunk after its pixels."""
    end = png.rindex(b"IEND") - 4
    return png[:end] + png_chunk(kind, data) + png[end:]


def png_bytes(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.webp", "raw.tiff", "lzw.tiff", "x.avif"])
def test_exif_orientation_is_applied(save, name, orientation):
    options = {"compression": "tiff_lzw"} if name.startswith("lzw") else {}
    image = save(stored(orientation), name, exif=exif(orientation), **options)
    decoded = decode_image(image, options=OPTIONS)
    assert corners(decoded.image) == "abcd"
    assert decoded.image.size == (48, 32) == read_size(image, options=OPTIONS)
    assert decoded.image.info == {}, "nothing that a later reader could apply again"


@pytest.mark.parametrize("orientation", [1, 6])
def test_orientation_may_stand_in_xmp(save, orientation):
    xmp = f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()
    image = save(stored(orientation), "x.jpg", xmp=xmp)
    assert corners(decode_image(image, options=OPTIONS).image) == "abcd"
    assert read_size(image, options=OPTIONS) == (48, 32)


@pytest.mark.parametrize("orientation", [3, 6])
def test_orientation_may_stand_after_the_pixels_of_a_png(save, orientation):
    tags = exif(orientation).tobytes().removeprefix(b"Exif\0\0")
    image = save(with_late_chunk(png_bytes(stored(orientation)), b"eXIf", tags), "x.png")
    assert corners(decode_image(image, options=OPTIONS).image) == "abcd"
    assert read_size(image, options=OPTIONS) == (48, 32)


def test_damaged_exif_is_a_note(save):
    image = save(Image.new("RGB", (4, 2)), "x.png", exif=b"Exif\0\0no tags here")
    decoded = decode_image(image, options=OPTIONS)
    assert decoded.notes == ("its EXIF data is damaged; it is taken as upright",)
    assert read_size(image, options=OPTIONS) == (4, 2)


def test_digest_is_of_the_file(save, photo):
    image = save(photo, "x.jpg")
    data = Path(image.path).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    assert decode_image(image, options=OPTIONS).sha256 == digest
    assert decode_image(ImageInput("-", data), options=OPTIONS).sha256 == digest


def test_bytes_from_standard_input_decode_as_the_file(save, photo):
    image = save(photo, "x.png")
    piped = ImageInput("-", Path(image.path).read_bytes())
    assert decode_image(piped, options=OPTIONS).image.tobytes() == photo.tobytes()
    assert read_size(piped, options=OPTIONS) == photo.size


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 3), (1, 5000), (5000, 1)])
def test_narrow_pictures(save, size):
    image = save(Image.new("RGB", size, (9, 8, 7)), "x.png")
    decoded = decode_image(image, options=OPTIONS).image
    assert decoded.size == size == read_size(image, options=OPTIONS)
    assert decoded.getpixel((0, 0)) == (9, 8, 7)


@pytest.mark.parametrize("name", ["x.psd", "x.ico", "x.bmp", "x.tga", "x.ppm", "x.qoi", "x.jp2"])
def test_other_formats(save, photo, name):
    if name == "x.psd":
        header = b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, 40, 60, 8, 3) + b"\0" * 12 + b"\0\0"
        content = header + b"".join(band.tobytes() for band in photo.split())
        image = save(content, name)
    else:
        image = save(photo, name)
    decoded = decode_image(image, options=OPTIONS)
    assert decoded.image.mode == "RGB"
    assert decoded.image.size == read_size(image, options=OPTIONS)
    assert decoded.notes == ()
    if name != "x.ico":
        assert decoded.image.tobytes() == photo.tobytes()


@pytest.mark.parametrize(
    ("text", "colour"),
    [("white", (255, 255, 255)), ("Navy", (0, 0, 128)), ("#0102fF", (1, 2, 255))],
)
def test_background_names_a_colour(text, colour):
    assert parse_background(text) == colour


@pytest.mark.parametrize("text", ["", "#12345", "#11223344", "#gggggg", "whitish", "rgb(1,2,3)"])
def test_background_that_is_no_colour(text):
    with pytest.raises(UsageError, match="unknown colour") as caught:
        parse_background(text)
    assert caught.value.exit_code == 2
    assert "#rrggbb" in caught.value.hint


@pytest.mark.parametrize("path", ["missing.jpg", "x.txt/inside.jpg", "nul\0.jpg", "caf\udce9.jpg"])
def test_missing_file(tmp_path, path):
    (tmp_path / "x.txt").write_text("a file, not a folder")
    both_fail(ImageInput(f"{tmp_path}/{path}"), "^no such file$")


def test_name_too_long(tmp_path):
    both_fail(ImageInput(f"{tmp_path}/{'x' * 300}"), "^cannot be opened: File name too long$")


def test_folder(tmp_path):
    both_fail(ImageInput(str(tmp_path)), "^is a folder$")


def test_empty_file_and_empty_input(save):
    both_fail(save(b"", "x.jpg"), "^is empty$")
    both_fail(ImageInput("-", b""), "^is empty$")


def test_pipe_is_refused_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    both_fail(ImageInput(str(tmp_path / "pipe")), "^is not a regular file; pipe .* name it `-`$")


def test_no_permission(save, photo, tmp_path):
    image = save(photo, "x.jpg")
    os.chmod(image.path, 0)
    user = os.geteuid()
    if user == 0:  # root may read everything, so look at it as somebody else
        os.seteuid(65534)
    try:
        both_fail(image, "^permission denied$")
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("data", [b"hello there, no picture", b"\0" * 64, b"x", b"%PDF-1.7 and so"])
def test_not_a_picture(save, data):
    error = both_fail(save(data, "x.jpg"), "^is not a picture Pillow can read")
    assert error.message.endswith(f"(starts with {data[:16]!r})")


def test_heic_is_named_by_its_start(save):
    both_fail(save(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "x.heic"), "ftypheic")


def test_postscript_is_not_run(save):
    both_fail(save(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "x.eps"), "PS-Adobe")


@pytest.mark.parametrize("kept", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.gif", "x.bmp", "x.webp", "x.tiff", "x.ppm"])
def test_truncated_file(save, name, kept):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    whole = Path(save(noise, "whole-" + name).path).read_bytes()
    image = save(whole[: int(len(whole) * kept)], name)
    with pytest.raises(ImageError, match="truncated") as caught:
        decode_image(image, options=OPTIONS)
    assert caught.value.exit_code == 1
    assert image.path not in caught.value.message
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.gif", "x.webp"])
def test_truncated_header(save, photo, name):
    whole = Path(save(photo, "whole-" + name).path).read_bytes()
    both_fail(save(whole[:20], name), "^is (damaged or )?truncated")


def test_damaged_checksum_is_named(save, photo):
    data = bytearray(png_bytes(photo))
    data[30] ^= 0xFF
    both_fail(save(bytes(data), "x.png"), "damaged or truncated .*checksum in b'IHDR'")


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP"])
def test_chunk_that_unpacks_to_gigabytes(save, kind):
    packed = zlib.compress(b"\0" * (8 << 20))
    plain = png_bytes(Image.new("RGB", (2, 2)))
    bomb = plain[:33] + png_chunk(kind, b"name\0\0" + packed) + plain[33:]
    both_fail(save(bomb, "x.png"), "damaged or truncated .*too large")


def test_pillows_settings_stay_as_they_are(save, photo):
    before = Image.MAX_IMAGE_PIXELS
    decode_image(save(photo, "x.jpg"), options=DecodeOptions(max_pixels=5000))
    assert before == Image.MAX_IMAGE_PIXELS
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_threads_decode_at_once_and_leave_no_open_file(save, photo):
    names = ["x.jpg", "x.png", "x.gif", "x.webp", "x.tiff", "x.bmp"]
    images = [save(photo, name) for name in names] * 8
    expected = [decode_image(image, options=OPTIONS).image.tobytes() for image in images]
    open_files = len(os.listdir("/proc/self/fd"))
    start = threading.Barrier(4)

    def decode(image: ImageInput) -> bytes:
        return decode_image(image, options=OPTIONS).image.tobytes()

    with ThreadPoolExecutor(4, initializer=start.wait) as pool:
        assert list(pool.map(decode, images)) == expected
    assert len(os.listdir("/proc/self/fd")) == open_files
