"""Checkpoints: a directory or hub id becomes a list of safetensors files that are there, whole and consistent."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers import __version__ as transformers_version

from spmoe.errors import CheckpointError, UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, looked at but not loaded."""

    name: str  # as the user wrote it
    directory: Path
    config: Any = field(repr=False)
    files: dict[str, Path] = field(repr=False)  # tensor name -> the file that holds it
    fingerprint: str  # changes whenever the checkpoint does

    @classmethod
    def find(cls, name: str) -> Checkpoint:
        """Look up a local directory or a hub id; raises with what to do when it cannot be used."""
        directory = _resolve(name)
        config = _read_config(name, directory)
        files = _tensor_files(directory)
        return cls(name, directory, config, files, _fingerprint(directory, set(files.values())))

    def dtype(self, wanted: str) -> torch.dtype:
        """The dtype to run in; `auto` is the one the checkpoint declares, else the one of its weights."""
        if wanted != "auto":
            return getattr(torch, wanted)  # type: ignore[no-any-return]
        declared = getattr(self.config, "dtype", None)
        if isinstance(declared, str):
            declared = getattr(torch, declared.removeprefix("torch."), None)
        if declared is None:
            name, path = next(iter(self.files.items()))
            with safe_open(path, framework="pt") as file:
                declared = file.get_tensor(name).dtype
        if declared not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(f"{self.name} is stored as {declared}, which spmoe cannot run; pass --dtype bfloat16")
        return declared  # type: ignore[no-any-return]


def _resolve(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise UsageError(f"{name} is a file; give the directory that holds config.json and the safetensors files")
    if not _HUB_ID.fullmatch(name):
        raise UsageError(f"there is no directory {name}, and it is not a hub id of the form owner/name")
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises anything from a socket error to its own classes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"'{name}' is neither a local directory nor to be had from the hub ({reason}); check the spelling, "
            "the network, HF_TOKEN and HF_HUB_OFFLINE"
        ) from error


def _read_config(name: str, directory: Path) -> Any:
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json, so it is not a model; check the path")
    try:
        config = AutoConfig.from_pretrained(directory)
    except ValueError as error:
        kind = _declared_type(directory)
        raise CheckpointError(
            f"transformers {transformers_version} cannot read the config of {name} (model_type {kind!r}); "
            "upgrade transformers or check config.json"
        ) from error
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"config.json of {name} cannot be read ({_first_line(error)}); download it again"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(f"{name} is quantized, which spmoe cannot load yet; use the 16-bit checkpoint")
    return config


def _declared_type(directory: Path) -> str:
    try:
        return str(json.loads((directory / "config.json").read_text()).get("model_type"))
    except (OSError, ValueError, AttributeError):
        return "unreadable"


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Every tensor of the checkpoint and the file it is in; each file's header and length are checked."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{index} cannot be read ({error}); download it again") from error
        paths = [directory / shard for shard in sorted(set(names.values()))]
    else:
        paths = sorted(directory.glob("*.safetensors"))
        names = {}
    if not paths:
        others = any(directory.glob("*.bin")) or any(directory.glob("*.pth")) or any(directory.glob("*.gguf"))
        hint = "only safetensors are supported; convert it" if others else "download it again"
        raise CheckpointError(f"{directory} holds no safetensors files; {hint}")
    files: dict[str, Path] = {}
    for path in paths:
        if not path.is_file():
            raise CheckpointError(
                f"{path.name} is missing from {directory}, though the index names it; download it again"
            )
        try:
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({_first_line(error)}); download it again"
            ) from error
    if absent := sorted(set(names) - set(files)):
        raise CheckpointError(f"the index of {directory} names {absent[0]}, which no file holds; download it again")
    return files


def _fingerprint(directory: Path, paths: set[Path]) -> str:
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(paths):
        stat = path.stat()
        digest.update(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
