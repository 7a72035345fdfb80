"""`--allow-untested`: a model that no family runs, loaded whole and run by stock `generate()`."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from commands import Command, assert_refused
from folders import (
    WEIGHTS,
    Change,
    Tensors,
    all_of,
    copied,
    picture,
    replaced,
    setting,
    weights,
    without,
)

FLAGS = ("caption", "--allow-untested", "--max-new-tokens", "12")


@pytest.fixture(scope="module")
def vipllava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import build_vipllava

    return build_vipllava(tmp_path_factory.mktemp("untested") / "vipllava")


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "wide.png", tmp_path / "tall.png"]
    for path, size in zip(paths, [(60, 40), (30, 90)], strict=True):
        picture(*size).save(path)
    return paths


def stock_captions(folder: Path, pictures: list[Path], prompt: str) -> list[str]:
    """What transformers' documentation says to do."""
    from PIL import Image

    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    captions = []
    for path in pictures:
        content = [{"type": "image", "image": Image.open(path)}, {"type": "text", "text": prompt}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        starts = (inputs["input_ids"] == processor.tokenizer.bos_token_id).sum()
        assert starts == 2  # of the user and of the assistant; the tokenizer has not put a third
        made = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        tokens = made[0, inputs["input_ids"].shape[1] :]
        captions.append(processor.decode(tokens, skip_special_tokens=True).strip())
    return captions


def test_captions_equal_stock_generate(
    vlmrun: Command, vipllava: Path, pictures: list[Path]
) -> None:
    told = vlmrun(*FLAGS, "-m", vipllava, "--json", *pictures, "-p", "what is it?")
    assert told.code == 0
    note = "vlmrun: vipllava is untested: loaded whole, its working memory is not planned\n"
    assert told.err == note
    found = [row["caption"] for row in told.rows]
    assert found == stock_captions(vipllava, pictures, "what is it?")
    assert found[0] != found[1]
    assert {row["dtype"] for row in told.rows} == {"float32"}
    assert vlmrun(*FLAGS, "-q", "-m", vipllava, pictures[0]).err == ""


@pytest.mark.parametrize("flags", [["--dtype", "bf16"], ["--compute-dtype", "bf16"]])
def test_the_dtype_asked_for_is_the_one_it_runs_in(
    vlmrun: Command, vipllava: Path, pictures: list[Path], flags: list[str]
) -> None:
    (row,) = vlmrun(*FLAGS, "-m", vipllava, pictures[0], "--json", *flags).rows
    assert row["dtype"] == "bfloat16"


def test_sampling_follows_its_seed(vlmrun: Command, vipllava: Path, pictures: list[Path]) -> None:
    hot = [*FLAGS, "-m", vipllava, pictures[0], "--temperature", "2"]
    first, again, other = (vlmrun(*hot, "--seed", seed).out for seed in (1, 1, 2))
    assert first == again != other


def test_a_bad_picture_is_a_row_here_too(
    vlmrun: Command, vipllava: Path, pictures: list[Path]
) -> None:
    pictures[0].write_bytes(pictures[0].read_bytes()[:60])
    told = vlmrun(*FLAGS, "-m", vipllava, "--json", *pictures)
    assert told.code == 3
    assert [row.get("error", {}).get("type") for row in told.rows] == ["ImageError", None]


@pytest.mark.parametrize("flags", [[], ["--temperature", "1"]])
def test_overflow_is_a_row_and_no_caption(
    vlmrun: Command, vipllava: Path, pictures: list[Path], tmp_path: Path, flags: list[str]
) -> None:
    def scale(tensors: Tensors) -> None:
        tensors["model.vision_tower.embeddings.patch_embedding.weight"] *= 1e5

    folder = copied(vipllava, tmp_path / "large", weights(scale))
    assert vlmrun(*FLAGS, "-m", folder, pictures[0], *flags).code == 0
    told = vlmrun(*FLAGS, "-m", folder, pictures[0], "--json", "--dtype", "float16", *flags)
    assert told.code == 1
    (row,) = told.rows
    assert row["error"]["type"] == "NotFinite"
    assert "not finite" in row["error"]["message"]


def test_what_does_not_fit_exits_4(vlmrun: Command, vipllava: Path, pictures: list[Path]) -> None:
    told = vlmrun(*FLAGS, "-m", vipllava, pictures[0], "--ram", "100MiB")
    assert_refused(told, "vipllava does not fit 100 MiB of RAM", "smallest budget", code=4)
    smallest = told.err.partition("use --ram ")[2].split()[0]
    assert vlmrun(*FLAGS, "-m", vipllava, pictures[0], "--ram", smallest).code == 0


@pytest.mark.parametrize(
    "flags", [["--stop", "."], ["--detail", "low"], ["--resident", "50%"], ["--batch-size", "2"]]
)
def test_flags_that_would_be_ignored_are_refused(
    vlmrun: Command, vipllava: Path, pictures: list[Path], flags: list[str]
) -> None:
    told = vlmrun(*FLAGS, "-m", vipllava, pictures[0], *flags)
    assert_refused(told, f"{flags[0]}: ", "is untested", hint="leave it out", code=2)


def test_two_dtypes_are_refused(vlmrun: Command, vipllava: Path, pictures: list[Path]) -> None:
    dtypes = ["--dtype", "bfloat16", "--compute-dtype", "float32"]
    told = vlmrun(*FLAGS, "-m", vipllava, pictures[0], *dtypes)
    assert_refused(told, "--dtype and --compute-dtype differ", hint="give one", code=2)


@pytest.mark.parametrize(
    "argv", [("caption", "p.png"), ("embed", "p.png"), ("mem-plan",)], ids=lambda argv: argv[0]
)
def test_without_the_flag_it_is_refused_with_what_works(
    vlmrun: Command,
    vipllava: Path,
    argv: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    picture(9, 9).save("p.png")
    told = vlmrun(*argv, "-m", vipllava)
    words = "llava_next, llava_onevision, paligemma"
    assert_refused(told, "models of type 'vipllava' are not supported", hint=words)
    assert_refused(told, hint="vlmrun caption --allow-untested")


def lose(tensors: Tensors) -> None:
    tensors.pop("model.vision_tower.embeddings.class_embedding")


def misshape(tensors: Tensors) -> None:
    tensors["model.vision_tower.embeddings.class_embedding"] = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (weights(lose), "1 tensor is missing from the checkpoint: model.vision_tower.embeddings"),
        (weights(misshape), "1 tensor is of another shape: model.vision_tower.embeddings"),
        (replaced(WEIGHTS, b"\x08" + bytes(30)), "model.safetensors has a damaged header"),
        (without(WEIGHTS), "holds no model.safetensors"),
        (without("chat_template.jinja"), "the model has no chat template"),
        (
            all_of(without("preprocessor_config.json"), without("processor_config.json")),
            "preprocessor_config.json",
        ),
        (without("tokenizer.json"), "transformers cannot build its processor"),
        (replaced("tokenizer.json", b"{}"), "transformers cannot build its processor"),
        (replaced("chat_template.jinja", b"{{ nothing.at.all }}"), "stock generate() fails"),
        (setting("processor_config.json", num_additional_image_tokens=0), "generate() fails"),
        (setting("config.json", model_type="bert"), "transformers cannot load it"),
        (setting("config.json", model_type="nothing-known"), "transformers cannot"),
    ],
)
def test_damaged_folders_are_refused_by_name(
    vlmrun: Command,
    vipllava: Path,
    pictures: list[Path],
    tmp_path: Path,
    change: Change,
    words: str,
) -> None:
    folder = copied(vipllava, tmp_path / "damaged", change)
    told = vlmrun(*FLAGS, "-q", "-m", folder, pictures[0], "-o", tmp_path / "rows.jsonl")
    assert_refused(told, words)
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("kind", ["vipllava", "own"])
def test_code_in_the_folder_is_never_run(
    vlmrun: Command, vipllava: Path, pictures: list[Path], tmp_path: Path, kind: str
) -> None:
    own = {name: f"own.Own{name}" for name in ("AutoConfig", "AutoModel", "AutoProcessor")}
    own["AutoModelForImageTextToText"] = "own.OwnModel"
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnModel: pass\n"
    folder = copied(
        vipllava,
        tmp_path / "own",
        all_of(
            replaced("own.py", code.encode()),
            setting("config.json", model_type=kind, auto_map=own),
            setting("processor_config.json", auto_map=own),
            setting("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}),
        ),
    )
    assert json.loads((folder / "config.json").read_text())["auto_map"] == own
    told = vlmrun(*FLAGS, "-q", "-m", folder, pictures[0])
    assert not (tmp_path / "ran").exists()
    if kind == "vipllava":  # transformers has this class itself
        assert told.code == 0
    else:
        assert_refused(told, "transformers cannot")
