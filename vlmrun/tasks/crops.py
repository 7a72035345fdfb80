"""Pictures are cut to squares and become numbers.

Numbers equal those of transformers' PIL image processors bit for bit: their arithmetic fills a
table of the 256 levels once, and Pillow resizes the pictures themselves, without the copies at
full size that the processors make.
"""

import json
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from vlmrun.errors import CheckpointError, ImageError
from vlmrun.models.companions import COPY, OTHER_MODEL, read_image_settings
from vlmrun.models.model import Model
from vlmrun.models.transforms import HALVES_ROUNDED
from vlmrun.tasks.processor_files import one_line

REQUIRED = ("size", "resample", "image_mean", "image_std")
STRIP_PIXELS = 1 << 22  # of a padded picture, at a time
LONGEST_SIDE = 65_535  # JPEG's limit; a picture as long takes 100 MB to be padded or scaled
Cut = Literal["squashed", "centred", "padded"]
# how each class of image processor makes one square of a whole picture
CUTS: Mapping[str, Cut] = {
    "SiglipImageProcessor": "squashed",
    "CLIPImageProcessor": "centred",
    "LlavaImageProcessor": "centred",  # padded where its settings ask for it
    "LlavaNextImageProcessor": "squashed",
    "LlavaOnevisionImageProcessor": "padded",
}
CROPPING = ("CLIPImageProcessor", "LlavaImageProcessor", "LlavaNextImageProcessor")


