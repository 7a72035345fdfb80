"""Models known by their shapes alone, and weight files written by hand: none of it needs torch."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrun.errors import VlmrunError
from vlmrun.memory.budget import Budget
from vlmrun.memory.plan import Storage
from vlmrun.memory.threads import Threads
from vlmrun.models.checkpoints.checkpoint import ITEMSIZES
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.checkpoints.source import ALIASES, Source
from vlmrun.models.families import family_of
from vlmrun.models.model import Model, assemble, read_catalogue, shapes_only

Tensors = Mapping[str, tuple[str, Sequence[int]]]  # name -> safetensors dtype, shape

SIGLIP, ONEVISION, ONEVISION_7B = (  # the packaged shapes of the real models
    read_catalogue()[ALIASES[alias]]["config"]
    for alias in ("siglip", "llava-onevision-0.5b", "llava-onevision-7b")
)
TINY_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
TINY_TEXT = {
    "model_type": "siglip_text_model",
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_size": 16,
    "vocab_size": 50,
    "max_position_embeddings": 16,
}
TINY_SIGLIP = {"model_type": "siglip", "vision_config": TINY_VISION, "text_config": TINY_TEXT}
TINY_ONEVISION = {
    "model_type": "llava_onevision",
    "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]],
    "text_config": {
        "model_type": "qwen2",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 301,
        "tie_word_embeddings": True,
    },
    "tie_word_embeddings": False,
    "vision_config": {**TINY_VISION, "vision_use_head": False},
}
HUB_ONEVISION = {  # start of a module path -> start of its name in llava-hf's files
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.": "",
}
ROOMY = Budget(1 << 40, "for a test", 1 << 40, "for a test", Threads(2, "for a test"))


def changed(config: Mapping[str, Any], section: str, **values: Any) -> dict[str, Any]:
    """A copy of a configuration with other values in one section ("" = the top level)."""
    if not section:
        return {**config, **values}
    return {**config, section: {**config[section], **values}}


def source(name: str = "a-model", folder: Path | None = None) -> Source:
    return Source(name, name, None, None, folder, folder is not None)


def model_of(config: Mapping[str, Any], dtype: str = "bfloat16") -> Model:
    """A model that lies nowhere, as the packaged catalogue gives it."""
    checkpoint = shapes_only(family_of(config).architecture(config), dtype)
    return assemble(source(), config, checkpoint)


def storage(dtype: Dtype = Dtype.bfloat16, *, device: str = "cpu") -> Storage:
    return Storage(dtype, "for a test", Dtype.float32, "for a test", device, "for a test")


def module_tensors(config: Mapping[str, Any], dtype: str = "F32") -> dict[str, tuple[str, Any]]:
    """Every tensor a configuration needs, by module path; a tied head is left out, as in files."""
    architecture = family_of(config).architecture(config)
    return {
        path: (dtype, shape)
        for block in architecture.blocks
        for path, shape in block.tensors.items()
        if path not in architecture.ties.values()
    }


def renamed(path: str, renames: Mapping[str, str]) -> str:
    """A module's path by another name: the first start that fits is replaced."""
    for start, other in renames.items():
        if path.startswith(start):
            return other + path.removeprefix(start)
    return path


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """A weight file whose every tensor is filled with its own number, byte by byte."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for at, (name, (dtype, shape)) in enumerate(tensors.items(), start=1):
        end = len(data) + math.prod(shape) * ITEMSIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), end]}
        data += bytes([at % 256]) * (end - len(data))
    write_header(path, header, data)


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_index(folder: Path, weight_map: object) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def words(error: VlmrunError) -> str:
    """What the user sees of an error: one line, and one of what to do about it."""
    assert str(error) == error.message
    assert error.hint
    assert "\n" not in error.message + error.hint
    return f"{error.message} | {error.hint}"
