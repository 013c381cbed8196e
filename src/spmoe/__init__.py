"""Run Mixture-of-Experts language models whose experts do not fit in GPU memory, with exactly the model's output."""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all of this
if TYPE_CHECKING:
    from typing import Any

    from spmoe.config import SamplingParams, StructuredOutputsParams
    from spmoe.engine.async_llm import AsyncLLM
    from spmoe.engine.llm import LLM
    from spmoe.engine.outputs import CompletionOutput, RequestOutput

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import what is needed only when it is needed, so that `spmoe --help` is fast."""
    if name == "__version__":
        return _version()
    if name == "LLM":
        from spmoe.engine.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from spmoe.engine.async_llm import AsyncLLM

        return AsyncLLM
    if name in ("CompletionOutput", "RequestOutput"):
        from spmoe.engine import outputs

        return getattr(outputs, name)
    if name in ("SamplingParams", "StructuredOutputsParams"):
        from spmoe import config

        return getattr(config, name)
    raise AttributeError(f"module 'spmoe' has no attribute '{name}'")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("spmoe")
    except PackageNotFoundError:  # run from a source tree
        return "0.2.0"
