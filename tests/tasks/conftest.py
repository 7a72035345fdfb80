"""What the tests of this room share."""

from pathlib import Path

import pytest


@pytest.fixture(params=["tiny_siglip", "tiny_siglip2"])
def siglip(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder
