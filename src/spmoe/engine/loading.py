"""Materials: the two networks and the experts an engine is put together from, on the device it runs on.

They come from checkpoints as they are or, for benchmarks, widened to the sizes of a larger architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmoe.backends.quantize import QuantizationScheme, QuantizedExperts
from spmoe.config import EngineConfig
from spmoe.draft.self_quantized import QuantizedSelfRunner
from spmoe.errors import UsageError
from spmoe.experts.store import FillBlob, StoreSpec, ensure_expert_file
from spmoe.models.checkpoint import Checkpoint, building
from spmoe.models.inspection import MoeLayer
from spmoe.models.load import ExpertReader, expert_file_path, load_dense, load_without_experts, store_spec
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.models.widen import SHAPES, ExpertWidener, WideShape, wide_store_spec, widen_draft, widen_target
from spmoe.observe.progress import progress_bar
from spmoe.types import ExpertKey


@dataclass
class LoadedModels:
    """A target without its experts, and where those come from."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    target: Target
    spec: StoreSpec
    shape: WideShape | None
    small: Any  # the model as its checkpoint has it, where the target is a widened one

    @contextmanager
    def experts(self) -> Iterator[FillBlob]:
        """A function that writes one expert's tensors into views of its blob."""
        paths = [moe_layer.path for moe_layer in self.target.moe]
        if self.shape is None:
            with ExpertReader(self.checkpoint, self.target.model, paths) as reader:
                yield reader.fill
            return
        widener = ExpertWidener(self.dtype, self.device)
        shapes = [self.small.get_submodule(path).spmoe_shapes for path in paths]
        with ExpertReader(self.checkpoint, self.small, paths) as reader:

            def fill(key: ExpertKey, views: dict[str, Tensor]) -> None:
                small = {name: torch.empty(shape[1:]) for name, shape in shapes[key.layer].items()}
                reader.fill(key, small)
                widener.fill(small, views, key)

            yield fill


def load_target(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> LoadedModels:
    """Load a target without its experts."""
    dtype, shape = checkpoint.dtype(config.dtype), wide_shape(config, device)
    small = load_without_experts(checkpoint, dtype if shape is None else torch.float32)
    with building(checkpoint):
        model = small.to(device) if shape is None else widen_target(small, shape, dtype, device)
        target = Target(model)
    paths = [moe_layer.path for moe_layer in target.moe]
    if shape is None:
        spec = store_spec(checkpoint, model, paths, dtype)
    else:
        spec = wide_store_spec(checkpoint, model, paths, dtype, shape)
    return LoadedModels(checkpoint, dtype, device, target, spec, shape, small if shape is not None else None)


def load_draft(models: LoadedModels, checkpoint: Checkpoint) -> ModelRunner:
    """A draft of the target's dtype, on its device and widened as it is."""
    shape = models.shape
    model = load_dense(checkpoint, models.dtype if shape is None else torch.float32)
    with building(checkpoint):
        if shape is not None:
            model = widen_draft(model, shape, models.dtype, models.device)
        return ModelRunner(model.to(models.device))


def quantized_experts(spec: StoreSpec, moe: Sequence[MoeLayer], name: str) -> QuantizedExperts:
    """What a target's quantized experts will be; nothing is read."""
    transposed: Any = moe[0].experts.is_transposed
    return QuantizedExperts(spec, QuantizationScheme.from_name(name), transposed)


def load_self(config: EngineConfig, models: LoadedModels, name: str) -> QuantizedSelfRunner:
    """The target's own modules with quantized experts, which are kept on disk beside the expert file."""
    experts = quantized_experts(models.spec, models.target.moe, name)
    plain = expert_file_path(models.checkpoint, models.dtype)
    path = plain.with_name(f"{plain.stem}-{'' if config.shape is None else f'{config.shape}-'}{name}{plain.suffix}")
    with models.experts() as read, progress_bar("Quantizing experts", config.progress) as report:
        file = ensure_expert_file(path, experts.spec, experts.filler(read), report)
    try:
        experts.load(file, models.device)
    finally:
        file.close()
    return QuantizedSelfRunner(models.target, experts)


def wide_shape(config: EngineConfig, device: torch.device) -> WideShape | None:
    """The shape to widen to, if any."""
    if config.shape is None:
        return None
    if config.shape not in SHAPES:
        raise UsageError(f"shape must be one of {', '.join(SHAPES)}, not {config.shape!r}")
    if device.type != "cuda":
        raise UsageError("--shape makes a model of real size, for which a CUDA device is needed; leave it out")
    return SHAPES[config.shape]
