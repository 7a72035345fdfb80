"""Pictures are cut to squares and become numbers.

Numbers equal those of transformers' PIL image processors bit for bit: their arithmetic fills a
table of the 256 levels once, and Pillow resizes the pictures themselves, without the copies at
full size that the processors make.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from vlmrun.errors import CheckpointError, ImageError
from vlmrun.models.companions import COPY, OTHER_MODEL, read_image_settings
from vlmrun.models.model import Model
from vlmrun.tasks.processor_files import one_line

REQUIRED = ("size", "resample", "image_mean", "image_std")
STRIP_PIXELS = 1 << 22  # of a padded picture, at a time
LONGEST_SIDE = 65_535  # JPEG's limit; a picture as long takes 100 MB to be padded


@dataclass(frozen=True, slots=True, eq=False)
class Crops:
    """How a model's square crops are cut and numbered. Pictures are RGB.

    levels: [3, 256] float32, the number that stands for each level of a channel.
    """

    side: int
    resample: Image.Resampling
    background: tuple[int, ...]
    levels: npt.NDArray[np.float32]

    def squashed(self, image: Image.Image) -> Image.Image:
        """The whole picture, whatever its shape."""
        return image.resize((self.side, self.side), self.resample)

    def padded(self, image: Image.Image) -> Image.Image:
        """The picture in the middle of a square of the mean colour.

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
        narrow = Image.new("RGB", (self.side, longest), self.background)
        step = max(1, STRIP_PIXELS // longest)
        for start in range(0, height, step):
            stop = min(height, start + step)
            strip = Image.new("RGB", (longest, stop - start), self.background)
            strip.paste(image.crop((0, start, width, stop)), (left, 0))
            strip = strip.resize((self.side, stop - start), self.resample)
            narrow.paste(strip, (0, top + start))
        return narrow.resize((self.side, self.side), self.resample)

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
        pixels = torch.empty((count, 3, self.side, self.side), dtype=torch.float32)
        for target, crop in zip(pixels.numpy(), crops, strict=True):
            values = np.asarray(crop)
            for channel in range(3):
                # `clip` writes in place; no level is out of range.
                levels = values[..., channel]
                np.take(self.levels[channel], levels, out=target[channel], mode="clip")
        return pixels


def read_crops(model: Model) -> Crops:
    """Settings of a model's image processor, held to its family and its tower's square.

    Class defaults are never taken for what REQUIRED names: OneVision's are CLIP's colours.

    Raises:
        CheckpointError: settings are missing, or not those of this class and size.
    """
    assert model.architecture.vision is not None
    side = model.architecture.vision.image_size
    file, settings = read_image_settings(model)
    absent = [name for name in REQUIRED if settings.get(name) is None]
    if absent:
        raise CheckpointError(f"{file} does not say {', '.join(absent)}", COPY)
    known = model.family.image_processors
    named = str(settings.get("image_processor_type") or known[0])
    kind = named.removesuffix("Pil").removesuffix("Fast")
    if kind not in known:
        raise CheckpointError(
            f"{file} is of a {named}, and the model takes a {' or a '.join(known)}", OTHER_MODEL
        )
    if settings.get("do_resize") is False or settings.get("do_center_crop"):
        raise CheckpointError(f"{file} does not squash pictures to a square", OTHER_MODEL)
    try:
        processor = image_processor_class(kind)(**settings)
        resample = Image.Resampling(settings["resample"])
        background = tuple(int(share * 255) for share in processor.image_mean)
        levels = number_levels(processor)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{file} cannot be read: {one_line(error)}", COPY) from error
    if not np.isfinite(levels).all():
        raise CheckpointError(
            f"{file}: its image_mean, image_std and rescale_factor make no finite numbers", COPY
        )
    if (processor.size.height, processor.size.width) != (side, side):
        raise CheckpointError(
            f"{file}: size is {json.dumps(settings['size'])}, and config.json's image_size {side}",
            OTHER_MODEL,
        )
    return Crops(side, resample, background, levels)


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
