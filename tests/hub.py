"""A model hub on this machine: the part of the Hugging Face Hub's interface that huggingface_hub
asks for, over plain HTTP, served from local folders. It keeps a log of what it sent.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, slots=True)
class Request:
    """One answered request. `sent` counts bytes of the body, which HEAD has none of."""

    method: str
    path: str
    range: str | None
    status: int
    sent: int


@dataclass(slots=True)
class Cut:
    """Close the connection when this many bytes of a file have been sent, so many times."""

    after: int
    times: float


class Hub:
    """Serves repositories (hub id -> folder) from entering to leaving the `with` block.

    `refusals` maps a hub id to how it is refused: "private", "gated", "token" or an HTTP status.
    """

    def __init__(self, repos: Mapping[str, Path], *, commit: str = COMMIT) -> None:
        self.repos = dict(repos)
        self.commit = commit
        self.refusals: dict[str, str | int] = {}
        self.requests: list[Request] = []
        self.cuts: dict[str, Cut] = {}
        self._server = _Server(("127.0.0.1", 0), _Answer)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables that send vlmrun here, in this process or another one."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }

    def visit(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Send vlmrun here for the rest of a test."""
        for name, value in self.environment(cache).items():
            monkeypatch.setenv(name, value)

    def cut(self, name: str, *, after: int, times: float = float("inf")) -> None:
        """Close the connection after `after` bytes of each file called `name`."""
        self.cuts[name] = Cut(after, times)

    def downloads(self, name: str) -> list[Request]:
        """The GET requests for the content of files called `name`."""
        return [
            request
            for request in self.requests
            if request.method == "GET" and request.path.endswith(f"/{name}")
        ]


class _Server(ThreadingHTTPServer):
    hub: Hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Answer(BaseHTTPRequestHandler):
    """HTTP/1.0: each answer closes its connection, so none outlives the server."""

    server: _Server

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, format: str, *args: Any) -> None:
        """The log is `Hub.requests`."""

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if asked:
            repo_id, what, revision = asked.groups()
            self.answer_about(repo_id, what, revision)
        elif file:
            self.answer_file(*file.groups())
        else:
            self.fail(404)

    def answer_about(self, repo_id: str, what: str | None, revision: str | None) -> None:
        if self.refused(repo_id, revision, content=False):
            return
        hub = self.server.hub
        names = _names(hub.repos[repo_id])
        if what == "tree":
            self.send_json([_tree_entry(hub.repos[repo_id], name) for name in names])
        else:
            siblings = [{"rfilename": name} for name in names]
            self.send_json({"id": repo_id, "sha": hub.commit, "siblings": siblings})

    def answer_file(self, repo_id: str, revision: str, name: str) -> None:
        if self.refused(repo_id, revision, content=True):
            return
        hub = self.server.hub
        path = hub.repos[repo_id] / name
        if not path.is_file():
            self.fail(404, "EntryNotFound")
            return
        data = path.read_bytes()
        start, stop = _range(self.headers.get("Range"), len(data))
        self.send_response(206 if self.headers.get("Range") else 200)
        if self.headers.get("Range"):
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("ETag", f'"{_etag(name, data)}"')
        self.send_header("X-Repo-Commit", hub.commit)
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        cut = hub.cuts.get(path.name)
        if self.command == "GET" and cut and cut.times > 0 and cut.after < stop:
            cut.times -= 1
            stop = max(start, cut.after)
        body = data[start:stop] if self.command == "GET" else b""
        self.log(206 if self.headers.get("Range") else 200, len(body))
        self.wfile.write(body)

    def refused(self, repo_id: str, revision: str | None, *, content: bool) -> bool:
        """Answer with the hub's error, if there is one; a gated model can be listed."""
        hub = self.server.hub
        refusal = hub.refusals.get(repo_id)
        if repo_id not in hub.repos or refusal == "private":
            self.fail(401 if refusal else 404, "RepoNotFound")
        elif refusal == "token":
            self.fail(401, message="Invalid credentials in Authorization header")
        elif refusal == "gated" and content:
            self.fail(403, "GatedRepo")
        elif isinstance(refusal, int):
            self.fail(refusal)
        elif revision not in (None, "main", hub.commit):
            self.fail(404, "RevisionNotFound")
        else:
            return False
        return True

    def fail(self, status: int, code: str = "", *, message: str = "") -> None:
        self.send_response(status)
        for name, value in (("X-Error-Code", code), ("X-Error-Message", message)):
            if value:
                self.send_header(name, value)
        self.send_header("X-Repo-Commit", self.server.hub.commit)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.log(status, 0)

    def send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.log(200, len(body))
        self.wfile.write(body)

    def log(self, status: int, sent: int) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = self.headers.get("Range")
        self.server.hub.requests.append(Request(self.command, path, asked, status, sent))


def fill_cache(
    cache: Path,
    repo_id: str,
    folder: Path,
    *,
    commit: str = COMMIT,
    revision: str = "main",
    without: Collection[str] = (),
) -> Path:
    """Write a model's entry of a hub cache as huggingface_hub does; returns the snapshot."""
    entry = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = entry / "snapshots" / commit
    (entry / "refs").mkdir(parents=True, exist_ok=True)
    (entry / "refs" / revision).write_text(commit)
    (entry / "blobs").mkdir(exist_ok=True)
    for name in _names(folder):
        if name in without:
            continue
        blob = entry / "blobs" / _etag(name, (folder / name).read_bytes())
        shutil.copyfile(folder / name, blob)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def _names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _tree_entry(folder: Path, name: str) -> dict[str, object]:
    data = (folder / name).read_bytes()
    entry = {"type": "file", "path": name, "size": len(data), "oid": _etag("", data)}
    if name.endswith(".safetensors"):
        lfs = {"oid": _etag(name, data), "size": len(data), "pointerSize": 134}
        return {**entry, "lfs": lfs}
    return entry


def _etag(name: str, data: bytes) -> str:
    """What the hub calls a content: sha256 in large-file storage, git's blob hash elsewhere."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _range(header: str | None, size: int) -> tuple[int, int]:
    """First and one past the last byte of `bytes=first-last`."""
    if header is None:
        return 0, size
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", header)
    assert asked, header
    return int(asked[1]), min(size, int(asked[2]) + 1 if asked[2] else size)
