"""Which kernels multiply, and why; what is said where the compiled ones turn out not to work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from light import ONEVISION, model_of, words

import vlmrun as package
from vlmrun.errors import VlmrunError
from vlmrun.job import Job, Placing
from vlmrun.memory import products
from vlmrun.memory.products import PACKAGED, Table, choose_products, read_table, tuned_path
from vlmrun.memory.working import CALL_BYTES, COMPILED_BYTES
from vlmrun.memory.workload import plan_job
from vlmrun.models.checkpoints.dtype import Dtype

PICTURE = Path(package.__file__).parent / "data/pictures/elephant.png"


LOOPS = "a number is widened where it is used"
TILES = "PyTorch over tiles that are converted before"


@pytest.fixture(autouse=True)
def no_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing was measured on this machine; gives where it would lie."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tuned_path()


@pytest.mark.parametrize(
    ("stored", "compute", "features", "expected"),
    [
        ("bfloat16", "float32", "avx2 avx512_bf16", f"compiled loops ({LOOPS}; packaged table "),
        ("float16", "float32", "avx2", f"compiled loops ({LOOPS}; "),
        ("int8", "float32", "", f"compiled loops ({LOOPS}; "),
        ("float32", "float32", "avx512_bf16", "PyTorch (float32 is computed as it is stored)"),
        (
            "bfloat16",
            "bfloat16",
            "avx512_bf16",
            "compiled loops (loops for up to 4 rows, then PyTorch; ",
        ),
        ("bfloat16", "bfloat16", "avx2", f"compiled loops ({LOOPS}; "),
        ("bfloat16", "float16", "avx512_fp16", f"compiled loops ({LOOPS}; "),
        (
            "float16",
            "float16",
            "avx512_fp16",
            "compiled loops (loops for up to 4 rows, then PyTorch; ",
        ),
        (
            "int8",
            "bfloat16",
            "amx_bf16",
            f"compiled loops (loops for up to 32 rows, then {TILES}; ",
        ),
        ("float32", "bfloat16", "bf16", f"compiled loops (loops for up to 4 rows, then {TILES}"),
    ],
)
def test_the_choice_and_its_reason(stored: str, compute: str, features: str, expected: str) -> None:
    found = choose_products(
        Dtype(stored), Dtype(compute), "cpu", features=frozenset(features.split())
    )
    assert str(found).startswith(expected)
    assert found.table == read_table().name


def test_kernels_are_chosen_for_every_dtype_that_a_model_may_mix() -> None:
    """Beside int8 matrices lie floats as stored."""
    found = choose_products(Dtype.int8, Dtype.float32, "cpu", features=frozenset({"avx2"}))
    assert found.kernels == {
        Dtype.int8: ((None, "loops"),),
        Dtype.bfloat16: ((None, "loops"),),
        Dtype.float16: ((None, "loops"),),
        Dtype.float32: ((None, "native"),),
    }


def test_a_gpu_has_its_own() -> None:
    found = choose_products(Dtype.bfloat16, Dtype.bfloat16, "cuda:0")
    assert (str(found), found.kernels) == ("PyTorch (a GPU has its own)", {})


def test_without_numba_there_is_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "find_spec", lambda name: None)
    found = choose_products(Dtype.float16, Dtype.float32, "cpu")
    assert (str(found), found.kernels) == ("PyTorch (numba is not installed)", {})


def rows(*changes: dict[str, object]) -> str:
    """A table of one row for each change, made of one that is right."""
    row = {"cpu": [], "stored": "any", "compute": "any", "kernels": [[7, "tiles"], [None, "loops"]]}
    return json.dumps({"rows": [{**row, **change} for change in changes]})


def test_a_table_of_this_machine_goes_before_the_packaged_one(no_table: Path) -> None:
    before = read_table()
    assert before.name.startswith("packaged table ")
    no_table.parent.mkdir(parents=True)
    no_table.write_text(rows({}))
    found = choose_products(Dtype.bfloat16, Dtype.float32, "cpu")
    assert str(found).startswith(f"compiled loops ({TILES} for up to 7 rows, then loops; tuned")
    assert found.table == read_table().name != before.name
    no_table.write_bytes(PACKAGED.read_bytes())
    mine = read_table()
    assert mine.rows == before.rows
    assert mine.name.split()[-1] == before.name.split()[-1]  # what they hold is the same


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        rows(),
        rows({"stored": "int8"}),
        rows({"cpu": ["avx2"]}),
        rows({"kernels": []}),
        rows({"kernels": [[4, "loops"]]}),
        rows({"kernels": [[4, "loops"], [2, "tiles"], [None, "loops"]]}),
        rows({"kernels": [[None, "loops"], [None, "tiles"]]}),
        rows({"kernels": [[None, "magic"]]}),
        rows({"kernels": [["4", "loops"], [None, "tiles"]]}),
        rows({"stored": "int8", "compute": "float32", "kernels": [[None, "native"]]}, {}),
        rows({"kernels": 4}),
        rows({"kernels": [[-4, "loops"], [None, "tiles"]]}),
        rows({"kernels": [[None, "native"]]}),
        rows({"cpu": "avx2"}, {}),
        rows({"stored": ["int8"]}, {}),
        rows({"stored": "float8"}, {}),
        "[" * 200_000,
        rows({}).replace('"rows"', '"machine": {"cpu": "x"}, "rows"'),
        rows({}).replace('"rows"', '"machine": "x", "rows"'),
    ],
)
def test_a_damaged_table_is_refused_by_its_path(no_table: Path, text: str) -> None:
    no_table.parent.mkdir(parents=True)
    no_table.write_text(text)
    with pytest.raises(VlmrunError) as caught:
        choose_products(Dtype.bfloat16, Dtype.float32, "cpu")
    assert words(caught.value).startswith(f"{no_table} is no table of kernels: ")


def test_without_a_home_there_is_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)
    assert read_table().name.startswith("packaged table ")


def test_the_plan_carries_the_table(no_table: Path) -> None:
    """And results are told apart by it."""
    placing = Placing(model="x", device="cpu", ram="64GiB", compute_dtype="float32")
    job = Job(task="caption", placing=placing)
    plan = plan_job(model_of(ONEVISION), job, [])
    assert plan.storage.products.table == read_table().name
    assert isinstance(read_table(), Table)


def test_the_compiler_is_planned_for() -> None:
    model = model_of(ONEVISION)
    peaks = []
    for dtype in ("float32", "float16"):
        placing = Placing(
            model="x", device="cpu", ram="64GiB", dtype=dtype, compute_dtype="float32"
        )
        plan = plan_job(model, Job(task="caption", placing=placing), [])
        peaks.append(plan.working.runtime_bytes)
    assert peaks[1] - peaks[0] == COMPILED_BYTES + CALL_BYTES


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
    assert f"products: compiled loops ({LOOPS}; packaged table " in told[0]
    assert why not in told[0]
    assert f"vlmrun: products: PyTorch ({why})" in told[1]
    assert f"vlmrun: PyTorch multiplies, more slowly: {why}" in told[1]


def test_a_table_that_is_no_file_does_not_count(no_table: Path) -> None:
    no_table.parent.mkdir(parents=True)
    os.mkfifo(no_table)
    assert read_table().ignored == f"{no_table} is no file"
