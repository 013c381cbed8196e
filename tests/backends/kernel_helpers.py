"""Shared parts of the kernel tests, which run on CUDA, or on the CPU with TRITON_INTERPRET=1."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton", reason="Triton is not installed")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
KERNEL_MARKS = [pytest.mark.usefixtures("fixed_interpreter"), *([] if INTERPRETED else [pytest.mark.gpu])]
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs or gigabytes of device memory")

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)

# largest error against float64 on the same inputs, relative to the largest exact value
BOUND = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def close(found: Tensor, exact: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether all elements are within the bound of the dtype (the result's by default); False for any NaN."""
    error = (found.double() - exact.double()).abs().max().item()
    return error <= BOUND[dtype or found.dtype] * exact.double().abs().max().item()


def prepare_kernel_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed the generator, poison new tensors, and speed up Triton's interpreter."""
    torch.manual_seed(0)
    poison_new_tensors(monkeypatch)
    if INTERPRETED:
        speed_up_interpreter(monkeypatch)


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialized tensors with NaN or invalid integers, so that elements no kernel has written show up."""

    def poison(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.fill_(math.nan)
        return tensor.fill_(-(1 << 40)) if tensor.dtype == torch.int64 else tensor

    def poisoned(allocate: Any) -> Any:
        return lambda *size, **options: poison(allocate(*size, **options))

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))


def speed_up_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip two things that take half of the interpreter's time and change no result.

    It patches Triton's language at every call of a device function; once per launch and module is enough. And it checks
    every integer operation for overflow, which tensors as small as these cannot reach.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[int]()

    def launch_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            patch(self.fn)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_kernel)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call_device_function)
    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *args: None)
