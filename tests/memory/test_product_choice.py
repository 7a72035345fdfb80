"""Which products are compiled, and why; what is said where they turn out not to work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from light import ONEVISION, model_of

import vlmrun as package
from vlmrun.job import Job, Placing
from vlmrun.memory import products
from vlmrun.memory.products import choose_products
from vlmrun.memory.working import COMPILED_BYTES
from vlmrun.memory.workload import plan_job
from vlmrun.models.checkpoints.dtype import Dtype

PICTURE = Path(package.__file__).parent / "data/pictures/elephant.png"


@pytest.mark.parametrize(
    ("stored", "compute", "device", "expected"),
    [
        ("bfloat16", "float32", "cpu", "compiled loops (bfloat16 is widened where it is used)"),
        ("float16", "float32", "cpu", "compiled loops (float16 is widened where it is used)"),
        ("float32", "float32", "cpu", "PyTorch (float32 is computed as it is stored)"),
        ("bfloat16", "bfloat16", "cpu", "compiled loops (for up to 4 rows; PyTorch has this CPU's"),
        ("bfloat16", "bfloat16", "cuda:0", "PyTorch (a GPU has its own)"),
    ],
)
def test_the_choice_and_its_reason(stored: str, compute: str, device: str, expected: str) -> None:
    assert str(choose_products(Dtype(stored), Dtype(compute), device)).startswith(expected)


def test_without_numba_there_is_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "find_spec", lambda name: None)
    found = choose_products(Dtype.float16, Dtype.float32, "cpu")
    assert str(found) == "PyTorch (numba is not installed)"


def test_the_compiler_is_planned_for() -> None:
    model = model_of(ONEVISION)
    peaks = []
    for dtype in ("float32", "float16"):
        placing = Placing(
            model="x", device="cpu", ram="64GiB", dtype=dtype, compute_dtype="float32"
        )
        plan = plan_job(model, Job(task="caption", placing=placing), [])
        peaks.append(plan.working.runtime_bytes)
    assert peaks[1] - peaks[0] == COMPILED_BYTES


def test_where_numba_fails_pytorch_serves_with_a_note(tmp_path: Path) -> None:
    """As numba does beside a numpy that it does not know. The caption is the same."""
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba/__init__.py").write_text("raise ImportError('needs NumPy 2.0\\nor less')")
    command = [sys.executable, "-m", "vlmrun", "caption", "-m", "demo", "-v", str(PICTURE)]
    command += ["--compute-dtype", "float32"]
    told = []
    for path in ("", str(tmp_path)):
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == "an elephant\n"
        told.append(done.stderr)
    why = "numba does not work here (ImportError: needs NumPy 2.0 or less)"
    assert "products: compiled loops (bfloat16 is widened where it is used)" in told[0]
    assert why not in told[0]
    assert f"vlmrun: products: PyTorch ({why})" in told[1]
    assert f"vlmrun: PyTorch multiplies, more slowly: {why}" in told[1]
