"""Pictures of vectors become what their tower takes: squashed, at their own size, or NaFlex's.

By Pillow and numpy: torch would fill and copy in its pool of threads, which the model uses.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from vlmrun.errors import CheckpointError
from vlmrun.models.companions import OTHER_MODEL, read_image_settings
from vlmrun.models.family import View
from vlmrun.models.model import Model
from vlmrun.tasks.crops import read_filter, read_levels, zeros
from vlmrun.tasks.preprocess import PicturePreprocessor
from vlmrun.tasks.vision import Group


@dataclass(frozen=True, slots=True, eq=False)
class FlatPatches:
    """How NaFlex pictures are cut and numbered, equal to Siglip2ImageProcessorPil bit for bit.

    most: patches that every picture is padded to; levels: [3, 256] float32, the number that
    stands for each level of a channel.
    """

    patch_size: int
    most: int
    resample: Image.Resampling
    levels: npt.NDArray[np.float32]

    def group(self, image: Image.Image) -> Group:
        """An RGB picture scaled, its shape kept, to as many whole patches as fit into `most`:
        pixels [1, most, numbers of a patch], rows and columns [1, 2], mask [1, most]."""
        from transformers.models.siglip2 import image_processing_pil_siglip2 as stock  # late

        height, width = stock.get_image_size_for_max_num_patches(
            image.height, image.width, self.patch_size, self.most
        )
        scaled = image.resize((width, height), self.resample)
        side = self.patch_size
        rows, columns = height // side, width // side
        values = np.asarray(scaled).reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
        pixels = zeros(self.most, side, side, 3)
        for channel in range(3):
            found = self.levels[channel][values[..., channel]]
            pixels[: rows * columns, ..., channel] = found.reshape(-1, side, side)
        mask = torch.arange(self.most) < rows * columns
        numbers = torch.from_numpy(pixels).flatten(1)
        return Group((numbers[None], torch.tensor([[rows, columns]])), mask[None])


def picture_cutter(model: Model, view: View) -> Callable[[Image.Image], Group]:
    """What makes of one RGB picture the group that the model's tower takes.

    Raises:
        CheckpointError: a file or a setting is missing, or the files contradict each other.
    """
    vision = model.architecture.vision
    assert vision is not None
    if vision.naflex:
        assert view.max_patches is not None
        return read_patches(model, view.max_patches).group
    if view.dynamic:
        _, levels = read_levels(model, "image_mean", "image_std")
        return lambda image: Group((own_size(image, levels, vision.patch_size),))
    squashed = PicturePreprocessor(model)
    return lambda image: Group((squashed.pixels([image]),))


def own_size(image: Image.Image, levels: npt.NDArray[np.float32], patch_size: int) -> torch.Tensor:
    """A picture as it is, zeros on the right and below up to whole patches, as timm's
    `dynamic_img_pad` does it: [1, 3, H, W] float32."""
    height, width = (-(-side // patch_size) * patch_size for side in (image.height, image.width))
    pixels = zeros(1, 3, height, width)
    values = np.asarray(image)
    for channel in range(3):  # one at a time: a large picture is not held twice
        found = levels[channel][values[..., channel]]
        pixels[0, channel, : image.height, : image.width] = found
    return torch.from_numpy(pixels)


def read_patches(model: Model, most: int) -> FlatPatches:
    """Settings of a NaFlex model's image processor, held to its tower.

    Raises:
        CheckpointError: settings are missing, or not those of this class and patch size.
    """
    assert model.architecture.vision is not None
    side = model.architecture.vision.patch_size
    file, settings = read_image_settings(model)
    processor, levels = read_levels(model, "resample", "image_mean", "image_std")
    if not processor.do_resize:
        raise CheckpointError(f"{file} does not scale pictures to whole patches", OTHER_MODEL)
    if processor.patch_size != side:
        raise CheckpointError(
            f"{file}: patch_size is {json.dumps(processor.patch_size)}, and config.json's {side}",
            OTHER_MODEL,
        )
    return FlatPatches(side, most, read_filter(file, settings), levels)
