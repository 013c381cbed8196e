"""Atomic writes, complete reads, decoding of JSON and TOML, and lookup of model directories."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from spmoe.errors import UsageError, reason

SHIPPED_CONFIGS = Path(__file__).resolve().parent / "configs"  # one directory with a config.json for each model
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SUPPORTED_FORMATS = "in 16 or 32 bits, fp8, mxfp4, gptq, awq, auto-round, compressed-tensors or modelopt"
GGUF_ADVICE = (
    f"spmoe reads safetensors checkpoints ({SUPPORTED_FORMATS}): give the original model's directory or hub id"
)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same directory, which replaces `path` when the block ends without an exception.

    The content is on the disk before it gets its name: after a crash of the machine there is the previous file or the
    whole new one. Pipes, devices, and files in a read-only directory are written directly. A symbolic link keeps its
    target.
    """
    target = path.resolve()
    if path.exists() and not (path.is_file() and os.access(target.parent, os.W_OK)):
        yield path
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        if target.exists():
            shutil.copymode(target, partial)
        _sync(partial)
        os.replace(partial, target)  # noqa: PTH105
        _sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: Path, text: str) -> None:
    """Write an output file atomically; raise UsageError if that fails."""
    try:
        with atomic_write(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror}); choose another file") from error


def write_json_cache(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file that can be made again: if its directory is not writable, write nothing."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_text(json.dumps(values, indent=2))


def decode_json(text: str | bytes) -> Any:
    """Decode JSON, with or without a byte order mark; raise ValueError if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def decode_toml(text: str) -> dict[str, Any]:
    """Decode TOML, with or without a byte order mark; raise ValueError if it is not TOML, or nested too deeply."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def model_directory(name: str) -> Path | None:
    """Return the model's directory, or None for a hub id; raise UsageError if the name can be neither."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            _refuse_gguf_directory(path)
            return path.resolve()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # name too long, unknown user, no permission
        why = getattr(error, "strerror", None) or reason(error)
        shown = name if len(name) <= 100 else f"{name[:97]}..."
        raise UsageError(f"cannot use the path {shown} ({why}); check it") from error
    if name.lower().endswith(".gguf"):
        raise UsageError(f"{name} is a GGUF file, which spmoe does not read; {GGUF_ADVICE}")
    if exists:
        raise UsageError(f"{name} is a file; give the directory that holds config.json and the safetensors files")
    if name.lower() in shipped_configs():
        raise UsageError(
            f"{name} is a configuration that ships with spmoe, without weights: add --load-format dummy to use it with "
            "random ones, or give the directory of a checkpoint"
        )
    if not _HUB_ID.fullmatch(name):
        hint = "; check the path" + ", or give a prompt with --prompt" * (" " in name.strip())
        raise UsageError(f"there is no directory {name}, and it is not a hub id of the form owner/name{hint}")
    return None


def shipped_configs() -> list[str]:
    """Return the names of the models whose config.json ships with the package, for `--load-format dummy`."""
    return sorted(path.parent.name for path in SHIPPED_CONFIGS.glob("*/config.json"))


def config_directory(name: str) -> Path | None:
    """Return a directory with the config.json of a model that needs no weights, or None for a hub id.

    `name` is a directory, the name of a configuration that ships with the package, or `owner/name` on the hub. Raise
    UsageError if it is none of them.
    """
    names = shipped_configs()
    if not Path(name).expanduser().is_dir() and name.lower() in names:
        return SHIPPED_CONFIGS / name.lower()
    if (directory := model_directory(name)) is not None:
        return directory
    if "/" not in name:
        close = get_close_matches(name.lower(), names, 1)
        hint = f"did you mean {close[0]}?" if close else f"give one that ships: {', '.join(names)}"
        raise UsageError(f"there is no directory {name}, and no configuration of that name ships; {hint}")
    return None


def _refuse_gguf_directory(path: Path) -> None:
    try:
        names = [entry.name for entry in os.scandir(path)]
    except OSError:  # reported when the files are read
        return
    if any(name.endswith(".gguf") for name in names) and not any(name.endswith(".safetensors") for name in names):
        raise UsageError(f"{path} holds only GGUF files; {GGUF_ADVICE}")


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Read from `offset` until the buffer is full or the file ends; return the bytes read."""
    done = 0
    while done < len(buffer) and (count := os.preadv(fd, [buffer[done:]], offset + done)):
        done += count
    return done


def read_text_file(path: Path) -> str:
    """Return the contents of a UTF-8 text file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text; convert it to UTF-8") from error
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); check the path") from error
