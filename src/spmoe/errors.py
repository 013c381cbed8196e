"""Exceptions of spmoe. A message says in one line what is wrong and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

# control characters but newline and tab; a carriage return only where it does not end a line
_CONTROL = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")

# names that other programs have for ours, and that are not near them
_OTHER_NAMES = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
}


class SpmoeError(Exception):
    """Base class; `exit_code` is the exit status of the command line."""

    exit_code = 1


class UsageError(SpmoeError):
    """Invalid option, prompt or combination of them."""

    exit_code = 2


class BudgetError(UsageError):
    """Memory budget below the needs of one layer."""


class PromptError(UsageError):
    """Prompt that is empty, too long, or has tokens outside the vocabulary."""


class CheckpointError(SpmoeError):
    """Checkpoint that is missing, truncated, inconsistent, non-finite or unsupported."""


class StoreError(SpmoeError):
    """Expert file that cannot be built or opened, or is damaged."""


class DraftError(SpmoeError):
    """Failure of a draft; the request goes on without it."""


class TransferError(SpmoeError):
    """Failed transfer of an expert to its slot."""


def suggestion(value: object, names: Sequence[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean NAME?` for the name nearest to a wrong value; an empty text if none is near.

    `cutoff` is the least similarity, from 0 to 1.
    """
    close = [_OTHER_NAMES[name] for name in (str(value).lower(),) if _OTHER_NAMES.get(name) in names]
    close = close or get_close_matches(str(value), names, 1, cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def printable(text: str) -> str:
    """Return text that is safe to write to a terminal: control characters, such as ESC, are shown as `\\x1b`."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def is_panic(error: BaseException) -> bool:
    """Return whether an exception is a panic of a library in Rust; those do not derive from Exception."""
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic of a library in Rust (tokenizers, safetensors) into RuntimeError."""
    try:
        yield
    except BaseException as error:
        if is_panic(error):
            raise RuntimeError(f"a library failed: {reason(error)}") from error
        raise


def reason(error: BaseException) -> str:
    """Return the message of another library's exception as one line of at most 200 characters, to quote in ours."""
    text = printable(" ".join(str(error).split()))
    if " " not in text:  # a KeyError, or no message
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
