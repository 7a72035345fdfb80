"""F-14 (transformers#39972, unsloth#4014): where float16 overflows, the row says in which layer,
and gives no text made of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import Command
from entries import Ready, load_tiny, noise, prompted, rows_of
from folders import copied, picture, weights
from tiny import SPECIAL
from torch import Tensor

from vlmrun.tasks.decode import DecodeRow
from vlmrun.tasks.overflow import first_overflow, overflow_of_answer, prefill

HALF = ("--compute-dtype", "float16")
IMAGE = SPECIAL["<image>"]
DECODER = "language_model.model.layers"
TOWER = "vision_model.encoder.layers"


def scaled(end: str, factor: float = 5e4) -> Callable[[Path], None]:
    """Multiply the one tensor whose name ends so: float16 holds it, but not what it gives."""

    def scale(tensors: dict[str, Tensor]) -> None:
        [name] = [name for name in tensors if name.endswith(end)]
        tensors[name] *= factor
        assert tensors[name].abs().max() < torch.finfo(torch.float16).max

    return weights(scale)


@pytest.fixture
def grey(tmp_path: Path) -> Path:
    picture(28, 28).point(lambda _: 128).save(tmp_path / "grey.png")
    return tmp_path / "grey.png"


@pytest.mark.parametrize(
    ("end", "layer"),
    [
        (f"{TOWER}.1.mlp.fc2.weight", "vision.layers.1"),
        ("multi_modal_projector.linear_2.weight", "projector"),
        (f"{DECODER}.0.self_attn.o_proj.weight", "decoder.layers.0"),
        (f"{DECODER}.2.mlp.down_proj.weight", "decoder.layers.2"),
    ],
)
def test_a_caption_names_the_layer(
    end: str, layer: str, vlmrun: Command, tiny_onevision: Path, tmp_path: Path, grey: Path
) -> None:
    folder = copied(tiny_onevision, tmp_path / "m", scaled(end))
    told = vlmrun("caption", "-m", folder, grey, "--json", "--resident", "0%", *HALF)
    assert told.code == 1
    assert told.rows[0]["error"] == {
        "type": "NotFinite",
        "message": f"the output of {layer} is not finite: the arithmetic overflowed; "
        "try --compute-dtype float32",
    }
    assert vlmrun("caption", "-m", folder, grey, "--compute-dtype", "float32").code == 0


@pytest.mark.parametrize(
    ("end", "source", "layer"),
    [
        (f"{TOWER}.2.mlp.fc2.weight", "picture", "vision.layers.2"),
        ("vision_model.head.mlp.fc2.weight", "picture", "vision.head"),
        ("text_model.encoder.layers.1.mlp.fc1.weight", "text", "text.layers.1"),
    ],
)
def test_a_vector_names_the_layer(
    end: str,
    source: str,
    layer: str,
    vlmrun: Command,
    tiny_siglip: Path,
    tmp_path: Path,
    grey: Path,
) -> None:
    """The other input has its vector."""
    folder = copied(tiny_siglip, tmp_path / "m", scaled(end))
    told = vlmrun("embed", "-m", folder, grey, "--text", "a cat", "--json", *HALF)
    assert told.code == 3
    seen, said = told.rows
    failed, fine = (seen, said) if source == "picture" else (said, seen)
    assert f"the output of {layer} is not finite" in failed["error"]["message"]
    assert len(fine["embedding"]) == 48


@pytest.mark.parametrize("command", ["caption", "embed"])
def test_other_rows_go_on(
    command: str,
    vlmrun: Command,
    tiny_onevision: Path,
    tiny_siglip: Path,
    tmp_path: Path,
    grey: Path,
) -> None:
    """Of one batch, the bright picture fails alone."""
    sound = tiny_onevision if command == "caption" else tiny_siglip
    folder = copied(sound, tmp_path / "m", scaled("patch_embedding.weight", 1e5))
    white = tmp_path / "white.png"
    picture(28, 28).point(lambda _: 255).save(white)
    argv = (command, "-m", folder, "--json", "-b", "3", *HALF)
    told = vlmrun(*argv, grey, white, grey)
    assert told.code == 3
    assert [row.get("error", {}).get("type") for row in told.rows] == [None, "NotFinite", None]
    assert "the output of vision.embeddings" in told.rows[1]["error"]["message"]
    assert "!!!!" not in told.text
    field = "caption" if command == "caption" else "embedding"
    assert told.rows[0][field] == told.rows[2][field] == vlmrun(*argv, grey).rows[0][field]


@pytest.fixture
def ready(tiny_onevision: Path) -> Ready:
    return load_tiny(tiny_onevision, resident="50%")


def row_of(ready: Ready) -> tuple[DecodeRow, Callable[..., str | None]]:
    """A row about a picture, and how to ask which layer overflows for one like it."""
    asked = prompted(ready.model, [noise(1)])
    [row] = rows_of(ready, [asked])
    assert asked.pictures is not None

    def overflow(other: DecodeRow, tokens: list[int]) -> str | None:
        return overflow_of_answer(
            ready.entry, ready.model, asked.pictures, other, tokens, placeholder_id=IMAGE
        )

    return row, overflow


def test_a_token_that_overflows_is_found_behind_the_prompt(
    tiny_onevision_untied: Path, tmp_path: Path
) -> None:
    def scale(tensors: dict[str, Tensor]) -> None:
        tensors["language_model.model.embed_tokens.weight"][77] *= 1e6

    folder = copied(tiny_onevision_untied, tmp_path, weights(scale))
    ready = load_tiny(folder, compute="float16")
    row, overflow = row_of(ready)
    assert overflow(row, [5]) is None
    assert overflow(row, [5, 77]) == "decoder.tokens"


def test_what_is_finite_names_no_layer(ready: Ready) -> None:
    """Nothing is known then, and nothing is said: features that are no longer what they were."""
    row, overflow = row_of(ready)
    assert overflow(row, []) is None
    assert row.features is not None
    assert overflow(replace(row, features=row.features * torch.inf), []) is None


def test_looking_again_leaves_no_hook_and_changes_nothing(ready: Ready) -> None:
    row, overflow = row_of(ready)
    with ready.entry.use("decode") as module:
        before = sum(len(each._forward_hooks) for each in module.modules())
    overflow(row, [])
    found = prefill(ready.entry, ready.model, row, [], IMAGE)
    with pytest.raises(OSError, match="stop"):
        first_overflow(ready.entry, ready.model, "decode", fail)
    assert before == sum(len(each._forward_hooks) for each in module.modules())
    assert torch.equal(found, prefill(ready.entry, ready.model, row, [], IMAGE))


def fail() -> None:
    raise OSError("stop")
