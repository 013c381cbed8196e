"""Origin of a cached file: the checkpoints that it was made from, recorded in the file itself."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spmoe.errors import CheckpointError
from spmoe.files import decode_json, read_into
from spmoe.system.headers import INDEX, QUANTIZATION_FILES, StoredTensor, parse_header, read_raw_header, weight_files

_PAGE = 4096  # bytes of a sample
_WHOLE_BYTES = 2**20  # weight files up to this size are hashed whole
_THREADS = 8  # files that are sampled at once


class OriginState(StrEnum):
    """Comparison of a checkpoint with its state when the cached file was written."""

    UNCHANGED = "unchanged"
    CHANGED = "changed"
    GONE = "gone"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint when a cached file was made from it."""

    name: str  # hub id, or directory
    directory: str  # of its files; of a hub model, the snapshot; empty: not recorded
    fingerprint: str

    def state(self) -> OriginState:
        """Compare with the checkpoint's files as they are now; reads headers and samples of the weights."""
        directory = Path(self.directory)
        if not self.directory:
            return OriginState.UNREADABLE
        try:
            if not (directory / "config.json").exists():
                return OriginState.GONE
            same = fingerprint(directory) == self.fingerprint
        except FileNotFoundError:  # a shard of the index
            return OriginState.CHANGED
        except (OSError, ValueError, CheckpointError):
            return OriginState.UNREADABLE
        return OriginState.UNCHANGED if same else OriginState.CHANGED


def fingerprint(directory: Path) -> str:
    """Return a hash of a checkpoint: configuration, index, and each weight file's size, time, header and samples.

    Times alone would miss weights that were replaced with their times kept (`cp -p`, images with normalised times);
    samples alone would miss a change of a few values. Reading everything takes minutes for a large model. So one page
    is read of every tensor, and of every expert in a fused tensor: no expert is replaced unnoticed. 20,000 pages take
    0.3 s from the page cache; an SSD, asked for several files at once, should need little more. A spinning disk needs a
    minute or two, but is too slow to run experts from anyway.
    """
    index = directory / INDEX
    listed = index.read_bytes() if index.is_file() else b""
    names = [path.name for path in directory.iterdir()]
    files = weight_files(str(directory), names, decode_json(listed) if listed else None)
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    digest.update(listed)
    for file in QUANTIZATION_FILES:
        if file in names:
            digest.update(f"{file}:".encode() + (directory / file).read_bytes())
    with ThreadPoolExecutor(_THREADS) as threads:
        for file, summary in zip(files, threads.map(lambda file: _summarize(directory, file), files), strict=True):
            digest.update(f"{file}:".encode() + summary)
    return digest.hexdigest()


def converter() -> str:
    """Return the software whose rules turn a checkpoint's tensors into experts, with its version.

    Our own part of that work has a version too: `cache.EXPERTS_FORMAT`.
    """
    return f"transformers {version('transformers')}"


def _summarize(directory: Path, file: str) -> bytes:
    """Return a hash of a weight file's size, time, header and sampled pages; of all its bytes if it is small."""
    path = directory / file
    found = path.stat()
    digest = hashlib.sha256(f"{found.st_size}:{found.st_mtime_ns}:".encode())
    if found.st_size <= _WHOLE_BYTES:
        digest.update(path.read_bytes())
        return digest.digest()
    text, size = read_raw_header(path)
    digest.update(text)
    page = bytearray(_PAGE)
    fd = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: it would read 32 times as much
        for offset in _pages(parse_header(file, text, size)):
            digest.update(memoryview(page)[: read_into(fd, memoryview(page), offset)])
    finally:
        os.close(fd)
    return digest.digest()


def _pages(tensors: Mapping[str, StoredTensor]) -> Iterator[int]:
    """Yield the offset of one page in each tensor, or in each expert of a fused tensor [experts, ...]."""
    for name, tensor in tensors.items():
        fused = len(tensor.shape) >= 3 and tensor.nbytes >= tensor.shape[0] * _PAGE > 0
        count = tensor.shape[0] if fused else 1
        size = tensor.nbytes // count
        for part in range(count):
            first = tensor.offset + part * size
            inside = zlib.crc32(f"{name}:{part}".encode()) % max(1, size - 2 * _PAGE)
            # a page of the file, so that the disk is read once; a smaller tensor shares its page with its neighbours
            yield first + inside if size < 2 * _PAGE else -(-(first + inside) // _PAGE) * _PAGE


def origins_to_json(origins: Iterable[Origin]) -> list[dict[str, str]]:
    """Return plain values for a file's header."""
    return [asdict(one) for one in origins]


def parse_origins(data: Any) -> tuple[Origin, ...]:
    """Read the result of `origins_to_json`; empty for files that were written without it."""
    fields = ("name", "directory", "fingerprint")
    if not isinstance(data, list) or not all(isinstance(one, dict) for one in data):
        return ()
    if not all(isinstance(one.get(field), str) for one in data for field in fields):
        return ()
    return tuple(Origin(*(one[field] for field in fields)) for one in data)
