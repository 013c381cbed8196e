"""Load a model: dense weights into memory with transformers' own loader, experts one at a time into the expert file.

The fused expert parameters are never allocated: a subclass of the model's class removes them while they are on the meta
device, so the loader does not read their tensors. A load needs memory for the dense weights and about three blobs: one
expert's source tensors, the converted tensors, and the blob.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig
from transformers import __version__ as transformers_version
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from spmoe.backends.cpu import WHOLE, expert_tensors
from spmoe.config import home
from spmoe.errors import CheckpointError, UsageError, reason
from spmoe.experts.store import BlobLayout, StoreSpec
from spmoe.models.checkpoint import Checkpoint, load_errors
from spmoe.models.experts_seam import experts_modules, take_over
from spmoe.models.tensors import CheckpointTensors
from spmoe.system.origin import Origin
from spmoe.types import ExpertKey


def load_dense(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Load a model with all its weights in memory, as drafts are."""
    return _load(checkpoint, *_causal_class(checkpoint), dtype)


def load_without_experts(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Load a model without its experts' weights; its experts return zeros until they are attached to a source."""
    cls, config = _causal_class(checkpoint)
    model = _load(checkpoint, _without_experts(cls), config, dtype)
    _require_experts(checkpoint, model)
    take_over(model)
    return model


def load_dense_skeleton(checkpoint: Checkpoint) -> Any:
    """Build a model without weights, on the meta device."""
    cls, config = _causal_class(checkpoint)
    with torch.device("meta"), load_errors(checkpoint):
        return cls(config)


def load_skeleton(checkpoint: Checkpoint) -> Any:
    """Build a target without weights, on the meta device, for inspection."""
    cls, config = _causal_class(checkpoint)
    with torch.device("meta"), load_errors(checkpoint):
        model = _without_experts(cls)(config)
    _require_experts(checkpoint, model)
    take_over(model)
    return model.eval()


def store_spec(checkpoint: Checkpoint, model: Any, paths: list[str], dtype: torch.dtype) -> StoreSpec:
    """Describe the expert file of a checkpoint; `paths` are those of the experts modules, in layer order."""
    shapes = [model.get_submodule(path).spmoe_shapes for path in paths]
    blobs = [{name: tuple(shape[1:]) for name, shape in one.items()} for one in shapes]
    counts = tuple(next(iter(one.values()))[0] for one in shapes)
    blob = blobs[0]
    if any(other != blob for other in blobs):  # all blobs get the largest layer's size; `parts` splits them
        most = max(sum(math.prod(shape) for shape in other.values()) for other in blobs)
        width = max(shape[-1] for other in blobs for shape in other.values())
        blob = {WHOLE: (-(-most // width), width)}
    return StoreSpec(checkpoint.fingerprint, BlobLayout.of(blob, dtype), counts, (origin_of(checkpoint),))


def origin_of(checkpoint: Checkpoint) -> Origin:
    """Return the record of a checkpoint for files that are made from it; its name is the directory or the hub id."""
    directory = str(checkpoint.directory)
    name = directory if Path(checkpoint.name).expanduser().is_dir() else checkpoint.name
    return Origin(name, directory, checkpoint.fingerprint)


def expert_file_path(checkpoint: Checkpoint, dtype: torch.dtype) -> Path:
    """Return the path of the cached expert file: one per checkpoint (directory or hub id) and dtype."""
    source = origin_of(checkpoint).name
    tag = hashlib.sha256(source.encode()).hexdigest()[:12]
    label = re.sub(r"[^\w.-]+", "-", Path(source).name)[:60]
    return home() / "experts" / f"{label}-{tag}-{str(dtype).removeprefix('torch.')}.safetensors"


def _causal_class(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Return the model class and its configuration; those of the text model for a multimodal checkpoint."""
    config = checkpoint.config
    try:
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        text = config.get_text_config(decoder=True)
        return cls, text if type(text) is cls.config_class else config
    except KeyError as error:
        raise CheckpointError(
            f"{checkpoint.name} ({checkpoint.config.model_type}) is not a causal language model that transformers "
            f"{transformers_version} knows; choose a text-generation checkpoint"
        ) from error


def _require_experts(checkpoint: Checkpoint, model: Any) -> None:
    if not any(True for _ in experts_modules(model)):
        architecture = type(model).__name__
        declared = checkpoint.config.get_text_config(decoder=True).to_dict()
        if not any("expert" in key and value for key, value in declared.items()):
            raise UsageError(
                f"{checkpoint.name} is a dense model ({architecture}), without experts; spmoe runs MoE models: use it "
                "as a draft, with --draft"
            )
        raise CheckpointError(
            f"{checkpoint.name} ({architecture}) has no experts that transformers {transformers_version} lets spmoe "
            "replace; upgrade transformers, or use it as a draft, with --draft"
        )


def _without_experts(cls: Any) -> Any:
    """Return a subclass whose experts modules have no weights, only their shapes in `spmoe_shapes`."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        for _, module in experts_modules(self):
            count = getattr(module, "num_experts", None)
            names = [
                n for n, p in module.named_parameters(recurse=False) if p.ndim >= 2 and count in (None, p.shape[0])
            ]
            module.spmoe_shapes = {n: tuple(module._parameters[n].shape) for n in names}  # type: ignore[union-attr, assignment]
            for name in names:
                module._parameters[name] = None
            module._is_hf_initialized = True  # type: ignore[assignment]

    # transformers finds conversion rules by class name, and only for classes of its own modules
    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


def _load(checkpoint: Checkpoint, cls: Any, config: Any, dtype: torch.dtype) -> Any:
    """Load with transformers' loader, and reject weights that do not match config.json or are not finite."""
    with load_errors(checkpoint), CheckpointTensors(checkpoint) as tensors:
        source: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.directory, "local_files_only": True}
        if tensors.quantized:
            source = {"pretrained_model_name_or_path": None, "state_dict": tensors.lazy()}
            if (checkpoint.directory / "generation_config.json").is_file():
                source["generation_config"] = GenerationConfig.from_pretrained(checkpoint.directory)
        model, info = cls.from_pretrained(
            **source,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
        )
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise CheckpointError(
            f"config.json and the weights of {checkpoint.name} disagree: {name} is {list(found)} in the file but "
            f"{list(expected)} by the config ({len(mismatched)} such); use the config that belongs to the weights"
        )
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{checkpoint.name} lacks {missing[0]} ({len(missing)} missing in all); the checkpoint is incomplete or "
            "config.json does not belong to it: download it again"
        )
    if unused := _unused_layer_weights(model, info["unexpected_keys"]):
        raise CheckpointError(
            f"config.json and the weights of {checkpoint.name} disagree: the file holds {unused[0]} ({len(unused)} "
            "such), which the config has no place for; use the config that belongs to the weights"
        )
    for name, tensor in model.state_dict().items():
        _require_finite(checkpoint, name, tensor)
    return model.eval().requires_grad_(False)


def _unused_layer_weights(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return unexpected decoder-layer weights: without them the model would differ from the one that was trained.

    Left-out experts do not count, nor do next-token-prediction layers after the last one, which decoding does not use.
    """
    config = model.config.get_text_config(decoder=True)
    depth = config.num_hidden_layers
    extra = getattr(config, "num_nextn_predict_layers", None) or 0
    lists = (path for path, found in model.named_modules() if isinstance(found, nn.ModuleList) and len(found) == depth)
    layer = re.compile(rf"{re.escape(next(lists, 'layers'))}\.(\d+)\.")
    experts = tuple(f"{path}." for path, _ in experts_modules(model))
    numbered = [(name, match) for name in sorted(unexpected, key=_natural) if (match := layer.match(name))]
    return [n for n, m in numbered if not n.startswith(experts) and not depth <= int(m[1]) < depth + extra]


class ExpertReader:
    """Reads one expert's tensors at a time, with transformers' own conversion rules."""

    def __init__(self, checkpoint: Checkpoint, model: Any, paths: list[str]) -> None:
        self._checkpoint = checkpoint
        self._model = model
        self._paths = paths
        self._tensors = CheckpointTensors(checkpoint)
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        wanted = {
            f"{path}.{name}": shape for path in paths for name, shape in model.get_submodule(path).spmoe_shapes.items()
        }
        known = dict.fromkeys([*model.state_dict(), *wanted], True)
        sources: dict[str, dict[str | None, list[str]]] = {name: {} for name in wanted}
        for name in sorted(self._tensors.names, key=_natural):
            target, pattern = rename_source_key(name, renamings, self._converters, model.base_model_prefix, known)
            if target in sources:
                sources[target].setdefault(pattern, []).append(name)
        self._sources = sources
        self._mxfp4 = {
            target for target in wanted if {f"{target}_blocks", f"{target}_scales"} <= checkpoint.files.keys()
        }
        for target, (count, *_) in wanted.items():
            if target not in self._mxfp4:
                self._check_sources(target, count)

    def __enter__(self) -> ExpertReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._tensors.__exit__(*exc)

    def fill(self, key: ExpertKey, views: dict[str, Tensor]) -> None:
        """Write an expert's tensors into the views of its blob."""
        for name, view in expert_tensors(self._model.get_submodule(self._paths[key.layer]), views).items():
            target = f"{self._paths[key.layer]}.{name}"
            tensor = self._read(target, key.expert)
            if tensor.shape != view.shape:
                raise CheckpointError(
                    f"config.json and the weights of {self._checkpoint.name} disagree: an expert of {target} is "
                    f"{list(tensor.shape)} in the file but {list(view.shape)} by the config; use the config that "
                    "belongs to the weights"
                )
            view.copy_(tensor)
            _require_finite(self._checkpoint, f"{target} (expert {key.expert})", view)

    def _check_sources(self, target: str, count: int) -> None:
        found = self._sources[target]
        if not found:
            raise CheckpointError(
                f"{self._checkpoint.name} lacks {target}; the checkpoint is incomplete or config.json does not belong "
                "to it: download it again"
            )
        for pattern, names in found.items():
            if len(names) != count and (len(names) != 1 or _per_expert(pattern)):
                raise CheckpointError(
                    f"{self._checkpoint.name} has {len(names)} experts for {target} but config.json says {count}; the "
                    "checkpoint is incomplete or config.json does not belong to it: download it again"
                )

    def _read(self, target: str, expert: int) -> Tensor:
        """Read one expert's slice of a fused parameter."""
        if target in self._mxfp4:  # mxfp4: 4 bits per value, one scale per 32 values; bfloat16 holds them exactly
            blocks, scales = (self._read_source(None, [f"{target}_{part}"], expert) for part in ("blocks", "scales"))
            unpacked: Tensor = convert_moe_packed_tensors(blocks, scales)
            return unpacked[0]
        sources = self._sources[target]
        tensors: Any = {pattern: [self._read_source(pattern, names, expert)] for pattern, names in sources.items()}
        if None in tensors:  # stored fused, as the module holds it
            return tensors[None][0][0]  # type: ignore[no-any-return]
        converter = next(c for c in self._converters if set(tensors) <= set(c.source_patterns))
        try:
            for operation in converter.operations:
                tensors = operation.convert(
                    tensors,
                    source_patterns=converter.source_patterns,
                    target_patterns=converter.target_patterns,
                    full_layer_name=target,
                    model=self._model,
                    config=self._model.config,
                    missing_keys=None,
                )
            (fused,) = tensors.values()  # [1, ...]: the converter sees one expert
        except (ValueError, RuntimeError, LookupError) as error:
            raise CheckpointError(
                f"{self._checkpoint.name} lacks a part of {target}, or it has another shape ({reason(error)}); the "
                "checkpoint is incomplete or config.json does not belong to it: download it again"
            ) from error
        return fused[0]  # type: ignore[no-any-return]

    def _read_source(self, pattern: str | None, names: list[str], expert: int) -> Tensor:
        """Read an expert's own tensor, or its slice [1, ...] of a tensor that holds all experts."""
        if len(names) == 1 and not _per_expert(pattern):
            return self._tensors.read(names[0], expert)
        return self._tensors.read(names[expert])


def _per_expert(pattern: str | None) -> bool:
    """Return whether names that match this pattern of a conversion rule are tensors of one expert each."""
    return pattern is not None and "*" in pattern


def _require_finite(checkpoint: Checkpoint, name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{name} of {checkpoint.name} holds values that are not finite in {str(tensor.dtype)[6:]}; the checkpoint "
            "is damaged, or needs --dtype bfloat16 or float32"
        )


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key that puts expert 2 before expert 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
