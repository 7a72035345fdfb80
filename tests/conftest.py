"""Tiny checkpoints, built once per run, and an environment that is the same everywhere."""

import os
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from commands import Command

OPT_IN = "VLMRUN_REAL"  # asks for tests/test_real_language.py
FOREIGN = ("VLMRUN_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "NO_COLOR", "FORCE_COLOR", "COLUMNS")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the developer's settings and hub cache out, and the hub unreachable.

    Before anything is collected: huggingface_hub and torch read their settings when imported.
    """
    for name in [name for name in os.environ if name.startswith(FOREIGN) and name != OPT_IN]:
        del os.environ[name]
    home = tempfile.TemporaryDirectory(prefix="vlmrun-tests-")
    config.add_cleanup(home.cleanup)
    os.environ["HF_HOME"] = home.name
    os.environ["XDG_CACHE_HOME"] = home.name  # no kernels that were chosen for this machine
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nothing answers there
    # Two threads, so that what depends on their number shows. They sleep while they wait: busy
    # ones take three times as long where another program runs beside the tests.
    os.environ["OMP_NUM_THREADS"] = "2"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


@pytest.fixture
def vlmrun(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> "Command":
    """Runs a command line in this process."""
    from commands import runner  # late, as `pytest_configure` asks

    return runner(monkeypatch, capfdbinary)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and an empty working directory."""
    import huggingface_hub.constants as settings  # late, as `pytest_configure` asks

    monkeypatch.setattr(settings, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub waits a second before it takes a cut download up again."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


# `tiny` is imported late: it costs seconds of torch and transformers, and most rooms need neither.


@pytest.fixture(scope="session")
def tiny_siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import build_siglip

    return build_siglip(tmp_path_factory.mktemp("siglip"))


@pytest.fixture(scope="session")
def tiny_siglip2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import build_siglip

    return build_siglip(tmp_path_factory.mktemp("siglip2"), version=2)


@pytest.fixture(scope="session")
def tiny_siglip_vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import build_siglip_vision

    return build_siglip_vision(tmp_path_factory.mktemp("siglip_vision"))


@pytest.fixture(scope="session")
def tiny_onevision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import build_onevision

    return build_onevision(tmp_path_factory.mktemp("onevision"))


@pytest.fixture(scope="session")
def tiny_onevision_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import build_onevision

    return build_onevision(tmp_path_factory.mktemp("onevision_untied"), tied=False)
