"""Decode pictures the same way for every model: upright, RGB, eight bits, nothing hidden.

Pillow does the decoding. It and numpy are imported with `codec` and `pixels` on the first
picture, so that commands without pictures do not wait for them.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from typing import TYPE_CHECKING

from vlmrun.errors import ImageError, UsageError
from vlmrun.files.inputs import ImageInput

if TYPE_CHECKING:
    from PIL import Image

Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What the user chooses about decoding.

    `background`: what transparent pictures are laid on. `max_pixels`: larger pictures are
    refused by their header; the default is Pillow's own. `frame`: of an animation, from 0.
    """

    background: Colour = (255, 255, 255)
    max_pixels: int = 178_956_970
    frame: int = 0


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """An upright RGB picture, the SHA-256 of its file's bytes (hex), and notes for the user."""

    image: "Image.Image"
    sha256: str
    notes: tuple[str, ...] = ()


def parse_background(text: str) -> Colour:
    """Read a colour: `#rrggbb` or an HTML colour name.

    Raises:
        UsageError: it is neither.
    """
    if re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        red, green, blue = bytes.fromhex(text[1:])
        return red, green, blue
    from PIL import ImageColor  # late: only a run that names a colour pays for it

    if text.lower() not in ImageColor.colormap:
        raise UsageError(f"unknown colour {text!r}", "use a name such as white, or #rrggbb")
    red, green, blue = ImageColor.getrgb(text)[:3]
    return red, green, blue


def read_size(image: ImageInput, *, options: DecodeOptions) -> tuple[int, int]:
    """Width and height in pixels after orientation, from the header; no pixel is decoded.

    Raises:
        ImageError: as `decode_image`, for everything that a header shows.
    """
    from vlmrun.files import codec  # late: imports Pillow

    with _opened(image) as file, codec.errors_translated(options.max_pixels):
        picture = codec.open_picture(file)
        codec.select_frame(picture, options.frame, max_pixels=options.max_pixels)
        return codec.upright_size(picture, file)


def decode_image(image: ImageInput, *, options: DecodeOptions) -> DecodedImage:
    """Decode one picture to upright RGB.

    EXIF (or XMP) orientation is applied. Transparency is laid on `options.background`. Numbers
    wider than eight bits are scaled, never clipped; `pixels.scaled` says how. CMYK goes through
    its ICC profile where there is one; RGB pixels stay as they are whatever their profile. An
    animation gives one frame and a note. Several threads may decode at once.

    Raises:
        ImageError: missing, empty, damaged, truncated, too large or not a picture. The message
            does not repeat the path.
    """
    from vlmrun.files import codec, pixels  # late: import Pillow and numpy

    with _opened(image) as file, codec.errors_translated(options.max_pixels):
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        picture = codec.open_picture(file)
        frame_notes = codec.select_frame(picture, options.frame, max_pixels=options.max_pixels)
        if options.frame:
            picture.seek(options.frame)
        picture.load()
        turn, turn_notes = codec.orientation(picture)
        rgb, colour_notes = pixels.to_rgb(picture, options.background)
        upright = codec.turned(rgb, turn)
    # A reader of the result must find nothing in it to apply a second time.
    upright.info = {}
    return DecodedImage(upright, sha256, (*frame_notes, *turn_notes, *colour_notes))


@contextmanager
def _opened(image: ImageInput) -> Iterator[BufferedReader | BytesIO]:
    """The picture's bytes as a seekable file, closed at the end."""
    if image.data is not None:
        if not image.data:
            raise ImageError("is empty")
        yield BytesIO(image.data)
        return
    _check_file(image.path)
    try:
        with open(image.path, "rb") as file:
            yield file
    except OSError as error:  # of `open` alone: the callers translate what happens inside
        raise ImageError(_why(error)) from error


def _check_file(path: str) -> None:
    try:
        status = os.stat(path)
        is_folder = stat.S_ISDIR(status.st_mode)
        if is_folder:
            os.scandir(path).close()  # fails where the folder may not be listed
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise ImageError(_why(error)) from error
    if is_folder:
        raise ImageError("is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise ImageError("is not a regular file; pipe the picture in and name it `-`")
    if status.st_size == 0:
        raise ImageError("is empty")


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return "permission denied"
    if isinstance(error, FileNotFoundError | NotADirectoryError | ValueError):
        return "no such file"
    return f"cannot be opened: {error.strerror}"
