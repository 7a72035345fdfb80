"""llama.cpp, by the low-level bindings of llama-cpp-python: token ids in, greedy token ids out."""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from peers.task import Found, Task, random_ids, rates, text_config

CHUNK = 2048  # tokens of a prompt that are given at once: llama.cpp's own default


def prepare(task: Task) -> Found:
    """Write the text part of the checkpoint as GGUF, unless it is there."""
    from peers.gguf_file import write_gguf  # late: needs the package gguf, which others do not

    if not Path(task.file).exists():
        write_gguf(Path(task.folder), Path(task.file), task.dtype)
    return {}


@contextmanager
def opened(task: Task) -> Iterator[Any]:
    """A context with room for all rows; settings that are not about size are the defaults.

    Raises:
        RuntimeError: llama.cpp does not read the file.
    """
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    asked = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(task.file.encode(), asked)
    if not model:
        raise RuntimeError(f"llama.cpp does not read {task.file}")
    params = llama_cpp.llama_context_default_params()
    each = -(-(task.context + task.new_tokens) // 256) * 256
    params.n_ctx, params.n_seq_max = each * task.rows, task.rows
    params.n_batch = CHUNK
    params.n_threads = params.n_threads_batch = task.threads
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp makes no context")
    yield context
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


def feed(context: Any, batch: Any, tokens: list[tuple[int, int, int, bool]]) -> None:
    """Run tokens, each with its position, its row, and whether its logits are wanted."""
    batch.n_tokens = len(tokens)
    for i, (token, position, row, wanted) in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        batch.logits[i] = wanted
    code = llama_cpp.llama_decode(context, batch)
    if code:
        raise RuntimeError(f"llama_decode returned {code}")


def likeliest(context: Any, at: int, vocabulary: int) -> int:
    logits = llama_cpp.llama_get_logits_ith(context, at)
    return int(np.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax())


def decode(task: Task) -> Found:
    vocabulary = text_config(task.folder)["vocab_size"]
    prompts = random_ids(task, vocabulary)
    with opened(task) as context:
        batch = llama_cpp.llama_batch_init(CHUNK, 0, task.rows)
        ready = time.perf_counter()
        made = [[prefilled(context, batch, ids, i, vocabulary)] for i, ids in enumerate(prompts)]
        times = [time.perf_counter()] * task.rows
        for step in range(task.new_tokens - 1):
            position = task.context + step
            feed(context, batch, [(row[-1], position, i, True) for i, row in enumerate(made)])
            for i, row in enumerate(made):
                row.append(likeliest(context, i, vocabulary))
            times += [time.perf_counter()] * task.rows
        llama_cpp.llama_batch_free(batch)
    return rates(times, ready=ready, task=task)


def prefilled(context: Any, batch: Any, ids: list[int], row: int, vocabulary: int) -> int:
    """The token that follows a row's prompt."""
    last = len(ids) - 1
    for start in range(0, len(ids), CHUNK):
        chunk = [
            (token, at, row, at == last)
            for at, token in enumerate(ids[start : start + CHUNK], start)
        ]
        feed(context, batch, chunk)
    return likeliest(context, len(chunk) - 1, vocabulary)
