"""`--dtype int8`: matrices of linear layers and nothing else, of every family. The answers are
those of the float32 model whose matrices are what the numbers stand for, wherever layers lie."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Command
from entries import RESIDENCIES, Ready, build_cut_head, load_tiny, noise, plan_tiny, trace
from folders import WEIGHTS, Tensors, copied, model_at, weights
from safetensors.torch import load_file
from tiny import build_onevision, build_siglip, build_siglip_vision, build_vipllava
from tiny_llava import build_joycaption, build_llava, build_llava_next
from tiny_naflex import build_naflex
from tiny_paligemma import build_paligemma
from torch import Tensor, nn

import vlmrun as package
from vlmrun.errors import CheckpointError, UsageError
from vlmrun.load import build_skeleton
from vlmrun.memory.plan import Tier
from vlmrun.models.checkpoints.dtype import LOSSY, Dtype
from vlmrun.models.model import Model
from vlmrun.tasks.caption import encode_pictures
from vlmrun.tasks.decode import DecodeRow
from vlmrun.tasks.embed import embed_images, embed_texts
from vlmrun.tasks.preprocess import PicturePreprocessor
from vlmrun.tasks.vision import squares


def build_mixed(folder: Path) -> Path:
    """Norms in float32, the rest in bfloat16: a step of a block takes its vectors to be alike."""

    def change(tensors: Tensors) -> None:
        for key, tensor in tensors.items():
            if "layernorm" in key:
                tensors[key] = tensor.float() * 1.001  # no longer what bfloat16 holds

    whole = build_onevision(folder.with_name("whole"), dtype="bfloat16")
    return copied(whole, folder, weights(change))


BUILDS: Mapping[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "siglip": (build_siglip, {}),
    "siglip of halves": (build_siglip, {"dtype": "bfloat16"}),
    "siglip tower": (build_siglip_vision, {}),
    "naflex": (build_naflex, {}),
    "onevision": (build_onevision, {}),
    "onevision, head in pieces": (build_cut_head, {"dtype": "float16"}),
    "onevision, untied": (build_onevision, {"tied": False}),
    "onevision of halves, norms of float32": (build_mixed, {}),
    "llava 1.5": (build_llava, {"decoder": {"attention_bias": True, "mlp_bias": True}}),
    "llava next": (build_llava_next, {"decoder": {"model_type": "mistral"}}),
    "joycaption": (build_joycaption, {}),
    "paligemma": (build_paligemma, {}),
    "paligemma 2": (build_paligemma, {"version": 2}),
}
CAPTIONS = [name for name in BUILDS if "siglip" not in name and name != "naflex"]
EMBEDS = ["siglip", "siglip of halves", "siglip tower"]
AS_STORED = ("embeddings", "head.mlp", "head.attention")  # of a tower: patches, and the pooling


@dataclass(frozen=True, slots=True)
class Folders:
    make: Callable[[str], Path]
    rounded: Callable[[str], Path]


def by_the_definition(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and scales, in plain torch."""
    wide = matrix.float()
    scale = wide.abs().max(dim=1).values / 127
    return torch.clamp(torch.round(wide / scale[:, None]), -127, 127), scale


