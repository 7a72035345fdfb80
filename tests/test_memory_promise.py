"""The memory promise, on random weights of the real OneVision-0.5B shape (1.8 GB).

Slow: minutes and gigabytes. Run with `pytest -m slow`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPO = Path(__file__).parent.parent
PICTURE = REPO / "vlmrun" / "data" / "pictures" / "strawberry.png"
MiB = 1 << 20
LOADING = """
import sys
from vlmrun.job import Job, Placing
from vlmrun.load import load
from vlmrun.memory.budget import process_memory
from vlmrun.memory.measure import PeakMemory
from vlmrun.memory.workload import plan_job
from vlmrun.models.model import read_model
from vlmrun.models.checkpoints.source import resolve_source
model = read_model(resolve_source(sys.argv[1]))
placing = Placing(model=sys.argv[1], dtype=sys.argv[2])
plan = plan_job(model, Job(task="caption", placing=placing, images=("x",)), [(384, 384)])
assert plan.fits and plan.all_resident
entry = load(model, plan)
before = process_memory().anon_bytes
with PeakMemory() as peak:
    with entry.use("vision"):
        pass
    with entry.use("decode"):
        after = process_memory().anon_bytes
print(after - before, peak.peak.anon_bytes - before, entry.resident_bytes)
"""


@dataclass
class Watched:
    stdout: str
    stderr: str
    code: int
    peak_bytes: int


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("onevision") / "ov-0.5b"
    script = REPO / "scripts" / "make_checkpoint.py"
    command = [sys.executable, script, "llava-onevision-0.5b", folder, "--dtype", "float16"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    yield folder
    shutil.rmtree(folder)


def vlmrun(*args: object, cgroup: Path | None = None) -> Watched:
    """Run the installed command, on as many threads as it takes by itself, and watch its
    resident memory from outside, every 10 ms."""

    def join() -> None:
        if cgroup is not None:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))

    process = subprocess.Popen(
        [sys.executable, "-m", "vlmrun", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=join,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            break
        kinds = re.findall(r"^Rss(?:Anon|File|Shmem):\s+(\d+) kB", status, re.MULTILINE)
        peak = max(peak, sum(map(int, kinds)) << 10)
        time.sleep(0.01)
    stdout, stderr = process.communicate()
    return Watched(stdout, stderr, process.returncode, peak)


def job(checkpoint: Path, *more: object) -> list[object]:
    return [PICTURE, "-m", checkpoint, "--max-new-tokens", 4, "-b", 1, *more]


@pytest.fixture(scope="module")
def resident(checkpoint: Path) -> Watched:
    run = vlmrun("caption", *job(checkpoint, "--stats", "--json"))
    assert run.code == 0, run.stderr
    return run


@pytest.fixture(scope="module")
def needed_bytes(checkpoint: Path) -> int:
    run = vlmrun("mem-plan", *job(checkpoint, "--json"))
    assert run.code == 0, run.stderr
    return int(json.loads(run.stdout)["peak"]["ram_bytes"])


def caption_of(run: Watched) -> object:
    return json.loads(run.stdout)["caption"]


def statistics(run: Watched) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(run.stderr.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        ("float16", lambda weights: 100 * MiB),
        ("bfloat16", lambda weights: weights + 30 * MiB),
        ("int8", lambda weights: weights + 30 * MiB),
    ],
)
def test_loading_takes_no_detour(checkpoint: Path, dtype: str, most: object) -> None:
    """At the stored dtype weights are mapped; at another they take their own size and at most
    one layer (29.9 MB) beside it."""
    command = [sys.executable, "-c", LOADING, str(checkpoint), dtype]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPO).stdout
    added, peak, weights = map(int, out.split())
    print(f"{dtype}: {added / MiB:.0f} MiB anonymous added, peak {peak / MiB:.0f} MiB")
    assert callable(most)
    assert max(added, peak) <= most(weights)


def test_everything_fits(resident: Watched, needed_bytes: int) -> None:
    """The prediction holds and is not far off."""
    measured = statistics(resident)["measured"]
    print(f"predicted {needed_bytes / MiB:.0f} MiB, measured {resident.peak_bytes / MiB:.0f} MiB")
    assert resident.peak_bytes <= needed_bytes
    assert resident.peak_bytes >= 0.75 * needed_bytes
    assert abs(int(str(measured["peak_ram_bytes"])) - resident.peak_bytes) < 64 * MiB


def check_streamed(run: Watched, resident: Watched, budget: int) -> None:
    assert run.code == 0, run.stderr
    assert run.peak_bytes <= budget
    found = statistics(run)
    layers = found["plan"]["layers"]
    assert isinstance(layers, list)
    on_disk = [layer["name"] for layer in layers if layer["tier"]["decode"] == "disk"]
    assert any(name.startswith("decoder.layers.") for name in on_disk)
    assert int(str(found["measured"]["disk_bytes_read"])) > 0
    assert caption_of(run) == caption_of(resident)


def test_budget_below_the_model(checkpoint: Path, resident: Watched, needed_bytes: int) -> None:
    budget = int(0.6 * needed_bytes)
    run = vlmrun("caption", *job(checkpoint, "--ram", budget, "--stats", "--json"))
    print(f"budget {budget / MiB:.0f} MiB, highest {run.peak_bytes / MiB:.0f} MiB")
    check_streamed(run, resident, budget)


def test_budget_of_a_cgroup(checkpoint: Path, resident: Watched, needed_bytes: int) -> None:
    """Without a flag, the cgroup's limit is what sets the budget; nothing is killed."""
    budget = int(0.6 * needed_bytes)
    group = Path("/sys/fs/cgroup/memory") / f"vlmrun-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"memory cgroups are not writable here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(budget))
        run = vlmrun("caption", *job(checkpoint, "--stats", "--json"), cgroup=group)
        highest = int((group / "memory.max_usage_in_bytes").read_text())
        print(f"limit {budget / MiB:.0f} MiB, highest usage {highest / MiB:.0f} MiB")
        check_streamed(run, resident, budget)
        assert highest <= budget
    finally:
        group.rmdir()
