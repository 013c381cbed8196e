"""Files: written whole or not at all, and read to the last byte; and directories that models are in."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmoe.errors import UsageError, reason

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what is to be this file: beside it, to take its place when everything has been written.

    A pipe or a device, and a file in a directory that takes no other, is written as it is. A link keeps pointing there.
    """
    place = path.resolve()
    if path.exists() and not (path.is_file() and os.access(place.parent, os.W_OK)):
        yield path
        return
    beside = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        yield beside
        if place.exists():
            shutil.copymode(place, beside)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file that somebody asked for, or say why it cannot be."""
    try:
        with replacing(path) as place:
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror}); choose another file") from error


def model_directory(name: str) -> Path | None:
    """The directory that a model is said to be in; None where that can only be a hub id. Says why it can be neither."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path.resolve()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, no such user, a directory that is locked
        why = getattr(error, "strerror", None) or reason(error)
        shown = name if len(name) <= 100 else f"{name[:97]}..."
        raise UsageError(f"the path {shown} cannot be used ({why}); check it") from error
    if exists:
        raise UsageError(f"{name} is a file; give the directory that holds config.json and the safetensors files")
    if not _HUB_ID.fullmatch(name):
        raise UsageError(f"there is no directory {name}, and it is not a hub id of the form owner/name; check the path")
    return None


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from `offset` on, however many reads that takes; how much of it, which is less at a file's end."""
    done = 0
    while done < len(buffer) and (count := os.preadv(fd, [buffer[done:]], offset + done)):
        done += count
    return done
