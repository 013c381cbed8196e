"""The store on disk: all experts of a checkpoint as contiguous blobs in one expert file.

The file is a cache. It is a safetensors file with one U8 tensor per blob, aligned for direct reads. Its metadata holds
the checkpoint's fingerprint, the software that converted it, the layout of a blob and a checksum of each blob. The file
is written atomically, so a process sees either no file or a complete one.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate, count
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from spmoe.config import format_bytes
from spmoe.errors import StoreError
from spmoe.files import atomic_write, decode_json, read_into
from spmoe.formats.layout import ALIGNMENT, BlobLayout, round_up
from spmoe.system.cache import EXPERTS_FORMAT, MAX_HEADER_BYTES, build_lock, mark_in_use
from spmoe.system.origin import Origin, origins_to_json, parse_origins
from spmoe.types import ExpertKey

ANNOUNCED_BYTES = 2**20  # smaller files are written at once
_SAMPLE_EVERY = 16  # with `sample`, one of so many reads is compared with its checksum


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Required contents of an expert file."""

    fingerprint: str
    layout: BlobLayout
    experts: tuple[int, ...]  # per layer
    converter: str = ""  # software that converts tensors to experts, with its version
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

    def __init__(
        self, path: Path, fd: int, spec: StoreSpec, data_start: int, checksums: list[int], verify: str = "once"
    ) -> None:
        self.path = path
        self.spec = spec
        self.fd = fd  # closed by `close`
        self._data_start = data_start
        self._checksums = checksums
        self._verify = verify  # one of `config.VERIFY_EXPERTS`
        self._checked = bytearray(spec.count)
        self._reads = count()  # of experts that were checked before
        self._first = [0, *accumulate(spec.experts)]

    @classmethod
    def open(cls, path: Path, verify: str = "once") -> Self:
        """Open a file; raise StoreError if it is incomplete or not an expert file.

        `verify`: compare a blob with its checksum when it is first read (`once`), also at one of 16 later reads
        (`sample`), or at every read (`always`).
        """
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                mark_in_use(fd)
                return cls(path, fd, *_read_header(fd), verify)
            except BaseException:
                os.close(fd)
                raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
            raise StoreError(f"{path} is not a usable expert file ({error}); delete it to have it rebuilt") from error

    def offset(self, key: ExpertKey) -> int:
        """Return the byte offset of an expert's blob in the file."""
        return self._data_start + self._ordinal(key) * self.spec.layout.nbytes

    def read(self, key: ExpertKey, buffer: memoryview) -> None:
        """Read an expert's blob into a buffer and check it; raise OSError if the file is cut off."""
        if missing := len(buffer) - read_into(self.fd, buffer, self.offset(key)):
            raise OSError(f"the file ends {missing} bytes early")
        self.check(key, buffer)

    def check(self, key: ExpertKey, blob: memoryview) -> None:
        """Compare a blob that was just read with its checksum, if it is read for the first time or `verify` says so.

        A file with a wrong blob is deleted, so that the next engine writes it anew; this one fails with StoreError.
        """
        ordinal = self._ordinal(key)
        if self._checked[ordinal] and not self._checks_again():
            return
        if not self.expects(key, blob):
            self._checked[ordinal] = 0
            todo = "the file was deleted, and the next run writes it again"
            if not self._delete():
                todo = "delete that file to have it rebuilt"
            raise StoreError(
                f"expert {key.expert} of layer {key.layer} in {self.path} fails its checksum; {todo}; check the disk"
            )
        self._checked[ordinal] = 1

    def expects(self, key: ExpertKey, blob: memoryview) -> bool:
        """Return whether a blob has the checksum that is recorded for this expert."""
        return zlib.crc32(blob) == self._checksums[self._ordinal(key)]

    def close(self) -> None:
        """Close the file descriptor; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _checks_again(self) -> bool:
        if self._verify == "sample":
            return next(self._reads) % _SAMPLE_EVERY == 0  # next() is atomic; several threads read
        return self._verify == "always"

    def _delete(self) -> bool:
        """Delete the file, unless another one has its name by now; return whether the damaged file is gone."""
        try:
            if os.path.samestat(self.path.stat(), os.fstat(self.fd)):
                self.path.unlink()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _ordinal(self, key: ExpertKey) -> int:
        return self._first[key.layer] + key.expert


FillBlob = Callable[[ExpertKey, dict[str, Tensor]], None]  # writes an expert's tensors into the given views


def ensure_expert_file(
    path: Path,
    spec: StoreSpec,
    fill: FillBlob,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_start: Callable[[str], None] = lambda announcement: None,
    verify: str = "once",
) -> ExpertFile:
    """Open the expert file at `path`; build it first if it is missing, damaged or of another spec.

    One process builds, others wait for it. `on_start` receives the size, the place and the free space before a file
    worth mentioning is written, and why it is written again; `on_progress` the experts written and their total.
    `verify` is that of `ExpertFile.open`.
    """
    with _storage_errors(path, spec):
        file, _ = _open_if_current(path, spec, verify)
        if file is not None:
            return file
        path.parent.mkdir(parents=True, exist_ok=True)
        with build_lock(path):
            file, outdated = _open_if_current(path, spec, verify)
            if file is not None:
                return file
            for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
                leftover.unlink(missing_ok=True)
            free = _require_space(path, spec)
            if outdated or spec.nbytes >= ANNOUNCED_BYTES:
                size, space = format_bytes(spec.nbytes), format_bytes(free)
                times = f"again: {outdated}" if outdated else "once"
                on_start(f"writing {size} of experts to {path} ({times}); {space} are free there")
            with atomic_write(path) as partial:
                _write(partial, spec, fill, on_progress)
            return ExpertFile.open(path, verify)


def damaged_experts(file: ExpertFile, on_progress: Callable[[int, int], None]) -> list[ExpertKey]:
    """Read a whole file and return the experts whose blobs fail their checksums."""
    buffer, found = memoryview(bytearray(file.spec.layout.nbytes)), []
    for done, key in enumerate(file.spec.keys()):
        on_progress(done, file.spec.count)
        if read_into(file.fd, buffer, file.offset(key)) < len(buffer) or not file.expects(key, buffer):
            found.append(key)
    on_progress(file.spec.count, file.spec.count)
    return found


def outdated_experts(file: ExpertFile, fill: FillBlob, on_progress: Callable[[int, int], None]) -> list[ExpertKey]:
    """Convert every expert again and return those whose checksum in the file is another one; writes nothing."""
    blob = torch.zeros(file.spec.layout.nbytes, dtype=torch.uint8)
    views, found = file.spec.layout.views(blob), []
    for done, key in enumerate(file.spec.keys()):
        on_progress(done, file.spec.count)
        fill(key, views)
        if not file.expects(key, memoryview(blob.numpy())):  # type: ignore[arg-type]
            found.append(key)
    on_progress(file.spec.count, file.spec.count)
    return found


def _open_if_current(path: Path, spec: StoreSpec, verify: str) -> tuple[ExpertFile | None, str]:
    """Open the file if it is complete and matches the spec; else return why not, which is empty without a file."""
    if not path.exists():
        return None, ""
    try:
        file = ExpertFile.open(path, verify)
    except StoreError:
        return None, "the file is damaged or of an older format"
    if file.spec == spec:
        return file, ""
    file.close()
    if file.spec.converter != spec.converter:
        return None, f"it was made with {file.spec.converter or 'other software'}, and this is {spec.converter}"
    held, wanted = file.spec.layout, spec.layout
    if (held.format, held.version) != (wanted.format, wanted.version):
        return None, f"it holds {_named(held)}, and this is {_named(wanted)}"
    return None, "the checkpoint has changed"


def _named(layout: BlobLayout) -> str:
    return f"{layout.format}, version {layout.version}"


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
    spec = StoreSpec(meta["fingerprint"], layout, tuple(decode_json(meta["experts"])), meta["converter"], origins)
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
            "converter": spec.converter,
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
    text += b" " * (round_up(8 + len(text), ALIGNMENT) - 8 - len(text))
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
            if spec.layout.format == "float32":
                elsewhere = "point SPMOE_HOME at another disk, or pass --dtype bfloat16, which halves the size"
            elif spec.layout.format == "bfloat16":
                elsewhere = (
                    "point SPMOE_HOME at another disk, or pass --expert-format bf16-packed, which saves a quarter"
                )
            raise StoreError(
                f"the disk is full: {path.parent} needs {format_bytes(spec.nbytes)} for the expert file "
                f"({error.strerror}); delete cached files (`spmoe cache prune`, `spmoe cache rm`), {elsewhere}"
            ) from error
        raise StoreError(
            f"cannot write the expert file {path} ({error.strerror or error}); point SPMOE_HOME at a writable directory"
        ) from error
