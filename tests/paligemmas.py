"""Prompts to tiny PaliGemmas, as our decoder takes them and as stock `generate()` does."""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from entries import Prompted, Ready, load_tiny, rows_of, trace
from folders import model_at
from PIL import Image
from tiny_paligemma import IMAGE
from torch import Tensor

from vlmrun.job import Generation
from vlmrun.tasks.decode import Decoded, DecodeRow, decode
from vlmrun.tasks.prefix import Prefix
from vlmrun.tasks.preprocess import PicturePreprocessor

NEW_TOKENS = 12


@lru_cache(maxsize=16)
def stock_of(folder: Path) -> Any:
    load = transformers.PaliGemmaForConditionalGeneration.from_pretrained
    return load(folder, dtype=torch.float32)


@lru_cache(maxsize=4)
def processor_of(folder: Path) -> Any:
    return transformers.AutoProcessor.from_pretrained(folder)


def ask(folder: Path, text: str, *images: Image.Image) -> Prompted:
    """A prompt about pictures; ours must be the stock processor's, number by number."""
    model = model_at(folder)
    said = "<image>" * len(images) + text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it makes arrays of tensors, which numpy warns of
        stock = processor_of(folder)(images=list(images), text=said, return_tensors="pt")
    pictures = PicturePreprocessor(model).pictures(images)
    ids = Prefix(model).input_ids(text, pictures.tokens)
    assert list(ids) == stock["input_ids"][0].tolist()
    assert torch.equal(pictures.pixel_values, stock["pixel_values"])
    return Prompted(ids, pictures, dict(stock))


def stock_tokens(folder: Path, prompt: Prompted, **settings: Any) -> list[int]:
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **settings}
    made: Tensor = stock_of(folder).generate(**prompt.stock, **settings)
    return made[0, len(prompt.ids) :].tolist()


@torch.no_grad()
def stock_logits(folder: Path, prompt: Prompted, said: Sequence[int] = ()) -> Tensor:
    """Of the prompt and what was said after it, in one pass without a cache: [said + 1, V]."""
    inputs = {k: v for k, v in prompt.stock.items() if k != "labels"}
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([said]).long()], dim=1)
    later = torch.ones(1, len(said)).long()
    for name in "attention_mask", "token_type_ids":
        inputs[name] = torch.cat([inputs[name], later], dim=1)
    logits: Tensor = stock_of(folder)(**inputs).logits[0, len(prompt.ids) - 1 :]
    return logits


def logits(ready: Ready, rows: Sequence[DecodeRow], *, steps: int = 4) -> Tensor:
    return trace(ready, rows, steps=steps, pad=0, image=IMAGE)


def answers(ready: Ready, batch: Sequence[Prompted], **job: Any) -> list[Decoded]:
    decoder = ready.model.architecture.decoder
    assert decoder is not None
    return decode(
        ready.entry,
        decoder,
        rows_of(ready, batch),
        vocabulary=Prefix(ready.model).vocabulary,
        generation=Generation(**{"max_new_tokens": NEW_TOKENS, **job}),
    )


def tokens(folder: Path, batch: Sequence[Prompted], **options: Any) -> list[list[int]]:
    ready = load_tiny(folder, new_tokens=NEW_TOKENS, **options)
    return [row.tokens for row in answers(ready, batch)]
