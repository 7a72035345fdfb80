"""What can be wrong with a model's files, with pictures and with outputs, told by the commands.

Every case has its exit code, one line that says what is wrong and one of what to do about it.
The rooms have tests of their own for the details; usage errors are in tests/cli.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from commands import Command, Done, assert_refused, result
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
from safetensors.torch import load_file, save_file
from tiny import VISION

from vlmrun import run as running
from vlmrun.cli import main
from vlmrun.files.lines import LineWriter
from vlmrun.files.output import OutputLock
from vlmrun.files.rows import Row

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 399656\n"
COMMANDS = ("caption", "embed")
SHORT = ("--max-new-tokens", "4")


@pytest.fixture(scope="module")
def sound(tiny_onevision: Path, tiny_siglip: Path) -> dict[str, Path]:
    """A model for each command."""
    return {"caption": tiny_onevision, "embed": tiny_siglip, "mem-plan": tiny_onevision}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one good picture."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    picture(40, 30).save("good.png")
    return folder


def named(command: str) -> list[str]:
    """What a command needs to run on the good picture."""
    return {"caption": ["good.png", *SHORT], "embed": ["good.png"], "mem-plan": []}[command]


def key(tensors: Tensors, end: str = "vision_model.post_layernorm.bias") -> str:
    """The name of the one tensor that ends so."""
    (name,) = [name for name in tensors if name.endswith(end)]
    return name


def stored_as(dtype: torch.dtype) -> Change:
    end = "layers.0.mlp.fc1.weight"

    def change(tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith(f"vision_model.encoder.{end}"))
        tensors[name] = tensors[name].to(dtype)

    return weights(change)


def sharded(change: Callable[[Path, dict[str, str]], object]) -> Change:
    """Cut the weights in two, and change the folder or the index."""

    def cut(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        names = sorted(tensors)
        index = {name: ONE if at % 2 else TWO for at, name in enumerate(names)}
        for shard in (ONE, TWO):
            save_file({n: tensors[n] for n in names if index[n] == shard}, folder / shard)
        (folder / WEIGHTS).unlink()
        change(folder, index)
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))

    return cut


def shortened(file: str, nbytes: int) -> Change:
    def change(folder: Path) -> None:
        os.truncate(folder / file, (folder / file).stat().st_size - nbytes)

    return change


def renamed(file: str, name: str) -> Change:
    return lambda folder: (folder / file).rename(folder / name)


def folder_instead(file: str) -> Change:
    return all_of(without(file), lambda folder: (folder / file).mkdir())


# What lies in the folder, found from configurations and headers alone


@dataclass(frozen=True)
class Case:
    change: Change
    says: str
    hint: str = ""


HEADER_CASES = {
    "a tensor is missing": Case(
        weights(lambda tensors: tensors.pop(key(tensors))),
        "1 tensor is missing from the checkpoint",
        "the download is incomplete, or config.json is of another model",
    ),
    "many tensors are missing": Case(
        weights(lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers.1." in n]),
        "tensors are missing from the checkpoint",
    ),
    "a tensor too many": Case(
        weights(lambda tensors: tensors.update(surprise=torch.ones(3))),
        "1 tensor is in the checkpoint that config.json does not account for: surprise",
        "of another model",
    ),
    "a tensor of another shape": Case(
        weights(lambda tensors: tensors.update({key(tensors): torch.ones(3)})),
        "post_layernorm.bias (is [3], config.json needs [48])",
    ),
    "two names for one tensor": Case(
        weights(lambda t: t.update({"vision_tower.post_layernorm.bias": torch.ones(48)})),
        "vision_tower.post_layernorm.bias",
    ),
    "int8 weights": Case(stored_as(torch.int8), "is stored as I8", "quantised ones are not"),
    "packed weights": Case(stored_as(torch.uint8), "is stored as U8", "quantised ones are not"),
    "float8 weights": Case(stored_as(torch.float8_e4m3fn), "is stored as F8_E4M3", "F32, BF16 or"),
    "float64 weights": Case(stored_as(torch.float64), "is stored as F64"),
    "a shard is absent": Case(
        sharded(lambda folder, _: (folder / TWO).unlink()),
        f"1 of 2 shards are missing: {TWO}",
        "download them into",
    ),
    "a shard is short": Case(
        all_of(sharded(lambda *_: None), shortened(ONE, 1)), f"{ONE} is truncated", "download it"
    ),
    "the index leaves the folder": Case(
        sharded(lambda _, index: index.update(more="../../secret.safetensors")),
        "names a file outside the folder: ../../secret.safetensors",
        "is refused",
    ),
    "the index is of another version": Case(
        sharded(lambda _, index: index.update(more=TWO)),
        f"lists more in {TWO}, which does not hold it",
        "download both again",
    ),
    "the index is empty": Case(sharded(lambda _, index: index.clear()), "has no weight_map"),
    "the weights are short": Case(shortened(WEIGHTS, 1), "is truncated: ", "download it again"),
    "the header is short": Case(
        lambda folder: os.truncate(folder / WEIGHTS, 1000), "is truncated: 1000 bytes on disk"
    ),
    "the weights are empty": Case(replaced(WEIGHTS, b""), "(0 bytes) is not a safetensors file"),
    "the weights are a web page": Case(
        replaced(WEIGHTS, b"<!doctype html><title>404</title>" * 9), "is not a safetensors file"
    ),
    "the header is damaged": Case(
        replaced(WEIGHTS, (9).to_bytes(8, "little") + b"{" * 99), "has a damaged header"
    ),
    "the weights are a Git-LFS pointer": Case(
        replaced(WEIGHTS, POINTER), "is a Git-LFS pointer, not the weights", "git lfs pull"
    ),
    "the weights are a folder": Case(folder_instead(WEIGHTS), "cannot read ", "should be a file"),
    "the weights are no pickle": Case(
        renamed(WEIGHTS, "pytorch_model.bin"),
        "pytorch_model.bin (",
        "download it again, or a safetensors version",
    ),
    "the weights have another name": Case(
        renamed(WEIGHTS, "weights.pt"),
        "holds no model.safetensors",
        "weights.pt is not read under this name or in this format",
    ),
    "no weights": Case(without(WEIGHTS), "holds no model.safetensors", "download the model's"),
    "no configuration": Case(without("config.json"), "holds no config.json", "give the folder"),
    "the configuration is a folder": Case(folder_instead("config.json"), "holds no config.json"),
    "the configuration is cut": Case(
        replaced("config.json", b'{"model_type": "sig'), "config.json is not valid JSON", "again"
    ),
    "the configuration is bytes": Case(
        replaced("config.json", b"\xff\xfe\x00"), "config.json is not valid JSON"
    ),
    "the configuration is a list": Case(replaced("config.json", b"[]"), "is not a JSON object"),
    "the configuration is a Git-LFS pointer": Case(
        replaced("config.json", POINTER), "config.json is not valid JSON", "git lfs pull"
    ),
    "the configuration names no type": Case(
        setting("config.json", model_type=None), "config.json names no model_type"
    ),
    "another family": Case(
        setting("config.json", model_type="siglip3"),
        "models of type 'siglip3' are not supported",
        "supported: siglip, siglip_vision_model, siglip2, ",
    ),
    "a tower that is not run": Case(
        setting("config.json", vision_config={"model_type": "clip_vision_model"}),
        "vision_config.model_type is 'clip_vision_model'",
    ),
    "a number that is none": Case(
        setting("config.json", vision_config={"num_hidden_layers": "many"}),
        "num_hidden_layers should be a positive number, not 'many'",
        "damaged or was edited",
    ),
}


@pytest.fixture(scope="module")
def damaged(
    sound: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    """A folder for every command and case."""
    place = tmp_path_factory.mktemp("damaged")
    (place / "secret.safetensors").write_bytes((sound["embed"] / WEIGHTS).read_bytes())
    found = {}
    for at, (name, case) in enumerate(HEADER_CASES.items()):
        for command in COMMANDS:
            target = place / f"{command}-{at}" / "model"
            found[command, name] = copied(sound[command], target, case.change)
        found["mem-plan", name] = found["caption", name]
    return found


@pytest.mark.parametrize("command", [*COMMANDS, "mem-plan"])
@pytest.mark.parametrize("name", HEADER_CASES)
def test_a_damaged_checkpoint(
    command: str, name: str, vlmrun: Command, here: Path, damaged: dict[tuple[str, str], Path]
) -> None:
    case = HEADER_CASES[name]
    output = [] if command == "mem-plan" else ["-o", "rows.jsonl"]
    told = vlmrun(command, "-m", damaged[command, name], *named(command), *output)
    assert_refused(told, case.says, hint=case.hint)
    assert [path.name for path in here.iterdir()] == ["good.png"]


def test_errors_of_files_and_flags_are_found_before_torch(
    here: Path, sound: dict[str, Path], damaged: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    argvs = [[c, "-m", str(damaged[c, name]), *named(c)] for c in COMMANDS for name in HEADER_CASES]
    for command in COMMANDS:
        folder = str(sound[command])
        argvs += [
            [command, "-m", folder, "nowhere.png"],
            [command, "-m", folder, "good.png", "--dtype", "int4"],
            [command, "-m", folder, "good.png", "--ram", "1MiB"],
            [command, "-m", folder, "good.png", "--revision", "v2"],
            [command, "-m", folder, "good.png", "--vram", "1GiB"],
            [command, "-m", f"{folder}/config.json", "good.png"],
            [command, "-m", "someone/absent", "good.png", "--offline"],
        ]
    for command, name in (
        ("caption", "preprocessor_config.json"),
        ("caption", "tokenizer.json"),
        ("embed", "preprocessor_config.json"),
        ("embed", "spiece.model"),
    ):
        folder = str(copied(sound[command], tmp_path / f"{command}-{name}", without(name)))
        texts = ["-t", "x"] if name == "spiece.model" else []
        argvs.append([command, "-m", folder, "good.png", *texts])
    argvs += [["embed", "-m", str(sound["caption"]), "good.png"]]
    argvs += [["caption", "-m", str(sound["embed"]), "good.png"]]
    program = (
        "import json, sys\n"
        "from vlmrun.cli import main\n"
        "for argv in json.load(sys.stdin):\n"
        "    code = main(argv)\n"
        "    heavy = 'torch' in sys.modules or 'transformers' in sys.modules\n"
        "    print(json.dumps([argv, code, heavy]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(argvs).encode(),
        capture_output=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [argv for argv, _, _ in found] == argvs
    assert [argv for argv, code, heavy in found if heavy or not code] == []
    assert done.stderr.count(b"vlmrun: error: ") == len(argvs)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize("file", ["config.json", WEIGHTS])
def test_a_file_that_may_not_be_read(
    file: str, vlmrun: Command, here: Path, sound: dict[str, Path], tmp_path: Path
) -> None:
    folder = copied(sound["embed"], tmp_path / "m", lambda folder: (folder / file).chmod(0))
    told = vlmrun("embed", "-m", folder, "good.png")
    assert_refused(told, "cannot read", file, "Permission denied", hint="may read")


@pytest.mark.parametrize(
    ("spec", "flags", "says", "hint", "code"),
    [
        ("{entry}/a-00001-of-00002.safetensors", [], "is one of several shards", "the folder", 1),
        ("good.png", [], "good.png is a file, not a model", "the folder that holds", 1),
        ("./nowhere", [], "no such folder: ./nowhere", "owner/name on the hub", 1),
        ("tiny", [], "unknown model 'tiny'", "the short names, as siglip,", 1),
        ("{folder}", ["--revision", "v2"], "has no revisions", "leave out --revision", 2),
        ("{entry}", [], "holds no config.json", "it is a hub cache entry; the model lies in", 1),
    ],
)
@pytest.mark.parametrize("command", [*COMMANDS, "mem-plan"])
def test_what_is_no_model(
    command: str,
    spec: str,
    flags: list[str],
    says: str,
    hint: str,
    code: int,
    vlmrun: Command,
    here: Path,
    sound: dict[str, Path],
    tmp_path: Path,
) -> None:
    entry = tmp_path / "models--someone--tiny"
    shutil.copytree(sound["embed"], entry / "snapshots" / ("0" * 40))
    (entry / "a-00001-of-00002.safetensors").touch()
    meant = spec.format(folder=sound[command], entry=entry)
    told = vlmrun(command, "-m", meant, *named(command), *flags)
    assert_refused(told, says, hint=hint, code=code)


# What is found when the model is made ready, before the first row


def contradicting_head(tensors: Tensors) -> None:
    table = tensors["language_model.model.embed_tokens.weight"]
    tensors["language_model.lm_head.weight"] = table * 2


READY_CASES = {
    "caption": {
        "ties contradict": Case(
            weights(contradicting_head),
            "config.json ties language_model.model.embed_tokens.weight and "
            "language_model.lm_head.weight, but they differ in the file",
            "tie_word_embeddings",
        ),
        "an activation that there is not": Case(
            setting("config.json", projector_hidden_act="gulu"),
            "config.json: transformers builds no model from it: KeyError: 'gulu'",
            "damaged or was edited",
        ),
        "settings of generation that are none": Case(
            setting("generation_config.json", repetition_penalty=0),
            "generation_config.json: repetition_penalty is 0: `penalty` has to be a strictly",
            "copy it",
        ),
        "damaged settings of generation": Case(
            replaced("generation_config.json", b"{"), "generation_config.json is not valid JSON"
        ),
        "no image settings": Case(
            without("preprocessor_config.json"), "preprocessor_config.json is missing", "copy it"
        ),
        "no tokenizer": Case(without("tokenizer.json"), "tokenizer.json is missing", "copy it"),
        "a damaged tokenizer": Case(
            replaced("tokenizer.json", b"{}"), "the tokenizer cannot be read", "copy it"
        ),
        "a tokenizer that is a Git-LFS pointer": Case(
            replaced("tokenizer.json", POINTER), "the tokenizer cannot be read", "copy it"
        ),
        "damaged image settings": Case(
            replaced("preprocessor_config.json", b"{"),
            "preprocessor_config.json is not valid JSON",
            "download it again",
        ),
        "image settings without a size": Case(
            setting("preprocessor_config.json", size=[]), "preprocessor_config.json", "copy it"
        ),
        "an image processor of another model": Case(
            setting("preprocessor_config.json", image_processor_type="CLIPImageProcessor"),
            "is of a CLIPImageProcessor, and the model takes a LlavaOnevisionImageProcessor",
        ),
        "image settings of another size": Case(
            setting("preprocessor_config.json", size={"height": 14, "width": 14}),
            "and config.json's image_size 28",
        ),
        "another image token": Case(
            setting("config.json", image_token_index=3), "image_token_index is 3"
        ),
        "a template that fails": Case(
            replaced("chat_template.jinja", b"{{ raise_exception('no') }}"), "chat template fails"
        ),
        "a template without pictures": Case(
            replaced("chat_template.jinja", b"just text"),
            "the chat template makes 0 places for 1 pictures",
        ),
    },
    "embed": {
        "a number that there is not": Case(
            setting("config.json", vision_config={**VISION, "layer_norm_eps": "small"}),
            "config.json: transformers builds no model from it: ",
            "damaged or was edited",
        ),
        "no image settings": Case(
            without("preprocessor_config.json"), "preprocessor_config.json is missing", "copy it"
        ),
        "no sentencepiece model": Case(
            without("spiece.model"), "spiece.model is missing", "copy it"
        ),
        "a damaged tokenizer": Case(
            replaced("spiece.model", b"damaged"), "the tokenizer cannot be read", "copy it"
        ),
        "image settings of another size": Case(
            setting("preprocessor_config.json", size={"height": 14, "width": 14}),
            "and config.json's image_size 28",
        ),
    },
}


@pytest.mark.parametrize(
    ("command", "name"), [(c, name) for c, cases in READY_CASES.items() for name in cases]
)
def test_files_beside_the_weights(
    command: str, name: str, vlmrun: Command, here: Path, sound: dict[str, Path], tmp_path: Path
) -> None:
    case = READY_CASES[command][name]
    folder = copied(sound[command], tmp_path / "model", case.change)
    text = ["-t", "a cat"] if command == "embed" else []
    told = vlmrun(command, "-m", folder, *named(command), *text, "-o", "rows.jsonl")
    assert_refused(told, case.says, hint=case.hint)
    assert [path.name for path in here.iterdir()] == ["good.png"]


def test_a_tied_head_that_repeats_the_table_is_no_contradiction(
    vlmrun: Command, here: Path, sound: dict[str, Path], tmp_path: Path
) -> None:
    def repeat(tensors: Tensors) -> None:
        table = tensors["language_model.model.embed_tokens.weight"]
        tensors["language_model.lm_head.weight"] = table.clone()

    folder = copied(sound["caption"], tmp_path / "model", weights(repeat))
    told = vlmrun("caption", "-m", folder, *named("caption"))
    assert told == vlmrun("caption", "-m", sound["caption"], *named("caption"))


@pytest.mark.parametrize("resident", ["100%", "0%"])
@pytest.mark.parametrize(
    ("fault", "says", "hint"),
    [
        (lambda file: os.truncate(file, 60_000), "ended while ", "download it again"),
        (Path.unlink, "cannot read ", "should be a file"),
        (lambda file: (file.unlink(), file.mkdir()), "cannot read ", "should be a file"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_weights_that_go_bad_after_their_header_was_read(
    command: str,
    resident: str,
    fault: Callable[[Path], object],
    says: str,
    hint: str,
    vlmrun: Command,
    here: Path,
    sound: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copied(sound[command], tmp_path / "model", lambda _: None)
    monkeypatch.setattr(running, "check_budget", lambda plan: fault(folder / WEIGHTS))
    told = vlmrun(command, "-m", folder, *named(command), "--resident", resident)
    assert_refused(told, says, WEIGHTS, hint=hint)


@pytest.mark.parametrize("command", COMMANDS)
def test_weights_that_go_bad_during_a_run_keep_the_rows_before(
    command: str,
    vlmrun: Command,
    here: Path,
    sound: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copied(sound[command], tmp_path / "model", lambda _: None)
    write = LineWriter.write

    def write_and_break(self: LineWriter, row: Row) -> None:
        write(self, row)
        os.truncate(folder / WEIGHTS, 60_000)

    monkeypatch.setattr(LineWriter, "write", write_and_break)
    flags = ["--resident", "0%", "-b", "1", "-o", "rows.jsonl"]
    told = vlmrun(command, "-m", folder, *named(command), "good.png", *flags)
    assert_refused(told, "ended while ", hint="again")
    (row,) = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert row["path"] == "good.png"
    assert "error" not in row
    assert not Path("rows.jsonl.lock").exists()


# What a model cannot give


@pytest.fixture(scope="module")
def headless(tiny_siglip_vision: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def behead(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".head." in name]:
            del tensors[name]

    change = all_of(setting("config.json", vision_use_head=False), weights(behead))
    return copied(tiny_siglip_vision, tmp_path_factory.mktemp("headless") / "tower", change)


def test_a_tower_without_a_head_has_no_pooled_output(
    vlmrun: Command, here: Path, headless: Path
) -> None:
    for command in ("embed", "mem-plan"):
        told = vlmrun(command, "-m", headless, *named(command))
        assert_refused(told, "no pooling head", hint="--output-kind last-hidden or hidden:-2")
    told = vlmrun("embed", "-m", headless, "good.png", "--output-kind", "last-hidden")
    assert told.code == 0
    assert len(told.rows[0]["embedding"]) == 16


@pytest.mark.parametrize("argv", [["-t", "a cat"], ["good.png", "-t", "a cat"]])
def test_a_vision_tower_embeds_no_texts(
    argv: list[str], vlmrun: Command, here: Path, tiny_siglip_vision: Path
) -> None:
    told = vlmrun("embed", "-m", tiny_siglip_vision, *argv)
    assert_refused(told, "cannot embed texts: it has no text tower", hint="both towers")


@pytest.mark.parametrize(
    ("flags", "says", "hint"),
    [
        (["-p", "see <image> there"], "the prompt holds <image>", "leave it out"),
        (["--system", "an <image>"], "the system prompt holds <image>", "leave it out"),
        (["--system", "be brief"], "takes no system prompt", "say it in the prompt"),
    ],
)
def test_prompts_that_the_model_cannot_take(
    flags: list[str],
    says: str,
    hint: str,
    vlmrun: Command,
    here: Path,
    sound: dict[str, Path],
    tmp_path: Path,
) -> None:
    folder = sound["caption"]
    if "be brief" in flags:
        template = b"{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        folder = copied(folder, tmp_path / "m", replaced("chat_template.jinja", template))
    told = vlmrun("caption", "-m", folder, *named("caption"), *flags)
    assert_refused(told, says, hint=hint, code=2)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_smallest_budget_that_would_do_does(
    command: str, vlmrun: Command, here: Path, sound: dict[str, Path]
) -> None:
    argv = [command, "-m", sound[command], *named(command)]
    plan = json.loads(vlmrun("mem-plan", "-m", sound[command], "good.png", "--json").out)
    if command == "caption":
        planned = ["mem-plan", "-m", sound[command], *named(command), "--json"]
        plan = json.loads(vlmrun(*planned).out)
    smallest = plan["smallest_ram_bytes"]
    told = vlmrun(*argv, "--ram", smallest - 1)
    assert_refused(told, "does not fit", "the smallest budget that would do", code=4)
    asked = told.err.partition("use --ram ")[2].split()[0]
    whole = vlmrun(*argv)
    for ram in (smallest, asked):
        fitted = vlmrun(*argv, "--ram", ram)
        assert fitted.code == 0
        if command == "caption":
            assert fitted.out == whole.out
        else:
            assert result(fitted.rows[0]) == result(whole.rows[0])


# Overflow


@pytest.fixture(scope="module")
def overflowing(
    sound: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Weights that float16 holds, but not what they make of a bright picture."""

    def scale(tensors: Tensors) -> None:
        tensors[key(tensors, "patch_embedding.weight")] *= 1e5

    place = tmp_path_factory.mktemp("overflowing")
    return {c: copied(sound[c], place / c, weights(scale)) for c in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_overflow_is_an_error_row_and_no_result(
    command: str, vlmrun: Command, here: Path, overflowing: dict[str, Path]
) -> None:
    grey, white = picture(28, 28).point(lambda _: 128), picture(28, 28).point(lambda _: 255)
    grey.save("grey.png")
    white.save("white.png")
    argv = [command, "-m", overflowing[command], *named(command)[1:], "--json"]
    half = ["--compute-dtype", "float16"]
    assert vlmrun(*argv, "white.png").code == 0
    told = vlmrun(*argv, "grey.png", "white.png", "grey.png", *half)
    assert told.code == 3
    assert [row.get("error", {}).get("type") for row in told.rows] == [None, "NotFinite", None]
    assert "not finite" in told.rows[1]["error"]["message"]
    assert "--compute-dtype float32" in told.rows[1]["error"]["message"]
    assert set(told.rows[1]) == {"v", "path", "error"}
    assert told.err.startswith("vlmrun: white.png: ")
    assert "NaN" not in told.out.decode()
    assert vlmrun(*argv, "white.png", *half).code == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_weight_that_float16_cannot_hold(
    command: str, vlmrun: Command, here: Path, sound: dict[str, Path], tmp_path: Path
) -> None:
    end = "vision_model.encoder.layers.0.mlp.fc1.bias"

    def huge(tensors: Tensors) -> None:
        tensors[key(tensors, end)][3] = 1e6

    folder = copied(sound[command], tmp_path / "m", weights(huge))
    argv = [command, "-m", folder, *named(command)]
    assert vlmrun(*argv).code == 0
    told = vlmrun(*argv, "--dtype", "float16")
    assert_refused(told, end, "holds values that float16 cannot", hint="--dtype bfloat16")


# Pictures


def bad_pictures(folder: Path) -> dict[str, str]:
    """Files that are no good pictures, and what is said of them."""
    good = (folder / "good.png").read_bytes()
    files = {
        "cut.png": (good[:-60], "truncated"),
        "empty.jpg": (b"", "is empty"),
        "words.png": (b"just words", "is not a picture Pillow can read"),
        "page.jpg": (b"<!doctype html>", "is not a picture Pillow can read"),
        "bomb.png": (bomb(good), "over the limit of 178,956,970 (--max-pixels)"),
        "phone.heic": (b"\0\0\0\x18ftypheic" + bytes(40), "is not a picture Pillow can read"),
    }
    for name, (data, _) in files.items():
        (folder / name).write_bytes(data)
    os.mkfifo(folder / "pipe.png")
    (folder / "lost.png").symlink_to("gone.png")
    others = {
        "pipe.png": "is not a regular file",
        "lost.png": "no such file",
        "nowhere.png": "no such file",
    }
    return {name: says for name, (_, says) in files.items()} | others


def bomb(png: bytes) -> bytes:
    """The header of a picture of 60,000 x 60,000, with its checksum."""
    import zlib

    header = b"IHDR" + (60_000).to_bytes(4) * 2 + png[24:29]
    return png[:12] + header + zlib.crc32(header).to_bytes(4) + png[33:]


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_pictures_among_good_ones_are_rows(
    command: str, vlmrun: Command, here: Path, sound: dict[str, Path]
) -> None:
    bad = bad_pictures(here)
    argv = [command, "-m", sound[command], *named(command)[1:]]
    told = vlmrun(*argv, "--json", "good.png", *bad, "good.png")
    assert told.code == 3
    assert [row["path"] for row in told.rows] == ["good.png", *bad, "good.png"]
    first, *errors, last = told.rows
    assert result(first) == result(last)
    for row, (name, says) in zip(errors, bad.items(), strict=True):
        assert row["error"]["type"] == "ImageError"
        assert says in row["error"]["message"], name
        assert f"vlmrun: {name}: {row['error']['message']}\n" in told.err
    assert told.err.endswith(f"vlmrun: 2 done, {len(bad)} failed\n")
    assert "Traceback" not in told.err


@pytest.mark.parametrize("command", COMMANDS)
def test_when_all_pictures_are_bad(
    command: str, vlmrun: Command, here: Path, sound: dict[str, Path]
) -> None:
    bad = bad_pictures(here)
    argv = [command, "-m", sound[command], *named(command)[1:]]
    told = vlmrun(*argv, *bad, "-o", "rows.jsonl")
    assert (told.code, told.out) == (1, b"")
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert [row["path"] for row in rows] == list(bad)
    assert all("error" in row for row in rows)
    (here / "empty").mkdir()
    told = vlmrun(*argv, "empty")
    assert (told.code, told.out) == (0, b"")
    assert "no pictures" in told.err
    told = vlmrun(*argv, "nowhere.png", "neither.png")
    assert_refused(told, "nowhere.png", "neither.png", code=2)
    told = vlmrun("mem-plan", "-m", sound[command], "words.png", "empty.jpg")
    assert (told.code, told.out) == (1, b"")
    assert "vlmrun: error: none of the pictures can be read\n" in told.err
    assert told.err.endswith("vlmrun: hint: name others, or none at all\n")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--frame", "2"], "has 1 frame; frame 2 does not exist (--frame)"),
        (["--max-pixels", "100"], "is 40x30 = 1,200 pixels, over the limit of 100 (--max-pixels)"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_pictures_that_the_flags_rule_out(
    command: str, flags: list[str], says: str, vlmrun: Command, here: Path, sound: dict[str, Path]
) -> None:
    told = vlmrun(command, "-m", sound[command], *named(command), *flags, "--json")
    assert told.code == 1
    assert [row["error"]["message"] for row in told.rows] == [says]


def test_a_picture_too_long_to_pad_is_a_row(
    vlmrun: Command, here: Path, sound: dict[str, Path]
) -> None:
    picture(65_536, 1).save("long.png")
    flags = [*SHORT, "--detail", "low", "--json"]
    told = vlmrun("caption", "-m", sound["caption"], "good.png", "long.png", "good.png", *flags)
    assert told.code == 3
    errors = [row.get("error", {}).get("message") for row in told.rows]
    assert errors == [None, errors[1], None]
    assert "is 65536 pixels long" in errors[1]


# Outputs


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_another_run_is_writing(
    command: str, vlmrun: Command, here: Path, sound: dict[str, Path]
) -> None:
    argv = [command, "-m", sound[command], *named(command), "-o", "rows.jsonl"]
    lock = OutputLock(Path("rows.jsonl"))
    try:
        told = vlmrun(*argv)
    finally:
        lock.release()
    says = f"rows.jsonl is being written by another run (process {os.getpid()})"
    assert_refused(told, says, hint="wait for it to end")
    assert vlmrun(*argv).code == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("nowhere/rows.jsonl", "there is no folder nowhere"),
        ("folder.jsonl", "it is not a regular file"),
        ("good.png/rows.jsonl", "there is no folder good.png"),
    ],
)
def test_an_output_that_cannot_be_written(
    command: str, output: str, says: str, vlmrun: Command, here: Path, sound: dict[str, Path]
) -> None:
    (here / "folder.jsonl").mkdir()
    told = vlmrun(command, "-m", sound[command], *named(command), "-o", output)
    assert_refused(told, f"{output} cannot be written", says, hint="choose another output")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=16k", "tmpfs", place]
    if mount is None or subprocess.run([mount, *options], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_fills_up_keeps_whole_rows(
    command: str, vlmrun: Command, here: Path, sound: dict[str, Path], small_disk: Path
) -> None:
    output = small_disk / "rows.jsonl"
    argv = [command, "-m", sound[command], *named(command), *["good.png"] * 99, "-o", output]
    told = vlmrun(*argv, *(["--max-new-tokens", "1"] if command == "caption" else []))
    assert_refused(told, f"{output} cannot be written: No space left on device", hint="make room")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert 0 < len(rows) < 100
    assert sorted(path.name for path in small_disk.iterdir()) == ["rows.jsonl"]


def test_a_disk_that_fills_up_under_an_array(
    vlmrun: Command, here: Path, sound: dict[str, Path], small_disk: Path
) -> None:
    output = small_disk / "v.npy"
    told = vlmrun("embed", "-m", sound["embed"], *["good.png"] * 60, "-o", output)
    assert_refused(told, "cannot be written: No space left on device", hint="make room")
    index = [json.loads(line) for line in (small_disk / "v.npy.jsonl").read_text().splitlines()]
    assert 0 < len(index) < 60


@pytest.mark.parametrize("command", [*COMMANDS, "mem-plan"])
def test_standard_output_that_is_full(
    command: str,
    here: Path,
    sound: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    code = main([command, "-m", str(sound[command]), *named(command)])
    told = Done(code, b"", capsys.readouterr().err)
    assert_refused(told, "standard output cannot be written: No space left", hint="make room")
    os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is buffered must go somewhere
    full.close()


# Code


@pytest.mark.parametrize("command", COMMANDS)
def test_code_in_the_folder_is_never_run(
    command: str, vlmrun: Command, here: Path, sound: dict[str, Path], tmp_path: Path
) -> None:
    own = {
        n: f"own.{n}" for n in ("AutoConfig", "AutoModel", "AutoProcessor", "AutoImageProcessor")
    }
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n" + "".join(
        f"class {name.partition('.')[2]}: pass\n" for name in own.values()
    )
    folder = copied(
        sound[command],
        tmp_path / "own",
        all_of(
            replaced("own.py", code.encode()),
            setting("config.json", auto_map=own),
            setting("preprocessor_config.json", auto_map=own),
            setting("processor_config.json", auto_map=own),
            setting("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.AutoModel", None]}),
        ),
    )
    text = ["-t", "a cat"] if command == "embed" else []
    told = vlmrun(command, "-m", folder, *named(command), *text)
    plain = vlmrun(command, "-m", sound[command], *named(command), *text)
    assert (told.code, told.err) == (0, "")
    assert not (tmp_path / "ran").exists()
    if command == "caption":
        assert told.out == plain.out
    else:
        assert [result(row) for row in told.rows] == [result(row) for row in plain.rows]
