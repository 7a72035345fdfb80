"""The three commands, as a person types them, against a hub cache and against a hub.

`vlmrun caption img.jpg`, `vlmrun embed --model siglip img.jpg` and `vlmrun mem-plan`: with tiny
checkpoints under the ids of the aliases, and with what goes wrong on the way to them.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from commands import PROGRAM, Command, Done, assert_refused, result
from hub import COMMIT, Hub, fill_cache
from PIL import Image

from vlmrun.cli import main
from vlmrun.models.checkpoints.source import ALIASES

ONEVISION, SIGLIP = ALIASES["llava-onevision-0.5b"], ALIASES["siglip"]
CAPTION = ("caption", "img.jpg")
EMBED = ("embed", "--model", "siglip", "img.jpg")
PLAN = ("mem-plan",)
MISSION = (CAPTION, EMBED, PLAN)
RUNNING = (CAPTION, EMBED)
HUB_ID = {CAPTION: ONEVISION, EMBED: SIGLIP, PLAN: ONEVISION}
WEIGHTS = "model.safetensors"
OTHER_COMMIT = "f" * 40


@pytest.fixture(scope="module")
def folders(
    tiny_onevision: Path, tiny_siglip: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The tiny checkpoints by hub id. The library asks for the first 100 kB of any weight file,
    so that a file must be larger for a test to see that the rest is not asked for.

    Many tokens end a caption here: random weights seldom choose the one that should.
    """
    onevision = tmp_path_factory.mktemp("hub") / "onevision"
    shutil.copytree(tiny_onevision, onevision)
    settings = json.loads((onevision / "generation_config.json").read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], *range(0, 395, 16)]
    (onevision / "generation_config.json").write_text(json.dumps(settings))
    assert all((f / WEIGHTS).stat().st_size > 300_000 for f in (onevision, tiny_siglip))
    return {ONEVISION: onevision, SIGLIP: tiny_siglip}


@pytest.fixture(scope="module")
def plain(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, ...], bytes]:
    """What each line of the mission gives with its model as a plain folder."""
    place = tmp_path_factory.mktemp("plain")
    write_picture(place)
    with chdir(place):
        return {
            CAPTION: output_of("caption", "-m", folders[ONEVISION], "img.jpg"),
            EMBED: output_of("embed", "-m", folders[SIGLIP], "img.jpg"),
            PLAN: output_of("mem-plan", "-m", folders[ONEVISION], "--json"),
        }


def output_of(*argv: object) -> bytes:
    data = BytesIO()
    with redirect_stdout(TextIOWrapper(data)) as stream:
        assert main([str(word) for word in argv]) == 0
        stream.detach()
    return data.getvalue()


@pytest.fixture
def cache(cache: Path) -> Path:
    """An empty hub cache, and a working directory with a picture in it."""
    write_picture(Path())
    return cache


@pytest.fixture
def full_cache(cache: Path, folders: dict[str, Path]) -> Path:
    for repo_id, folder in folders.items():
        fill_cache(cache, repo_id, folder)
    return cache


