"""Tiny models made ready to run, from a folder to a cache entry, and inputs for both sides:
ours and stock transformers."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from folders import model_at
from PIL import Image
from tiny import DECODER, SPECIAL, build_onevision
from torch import Tensor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from vlmrun.job import Backend, Generation, Job, Placing
from vlmrun.load import load
from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.memory.plan import Plan
from vlmrun.memory.workload import plan_job
from vlmrun.models.family import View
from vlmrun.models.model import Model
from vlmrun.tasks.caption import Pictures, encode_pictures
from vlmrun.tasks.decode import DecodeRow, Steps, embed_prompts, left_padded
from vlmrun.tasks.vocabulary import Vocabulary

CUT_ROWS = 1601
RESIDENCIES = ("100%", "75%", "50%", "25%", "0%")
# (dtype of the file, dtype asked for, compute dtype)
DTYPES = (
    ("float32", "auto", "float32"),
    ("float32", "auto", "bfloat16"),
    ("float32", "bfloat16", "float32"),
    ("float32", "float16", "float32"),
    ("bfloat16", "auto", "float32"),
    ("bfloat16", "auto", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("float16", "auto", "float32"),
    ("float16", "bfloat16", "bfloat16"),
)


@dataclass(frozen=True, slots=True)
class Ready:
    """A model, the plan it was loaded by, and its entry."""

    model: Model
    plan: Plan
    entry: CachedModelWithPartialLoad


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt with its pictures: as our decoder takes it, and as `generate()` does."""

    ids: tuple[int, ...]
    pictures: Pictures | None
    stock: dict[str, Tensor]


def build_cut_head(folder: Path, **options: Any) -> Path:
    """A OneVision whose head is larger than any block, so that it moves in several pieces."""
    with patch.dict(DECODER, vocab_size=CUT_ROWS):
        return build_onevision(folder, **options)


def plan_tiny(
    model: Model,
    *,
    resident: str | None = None,
    dtype: str = "auto",
    compute: str = "float32",
    kind: str = "pooled",
    texts: bool = False,
    images: bool = True,
    batch: int | None = None,
    new_tokens: int = 8,
    attention: Backend = "auto",
) -> Plan:
    placing = Placing(
        model="tiny",
        dtype=dtype,
        compute_dtype=compute,
        device="cpu",
        ram="64GiB",
        resident=resident,
        batch_size=batch,
        attention=attention,
    )
    job = Job(
        task=model.family.task,
        placing=placing,
        images=("x",) * images,
        texts=("x",) * texts,
        generation=Generation(max_new_tokens=new_tokens),
        output_kind=kind,
    )
    return plan_job(model, job, [])


def load_tiny(folder: Path, **options: Any) -> Ready:
    """Load a folder by the plan that `plan_tiny` makes with these options."""
    model = model_at(folder)
    plan = plan_tiny(model, **options)
    return Ready(model, plan, load(model, plan))


def shifted(folder: Path, target: Path, nbytes: int) -> Path:
    """The same checkpoint, its data `nbytes` further on: the header is padded with spaces."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    for file in target.glob("*.safetensors"):
        raw = file.read_bytes()
        stop = 8 + int.from_bytes(raw[:8], "little")
        header = raw[8:stop] + b" " * nbytes
        file.write_bytes(len(header).to_bytes(8, "little") + header + raw[stop:])
    return target


def noise(seed: int, width: int = 40, height: int = 40) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height))


@lru_cache(maxsize=8)
def tokenizer_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def vocabulary_of(folder: Path, **settings: Any) -> Vocabulary:
    config = transformers.GenerationConfig.from_pretrained(folder)
    config.update(**settings)
    stop_ids = frozenset({SPECIAL["<|im_end|>"]})
    pad, image = SPECIAL["<|endoftext|>"], SPECIAL["<image>"]
    tokenizer, size = tokenizer_of(folder), model_at(folder).architecture.decoder.vocabulary
    return Vocabulary(tokenizer, size, "<image>", image, pad, stop_ids, config)


def prompted(
    model: Model, images: Sequence[Image.Image], text: str = "what is in the picture?"
) -> Prompted:
    """A prompt about any number of pictures, its ids written without the chat template."""
    folder = model.source.folder
    assert folder is not None
    pictures, stock = None, {}
    if images:
        processor = LlavaOnevisionImageProcessorPil.from_pretrained(folder)
        stock = dict(processor([list(images)], return_tensors="pt"))
        pictures = pictures_of(model, stock)
    marks = "".join("<image>" * count for count in (pictures.tokens if pictures else ()))
    said = f"<|im_start|>user {marks}\n{text}<|im_end|><|im_start|>assistant\n"
    ids = tuple(tokenizer_of(folder)(said)["input_ids"])
    stock |= {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    return Prompted(ids, pictures, stock)


def pictures_of(model: Model, stock: dict[str, Tensor]) -> Pictures:
    pixels, sizes = stock["pixel_values"], stock["image_sizes"].tolist()  # [n, crops, 3, S, S]
    detail = "high" if len(sizes) == 1 else "low"
    costs = [model.family.image_cost(model.architecture, w, h, View(detail)) for h, w in sizes]
    return Pictures(
        pixels.flatten(0, 1),
        tuple((h, w) for h, w in sizes),
        tuple(cost.crops for cost in costs),
        tuple(cost.tokens for cost in costs),
    )


def rows_of(ready: Ready, prompts: Sequence[Prompted]) -> list[DecodeRow]:
    """Encode the pictures of a batch and put its rows together."""
    seen = [prompt.pictures for prompt in prompts if prompt.pictures is not None]
    features = iter(encode_pictures(ready.entry, ready.model.architecture, seen) if seen else ())
    return [
        DecodeRow(prompt.ids, None if prompt.pictures is None else next(features), seed=i)
        for i, prompt in enumerate(prompts)
    ]


@torch.inference_mode()
def trace(
    ready: Ready,
    rows: Sequence[DecodeRow],
    *,
    steps: int = 4,
    pad: int = SPECIAL["<|endoftext|>"],
    image: int = SPECIAL["<image>"],
) -> Tensor:
    """Logits of a greedy run, [steps, B, V]: prefill, then one token at a time."""
    decoder = ready.model.architecture.decoder
    assert decoder is not None
    ids, mask = left_padded(rows, pad)
    with ready.entry.use("decode") as module:
        embeds = embed_prompts(module, rows, ids, image)
        run = Steps(ready.entry, module, decoder, embeds, mask, steps)
        logits = [run.prefill(embeds)]
        for _ in range(steps - 1):
            logits.append(run.step(logits[-1].argmax(dim=-1)))
    return torch.stack(logits)
