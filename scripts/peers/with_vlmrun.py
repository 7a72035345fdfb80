"""vlmrun, through what its commands call: `run(job)`, or its decode loop for bare token ids."""

import io
import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from peers.task import PROMPT, Found, Task, Ticks, random_ids, rates, text_config
from vlmrun.errors import UsageError
from vlmrun.files.lines import LineWriter
from vlmrun.files.output import StreamSink
from vlmrun.files.rows import Caption, Embedding, Failure
from vlmrun.job import Generation, Job, Placing, Prompt
from vlmrun.models.checkpoints.dtype import parse_dtype
from vlmrun.models.model import open_source, read_model
from vlmrun.run import prepare, run


def placing_of(task: Task) -> Placing:
    return Placing(
        model=task.folder,
        offline=True,
        dtype=task.dtype,
        compute_dtype=task.compute,
        device="cpu",
        batch_size=max(task.batch, task.rows),
    )


def refusal(task: Task) -> Found | None:
    """Why there is nothing to measure, where this version does not store weights so."""
    try:
        parse_dtype(task.dtype)
    except UsageError:
        return {"missing": f"vlmrun has no --dtype {task.dtype} yet"}
    return None


def run_rows(job: Job) -> tuple[list[Any], list[float]]:
    """The rows of a job, and when the model was ready and each of its batches done."""
    rows: list[Any] = []
    moments = []
    with LineWriter(StreamSink(io.BytesIO()), rows.append) as writer:
        for _ in run(job, writer):
            moments.append(time.perf_counter())
    failed = [row.message for row in rows if isinstance(row, Failure)]
    if failed:
        raise RuntimeError(failed[0])
    return rows, moments


def caption(task: Task) -> Found:
    """First token and decode of pictures, as `vlmrun caption` does it."""
    ticks = Ticks()
    job = Job(
        task="caption",
        placing=placing_of(task),
        images=task.pictures,
        prompts=(Prompt(PROMPT),),
        generation=Generation(max_new_tokens=task.new_tokens, stop=ticks),
    )
    if refused := refusal(task):
        return refused
    rows, moments = run_rows(job)
    [row] = rows
    assert isinstance(row, Caption)
    return {**rates(ticks.times, ready=moments[0], task=task), "said": row.caption}


def decode(task: Task) -> Found:
    """Steps of the decoder after bare token ids, by the loop that captions are made with."""
    if refused := refusal(task):
        return refused
    ticks = Ticks()
    generation = Generation(max_new_tokens=task.new_tokens, stop=ticks)
    job = Job(task="caption", placing=placing_of(task), generation=generation)
    source, _ = open_source(task.folder, task="caption", offline=True)
    with ExitStack() as stack:
        entry = prepare(job, source, stack).entry
        from vlmrun.tasks.chat import Chat  # late, as vlmrun does: these import torch
        from vlmrun.tasks.decode import DecodeRow
        from vlmrun.tasks.decode import decode as decoded

        model = read_model(source)
        vocabulary = Chat(model).vocabulary
        shape = model.architecture.decoder
        assert shape is not None
        prompts = random_ids(task, text_config(task.folder)["vocab_size"])
        rows = [DecodeRow(tuple(ids), None) for ids in prompts]
        ready = time.perf_counter()
        decoded(entry, shape, rows, vocabulary=vocabulary, generation=generation)
        return rates(ticks.times, ready=ready, task=task)


def embed(task: Task) -> Found:
    """Vectors of pictures, as `vlmrun embed` makes them."""
    if refused := refusal(task):
        return refused
    rows, moments = run_rows(Job(task="embed", placing=placing_of(task), images=task.pictures))
    vectors = [row.vector for row in rows if isinstance(row, Embedding)]
    if task.vectors:
        np.save(task.vectors, np.stack(vectors))
    timed = len(task.pictures) - task.batch
    return {"images_s": timed / (moments[-1] - moments[1])} if timed > 0 else {}
