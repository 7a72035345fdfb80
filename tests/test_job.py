"""A job's fingerprint: what changes the result of an input, and nothing else."""

from dataclasses import fields, replace
from typing import Any

import pytest

from vlmrun.job import INPUTS, Generation, Job, Placing, Prompt

TABLE = "packaged table 0a1b2c3d"
JOB = Job(task="caption", placing=Placing(model="m"), prompts=(Prompt("what?"),))
OTHER: dict[str, Any] = {
    "task": "embed",
    "background": (0, 0, 0),
    "max_pixels": 5,
    "frame": 1,
    "prompts": (Prompt("what?", "named"),),
    "system": "be brief",
    "detail": "low",
    "generation": Generation(seed=1),
    "prefix": "a ",
    "suffix": ".",
    "output_kind": "last-hidden",
    "normalize": False,
    "max_patches": 9,
    "dynamic_size": True,
}
INPUT: dict[str, Any] = {
    "images": ("a.png",),
    "stdin_image": b"x",
    "texts": ("a",),
    "scores": True,
    "one_array": True,
}
PLACED = {
    "model": "n",
    "revision": "x",
    "dtype": "int8",
    "compute_dtype": "float32",
    "attention": "eager",
}
ROOM = {"ram": "1GiB", "resident": "5%", "batch_size": 3, "threads": 7, "offline": True}


def print_of(job: Job) -> str:
    return job.fingerprint(TABLE)


def test_it_is_the_same_in_every_process() -> None:
    assert print_of(JOB) == print_of(replace(JOB)) == "b0f2431081517930"


@pytest.mark.parametrize("name", OTHER)
def test_what_is_asked_changes_it(name: str) -> None:
    changed = replace(JOB, **{name: OTHER[name]})
    assert getattr(changed, name) != getattr(JOB, name)
    assert print_of(changed) != print_of(JOB)


def test_every_field_is_looked_at() -> None:
    names = {each.name for each in fields(Job)}
    assert names == OTHER.keys() | INPUT.keys() | {"placing"}
    assert INPUT.keys() | {"placing"} == INPUTS


def test_inputs_do_not_change_it() -> None:
    assert print_of(replace(JOB, **INPUT)) == print_of(JOB)


@pytest.mark.parametrize("name", PLACED)
def test_the_model_and_its_numbers_change_it(name: str) -> None:
    placing = replace(JOB.placing, **{name: PLACED[name]})
    assert print_of(replace(JOB, placing=placing)) != print_of(JOB)


def test_memory_and_threads_do_not_change_it() -> None:
    assert print_of(replace(JOB, placing=replace(JOB.placing, **ROOM))) == print_of(JOB)


def test_the_table_of_kernels_changes_it() -> None:
    assert JOB.fingerprint("tuned table 00000000") != print_of(JOB)
