"""Which files of a model hold what, by their names alone."""

import re
from collections.abc import Collection

CONFIGURATIONS = ("config.json", "open_clip_config.json")
# what tells of a model before it is downloaded, and all that a run needs beside the weights
CONFIGURATION = (
    *CONFIGURATIONS,
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
)
ALL_BUT_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
OPEN_CLIP = "open_clip_model.safetensors"
SHARD = re.compile(r".*-\d{5}-of-\d{5}\.(safetensors|bin)")


def find_weights(names: Collection[str]) -> str | None:
    """Which of a folder's files holds its weights, or lists the files that do; None: none.

    transformers' names come first, safetensors before pickles; then open_clip's; then the only
    safetensors file there is, unless it is one shard of several.
    """
    for name in (SINGLE, INDEX, PICKLE, PICKLE_INDEX, OPEN_CLIP):
        if name in names:
            return name
    others = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    return others[0] if len(others) == 1 and not SHARD.fullmatch(others[0]) else None


def is_pickled(name: str) -> bool:
    """Whether a weight file, or the files that an index lists, are pickles."""
    return name.endswith((".bin", ".bin.index.json"))
