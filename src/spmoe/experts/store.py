"""The store on disk: all experts of a checkpoint as contiguous blobs in one expert file.

The file is a cache. It is a safetensors file with one U8 tensor per blob, aligned for direct reads. Its metadata holds
the checkpoint's fingerprint, the layout of a blob and a checksum of each blob. The file is written atomically, so a
process sees either no file or a complete one.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from spmoe.config import format_bytes
from spmoe.errors import StoreError
from spmoe.files import atomic_write, decode_json
from spmoe.system.cache import EXPERTS_FORMAT, MAX_HEADER_BYTES, build_lock, mark_in_use
from spmoe.system.origin import Origin, origins_to_json, parse_origins
from spmoe.types import ExpertKey

ANNOUNCED_BYTES = 2**20  # smaller files are written at once
ALIGNMENT = 4096  # bytes; start of blobs in the file
_FIELD_ALIGNMENT = 256  # bytes; start of tensors in a blob


@dataclass(frozen=True, slots=True)
class BlobField:
    """Name, shape and position in the blob of one tensor."""

    name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """Arrangement of an expert's tensors in its blob."""

    dtype: str  # a torch dtype's name
    fields: tuple[BlobField, ...]
    nbytes: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Self:
        """Arrange tensors of these shapes one after the other."""
        fields, offset = [], 0
        for name, shape in shapes.items():
            nbytes = dtype.itemsize * torch.Size(shape).numel()
            fields.append(BlobField(name, tuple(shape), offset, nbytes))
            offset = _round_up(offset + nbytes, _FIELD_ALIGNMENT)
        return cls(str(dtype).removeprefix("torch."), tuple(fields), _round_up(offset, ALIGNMENT))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Parse the result of `asdict`."""
        fields = tuple(BlobField(f["name"], tuple(f["shape"]), f["offset"], f["nbytes"]) for f in data["fields"])
        return cls(data["dtype"], fields, data["nbytes"])

    def views(self, blob: Tensor) -> dict[str, Tensor]:
        """Return the expert's tensors as views of its blob."""  # blob: [nbytes] uint8
        dtype = getattr(torch, self.dtype)
        return {f.name: blob[f.offset : f.offset + f.nbytes].view(dtype).view(f.shape) for f in self.fields}


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Required contents of an expert file."""

    fingerprint: str
    layout: BlobLayout
    experts: tuple[int, ...]  # per layer
    origins: tuple[Origin, ...] = field(default=(), compare=False)  # for `spmoe cache`; empty: not recorded

    @property
    def count(self) -> int:
        """Number of experts of all layers."""
        return sum(self.experts)

    @property
    def nbytes(self) -> int:
        """Size of all blobs in bytes."""
        return self.count * self.layout.nbytes

    def keys(self) -> Iterator[ExpertKey]:
        """Iterate over all experts in file order."""
        return (ExpertKey(layer, e) for layer, count in enumerate(self.experts) for e in range(count))


class ExpertFile:
    """Open expert file: offsets and checksums of blobs. A `Transfer` reads them."""

    def __init__(self, path: Path, fd: int, spec: StoreSpec, data_start: int, checksums: list[int]) -> None:
        self.path = path
        self.spec = spec
        self.fd = fd  # closed by `close`
        self._data_start = data_start
        self._checksums = checksums
        self._checked = bytearray(spec.count)
        self._first = [0, *accumulate(spec.experts)]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file; raise StoreError if it is incomplete or not an expert file."""
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                mark_in_use(fd)
                return cls(path, fd, *_read_header(fd))
            except BaseException:
                os.close(fd)
                raise
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise StoreError(f"{path} is not a usable expert file ({error}); delete it to have it rebuilt") from error

    def offset(self, key: ExpertKey) -> int:
        """Return the byte offset of an expert's blob in the file."""
        return self._data_start + self._ordinal(key) * self.spec.layout.nbytes

    def check(self, key: ExpertKey, blob: memoryview) -> None:
        """Compare a blob with its checksum when it is read for the first time."""
        ordinal = self._ordinal(key)
        if not self._checked[ordinal]:
            if zlib.crc32(blob) != self._checksums[ordinal]:
                raise StoreError(
                    f"expert {key.expert} of layer {key.layer} in {self.path} fails its checksum; delete that file "
                    "to have it rebuilt, and check the disk"
                )
            self._checked[ordinal] = 1

    def close(self) -> None:
        """Close the file descriptor; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _ordinal(self, key: ExpertKey) -> int:
        return self._first[key.layer] + key.expert


FillBlob = Callable[[ExpertKey, dict[str, Tensor]], None]  # writes an expert's tensors into the given views


def ensure_expert_file(
    path: Path,
    spec: StoreSpec,
    fill: FillBlob,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_start: Callable[[str], None] = lambda announcement: None,
) -> ExpertFile:
    """Open the expert file at `path`; build it first if it is missing, damaged or of another spec.

    One process builds, others wait for it. `on_start` receives the size, the place and the free space before a file
    worth mentioning is written, `on_progress` the experts written and their total.
    """
    with _storage_errors(path, spec):
        if file := _open_if_current(path, spec):
            return file
        path.parent.mkdir(parents=True, exist_ok=True)
        with build_lock(path):
            if file := _open_if_current(path, spec):
                return file
            for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
                leftover.unlink(missing_ok=True)
            free = _require_space(path, spec)
            if spec.nbytes >= ANNOUNCED_BYTES:
                size, space = format_bytes(spec.nbytes), format_bytes(free)
                on_start(f"writing {size} of experts to {path} (once); {space} are free there")
            with atomic_write(path) as partial:
                _write(partial, spec, fill, on_progress)
            return ExpertFile.open(path)


def _open_if_current(path: Path, spec: StoreSpec) -> ExpertFile | None:
    """Open the file if it is complete and matches the spec."""
    if not path.exists():
        return None
    try:
        file = ExpertFile.open(path)
    except StoreError:
        return None
    if file.spec == spec:
        return file
    file.close()
    return None


def _write(path: Path, spec: StoreSpec, fill: FillBlob, on_progress: Callable[[int, int], None]) -> None:
    blob = torch.zeros(spec.layout.nbytes, dtype=torch.uint8)
    views = spec.layout.views(blob)
    view = memoryview(blob.numpy())  # type: ignore[arg-type]
    checksums: list[int] = []
    placeholder = _header(spec, [0] * spec.count)
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(placeholder))
        for done, key in enumerate(spec.keys()):
            on_progress(done, spec.count)
            fill(key, views)
            checksums.append(zlib.crc32(view))
            _write_all(file.fileno(), view)
        on_progress(spec.count, spec.count)
        file.seek(0)
        _write_all(file.fileno(), memoryview(_header(spec, checksums)))
        os.fsync(file.fileno())


def _read_header(fd: int) -> tuple[StoreSpec, int, list[int]]:
    """Return the spec, the offset of the first blob and the checksums; raise ValueError if the file is damaged."""
    with open(fd, "rb", closefd=False) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError("header too long")
        meta = decode_json(file.read(length))["__metadata__"]
    if meta["format"] != EXPERTS_FORMAT:
        raise ValueError(f"format {meta['format']}")
    layout = BlobLayout.from_json(decode_json(meta["layout"]))
    origins = parse_origins(decode_json(meta.get("origin", "[]")))
    spec = StoreSpec(meta["fingerprint"], layout, tuple(decode_json(meta["experts"])), origins)
    sums = meta["crc32"]
    checksums = [int(sums[i : i + 8], 16) for i in range(0, len(sums), 8)]
    if len(checksums) != spec.count:
        raise ValueError("wrong number of checksums")
    expected = 8 + length + spec.nbytes
    if (actual := os.fstat(fd).st_size) != expected:
        raise ValueError(f"{actual} bytes instead of {expected}")
    return spec, 8 + length, checksums


def _header(spec: StoreSpec, checksums: list[int]) -> bytes:
    """Return a safetensors header; its length does not depend on the checksums."""
    size = spec.layout.nbytes
    header: dict[str, Any] = {
        "__metadata__": {
            "format": EXPERTS_FORMAT,
            "fingerprint": spec.fingerprint,
            "origin": json.dumps(origins_to_json(spec.origins)),
            "layout": json.dumps(asdict(spec.layout)),
            "experts": json.dumps(spec.experts),
            "crc32": "".join(f"{c:08x}" for c in checksums),
        }
    }
    for ordinal, (layer, expert) in enumerate(spec.keys()):
        header[f"layers.{layer}.experts.{expert}"] = {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [ordinal * size, (ordinal + 1) * size],
        }
    text = json.dumps(header).encode()
    text += b" " * (_round_up(8 + len(text), ALIGNMENT) - 8 - len(text))
    return struct.pack("<Q", len(text)) + text


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _require_space(path: Path, spec: StoreSpec) -> int:
    """Return the free bytes where the file will be; raise OSError if they do not suffice."""
    free = shutil.disk_usage(path.parent).free
    if (missing := spec.nbytes - free) > 0:
        raise OSError(errno.ENOSPC, f"{format_bytes(free)} free, {format_bytes(missing)} missing")
    return free


@contextmanager
def _storage_errors(path: Path, spec: StoreSpec) -> Iterator[None]:
    """Turn OSError into a StoreError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            elsewhere = "or point SPMOE_HOME at another disk"
            if spec.layout.dtype == "float32":
                elsewhere = "point SPMOE_HOME at another disk, or pass --dtype bfloat16, which halves the size"
            raise StoreError(
                f"the disk is full: {path.parent} needs {format_bytes(spec.nbytes)} for the expert file "
                f"({error.strerror}); delete cached files (`spmoe cache prune`, `spmoe cache rm`), {elsewhere}"
            ) from error
        raise StoreError(
            f"cannot write the expert file {path} ({error.strerror or error}); point SPMOE_HOME at a writable directory"
        ) from error


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
