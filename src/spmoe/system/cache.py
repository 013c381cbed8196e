"""Files that spmoe keeps under its home directory: list them, tell what they belong to, and delete them.

Only files that spmoe wrote are listed and deleted; symbolic links are not followed. Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from spmoe.config import home
from spmoe.files import decode_json
from spmoe.system.origin import Origin, OriginState, converter, parse_origins

EXPERTS_FORMAT = "spmoe-experts-3"  # raise it when the layout changes, or the bytes that conversion writes
PREDICTOR_FORMAT = "spmoe-predictor-1"
EXPERTS, PROFILES, PREDICTORS = "experts", "profiles", "predictors"  # folders
MAX_HEADER_BYTES = 1 << 30

# after the dtype: nothing, a quantized draft such as -int4 (matched as a group), or an expert format such as -int4-g128
_EXPERT_FILE = re.compile(r".+-[0-9a-f]{12}-(?:float32|bfloat16|float16)(?:(-(?:.+-)?int[48])|-[\w-]+)?\.safetensors")
_PARTIAL = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.partial")  # written by `atomic_write`
_PROFILE = re.compile(r"(threads-|governor-)?[0-9a-f]{20}(?:-\d+)?\.json")  # with a number of sequences
_PREDICTOR = re.compile(r"[0-9a-f]{20}\.safetensors()")
_NAMES = {EXPERTS: _EXPERT_FILE, PROFILES: _PROFILE, PREDICTORS: _PREDICTOR}
_FORMATS = {EXPERTS: EXPERTS_FORMAT, PREDICTORS: PREDICTOR_FORMAT}
_WRITE_SECONDS = 60.0  # a small file is written at once; an older partial file is a leftover


class Kind(StrEnum):
    """Purpose of a cached file."""

    EXPERTS = "experts"
    QUANTIZED_DRAFT = "quantized draft"
    PROFILE = "profile"
    GOVERNOR = "governor"  # what it has learned of the costs of each K
    THREADS = "threads"  # the measured number of intra-op threads
    PROJECTION = "projection"
    PARTIAL = "partial file"


class State(StrEnum):
    """Usability of a cached file."""

    CURRENT = "current"
    UNKNOWN = "unknown"  # it does not record its model, or that cannot be read
    STALE = "stale"  # its model has changed, or the version of the software that converted it
    MODEL_GONE = "model gone"
    OLD_FORMAT = "old format"
    DAMAGED = "damaged"
    LEFTOVER = "leftover"  # of a process that was killed
    BEING_WRITTEN = "being written"


_PROFILE_KINDS = {None: Kind.PROFILE, "threads-": Kind.THREADS, "governor-": Kind.GOVERNOR}  # by prefix
PRUNABLE = frozenset({State.STALE, State.MODEL_GONE, State.OLD_FORMAT, State.DAMAGED, State.LEFTOVER})


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One cached file. Times are seconds since the epoch."""

    path: Path
    kind: Kind
    state: State
    nbytes: int
    modified: float
    last_used: float
    origins: tuple[Origin, ...] = ()  # target first; empty: unknown

    @property
    def name(self) -> str:
        """Name that `spmoe cache` shows and accepts: the file name without its suffix."""
        return self.path.name if self.kind is Kind.PARTIAL else self.path.stem

    @property
    def belongs_to(self) -> str:
        """Names of the models, for people."""
        return " + ".join(one.name for one in self.origins) or "unknown"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "name": self.name,
            "kind": str(self.kind),
            "state": str(self.state),
            "path": str(self.path),
            "bytes": self.nbytes,
            "modified": _iso(self.modified),
            "last_used": _iso(self.last_used),
            "models": [one.name for one in self.origins],
        }


# ---- listing


def list_cache(directory: Path | None = None) -> list[CacheEntry]:
    """Return every file that spmoe has written under its home directory, largest first."""
    root = (directory or home()).resolve()
    states: dict[Origin, OriginState] = {}
    entries = [
        entry for folder in (EXPERTS, PROFILES, PREDICTORS) for entry in _list_folder(root / folder, folder, states)
    ]
    return sorted(entries, key=lambda entry: (-entry.nbytes, entry.name))


def linked_folders(directory: Path | None = None) -> list[Path]:
    """Return the cache's folders that are symbolic links, which are not followed."""
    root = (directory or home()).resolve()
    return [root / folder for folder in (EXPERTS, PROFILES, PREDICTORS) if (root / folder).is_symlink()]


def _list_folder(folder: Path, name: str, states: dict[Origin, OriginState]) -> Iterator[CacheEntry]:
    try:
        if folder.is_symlink():
            return
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in paths:
        with suppress(FileNotFoundError):  # deleted meanwhile
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and (entry := _read_entry(path, name, found, states)) is not None:
                yield entry


def _read_entry(path: Path, folder: str, found: os.stat_result, states: dict[Origin, OriginState]) -> CacheEntry | None:
    """Describe one file; None if spmoe did not write it."""
    size, modified, used = found.st_size, found.st_mtime, max(found.st_mtime, found.st_atime)
    if _PARTIAL.fullmatch(path.name):
        state = State.BEING_WRITTEN if _is_being_written(path) else State.LEFTOVER
        return CacheEntry(path, Kind.PARTIAL, state, size, modified, modified)
    named = _NAMES[folder].fullmatch(path.name)
    try:
        state, origins = _describe_json(path) if folder == PROFILES else _describe_safetensors(path, folder, size)
    except PermissionError:
        state, origins = State.UNKNOWN, ()
    except (ValueError, LookupError, TypeError):
        state, origins = State.DAMAGED, ()
    if not named and (folder == PROFILES or state in (State.UNKNOWN, State.DAMAGED)):
        return None
    if state is State.CURRENT:
        state = _state_of(origins, states)
    return CacheEntry(path, _kind(folder, named[1] if named else None), state, size, modified, used, origins)


