#!/usr/bin/env python3
"""Measures vlmrun and its peers in one run, taking turns, and writes a Markdown table.

    bench.py [--only NAME...] [--rounds N] [--output FILE.md]

Random checkpoints of real shapes are made first (8 GB, kept in --folder). Every measurement runs
in a process of its own. Peers that are not installed become rows that say so; besides
transformers, which vlmrun needs itself, they are: pip install llama-cpp-python gguf openvino.

--isa avx2 holds all to AVX2, as far as each obeys: vlmrun's loops and arithmetic as it would
choose them there, torch and OpenVINO by oneDNN's own limit, llama.cpp by a build of its library
made without AVX-512, whose folder is --llama-library.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from peers.comparisons import BASE, CAPTION, LARGE, Comparison, Sizes, comparisons
from peers.machine import machine_lines
from peers.table import Results, agreement, marks_table, numbers_table, why_none
from peers.task import PROMPT, Found, Task

SCRIPTS = Path(__file__).parent
MODELS = {  # folder -> what make_checkpoint.py makes it of
    CAPTION: ("llava-onevision-0.5b", "bfloat16"),
    LARGE: ("siglip", "float32"),
    BASE: ("siglip-base", "float32"),
}
NAMES = ("caption", "decode-long", "decode-short", "batch", "start", "so400m", "base", "cosine")
AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NUMBA_CPU_NAME": "znver3",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2",
}


def main() -> None:
    given = parsed(sys.argv[1:])
    folder = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(os, "sched_setaffinity"):  # so that no peer has more than it is asked to use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.threads])
    sizes = Sizes(
        folder=folder,
        threads=given.threads,
        compute="float32" if given.isa == "avx2" else "auto",
        new_tokens=given.new_tokens,
        contexts=tuple(given.contexts),
        pictures=lambda model, count: pictures(folder, model, count),
    )
    for model in MODELS:
        make_checkpoint(folder / model, model)
    environment = child_environment(given)
    chosen = [each for each in comparisons(sizes) if each.name in given.only]
    results: dict[str, dict[str, list[Found]]] = {}
    busy = os.getloadavg()[0]
    for comparison in chosen:
        results[comparison.name] = rounds_of(comparison, given.rounds, environment)
        text = "\n".join(written(given, chosen, results, busy))
        if given.output:  # after each: what was measured is kept, whatever comes
            given.output.write_text(text, encoding="utf-8")
    print(text)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    add("--rounds", type=positive, default=3, help="medians are of so many (3)")
    add("--output", type=Path, help="write the table here, too")
    add("--folder", type=Path, default=cache / "vlmrun-bench", help="for checkpoints")
    add("--threads", type=positive, default=usable, help="each peer's (all CPUs)")
    add("--new-tokens", type=positive, default=48, help="timed in each decode (48)")
    add("--contexts", type=positive, nargs=2, default=(16, 1505), metavar=("SHORT", "LONG"))
    add("--isa", choices=("native", "avx2"), default="native")
    add("--llama-library", type=Path, metavar="FOLDER", help="with another libllama.so")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def make_checkpoint(folder: Path, model: str) -> None:
    """Unless it is there; a part of one is never left under its name."""
    if folder.exists():
        return
    shape, dtype = MODELS[model]
    part = folder.with_name(f"{folder.name}.part")
    script = SCRIPTS / "make_checkpoint.py"
    command = [sys.executable, str(script), shape, str(part), "--dtype", dtype]
    subprocess.run(command, check=True)
    part.rename(folder)


def pictures(folder: Path, model: str, count: int) -> tuple[str, ...]:
    """Paths of noisy pictures, all different, of the size that the model's tower sees."""
    from PIL import Image  # late: --help needs none

    config = json.loads((folder / model / "config.json").read_text())
    side = config["vision_config"]["image_size"]
    paths = [folder / "pictures" / f"{side}-{at}.png" for at in range(count)]
    paths[0].parent.mkdir(exist_ok=True)
    for at, path in enumerate(paths):
        if not path.exists():
            noise = Image.effect_noise((side, side), 40 + 5 * at)
            Image.merge("RGB", [noise, noise.rotate(90), noise.rotate(180)]).save(path)
    return tuple(map(str, paths))


