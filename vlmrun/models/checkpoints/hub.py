"""The model hub, asked through huggingface_hub; what it raises becomes one line and a hint.

The library reads HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE once, at its import. Here they are
read at each call and given to it, so that nothing depends on who imported it first.
"""

import errno
import functools
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from vlmrun.errors import CheckpointError, SourceError, UnsupportedModel, VlmrunError
from vlmrun.models.checkpoints.file_names import (
    ALL_BUT_WEIGHTS,
    CONFIGURATION,
    CONFIGURATIONS,
    INDEX,
    PICKLE_INDEX,
    find_weights,
    is_pickled,
)
from vlmrun.models.checkpoints.folder import read_json
from vlmrun.models.checkpoints.hub_cache import cache_folder

CONNECT_SECONDS = 3.0  # for each address of the hub, which has several
ANSWER_SECONDS = 10.0
TIMEOUT = (CONNECT_SECONDS, ANSWER_SECONDS, ANSWER_SECONDS, CONNECT_SECONDS)  # as httpx has it
OFFLINE_VALUES = {"1", "ON", "YES", "TRUE"}
AGAIN = "run it again: files that are whole are kept"


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def network_is_off() -> bool:
    """Whether HF_HUB_OFFLINE, or transformers' word for it, says so."""
    asked = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return asked.upper() in OFFLINE_VALUES


def download_configuration(repo_id: str, revision: str | None) -> Path:
    """Download the configuration into the hub cache; returns the snapshot's folder."""
    _list_files(repo_id, revision)
    return _download(repo_id, revision, CONFIGURATION, progress=False)


def download_model(repo_id: str, revision: str | None, *, progress: bool) -> Path:
    """Download all that a run needs into the hub cache; returns the snapshot's folder.

    Weights come last, so a snapshot that has them all has the small files, too.
    """
    _, names = _list_files(repo_id, revision)
    folder = _download(repo_id, revision, ALL_BUT_WEIGHTS, progress=False)
    weights = _weight_files(repo_id, _weights_of(repo_id, names), names, folder)
    return _download(repo_id, folder.name, [escape(name) for name in weights], progress=progress)


def read_headers(repo_id: str, revision: str | None) -> dict[str, dict[str, object]]:
    """Read safetensors headers by range requests: file -> tensor -> dtype, shape, offsets.

    The library asks for the first 100 kB of each file, and for the rest of a longer header.
    What a pickled file holds is said in many places of it, so it must be downloaded.
    """
    commit, names = _list_files(repo_id, revision)
    weights = _weights_of(repo_id, names)
    if is_pickled(weights):
        raise UnsupportedModel(
            f"{repo_id} has pickled weights only, which cannot be looked into on the hub",
            f"download it first: hf download {repo_id}",
        )
    folder = (
        _download(repo_id, commit, [escape(weights)], progress=False) if weights == INDEX else None
    )
    files = _weight_files(repo_id, weights, names, folder)
    api = _library().HfApi(endpoint=endpoint())

    def read(name: str) -> dict[str, object]:
        found = api.parse_safetensors_file_metadata(repo_id, name, revision=commit, timeout=TIMEOUT)
        return {
            tensor: {"dtype": i.dtype, "shape": i.shape, "data_offsets": i.data_offsets}
            for tensor, i in found.tensors.items()
        }

    with _translating(repo_id, revision), ThreadPoolExecutor(8) as pool:
        return dict(zip(files, pool.map(read, files), strict=True))


