"""Loaded models: a target without its experts, on its device, and the sources of everything else.

Weights come from checkpoints as they are or, for benchmarks, widened to the sizes of a larger architecture.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spmoe.backends.cpu import expert_shapes
from spmoe.backends.quantize import QuantizedExperts
from spmoe.config import RANDOM_WEIGHTS_NOTE, EngineConfig
from spmoe.errors import CheckpointError, UsageError, suggestion
from spmoe.experts.memory_store import MemoryStore
from spmoe.experts.shards import ShardedExperts
from spmoe.experts.store import ExpertFile, FillBlob, StoreSpec, ensure_expert_file, outdated_experts
from spmoe.files import model_directory
from spmoe.formats.base import weight_format
from spmoe.formats.expert import ExpertFormat
from spmoe.formats.layout import torch_dtype
from spmoe.models.checkpoint import Checkpoint, load_errors
from spmoe.models.dummy import BYTE_TOKENS, RandomExperts, distinct_experts
from spmoe.models.expert_formats import choose_format, is_lossless, own_format
from spmoe.models.expert_reader import ExpertReader
from spmoe.models.expert_shards import open_shards
from spmoe.models.experts_seam import experts_modules, take_over
from spmoe.models.inspection import MoeLayer
from spmoe.models.load import (
    expert_file_path,
    load_dense,
    load_dense_skeleton,
    load_skeleton,
    load_without_experts,
    store_spec,
)
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.models.tokenizer import has_tokenizer
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
    expert_format: ExpertFormat
    lossless: bool  # whether experts have the checkpoint's weights, in the run's dtype
    notices: tuple[str, ...] = ()  # for the user, about the experts

    @contextmanager
    def experts(self, format: ExpertFormat | None = None) -> Iterator[FillBlob]:
        """Yield a function that writes one expert into views of its blob; `format`: default: the run's."""
        format = format or self.expert_format
        paths = [moe_layer.path for moe_layer in self.target.moe]
        if self.checkpoint.random:
            deviation = getattr(self.checkpoint.config.get_text_config(decoder=True), "initializer_range", None) or 0.02
            shapes = [expert_shapes(moe_layer.experts) for moe_layer in self.target.moe]
            yield RandomExperts(shapes, self.spec.experts, format, deviation).fill
            return
        if self.shape is None:
            with ExpertReader(self.checkpoint, self.target.model, paths, format) as reader:
                yield reader.fill
            return
        widener, lock = ExpertWidener(self.dtype, self.device), threading.Lock()  # its buffers serve one thread
        small_shapes = [self.small.get_submodule(path).spmoe_shapes for path in paths]
        with ExpertReader(self.checkpoint, self.small, paths) as reader:

            def fill(key: ExpertKey, views: dict[str, Tensor]) -> None:
                small = {name: torch.empty(shape[1:]) for name, shape in small_shapes[key.layer].items()}
                reader.fill(key, small)
                with lock:
                    if not format.is_packed:
                        widener.fill(small, views, key)
                        return
                    shapes = expert_shapes(self.target.moe[key.layer].experts)
                    wide = {n: torch.empty(s, dtype=self.dtype, device=self.device) for n, s in shapes.items()}
                    widener.fill(small, wide, key)
                    format.convert(wide, format.views(views, shapes))

            yield fill

    @property
    def dense_expert_bytes(self) -> int:
        """Bytes of the largest expert in the run's dtype, before it is converted."""
        shapes = [expert_shapes(moe_layer.experts) for moe_layer in self.target.moe]
        return self.dtype.itemsize * max(sum(math.prod(shape) for shape in layer.values()) for layer in shapes)

    def open_shards(self) -> ShardedExperts | None:
        """Open the experts in the checkpoint's own files; None if they need a conversion."""
        if self.shape is not None or self.checkpoint.random:
            return None
        paths = [moe_layer.path for moe_layer in self.target.moe]
        with self.experts() as fill:
            return open_shards(self.checkpoint, self.target.model, paths, self.spec, self.expert_format, fill)

    def load_draft(self, checkpoint: Checkpoint) -> ModelRunner:
        """Load a draft in the target's dtype, on its device, widened like the target."""
        model = load_dense(checkpoint, self.dtype if self.shape is None else torch.float32, self.device)
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
        format = replace(experts.format, convert_on=self.device)
        store: ExpertFile | MemoryStore
        with self.experts(format) as fill, progress_bar("Quantizing experts", progress) as report:
            if self.checkpoint.random:
                store = MemoryStore(experts.spec)
                store.fill(fill, report, 0)  # a few experts are drawn, and the others copied
            else:
                store = ensure_expert_file(path, experts.spec, fill, report, announcer(progress))
        try:
            experts.load(store, self.device)
        finally:
            store.close()
        return experts