@pytest.fixture
def hub(folders: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(folders) as hub:
        hub.visit(cache, monkeypatch)
        yield hub


def write_picture(folder: Path) -> None:
    """A photograph, sideways as telephones write them."""
    image = Image.radial_gradient("L").resize((60, 40)).convert("RGB")
    image.paste((250, 20, 20), (5, 5, 25, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(folder / "img.jpg", exif=exif)


def assert_as_plain(told: Done, line: tuple[str, ...], plain: dict[tuple[str, ...], bytes]) -> None:
    """A caption or a vector equals the one from the plain folder, to the last bit."""
    assert (told.code, told.err) == (0, "")
    if line == CAPTION:
        assert told.out == plain[line]
        assert told.out.strip()
        return
    (row,) = told.rows
    assert result(row) == result(json.loads(plain[line]))
    assert (row["model"], row["revision"]) == ("siglip", COMMIT)


def plan_of(text: bytes) -> dict[str, Any]:
    """A plan without the name of its model and what happens to be free on the machine."""
    left_out = ("model", "command", "budget")
    return {key: value for key, value in json.loads(text).items() if key not in left_out}


def weights_in(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*.safetensors") if path.is_file()]


# A filled cache


@pytest.mark.parametrize("line", RUNNING)
@pytest.mark.usefixtures("full_cache", "no_network")
def test_a_cached_model_runs_without_a_network(
    line: tuple[str, ...], vlmrun: Command, plain: dict[tuple[str, ...], bytes]
) -> None:
    assert_as_plain(vlmrun(*line), line, plain)


@pytest.mark.usefixtures("full_cache", "no_network")
def test_a_cached_model_is_planned_from_its_own_headers(
    vlmrun: Command, plain: dict[tuple[str, ...], bytes]
) -> None:
    told = vlmrun(*PLAN)
    assert (told.code, told.err) == (0, "")
    assert "llava-onevision-0.5b (LLaVA-OneVision): headers in" in told.out.decode()
    assert "vlmrun caption INPUT..." in told.out.decode()
    assert plan_of(vlmrun(*PLAN, "--json").out) == plan_of(plain[PLAN])


@pytest.mark.parametrize("line", MISSION)
@pytest.mark.usefixtures("full_cache")
def test_the_installed_command_asks_nothing_of_the_hub(
    line: tuple[str, ...], hub: Hub, plain: dict[tuple[str, ...], bytes]
) -> None:
    done = subprocess.run([PROGRAM, *line], capture_output=True)
    told = Done(done.returncode, done.stdout, done.stderr.decode())
    if line == PLAN:
        assert (told.code, told.err) == (0, "")
        assert b"headers in" in told.out
    else:
        assert_as_plain(told, line, plain)
    assert hub.requests == []


def test_a_revision_of_the_cache(
    vlmrun: Command, full_cache: Path, no_network: None, tmp_path: Path, folders: dict[str, Path]
) -> None:
    from tiny import build_siglip

    other = build_siglip(tmp_path / "other", dtype="float16")
    fill_cache(full_cache, SIGLIP, other, commit=OTHER_COMMIT, revision="half")
    (row,) = vlmrun(*EMBED).rows
    (half,) = vlmrun(*EMBED, "--revision", "half").rows
    assert (row["revision"], row["dtype"]) == (COMMIT, "float32")
    assert (half["revision"], half["dtype"]) == (OTHER_COMMIT, "float16")
    assert vlmrun(*EMBED, "--revision", OTHER_COMMIT).rows[0]["revision"] == OTHER_COMMIT
    plan = json.loads(vlmrun("mem-plan", "-m", "siglip", "--revision", "half", "--json").out)
    assert plan["dtype"] == "float16"
    assert "--revision half" in plan["command"]
    assert_refused(
        vlmrun(*EMBED, "--revision", "v9", "--offline"), "the network is off", hint="hf download"
    )


@pytest.mark.parametrize("line", RUNNING)
@pytest.mark.parametrize("by", ["--offline", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize("held", ["nothing", "a part"])
def test_offline_says_how_to_get_a_model(
    line: tuple[str, ...],
    by: str,
    held: str,
    vlmrun: Command,
    hub: Hub,
    cache: Path,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo_id = HUB_ID[line]
    if held == "a part":
        fill_cache(cache, repo_id, folders[repo_id], without={WEIGHTS})
    flags = ["--offline"] if by == "--offline" else []
    if not flags:
        monkeypatch.setenv(by, "1")
    degree = "not in the hub cache" if held == "nothing" else "only partly in the hub cache"
    words = (repo_id, degree, str(cache), "the network is off")
    assert_refused(vlmrun(*line, *flags), *words, hint=f"`hf download {repo_id}`")
    assert_refused(vlmrun(*line, *flags), hint="`--model demo`")
    assert hub.requests == []


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.usefixtures("cache", "no_network")
def test_aliases_are_planned_from_the_packaged_shapes(alias: str, vlmrun: Command) -> None:
    told = vlmrun("mem-plan", "-m", alias, "--ram", "64GiB")
    assert (told.code, told.err) == (0, "")
    assert f"{alias} (" in told.out.decode()
    assert "shapes from the packaged catalogue" in told.out.decode()
    offline = vlmrun("mem-plan", "-m", alias, "--ram", "64GiB", "--offline")
    budget = re.compile(rb"RAM budget.*")  # it tells what is free, which moves
    assert budget.sub(b"", offline.out.replace(b" --offline", b"")) == budget.sub(b"", told.out)


def test_mem_plan_alone_needs_nothing(vlmrun: Command, cache: Path, no_network: None) -> None:
    told = vlmrun(*PLAN)
    assert told.err == ""
    assert "llava-onevision-0.5b (LLaVA-OneVision)" in told.out.decode()
    assert not cache.exists()


# A hub


@pytest.mark.parametrize("line", RUNNING)
def test_a_model_is_downloaded_once_and_run(
    line: tuple[str, ...], vlmrun: Command, hub: Hub, plain: dict[tuple[str, ...], bytes]
) -> None:
    assert_as_plain(vlmrun(*line), line, plain)
    (asked,) = hub.downloads(WEIGHTS)
    assert HUB_ID[line] in asked.path
    hub.requests.clear()
    assert_as_plain(vlmrun(*line), line, plain)
    assert hub.requests == []


@pytest.mark.parametrize("line", MISSION)
def test_the_installed_command_downloads_by_itself(
    line: tuple[str, ...], hub: Hub, plain: dict[tuple[str, ...], bytes]
) -> None:
    done = subprocess.run([PROGRAM, *line], capture_output=True)
    told = Done(done.returncode, done.stdout, done.stderr.decode())
    if line == PLAN:
        assert told.err == ""
        assert hub.requests == []
        return
    assert_as_plain(told, line, plain)
    assert len(hub.downloads(WEIGHTS)) == 1
    assert [r.path for r in hub.requests if HUB_ID[line] not in r.path] == []


def test_headers_are_read_by_range_and_no_weight_is_downloaded(
    vlmrun: Command,
    hub: Hub,
    cache: Path,
    folders: dict[str, Path],
    plain: dict[tuple[str, ...], bytes],
) -> None:
    hub.repos["someone/onevision"] = folders[ONEVISION]
    told = vlmrun("mem-plan", "-m", "someone/onevision")
    assert (told.code, told.err) == (0, "")
    assert "someone/onevision (LLaVA-OneVision): headers read from the hub" in told.out.decode()
    (asked,) = hub.downloads(WEIGHTS)
    assert asked.range is not None
    assert asked.sent < (folders[ONEVISION] / WEIGHTS).stat().st_size / 2
    assert weights_in(cache) == []
    found = vlmrun("mem-plan", "-m", "someone/onevision", "--json")
    assert plan_of(found.out) == plan_of(plain[PLAN])
    assert all(request.range is not None for request in hub.downloads(WEIGHTS))


def test_what_was_planned_is_downloaded_and_run(
    vlmrun: Command, hub: Hub, folders: dict[str, Path], plain: dict[tuple[str, ...], bytes]
) -> None:
    """The configuration is in the cache after a plan; a run finds that the weights are not."""
    hub.repos["someone/onevision"] = folders[ONEVISION]
    assert vlmrun("mem-plan", "-m", "someone/onevision").code == 0
    told = vlmrun("caption", "-m", "someone/onevision", "img.jpg")
    assert (told.code, told.out, told.err) == (0, plain[CAPTION], "")


def test_a_revision_of_the_hub(vlmrun: Command, hub: Hub, cache: Path) -> None:
    plan = vlmrun("mem-plan", "-m", "siglip", "--revision", COMMIT)
    assert "headers read from the hub" in plan.out.decode()  # the catalogue knows main alone
    (row,) = vlmrun(*EMBED, "--revision", COMMIT).rows
    assert row["revision"] == COMMIT
    for argv in (EMBED, ("mem-plan", "-m", "siglip")):
        told = vlmrun(*argv, "--revision", "v9")
        assert_refused(told, f"{SIGLIP} has no revision 'v9'", hint=f"{hub.endpoint}/{SIGLIP}")


@pytest.mark.parametrize("argv", [("caption", "img.jpg"), ("embed", "img.jpg"), ("mem-plan",)])
def test_an_unsupported_model_is_refused_before_a_weight_is_asked_for(
    argv: tuple[str, ...], vlmrun: Command, hub: Hub, tmp_path: Path, folders: dict[str, Path]
) -> None:
    shutil.copytree(folders[ONEVISION], tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "idefics3"}')
    hub.repos["someone/other"] = tmp_path / "other"
    told = vlmrun(*argv, "-m", "someone/other")
    words = "siglip, siglip_vision_model, siglip2, siglip2_vision_model, llava, llava_next, "
    assert_refused(told, "'idefics3'", "not supported", hint=words)
    assert_refused(told, hint="; vlmrun caption --allow-untested tries others")
    assert hub.downloads(WEIGHTS) == []


@pytest.mark.parametrize(
    ("refusal", "words", "hint"),
    [
        ("private", "no model {id} at {hub}, or it is private", "HF_TOKEN"),
        ("gated", "{id} is gated", "accept it at {hub}/{id}"),
        ("token", "refuses access to {id} (HTTP 401)", "hf auth login"),
        (404, "HTTP 404 for {id}", "--model demo"),
        (503, "HTTP 503 for {id}", "try later"),
    ],
)
@pytest.mark.parametrize("line", [*RUNNING, ("mem-plan", "-m", SIGLIP, "--revision", "main")])
def test_refusals_of_the_hub(
    line: tuple[str, ...], refusal: str | int, words: str, hint: str, vlmrun: Command, hub: Hub
) -> None:
    repo_id = HUB_ID.get(line, SIGLIP)
    hub.refusals[repo_id] = refusal
    said = (text.format(id=repo_id, hub=hub.endpoint) for text in (words, hint))
    assert_refused(vlmrun(*line), next(said), hint=next(said))
    assert hub.downloads(WEIGHTS) == []


def test_a_model_that_the_hub_does_not_have(vlmrun: Command, hub: Hub) -> None:
    for command in ("caption", "embed", "mem-plan"):
        named = [] if command == "mem-plan" else ["img.jpg"]
        told = vlmrun(command, "-m", "someone/tinny", *named)
        assert_refused(told, "no model someone/tinny", hint="spelling")


@pytest.mark.parametrize("line", [*RUNNING, ("mem-plan", "-m", SIGLIP, "--revision", "main")])
@pytest.mark.usefixtures("cache")
def test_a_hub_out_of_reach(
    line: tuple[str, ...], vlmrun: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "*")
    told = vlmrun(*line)
    repo_id = HUB_ID.get(line, SIGLIP)
    assert_refused(told, f"cannot reach http://127.0.0.1:9 for {repo_id}", hint="hf download")
    assert_refused(told, hint="`--model demo`")


@pytest.mark.parametrize("line", RUNNING)
def test_a_download_cut_in_the_middle_is_taken_up_by_the_next_run(
    line: tuple[str, ...],
    vlmrun: Command,
    hub: Hub,
    cache: Path,
    no_waiting: None,
    plain: dict[tuple[str, ...], bytes],
) -> None:
    hub.cut(WEIGHTS, after=150_000)
    for _ in range(2):  # a cut one leaves nothing that the next one falls over
        told = vlmrun(*line)
        cut = f"the connection to {hub.endpoint} was cut during the download of {HUB_ID[line]}"
        assert_refused(told, cut, hint="run it again")
        assert weights_in(cache) == []
    assert_refused(vlmrun(*line, "--offline"), "only partly in the hub cache")
    hub.cuts.clear()
    assert_as_plain(vlmrun(*line), line, plain)


def test_a_download_cut_once_is_no_error(
    vlmrun: Command, hub: Hub, no_waiting: None, plain: dict[tuple[str, ...], bytes]
) -> None:
    hub.cut(WEIGHTS, after=150_000, times=1)
    assert_as_plain(vlmrun(*EMBED), EMBED, plain)


def test_configurations_and_headers_cut_in_the_middle(
    vlmrun: Command, hub: Hub, no_waiting: None, plain: dict[tuple[str, ...], bytes]
) -> None:
    hub.cut("config.json", after=20)
    assert_refused(vlmrun(*EMBED), "was cut", SIGLIP, hint="run it again")
    hub.cuts.clear()
    hub.cut(WEIGHTS, after=10)
    told = vlmrun("mem-plan", "-m", "siglip", "--revision", COMMIT)
    assert_refused(told, "was cut", SIGLIP, hint="run it again")
    hub.cuts.clear()
    assert_as_plain(vlmrun(*EMBED), EMBED, plain)


def test_shards_that_are_whole_are_kept(
    vlmrun: Command, hub: Hub, no_waiting: None, tmp_path: Path, plain: dict[tuple[str, ...], bytes]
) -> None:
    from tiny import build_siglip

    hub.repos[SIGLIP] = build_siglip(tmp_path / "sharded", shards=2)
    one, two = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    hub.cut(two, after=50_000)
    assert_refused(vlmrun(*EMBED), "was cut", SIGLIP)
    hub.cuts.clear()
    hub.requests.clear()
    assert_as_plain(vlmrun(*EMBED), EMBED, plain)
    assert hub.downloads(one) == []
    assert len(hub.downloads(two)) == 1


def test_an_incomplete_upload_is_named_before_a_weight_is_asked_for(
    vlmrun: Command, hub: Hub, tmp_path: Path
) -> None:
    from tiny import build_siglip

    hub.repos[SIGLIP] = build_siglip(tmp_path / "sharded", shards=2)
    absent = "model-00002-of-00002.safetensors"
    (tmp_path / "sharded" / absent).unlink()
    told = vlmrun(*EMBED)
    assert_refused(told, SIGLIP, f"names {absent}", hint="--revision")
    assert hub.downloads("model-00001-of-00002.safetensors") == []


def test_code_on_the_hub_is_neither_downloaded_nor_run(
    vlmrun: Command, hub: Hub, cache: Path, tmp_path: Path, folders: dict[str, Path]
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(folders[SIGLIP], folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoModel": "own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    hub.repos[SIGLIP] = folder
    assert vlmrun(*EMBED).code == 0
    assert hub.downloads("own.py") == []
    assert not list(cache.rglob("own.py"))
    assert not (tmp_path / "ran").exists()


def test_a_cache_that_cannot_be_written(
    vlmrun: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    monkeypatch.setenv("HF_HUB_CACHE", f"{os.getcwd()}/file/cache")
    assert_refused(vlmrun(*CAPTION), "cannot use the hub cache", hint="HF_HUB_CACHE")
