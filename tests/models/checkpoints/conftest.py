"""A hub that serves made-up weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import Hub
from repos import REPO, write_repo


@pytest.fixture(scope="session")
def single_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repo(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repo(tmp_path_factory.mktemp("sharded"), shards=2)


@pytest.fixture
def hub(
    single_file: Path, sharded: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    with Hub({REPO: single_file, "someone/sharded": sharded}) as hub:
        hub.visit(cache, monkeypatch)
        yield hub
