"""Stock transformers: its own classes, `generate()` and image processors, nothing tuned."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import ProcessorMixin, StoppingCriteria, StoppingCriteriaList
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from peers.task import PROMPT, Found, Task, random_ids, rates, text_config


class TokenTimes(StoppingCriteria):
    """Never stops; notes when it was asked, which is after every token."""

    def __init__(self, rows: int) -> None:
        self.times: list[float] = []
        self._rows = rows

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times += [time.perf_counter()] * self._rows
        return torch.zeros(len(input_ids), dtype=torch.bool)


def opened(kind: Any, task: Task) -> Any:
    model = kind.from_pretrained(task.folder, dtype=getattr(torch, task.dtype)).eval()
    return model.float() if task.compute == "float32" else model


class PictureProcessor(transformers.LlavaOnevisionProcessor):
    """The stock one without its part for videos, which needs torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def onevision_processor(folder: Path) -> PictureProcessor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pixels = LlavaOnevisionImageProcessorPil.from_pretrained(folder)
    made = PictureProcessor(pixels, tokenizer, (folder / "chat_template.jinja").read_text())
    for name, value in json.loads((folder / "processor_config.json").read_text()).items():
        setattr(made, name, value)
    made.image_token_id = tokenizer.convert_tokens_to_ids(made.image_token)
    return made


@torch.inference_mode()
def generated(model: Any, inputs: dict[str, Any], task: Task) -> tuple[Any, list[float]]:
    ticks = TokenTimes(task.rows)
    out = model.generate(
        **inputs,
        max_new_tokens=task.new_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([ticks]),
    )
    return out, ticks.times


def caption(task: Task) -> Found:
    model = opened(transformers.LlavaOnevisionForConditionalGeneration, task)
    processor = onevision_processor(Path(task.folder))
    ready = time.perf_counter()
    [picture] = [Image.open(path).convert("RGB") for path in task.pictures]
    content = [{"type": "image"}, {"type": "text", "text": PROMPT}]
    said = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(said, add_generation_prompt=True)
    inputs = processor(images=[picture], text=[text], return_tensors="pt").to(model.dtype)
    out, times = generated(model, dict(inputs), task)
    length = inputs["input_ids"].shape[1]
    words = processor.tokenizer.decode(out[0, length:], skip_special_tokens=True)
    return {**rates(times, ready=ready, task=task), "said": words.strip()}


def decode(task: Task) -> Found:
    model = opened(transformers.LlavaOnevisionForConditionalGeneration, task)
    ids = torch.tensor(random_ids(task, text_config(task.folder)["vocab_size"]))
    ready = time.perf_counter()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    _, times = generated(model, inputs, task)
    return rates(times, ready=ready, task=task)


@torch.inference_mode()
def embed(task: Task) -> Found:
    model = opened(transformers.SiglipVisionModel, task)
    pixels = SiglipImageProcessorPil.from_pretrained(task.folder)
    vectors, moments = [], []
    for at in range(0, len(task.pictures), task.batch):
        group = [Image.open(path).convert("RGB") for path in task.pictures[at : at + task.batch]]
        inputs = pixels(group, return_tensors="pt")["pixel_values"].to(model.dtype)
        vectors += list(model(pixel_values=inputs).pooler_output.float().numpy())
        moments.append(time.perf_counter())
    if task.vectors:
        np.save(task.vectors, np.stack(vectors))
    timed = len(task.pictures) - task.batch
    return {"images_s": timed / (moments[-1] - moments[0])} if timed > 0 else {}
