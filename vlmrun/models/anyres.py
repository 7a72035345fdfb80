"""Pictures of any shape as a grid of square tiles (LLaVA-NeXT, LLaVA-OneVision)."""

from vlmrun.models.family import Config, contradiction
from vlmrun.models.shapes import Tiling, VisionTower


def read_tiling(
    config: Config, default: list[list[int]], crop: int, max_tiles: int | None
) -> Tiling:
    """The grid that pictures are fitted to, in pieces of `crop` × `crop` pixels.

    Raises:
        CheckpointError: the configuration names no such grid.
    """
    grid = config.get("image_grid_pinpoints")
    try:
        pairs = tuple((h, w) for h, w in (default if grid is None else grid))
    except (TypeError, ValueError):
        pairs = ()
    sides = [side for pair in pairs for side in pair]
    if not pairs or any(type(side) is not int or side < crop or side % crop for side in sides):
        raise contradiction(f"image_grid_pinpoints should be pairs of multiples of {crop}")
    return Tiling(pairs, max_tiles)


def fitted_resolution(tiling: Tiling, width: int, height: int) -> tuple[int, int]:
    """The (height, width) of the grid that keeps most of a picture, then wastes least."""

    def kept_and_wasted(resolution: tuple[int, int]) -> tuple[int, int]:
        rows, columns = resolution
        scale = min(columns / width, rows / height)
        fitted = int(width * scale) * int(height * scale)
        kept = min(fitted, width * height)
        return kept, kept - rows * columns

    return max(tiling.resolutions, key=kept_and_wasted)


def tile_count(tiling: Tiling, vision: VisionTower, width: int, height: int) -> int:
    """Tiles of a picture, its base view not among them."""
    rows, columns = fitted_resolution(tiling, width, height)
    return (rows // vision.image_size) * (columns // vision.image_size)


def unpadded(tiling: Tiling, vision: VisionTower, width: int, height: int) -> tuple[int, int]:
    """Rows and columns of patches that are left of a picture's grid without its padding."""
    side = vision.image_size // vision.patch_size
    best_height, best_width = fitted_resolution(tiling, width, height)
    rows = side * (best_height // vision.image_size)
    columns = side * (best_width // vision.image_size)
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        rows -= (rows - kept) // 2 * 2
    else:
        kept = int(round(width * (rows / height), 7))
        columns -= (columns - kept) // 2 * 2
    return rows, columns