def compare_with_checkpoint(file: ExpertFile, on_progress: Callable[[int, int], None]) -> list[ExpertKey]:
    """Convert the experts of the checkpoint that a file was made from, and return those that differ from the file."""
    if not file.spec.origins:
        raise CheckpointError(f"{file.path} does not say which model it was made from; delete it to have it rebuilt")
    checkpoint = Checkpoint.find(file.spec.origins[0].directory)
    with load_errors(checkpoint):
        target = Target(load_skeleton(checkpoint))
    paths = [moe_layer.path for moe_layer in target.moe]
    dtype = torch_dtype(file.spec.layout.dtype)
    format, _ = own_format(checkpoint, target.model, paths, dtype)
    if format.name != file.spec.layout.format:
        format = ExpertFormat(weight_format(file.spec.layout.format), dtype, format.transposed)
    expected = store_spec(checkpoint, target.model, paths, dtype, format)
    if (expected.layout, expected.experts) != (file.spec.layout, file.spec.experts):
        return list(file.spec.keys())
    with ExpertReader(checkpoint, target.model, paths, format) as reader:
        return outdated_experts(file, reader.fill, on_progress)


def find_target(name: str, load_format: str = "auto") -> Checkpoint:
    """Find a target's checkpoint; refuse a model that cannot be a target before its weights are downloaded."""
    if load_format == "dummy":
        return Checkpoint.find(name, load_format=load_format)
    if model_directory(name) is None:
        remote = Checkpoint.find(name, weights=False)
        if remote.download_bytes:
            load_skeleton(remote)
    return Checkpoint.find(name)


def load_target(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, escapes: int | None = None
) -> LoadedModels:
    """Load a target without its experts; `escapes` is that of `choose_format`."""
    dtype, shape = checkpoint.dtype(config.dtype), wide_shape(config, device)
    small = load_without_experts(checkpoint, dtype if shape is None else torch.float32, device)
    with load_errors(checkpoint):
        model = small.to(device) if shape is None else widen_target(small, shape, dtype, device)
        target = Target(model)
    paths = [moe_layer.path for moe_layer in target.moe]
    own, notice = own_format(checkpoint, model, paths, dtype, widened=shape is not None)
    format = choose_format(config.expert_format, checkpoint, model, paths, dtype, escapes, own)
    notices = (notice,) if notice is not None and format == own else ()
    format, lossless = replace(format, convert_on=device), is_lossless(format, own, checkpoint)
    if shape is None:
        spec = store_spec(checkpoint, model, paths, dtype, format)
    else:
        spec = wide_store_spec(checkpoint, model, paths, dtype, shape, format=format)
    kept = small if shape is not None else None
    return LoadedModels(checkpoint, dtype, device, target, spec, shape, config.shape, kept, format, lossless, notices)


def random_weights_notices(models: LoadedModels) -> list[str]:
    """Return what a user of random weights must know: what they say nothing about, and which parts repeat."""
    checkpoint, spec = models.checkpoint, models.spec
    if not checkpoint.random:
        return []
    shapes = [expert_shapes(moe_layer.experts) for moe_layer in models.target.moe]
    notices, distinct = [RANDOM_WEIGHTS_NOTE], distinct_experts(shapes, spec.count)
    if distinct < spec.count:
        notices.append(f"{distinct} of {spec.count} experts are drawn; the others repeat them")
    if not has_tokenizer(checkpoint.directory):
        vocabulary = checkpoint.config.get_text_config(decoder=True).vocab_size
        notices.append(
            f"{checkpoint.name} has no tokenizer, so a token is a byte of text"
            + (", and larger ids are shown as numbers" if vocabulary > BYTE_TOKENS else "")
            if vocabulary >= BYTE_TOKENS
            else f"{checkpoint.name} has no tokenizer and only {vocabulary} tokens, so prompts must be token ids"
        )
    return notices


def draft_skeleton(checkpoint: Checkpoint) -> ModelRunner:
    """Build a draft without weights, on the meta device."""
    with load_errors(checkpoint):
        model = load_dense_skeleton(checkpoint)
        if any(True for _ in experts_modules(model)):
            take_over(model)  # transformers' own experts cannot run without weights
        return ModelRunner(model)


def quantized_experts(spec: StoreSpec, moe: Sequence[MoeLayer], scheme: str) -> QuantizedExperts:
    """Return the description of a target's quantized experts; nothing is read.

    `spec`: that of the target's own experts, in any format.
    """
    transposed: Any = moe[0].experts.is_transposed
    layers = [expert_shapes(moe_layer.experts) for moe_layer in moe]
    return QuantizedExperts.of(spec, scheme, torch_dtype(spec.layout.dtype), transposed, layers)


def wide_shape(config: EngineConfig, device: torch.device) -> WideShape | None:
    """Return the shape to widen to, if any."""
    if config.shape is None:
        return None
    if config.shape not in SHAPES:
        hint = suggestion(config.shape, list(SHAPES))
        raise UsageError(f"shape must be one of {', '.join(SHAPES)}, not {config.shape!r}{hint}")
    if device.type != "cuda":
        raise UsageError("--shape makes a model of real size, which needs a CUDA device; leave it out")
    return SHAPES[config.shape]
