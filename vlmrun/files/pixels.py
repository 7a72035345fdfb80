"""From every pixel format Pillow knows to RGB, eight bits.

Imports Pillow and numpy, so it is itself imported late.
"""

from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION

from vlmrun.errors import ImageError

Array = npt.NDArray[Any]
Grey = npt.NDArray[np.uint8]


def to_rgb(
    image: Image.Image, background: tuple[int, int, int]
) -> tuple[Image.Image, tuple[str, ...]]:
    """The loaded picture in RGB, and notes for the user. `image` keeps its pixels."""
    if image.mode == "CMYK":
        return _cmyk_to_rgb(image)
    if image.mode in {"I", "F"} or image.mode.startswith("I;16"):
        image = scaled(image)
    if image.has_transparency_data:
        return _laid_on(image, background), ()
    return image.convert("RGB"), ()


def _laid_on(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    colour = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(colour, tuple) and max(colour) > 255:
        # A PNG with 16 bits per channel: Pillow keeps the high bytes of its pixels only.
        image = image.copy()
        image.info["transparency"] = tuple(value >> 8 for value in colour)
    base = Image.new("RGBA", image.size, (*background, 255))
    base.alpha_composite(image.convert("RGBA"))
    return base.convert("RGB")


def scaled(image: Image.Image) -> Image.Image:
    """Grey values wider than eight bits as L, or LA where one value stands for transparent.

    16-bit values (modes I;16...) are scaled by their bit depth: 65535 becomes 255, so a full ramp
    keeps 256 levels and mid grey stays mid grey; a TIFF of 12 bits counts to 4095. 32-bit
    integers (I) within 0..65535 are taken as 16-bit values, floats (F) within 0..1 as shares of
    white. Any other range is stretched from the picture's smallest value to its largest.

    Raises:
        ImageError: a float is NaN or infinite.
    """
    values: Array = np.asarray(image)
    tags = getattr(image, "tag_v2", {})
    peak = 4095 if tags.get(BITSPERSAMPLE) == (12,) else 65535
    grey = _scaled_floats(values) if image.mode == "F" else _scaled_integers(values, peak)
    if tags.get(PHOTOMETRIC_INTERPRETATION) == 0:  # white is zero; Pillow inverts 8 bits only
        grey = 255 - grey
    picture = Image.fromarray(grey)
    clear = image.info.get("transparency")
    if clear is not None:
        opaque = np.where(values == clear, np.uint8(0), np.uint8(255))
        picture.putalpha(Image.fromarray(opaque))
    return picture


def _scaled_integers(values: Array, peak: int) -> Grey:
    if values.dtype.itemsize > 2 and (values.min() < 0 or values.max() > peak):
        return _stretched(values)
    # A table keeps memory flat: one byte per pixel and no wider copy.
    table = ((np.arange(65536) * 255 + peak // 2) // peak).clip(max=255).astype(np.uint8)
    grey: Grey = table[values]
    return grey


def _scaled_floats(values: Array) -> Grey:
    if not np.isfinite(values).all():
        raise ImageError("holds values that are not numbers (NaN or infinity)")
    if values.min() < 0 or values.max() > 1:
        return _stretched(values)
    grey: Grey = (values * 255 + 0.5).astype(np.uint8)
    return grey


def _stretched(values: Array) -> Grey:
    """Smallest value black, largest white; a picture of one value is black."""
    low, high = float(values.min()), float(values.max())
    step = (high - low) / 255 or 1.0
    shares = np.subtract(values, low, dtype=np.float64)  # float32 overflows between its limits
    shares /= step
    shares += 0.5
    return shares.astype(np.uint8)


def _cmyk_to_rgb(image: Image.Image) -> tuple[Image.Image, tuple[str, ...]]:
    """Through the picture's own profile to sRGB, else by Pillow's formula.

    Adobe's JPEGs store ink inverted; Pillow's JPEG reader has put that right already.
    """
    profile = image.info.get("icc_profile")
    if not profile:
        return image.convert("RGB"), ()
    try:
        rgb = ImageCms.profileToProfile(
            image,
            ImageCms.ImageCmsProfile(BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            outputMode="RGB",
        )
    except (ImageCms.PyCMSError, OSError):
        return image.convert("RGB"), ("its CMYK profile is damaged; converted without it",)
    assert rgb is not None, "profileToProfile returns an image unless asked to work in place"
    return rgb, ()
