"""Every failure spmoe reports on purpose. A message says what is wrong and what to do, in one line."""


class SpmoeError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns for it."""

    exit_code = 1


class UsageError(SpmoeError):
    """The request itself cannot be served as asked: an option, a prompt or a combination of them."""

    exit_code = 2


class BudgetError(UsageError):
    """A memory budget that cannot hold what one layer needs at once."""


class PromptError(UsageError):
    """A prompt that is empty, too long, or holds tokens the model does not have."""


class CheckpointError(SpmoeError):
    """A checkpoint that is missing, truncated, contradictory, non-finite or of an unsupported kind."""


class StoreError(SpmoeError):
    """The expert file cannot be built, opened or trusted."""


class TransferError(SpmoeError):
    """An expert could not be brought into its slot."""


def reason(error: BaseException) -> str:
    """What an exception of somebody else's says, as one short line to quote in a message of ours."""
    text = " ".join(str(error).split())
    if " " not in text:  # a KeyError, or no words at all
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
