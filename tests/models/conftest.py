"""A hub, an empty hub cache, and the means to show that no network is asked."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
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
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, no network settings of the machine, an empty working directory."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "cache"


@pytest.fixture
def hub(
    single_file: Path, sharded: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    with Hub({REPO: single_file, "someone/sharded": sharded}) as hub:
        for name, value in hub.environment(cache).items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library waits a second before it takes a cut download up again."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
