"""Disks: space, kind of file system, measured read speed, and the size of the hub's cache."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spmoe.files import read_into

FILE_BYTES = 128 * 2**20  # size of the temporary file
_BLOCK_BYTES = 8 * 2**20  # one read or write
_WRITE_SECONDS = 2.0  # the file stays smaller on a disk that is slow to write
_READ_SECONDS = 1.0
_MAX_SHARE = 0.05  # of the free space


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system of a directory. Sizes are in bytes."""

    directory: Path  # as asked for; it may not exist yet
    existing: Path  # the nearest ancestor that exists
    total: int
    free: int  # for this user
    file_system: str | None  # such as ext4 or overlay
    writable: bool


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """Measured speed of sequential reads."""

    bytes_per_second: float
    direct: bool  # False: the file system does not allow reads that bypass the page cache


def disk_of(directory: Path) -> Disk:
    """Return the file system that a directory lies on, or would lie on."""
    directory = Path(os.path.abspath(directory.expanduser()))  # noqa: PTH100
    existing = directory
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    usage = shutil.disk_usage(existing)
    blocked = directory.exists() and not directory.is_dir()
    writable = not blocked and os.access(existing, os.W_OK | os.X_OK)
    return Disk(directory, existing, usage.total, usage.free, _file_system(existing), writable)


def measure_read_speed(directory: Path, nbytes: int = FILE_BYTES) -> ReadSpeed:
    """Time reads of a temporary file that bypass the page cache where possible; takes at most a few seconds.

    The file has no name, so nothing remains of it, however this process ends.
    """
    nbytes = min(nbytes, int(_MAX_SHARE * shutil.disk_usage(directory).free)) // _BLOCK_BYTES * _BLOCK_BYTES
    if nbytes == 0:
        raise OSError("too little free space to measure")
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file, mmap.mmap(-1, _BLOCK_BYTES) as buffer:
        view = memoryview(buffer)  # aligned to a page, as direct reads require
        try:
            view[:] = os.urandom(_BLOCK_BYTES)  # a file system may compress or share blocks of zeros
            size, until = 0, time.monotonic() + _WRITE_SECONDS
            while size < nbytes and time.monotonic() < until:
                size += file.write(view) or 0
            os.fsync(file.fileno())
            size = size // _BLOCK_BYTES * _BLOCK_BYTES
            _drop_from_page_cache(file.fileno())
            for direct in (True, False):
                with suppress(OSError, AttributeError):  # tmpfs and some FUSE file systems, systems without O_DIRECT
                    _set_direct(file.fileno(), direct)
                    return ReadSpeed(_timed_reads(file.fileno(), view, size), direct)
            raise OSError("the file system allows no reads")
        finally:
            view.release()


def _timed_reads(fd: int, view: memoryview, size: int) -> float:
    """Read a file from its start for a second at most; return bytes per second."""
    done, started = 0, time.perf_counter()
    while done < size and time.perf_counter() - started < _READ_SECONDS:
        done += read_into(fd, view, done)
    return done / (time.perf_counter() - started)


def _drop_from_page_cache(fd: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _set_direct(fd: int, direct: bool) -> None:
    """Make reads of an open file bypass the page cache, or not."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~getattr(os, "O_DIRECT", 0))


def _file_system(path: Path) -> str | None:
    """Return the type of the file system that a path is on."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    resolved = path.resolve()
    best: tuple[str, str | None] = ("", None)
    for line in lines:
        _, mounted, kind, *_ = [*line.split(), "", "", ""]
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), mounted)  # spaces are written as \040
        if point and resolved.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


# ---- the hub's cache


def hub_home() -> Path:
    """Return the directory of Hugging Face's files: `HF_HOME`, else the default."""
    if explicit := os.environ.get("HF_HOME"):
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"


def hub_cache() -> Path:
    """Return the directory of models that the hub's client has downloaded."""
    explicit = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(explicit).expanduser() if explicit else hub_home() / "hub"


@dataclass(frozen=True, slots=True)
class HubCacheSize:
    """Contents of the hub's cache."""

    models: int
    nbytes: int
    incomplete_bytes: int  # of downloads that were interrupted


def hub_cache_size() -> HubCacheSize:
    """Measure the hub's cache; links to blobs do not count."""
    models = nbytes = incomplete = 0
    for repository in hub_cache().glob("models--*"):
        models += 1
        for blob in (repository / "blobs").glob("*"):
            size = blob.lstat().st_size
            nbytes += size
            incomplete += size if blob.suffix == ".incomplete" else 0
    return HubCacheSize(models, nbytes, incomplete)
