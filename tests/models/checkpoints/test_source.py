import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
from hub import COMMIT, fill_cache
from repos import REPO, says

from vlmrun.errors import CheckpointError, SourceError, UsageError
from vlmrun.models.checkpoints.source import (
    ALIASES,
    DEMOS,
    fetch_configuration,
    fetch_headers,
    fetch_model,
    resolve_source,
)

pytestmark = pytest.mark.usefixtures("cache", "no_network")


class TestLocal:
    @pytest.mark.parametrize("spec", ["./model", "model", "model/", "{tmp}/here/model", "~/model"])
    def test_a_folder_is_taken_as_it_is(
        self, spec: str, single_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "here"))
        shutil.copytree(single_file, "model")
        source = resolve_source(spec.format(tmp=tmp_path))
        assert source.folder is not None
        assert source.folder.samefile("model")
        assert (source.name, source.complete) == ("model", True)
        assert (source.repo_id, source.revision) == (None, None)

    def test_a_name_that_is_not_utf8_is_refused(self, single_file: Path) -> None:
        name = os.fsdecode(b"./caf\xe9")
        shutil.copytree(single_file, name)
        with pytest.raises(SourceError, match="the name of a model is not valid UTF-8"):
            resolve_source(name)

    @pytest.mark.parametrize("name", ["preprocessor_config.json", "tokenizer.json", "spiece.model"])
    def test_a_pipe_in_place_of_a_file_is_refused(self, single_file: Path, name: str) -> None:
        shutil.copytree(single_file, "model")
        Path("model", name).unlink(missing_ok=True)
        os.mkfifo(f"model/{name}")
        with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
            resolve_source("./model")

    def test_a_folder_that_may_not_be_read_is_not_called_empty(
        self, single_file: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "here" / "model"
        shutil.copytree(single_file, folder)
        folder.chmod(0)
        for above in folder.parents:  # somebody else must come this far
            if above.is_relative_to(tmp_path.parent.parent):
                above.chmod(0o755)
        user = os.geteuid()
        if user == 0:  # root may read everywhere, so try as somebody else
            os.seteuid(65534)
        try:
            with pytest.raises(CheckpointError, match=r"cannot read .*model: Permission denied"):
                resolve_source(str(folder))
        finally:
            os.seteuid(user)
            folder.chmod(0o755)

    @pytest.mark.parametrize(
        "spec", ["tower.safetensors", "{tmp}/here/tower.safetensors", "~/tower.safetensors"]
    )
    def test_a_file_is_a_model_without_a_folder_of_its_own(
        self, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "here"))
        Path("tower.safetensors").touch()
        source = resolve_source(spec.format(tmp=tmp_path))
        assert source.folder is not None
        assert source.folder.samefile(".")
        assert (source.file, source.name) == ("tower.safetensors", "tower.safetensors")
        assert (source.complete, source.repo_id, source.revision) == (True, None, None)

    def test_open_clip_s_configuration_is_one(self, single_file: Path) -> None:
        shutil.copytree(single_file, "model")
        Path("model/config.json").rename("model/open_clip_config.json")
        source = resolve_source("model")
        assert (source.folder, source.file) == (Path("model"), None)

    def test_the_working_directory_has_a_name(
        self, single_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(single_file)
        assert resolve_source(".").name == single_file.name

    def test_a_folder_comes_before_a_hub_id(self, single_file: Path) -> None:
        shutil.copytree(single_file, REPO)
        assert resolve_source(REPO).folder == Path(REPO)

    @pytest.mark.parametrize("name", ["siglip", "demo"])
    def test_an_alias_comes_before_a_folder(self, name: str, single_file: Path) -> None:
        shutil.copytree(single_file, name)
        assert resolve_source(name).folder != Path(name)
        assert resolve_source(f"./{name}").folder == Path(name)

    @pytest.mark.parametrize("spec", DEMOS)
    def test_demos_are_packaged(self, spec: str) -> None:
        source = resolve_source(spec)
        assert source.complete
        assert source.name == spec
        assert source.folder is not None
        assert (source.folder / "model.safetensors").is_file()

    @pytest.mark.parametrize("spec", [*ALIASES, REPO])
    def test_an_empty_cache_gives_a_source_without_folder(self, spec: str) -> None:
        source = resolve_source(spec, revision="v1")
        assert (source.spec, source.name) == (spec, spec)
        assert source.repo_id == ALIASES.get(spec, spec)
        assert (source.folder, source.complete, source.revision) == (None, False, "v1")

    @pytest.mark.parametrize("spec", [*ALIASES, REPO])
    def test_a_cached_model_is_complete(self, spec: str, single_file: Path, cache: Path) -> None:
        snapshot = fill_cache(cache, ALIASES.get(spec, spec), single_file)
        source = resolve_source(spec)
        assert source.folder is not None
        assert source.folder.samefile(snapshot)
        assert (source.revision, source.complete, source.name) == (COMMIT, True, spec)

    @pytest.mark.parametrize(
        ("missing", "has_folder"),
        [
            ("config.json", False),
            ("model-00002-of-00002.safetensors", True),
            ("model.safetensors.index.json", True),
        ],
    )
    def test_a_partly_cached_model_is_not(
        self, missing: str, has_folder: bool, sharded: Path, cache: Path
    ) -> None:
        fill_cache(cache, REPO, sharded, without={missing, "pytorch_model.bin"})
        source = resolve_source(REPO)
        assert not source.complete
        assert (source.folder is not None) == has_folder

    def test_a_sharded_model_is_complete(self, sharded: Path, cache: Path) -> None:
        fill_cache(cache, REPO, sharded)
        assert resolve_source(REPO).complete

    @pytest.mark.parametrize(
        ("held", "complete"),
        [
            (["pytorch_model.bin"], True),
            (["open_clip_model.safetensors"], True),
            (["sigclip.safetensors"], True),
            (["a.safetensors", "b.safetensors"], False),
            (["model.fp16.safetensors"], False),
            (["model-00001-of-00002.safetensors"], False),
            (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], False),
            (
                [
                    "pytorch_model-00001-of-00002.bin",
                    "pytorch_model-00002-of-00002.bin",
                    "pytorch_model.bin.index.json",
                ],
                True,
            ),
            (["pytorch_model.bin", "model.safetensors.index.json"], False),
        ],
    )
    def test_which_weights_are_whole(self, held: list[str], complete: bool, cache: Path) -> None:
        """A variant or a shard that another program fetched is not the model."""
        folder = Path("repo")
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        for name in held:
            suffix = name.removesuffix(".index.json").rpartition(".")[2]
            shards = [f"{name.split('.')[0]}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
            index = {"weight_map": {str(i): shard for i, shard in enumerate(shards)}}
            (folder / name).write_text(json.dumps(index))
        fill_cache(cache, REPO, folder)
        assert resolve_source(REPO).complete == complete

    def test_a_link_whose_content_is_gone_does_not_count(
        self, single_file: Path, cache: Path
    ) -> None:
        snapshot = fill_cache(cache, REPO, single_file)
        (snapshot / "model.safetensors").resolve().unlink()
        assert not resolve_source(REPO).complete

    @pytest.mark.parametrize("revision", [None, "v2", "1" * 40])
    def test_revisions_are_told_apart(
        self, revision: str | None, single_file: Path, cache: Path
    ) -> None:
        fill_cache(cache, REPO, single_file)
        fill_cache(cache, REPO, single_file, commit="1" * 40, revision="v2")
        assert resolve_source(REPO, revision=revision).revision == (
            COMMIT if not revision else "1" * 40
        )

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("HF_HUB_CACHE", "{tmp}/x"),
            ("HF_HUB_CACHE", "$HOME/x"),
            ("HF_HOME", "{tmp}/home"),
            ("HF_HOME", "~/home"),
            ("XDG_CACHE_HOME", "{tmp}/xdg"),
            ("HOME", "{tmp}"),
        ],
    )
    def test_the_cache_is_where_the_library_has_it(
        self,
        name: str,
        value: str,
        single_file: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for other in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
        ask = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
        theirs = subprocess.check_output([sys.executable, "-c", ask], text=True).strip()
        fill_cache(Path(theirs), REPO, single_file)
        assert resolve_source(REPO).complete

    def test_the_cache_entry_of_a_model_is_not_the_model(
        self, single_file: Path, cache: Path
    ) -> None:
        snapshot = fill_cache(cache, REPO, single_file)
        with says(CheckpointError, "no config.json", hint=str(snapshot)):
            resolve_source(str(cache / "models--someone--tiny"))
        source = resolve_source(str(snapshot))
        assert (source.name, source.revision) == (REPO, COMMIT)

    def test_errors_name_what_to_do(self, single_file: Path) -> None:
        Path("empty").mkdir()
        shutil.copytree(single_file, "model")
        with says(CheckpointError, "empty", "no config.json", hint="config.json"):
            resolve_source("empty")
        with says(UsageError, "model is a folder", hint="--revision"):
            resolve_source("model", revision="main")
        with says(UsageError, "demo is a folder", hint="--revision"):
            resolve_source("demo", revision="main")
        with says(SourceError, "is a file, not a model", hint="give a .safetensors file"):
            resolve_source("model/config.json")
        with says(UsageError, "is a file, which has no revisions", hint="--revision"):
            resolve_source("model/model.safetensors", revision="main")
        shard = Path("model/model-00002-of-00003.safetensors")
        shard.touch()
        with says(SourceError, f"{shard} is one of several shards", hint="give the folder"):
            resolve_source(str(shard))

    def test_a_name_that_is_not_there_is_told_those_beside_it(self) -> None:
        for name in ("siglip-tiny", "other"):
            Path("models", name).mkdir(parents=True)
        Path("models/tower.safetensors").touch()
        Path("models/tower.txt").touch()
        for spec, hint in {
            "models/siglip-tinny/": "beside it lies siglip-tiny",
            "models/towr.safetensors": "beside it lies tower.safetensors",
            "models/x.safetensors": "beside it lies tower.safetensors",
            "./nothing/x": "a model is a folder",
        }.items():
            with says(SourceError, "no such f", hint=hint):
                resolve_source(spec)

    @pytest.mark.parametrize(
        "spec", ["./siglip", "../x", "/nowhere/x", "~/x", "a/b/c", "a\\b", "x.safetensors", "a/--b"]
    )
    def test_no_such_folder(self, spec: str) -> None:
        with says(
            SourceError,
            "no such f",
            f"{'file' if spec.startswith('x.') else 'folder'}: {spec}",
            hint="owner/name on the hub",
        ):
            resolve_source(spec)

    def test_near_names_are_told(self) -> None:
        for spec, near in (("paligemma", "paligemma-3b"), ("llava-1.6-7b", "llava-1.5-7b")):
            with says(SourceError, "unknown model", spec, hint=near):
                resolve_source(spec)

    @pytest.mark.parametrize("spec", ["", "gpt2", "x" * 300])
    def test_unknown_names_tell_where_the_known_ones_are(self, spec: str) -> None:
        with says(SourceError, "unknown model", spec, hint="`vlmrun models` lists") as caught:
            resolve_source(spec)
        named = [name for name in ALIASES if name in caught.value.hint]
        assert {"siglip", "llava-onevision-0.5b", "paligemma-3b"} <= set(named)
        assert len(named) < 6
        assert all(name in caught.value.hint for name in DEMOS)

    def test_an_unreadable_cache_says_which_file(self, single_file: Path, cache: Path) -> None:
        fill_cache(cache, REPO, single_file)
        ref = cache / "models--someone--tiny" / "refs" / "main"
        ref.write_bytes(b"\xff\xfe")
        with says(SourceError, "cannot read the hub cache", str(ref), hint="HF_HUB_CACHE"):
            resolve_source(REPO)


class TestOffline:
    @pytest.mark.parametrize("fetch", [fetch_configuration, fetch_headers, "model"])
    @pytest.mark.parametrize("variable", [None, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
    def test_nothing_is_asked_and_the_ways_out_are_named(
        self, fetch: object, variable: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if variable:
            monkeypatch.setenv(variable, "1")
        source = resolve_source("llava-onevision-0.5b", offline=variable is None)
        repo_id = ALIASES["llava-onevision-0.5b"]
        words = (repo_id, "not in the hub cache", "network is off")
        with says(SourceError, *words, hint=f"hf download {repo_id}") as caught:
            fetch(source) if callable(fetch) else fetch_model(source, progress=False)
        assert "`--model demo`" in caught.value.hint

    def test_a_part_is_called_a_part(self, single_file: Path, cache: Path) -> None:
        fill_cache(cache, REPO, single_file, without={"model.safetensors"})
        with says(SourceError, "only partly in the hub cache", hint="hf download"):
            fetch_model(resolve_source(REPO, offline=True), progress=False)

    def test_a_cached_model_needs_no_network(self, single_file: Path, cache: Path) -> None:
        fill_cache(cache, REPO, single_file)
        assert resolve_source(REPO, offline=True).complete

    def test_a_library_imported_offline_opens_no_socket(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with says(SourceError, "network is off", hint="`--model demo`"):
            fetch_model(resolve_source(REPO), progress=False)


def test_looking_into_the_cache_imports_no_library(cache: Path, single_file: Path) -> None:
    fill_cache(cache, REPO, single_file)
    code = (
        "import sys\n"
        "from vlmrun.models.checkpoints.source import *\n"
        f"assert resolve_source({REPO!r}).complete and resolve_source('demo').complete\n"
        "assert 'huggingface_hub' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)
