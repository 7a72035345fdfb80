"""Tiny checkpoints, built once per run, and an environment that is the same everywhere."""

import os
import tempfile
from pathlib import Path

import pytest

FOREIGN = ("VLMRUN_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "NO_COLOR", "FORCE_COLOR", "COLUMNS")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the developer's settings and hub cache out, and the hub unreachable.

    Before anything is collected, because huggingface_hub reads its settings when imported.
    """
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    home = tempfile.TemporaryDirectory(prefix="vlmrun-tests-")
    config.add_cleanup(home.cleanup)
    os.environ["HF_HOME"] = home.name
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nothing answers there


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
