"""Repositories in hub layout with made-up weights, and what their errors must say."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from light import words
from safetensors.numpy import save_file

from vlmrun.errors import VlmrunError

REPO = "someone/tiny"
WEIGHT_BYTES = 400_000  # more than the 100 kB that are asked of a file for its header
WANTED = {
    "config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
}
UNWANTED = {"README.md", "pytorch_model.bin", "onnx/config.json", "onnx/model.safetensors"}


def write_repo(folder: Path, *, shards: int = 1) -> Path:
    for name in WANTED | UNWANTED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "config.json").write_text('{"model_type": "siglip"}')
    weight_map = {}
    for i in range(shards):
        single = "model.safetensors"
        name = single if shards == 1 else f"model-{i + 1:05}-of-{shards:05}.safetensors"
        weight = np.full((WEIGHT_BYTES // 4,), i + 1, np.float32)
        save_file({f"layer.{i}.weight": weight}, folder / name)
        weight_map[f"layer.{i}.weight"] = name
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@contextmanager
def says(
    kind: type[VlmrunError], *texts: str, hint: str
) -> Iterator[pytest.ExceptionInfo[VlmrunError]]:
    """Expect this very kind of error, one line and one line of hint, with these texts."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind
    assert words(error)
    assert [text for text in texts if text not in error.message] == [], error.message
    assert hint in error.hint
