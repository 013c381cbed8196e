"""Origin of a cached file: the checkpoints that it was made from, recorded in the file itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from spmoe.files import decode_json


class OriginState(StrEnum):
    """Comparison of a checkpoint with its state when the cached file was written."""

    UNCHANGED = "unchanged"
    CHANGED = "changed"
    GONE = "gone"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint when a cached file was made from it."""

    name: str  # hub id, or directory
    directory: str  # of its files; of a hub model, the snapshot; empty: not recorded
    fingerprint: str

    def state(self) -> OriginState:
        """Compare with the checkpoint's files as they are now; reads config.json and the index, no weights."""
        directory = Path(self.directory)
        if not self.directory:
            return OriginState.UNREADABLE
        try:
            if not (directory / "config.json").exists():
                return OriginState.GONE
            same = fingerprint(directory) == self.fingerprint
        except FileNotFoundError:  # a shard of the index
            return OriginState.CHANGED
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            return OriginState.UNREADABLE
        return OriginState.UNCHANGED if same else OriginState.CHANGED


def fingerprint(directory: Path) -> str:
    """Return a hash of config.json and of the weight files' names, sizes and modification times."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = set(decode_json(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = [directory / shard for shard in shards]
    elif (directory / "model.safetensors").exists():
        paths = [directory / "model.safetensors"]
    else:
        paths = [path for path in directory.glob("*.safetensors") if not path.name.startswith("consolidated")]
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(paths):
        stat = path.stat()
        digest.update(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def origins_to_json(origins: Iterable[Origin]) -> list[dict[str, str]]:
    """Return plain values for a file's header."""
    return [asdict(one) for one in origins]


def parse_origins(data: Any) -> tuple[Origin, ...]:
    """Read the result of `origins_to_json`; empty for files that were written without it."""
    fields = ("name", "directory", "fingerprint")
    if not isinstance(data, list) or not all(isinstance(one, dict) for one in data):
        return ()
    if not all(isinstance(one.get(field), str) for one in data for field in fields):
        return ()
    return tuple(Origin(*(one[field] for field in fields)) for one in data)