def child_environment(given: argparse.Namespace) -> dict[str, str]:
    """The same for all peers: threads, and the instructions they are held to."""
    kept = dict(os.environ)
    kept |= {
        "PYTHONPATH": os.pathsep.join([str(SCRIPTS), *filter(None, [kept.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": str(given.threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if given.llama_library is not None:
        kept["LLAMA_CPP_LIB_PATH"] = str(given.llama_library)
    return kept | AVX2 if given.isa == "avx2" else kept


def rounds_of(
    comparison: Comparison, rounds: int, environment: dict[str, str]
) -> dict[str, list[Found]]:
    """Let the tasks take turns; one that cannot run is asked once."""
    found: dict[str, list[Found]] = {label: [] for label in comparison.tasks}
    for label in comparison.prepared:
        made = execute(replace(comparison.tasks[label], kind="prepare"), environment)
        found[label] += [made] if why_none([made]) else []
    for task in comparison.tasks.values():
        if task.peer == "vlmrun" and not task.cold:
            execute(warming(task), environment)
    for at in range(rounds):
        for label, task in comparison.tasks.items():
            if why_none(found[label]):
                continue
            say(f"{comparison.name} {at + 1}/{rounds}: {label} ... ", end="")
            start = time.perf_counter()
            found[label].append(execute(task, environment))
            say(why_none(found[label]) or f"{time.perf_counter() - start:.1f} s")
    if comparison.name == "cosine":
        add_cosines(comparison, found)
    return found


def warming(task: Task) -> Task:
    """A short one that compiles what the task needs; numba keeps it where an installation does."""
    few = task.pictures[: task.batch]
    return replace(task, context=min(task.context, 16), pictures=few, new_tokens=2)


def execute(task: Task, environment: dict[str, str]) -> Found:
    """Run a task in a process of its own, with an empty kernel cache if it is cold."""
    with tempfile.TemporaryDirectory() as empty:
        if task.cold:
            environment = {**environment, "NUMBA_CACHE_DIR": empty}
        if task.kind == "command":
            return whole_command(task, environment)
        command = [sys.executable, "-m", "peers.measure", replace(task, at=time.time()).dump()]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error": failure(done)}
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def whole_command(task: Task, environment: dict[str, str]) -> Found:
    command = [sys.executable, "-m", "vlmrun", "caption", "-m", task.folder, *task.pictures]
    command += ["--dtype", task.dtype, "--compute-dtype", task.compute, "--prompt", PROMPT]
    command += ["--max-new-tokens", str(task.new_tokens), "--offline", "--quiet"]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    return {"error": failure(done)} if done.returncode else {"whole_s": seconds}


def failure(done: "subprocess.CompletedProcess[str]") -> str:
    lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
    return f"failed: {lines[-1][:200]}".replace("|", "/")  # which would end a cell


def add_cosines(comparison: Comparison, found: dict[str, list[Found]]) -> None:
    """The least cosine between a picture's vector and the same of the first task."""
    import numpy as np  # late, as above

    vectors = {
        label: np.load(task.vectors)
        for label, task in comparison.tasks.items()
        if not why_none(found[label])
    }
    units = {label: each / np.linalg.norm(each, axis=1)[:, None] for label, each in vectors.items()}
    wanted = units.get(next(iter(comparison.tasks)))
    for label, each in units.items():
        if wanted is not None and each is not wanted:
            least = float((each.astype(np.float64) * wanted).sum(axis=1).min())
            found[label] = [{**one, "cosine": least} for one in found[label]]


def written(
    given: argparse.Namespace, chosen: Sequence[Comparison], results: Results, busy: float
) -> list[str]:
    """The whole page."""
    lines = machine_lines(given.threads, given.isa)
    lines += [f"- load of the machine before the first measurement: {busy:.2f}"]
    lines += [f"- medians of {given.rounds} rounds; peers take turns, each in its own process", ""]
    lines += [*marks_table(results), ""]
    for comparison in chosen:
        if comparison.name in results:
            lines += [*numbers_table(comparison, results[comparison.name]), ""]
            said = agreement(results[comparison.name])
            lines += [said, ""] if said else []
    if given.isa == "avx2":
        lib = given.llama_library
        lines.append(
            "Held to AVX2: vlmrun by numba's target and float32 arithmetic, torch by ATen's and "
            "oneDNN's limits, OpenVINO in part, llama.cpp "
            + ("by its library." if lib else "not at all: no --llama-library was given.")
        )
    return lines


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
