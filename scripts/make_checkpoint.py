#!/usr/bin/env python3
"""Writes a checkpoint of a real shape with random weights, for benchmarks and slow proofs.

    make_checkpoint.py MODEL FOLDER [--dtype DTYPE] [--layers N]

MODEL is siglip, llava-onevision-0.5b or llava-onevision-7b. Configuration and shapes are those of
the packaged catalogue, key names those of the hub, in shards of 5 GB. Weights are drawn and
written piece by piece, so a model of any size fits in memory. Processor and tokenizer files are
the packaged demo's, fitted to the configuration; every token that the demo's tokenizer lacks
decodes to a word of its own, so that different captions read differently.
"""

import argparse
import json
import math
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vlmrun.models.checkpoints.dtype import SAFETENSORS, Dtype
from vlmrun.models.checkpoints.source import ALIASES, DATA, DEMOS
from vlmrun.models.families import family_of
from vlmrun.models.layer import Shape
from vlmrun.models.model import read_catalogue
from vlmrun.models.towers import filed_shapes

SHARD_BYTES = 5_000_000_000
PIECE = 1 << 22  # numbers drawn at a time
HUB_NAMES = {  # start of a module path -> start of its name in llava-hf's files
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.": "",
}
Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=ALIASES)
    parser.add_argument("folder", type=Path)
    stored = [str(dtype) for dtype in SAFETENSORS.values()]
    parser.add_argument("--dtype", choices=stored, help="default: the hub's")
    parser.add_argument("--layers", type=int, help="at most so many blocks in each tower")
    given = parser.parse_args()
    entry = read_catalogue()[ALIASES[given.model]]
    dtype = Dtype(given.dtype or entry["dtype"])
    config = cut(json.loads(json.dumps(entry["config"])), given.layers)
    given.folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    total_bytes = write_weights(given.folder, hub_tensors(config), dtype)
    write_json(given.folder / "config.json", {**config, "torch_dtype": str(dtype)})
    write_processor(given.folder, config)
    seconds = time.perf_counter() - started
    print(
        f"{given.folder}: {total_bytes / 1e9:.2f} GB of {dtype}, {seconds:.0f} s", file=sys.stderr
    )


def cut(config: Json, layers: int | None) -> Json:
    for part in ("vision_config", "text_config"):
        if layers is not None:
            config[part]["num_hidden_layers"] = min(layers, config[part]["num_hidden_layers"])
    return config


def hub_tensors(config: Json) -> dict[str, Shape]:
    """Names as in the hub's files, with shapes; a tied head is left out, as there."""
    architecture = family_of(config).architecture(config)
    paths = {path: shape for block in architecture.blocks for path, shape in block.tensors.items()}
    shared = set(architecture.ties.values())
    filed = filed_shapes({path: shape for path, shape in paths.items() if path not in shared})
    return {hub_name(path): shape for path, shape in filed.items()}


def hub_name(path: str) -> str:
    for start, name in HUB_NAMES.items():
        if path.startswith(start):
            return name + path.removeprefix(start)
    return path


def write_weights(folder: Path, tensors: Mapping[str, Shape], dtype: Dtype) -> int:
    """Write all shards, and their index where there is more than one; returns their bytes."""
    shards: list[dict[str, Shape]] = [{}]
    filled_bytes = total_bytes = 0
    for name, shape in sorted(tensors.items()):
        nbytes = math.prod(shape) * dtype.itemsize
        if filled_bytes and filled_bytes + nbytes > SHARD_BYTES:
            shards.append({})
            filled_bytes = 0
        shards[-1][name] = shape
        filled_bytes += nbytes
        total_bytes += nbytes
    files = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, shard in zip(files, shards, strict=True):
        with (folder / file).open("wb") as out:
            write_shard(out, shard, dtype)
    if len(shards) > 1:
        weight_map = {
            name: file for file, shard in zip(files, shards, strict=True) for name in shard
        }
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
    return total_bytes


def write_shard(out: BinaryIO, tensors: Mapping[str, Shape], dtype: Dtype) -> None:
    """One file: length of the header, header, data (https://github.com/huggingface/safetensors)."""
    spelled = next(name for name, known in SAFETENSORS.items() if known is dtype)
    header: Json = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": spelled, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for name, shape in tensors.items():
        for piece in draw(name, shape):
            out.write(store(piece, dtype).tobytes())


