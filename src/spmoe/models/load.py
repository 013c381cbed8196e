"""Load a model: dense weights into memory with transformers' own loader, experts one at a time into the expert file.

The fused expert parameters are never allocated: a subclass of the model's class removes them while they are on the meta
device, so the loader does not read their tensors. A load needs memory for the dense weights and about three blobs: one
expert's source tensors, the converted tensors, and the blob.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig
from transformers import __version__ as transformers_version

from spmoe.backends.cpu import expert_shapes
from spmoe.config import home
from spmoe.errors import CheckpointError, UsageError
from spmoe.experts.store import StoreSpec
from spmoe.formats.dense import Dense
from spmoe.formats.expert import ExpertFormat
from spmoe.models.checkpoint import Checkpoint, load_errors
from spmoe.models.dummy import random_model
from spmoe.models.experts_seam import experts_modules, take_over
from spmoe.models.tensors import CheckpointTensors, natural, require_finite
from spmoe.system.origin import Origin, converter

_CPU = torch.device("cpu")


def load_dense(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device = _CPU) -> Any:
    """Load a model with all its weights in memory, as drafts are; random weights are drawn on `device`."""
    return _load(checkpoint, *_causal_class(checkpoint), dtype, device)


def load_without_experts(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device = _CPU) -> Any:
    """Load a model without its experts' weights; its experts return zeros until they are attached to a source.

    Random weights are drawn on `device`.
    """
    cls, config = _causal_class(checkpoint)
    model = _load(checkpoint, _without_experts(cls), config, dtype, device)
    require_experts(checkpoint, model)
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
    require_experts(checkpoint, model)
    take_over(model)
    return model.eval()


def store_spec(
    checkpoint: Checkpoint, model: Any, paths: list[str], dtype: torch.dtype, format: ExpertFormat | None = None
) -> StoreSpec:
    """Describe the store of a checkpoint's experts; `paths` are those of the experts modules, in layer order.

    `format`: default: dense in `dtype`.
    """
    modules = [model.get_submodule(path) for path in paths]
    counts = tuple(next(iter(module.spmoe_shapes.values()))[0] for module in modules)
    format = format or ExpertFormat(Dense(dtype), dtype, modules[0].is_transposed)
    layout = format.shared_layout([expert_shapes(module) for module in modules])
    return StoreSpec(checkpoint.fingerprint, layout, counts, converter(), (origin_of(checkpoint),))


def origin_of(checkpoint: Checkpoint) -> Origin:
    """Return the record of a checkpoint for files that are made from it; its name is the directory or the hub id."""
    directory = str(checkpoint.directory)
    name = directory if Path(checkpoint.name).expanduser().is_dir() else checkpoint.name
    return Origin(name, directory, checkpoint.fingerprint)


def expert_file_path(checkpoint: Checkpoint, dtype: torch.dtype, format: ExpertFormat | None = None) -> Path:
    """Return the path of the cached expert file: one per checkpoint (directory or hub id), dtype and packed format."""
    source = origin_of(checkpoint).name
    tag = hashlib.sha256(source.encode()).hexdigest()[:12]
    label = re.sub(r"[^\w.-]+", "-", Path(source).name)[:60]
    packed = f"-{format.weight.label}" if format is not None and format.is_packed else ""
    return home() / "experts" / f"{label}-{tag}-{str(dtype).removeprefix('torch.')}{packed}.safetensors"


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


def require_experts(checkpoint: Checkpoint, model: Any) -> None:
    """Raise an error if a model has no experts, or none that can be replaced."""
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


def expert_parameter_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters of an experts module that have one entry per expert."""
    count = getattr(module, "num_experts", None)
    found = module.named_parameters(recurse=False)
    return [name for name, parameter in found if parameter.ndim >= 2 and count in (None, parameter.shape[0])]


def _without_experts(cls: Any) -> Any:
    """Return a subclass whose experts modules have no weights, only their shapes in `spmoe_shapes`."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        for _, module in experts_modules(self):
            names = expert_parameter_names(module)
            module.spmoe_shapes = {n: tuple(module._parameters[n].shape) for n in names}  # type: ignore[union-attr, assignment]
            for name in names:
                module._parameters[name] = None
            module._is_hf_initialized = True  # type: ignore[assignment]

    # transformers finds conversion rules by class name, and only for classes of its own modules
    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


def _load(checkpoint: Checkpoint, cls: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Load with transformers' loader, and reject weights that do not match config.json or are not finite."""
    options: dict[str, Any] = {}
    with load_errors(checkpoint), CheckpointTensors(checkpoint) as tensors:
        if (checkpoint.directory / "generation_config.json").is_file():
            options["generation_config"] = GenerationConfig.from_pretrained(checkpoint.directory)
        if checkpoint.random:
            return random_model(cls, config, dtype, device, **options).eval().requires_grad_(False)
        model, info = cls.from_pretrained(
            None,
            state_dict=tensors.lazy(),
            **options,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        unused = [n for n in _unused_layer_weights(model, info["unexpected_keys"]) if not tensors.is_zero_bias(n)]
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
    if unused:
        raise CheckpointError(
            f"config.json and the weights of {checkpoint.name} disagree: the file holds {unused[0]} ({len(unused)} "
            "such), which the config has no place for; use the config that belongs to the weights"
        )
    for name, tensor in model.state_dict().items():
        require_finite(checkpoint, name, tensor)
    return model.eval().requires_grad_(False)


def _unused_layer_weights(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return unexpected decoder-layer weights: without them the model would differ from the one that was trained.

    Experts' parameters, which are left out, do not count, nor do next-token-prediction layers after the last one, which
    decoding does not use.
    """
    config = model.config.get_text_config(decoder=True)
    depth = config.num_hidden_layers
    extra = getattr(config, "num_nextn_predict_layers", None) or 0
    lists = (path for path, found in model.named_modules() if isinstance(found, nn.ModuleList) and len(found) == depth)
    layer = re.compile(rf"{re.escape(next(lists, 'layers'))}\.(\d+)\.")
    left_out = {path: getattr(module, "spmoe_shapes", {}) for path, module in experts_modules(model)}
    experts = {f"{path}.{name}" for path, names in left_out.items() for name in names}
    numbered = [(name, match) for name in sorted(unexpected, key=natural) if (match := layer.match(name))]
    return [n for n, m in numbered if n not in experts and not depth <= int(m[1]) < depth + extra]
