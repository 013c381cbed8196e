"""The few calls of the CUDA runtime that PyTorch does not offer, or offers too slowly: copies, and locking of pages.

The library is the one PyTorch has loaded. Calls through `ctypes` let go of the interpreter lock, and cost a few
microseconds where a tensor's `copy_` costs thirty.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spmoe.errors import SpmoeError

_HOST_TO_DEVICE = 1
_STREAM_ORDER = 1  # sources are read when the stream gets there, not during the call
_BATCH_FROM = 24  # pieces; a batch of few takes 90 us to submit on an H200, a single copy about 5
_BATCHES_SINCE, _SIMPLER_BATCHES_SINCE = 12_080, 13_000  # runtime versions


class CopyRange(NamedTuple):
    """A run of bytes to move from the host to the device."""

    to: int
    source: int
    nbytes: int


class CudaCallError(SpmoeError):
    """The CUDA runtime refused a call."""


class _Attributes(ctypes.Structure):
    _fields_ = (("order", ctypes.c_int), ("places", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class CudaRuntime:
    """Streams and events are PyTorch's; addresses are plain numbers."""

    def __init__(self) -> None:
        torch.cuda.init()
        self._library = ctypes.CDLL(_runtime_library())
        version = ctypes.c_int()
        self._check(self._library.cudaRuntimeGetVersion(ctypes.byref(version)), "asking for the runtime's version")
        self.version = version.value
        self._batches = self.version >= _BATCHES_SINCE and hasattr(self._library, "cudaMemcpyBatchAsync")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        pointer = ctypes.c_void_p
        self._library.cudaMemcpyAsync.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer]

    def copy(self, pieces: Sequence[CopyRange], stream: torch.cuda.Stream) -> None:
        """Put copies from host to device on a stream, in no order among them; many as one submission if possible."""
        handle = stream.cuda_stream
        if len(pieces) >= _BATCH_FROM and self._batches:
            self._check(self._copy_batch(pieces, ctypes.c_void_p(handle)), "submitting a batch of copies")
            return
        for to, source, nbytes in pieces:
            code = self._library.cudaMemcpyAsync(to, source, nbytes, _HOST_TO_DEVICE, handle)
            if code:
                self._check(code, "submitting a copy")

    def lock_pages(self, address: int, nbytes: int) -> None:
        """Page-lock memory, so that the device reads it at full speed and asynchronously."""
        code = self._library.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(0))
        self._check(code, "locking pages")

    def unlock_pages(self, address: int) -> None:
        """Undo `lock_pages`."""
        self._library.cudaHostUnregister(ctypes.c_void_p(address))

    def _copy_batch(self, pieces: Sequence[CopyRange], handle: ctypes.c_void_p) -> int:
        count = len(pieces)
        to = (ctypes.c_void_p * count)(*(p.to for p in pieces))
        sources = (ctypes.c_void_p * count)(*(p.source for p in pieces))
        sizes = (ctypes.c_size_t * count)(*(p.nbytes for p in pieces))
        attributes, first = _Attributes(order=_STREAM_ORDER), ctypes.c_size_t(0)
        failed: list[Any] = [] if self.version >= _SIMPLER_BATCHES_SINCE else [ctypes.byref(ctypes.c_size_t())]
        return self._library.cudaMemcpyBatchAsync(  # type: ignore[no-any-return]
            to,
            sources,
            sizes,
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *failed,
            handle,
        )

    def _check(self, code: int, doing: str) -> None:
        if code:
            self._library.cudaGetLastError()  # an error that was seen must not show up again at somebody else's call
            raise CudaCallError(f"{doing} failed: {self._library.cudaGetErrorString(code).decode()}")


@cache
def cuda_runtime() -> CudaRuntime:
    """The process's driver."""
    return CudaRuntime()


def _runtime_library() -> str:
    """The file of the CUDA runtime that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if match := re.search(r"(/\S*/libcudart[^/\s]*\.so[^/\s]*)$", line):
            return match[1]
    raise SpmoeError("PyTorch has loaded no CUDA runtime; install a CUDA build of torch, or use --device cpu")
