"""What the tests of this room share: pictures saved to disk, and their decoding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmrun.files.inputs import ImageInput

Save = Callable[..., ImageInput]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Save a picture (or bytes) under a name and give the input that stands for it."""

    def write(content: Image.Image | bytes, name: str, **options: Any) -> ImageInput:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content.save(path, **options)
        return ImageInput(str(path))

    return write


@pytest.fixture
def photo() -> Image.Image:
    """A picture of 60x40 without symmetry, so that every turn of it looks different."""
    gradient = Image.linear_gradient("L").resize((60, 40))
    return Image.merge("RGB", (gradient, gradient.rotate(90, expand=False), gradient.rotate(180)))