@dataclass(frozen=True, slots=True, eq=False)
class Crops:
    """How a model's square crops are cut and numbered. Pictures are RGB.

    cut: what becomes of a picture that is seen as one crop. shortest: what its shorter side is
    scaled to before its middle is cut out; None where the scaled picture is the crop.
    halves_rounded: where the middle starts at half a pixel, it is rounded to even as torchvision
    does, not down. levels: [3, 256] float32, the number that stands for each level of a channel.
    """

    side: int
    cut: Cut
    shortest: int | None
    resample: Image.Resampling
    background: tuple[int, ...]
    levels: npt.NDArray[np.float32]
    halves_rounded: bool = False

    def whole(self, image: Image.Image) -> Image.Image:
        """The one crop of a picture that has no tiles.

        Raises:
            ImageError: the picture is too long to be scaled or padded.
        """
        if self.cut == "squashed":
            return self.squashed(image)
        if self.cut == "padded":
            return self.middle(self.padded(image, self.shortest or self.side))
        return self.middle(self.scaled(image))

    def squashed(self, image: Image.Image) -> Image.Image:
        """The whole picture, whatever its shape."""
        return image.resize((self.side, self.side), self.resample)

    def scaled(self, image: Image.Image) -> Image.Image:
        """The picture with its shorter side as `shortest` says, its shape kept."""
        if self.shortest is None:
            return self.squashed(image)
        short, long = sorted(image.size)
        longest = int(self.shortest * long / short)
        if longest > LONGEST_SIDE:
            raise ImageError(
                f"is {image.width} x {image.height} pixels, and scaled to {self.shortest} on its "
                f"shorter side {longest} long; at most {LONGEST_SIDE} will do; crop it"
            )
        upright = image.width <= image.height
        size = (self.shortest, longest) if upright else (longest, self.shortest)
        return image.resize(size, self.resample)

    def middle(self, image: Image.Image) -> Image.Image:
        """The square in the middle of a picture, black where the picture is smaller."""
        margins = (length - self.side for length in image.size)
        left, top = (round(m / 2) if self.halves_rounded else m // 2 for m in margins)
        return image.crop((left, top, left + self.side, top + self.side))

    def padded(self, image: Image.Image, side: int) -> Image.Image:
        """The picture in the middle of a square of the mean colour, scaled to `side`.

        Pillow resizes rows first and columns after, so the square is padded and resized in
        strips and never held whole: for a narrow picture it is many times its size.

        Raises:
            ImageError: the picture is too long.
        """
        width, height = image.size
        longest = max(width, height)
        if longest > LONGEST_SIDE:
            raise ImageError(
                f"is {longest} pixels long, and padded to a square at most {LONGEST_SIDE} will do; "
                "crop it"
            )
        left, top = (longest - width) // 2, (longest - height) // 2
        narrow = Image.new("RGB", (side, longest), self.background)
        step = max(1, STRIP_PIXELS // longest)
        for start in range(0, height, step):
            stop = min(height, start + step)
            strip = Image.new("RGB", (longest, stop - start), self.background)
            strip.paste(image.crop((0, start, width, stop)), (left, 0))
            strip = strip.resize((side, stop - start), self.resample)
            narrow.paste(strip, (0, top + start))
        return narrow.resize((side, side), self.resample)

    def tiles(self, image: Image.Image, resolution: tuple[int, int]) -> Iterator[Image.Image]:
        """The picture fitted into (height, width), centred on black, cut row by row."""
        height, width = resolution
        across, down = width / image.width, height / image.height
        if across < down:
            size = width, min(math.ceil(image.height * across), height)
        else:
            size = min(math.ceil(image.width * down), width), height
        canvas = Image.new("RGB", (width, height))
        corner = (width - size[0]) // 2, (height - size[1]) // 2
        canvas.paste(image.resize(size, self.resample), corner)
        for top in range(0, height, self.side):
            for left in range(0, width, self.side):
                yield canvas.crop((left, top, left + self.side, top + self.side))

    def to_tensor(self, crops: Iterable[Image.Image], count: int) -> torch.Tensor:
        """Numbers of `count` crops: [count, 3, S, S] float32, contiguous."""
        pixels = zeros(count, 3, self.side, self.side)
        for target, crop in zip(pixels, crops, strict=True):
            values = np.asarray(crop)
            for channel in range(3):
                # `clip` writes in place; no level is out of range.
                levels = values[..., channel]
                np.take(self.levels[channel], levels, out=target[channel], mode="clip")
        return torch.from_numpy(pixels)


def zeros(*shape: int) -> npt.NDArray[np.float32]:
    """An array of zeros that goes back to the system when it is dropped. Pixels outlive what
    decoding takes and frees around them, and in a heap would keep those gaps from the system:
    60 MB after 24 pictures of 896 x 896."""
    count = math.prod(shape)
    nbytes = max(1, count) * np.dtype(np.float32).itemsize  # no mapping is empty
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype=np.float32)[:count].reshape(shape)


def read_crops(model: Model) -> Crops:
    """Settings of a model's image processor, held to its family and its tower's square.

    Class defaults are never taken for what REQUIRED names: OneVision's are CLIP's colours.

    Raises:
        CheckpointError: settings are missing, or not those of this class and size.
    """
    assert model.architecture.vision is not None
    side = model.architecture.vision.image_size
    file, settings = read_image_settings(model)
    processor, levels = read_levels(model, *REQUIRED)
    means = np.broadcast_to(processor.image_mean, 3)  # one for all channels, or one each
    background = tuple(int(share * 255) for share in means.tolist())
    cut, shortest = read_cut(file, processor_kind(model, file, settings), processor, settings, side)
    return Crops(
        side,
        cut,
        shortest,
        read_filter(file, settings),
        background,
        levels,
        halves_rounded=bool(settings.get(HALVES_ROUNDED)),
    )


def read_levels(model: Model, *required: str) -> tuple[Any, npt.NDArray[np.float32]]:
    """A model's image processor, and the number it makes of each level: [3, 256] float32.

    required: settings that are never taken from the processor's class.

    Raises:
        CheckpointError: settings are missing, not those of the family, or make no numbers.
    """
    file, settings = read_image_settings(model)
    absent = [name for name in required if settings.get(name) is None]
    if absent:
        raise CheckpointError(f"{file} does not say {', '.join(absent)}", COPY)
    kind = processor_kind(model, file, settings)
    try:
        processor = image_processor_class(kind)(**settings)
        levels = number_levels(processor)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{file} cannot be read: {one_line(error)}", COPY) from error
    if not np.isfinite(levels).all():
        raise CheckpointError(
            f"{file}: its image_mean, image_std and rescale_factor make no finite numbers", COPY
        )
    return processor, levels


def read_filter(file: str, settings: Mapping[str, Any]) -> Image.Resampling:
    """Raises CheckpointError where `resample` is no filter of Pillow's."""
    if type(settings["resample"]) is not int or settings["resample"] not in list(Image.Resampling):
        raise CheckpointError(f"{file}: resample is {settings['resample']!r}, no filter", COPY)
    return Image.Resampling(settings["resample"])


def processor_kind(model: Model, file: str, settings: Mapping[str, Any]) -> str:
    """The class of a model's image processor; the name that files had before transformers 4.25
    is read, too.

    Raises:
        CheckpointError: the family takes no such class.
    """
    known = model.family.image_processors
    old = str(settings.get("feature_extractor_type") or "")
    named = str(settings.get("image_processor_type") or old or known[0])
    kind = named.removesuffix("Pil").removesuffix("Fast")
    kind = kind.replace("FeatureExtractor", "ImageProcessor")
    if kind not in known:
        raise CheckpointError(
            f"{file} is of a {named}, and the model takes a {' or a '.join(known)}", OTHER_MODEL
        )
    return kind


def read_cut(
    file: str, kind: str, processor: Any, settings: Mapping[str, Any], side: int
) -> tuple[Cut, int | None]:
    """What becomes of a whole picture, and what its shorter side is scaled to first.

    Raises:
        CheckpointError: it does not become a square of the tower's `side`.
    """
    cropped, shortest = bool(processor.do_center_crop), processor.size.shortest_edge
    if type(shortest) is not int and shortest is not None:
        raise CheckpointError(f"{file}: size is {settings['size']}, no whole number", COPY)
    if not processor.do_resize or (cropped and kind not in CROPPING):
        raise CheckpointError(f"{file} does not squash pictures to a square", OTHER_MODEL)
    cut, tiled = CUTS[kind], kind == "LlavaNextImageProcessor"
    if kind == "LlavaImageProcessor" and processor.do_pad:
        cut = "padded"
    elif cut in ("squashed", "centred") and not tiled and processor.do_pad and processor.pad_size:
        check_side(file, "pad_size", processor.pad_size, side)
    sized = kind == "LlavaOnevisionImageProcessor" and processor.crop_size
    if cropped or tiled or sized:  # the size of a tile, too
        check_side(file, "crop_size", processor.crop_size, side)
    square = kind in CROPPING and shortest == side and (tiled or cut == "padded")
    fits = square or (cropped and not tiled and shortest and not processor.size.longest_edge)
    if not fits:
        check_side(file, "size", processor.size, side)
    return cut, None if tiled else shortest


def check_side(file: str, name: str, size: Any, side: int) -> None:
    if size is None or (size.height, size.width) != (side, side):
        given = {k: v for k, v in dict(size or {}).items() if v is not None}
        raise CheckpointError(
            f"{file}: {name} is {json.dumps(given)}, and config.json's image_size {side}",
            OTHER_MODEL,
        )


def image_processor_class(kind: str) -> Any:
    """The PIL class of that name: pixels must not depend on what else is installed."""
    import transformers  # late: only the class that is used is imported

    return getattr(transformers, f"{kind}Pil")


def number_levels(processor: Any) -> npt.NDArray[np.float32]:
    """What an image processor makes of each level: [3, 256] float32."""
    levels = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
    with np.errstate(all="ignore"):  # what is not finite is seen in the result
        if processor.do_rescale:
            levels = processor.rescale(levels, processor.rescale_factor)
        if processor.do_normalize:
            levels = processor.normalize(levels, processor.image_mean, processor.image_std)
        return np.ascontiguousarray(levels[:, 0], dtype=np.float32)
