"""Pictures become the tensors that towers take, on the CPU."""

from collections.abc import Iterator, Sequence

import torch
from PIL import Image

from vlmrun.models.anyres import fitted_resolution
from vlmrun.models.companions import check_tiling
from vlmrun.models.family import View
from vlmrun.models.model import Model
from vlmrun.tasks.caption import Pictures
from vlmrun.tasks.crops import read_crops


class PicturePreprocessor:
    """Crops of pictures, equal to those of the model's stock image processor.

    Raises:
        CheckpointError: a file or a setting is missing, or the files contradict each other.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._crops = read_crops(model)
        check_tiling(model)

    def pixels(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """One crop of each RGB picture: [B, 3, S, S] float32."""
        crops = self._crops
        return crops.to_tensor((crops.whole(image) for image in images), len(images))

    def pictures(self, images: Sequence[Image.Image], *, view: View | None = None) -> Pictures:
        """Cut the upright RGB pictures of one prompt.

        A tiled picture is a base view and tiles, or at low detail one view. OneVision sees
        several pictures as one view each, which it was trained on; LLaVA-NeXT tiles each.
        """
        model = self._model
        tiling = model.architecture.tiling
        view = view or View()
        if len(images) > 1 and tiling is not None and tiling.max_tiles is not None:
            view = View(detail="low")
        costs = [model.family.image_cost(model.architecture, *image.size, view) for image in images]
        crops = (crop for image in images for crop in self._cut(image, view))
        return Pictures(
            self._crops.to_tensor(crops, sum(cost.crops for cost in costs)),
            tuple((image.height, image.width) for image in images),
            tuple(cost.crops for cost in costs),
            tuple(cost.tokens for cost in costs),
        )

    def _cut(self, image: Image.Image, view: View) -> Iterator[Image.Image]:
        tiling = self._model.architecture.tiling
        if tiling is None or view.detail == "low":
            yield self._crops.whole(image)
            return
        yield self._crops.squashed(image)
        yield from self._crops.tiles(image, fitted_resolution(tiling, *image.size))
