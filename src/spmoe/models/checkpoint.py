"""Checkpoints: find a model by directory or hub id, and check its files before anything is loaded."""

from __future__ import annotations

import hashlib
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
from spmoe.files import config_directory, decode_json, model_directory
from spmoe.models.hub import cached_model, config_files, download, remote_files
from spmoe.models.quantization import READABLE, Quantization, UnreadableError, read_quantization
from spmoe.models.quantized_matrices import QuantizedMatrix, find_matrices, is_auxiliary, undeclared
from spmoe.system.headers import INDEX, QUANTIZATION_FILES, StoredTensor, read_header, weight_files
from spmoe.system.origin import fingerprint

# names in config.json of architectures that transformers knows by another name, also inside its own kimi_k25
_OTHER_NAMES = {"kimi_k2": "deepseek_v3"}
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
    random: bool = False  # there are no weight files: weights are drawn when the model is loaded

    @classmethod
    def find(cls, name: str, *, weights: bool = True, load_format: str = "auto") -> Checkpoint:
        """Find and check a local directory or a hub id. A hub model that is not cached is downloaded.

        Without `weights`, only configuration files and tensor headers are fetched, and the model cannot be loaded. With
        the load format `dummy`, config.json is enough; the name may also be that of a configuration that ships.
        """
        if load_format == "dummy":
            return cls._find_config(name)
        directory = model_directory(name) or (download(name) if weights else cached_model(name))
        if directory is None:
            remote = remote_files(name)
            with _readable(remote.directory):
                config, quantization = _read_config(name, remote.directory)
                _check_generation_config(remote.directory)
            found = cls(
                name, remote.directory, config, remote.tensors, remote.fingerprint, quantization, remote.download_bytes
            )
            found.matrices  # noqa: B018  # raises if they are contradictory
            return found
        with _readable(directory):
            config, quantization = _read_config(name, directory)
            _check_generation_config(directory)
            tensors = _read_headers(directory)
            found = cls(name, directory, config, tensors, fingerprint(directory), quantization)
            found.matrices  # noqa: B018
            return found

    @cached_property
    def matrices(self) -> dict[str, QuantizedMatrix]:
        """Quantized matrices by the names of the dense tensors that they stand for."""
        if not self.tensors:
            return {}  # a configuration without weights
        try:
            if self.quantization is not None:
                return find_matrices(self.quantization, self.tensors)
        except ValueError as error:
            raise CheckpointError(
                f"the quantization of {self.name} is damaged or contradictory: {error}; download it again, or use "
                "another upload"
            ) from error
        if (name := undeclared(self.tensors)) is not None:
            raise CheckpointError(
                f"{self.name} holds quantized weights ({name} as {self.tensors[name].dtype}), but its config.json has "
                "no quantization_config; use the config that belongs to the weights"
            )
        return {}

    @classmethod
    def _find_config(cls, name: str) -> Checkpoint:
        """Find a configuration alone, for random weights."""
        directory = config_directory(name) or config_files(name)
        with _readable(directory):
            config, quantization = _read_config(name, directory)
            _check_generation_config(directory)
            digest = hashlib.sha256(b"random:" + (directory / "config.json").read_bytes()).hexdigest()
        return cls(name, directory, config, {}, digest, quantization, random=True)

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
            declared = torch.bfloat16 if self.random else self._stored_dtype()
        if declared not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(f"{self.name} is stored as {declared}, which spmoe cannot run; pass --dtype bfloat16")
        return declared

    def _stored_dtype(self) -> torch.dtype | None:
        """Return the dtype of the first floating-point weight with at least 16 bits; scales are no weights."""
        scales = {source for matrix in self.matrices.values() for source in matrix.sources.values()}
        weights = (t for name, t in self.tensors.items() if name not in scales and not is_auxiliary(name))
        return next((_FLOAT_TYPES[t.dtype] for t in weights if t.dtype in _FLOAT_TYPES), None)


def _read_config(name: str, directory: Path) -> tuple[Any, Quantization | None]:
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json, so it is not a model directory; check the path")
    declared = _read_json(directory / "config.json")
    modelopt, *own = (
        _read_json(path) if path.is_file() else None for path in map(directory.joinpath, QUANTIZATION_FILES)
    )
    try:
        quantization = read_quantization(declared, modelopt, next(filter(None, own), None))
    except UnreadableError as error:
        raise CheckpointError(
            f"{name} is quantized by {error}, which spmoe cannot read; use the 16-bit checkpoint, or one in {READABLE}"
        ) from error
    try:
        with quiet():
            config = _load_config(directory, declared)
            for one in (config, config.get_text_config(decoder=True)):
                if getattr(one, "quantization_config", None) is not None:
                    del one.quantization_config  # transformers gets dense weights
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
        readable = _without_code_keys(declared)
        if (model_type := str(readable.get("model_type"))) not in CONFIG_MAPPING and model_type in _OTHER_NAMES:
            readable["model_type"] = _OTHER_NAMES[model_type]
        (Path(cleaned) / "config.json").write_text(json.dumps(readable), encoding="utf-8")
        config = AutoConfig.from_pretrained(cleaned, trust_remote_code=False)
    config.name_or_path = str(directory)
    return config


def _without_code_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_code_keys(inner) for key, inner in value.items() if key not in _CODE_KEYS}
    return [_without_code_keys(inner) for inner in value] if isinstance(value, list) else value


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
    logs, bars = verbosity != transformers_logging.ERROR, transformers_logging.is_progress_bar_enabled()
    if logs:  # setting a level, even to the present one, clears the caches of all loggers
        transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if logs:
            transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
