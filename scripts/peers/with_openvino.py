"""OpenVINO: the SigLIP tower of transformers, converted once, in the precision of its weights."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from PIL import Image

from peers.task import Found, Task


def prepare(task: Task) -> Found:
    """Convert the vision tower with its pooling head, unless that is done."""
    if Path(task.file).exists():
        return {}
    import torch  # late: what is converted needs no torch to run
    import transformers

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.SiglipVisionModel.from_pretrained(
                task.folder, dtype=torch.float32, attn_implementation="sdpa"
            ).eval()

        def forward(self, pixels: Any) -> Any:
            return self.inner(pixel_values=pixels).pooler_output

    tower = Tower()
    side = tower.inner.config.image_size
    example = torch.zeros(task.batch, 3, side, side)
    with torch.inference_mode():
        converted = openvino.convert_model(tower, example_input=example, input=example.shape)
    part = Path(task.file).with_suffix(".part.xml")
    openvino.save_model(converted, part, compress_to_fp16=False)
    part.with_suffix(".bin").rename(Path(task.file).with_suffix(".bin"))
    part.rename(task.file)
    return {}


def embed(task: Task) -> Found:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    settings = {"INFERENCE_NUM_THREADS": task.threads, "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(task.file, "CPU", settings)
    pixels = SiglipImageProcessorPil.from_pretrained(task.folder)
    vectors, moments = [], []
    for at in range(0, len(task.pictures), task.batch):
        group = [Image.open(path).convert("RGB") for path in task.pictures[at : at + task.batch]]
        inputs = pixels(group, return_tensors="np")["pixel_values"]
        vectors += list(np.array(model(inputs)[0]))
        moments.append(time.perf_counter())
    if task.vectors:
        np.save(task.vectors, np.stack(vectors))
    timed = len(task.pictures) - task.batch
    return {"images_s": timed / (moments[-1] - moments[0])} if timed > 0 else {}
