"""Tokenizers: load them, and check that target and draft share one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from spmoe.errors import CheckpointError, PromptError, UsageError, panics_as_errors, reason
from spmoe.files import decode_json
from spmoe.models.checkpoint import Checkpoint, quiet
from spmoe.models.dummy import byte_tokenizer

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def has_tokenizer(directory: Path) -> bool:
    """Return whether a checkpoint ships a tokenizer."""
    return any((directory / name).is_file() for name in _FILES)


def tokenizer_of(checkpoint: Checkpoint) -> Any | None:
    """Load a checkpoint's tokenizer; a model of random weights that has none gets one whose tokens are bytes."""
    if checkpoint.random and not has_tokenizer(checkpoint.directory):
        return byte_tokenizer(checkpoint.config.get_text_config(decoder=True).vocab_size)
    return load_tokenizer(checkpoint.directory)


def load_tokenizer(directory: Path) -> Any | None:
    """Load a checkpoint's tokenizer; None if it has none, so that prompts must be token ids."""
    if not has_tokenizer(directory):
        return None
    try:
        with quiet(), panics_as_errors():
            found = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception on a damaged file
        if _is_custom_code(directory):
            raise CheckpointError(
                f"the tokenizer in {directory} is Python code that comes with the model (auto_map in "
                "tokenizer_config.json), which spmoe does not run; use an upload whose tokenizer transformers has"
            ) from error
        advice = "check its permissions" if isinstance(error, PermissionError) else "download it again"
        raise CheckpointError(f"the tokenizer in {directory} cannot be read ({reason(error)}); {advice}") from error
    # the context is checked here, per request; long texts that are split into windows are no reason for a warning
    found.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return found


def _is_custom_code(directory: Path) -> bool:
    """Return whether tokenizer_config.json names a class of the repository's own code."""
    try:
        declared = decode_json((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    code = declared.get("auto_map") if isinstance(declared, dict) else None
    return isinstance(code, list) or (isinstance(code, dict) and "AutoTokenizer" in code)


def encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the token ids of a text; raise PromptError if the tokenizer fails."""
    try:
        with panics_as_errors():
            ids: list[int] = tokenizer(text, **options)["input_ids"]
            return ids
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise PromptError(f"the tokenizer fails on this text ({reason(error)}); change the text") from error


def tokenizer_json(tokenizer: Any) -> str:
    """Return a tokenizer in the format of tokenizer.json; raise UsageError if it is not one of `tokenizers`."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        raise UsageError(
            f"structured_outputs needs a tokenizer that has a tokenizer.json; {type(tokenizer).__name__} is in Python"
        )
    found = json.loads(core.to_str())
    return json.dumps({**found, "padding": None, "truncation": None})  # they are for batches, not for the vocabulary


def require_same_tokenizer(target: Any | None, draft: Any | None, checkpoint: Checkpoint, other: Checkpoint) -> None:
    """Raise UsageError if a draft's token ids mean other tokens. Embeddings may be padded beyond the vocabulary."""
    if target is None or draft is None:
        sizes = [c.config.get_text_config(decoder=True).vocab_size for c in (checkpoint, other)]
        if (target is None) != (draft is None) or sizes[0] != sizes[1]:
            raise UsageError(
                f"{checkpoint.name} and {other.name} cannot be shown to share a tokenizer (one has none, or their "
                "vocabulary sizes differ); choose a draft of the same family"
            )
        return
    ours = {index: token for token, index in target.get_vocab().items()}
    theirs = {index: token for token, index in draft.get_vocab().items()}
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise UsageError(
                f"the draft's tokenizer differs from the target's: token {index} is {ours.get(index)!r} in "
                f"{checkpoint.name} but {theirs.get(index)!r} in {other.name}; choose a draft with the same tokenizer"
            )
