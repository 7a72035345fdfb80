"""The packaged pictures."""

from pathlib import Path

import pytest

import vlmrun as package


@pytest.fixture(scope="session")
def pictures() -> Path:
    return Path(package.__file__).parent / "data" / "pictures"


@pytest.fixture
def three(pictures: Path) -> list[Path]:
    """An elephant, a strawberry, a red apple."""
    return [pictures / f"{name}.png" for name in ("elephant", "strawberry", "red-apple")]
