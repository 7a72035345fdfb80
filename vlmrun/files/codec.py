"""Drive Pillow's file readers: identify, choose a frame, refuse what is too large, turn upright.

Imports Pillow, so it is itself imported late.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import BinaryIO

from PIL import Image, ImageFile
from PIL.ExifTags import Base
from PIL.PngImagePlugin import PngImageFile

from vlmrun.errors import ImageError

# Readers left out: EPS starts Ghostscript, the rest have no decoder on most systems.
LEFT_OUT = frozenset({"EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG"})

# Formats whose frames are pictures of equal standing. The second picture in a phone's JPEG (MPO)
# is a preview or a depth map, and Photoshop's frames are layers.
ANIMATED = frozenset({"GIF", "WEBP", "PNG", "AVIF", "TIFF"})

TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
PNG_METADATA = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")


@contextmanager
def errors_translated(max_pixels: int) -> Iterator[None]:
    """Turn whatever a reader raises into ImageError.

    Readers meet arbitrary bytes and raise nearly every class there is; one bad picture must not
    stop the others.
    """
    _follow_limit(max_pixels)
    try:
        yield
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        limit = f"{max_pixels:,} pixels (--max-pixels)"
        raise ImageError(f"unpacks to more than the limit of {limit}") from error
    except MemoryError as error:
        raise ImageError("does not fit in memory") from error
    except Exception as error:
        raise ImageError(_what_is_wrong(error)) from error


def _what_is_wrong(error: Exception) -> str:
    """A reader's words for its user, or plain ones where it ran over the end of the file."""
    words = next(iter(str(error).splitlines()), "") or type(error).__name__
    ran_over = isinstance(error.__cause__ or error, struct.error | IndexError)
    if ran_over or "truncated" in words.lower():
        return "is truncated"
    return f"is damaged or truncated ({words})"


def _follow_limit(max_pixels: int) -> None:
    """Lift Pillow's own limit, which its readers check in places, to at least the user's.

    It stays lifted: another thread may be decoding. Lower limits need nothing from Pillow.
    """
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > 2 * Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = (max_pixels + 1) // 2


def open_picture(file: BinaryIO) -> ImageFile.ImageFile:
    """Read a picture's header.

    Not Image.open: that checks sizes against Pillow's limit, warns from half of it on, and drops
    the reason why a reader gave up.
    """
    file.seek(0)
    start = file.read(16)
    reasons: list[Exception] = []
    tried: set[str] = set()
    for load_readers in (Image.preinit, Image.init):  # the common formats, then the rarer ones
        load_readers()
        for name in [name for name in Image.ID if name not in tried]:
            tried.add(name)
            picture = _try_reader(name, file, start, reasons)
            if picture is not None:
                return picture
    if reasons:
        raise ImageError(_what_is_wrong(reasons[0])) from reasons[0]
    raise ImageError(f"is not a picture Pillow can read (starts with {start!r})")


def _try_reader(
    name: str, file: BinaryIO, start: bytes, reasons: list[Exception]
) -> ImageFile.ImageFile | None:
    """One reader's answer; why it gave up goes to `reasons` if the file starts as its own do."""
    factory, accept = Image.OPEN[name]
    if name in LEFT_OUT:
        return None
    matched = False
    try:
        answer = accept is None or accept(start)
        if answer and not isinstance(answer, str):  # text: this Pillow was built without it
            matched = accept is not None
            file.seek(0)
            return factory(file, "")
    except (SyntaxError, IndexError, TypeError, struct.error) as error:
        if matched:
            reasons.append(error)
    return None


def select_frame(picture: ImageFile.ImageFile, frame: int, *, max_pixels: int) -> tuple[str, ...]:
    """Check that the frame exists and is within the limit; say so if there are others.

    The pages of a TIFF differ in size, so its frame is gone to. Other frames share a canvas, and
    going to one decodes those before it: that is left to the caller.
    """
    _check_size(picture, max_pixels)
    frames = getattr(picture, "n_frames", 1) if picture.format in ANIMATED else 1
    if not 0 <= frame < frames:
        count = f"{frames} frame" if frames == 1 else f"{frames} frames"
        raise ImageError(f"has {count}; frame {frame} does not exist (--frame)")
    if frames == 1:
        return ()
    if picture.format == "TIFF":
        picture.seek(frame)
        _check_size(picture, max_pixels)
    return (f"has {frames} frames; frame {frame} is used",)


def _check_size(picture: ImageFile.ImageFile, max_pixels: int) -> None:
    width, height = picture.size
    if width * height > max_pixels:
        raise ImageError(
            f"is {width}x{height} = {width * height:,} pixels, over the limit of "
            f"{max_pixels:,} (--max-pixels)"
        )


def orientation(picture: ImageFile.ImageFile) -> tuple[Image.Transpose | None, tuple[str, ...]]:
    """How to turn a picture upright, from its EXIF or else its XMP.

    The base class's method, because PNG's decodes the pixels to look behind them.
    """
    try:
        value = Image.Image.getexif(picture).get(Base.Orientation)
    except Exception:  # as in errors_translated: arbitrary bytes
        return None, ("its EXIF data is damaged; it is taken as upright",)
    return (TURNS.get(value) if isinstance(value, int) else None), ()


def turned(image: Image.Image, turn: Image.Transpose | None) -> Image.Image:
    return image if turn is None else image.transpose(turn)


def upright_size(picture: ImageFile.ImageFile, file: BinaryIO) -> tuple[int, int]:
    """Width and height after orientation of a picture of which only the header was read."""
    width, height = picture.size
    if picture.format == "TIFF":  # its reader gives the size after orientation
        return width, height
    turn, _ = orientation(picture)
    if turn is None and picture.format == "PNG":
        turn, _ = orientation(PngImageFile(_metadata_first(file)))
    sideways = turn in {TURNS[5], TURNS[6], TURNS[7], TURNS[8]}
    return (height, width) if sideways else (width, height)


def _metadata_first(file: BinaryIO) -> BytesIO:
    """A PNG's header with the metadata that may stand after the pixels put before them."""
    file.seek(0)
    kept = [file.read(8 + 25)]  # signature and IHDR
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind in PNG_METADATA:
            kept.append(head + file.read(length + 4))
        else:
            file.seek(length + 4, 1)
    return BytesIO(b"".join(kept) + b"\0\0\0\0IDAT")
