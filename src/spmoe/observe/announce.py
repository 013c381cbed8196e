"""Single lines on standard error that say what begins."""

from __future__ import annotations

import sys
from collections.abc import Callable

from spmoe.errors import printable


def announcer(enabled: bool) -> Callable[[str], None]:
    """Return a function that prints one line to standard error, or nothing if progress is not shown."""

    def announce(text: str) -> None:
        if enabled and sys.stderr is not None:
            print(printable(text), file=sys.stderr, flush=True)

    return announce
