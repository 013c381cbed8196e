"""Safetensors headers, and the choice of the files that make up a checkpoint, in a directory or on the hub.

Checkpoints come from anywhere, so nothing in an index or a header is believed before it is checked: names stay inside
the checkpoint's directory, and every tensor lies inside its file and has the size that its shape and dtype give.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any

from spmoe.errors import CheckpointError
from spmoe.files import GGUF_ADVICE, SUPPORTED_FORMATS, decode_json

INDEX = "model.safetensors.index.json"
# files besides config.json that may declare how weights are quantized: of ModelOpt, and of older GPTQ and AWQ uploads
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_SINGLE = "model.safetensors"
_OTHER_FORMATS = (".bin", ".pth", ".pt", ".msgpack", ".h5", ".onnx")
_SIZE_BYTES = 8  # length of the header, at the start of a file
_MAX_HEADER = 100_000_000  # limit of the format
_CACHED_HEADERS = 64  # parsed ones; the files of a checkpoint or two
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}  # by dtype; others, such as those of 4 and 6 bits, are not checked and not read


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, as a safetensors header describes it."""

    dtype: str  # name in the header, such as "BF16"
    shape: tuple[int, ...]
    file: str  # name of its file
    offset: int = field(default=0, compare=False)  # of its first byte in the file; 0 if the file is not here
    nbytes: int = field(default=0, compare=False)


def weight_files(source: str, names: Iterable[str], index: Mapping[str, Any] | None) -> list[str]:
    """Return the weight files of a checkpoint, of all its file names; `index` is the content of its index file.

    Duplicates are left out: files that the index does not name, files in subdirectories and `consolidated.*`. A file
    may be a symbolic link, as in the hub's cache; a name that leads out of the directory is refused.
    """
    names = list(names)
    if index is not None:
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
            raise CheckpointError(f"{INDEX} of {source} does not say which file holds which tensor; download it again")
        files = sorted(set(shards.values()))
        if outside := [file for file in files if not _is_inside(file)]:
            raise CheckpointError(
                f"{INDEX} of {source} names {outside[0]!r}, which is no file inside its directory; use another copy"
            )
        return files
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


def _is_inside(name: str) -> bool:
    """Return whether a relative path stays inside its directory, as POSIX and as Windows read it."""
    return (
        bool(name.strip("."))
        and "\0" not in name
        and not any(
            path.is_absolute() or path.drive or path.root or ".." in path.parts
            for path in (PurePosixPath(name), PureWindowsPath(name))
        )
    )


def read_header(directory: Path, file: str) -> Mapping[str, StoredTensor]:
    """Read the header of a local safetensors file, and check the file's length. Raises ValueError if it is damaged."""
    return parse_header(file, *read_raw_header(directory / file))


def read_raw_header(path: Path) -> tuple[bytes, int]:
    """Return the JSON text of a safetensors header, and the file's length; raise ValueError if it is cut off."""
    with path.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(_SIZE_BYTES), "little")
        if size < _SIZE_BYTES or length > min(_MAX_HEADER, size - _SIZE_BYTES):
            raise ValueError("it ends before its header does")
        return opened.read(length), size


@lru_cache(_CACHED_HEADERS)
def parse_header(file: str, text: bytes, size: int) -> Mapping[str, StoredTensor]:
    """Return the tensors that a header describes; raise ValueError unless they fit a file of `size` bytes.

    Headers are read several times, to find a checkpoint, for its fingerprint and when its files are opened. Parsing
    takes longer than reading, so results are cached by the text.
    """
    header = decode_json(text)
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    start = _SIZE_BYTES + len(text)
    tensors, end = {}, 0
    for name, entry in header.items():
        if not isinstance(entry, dict):
            raise ValueError(f"its header does not describe {name}")
        dtype: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        place: Any = entry.get("data_offsets")
        if not isinstance(dtype, str) or not _are_sizes(shape, 64) or not _are_sizes(place, 2) or len(place) != 2:
            raise ValueError(f"its header does not describe {name}")
        first, last = place
        if last < first or (dtype in ITEM_BYTES and last - first != ITEM_BYTES[dtype] * math.prod(shape)):
            raise ValueError(f"{name} has {last - first} bytes, which do not fit {dtype} of shape {shape}")
        tensors[name] = StoredTensor(dtype, tuple(shape), file, start + first, last - first)
        end = max(end, last)
    if size != start + end:
        raise ValueError(f"it has {size} bytes and should have {start + end}")
    return MappingProxyType(tensors)


def _are_sizes(values: Any, most: int) -> bool:
    """Return whether this is a list of at most so many whole numbers from 0."""
    return isinstance(values, list) and len(values) <= most and all(type(v) is int and v >= 0 for v in values)