def linear_paths(model: Model) -> set[str]:
    """Weights of the modules that transformers makes linear, without those that stay."""
    with torch.device("meta"):
        skeleton = build_skeleton(model, {})
    return {
        f"{name}.weight"
        for name, each in skeleton.named_modules()
        if type(each) is nn.Linear and not any(part in name for part in AS_STORED)
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Of every build the checkpoint, and one in float32 whose matrices stand for the numbers."""

    @lru_cache
    def make(name: str) -> Path:
        build, options = BUILDS[name]
        return build(tmp_path_factory.mktemp("int8") / "model", **options)

    @lru_cache
    def rounded(name: str) -> Path:
        quantised = {w.key for layer in model_at(make(name)).layers for w in quantised_of(layer)}

        def change(tensors: Tensors) -> None:
            for key, tensor in tensors.items():
                tensors[key] = tensor.float()
                if key in quantised:
                    numbers, scale = by_the_definition(tensor)
                    tensors[key] = numbers * scale[:, None]

        return copied(make(name), tmp_path_factory.mktemp("rounded"), weights(change))

    return Folders(make, rounded)


def quantised_of(layer: Any) -> list[Any]:
    return [weight for weight in layer.weights if weight.quantised]


def logits(folder: Path, **options: Any) -> Tensor:
    """Of a greedy run over two prompts of different length, each about a picture."""
    ready = load_tiny(folder, **options)
    image = ready.model.config.get("image_token_index", 9)
    rows = []
    for seed, text in ((1, (3, 4)), (2, (5, 6, 7, 3, 4))):
        pictures = PicturePreprocessor(ready.model).pictures([noise(seed, 40, 30)])
        [features] = encode_pictures(ready.entry, ready.model.architecture, [pictures])
        ids = (2, *(image,) * sum(pictures.tokens), *text)
        rows.append(DecodeRow(ids, features, seed=seed))
    return trace(ready, rows, pad=0, image=image)


def vectors(folder: Path, **options: Any) -> Tensor:
    ready = load_tiny(folder, texts=(folder / "tokenizer_config.json").exists(), **options)
    pixels = torch.rand(2, 3, 28, 28, generator=torch.Generator().manual_seed(1)) * 2 - 1
    found = embed_images(ready.entry, ready.model.architecture, squares(pixels), "pooled")
    if ready.model.architecture.text is not None:
        ids = torch.randint(2, 200, (2, 16), generator=torch.Generator().manual_seed(8))
        found = [*found, *embed_texts(ready.entry, ids)]
    return torch.stack(found)


@pytest.mark.parametrize("name", BUILDS)
def test_what_is_quantised_is_what_transformers_makes_linear(folders: Folders, name: str) -> None:
    model = model_at(folders.make(name))
    found = {w.path for layer in model.layers for w in quantised_of(layer)}
    pieces = {path for path in found if ".blocks." in path}
    assert found - pieces | ({"lm_head.weight"} if pieces else set()) == linear_paths(model)


@pytest.mark.parametrize("name", BUILDS)
def test_what_is_held_is_the_definitions_and_the_rest_as_stored(
    folders: Folders, name: str
) -> None:
    """Bit by bit, and no byte more than is planned; a tied table once, as the head."""
    ready = load_tiny(folders.make(name), dtype="int8", compute="float32")
    tensors = load_file(folders.make(name) / WEIGHTS)
    held = 0
    for phase in ready.plan.workload.phases:
        with ready.entry.use(phase) as module:
            for use in ready.plan.placements:
                if use.layer.gathered or use.runs_in != phase:
                    continue
                for weight in use.layer.weights:
                    held += check_weight(module, weight, tensors)
    assert held == sum(use.nbytes for use in ready.plan.placements if not use.layer.gathered)
    assert ready.entry.resident_bytes == held == ready.plan.tier_bytes(Tier.RAM, phase)


def check_weight(module: nn.Module, weight: Any, tensors: Tensors) -> int:
    """Hold a weight to the file; gives its bytes, with those of its scales."""
    filed = tensors[weight.key]
    filed = filed if weight.rows is None else filed[slice(*weight.rows)]
    found = module.get_parameter(weight.path)
    if not weight.quantised:
        assert torch.equal(found.view(filed.shape), filed), weight.path
        assert found.dtype == filed.dtype
        return found.nbytes
    numbers, scale = by_the_definition(filed)
    kept = module.get_submodule(weight.path.removesuffix(".weight")).scale
    assert found.dtype == torch.int8
    assert torch.equal(found.float(), numbers), weight.path
    assert torch.equal(kept, scale), weight.path
    return found.nbytes + kept.nbytes


@pytest.mark.parametrize("name", [*CAPTIONS, *EMBEDS])
def test_answers_are_those_of_what_the_numbers_stand_for(folders: Folders, name: str) -> None:
    """And bit for bit the same wherever the layers lie."""
    run = logits if name in CAPTIONS else vectors
    expected = run(folders.rounded(name), dtype="float32", compute="float32")
    found = run(folders.make(name), dtype="int8", compute="float32")
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    for resident in RESIDENCIES[2::2]:
        parts = run(folders.make(name), dtype="int8", compute="float32", resident=resident)
        assert torch.equal(parts, found), resident


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_halves_compute_with_it(folders: Folders, compute: str) -> None:
    expected = vectors(folders.rounded("siglip"), dtype="float32", compute="float32")
    found = [
        vectors(folders.make("siglip"), dtype="int8", compute=compute, resident=resident)
        for resident in ("100%", "0%")
    ]
    assert torch.equal(*found)
    assert nn.functional.cosine_similarity(found[0], expected).min() > 0.99


def test_a_token_table_of_its_own_keeps_its_numbers(folders: Folders) -> None:
    """Where it is tied to the head, its rows are the head's."""
    for name in ("onevision", "onevision, untied"):
        ready = load_tiny(folders.make(name), dtype="int8", compute="float32")
        table = load_file(folders.make(name) / WEIGHTS)["language_model.model.embed_tokens.weight"]
        if name == "onevision":
            numbers, scale = by_the_definition(table)
            table = numbers * scale[:, None]
        ids = torch.tensor([[3, 407, 3, 0]])
        with ready.entry.use("decode") as module:
            assert torch.equal(module.model.language_model.embed_tokens(ids), table[ids])


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_plans_say_that_it_is_lossy_and_compute_as_for_floats(tmp_path: Path, stored: str) -> None:
    model = model_at(build_siglip(tmp_path / stored, dtype=stored))
    mine, floats = (
        plan_tiny(model, dtype=dtype, compute="auto").storage for dtype in ("int8", "auto")
    )
    assert (mine.dtype, mine.dtype_reason) == (Dtype.int8, LOSSY)
    assert floats.dtype is Dtype(stored)
    assert (mine.compute_dtype, mine.compute_reason) == (
        floats.compute_dtype,
        floats.compute_reason,
    )


def test_nothing_computes_in_int8(folders: Folders) -> None:
    with pytest.raises(UsageError, match="--compute-dtype int8"):
        plan_tiny(model_at(folders.make("siglip")), compute="int8")


def test_numbers_that_are_not_finite_are_refused(folders: Folders, tmp_path: Path) -> None:
    key = "vision_model.encoder.layers.1.mlp.fc1.weight"

    def change(tensors: Tensors) -> None:
        tensors[key][3, 5] = torch.inf

    folder = copied(folders.make("siglip"), tmp_path, weights(change))
    with pytest.raises(CheckpointError, match=f"{key} holds numbers that are not finite"):
        vectors(folder, dtype="int8")


def test_reads_while_streaming_are_those_of_the_file(folders: Folders) -> None:
    ready: Ready = load_tiny(folders.make("siglip"), dtype="int8", resident="0%")
    file = load_file(folders.make("siglip") / WEIGHTS)
    expected = sum(
        file[weight.key].nbytes * (weight.numel / file[weight.key].numel())
        for use in ready.plan.placements
        for weight in use.layer.weights
    )
    pixels = torch.zeros(1, 3, 28, 28)
    for times in (1, 2):
        embed_images(ready.entry, ready.model.architecture, squares(pixels), "pooled")
        assert ready.entry.bytes_read == times * expected


def test_what_a_shell_sees(vlmrun: Command) -> None:
    """Plans and rows say it; the packaged tower's vectors are next to those of its floats."""
    pictures = sorted((Path(package.__file__).parent / "data/pictures").glob("*.png"))[:3]
    text = vlmrun("mem-plan", "-m", "demo-siglip", "--dtype", "int8")
    assert f"int8 ({LOSSY})" in " ".join(text.text.split())
    fields = json.loads(vlmrun("mem-plan", "-m", "demo-siglip", "--dtype", "int8", "--json").out)
    assert (fields["dtype"], fields["dtype_reason"]) == ("int8", LOSSY)
    found = {}
    for dtype in ("int8", "float32"):
        done = vlmrun("embed", "-m", "demo-siglip", "--dtype", dtype, *pictures, "--json")
        rows = done.rows
        assert {row["dtype"] for row in rows} == {dtype}
        found[dtype] = np.array([row["embedding"] for row in rows])
    assert np.sum(found["int8"] * found["float32"], axis=1).min() > 0.999


def test_an_untested_model_has_no_int8(vlmrun: Command, tmp_path: Path) -> None:
    folder = build_vipllava(tmp_path / "model")
    done = vlmrun("caption", "-m", folder, "--allow-untested", "--dtype", "int8", __file__)
    assert done.code == 2
    assert "--dtype int8: an untested model is loaded by transformers, in floats" in done.err
