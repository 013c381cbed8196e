"""Find out whether a checkpoint's experts can be read in place: each tensor of a blob is a row of stored ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spmoe.backends.cpu import expert_shapes
from spmoe.errors import CheckpointError, reason
from spmoe.experts.shards import Piece, ShardedExperts
from spmoe.experts.store import FillBlob, StoreSpec
from spmoe.formats.expert import ExpertFormat
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.expert_reader import check_packed
from spmoe.models.expert_sources import ExpertSources, StoredExpert
from spmoe.models.packed_experts import PackedExperts
from spmoe.models.tensors import CheckpointTensors, require_finite
from spmoe.system.headers import StoredTensor, read_header
from spmoe.types import ExpertKey

ShardIndex = Mapping[ExpertKey, tuple[Piece, ...]]
_PROBE = (2, 3, 5, 7)  # sizes of the tensors that conversion rules are tried with
_STORED_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by name in a header
_IN_PLACE_BYTES = 2**28  # smaller experts are written to an expert file, whose blobs are in one piece and checked


def find_shards(checkpoint: Checkpoint, model: Any, paths: list[str], format: ExpertFormat) -> ShardIndex | None:
    """Return where the bytes of every blob are in the checkpoint's files, or None if blobs need a conversion.

    Reads headers only. A conversion rule that joins tensors one after the other is recognized by its result for small
    tensors. A rule that does anything else, another dtype or format, and parts that are computed need a conversion.
    """
    if checkpoint.random or checkpoint.download_bytes or format.is_packed > bool(checkpoint.matrices):
        return None
    sources = ExpertSources(checkpoint, model, paths, CheckpointTensors(checkpoint).names)
    if not format.is_packed and not sources.matrices().isdisjoint(checkpoint.matrices):
        return None
    packed = PackedExperts(checkpoint, model, sources) if format.is_packed else None
    if packed is not None and packed.format != format.weight:
        return None
    index: dict[ExpertKey, tuple[Piece, ...]] = {}
    for layer, path in enumerate(paths):
        shapes = expert_shapes(model.get_submodule(path))
        fields = {field.name: field for field in format.layout(shapes).fields}
        orders = {name: _order(checkpoint, sources, f"{path}.{name}") for name in shapes if name in fields}
        for expert in range(next(iter(model.get_submodule(path).spmoe_shapes.values()))[0]):
            tensors: dict[str, list[StoredExpert]] = {}  # by field
            for name in shapes:
                if name not in fields:  # a packed projection
                    parts = None if packed is None else packed.stored_parts(f"{path}.{name}", expert)
                    if parts is None:
                        return None
                    tensors |= {f"{name}.{part}": found for part, found in parts.items()}
                elif (order := orders[name]) is None:
                    return None
                else:
                    tensors[name] = [sources.of(f"{path}.{name}")[number].place(expert) for number in order]
                    stored = {checkpoint.tensors[found].dtype for found, _ in tensors[name]}
                    if {_STORED_TYPES.get(dtype) for dtype in stored} != {format.dtype}:
                        return None
            pieces: list[Piece] = []
            for name, found in tensors.items():
                start = fields[name].offset
                for tensor, number in found:
                    pieces.append(_piece(checkpoint.tensors[tensor], number, start))
                    start += pieces[-1].nbytes
                if start != fields[name].offset + fields[name].nbytes:
                    return None  # the reader explains what is wrong
            index[ExpertKey(layer, expert)] = tuple(pieces)
    return index


def reads_in_place(checkpoint: Checkpoint, model: Any, paths: list[str], spec: StoreSpec, format: ExpertFormat) -> bool:
    """Return whether experts on a CPU are read from the checkpoint's files, so that no expert file is written."""
    return is_worth_reading_in_place(spec) and find_shards(checkpoint, model, paths, format) is not None


def is_worth_reading_in_place(spec: StoreSpec) -> bool:
    """Return whether experts are large enough to do without an expert file, on a CPU."""
    return spec.nbytes >= _IN_PLACE_BYTES


def open_shards(
    checkpoint: Checkpoint, model: Any, paths: list[str], spec: StoreSpec, format: ExpertFormat, fill: FillBlob
) -> ShardedExperts | None:
    """Open the experts in place, or return None if they need a conversion.

    The first expert of every layer is compared with the one that `fill` converts, so that an index that is wrong for
    any reason is not used.
    """
    if (index := find_shards(checkpoint, model, paths, format)) is None:
        return None
    modules = [model.get_submodule(path) for path in paths]

    def check(key: ExpertKey, blob: Tensor) -> None:
        path, shapes = paths[key.layer], expert_shapes(modules[key.layer])
        fields = format.views(spec.layout.views(blob), shapes)
        if format.is_packed:
            check_packed(checkpoint, format, key, path, fields, shapes)
        for name in shapes.keys() & fields.keys():  # dense tensors, and biases
            require_finite(checkpoint, f"{path}.{name} (expert {key.expert})", fields[name])

    experts = ShardedExperts(checkpoint.directory, spec, index, check)
    try:
        _require_same_headers(checkpoint, {piece.file for pieces in index.values() for piece in pieces})
        for layer in range(len(paths)):
            key = ExpertKey(layer, 0)
            blobs = [torch.zeros(spec.layout.nbytes, dtype=torch.uint8) for _ in range(2)]
            fill(key, spec.layout.views(blobs[0]))
            experts.read(key, memoryview(blobs[1].numpy()))  # type: ignore[arg-type]
            if not torch.equal(*blobs):
                experts.close()
                return None
    except BaseException:
        experts.close()
        raise
    return experts


def _require_same_headers(checkpoint: Checkpoint, files: set[str]) -> None:
    """Raise CheckpointError if a file is not the one any more that the checkpoint was found with."""
    for file in files:
        try:
            found = read_header(checkpoint.directory, file)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{checkpoint.directory / file} cannot be read ({reason(error)}); check the file and its permissions"
            ) from error
        known = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.file == file}
        if _places(known) != _places(found):
            raise CheckpointError(f"{checkpoint.directory / file} was replaced by another file meanwhile; start again")


def _places(tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[object, ...]]:
    return {name: (one.dtype, one.shape, one.offset, one.nbytes) for name, one in tensors.items()}


def _order(checkpoint: Checkpoint, sources: ExpertSources, target: str) -> list[int] | None:
    """Return the order in which a parameter's sources are joined; None if its rule does anything else."""
    found = sources.of(target)
    if [source.pattern for source in found] == [None]:
        return [0]
    probes: dict[str | None, Tensor] = {}
    for number, source in enumerate(found):
        name, _ = source.place(0)
        dims = len(checkpoint.tensors[name].shape) - source.fused
        shape = (*([1] * source.fused), *_PROBE[:dims])
        probes[source.pattern] = torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1000 * number
    try:
        joined = sources.convert(target, dict(probes)).flatten()
    except (ValueError, RuntimeError, LookupError, AttributeError):
        return None
    order = [int(value) // 1000 for value in joined.tolist()]
    order = list(dict.fromkeys(order))
    expected = [probes[found[number].pattern].flatten() for number in order]
    return order if sorted(order) == [*range(len(found))] and torch.equal(joined, torch.cat(expected)) else None


def _piece(stored: StoredTensor, expert: int | None, start: int) -> Piece:
    """Return the piece that a tensor is, or one expert's slice of it."""
    if expert is None:
        return Piece(stored.file, stored.offset, stored.nbytes, start)
    nbytes = stored.nbytes // stored.shape[0]
    return Piece(stored.file, stored.offset + expert * nbytes, nbytes, start)
