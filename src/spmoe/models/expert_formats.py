"""The expert format of a run: the checkpoint's own, or the one that `--expert-format` converts to."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from spmoe.errors import StoreError, UsageError
from spmoe.experts.store import ExpertFile
from spmoe.formats.base import WeightFormat, weight_format
from spmoe.formats.bf16_packed import DEFAULT_ESCAPES, MAX_ESCAPES, Bf16Packed
from spmoe.formats.dense import Dense
from spmoe.formats.expert import ExpertFormat
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.dummy import declared_format
from spmoe.models.expert_reader import ExpertReader
from spmoe.models.load import expert_file_path

AUTO = "auto"
_STORED_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def choose_format(
    wanted: str,
    checkpoint: Checkpoint,
    model: Any,
    paths: list[str],
    dtype: torch.dtype,
    escapes: int | None = None,
    own: ExpertFormat | None = None,
) -> ExpertFormat:
    """Return the format of experts; `wanted` is the option, `paths` are those of the experts modules.

    `own`: the format that `auto` means; default: that of the checkpoint. `escapes`: the place for rare exponents in
    `bf16-packed`; default: that of the expert file, if there is one. Raise UsageError for a format that cannot hold
    these experts.
    """
    own = own or own_format(checkpoint, model, paths, dtype)[0]
    if wanted == AUTO:
        return own
    format = ExpertFormat(weight_format(wanted), dtype, own.transposed)
    if isinstance(format.weight, Bf16Packed):
        if not is_lossless(format, own, checkpoint):
            raise UsageError(
                f"--expert-format bf16-packed packs bfloat16 weights without loss, but {checkpoint.name} has others; "
                "add --dtype bfloat16, or choose another format"
            )
        found = _escapes_on_disk(expert_file_path(checkpoint, dtype, format)) if escapes is None else escapes
        if found > MAX_ESCAPES:
            raise UsageError(
                f"--expert-format bf16-packed would not make the experts of {checkpoint.name} smaller: their exponents "
                "are too diverse; leave the option out"
            )
        format = ExpertFormat(Bf16Packed(found), dtype, own.transposed)
    for path in paths:
        try:
            format.layout({name: shape[1:] for name, shape in model.get_submodule(path).spmoe_shapes.items()})
        except ValueError as error:
            raise UsageError(
                f"--expert-format {wanted} cannot hold the experts of {checkpoint.name}: {error}; choose another format"
            ) from error
    return format


def own_format(
    checkpoint: Checkpoint, model: Any, paths: list[str], dtype: torch.dtype, widened: bool = False
) -> tuple[ExpertFormat, str | None]:
    """Return the format that keeps experts as they are, packed or dense in `dtype`, and perhaps a notice for the user.

    The notice says why quantized experts cannot stay packed. `widened`: experts are made larger, from dense ones. Only
    headers are read. Random experts have the format that config.json declares.
    """
    transposed: Any = model.get_submodule(paths[0]).is_transposed
    if checkpoint.random and (declared := declared_format(checkpoint)) is not None:
        return ExpertFormat(weight_format(declared), dtype, transposed), None
    if widened or not checkpoint.matrices:
        return ExpertFormat(Dense(dtype), dtype, transposed), None
    with ExpertReader(checkpoint, model, paths) as reader:
        return reader.own_format(dtype)


def is_lossless(format: ExpertFormat, own: ExpertFormat, checkpoint: Checkpoint) -> bool:
    """Return whether the output is that of the checkpoint's weights in the run's dtype."""
    return format == own or format.lossless_from(_stored_dtype(checkpoint) or format.dtype)


def expert_parameters(model: Any, paths: list[str]) -> int:
    """Return the number of parameters of all experts."""
    return sum(math.prod(shape) for path in paths for shape in model.get_submodule(path).spmoe_shapes.values())


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """Return the dtype of most bytes of a checkpoint's experts, or of all weights if no name tells; None: quantized."""
    if checkpoint.quantization is not None:  # its other tensors may be more, and have another dtype
        return None
    sizes = Counter[str]()
    experts = [tensor for name, tensor in checkpoint.tensors.items() if "experts" in name]
    for tensor in experts or checkpoint.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    return _STORED_TYPES.get(sizes.most_common(1)[0][0]) if sizes else None


def _escapes_on_disk(path: Path) -> int:
    """Return the place for rare exponents that an expert file was written with; the default without a file."""
    try:
        file = ExpertFile.open(path)
        file.close()
        found: WeightFormat = weight_format(file.spec.layout.format)
    except (StoreError, UsageError, ValueError):  # it is written again
        return DEFAULT_ESCAPES
    return found.escapes if isinstance(found, Bf16Packed) else DEFAULT_ESCAPES
