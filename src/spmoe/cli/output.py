"""Standard error: notes and tables, how much of it is shown (-v, -q), and silence of other libraries."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import rich.console
from rich.table import Table
from rich.text import Text

from spmoe.errors import UsageError, printable
from spmoe.observe.progress import hide_bars

_shown = {"verbose": False, "quiet": False}


class Console(rich.console.Console):
    """Console that shows control characters of file names, models and messages instead of sending them."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text with its control characters as escapes; every cell and line goes through here."""
        return super().render_str(printable(text), **options)

    def print_whole(self, table: Table, most: int | None = None) -> None:
        """Print a table without cutting its cells, even if it is wider than the terminal; `most`: its columns then."""
        width = Console(width=1000).measure(table).maximum
        self.width = max(self.width, width if most is None else min(width, most))
        self.print(table)


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def reset_verbosity() -> None:
    """Forget -v and -q of an earlier command line; apply SPMOE_DEBUG."""
    _shown.update(verbose=False, quiet=False)
    if os.environ.get("SPMOE_DEBUG"):
        log_debug_messages()


def set_verbosity(*, verbose: bool = False, quiet: bool = False) -> None:
    """Add -v or -q; raise UsageError if both were given."""
    _shown.update(verbose=_shown["verbose"] or verbose, quiet=_shown["quiet"] or quiet)
    if _shown["verbose"] and _shown["quiet"]:
        raise UsageError("--verbose and --quiet exclude each other; leave out one of them")
    if verbose:
        log_debug_messages()


def is_verbose() -> bool:
    """Return whether -v was given."""
    return _shown["verbose"]


def is_quiet() -> bool:
    """Return whether -q was given: no progress, notes or statistics; errors remain."""
    return _shown["quiet"]


def stderr() -> Console:
    """Return a console on standard error, for notes and tables; it prints nothing with -q. Progress bars give way."""
    hide_bars()
    return Console(stderr=True, highlight=False, markup=False, emoji=False, quiet=is_quiet())


def note(text: str) -> None:
    """Print one line that starts with `note:` to standard error."""
    stderr().print(f"note: {text}", soft_wrap=True)


def log_debug_messages() -> None:
    """Print log messages of spmoe to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("%(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("spmoe").setLevel(logging.DEBUG)


def silence_libraries() -> None:
    """Hide warnings of torch, transformers and Python, unless -v or SPMOE_DEBUG asks for them.

    Failures of these libraries are raised as errors of spmoe, so that their warnings only puzzle users. Variables that
    the user has set win.
    """
    if is_quiet():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when the hub client is imported
    if is_verbose() or os.environ.get("SPMOE_DEBUG"):
        return
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in ("torch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
