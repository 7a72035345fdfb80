"""A built wheel holds everything and runs without the repository."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import vlmrun

ROOT = Path(__file__).parents[1]
PICTURE = "vlmrun/data/pictures/red-apple.png"


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves a build/ folder behind and packs what lies in it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("vlmrun", "tests", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", "wheels", ".", cwd=source)
    (built,) = (source / "wheels").iterdir()
    return built


def test_wheel_holds_the_package_and_its_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"vlmrun", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}
    here = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "vlmrun").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {name for name in names if name.startswith("vlmrun/")} == here
    assert {
        "vlmrun/py.typed",
        "vlmrun/data/NOTICE",
        "vlmrun/data/catalogue.json",
        "vlmrun/data/demo-llava/model.safetensors",
        "vlmrun/data/demo-llava/chat_template.jinja",
        "vlmrun/data/demo-siglip/model.safetensors",
        PICTURE,
    } <= here


def test_wheel_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty/bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index")
    run(*pip, "--no-deps", wheel, cwd=tmp_path)
    site = Path(run(python, "-c", "import vlmrun; print(vlmrun.__path__[0])", cwd=tmp_path).strip())
    assert site.is_relative_to(tmp_path)
    # The dependencies are borrowed from here; a folder named in a .pth file is searched, but its
    # own .pth files, and with them this repository, are not.
    (site.parent / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = tmp_path / "empty/bin/vlmrun"
    assert vlmrun.__version__ in run(command, "--version", cwd=tmp_path)
    assert "fits" in run(command, "mem-plan", "-m", "demo", cwd=tmp_path)
    picture = site.parent / PICTURE
    assert run(command, "caption", "-m", "demo", picture, cwd=tmp_path) == "a red apple\n"
