"""The plan's figure for pictures holds while a thread reads ahead, and is not far off.

Slow: processes of their own, with towers of large crops (9.2 MiB) and few weights, so that pixels
are what is measured.
"""

import json
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
import tiny
from commands import PROGRAM
from entries import noise

pytestmark = pytest.mark.slow

MIB = 1 << 20
SIDE = 896
CROP_BYTES = 3 * SIDE**2 * 4
GRID = [(SIDE * rows, SIDE * columns) for rows in (1, 2) for columns in (1, 2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("large_crops")
    with (
        patch.dict(tiny.VISION, image_size=SIDE, patch_size=112),
        patch.multiple(tiny, IMAGE_SIZE=SIDE, PATCH_SIZE=112),
        patch.dict(tiny.DECODER, max_position_embeddings=4096),
    ):
        return {
            "embed": tiny.build_siglip_vision(root / "embed"),
            "caption": tiny.build_onevision(root / "caption", image_size=SIDE, pinpoints=GRID),
        }


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{at:02}.png" for at in range(24)]
    for at, path in enumerate(paths):
        noise(at, SIDE * 3 // 2, SIDE * 3 // 2).save(path)
    return paths


def peak(model: Path, task: str, batch: int, pictures: list[Path]) -> tuple[int, int]:
    """Resident bytes at the highest: measured, and as planned."""
    command = [PROGRAM, task, "-m", model, "-b", str(batch), "--device", "cpu", *pictures]
    command += ["--stats", "--json"] + ["--max-new-tokens", "2"] * (task == "caption")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stderr.splitlines()[-1])
    return told["measured"]["peak_ram_bytes"], told["plan"]["peak"]["ram_bytes"]


@pytest.mark.parametrize(
    ("task", "batch", "crops"), [("embed", 1, 1), ("embed", 8, 8), ("caption", 4, 4 * 5)]
)
def test_two_batches_of_pixels_and_no_more(
    models: dict[str, Path], pictures: list[Path], task: str, batch: int, crops: int
) -> None:
    alone, planned_alone = peak(models[task], task, 1, pictures[:1])
    many, planned = peak(models[task], task, batch, pictures)
    print(f"measured {alone / MIB:.0f} and {many / MIB:.0f} MiB, planned {planned / MIB:.0f}")
    assert alone <= planned_alone
    assert many <= planned
    # one batch was there before: those of the next one, and four crops side by side
    assert many - alone <= (2 * crops + 4) * CROP_BYTES + 24 * MIB
