"""CUDA runtime calls that PyTorch lacks or makes slowly: asynchronous copies and pinning of existing memory.

The library is the one that PyTorch has loaded. Calls through `ctypes` release the GIL and take a few microseconds;
a tensor's `copy_` takes thirty.
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
_STREAM_ORDER = 1  # the source is read in stream order, not during the call
_MIN_BATCH = 24  # copies; submitting a small batch takes 90 us on an H200, a single copy about 5 us
_BATCH_API_VERSION, _BATCH_API_V2_VERSION = 12_080, 13_000  # version 2 has no argument for the failed index


class CopyRange(NamedTuple):
    """Addresses and size of one copy from host to device."""

    to: int
    source: int
    nbytes: int


class CudaCallError(SpmoeError):
    """A CUDA runtime call failed."""


class _Attributes(ctypes.Structure):
    """`cudaMemcpyAttributes`."""

    _fields_ = (("order", ctypes.c_int), ("locations", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class CudaRuntime:
    """Binding of the loaded CUDA runtime library; streams are PyTorch's, addresses are integers."""

    def __init__(self) -> None:
        torch.cuda.init()
        self._library = ctypes.CDLL(_runtime_library())
        version = ctypes.c_int()
        self._check(self._library.cudaRuntimeGetVersion(ctypes.byref(version)), "cudaRuntimeGetVersion")
        self.version = version.value
        self._has_batch_copies = self.version >= _BATCH_API_VERSION and hasattr(self._library, "cudaMemcpyBatchAsync")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        pointer = ctypes.c_void_p
        self._library.cudaMemcpyAsync.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer]

    def copy(self, copies: Sequence[CopyRange], stream: torch.cuda.Stream) -> None:
        """Enqueue copies from host to device on a stream; they may run in any order among themselves."""
        handle = stream.cuda_stream
        if len(copies) >= _MIN_BATCH and self._has_batch_copies:
            self._check(self._copy_batch(copies, ctypes.c_void_p(handle)), "cudaMemcpyBatchAsync")
            return
        for to, source, nbytes in copies:
            code = self._library.cudaMemcpyAsync(to, source, nbytes, _HOST_TO_DEVICE, handle)
            if code:
                self._check(code, "cudaMemcpyAsync")

    def lock_pages(self, address: int, nbytes: int) -> None:
        """Pin existing host memory, so that the device can read it asynchronously at full speed."""
        code = self._library.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(0))
        self._check(code, "cudaHostRegister")

    def unlock_pages(self, address: int) -> None:
        """Unpin memory that `lock_pages` has pinned."""
        self._library.cudaHostUnregister(ctypes.c_void_p(address))

    def _copy_batch(self, copies: Sequence[CopyRange], handle: ctypes.c_void_p) -> int:
        count = len(copies)
        to = (ctypes.c_void_p * count)(*(p.to for p in copies))
        sources = (ctypes.c_void_p * count)(*(p.source for p in copies))
        sizes = (ctypes.c_size_t * count)(*(p.nbytes for p in copies))
        attributes, first = _Attributes(order=_STREAM_ORDER), ctypes.c_size_t(0)
        failed: list[Any] = [] if self.version >= _BATCH_API_V2_VERSION else [ctypes.byref(ctypes.c_size_t())]
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

    def _check(self, code: int, call: str) -> None:
        if code:
            self._library.cudaGetLastError()  # clear the error, or a later call of PyTorch would report it
            raise CudaCallError(f"{call} failed: {self._library.cudaGetErrorString(code).decode()}")


@cache
def cuda_runtime() -> CudaRuntime:
    """Return the process's binding of the CUDA runtime."""
    return CudaRuntime()


def _runtime_library() -> str:
    """Return the path of the CUDA runtime library that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if match := re.search(r"(/\S*/libcudart[^/\s]*\.so[^/\s]*)$", line):
            return match[1]
    raise SpmoeError("PyTorch has not loaded a CUDA runtime; install a CUDA build of torch, or use --device cpu")
