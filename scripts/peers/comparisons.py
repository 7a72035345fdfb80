"""What is compared with what, and the marks that vlmrun is held to."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from peers.task import Task

CAPTION, LARGE, BASE = "onevision-0.5b", "siglip-so400m", "siglip-base"  # folders
BATCH = 8
STARTED_TOKENS = 8  # of a caption that is timed from the start of its command

OURS, OURS_INT8 = "vlmrun bf16", "vlmrun int8"  # labels of tasks
STOCK, STOCK_FP32 = "transformers bf16", "transformers fp32"
STOCK_ROUNDED = "transformers fp32 of the rounded weights"
LLAMA, LLAMA_Q8, OPENVINO = "llama.cpp bf16", "llama.cpp q8_0", "OpenVINO fp32"
FIRST, LATER = "vlmrun, nothing compiled", "vlmrun, a later run"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tasks by label, which take turns; those `prepared` make their own copy of the weights
    before."""

    name: str
    title: str
    tasks: dict[str, Task]
    prepared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """What `ours` must reach against `theirs` in a metric of a comparison.

    form: `faster`: their seconds over ours; `more`: our rate over theirs; `share`: ours over
    theirs, at most; `later`: our seconds less theirs, at most; `above`: ours alone.
    """

    what: str
    comparison: str
    ours: str
    theirs: str
    metric: str
    form: Literal["faster", "more", "share", "later", "above"]
    wanted: float


