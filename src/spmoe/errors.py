"""Exceptions of spmoe. A message says in one line what is wrong and what to do."""


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


def reason(error: BaseException) -> str:
    """Return the message of another library's exception as one line of at most 200 characters, to quote in ours."""
    text = " ".join(str(error).split())
    if " " not in text:  # a KeyError, or no message
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
