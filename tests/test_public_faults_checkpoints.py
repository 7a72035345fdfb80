"""Faults that others reported of checkpoints, each by its number in the list of public faults or by
the row of transformers' edge cases, and what is right instead."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command, Done, assert_refused
from entries import load_tiny, plan_tiny
from folders import WEIGHTS, Change, Tensors, copied, picture, replaced, setting, weights, without
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)]
BIAS = "vision_model.post_layernorm.bias"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    picture(60, 40).save(path)
    return path


def embedded(vlmrun: Command, folder: Path, image: Path, *flags: object) -> list[float]:
    told = vlmrun("embed", "-m", folder, "--json", image, *flags)
    assert told.code == 0, told.err
    vector: list[float] = told.rows[0]["embedding"]
    return vector


def refused(vlmrun: Command, folder: Path, image: Path) -> Done:
    return vlmrun("embed", "-m", folder, image)


def in_shards(folder: Path) -> None:
    """The one file of a folder in four, and their index."""
    tensors = load_file(folder / WEIGHTS)
    file_of = {name: SHARDS[at % 4] for at, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        save_file(
            {name: tensors[name] for name in tensors if file_of[name] == shard}, folder / shard
        )
    (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))
    (folder / WEIGHTS).unlink()


def test_f10_every_missing_shard_is_named(
    vlmrun: Command, tiny_siglip: Path, tmp_path: Path, image: Path
) -> None:
    """vllm#34859, #34930, sglang#32279: a shard is missing, and the server runs on garbage."""
    folder = copied(tiny_siglip, tmp_path / "m", in_shards)
    assert embedded(vlmrun, folder, image) == embedded(vlmrun, tiny_siglip, image)
    for shard in SHARDS[1:3]:
        (folder / shard).unlink()
    told = refused(vlmrun, folder, image)
    assert_refused(told, "2 of 4 shards are missing", *SHARDS[1:3], hint="download them")


def test_row_an_index_that_lacks_tensors(
    vlmrun: Command, tiny_siglip: Path, tmp_path: Path, image: Path
) -> None:
    """Loads, with tensors drawn at random. Here a tensor is found where it lies, whatever the
    index forgot, and one that lies nowhere is named."""
    folder = copied(tiny_siglip, tmp_path / "m", in_shards)
    listed = json.loads((folder / INDEX).read_text())["weight_map"]
    lost = listed.pop(BIAS)
    (folder / INDEX).write_text(json.dumps({"weight_map": listed}))
    assert embedded(vlmrun, folder, image) == embedded(vlmrun, tiny_siglip, image)
    tensors = load_file(folder / lost)
    save_file({name: tensors[name] for name in tensors if name != BIAS}, folder / lost)
    assert_refused(refused(vlmrun, folder, image), "1 tensor is missing from the checkpoint", BIAS)


def test_row_an_index_that_names_more_than_its_shards_hold(
    vlmrun: Command, tiny_siglip: Path, tmp_path: Path, image: Path
) -> None:
    folder = copied(tiny_siglip, tmp_path / "m", in_shards)
    listed = json.loads((folder / INDEX).read_text())["weight_map"]
    listed["nowhere"] = SHARDS[0]
    (folder / INDEX).write_text(json.dumps({"weight_map": listed}))
    told = refused(vlmrun, folder, image)
    assert_refused(told, f"lists nowhere in {SHARDS[0]}, which does not hold it")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 399656\n"


@pytest.mark.parametrize(
    ("damage", "says", "hint"),
    [
        (lambda f: os.truncate(f / WEIGHTS, 40_000), "is truncated: 40000 bytes on disk", "again"),
        (replaced(WEIGHTS, POINTER), "is a Git-LFS pointer, not the weights", "git lfs pull"),
        (replaced(WEIGHTS, b"\0\0\0\0"), "(4 bytes) is not a safetensors file", "again"),
    ],
    ids=["truncated", "pointer", "four bytes"],
)
def test_row_a_file_that_is_not_whole(
    vlmrun: Command,
    tiny_siglip: Path,
    tmp_path: Path,
    image: Path,
    damage: Change,
    says: str,
    hint: str,
) -> None:
    """Three wordings of SafetensorError; none names the size or Git-LFS."""
    folder = copied(tiny_siglip, tmp_path / "m", damage)
    assert_refused(refused(vlmrun, folder, image), WEIGHTS, says, hint=hint)


def test_row_no_format_in_the_metadata(
    vlmrun: Command, tiny_siglip: Path, tmp_path: Path, image: Path
) -> None:
    def plain(folder: Path) -> None:
        save_file(load_file(folder / WEIGHTS), folder / WEIGHTS)

    folder = copied(tiny_siglip, tmp_path / "m", plain)
    assert b"__metadata__" not in (folder / WEIGHTS).read_bytes()[:2000]
    assert embedded(vlmrun, folder, image) == embedded(vlmrun, tiny_siglip, image)


