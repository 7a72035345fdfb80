"""One measurement in a process of its own, as plain values that pass through a command line."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

PROMPT = "Describe this image."
Peer = Literal["vlmrun", "transformers", "llama.cpp", "openvino"]
Kind = Literal["caption", "decode", "embed", "command", "prepare"]
Found = dict[str, Any]  # metrics by name; `missing` or `error`: why there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """kind: `caption` pictures, `decode` after `context` random token ids in each of `rows`,
    `embed` pictures in batches of which the first is not timed, run a whole `command`, or
    `prepare` what a peer reads in place of the checkpoint.

    dtype: how weights are stored; compute: vlmrun's arithmetic, and for others float32 or, as
    auto, that of the weights.
    file: a peer's own copy of the weights. vectors: where embeddings go, as `.npy`.
    cold: nothing that was compiled earlier is there. at: when the process was started, as
    `time.time` counts.
    """

    peer: Peer
    kind: Kind
    folder: str
    dtype: str
    compute: str = "auto"
    threads: int = 1
    pictures: tuple[str, ...] = ()
    context: int = 0
    rows: int = 1
    new_tokens: int = 0
    batch: int = 1
    file: str = ""
    vectors: str = ""
    cold: bool = False
    at: float = 0.0

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> "Task":
        fields = json.loads(text)
        return cls(**{**fields, "pictures": tuple(fields["pictures"])})


class Ticks(tuple[str, ...]):
    """The moments at which somebody asked whether there is anything to stop at: there is not.

    A decode loop asks after each token, so this times tokens from outside, whoever decodes.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def __bool__(self) -> bool:
        self.times.append(time.perf_counter())
        return False


def rates(times: Sequence[float], *, ready: float, task: Task) -> Found:
    """Metrics of tokens that came at these times, as `time.perf_counter` counts; `ready` is when
    the model was loaded. Tokens of a batch's rows come one after the other.

    Raises:
        RuntimeError: there are more or fewer than were to be made.
    """
    wanted = task.new_tokens * task.rows
    if len(times) != wanted:
        raise RuntimeError(f"{len(times)} tokens were timed, not {wanted}")
    steps = times[task.rows - 1 :: task.rows]
    found = {
        "first_s": steps[0] - ready,
        "whole_first_s": time.time() - task.at - (time.perf_counter() - steps[0]),
    }
    if len(steps) > 1:
        found["tokens_s"] = task.rows * (len(steps) - 1) / (steps[-1] - steps[0])
    return found


def random_ids(task: Task, vocabulary: int) -> list[list[int]]:
    """Token ids of every row, the same for every peer; special tokens, which lie behind the
    words, are left out."""
    import numpy as np  # late: the command line needs no numpy

    source = np.random.Generator(np.random.SFC64(7))
    most = 9 * vocabulary // 10
    ids: list[list[int]] = source.integers(most, size=(task.rows, task.context)).tolist()
    return ids


def text_config(folder: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())["text_config"]
    return config
