"""Loaded models: a target without its experts, on its device, and the sources of everything else.

Weights come from checkpoints as they are or, for benchmarks, widened to the sizes of a larger architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmoe.backends.quantize import QuantizationScheme, QuantizedExperts
from spmoe.config import EngineConfig
from spmoe.errors import CheckpointError, UsageError
from spmoe.experts.store import ExpertFile, FillBlob, StoreSpec, ensure_expert_file, outdated_experts
from spmoe.files import model_directory
from spmoe.models.checkpoint import Checkpoint, load_errors
from spmoe.models.experts_seam import experts_modules, take_over
from spmoe.models.inspection import MoeLayer
from spmoe.models.load import (
    ExpertReader,
    expert_file_path,
    load_dense,
    load_dense_skeleton,
    load_skeleton,
    load_without_experts,
    store_spec,
)
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.models.widen import SHAPES, ExpertWidener, WideShape, wide_store_spec, widen_draft, widen_target
from spmoe.observe.announce import announcer
from spmoe.observe.progress import progress_bar
from spmoe.types import ExpertKey


@dataclass(frozen=True)
class LoadedModels:
    """A target without its experts, and the sources of those."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    target: Target
    spec: StoreSpec  # of the experts
    shape: WideShape | None
    shape_name: str | None
    small: Any  # the model at its checkpoint's own sizes, if the target is widened

    @contextmanager
    def experts(self) -> Iterator[FillBlob]:
        """Yield a function that writes one expert's tensors into views of its blob."""
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

    def load_draft(self, checkpoint: Checkpoint) -> ModelRunner:
        """Load a draft in the target's dtype, on its device, widened like the target."""
        model = load_dense(checkpoint, self.dtype if self.shape is None else torch.float32)
        with load_errors(checkpoint):
            if self.shape is not None:
                model = widen_draft(model, self.shape, self.dtype, self.device)
            return ModelRunner(model.to(self.device))

    def load_quantized(self, scheme: str, progress: bool) -> QuantizedExperts:
        """Load the target's experts quantized (`int8`, `int4`), from a file beside the expert file."""
        experts = quantized_experts(self.spec, self.target.moe, scheme)
        plain = expert_file_path(self.checkpoint, self.dtype)
        shape = "" if self.shape_name is None else f"{self.shape_name}-"
        path = plain.with_name(f"{plain.stem}-{shape}{scheme}{plain.suffix}")
        with self.experts() as read, progress_bar("Quantizing experts", progress) as report:
            file = ensure_expert_file(path, experts.spec, experts.filler(read), report, announcer(progress))
        try:
            experts.load(file, self.device)
        finally:
            file.close()
        return experts


def compare_with_checkpoint(file: ExpertFile, on_progress: Callable[[int, int], None]) -> list[ExpertKey]:
    """Convert the experts of the checkpoint that a file was made from, and return those that differ from the file."""
    if not file.spec.origins:
        raise CheckpointError(f"{file.path} does not say which model it was made from; delete it to have it rebuilt")
    checkpoint = Checkpoint.find(file.spec.origins[0].directory)
    with load_errors(checkpoint):
        target = Target(load_skeleton(checkpoint))
    paths = [moe_layer.path for moe_layer in target.moe]
    expected = store_spec(checkpoint, target.model, paths, getattr(torch, file.spec.layout.dtype))
    if (expected.layout, expected.experts) != (file.spec.layout, file.spec.experts):
        return list(file.spec.keys())
    with ExpertReader(checkpoint, target.model, paths) as reader:
        return outdated_experts(file, reader.fill, on_progress)


def find_target(name: str) -> Checkpoint:
    """Find a target's checkpoint; refuse a model that cannot be a target before its weights are downloaded."""
    if model_directory(name) is None:
        remote = Checkpoint.find(name, weights=False)
        if remote.download_bytes:
            load_skeleton(remote)
    return Checkpoint.find(name)


def load_target(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> LoadedModels:
    """Load a target without its experts."""
    dtype, shape = checkpoint.dtype(config.dtype), wide_shape(config, device)
    small = load_without_experts(checkpoint, dtype if shape is None else torch.float32)
    with load_errors(checkpoint):
        model = small.to(device) if shape is None else widen_target(small, shape, dtype, device)
        target = Target(model)
    paths = [moe_layer.path for moe_layer in target.moe]
    if shape is None:
        spec = store_spec(checkpoint, model, paths, dtype)
    else:
        spec = wide_store_spec(checkpoint, model, paths, dtype, shape)
    kept = small if shape is not None else None
    return LoadedModels(checkpoint, dtype, device, target, spec, shape, config.shape, kept)


def draft_skeleton(checkpoint: Checkpoint) -> ModelRunner:
    """Build a draft without weights, on the meta device."""
    with load_errors(checkpoint):
        model = load_dense_skeleton(checkpoint)
        if any(True for _ in experts_modules(model)):
            take_over(model)  # transformers' own experts cannot run without weights
        return ModelRunner(model)


def quantized_experts(spec: StoreSpec, moe: Sequence[MoeLayer], scheme: str) -> QuantizedExperts:
    """Return the description of a target's quantized experts; nothing is read."""
    transposed: Any = moe[0].experts.is_transposed
    return QuantizedExperts(spec, QuantizationScheme.from_name(scheme), transposed)


def wide_shape(config: EngineConfig, device: torch.device) -> WideShape | None:
    """Return the shape to widen to, if any."""
    if config.shape is None:
        return None
    if config.shape not in SHAPES:
        raise UsageError(f"shape must be one of {', '.join(SHAPES)}, not {config.shape!r}")
    if device.type != "cuda":
        raise UsageError("--shape makes a model of real size, which needs a CUDA device; leave it out")
    return SHAPES[config.shape]