def test_row_old_position_ids_are_ignored_and_other_keys_are_not(
    vlmrun: Command, tiny_siglip: Path, tmp_path: Path, image: Path
) -> None:
    """Old files hold a buffer that is no weight; any other surplus is of another model."""
    ids = {"vision_model.embeddings.position_ids": torch.arange(16)[None]}
    folder = copied(tiny_siglip, tmp_path / "old", weights(lambda t: t.update(ids)))
    assert embedded(vlmrun, folder, image) == embedded(vlmrun, tiny_siglip, image)
    more = weights(lambda tensors: tensors.update(surprise=torch.ones(3)))
    folder = copied(tiny_siglip, tmp_path / "more", more)
    assert_refused(refused(vlmrun, folder, image), "does not account for: surprise")


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize("resident", ["100%", "0%"])
def test_row_bin_alone(
    vlmrun: Command, tiny_siglip: Path, tmp_path: Path, image: Path, resident: str
) -> None:
    folder = copied(tiny_siglip, tmp_path / "m", pickled)
    told = vlmrun("embed", "-m", folder, "--json", image, "--resident", resident)
    assert told.code == 0, told.err
    assert told.rows[0]["embedding"] == embedded(vlmrun, tiny_siglip, image)
    assert "a pickle: tensors only, no code is run" in told.err


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_row_bin_with_code(vlmrun: Command, tiny_siglip: Path, tmp_path: Path, image: Path) -> None:
    """Refused, and the code has not run."""

    def armed(folder: Path) -> None:
        state = {**load_file(folder / WEIGHTS), "payload": Payload(tmp_path / "ran")}
        torch.save(state, folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()

    folder = copied(tiny_siglip, tmp_path / "m", armed)
    assert_refused(refused(vlmrun, folder, image), "pytorch_model.bin", "mkdir")
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()  # it would have


@pytest.mark.parametrize(
    "size", [{"height": 56, "width": 56}, {"height": 14, "width": 56}, {"height": 56, "width": 14}]
)
def test_row_pictures_of_another_size_than_the_tower(
    vlmrun: Command, tiny_siglip: Path, tmp_path: Path, image: Path, size: dict[str, int]
) -> None:
    """A RuntimeError on adding positions; and no error at all, with wrong positions, where the
    number of patches is the same: 14x56 has the sixteen of 28x28."""
    change = setting("preprocessor_config.json", size=size)
    folder = copied(tiny_siglip, tmp_path / "m", change)
    said = f'size is {{"height": {size["height"]}, "width": {size["width"]}}}'
    assert_refused(refused(vlmrun, folder, image), said, "config.json's image_size 28")


def asked(vlmrun: Command, folder: Path, image: Path, *flags: object) -> Done:
    return vlmrun("caption", "-m", folder, image, "--max-new-tokens", "2", *flags)


def test_row_image_tokens_without_a_picture(
    vlmrun: Command, tiny_onevision: Path, image: Path
) -> None:
    """Generates from the placeholder's own vector."""
    told = asked(vlmrun, tiny_onevision, image, "-p", "what is <image>?")
    assert_refused(told, "the prompt holds <image>, which stands for a picture", code=2)


def test_row_a_picture_without_image_tokens(
    vlmrun: Command, tiny_onevision: Path, tmp_path: Path, image: Path
) -> None:
    change = replaced("chat_template.jinja", b"{{ messages[0]['role'] }}")
    folder = copied(tiny_onevision, tmp_path / "m", change)
    told = asked(vlmrun, folder, image)
    assert_refused(told, "the chat template makes 0 places for 1 pictures")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_row_weights_of_other_dtypes(
    vlmrun: Command, tiny_siglip: Path, tmp_path: Path, image: Path, dtype: torch.dtype
) -> None:
    """fp64 and fp8 without its scales are cast without a word, and fp8 is garbage then."""

    def change(tensors: Tensors) -> None:
        name = "vision_model.encoder.layers.0.mlp.fc1.weight"
        tensors[name] = tensors[name].to(dtype)

    folder = copied(tiny_siglip, tmp_path / "m", weights(change))
    told = refused(vlmrun, folder, image)
    assert_refused(told, "layers.0.mlp.fc1.weight is stored as", hint="F32, BF16 or F16")


def test_row_a_head_that_is_missing_is_not_drawn(
    vlmrun: Command, tiny_siglip: Path, tmp_path: Path, image: Path
) -> None:
    """transformers logs a missing pooling head and embeds with a random one."""
    names = [
        name for name in load_file(tiny_siglip / WEIGHTS) if name.startswith("vision_model.head.")
    ]
    change = weights(lambda tensors: [tensors.pop(name) for name in names])
    folder = copied(tiny_siglip, tmp_path / "m", change)
    told = refused(vlmrun, folder, image)
    words = f"{len(names)} tensors are missing from the checkpoint: vision_model.head."
    assert_refused(told, words, "head.attention.in_proj_bias")


def test_row_image_settings_are_not_guessed(
    vlmrun: Command, tiny_onevision: Path, tmp_path: Path, image: Path
) -> None:
    """Without the file, transformers takes its class's means, which are CLIP's: wrong colours."""
    folder = copied(tiny_onevision, tmp_path / "none", without("preprocessor_config.json"))
    assert_refused(asked(vlmrun, folder, image), "preprocessor_config.json is missing")
    change = setting("preprocessor_config.json", image_mean=None, image_std=None)
    folder = copied(tiny_onevision, tmp_path / "part", change)
    assert_refused(asked(vlmrun, folder, image), "does not say image_mean, image_std")


def test_row_memory_of_a_tied_table_counts_once(tiny_onevision: Path) -> None:
    """`state_dict()` lists head and table; sums over it count 272 MB of OneVision-0.5B twice."""
    plan = plan_tiny(load_tiny(tiny_onevision).model)
    stored = sum(tensor.nbytes for tensor in load_file(tiny_onevision / WEIGHTS).values())
    assert sum(placement.nbytes for placement in plan.placements) <= stored