def draw(name: str, shape: Shape) -> Iterator[np.ndarray]:
    """Float32 numbers seeded by the name, of a size that keeps what passes through as it is.

    Queries and keys are wider, so that attention chooses and the caption depends on the picture.
    """
    source = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
    centre, spread = float("norm" in name and name.endswith("weight")), 0.1
    if len(shape) > 1 and "embed" not in name:
        spread = (3 if "q_proj" in name or "k_proj" in name else 1) / math.prod(shape[1:]) ** 0.5
    left = math.prod(shape)
    while left:
        piece = source.standard_normal(min(left, PIECE), dtype=np.float32)
        yield centre + spread * piece
        left -= piece.size


def store(numbers: np.ndarray, dtype: Dtype) -> np.ndarray:
    if dtype is not Dtype.bfloat16:
        return numbers.astype(dtype.value)
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to nearest even


def write_processor(folder: Path, config: Json) -> None:
    chats = family_of(config).task == "caption"
    demo = DATA / DEMOS["demo" if chats else "demo-siglip"]
    tokens = read_json(demo / "tokenizer_config.json")
    vocabulary = read_json(demo / "tokenizer.json")
    if chats:
        write_chat(folder, demo, config)
        tokens |= {"model_max_length": 32768, "bos_token": "<|im_start|>"}
        ids = widen(vocabulary, config)
        ends = {"bos": "<|im_start|>", "pad": "<|endoftext|>", "eos": "<|im_end|>"}
        generation = {f"{kind}_token_id": ids[token] for kind, token in ends.items()}
        write_json(folder / "generation_config.json", generation)
    else:
        tokens["model_max_length"] = 64
    image = read_json(demo / "preprocessor_config.json") | picture_settings(config)
    write_json(folder / "preprocessor_config.json", image)
    write_json(folder / "tokenizer_config.json", tokens)
    write_json(folder / "tokenizer.json", vocabulary)


def write_chat(folder: Path, demo: Path, config: Json) -> None:
    """The demo's chat template, and what OneVision's processor is told."""
    template = (demo / "chat_template.jinja").read_bytes()
    (folder / "chat_template.jinja").write_bytes(template)
    if config["model_type"] == "llava_onevision":
        vision = config["vision_config"]
        patches = (vision["image_size"] // vision["patch_size"]) ** 2
        processor = read_json(demo / "processor_config.json") | {"num_image_tokens": patches}
        write_json(folder / "processor_config.json", processor)


def picture_settings(config: Json) -> Json:
    """How the family's own image processor cuts pictures for the tower."""
    vision, kind = config["vision_config"], family_of(config).image_processors[0]
    if config["model_type"] == "siglip2":
        return {"image_processor_type": kind, "patch_size": 16, "max_num_patches": 256}
    if vision["model_type"] == "clip_vision_model" and config["model_type"] == "llava":
        kind = "CLIPImageProcessor"
    elif config["model_type"] in ("llava", "paligemma"):
        kind = "SiglipImageProcessor"
    side = vision["image_size"]
    square = {"height": side, "width": side}
    settings: Json = {"image_processor_type": kind, "size": square}
    if kind in ("CLIPImageProcessor", "LlavaNextImageProcessor"):
        settings |= {"size": {"shortest_edge": side}, "do_center_crop": True, "crop_size": square}
    grid = config.get("image_grid_pinpoints")
    return settings if grid is None else settings | {"image_grid_pinpoints": grid}


def widen(tokenizer: Json, config: Json) -> dict[str, int]:
    """Give the special tokens the configuration's ids, and every id below them a word."""
    special = [token["content"] for token in tokenizer["added_tokens"]]
    first = config["image_token_index"] - special.index("<image>")
    ids = {token: first + at for at, token in enumerate(special)}
    words = [word for word in tokenizer["model"]["vocab"] if word not in ids]
    words += [f"\u0120w{at}" for at in range(len(words), first)]  # \u0120 is how a space is spelled
    tokenizer["model"]["vocab"] = {word: at for at, word in enumerate(words)} | ids
    for token in tokenizer["added_tokens"]:
        token["id"] = ids[token["content"]]
    return ids


def read_json(file: Path) -> Json:
    value: Json = json.loads(file.read_text(encoding="utf-8"))
    return value


def write_json(file: Path, value: Json) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
