import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import termios
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from hub import COMMIT, Hub, fill_cache
from repos import REPO, UNWANTED, WANTED, WEIGHT_BYTES, says
from safetensors.numpy import save_file

from vlmrun.errors import CheckpointError, SourceError, UnsupportedModel, VlmrunError
from vlmrun.models.checkpoints.source import (
    ALIASES,
    fetch_configuration,
    fetch_headers,
    fetch_model,
    resolve_source,
)

pytestmark = pytest.mark.usefixtures("cache")

OPEN_CLIP_ONLY = {"open_clip_model.safetensors"}


def form(folder: Path, files: list[str]) -> Path:
    """A repository with these weight files and, where there are pickled shards, their index."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "siglip"}')
    for name in files:
        (folder / name).write_bytes(b"weights")
    shards = [name for name in files if "-of-" in name]
    if shards:
        index = {"weight_map": {name: name for name in shards}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


class TestDownload:
    @pytest.mark.parametrize("repo_id", [REPO, "someone/sharded"])
    def test_exactly_what_a_run_needs(self, repo_id: str, hub: Hub, cache: Path) -> None:
        source = fetch_model(resolve_source(repo_id), progress=False)
        assert source.complete
        assert source.revision == COMMIT
        assert source.folder is not None
        held = {p.relative_to(source.folder).as_posix() for p in source.folder.rglob("*")}
        assert held > WANTED
        assert not held & (UNWANTED | {"onnx"})
        for path in source.folder.glob("*.safetensors"):
            assert path.read_bytes() == (hub.repos[repo_id] / path.name).read_bytes()
        assert resolve_source(repo_id) == source

    def test_the_second_time_nothing_is_downloaded(self, hub: Hub) -> None:
        fetch_model(resolve_source(REPO), progress=False)
        hub.requests.clear()
        assert resolve_source(REPO).complete
        fetch_model(resolve_source(REPO), progress=False)
        assert not [r for r in hub.requests if r.method == "GET" and "/resolve/" in r.path]

    def test_only_what_is_missing_is_downloaded(self, hub: Hub, sharded: Path, cache: Path) -> None:
        shard = "model-00002-of-00002.safetensors"
        fill_cache(cache, "someone/sharded", sharded, without={shard})
        source = fetch_model(resolve_source("someone/sharded"), progress=False)
        assert source.complete
        downloaded = [r.path for r in hub.requests if r.method == "GET" and "/resolve/" in r.path]
        assert downloaded == [f"/someone/sharded/resolve/{COMMIT}/{shard}"]

    def test_the_configuration_alone(self, hub: Hub) -> None:
        source = fetch_configuration(resolve_source(REPO))
        assert source.folder is not None
        assert {p.name for p in source.folder.iterdir()} == {
            "config.json",
            "preprocessor_config.json",
        }
        assert (source.revision, source.complete) == (COMMIT, False)
        assert resolve_source(REPO) == source

    @pytest.mark.parametrize("repo_id", [REPO, "someone/sharded"])
    def test_headers_without_weights(self, repo_id: str, hub: Hub, cache: Path) -> None:
        headers = fetch_headers(resolve_source(repo_id))
        files = {p.name for p in hub.repos[repo_id].glob("*.safetensors")}
        assert set(headers) == files
        for name, header in headers.items():
            raw = (hub.repos[repo_id] / name).read_bytes()
            written = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            assert json.loads(json.dumps(header)) == written
            (request,) = hub.downloads(name)
            assert request.range is not None
            assert request.sent < WEIGHT_BYTES / 2
        assert not list(cache.rglob("*.safetensors"))

    def test_a_header_longer_than_the_first_request(
        self, hub: Hub, single_file: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "long"
        shutil.copytree(single_file, folder)
        tensors = {f"layer.{i}.{'x' * 200}": np.ones((300,), np.float32) for i in range(600)}
        save_file(tensors, folder / "model.safetensors")
        hub.repos["someone/long"] = folder
        header = fetch_headers(resolve_source("someone/long"))["model.safetensors"]
        assert set(header) == set(tensors)

    @pytest.mark.parametrize(
        ("files", "wanted"),
        [
            (["pytorch_model.bin", "tf_model.h5", "training_args.bin"], {"pytorch_model.bin"}),
            (
                ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
                {"pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"},
            ),
            (["open_clip_model.safetensors", "open_clip_pytorch_model.bin"], OPEN_CLIP_ONLY),
            (["sigclip.safetensors", "model.gguf"], {"sigclip.safetensors"}),
            (["model.safetensors", "pytorch_model.bin", "x.safetensors"], {"model.safetensors"}),
        ],
    )
    def test_weights_in_other_forms(
        self, files: list[str], wanted: set[str], hub: Hub, tmp_path: Path
    ) -> None:
        """One form of the weights is downloaded, safetensors where there are any."""
        hub.repos["someone/form"] = form(tmp_path / "form", files)
        source = fetch_model(resolve_source("someone/form"), progress=False)
        assert source.folder is not None
        weights = (".bin", ".safetensors", ".h5", ".gguf")
        assert {p.name for p in source.folder.iterdir() if p.name.endswith(weights)} == wanted
        assert resolve_source("someone/form") == source

    def test_open_clip_s_repositories_have_a_configuration_of_their_own(
        self, hub: Hub, tmp_path: Path
    ) -> None:
        folder = form(tmp_path / "form", ["open_clip_model.safetensors"])
        (folder / "config.json").rename(folder / "open_clip_config.json")
        hub.repos["someone/form"] = folder
        source = fetch_configuration(resolve_source("someone/form"))
        assert source.folder is not None
        assert {p.name for p in source.folder.iterdir()} == {"open_clip_config.json"}
        assert resolve_source("someone/form") == source
        assert fetch_model(source, progress=False).complete

    @pytest.mark.parametrize("shards", [1, 2])
    def test_pickles_are_not_looked_into_from_afar(
        self, shards: int, hub: Hub, tmp_path: Path
    ) -> None:
        names = ["pytorch_model.bin"] if shards == 1 else ["a-00001-of-00001.bin"]
        hub.repos["someone/form"] = form(tmp_path / "form", names)
        hint = "download it first: hf download someone/form"
        with says(UnsupportedModel, "someone/form has pickled weights only", hint=hint):
            fetch_headers(resolve_source("someone/form"))
        assert not [r for r in hub.requests if r.path.endswith((".bin", ".bin.index.json"))]

    def test_progress_on_shows_the_library_s_bars_on_a_terminal(
        self, hub: Hub, cache: Path
    ) -> None:
        code = (
            "from vlmrun.models.checkpoints.source import *\n"
            f"fetch_model(resolve_source({REPO!r}), progress=True)"
        )
        main, child = os.openpty()
        termios.tcsetwinsize(child, (24, 80))
        environment = os.environ | hub.environment(cache)
        run = [sys.executable, "-c", code]
        subprocess.run(
            run, env=environment, stderr=child, check=True, cwd=Path(__file__).parents[3]
        )
        os.close(child)
        assert b"Fetching" in os.read(main, 10_000)
        os.close(main)


class TestTrouble:
    @pytest.mark.parametrize(
        ("refusal", "words", "hint"),
        [
            ("private", ("no model someone/tiny", "private"), "HF_TOKEN"),
            ("gated", ("gated", "licence"), "accept it at http://127.0.0.1"),
            ("token", ("refuses access", "401"), "hf auth login"),
            (403, ("refuses access", "403"), "hf auth login"),
            (429, ("too often",), "wait"),
            (500, ("HTTP 500", REPO), "try later"),
            (503, ("HTTP 503", REPO), "`--model demo`"),
        ],
    )
    def test_refusals(
        self, refusal: str | int, words: tuple[str, ...], hint: str, hub: Hub
    ) -> None:
        hub.refusals[REPO] = refusal
        with says(SourceError, *words, hint=hint):
            fetch_model(resolve_source(REPO), progress=False)

    def test_an_unknown_model(self, hub: Hub) -> None:
        with says(SourceError, "no model someone/tinny", hint="spelling"):
            fetch_model(resolve_source("someone/tinny"), progress=False)

    def test_an_unknown_revision(self, hub: Hub) -> None:
        with says(SourceError, "no revision 'v9'", hint=f"{hub.endpoint}/{REPO}"):
            fetch_model(resolve_source(REPO, revision="v9"), progress=False)

    def test_the_commit_is_a_revision(self, hub: Hub) -> None:
        source = fetch_model(resolve_source(REPO, revision=COMMIT), progress=False)
        assert resolve_source(REPO, revision=COMMIT) == source

    @pytest.mark.parametrize(
        ("absent", "kind", "words"),
        [
            ("config.json", CheckpointError, "no config.json"),
            ("model.safetensors.index.json", UnsupportedModel, "no weights that are read"),
            (
                "model-00002-of-00002.safetensors",
                CheckpointError,
                "names model-00002-of-00002.safetensors",
            ),
        ],
    )
    def test_a_repository_that_lacks_files(
        self,
        absent: str,
        kind: type[VlmrunError],
        words: str,
        hub: Hub,
        sharded: Path,
        tmp_path: Path,
    ) -> None:
        shutil.copytree(sharded, tmp_path / "lacking")
        (tmp_path / "lacking" / absent).unlink()
        (tmp_path / "lacking" / "pytorch_model.bin").unlink()
        hub.repos["someone/lacking"] = tmp_path / "lacking"
        with says(kind, words, hint=""):
            fetch_model(resolve_source("someone/lacking"), progress=False)
        assert not hub.downloads("model-00001-of-00002.safetensors")

    def test_a_damaged_header(self, hub: Hub, single_file: Path, tmp_path: Path) -> None:
        shutil.copytree(single_file, tmp_path / "damaged")
        (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\x05" * 100)
        hub.repos["someone/damaged"] = tmp_path / "damaged"
        with says(CheckpointError, "damaged header", "model.safetensors", hint="--revision"):
            fetch_headers(resolve_source("someone/damaged"))

    def test_a_download_cut_once_goes_on_where_it_was(
        self, hub: Hub, no_waiting: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
        hub.cut("model.safetensors", after=150_000, times=1)
        assert fetch_model(resolve_source(REPO), progress=False).complete
        first, second = hub.downloads("model.safetensors")
        assert (first.sent, second.range) == (150_000, "bytes=150000-")

    def test_a_download_cut_for_good_keeps_whole_files(self, hub: Hub, no_waiting: None) -> None:
        hub.cut("model-00002-of-00002.safetensors", after=150_000)
        source = resolve_source("someone/sharded")
        words = (hub.endpoint, "was cut during the download of someone/sharded")
        with says(SourceError, *words, hint="run it again"):
            fetch_model(source, progress=False)
        assert not resolve_source("someone/sharded").complete
        hub.cuts.clear()
        hub.requests.clear()
        assert fetch_model(source, progress=False).complete
        assert not hub.downloads("model-00001-of-00002.safetensors")

    def test_a_header_cut_in_the_middle(self, hub: Hub) -> None:
        hub.cut("model.safetensors", after=10)
        with says(SourceError, "was cut", REPO, hint="run it again"):
            fetch_headers(resolve_source(REPO))

    @pytest.mark.parametrize("fetch", [fetch_configuration, fetch_headers, "model"])
    @pytest.mark.parametrize(
        ("endpoint", "reason"),
        [
            ("http://127.0.0.1:9", ": Connection refused"),
            ("nonsense", "protocol"),
        ],
    )
    def test_a_hub_out_of_reach(
        self, endpoint: str, reason: str, fetch: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("NO_PROXY", "*")
        source = resolve_source("siglip")
        words = ("cannot reach", endpoint, ALIASES["siglip"], reason)
        with says(SourceError, *words, hint="hf download google/siglip") as caught:
            fetch(source) if callable(fetch) else fetch_model(source, progress=False)
        assert "`--model demo`" in caught.value.hint

    def test_a_hub_that_never_answers_is_given_up_soon(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vlmrun.models.checkpoints.hub.TIMEOUT", (0.2, 0.2, 0.2, 0.2))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
            with says(SourceError, "cannot reach", "timed out", hint="`--model demo`"):
                fetch_model(resolve_source(REPO), progress=False)

    def test_a_page_that_is_no_hub(self, monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
        monkeypatch.setattr("hub._Answer.send_json", lambda self, value: self.fail(200))
        with says(SourceError, "does not answer as a model hub", hint="`--model demo`"):
            fetch_model(resolve_source(REPO), progress=False)

    def test_a_cache_that_cannot_be_written(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("file").touch()
        monkeypatch.setenv("HF_HUB_CACHE", "file/cache")
        with says(SourceError, "cannot use the hub cache", hint="HF_HUB_CACHE"):
            fetch_model(resolve_source(REPO), progress=False)

    def test_a_full_disk(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("huggingface_hub.file_download._chmod_and_move", full)
        with says(SourceError, "is full", REPO, hint="make room"):
            fetch_model(resolve_source(REPO), progress=False)


def test_another_process_finds_the_hub_and_says_nothing(hub: Hub, cache: Path) -> None:
    hub.cut("model.safetensors", after=1000, times=1)  # the library notes that it tries again
    code = (
        "import sys\n"
        "from vlmrun.models.checkpoints.source import *\n"
        f"assert fetch_model(resolve_source({REPO!r}), progress=False).complete\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    run = [sys.executable, "-c", code]
    environment = os.environ | hub.environment(cache)
    done = subprocess.run(
        run, env=environment, cwd=Path(__file__).parents[3], capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (b"", b"")
    assert resolve_source(REPO).complete
    foreign = [r.path for r in hub.requests if REPO not in r.path]
    assert foreign == []  # the library's telemetry would ask for a list of agents
