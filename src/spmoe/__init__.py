"""Run Mixture-of-Experts language models whose experts do not fit in GPU memory, with exactly the model's output."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmoe.config import SamplingParams
    from spmoe.engine.llm import LLM
    from spmoe.engine.outputs import CompletionOutput, RequestOutput

try:
    __version__ = version("spmoe")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0.2.0"

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when they are needed, so that `spmoe --help` is fast."""
    if name == "LLM":
        from spmoe.engine.llm import LLM

        return LLM
    if name in ("CompletionOutput", "RequestOutput"):
        from spmoe.engine import outputs

        return getattr(outputs, name)
    if name == "SamplingParams":
        from spmoe.config import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'spmoe' has no attribute '{name}'")
