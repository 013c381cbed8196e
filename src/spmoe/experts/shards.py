"""The store in place: experts are read from the checkpoint's own files, and nothing is written.

A blob is made of pieces, each a range of bytes in a weight file. There are no checksums of blobs. Instead, a file is
the one that the checkpoint's fingerprint was taken of as long as its size and time are the same: they are compared
after every read, and a change is an error. Values that are not finite are found when a blob is first read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from spmoe.errors import StoreError
from spmoe.experts.store import StoreSpec
from spmoe.files import read_into
from spmoe.types import ExpertKey

CheckBlob = Callable[[ExpertKey, torch.Tensor], None]  # takes a blob: [nbytes] uint8


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a blob: `nbytes` of a file from `offset` on, which belong at byte `start` of the blob."""

    file: str
    offset: int
    nbytes: int
    start: int


class ShardedExperts:
    """Reads blobs from a checkpoint's weight files. A `Transfer` or a store in memory calls `read`, on any thread."""

    def __init__(
        self, directory: Path, spec: StoreSpec, index: Mapping[ExpertKey, Sequence[Piece]], check: CheckBlob
    ) -> None:
        """Open the files; `check` raises an exception if a blob that is read for the first time cannot be used."""
        self.path = directory
        self.spec = spec
        self._index = index
        self._check = check
        self._checked = bytearray(spec.count)
        self._first = [0, *accumulate(spec.experts)]
        self._files: dict[str, int] = {}  # descriptors
        self._states: dict[str, tuple[int, int]] = {}
        try:
            for file in sorted({piece.file for pieces in index.values() for piece in pieces}):
                self._files[file] = os.open(directory / file, os.O_RDONLY)
                self._states[file] = _state(self._files[file])
        except OSError as error:
            self.close()
            raise StoreError(f"cannot open {directory / file} ({error.strerror}); check its permissions") from error

    def read(self, key: ExpertKey, buffer: memoryview) -> None:
        """Read an expert's blob into a buffer; bytes between its tensors stay as they are."""
        pieces = self._index[key]
        for piece in pieces:
            part = buffer[piece.start : piece.start + piece.nbytes]
            if missing := piece.nbytes - read_into(self._files[piece.file], part, piece.offset):
                raise OSError(f"{piece.file} ends {missing} bytes early")
        for file in {piece.file for piece in pieces}:
            if _state(self._files[file]) != self._states[file]:
                raise StoreError(
                    f"{self.path / file} was written to while experts are read from it; start again, and let nothing "
                    "change it meanwhile"
                )
        ordinal = self._first[key.layer] + key.expert
        if not self._checked[ordinal]:
            self._check(key, torch.frombuffer(buffer, dtype=torch.uint8))
            self._checked[ordinal] = 1

    def close(self) -> None:
        """Close the files; idempotent."""
        while self._files:
            os.close(self._files.popitem()[1])


def _state(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns
