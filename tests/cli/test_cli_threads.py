"""`--threads`: what a plan makes of it, and that it reaches the arithmetic."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Command, assert_refused

from vlmrun.memory import threads
from vlmrun.memory.threads import Processors


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use eight CPUs, and nobody who says how many threads."""
    monkeypatch.setattr(threads, "find_processors", lambda: Processors(8, 8, True, None))
    monkeypatch.delenv("OMP_NUM_THREADS")


@pytest.fixture
def restored() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def planned(vlmrun: Command, *flags: str) -> tuple[str, int, float]:
    """What a plan says of threads, the cores its rates assume, and its time for a picture."""
    line = ["mem-plan", "-m", "demo-siglip", "--ram", "8GiB", "--compute-dtype", "float32", *flags]
    text = vlmrun(*line).text
    said = re.search(r"^threads +(.*)$", text, re.MULTILINE)
    cores = re.search(r"on each of (\d+) core", text)
    assert said is not None
    assert cores is not None
    floor = vlmrun(*line, "--json").rows[0]["floor"]
    return said[1], int(cores[1]), floor["image_s"]


def test_the_least_time_is_that_of_the_threads(
    vlmrun: Command, eight: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, cores, eighth = planned(vlmrun)
    assert (said, cores) == ("8 (this machine's cores)", 8)
    said, cores, whole = planned(vlmrun, "--threads", "1")
    assert (said, cores) == ("1 (asked for)", 1)
    assert whole > eighth
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    said, cores, half = planned(vlmrun)
    assert (said, cores) == ("2 (OMP_NUM_THREADS says so)", 2)
    assert whole == pytest.approx(2 * half)
    assert planned(vlmrun, "--threads", "4")[:2] == ("4 (asked for)", 4)


def test_one_of_several_processes_plans_with_its_share(
    vlmrun: Command, eight: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ("4 (this machine's cores, shared by 2 processes)", 4)
    assert planned(vlmrun, "--tp", "2")[:2] == shared
    assert planned(vlmrun, "--tp", "2", "--threads", "3")[:2] == ("3 (asked for)", 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun sets it
    assert planned(vlmrun, "--tp", "2")[:2] == shared
    assert planned(vlmrun)[:2] == ("1 (OMP_NUM_THREADS says so)", 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0", "--threads 0: not 1 or more"),
        ("-1", "--threads -1: not 1 or more"),
        ("x", "--threads x: not a whole number"),
        ("1.5", "--threads 1.5: not a whole number"),
        ("9", "--threads 9: the CPUs this process may use are 8"),
    ],
)
@pytest.mark.parametrize("command", ["mem-plan", "embed", "caption"])
def test_what_is_no_number_of_threads(
    command: str, value: str, message: str, vlmrun: Command, pictures: Path, eight: None
) -> None:
    picture = pictures / "elephant.png"
    assert_refused(vlmrun(command, picture, "--threads", value), message, code=2)


def test_the_flag_reaches_the_arithmetic(
    vlmrun: Command, tiny_siglip: Path, three: list[Path], eight: None, restored: None
) -> None:
    import torch

    vectors = []
    for count in (1, 2):
        done = vlmrun("embed", "-v", "-m", tiny_siglip, "--threads", count, *three)
        assert done.code == 0
        assert f"vlmrun: threads: {count} (asked for)\n" in done.err
        assert torch.get_num_threads() == count
        vectors.append([row["embedding"] for row in done.rows])
    for one, two in zip(*vectors, strict=True):
        assert one == pytest.approx(two, abs=1e-6)
