"""Checkpoints: find a model by directory or hub id, and check its files before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging

from spmoe.errors import CheckpointError, SpmoeError, reason
from spmoe.files import decode_json, model_directory
from spmoe.models.hub import cached_model, download, remote_files
from spmoe.system.headers import INDEX, StoredTensor, read_header, weight_files
from spmoe.system.origin import fingerprint

_FLOAT_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}  # in headers
# Keys of config.json that choose code. An implementation may be a repository on the hub, whose code would be downloaded
# and run: transformers chooses it, never a checkpoint. The keys in the last line change the type of a forward's output.
_CODE_KEYS = {
    *(
        f"{prefix}{part}_implementation{suffix}"
        for prefix in ("", "_")
        for part in ("attn", "experts")
        for suffix in ("", "_internal")
    ),
    *("auto_map", "custom_pipelines", "configuration_files"),
    *("output_attentions", "_output_attentions", "output_hidden_states", "return_dict", "torchscript"),
}
DEFAULT_BLOCK = (128, 128)  # of fp8 scales, if config.json names none


@dataclass(frozen=True)
class Quantization:
    """Storage format of a checkpoint's weights, as config.json declares it."""

    method: str
    block: tuple[int, int] = DEFAULT_BLOCK  # (outputs, inputs) that share a scale, for block scales


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model, checked but not loaded. The weights of a hub model may not be here yet."""

    name: str  # directory or hub id, as the user wrote it
    directory: Path  # of config.json, and of the weights that are here
    config: Any = field(repr=False)
    tensors: dict[str, StoredTensor] = field(repr=False)  # by name, from the files' headers
    fingerprint: str  # hash of config.json and of the weight files' headers, times and samples
    quantization: Quantization | None = None  # None: weights are stored in 16 or 32 bits
    download_bytes: int = 0  # of files that are still on the hub; 0: everything is here

    @classmethod
    def find(cls, name: str, *, weights: bool = True) -> Checkpoint:
        """Find and check a local directory or a hub id. A hub model that is not cached is downloaded.

        Without `weights`, only configuration files and tensor headers are fetched, and the model cannot be loaded.
        """
        directory = model_directory(name) or (download(name) if weights else cached_model(name))
        if directory is None:
            remote = remote_files(name)
            with _readable(remote.directory):
                config, quantization = _read_config(name, remote.directory)
                _check_generation_config(remote.directory)
            return cls(
                name, remote.directory, config, remote.tensors, remote.fingerprint, quantization, remote.download_bytes
            )
        with _readable(directory):
            config, quantization = _read_config(name, directory)
            _check_generation_config(directory)
            tensors = _read_headers(directory)
            return cls(name, directory, config, tensors, fingerprint(directory), quantization)

    @cached_property
    def files(self) -> dict[str, Path]:
        """Path of the safetensors file of every tensor, by name."""
        return {name: self.directory / tensor.file for name, tensor in self.tensors.items()}

    def dtype(self, wanted: str) -> torch.dtype:
        """Return the dtype to run in; `auto` takes the declared dtype, else that of the weights."""
        if wanted != "auto":
            return getattr(torch, wanted)  # type: ignore[no-any-return]
        declared = getattr(self.config, "dtype", None)
        if isinstance(declared, str):
            declared = getattr(torch, declared.removeprefix("torch."), None)
        if declared is None:
            declared = self._stored_dtype()
        if declared not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(f"{self.name} is stored as {declared}, which spmoe cannot run; pass --dtype bfloat16")
        return declared

    def _stored_dtype(self) -> torch.dtype | None:
        """Return the dtype of the first floating-point tensor with at least 16 bits."""
        return next((_FLOAT_TYPES[t.dtype] for t in self.tensors.values() if t.dtype in _FLOAT_TYPES), None)


def _read_config(name: str, directory: Path) -> tuple[Any, Quantization | None]:
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json, so it is not a model directory; check the path")
    declared = _read_json(directory / "config.json")
    stored = declared.get("quantization_config")
    quantization = read_quantization(stored)
    if stored is not None and quantization is None:
        method = stored.get("quant_method", "unknown") if isinstance(stored, dict) else "unknown"
        raise CheckpointError(
            f"{name} is quantized (by {method}, in a form that spmoe cannot read); use the 16-bit checkpoint, or one "
            "in fp8 or mxfp4"
        )
    try:
        with quiet():
            config = _load_config(directory, declared)
            if quantization is not None:
                del config.quantization_config  # weights are dequantized as they are read
            return config, quantization
    except Exception as error:  # an unknown architecture, or any check of a config class
        if str(declared.get("model_type")) not in CONFIG_MAPPING:
            raise CheckpointError(
                f"transformers {transformers_version} does not know the architecture of {name} (model_type "
                f"{declared.get('model_type')!r}); upgrade transformers or check config.json"
            ) from error
        raise CheckpointError(
            f"config.json of {name} cannot be used ({reason(error)}); correct it or download it again"
        ) from error


def _load_config(directory: Path, declared: Any) -> Any:
    """Let transformers parse config.json without the keys, at any depth, that select code or the type of outputs."""
    with TemporaryDirectory() as cleaned:
        (Path(cleaned) / "config.json").write_text(json.dumps(_without_code_keys(declared)), encoding="utf-8")
        config = AutoConfig.from_pretrained(cleaned, trust_remote_code=False)
    config.name_or_path = str(directory)
    return config


def _without_code_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_code_keys(inner) for key, inner in value.items() if key not in _CODE_KEYS}
    return [_without_code_keys(inner) for inner in value] if isinstance(value, list) else value


def read_quantization(declared: Any) -> Quantization | None:
    """Parse `quantization_config`; None if spmoe cannot dequantize that format."""
    if not isinstance(declared, dict):
        return None
    method = str(declared.get("quant_method"))
    if method == "mxfp4":
        return Quantization(method)
    if method == "fp8":
        return _with_block(method, declared.get("weight_block_size"))
    groups = declared.get("config_groups")
    if method != "compressed-tensors" or not isinstance(groups, dict) or not groups:
        return None
    weights = [group["weights"] for group in groups.values() if isinstance(group, dict) and "weights" in group]
    if len(weights) < len(groups) or not all(isinstance(one, dict) for one in weights):
        return None
    formats = {(one.get("type"), one.get("num_bits"), one.get("symmetric", True)) for one in weights}
    blocks = {str(one.get("block_structure")) for one in weights}
    if formats != {("float", 8, True)} or len(blocks) > 1:
        return None
    return _with_block(method, weights[0].get("block_structure"))


def _with_block(method: str, block: Any) -> Quantization | None:
    if block is None:
        return Quantization(method)
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        return None
    return Quantization(method, (block[0], block[1]))


def _check_generation_config(directory: Path) -> None:
    """Reject an eos_token_id that transformers would silently ignore: generation would then never stop."""
    path = directory / "generation_config.json"
    if path.is_file():
        eos = _read_json(path).get("eos_token_id")
        if not all(type(token) in (int, type(None)) for token in (eos if isinstance(eos, list) else [eos])):
            raise CheckpointError(f"eos_token_id in {path} is {eos!r}, which is not a token id; correct or delete it")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = decode_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({reason(error)}); download it again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; download it again")
    return data


def _read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Read the header of every weight file once, and check each file's length and the index."""
    index = directory / INDEX
    content = _read_json(index) if index.is_file() else None
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(str(directory), (path.name for path in directory.iterdir()), content):
        if not (directory / file).is_file():
            raise CheckpointError(f"{file} is missing from {directory}, though the index names it; download it again")
        try:
            tensors |= read_header(directory, file)
        except ValueError as error:
            raise CheckpointError(
                f"{directory / file} is truncated or not a safetensors file ({reason(error)}); download it again"
            ) from error
    if missing := sorted(set(content["weight_map"] if content is not None else ()) - set(tensors)):
        raise CheckpointError(f"the index of {directory} names {missing[0]}, which no file holds; download it again")
    return tensors


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Turn OSError into CheckpointError with the file's name."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or directory} cannot be read ({error.strerror or reason(error)}); check its permissions "
            "and the disk"
        ) from error


@contextmanager
def load_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn any exception from transformers into a CheckpointError while a model is built, loaded or first run."""
    try:
        with quiet():
            yield
    except (SpmoeError, MemoryError):
        raise
    except Exception as error:  # anything from a ZeroDivisionError to its own classes
        raise CheckpointError(
            f"{checkpoint.name} cannot be loaded ({reason(error)}); check that config.json belongs to the weights"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off the progress bars and log messages of transformers; failures are raised as errors of spmoe."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
