"""Files that verbs write, refused before any work is done for them."""

from __future__ import annotations

import os
from pathlib import Path

from spmoe.errors import UsageError


def require_writable(*files: str | Path | None) -> None:
    """Refuse files that cannot be written; None and `-`, standard output, are no files."""
    for file in files:
        if file is None or file == "-":
            continue
        path = Path(file)
        there = path if path.exists() else path.parent
        if path.is_dir() or not there.exists() or not os.access(there, os.W_OK):
            raise UsageError(f"cannot write {path}; choose a file in a directory that exists and can be written")
