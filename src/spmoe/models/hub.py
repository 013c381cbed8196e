"""The model hub: files in its local cache, headers read over the network, and downloads. The only module that uses it.

Commands that only look at a model fetch configuration files and safetensors headers. A download fetches what the model
is loaded from, and nothing else that a repository holds.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from huggingface_hub.utils import logging as hub_logging

from spmoe.errors import CheckpointError, SpmoeError, UsageError, reason
from spmoe.files import GGUF_ADVICE, decode_json
from spmoe.system.disk import disk_of
from spmoe.system.headers import INDEX, QUANTIZATION_FILES, StoredTensor, weight_files

_SMALL_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken")  # configuration, tokenizer and chat template
_SMALL_DIRECTORY = "additional_chat_templates/"
_CONFIG_FILES = ("config.json", "generation_config.json", *QUANTIZATION_FILES)
_THREADS = 8  # headers that are fetched at once
_LINE_SECONDS = 10.0  # between two lines about a download, without a terminal
_GB = 1e9  # download sizes are decimal, as the hub shows them


@dataclass(frozen=True)
class RemoteFiles:
    """A hub model whose weights are not here: its configuration files in the cache, and its tensors' headers."""

    directory: Path  # in the local cache, without weight files
    tensors: dict[str, StoredTensor]
    fingerprint: str  # hash of the commit and of the weight files' names and sizes
    download_bytes: int  # bytes of all files that a run would download


def cached_model(name: str) -> Path | None:
    """Return the directory of a model in the local cache if all its weights are there; uses no network."""
    small = [f"*{suffix}" for suffix in _SMALL_FILES]
    try:
        found = snapshot_download(
            name, allow_patterns=small, ignore_patterns=["*/*", "consolidated*"], local_files_only=True
        )
        directory = Path(found)
        index = directory / INDEX
        content = decode_json(index.read_text(encoding="utf-8")) if index.is_file() else None
        files = weight_files(name, (path.name for path in directory.iterdir()), content)
    except (OSError, ValueError, CheckpointError):  # not cached, not all of it, or damaged
        return None
    return directory if all((directory / file).is_file() for file in files) else None


def config_files(name: str) -> Path:
    """Return a directory with a model's configuration and tokenizer files, fetched if they are not cached."""
    small = [f"*{suffix}" for suffix in _SMALL_FILES]
    with _hub_errors(name):
        return Path(snapshot_download(name, allow_patterns=small, ignore_patterns=["*/*", "consolidated*", INDEX]))


def remote_files(name: str) -> RemoteFiles:
    """Fetch a model's configuration files and safetensors headers; no weights."""
    with _hub_errors(name):
        repository = _Repository.find(name)
        paths = [_fetch(name, file, repository.commit) for file in _CONFIG_FILES if file in repository.sizes]
        weights = repository.weight_files()
        with ThreadPoolExecutor(_THREADS) as threads:
            headers = list(threads.map(lambda file: _fetch_header(name, file, repository.commit), weights))
    tensors = {tensor: entry for header in headers for tensor, entry in header.items()}
    sizes = [(file, repository.sizes.get(file)) for file in weights]
    digest = hashlib.sha256(json.dumps([repository.commit, sizes]).encode()).hexdigest()
    download_bytes = sum(repository.sizes[file] for file in repository.missing())
    return RemoteFiles(paths[0].parent, tensors, digest, download_bytes)


def download(name: str) -> Path:
    """Download what is missing of a model, and return its directory; the cached one if the hub cannot be reached.

    Announces the size on standard error first, and raises CheckpointError if the disk has less room.
    """
    cached = cached_model(name)
    try:
        with _hub_errors(name):
            repository = _Repository.find(name)
            missing = repository.missing()
    except SpmoeError:
        if cached is not None:
            return cached
        raise
    if not missing and cached is not None and cached.name == repository.commit:
        return cached
    size = sum(repository.sizes[file] for file in missing)
    _announce(name, size, len(missing))
    terminal = sys.stderr is not None and sys.stderr.isatty()
    lines = bool(missing) and sys.stderr is not None and not terminal
    with _hub_errors(name, bars=terminal), _progress_lines(name, size) if lines else nullcontext():
        patterns = [glob.escape(file) for file in repository.model_files()]
        return Path(snapshot_download(name, allow_patterns=patterns))


