"""The installed command: a closed pipe, an interruption. `test_hub_end_to_end` runs each."""

import signal
import subprocess
import sys
from pathlib import Path

from commands import PROGRAM

COUNT = 500  # pictures in a run that is interrupted after the first


def heeding() -> None:
    """Take SIGINT as a terminal's program does, where the tests run under `trap '' INT`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_mem_plan_is_installed() -> None:
    done = subprocess.run([PROGRAM, "mem-plan", "-m", "demo", "--ram", "9MiB"], capture_output=True)
    assert done.returncode == 4
    assert b"does not fit" in done.stdout


def test_a_folder_that_hides_the_package_is_named(tmp_path: Path) -> None:
    """As a clone's does to `python -m` in the folder above it, where the install is editable."""
    (tmp_path / "vlmrun").mkdir()
    finder = "import sys, vlmrun; print(vlmrun.__file__)"
    seen = subprocess.run([sys.executable, "-c", finder], cwd=tmp_path, capture_output=True)
    line = [sys.executable, "-m", "vlmrun", "--version"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True)
    if b"__init__.py" in seen.stdout:
        assert done.returncode == 0  # an install of another kind
    else:
        told = b"vlmrun: error: a folder named vlmrun in the working directory hides the package\n"
        assert (done.returncode, done.stderr.splitlines(keepends=True)[0]) == (1, told)
        assert done.stderr.count(b"\n") == 2
    assert subprocess.run([PROGRAM, "--version"], cwd=tmp_path, capture_output=True).returncode == 0


def test_a_closed_pipe_ends_caption_quietly(pictures: Path) -> None:
    script = f'"$0" caption -m demo -b 1 {pictures} | head -n 1'
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script, PROGRAM], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"\ta cat face to the left of a banana\n")


def test_a_closed_pipe_ends_help_and_plans_quietly() -> None:
    for words in ("--help", "mem-plan -m demo --layers"):
        script = f'"$0" {words} | true'
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", script, PROGRAM], capture_output=True
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_an_interruption_keeps_whole_rows(pictures: Path, tmp_path: Path) -> None:
    listed = tmp_path / "list"
    listed.write_text(f"{pictures / 'elephant.png'}\n" * COUNT)
    command = [PROGRAM, "caption", "-m", "demo", "-b", "1", "--files-from", listed]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, preexec_fn=heeding) as run:
        assert run.stdout is not None
        first = run.stdout.readline()
        run.send_signal(signal.SIGINT)
        rest, told = run.communicate()
    assert run.returncode == 130
    rows = (first + rest).decode().splitlines(keepends=True)
    assert set(rows) == {f"{pictures / 'elephant.png'}\tan elephant\n"}
    assert b"ending after the batch in flight" in told
    assert f"vlmrun: {len(rows)} done, 0 failed, {COUNT - len(rows)} not tried\n" in told.decode()