MARKS = (
    Mark("time to first token", "caption", OURS, STOCK, "first_s", "faster", 7),
    Mark("time to first token", "caption", OURS, STOCK_FP32, "first_s", "faster", 1.6),
    Mark("peak memory", "caption", OURS, STOCK_FP32, "peak_bytes", "share", 0.5),
    Mark("decode with a picture", "caption", OURS, STOCK, "tokens_s", "more", 2),
    Mark("decode, long context", "decode-long", OURS, LLAMA, "tokens_s", "more", 1.2),
    Mark("decode, short context", "decode-short", OURS, LLAMA, "tokens_s", "more", 1.05),
    Mark("decode, long context", "decode-long", OURS_INT8, LLAMA_Q8, "tokens_s", "more", 1.3),
    Mark("decode, short context", "decode-short", OURS_INT8, LLAMA_Q8, "tokens_s", "more", 1.0),
    Mark("decode of 8 rows", "batch", OURS, LLAMA, "tokens_s", "more", 1.2),
    Mark("decode of 8 rows", "batch", OURS_INT8, LLAMA_Q8, "tokens_s", "more", 1.0),
    Mark("first run's delay", "start", FIRST, LATER, "whole_s", "later", 3),
    Mark("SigLIP so400m/14-384", "so400m", OURS, STOCK, "images_s", "more", 6),
    Mark("SigLIP so400m/14-384", "so400m", OURS, STOCK_FP32, "images_s", "more", 1.0),
    Mark("SigLIP base/16-224", "base", OURS, OPENVINO, "images_s", "more", 0.95),
    Mark("same weights", "cosine", OURS, STOCK_ROUNDED, "cosine", "above", 0.9999),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Where things lie and how much of everything is done.

    compute: vlmrun's arithmetic: `auto`, or what it would choose on the CPU that is acted.
    pictures: gives paths of so many pictures for a model's folder.
    """

    folder: Path
    threads: int
    compute: str
    new_tokens: int
    contexts: tuple[int, int]
    pictures: Callable[[str, int], tuple[str, ...]]

    def task(self, model: str) -> Task:
        """By vlmrun in bfloat16; comparisons make the others of it."""
        return Task(
            peer="vlmrun",
            kind="caption",
            folder=str(self.folder / model),
            dtype="bfloat16",
            compute=self.compute,
            threads=self.threads,
            new_tokens=self.new_tokens,
        )


def comparisons(sizes: Sizes) -> list[Comparison]:
    short, long = sizes.contexts
    return [
        caption(sizes),
        decoding(sizes, "decode-long", f"decode after {long:,} tokens", long, 1),
        decoding(sizes, "decode-short", f"decode after {short} tokens", short, 1),
        decoding(sizes, "batch", f"decode of {BATCH} rows after {long:,} tokens each", long, BATCH),
        start(sizes),
        tower(sizes, "so400m", LARGE, batch=2, batches=2),
        tower(sizes, "base", BASE, batch=8, batches=3),
        cosine(sizes),
    ]


def with_stock(ours: Task) -> dict[str, Task]:
    stock = replace(ours, peer="transformers", compute="auto")
    return {OURS: ours, STOCK: stock, STOCK_FP32: replace(stock, dtype="float32")}


def caption(sizes: Sizes) -> Comparison:
    ours = replace(sizes.task(CAPTION), pictures=sizes.pictures(CAPTION, 1))
    return Comparison("caption", "OneVision-0.5B, a caption of one picture", with_stock(ours))


def decoding(sizes: Sizes, name: str, title: str, context: int, rows: int) -> Comparison:
    """Transformers takes minutes for a batch, and no mark is against it."""
    ours = replace(sizes.task(CAPTION), kind="decode", context=context, rows=rows)
    tasks = {OURS: ours, STOCK: with_stock(ours)[STOCK]}
    tasks |= {LLAMA: written(ours, sizes), OURS_INT8: replace(ours, dtype="int8")}
    tasks[LLAMA_Q8] = written(tasks[OURS_INT8], sizes)
    if rows > 1:
        del tasks[STOCK]
    title = f"OneVision-0.5B's text part, {title}"
    return Comparison(name, title, tasks, prepared=(LLAMA, LLAMA_Q8))


def written(ours: Task, sizes: Sizes) -> Task:
    """The same by llama.cpp, from its own copy of the weights."""
    file = sizes.folder / f"{CAPTION}-{ours.dtype}.gguf"
    return replace(ours, peer="llama.cpp", file=str(file))


def start(sizes: Sizes) -> Comparison:
    pictures = sizes.pictures(CAPTION, 1)
    later = replace(
        sizes.task(CAPTION), kind="command", pictures=pictures, new_tokens=STARTED_TOKENS
    )
    tasks = {LATER: later, FIRST: replace(later, cold=True)}
    return Comparison("start", f"OneVision-0.5B, a command for {STARTED_TOKENS} tokens", tasks)


def tower(sizes: Sizes, name: str, model: str, *, batch: int, batches: int) -> Comparison:
    pictures = sizes.pictures(model, batch * batches)
    tasks = with_stock(replace(sizes.task(model), kind="embed", batch=batch, pictures=pictures))
    made: tuple[str, ...] = ()
    if name == "base":
        file = str(sizes.folder / f"{model}-{batch}.xml")
        tasks[OPENVINO] = replace(tasks[STOCK_FP32], peer="openvino", file=file)
        made = (OPENVINO,)
    return Comparison(name, f"{model}, pictures in batches of {batch}", tasks, prepared=made)


def cosine(sizes: Sizes) -> Comparison:
    """Of the same weights, those that bfloat16 holds, in vlmrun's float32 arithmetic and in stock
    transformers' of float32 throughout; what rounding them did stands beside it."""
    pictures = sizes.pictures(BASE, 4)
    ours = replace(sizes.task(BASE), kind="embed", batch=4, pictures=pictures, compute="float32")
    stock = replace(ours, peer="transformers")
    tasks = {
        STOCK_ROUNDED: stock,
        OURS: ours,
        STOCK: replace(stock, compute="auto"),
        STOCK_FP32: replace(stock, dtype="float32"),
    }
    named = {
        label: replace(each, vectors=str(sizes.folder / f"vectors-{at}.npy"))
        for at, (label, each) in enumerate(tasks.items())
    }
    return Comparison("cosine", f"{BASE}, vectors of 4 pictures", named)
