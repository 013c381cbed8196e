"""Safetensors headers, and the choice of the files that make up a checkpoint, in a directory or on the hub."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmoe.errors import CheckpointError
from spmoe.files import GGUF_ADVICE, SUPPORTED_FORMATS, decode_json

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OTHER_FORMATS = (".bin", ".pth", ".pt", ".msgpack", ".h5", ".onnx")
_SIZE_BYTES = 8  # length of the header, at the start of a file
_MAX_HEADER = 100_000_000  # limit of the format


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, as a safetensors header describes it."""

    dtype: str  # name in the header, such as "BF16"
    shape: tuple[int, ...]
    file: str  # name of its file


def weight_files(source: str, names: Iterable[str], index: Mapping[str, Any] | None) -> list[str]:
    """Return the weight files of a checkpoint, of all its file names; `index` is the content of its index file.

    Duplicates are left out: files that the index does not name, files in subdirectories and `consolidated.*`.
    """
    names = list(names)
    if index is not None:
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
            raise CheckpointError(f"{INDEX} of {source} does not say which file holds which tensor; download it again")
        return sorted(set(shards.values()))
    if _SINGLE in names:
        return [_SINGLE]
    found = sorted(n for n in names if n.endswith(".safetensors") and "/" not in n and not n.startswith("consolidated"))
    if found:
        return found
    if any(name.endswith(".gguf") for name in names):
        raise CheckpointError(f"{source} holds only GGUF files; {GGUF_ADVICE}")
    if any(name.endswith(_OTHER_FORMATS) for name in names):
        raise CheckpointError(
            f"{source} holds no safetensors files; only safetensors are supported ({SUPPORTED_FORMATS}): convert it"
        )
    raise CheckpointError(f"{source} holds no safetensors files; download it again")


def read_header(directory: Path, file: str) -> dict[str, StoredTensor]:
    """Read the header of a local safetensors file, and check the file's length. Raises ValueError if it is damaged."""
    with (directory / file).open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(_SIZE_BYTES), "little")
        if size < _SIZE_BYTES or length > min(_MAX_HEADER, size - _SIZE_BYTES):
            raise ValueError("it ends before its header does")
        header = decode_json(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in header.items():
        try:
            tensors[name] = StoredTensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), file)
            end = max(end, int(entry["data_offsets"][1]))
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"its header does not describe {name}") from error
    if size != _SIZE_BYTES + length + end:
        raise ValueError(f"it has {size} bytes and should have {_SIZE_BYTES + length + end}")
    return tensors