def dataset_file(repository: str, file: str) -> Path:
    """Return the local path of a file of a hub dataset, downloading it if it is not cached."""
    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except Exception as error:  # the hub client raises anything from a socket error to its own classes
        raise UsageError(
            f"{file} of the dataset {repository} cannot be had from the hub ({reason(error)}); go online, or pass a "
            "local file"
        ) from error


@dataclass(frozen=True)
class _Repository:
    """The newest commit of a model's repository on the hub."""

    name: str
    commit: str
    sizes: dict[str, int]  # bytes by file name
    blobs: dict[str, str]  # name in the cache's `blobs` directory, by file name
    base_model: str | None  # the model that this one was made from, as its model card says

    @classmethod
    def find(cls, name: str) -> _Repository:
        """Ask the hub for a model's files."""
        info = HfApi().model_info(name, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        files = info.siblings or []
        base = getattr(info.card_data, "base_model", None)
        return cls(
            name,
            info.sha or "",
            {file.rfilename: file.size or 0 for file in files},
            {file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id or "" for file in files},
            base[0] if isinstance(base, list) and base else base if isinstance(base, str) else None,
        )

    def weight_files(self) -> list[str]:
        """Return the weight files; fetches the index, if there is one."""
        if "config.json" not in self.sizes and any(name.endswith(".gguf") for name in self.sizes):
            original = f" (its model card names {self.base_model})" if self.base_model else ""
            raise UsageError(f"{self.name} holds only GGUF files; {GGUF_ADVICE}{original}")
        if "config.json" not in self.sizes:
            raise UsageError(
                f"{self.name} on the hub has no config.json, so it is not a transformers model; check the name"
            )
        index = None
        if INDEX in self.sizes:
            index = decode_json(_fetch(self.name, INDEX, self.commit).read_text(encoding="utf-8"))
        files = weight_files(self.name, self.sizes, index)
        if absent := [file for file in files if file not in self.sizes]:
            raise CheckpointError(f"{self.name} on the hub lacks {absent[0]}, which its index names; use another copy")
        return files

    def model_files(self) -> list[str]:
        """Return the files that a run needs: weights, configuration, tokenizer and chat template."""
        small = [
            file
            for file in self.sizes
            if file.endswith(_SMALL_FILES)
            and ("/" not in file or file.startswith(_SMALL_DIRECTORY))
            and not file.startswith("consolidated")
        ]
        return [*small, *self.weight_files()]

    def missing(self) -> list[str]:
        """Return the files that a run needs and that are not in the local cache."""
        blobs = _blobs(self.name)
        return [
            file
            for file in self.model_files()
            if not isinstance(try_to_load_from_cache(self.name, file, revision=self.commit), str)
            and not (self.blobs[file] and (blobs / self.blobs[file]).is_file())
        ]


def _fetch(name: str, file: str, commit: str) -> Path:
    return Path(hf_hub_download(name, file, revision=commit))


def _fetch_header(name: str, file: str, commit: str) -> dict[str, StoredTensor]:
    header = HfApi().parse_safetensors_file_metadata(name, file, revision=commit)
    return {tensor: StoredTensor(entry.dtype, tuple(entry.shape), file) for tensor, entry in header.tensors.items()}


def _announce(name: str, size: int, count: int) -> None:
    """Say what is going to be downloaded, and check that it fits on the disk."""
    if not count:
        return
    cache = Path(constants.HF_HUB_CACHE).expanduser()
    free = disk_of(cache).free
    what = f"{_decimal(size)} of {name} ({count} file{'s' * (count > 1)}) to {_shown(cache)}"
    if size > free:
        raise CheckpointError(
            f"downloading {what} needs more than the {_decimal(free)} that are free there; free some space, or set "
            "HF_HOME to a directory on a larger disk"
        )
    if sys.stderr is not None:
        print(f"downloading {what}; {_decimal(free)} free", file=sys.stderr, flush=True)


@contextmanager
def _progress_lines(name: str, size: int) -> Iterator[None]:
    """Print every few seconds how much of a download of `size` bytes is done, where no progress bar is shown."""
    before, ended = _cached_bytes(name), threading.Event()

    def report() -> None:
        while not ended.wait(_LINE_SECONDS):
            done = max(0, _cached_bytes(name) - before)
            print(f"downloading {name}: {_decimal(done)} of {_decimal(size)}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, name="spmoe-download", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _blobs(name: str) -> Path:
    """Return the directory of a model's files in the hub's cache, also of those that are still being downloaded."""
    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"


def _cached_bytes(name: str) -> int:
    total = 0
    with suppress(OSError):  # no directory yet, or a file was just renamed
        for entry in os.scandir(_blobs(name)):
            total += entry.stat().st_size
    return total


def _decimal(count: int) -> str:
    return f"{count / _GB:.1f} GB" if count >= _GB / 10 else f"{count / 1e6:.1f} MB"


def _shown(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


@contextmanager
def _hub_errors(name: str, *, bars: bool = False) -> Iterator[None]:
    """Turn any exception of the hub client into an error of one clear line; show its progress bars only if asked."""
    verbosity, disabled = hub_logging.get_verbosity(), are_progress_bars_disabled()
    hub_logging.set_verbosity(logging.ERROR)
    if not bars:
        disable_progress_bars()
    try:
        yield
    except (SpmoeError, MemoryError):
        raise
    except Exception as error:  # anything from a socket error to its own classes
        raise _explain(name, error) from error
    finally:
        hub_logging.set_verbosity(verbosity)
        if not disabled:
            enable_progress_bars()


def _explain(name: str, error: Exception) -> SpmoeError:
    chain = _causes(error)
    if constants.HF_HUB_OFFLINE or any(isinstance(one, OfflineModeIsEnabled) for one in chain):
        return CheckpointError(
            f"there is no directory {name}, and the local hub cache does not hold all of a model of that name; check "
            "the spelling, or unset HF_HUB_OFFLINE to use the network"
        )
    if any(isinstance(one, GatedRepoError) for one in chain):
        return CheckpointError(
            f"{name} is gated: accept its terms on {constants.ENDPOINT}/{name}, then set HF_TOKEN to a token of that "
            "account (or run `hf auth login`)"
        )
    if any(isinstance(one, RepositoryNotFoundError) for one in chain):
        return UsageError(
            f"there is no directory {name}, and the hub has no public model of that name; check the spelling, or set "
            "HF_TOKEN if it is private"
        )
    if any(isinstance(one, EntryNotFoundError) and not isinstance(one, LocalEntryNotFoundError) for one in chain):
        return CheckpointError(
            f"a file of {name} is missing on the hub ({reason(error)}); use another copy of the model"
        )
    if any(isinstance(one, (SafetensorsParsingError, json.JSONDecodeError)) for one in chain):
        return CheckpointError(f"a file of {name} on the hub is damaged ({reason(error)}); use another copy of it")
    status = next((one.response.status_code for one in chain if isinstance(one, HfHubHTTPError)), None)
    if status is not None:
        return CheckpointError(f"the hub answers {status} for {name} ({reason(error)}); try again later")
    return CheckpointError(
        f"there is no directory {name}, and the hub cannot be reached ({reason(chain[-1])}); check the network and "
        "HF_ENDPOINT, or give a local directory"
    )


def _causes(error: BaseException) -> Sequence[Any]:
    """Return an exception and those that it was raised from."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain
