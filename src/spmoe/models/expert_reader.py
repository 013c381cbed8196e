"""Read a checkpoint's experts one at a time and write them to blobs: packed as they are stored, or dense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spmoe.backends.cpu import expert_shapes
from spmoe.errors import CheckpointError, reason
from spmoe.formats.dense import Dense
from spmoe.formats.expert import ExpertFormat
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.expert_sources import ExpertSources
from spmoe.models.packed_experts import PackedExperts
from spmoe.models.tensors import CheckpointTensors, require_finite
from spmoe.types import ExpertKey


class ExpertReader:
    """Reads one expert's tensors at a time. A context manager, which closes the checkpoint's files.

    `format` is that of the blobs; without it, blobs are dense, in the dtype of the views.
    """

    def __init__(
        self, checkpoint: Checkpoint, model: Any, paths: list[str], format: ExpertFormat | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._model = model
        self._paths = paths
        self._format = format
        self._tensors = CheckpointTensors(checkpoint)
        self.sources = ExpertSources(checkpoint, model, paths, self._tensors.names)
        self._packed = PackedExperts(checkpoint, model, self.sources)

    def __enter__(self) -> ExpertReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._tensors.__exit__(*exc)

    def own_format(self, dtype: torch.dtype) -> tuple[ExpertFormat, str | None]:
        """Return the format that keeps experts as they are stored; dense ones in `dtype`.

        Quantized experts become dense if there is no format that all of them have. The second value is a notice that
        says why, for the user.
        """
        transposed: Any = self._model.get_submodule(self._paths[0]).is_transposed
        return ExpertFormat(self._packed.format or Dense(dtype), dtype, transposed), self._packed.notice

    def fill(self, key: ExpertKey, views: dict[str, Tensor]) -> None:
        """Write an expert's tensors into the views of its blob."""
        path = self._paths[key.layer]
        shapes = expert_shapes(self._model.get_submodule(path))
        if self._format is None:
            for name, shape in shapes.items():
                views[name].copy_(self._read_dense(f"{path}.{name}", shape, key.expert, views[name].dtype))
            return
        fields, dtype = self._format.views(views, shapes), self._format.dtype
        if self._packed.format is None or self._format.weight != self._packed.format:
            tensors = {
                name: self._read_dense(f"{path}.{name}", shape, key.expert, dtype) for name, shape in shapes.items()
            }
            self._format.convert(tensors, fields)
            return
        with _checkpoint_error(self._checkpoint, key, path):
            self._format.write(self._read_packed(path, shapes, key.expert, dtype), fields)
        check_packed(self._checkpoint, self._format, key, path, fields, shapes)

    def _read_packed(
        self, path: str, shapes: Mapping[str, tuple[int, ...]], expert: int, dtype: torch.dtype
    ) -> dict[str, Tensor | Mapping[str, Tensor]]:
        """Read the parts of an expert's projections, and its biases."""
        found: dict[str, Tensor | Mapping[str, Tensor]] = {}
        for name, shape in shapes.items():
            target = f"{path}.{name}"
            if len(shape) == 2:
                found[name] = self._packed.read(self._tensors, target, expert)
            else:
                found[name] = self._read_dense(target, shape, expert, dtype)
        return found

    def _read_dense(self, target: str, shape: tuple[int, ...], expert: int, dtype: torch.dtype) -> Tensor:
        """Read one expert's slice of a fused parameter, of this shape and finite in this dtype."""
        tensors = {s.pattern: self._tensors.read(*s.place(expert)) for s in self.sources.of(target)}
        try:
            tensor = self.sources.convert(target, tensors)[0].to(dtype)
        except (ValueError, RuntimeError, LookupError) as error:
            raise CheckpointError(
                f"{self._checkpoint.name} lacks a part of {target}, or it has another shape ({reason(error)}); the "
                "checkpoint is incomplete or config.json does not belong to it: download it again"
            ) from error
        if tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(
                f"config.json and the weights of {self._checkpoint.name} disagree: an expert of {target} is "
                f"{list(tensor.shape)} in the file but {list(shape)} by the config; use the config that belongs to the "
                "weights"
            )
        require_finite(self._checkpoint, f"{target} (expert {expert})", tensor)
        return tensor


def check_packed(
    checkpoint: Checkpoint,
    format: ExpertFormat,
    key: ExpertKey,
    path: str,
    fields: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise CheckpointError if a blob in the checkpoint's own packed format is damaged; `path` is the module's."""
    with _checkpoint_error(checkpoint, key, path):
        format.check(fields, shapes)
    if format.dtype == torch.float16:  # the only dtype with a smaller range than scales have
        for name, tensor in format.dequantize(fields).items():
            require_finite(checkpoint, f"{path}.{name} (expert {key.expert})", tensor)


@contextmanager
def _checkpoint_error(checkpoint: Checkpoint, key: ExpertKey, path: str) -> Iterator[None]:
    """Turn ValueError into a CheckpointError that names the expert."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(
            f"expert {key.expert} of {path} in {checkpoint.name} cannot be used: {error}; download the checkpoint again"
        ) from error