def _kind(folder: str, variant: str | None) -> Kind:
    """Return the purpose of a file; `variant`: the optional part of its name."""
    if folder == EXPERTS:
        return Kind.QUANTIZED_DRAFT if variant else Kind.EXPERTS
    return Kind.PROJECTION if folder == PREDICTORS else _PROFILE_KINDS[variant]


Description = tuple[State, tuple[Origin, ...]]


def _describe_json(path: Path) -> Description:
    """Return state and origins of a profile; raise ValueError if it is not a JSON object."""
    values = decode_json(_read_quietly(path, MAX_HEADER_BYTES))
    if not isinstance(values, dict):
        raise ValueError("not an object")
    origins = parse_origins(values.get("origin"))
    if not origins and isinstance(model := values.get("model"), str):  # the name alone
        origins = (Origin(model, "", ""),)
    return State.CURRENT, origins


def _describe_safetensors(path: Path, folder: str, nbytes: int) -> Description:
    """Return state and origins of an expert file or predictor; raise ValueError if it is neither."""
    header, header_bytes = _read_safetensors_header(path)
    meta = header.get("__metadata__")
    family, _, version = _FORMATS[folder].rpartition("-")
    found = re.fullmatch(rf"{re.escape(family)}-(\d+)", str(meta.get("format"))) if isinstance(meta, dict) else None
    if meta is None or found is None:
        raise ValueError("another format")
    try:
        origins = parse_origins(decode_json(meta.get("origin", "[]")))
    except (ValueError, TypeError):
        origins = ()
    if found[1] != version:  # a newer spmoe may still use its files
        return (State.OLD_FORMAT if int(found[1]) < int(version) else State.UNKNOWN), origins
    ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
    if nbytes != header_bytes + max(ends, default=0):
        return State.DAMAGED, origins
    return (State.CURRENT if meta.get("converter", converter()) == converter() else State.STALE), origins


def _state_of(origins: tuple[Origin, ...], known: dict[Origin, OriginState]) -> State:
    for origin in origins:
        if origin not in known:
            known[origin] = origin.state()
    states = {known[origin] for origin in origins}
    if OriginState.GONE in states:
        return State.MODEL_GONE
    if OriginState.CHANGED in states:
        return State.STALE
    return State.CURRENT if states == {OriginState.UNCHANGED} else State.UNKNOWN


def _read_safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and its length in bytes; raise ValueError if it has none."""
    try:
        (length,) = struct.unpack("<Q", _read_quietly(path, 8))
        if length > MAX_HEADER_BYTES:
            raise ValueError("header too long")
        return dict(decode_json(_read_quietly(path, 8 + length)[8:])), 8 + length
    except (TypeError, struct.error) as error:
        raise ValueError("no header") from error


def _read_quietly(path: Path, count: int) -> bytes:
    """Read the first bytes of a file without changing its time of last use."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # only the owner may open a file with O_NOATIME
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(fd, "rb") as file:  # noqa: PTH123
        return file.read(count)


# ---- use and deletion


def mark_in_use(fd: int) -> None:
    """Protect an open expert file from `delete` until it is closed, and record that it is used now."""
    with suppress(OSError):  # a file system without locks, or another user's file
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))  # mounts with noatime do not do it by themselves


def build_lock(path: Path) -> FileLock:
    """Return the lock that a process holds while it builds the expert file at `path`."""
    return FileLock(path.with_suffix(".lock"))


def delete(entry: CacheEntry) -> str | None:
    """Delete a cached file; return why it was kept, or None if it is gone."""
    try:
        with _locked(entry):
            entry.path.unlink(missing_ok=True)
    except (BlockingIOError, Timeout):
        return "a running process uses it"
    except OSError as error:
        return error.strerror or str(error)
    return None


@contextmanager
def _locked(entry: CacheEntry) -> Iterator[None]:
    """Hold the locks of a cached file; raise BlockingIOError or Timeout if another process has one."""
    path, partial = entry.path, _PARTIAL.fullmatch(entry.path.name)
    with ExitStack() as held:
        if path.parent.name == EXPERTS:
            held.enter_context(build_lock(path.with_name(partial["name"]) if partial else path).acquire(timeout=0))
        elif partial and _is_being_written(path):
            raise BlockingIOError
        if entry.kind in (Kind.EXPERTS, Kind.QUANTIZED_DRAFT):
            with suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                held.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _is_being_written(path: Path) -> bool:
    """Return whether a running process writes this partial file."""
    partial = _PARTIAL.fullmatch(path.name)
    assert partial is not None
    if path.parent.name != EXPERTS:
        return time.time() - path.lstat().st_mtime < _WRITE_SECONDS
    lock = build_lock(path.with_name(partial["name"]))
    if not Path(lock.lock_file).exists():
        return False
    try:
        with lock.acquire(timeout=0):
            return False
    except (Timeout, PermissionError):  # of another process, or of another user's
        return True


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