def _library() -> Any:
    """huggingface_hub, imported late for start-up time and without its telemetry, which costs a
    request to the hub before the first one of ours."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


def _list_files(repo_id: str, revision: str | None) -> tuple[str, frozenset[str]]:
    """Ask the hub for a revision's commit and file names.

    Asked before anything is downloaded because this is the request whose time-out can be set:
    a dead network is found in seconds, where the download itself would try for minutes.
    """
    api = _library().HfApi(endpoint=endpoint())
    with _translating(repo_id, revision, reached=False):
        info = api.model_info(repo_id, revision=revision, timeout=TIMEOUT)
    names = frozenset(sibling.rfilename for sibling in info.siblings or ())
    if names.isdisjoint(CONFIGURATIONS):
        raise CheckpointError(
            f"{repo_id} on the hub holds no config.json",
            "give a model in transformers' format, with config.json and safetensors weights",
        )
    return str(info.sha), names


def _weights_of(repo_id: str, names: frozenset[str]) -> str:
    """The file of a listed repository that holds its weights, or their index."""
    found = find_weights(names)
    if found is None:
        raise UnsupportedModel(
            f"{repo_id} on the hub holds no weights that are read",
            "GGUF, TensorFlow's, Flax's and others are not; look for a safetensors version",
        )
    return found


def _weight_files(
    repo_id: str, weights: str, names: frozenset[str], folder: Path | None
) -> list[str]:
    """The weight files of a listed repository; `folder` holds the index, if `weights` is one."""
    if weights not in (INDEX, PICKLE_INDEX):
        return [weights]
    assert folder is not None
    weight_map = read_json(folder / weights).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{weights} of {repo_id} has no weight_map", "give another --revision"
        )
    files = sorted({str(name) for name in weight_map.values()})
    absent = [name for name in files if name not in names]
    if absent:
        raise CheckpointError(
            f"{weights} of {repo_id} names {absent[0]}, which the repository does not hold",
            "the upload is incomplete; give another --revision",
        )
    return files


def _download(
    repo_id: str, revision: str | None, patterns: Sequence[str], *, progress: bool
) -> Path:
    library = _library()
    quiet = functools.partial(library.utils.tqdm, disable=True)
    with _translating(repo_id, revision), _notes(shown=progress):
        folder = library.snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=cache_folder(),
            endpoint=endpoint(),
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],  # other formats and parts lie in folders; none is read
            etag_timeout=ANSWER_SECONDS,
            tqdm_class=None if progress else quiet,
        )
    return Path(folder)


@contextmanager
def _notes(*, shown: bool) -> Iterator[None]:
    """Keep the library's notes on each retry off stderr, unless a person watches."""
    logging = _library().utils.logging
    before = logging.get_verbosity()
    if not shown:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _translating(repo_id: str, revision: str | None, *, reached: bool = True) -> Iterator[None]:
    """Turn what the library and the layers below it raise into one line and a hint.

    `reached`: the hub has answered before, so a lost connection was cut.
    """
    errors = _library().errors
    try:
        yield
    except errors.SafetensorsParsingError as error:
        raise CheckpointError(
            f"a weight file of {repo_id} has a damaged header: {_first_line(error)}",
            "give another --revision",
        ) from error
    # RuntimeError: the library's Rust part; ValueError and KeyError: an answer that is no hub's.
    except (errors.HTTPError, OSError, RuntimeError, ValueError, KeyError) as error:
        shown = error
        if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
            shown = error.__cause__  # "not in the cache either", raised from the real reason
        raise _explain(shown, repo_id, revision, reached) from error


def _explain(
    error: BaseException, repo_id: str, revision: str | None, reached: bool
) -> VlmrunError:
    errors = _library().errors
    if isinstance(error, errors.OfflineModeIsEnabled):
        return not_cached(repo_id, partly=False)
    if isinstance(error, errors.HfHubHTTPError):
        return _refused(error, repo_id, revision)
    if isinstance(error, OSError) and error.errno is not None:
        return _unwritable(error, repo_id)
    if not isinstance(error, errors.HTTPError):
        what = f"{endpoint()} does not answer as a model hub" if not reached else "download failed"
        return SourceError(f"{what} for {repo_id}: {_first_line(error)}", _ways_out(repo_id))
    if reached:
        return SourceError(
            f"the connection to {endpoint()} was cut during the download of {repo_id}: "
            f"{_first_line(error)}",
            AGAIN,
        )
    return SourceError(
        f"cannot reach {endpoint()} for {repo_id}: {_first_line(error)}", _ways_out(repo_id)
    )


def _refused(error: Any, repo_id: str, revision: str | None) -> SourceError:
    """The hub's answer was an error."""
    errors = _library().errors
    status = error.response.status_code
    page = f"{endpoint()}/{repo_id}"
    login = "set HF_TOKEN or run `hf auth login`"
    if isinstance(error, errors.GatedRepoError):
        return SourceError(
            f"{repo_id} is gated: its licence must be accepted first",
            f"accept it at {page}, then {login}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(
            f"{repo_id} has no revision {revision!r}", f"see its branches and tags at {page}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceError(
            f"no model {repo_id} at {endpoint()}, or it is private",
            f"check the spelling; for a private model {login}",
        )
    if status in (401, 403):
        return SourceError(
            f"{endpoint()} refuses access to {repo_id} (HTTP {status})",
            f"{login}, with a token that may read it",
        )
    if status == 429:
        return SourceError(f"{endpoint()} was asked too often (HTTP 429)", f"wait, or {login}")
    later = "try later; " if status >= 500 else ""
    return SourceError(
        f"{endpoint()} answered HTTP {status} for {repo_id}", later + _ways_out(repo_id)
    )


def _unwritable(error: OSError, repo_id: str) -> SourceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SourceError(
            f"the disk of {cache_folder()} is full; {repo_id} is not downloaded",
            "make room, or set HF_HUB_CACHE to a folder on another disk; " + AGAIN,
        )
    return SourceError(
        f"cannot use the hub cache: {error.filename or cache_folder()}: {error.strerror}",
        "set HF_HUB_CACHE to a folder that can be written",
    )


def not_cached(repo_id: str, *, partly: bool) -> SourceError:
    """The error of a model that is not, or only partly, in the cache while the network is off."""
    degree = "only partly" if partly else "not"
    return SourceError(
        f"{repo_id} is {degree} in the hub cache {cache_folder()}, and the network is off",
        _ways_out(repo_id),
    )


def _ways_out(repo_id: str) -> str:
    return (
        f"run once with a network, or fetch it with `hf download {repo_id}`; "
        "`--model demo` (captions) and `--model demo-siglip` (vectors) are packaged and need none"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return re.sub(r"^\[Errno -?\d+\] ", "", lines[0]) if lines else type(error).__name__
