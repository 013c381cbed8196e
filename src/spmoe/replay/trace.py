"""The trace file: the routing, the predictions and the times of real generations, in one compact file.

A trace is an `.npz` of plain arrays (no pickle) whose entry `header` is JSON text. Records are on three levels, which
refer to each other by counts: a step has chunks (of draft passes) and forwards (of the target); chunks and forwards
have rows. docs/traces.md describes every field.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from spmoe.config import MAX_SPECULATIVE_TOKENS
from spmoe.errors import UsageError
from spmoe.files import atomic_write, decode_json

FORMAT = "spmoe trace"
VERSION = 2
_MAX_LAYERS, _MAX_EXPERTS = 4096, 2**15  # experts are numbered in 16 bits
_VERSION_1_NAMES = {  # arrays that were called differently in version 1
    "step_sequence": "step_request",
    "step_chunks": "step_slabs",
    "chunk_pass": "slab_pass",
    "chunk_layers": "slab_layers",
    "chunk_seconds": "slab_seconds",
    "chunk_rows": "slab_rows",
    "predicted": "foretold",
    "predicted_score": "foretold_score",
    "routed": "chosen",
    "routed_weight": "weight",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the target, the draft and the link, as far as a replay needs them."""

    experts: tuple[int, ...]  # by MoE layer
    top_k: int
    expert_bytes: int
    draft_layers: int
    draft_tokens: int  # K
    depth: int  # copies in flight that kept the transfer busy
    chunk_bytes: int | None  # size of the pieces in which prefetches were copied; None: whole experts
    window: int  # such pieces on the copy stream at once
    slots: int
    link_bytes_per_second: float  # 0: not measured

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.experts)

    def problems(self) -> list[str]:
        """List values that no model or machine can have."""
        bounds = {  # a replay makes tables and loops of these sizes
            "top_k": (1, _MAX_EXPERTS),
            "expert_bytes": (1, 2**40),
            "draft_layers": (0, _MAX_LAYERS),
            "draft_tokens": (0, MAX_SPECULATIVE_TOKENS),
            "depth": (1, 2**20),
            "window": (1, 2**20),
            "slots": (1, _MAX_LAYERS * _MAX_EXPERTS),
        }
        integers: dict[str, tuple[object, tuple[int, int]]] = {
            f"experts of layer {n}": (count, (1, _MAX_EXPERTS)) for n, count in enumerate(self.experts)
        }
        integers |= {name: (getattr(self, name), bound) for name, bound in bounds.items()}
        if self.chunk_bytes is not None:
            integers["chunk_bytes"] = (self.chunk_bytes, (1, 2**40))
        integers["number of layers"] = (len(self.experts), (1, _MAX_LAYERS))
        found = [f"{name} is {value!r}" for name, (value, bound) in integers.items() if not _is_integer(value, *bound)]
        link = self.link_bytes_per_second
        if not isinstance(link, (int, float)) or not 0 <= link < math.inf:
            found.append(f"link_bytes_per_second is {link!r}")
        return found if self.experts else ["no layer has experts"]


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


@dataclass(frozen=True)
class Trace:
    """Arrays of a trace, checked against each other on construction. `-1` stands for no expert."""

    shape: Shape
    about: dict[str, Any]  # model, draft, options, versions, profile, and the totals of the recorded run
    # by step
    step_sequence: np.ndarray  # int32 [steps], the sequence id
    step_drafted: np.ndarray  # int16
    step_accepted: np.ndarray  # int16
    step_chunks: np.ndarray  # int16, number of chunks
    step_forwards: np.ndarray  # int16, number of forwards
    step_rest: np.ndarray  # float32, seconds outside of chunks and layers
    # by chunk: layers whose experts were predicted together from the draft's hidden states
    chunk_pass: np.ndarray  # int16, index of the draft pass in its step
    chunk_layers: np.ndarray  # int16 [chunks, 2], first layer and end
    chunk_seconds: np.ndarray  # float32, since the chunk before
    chunk_rows: np.ndarray  # int32
    # by predicted layer and row: all rows of chunk 0, layer after layer, then those of chunk 1
    predicted: np.ndarray  # int16 [.., top_k]
    predicted_score: np.ndarray  # float16 [.., top_k]
    # by forward
    forward_rows: np.ndarray  # int32 [forwards]
    forward_front: np.ndarray  # float32 [forwards, layers], seconds before the experts
    forward_experts: np.ndarray  # float32 [forwards, layers], seconds of the experts, stalls excluded
    # by row
    routed: np.ndarray  # int16 [rows, layers, top_k]
    routed_weight: np.ndarray  # float16 [rows, layers, top_k]
    ahead: np.ndarray  # int16 [distance, rows, layers, top_k], predicted for a layer by the one 1, 2, .. layers before
    ahead_score: np.ndarray  # float16 [distance, rows, layers, top_k]

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise UsageError(f"the trace contradicts itself ({problem}); record it again")

    def __len__(self) -> int:
        return len(self.step_sequence)

    @property
    def verified(self) -> int:
        """Number of steps that had a draft."""
        return int((self.step_drafted > 0).sum())

    def _problems(self) -> list[str]:
        if found := [*self.shape.problems(), *self._wrong_types()]:
            return found
        shape = self.shape
        layers, top_k = shape.layers, shape.top_k
        steps, chunks, forwards = len(self.step_sequence), len(self.chunk_pass), len(self.forward_rows)
        predicted = int((self.chunk_rows * (self.chunk_layers[:, 1] - self.chunk_layers[:, 0])).sum()) if chunks else 0
        rows = int(self.forward_rows.sum())
        shapes = {
            "step_sequence": (steps,), "step_drafted": (steps,), "step_accepted": (steps,), "step_chunks": (steps,),
            "step_forwards": (steps,), "step_rest": (steps,), "chunk_pass": (chunks,), "chunk_layers": (chunks, 2),
            "chunk_seconds": (chunks,), "chunk_rows": (chunks,), "predicted": (predicted, top_k),
            "predicted_score": (predicted, top_k), "forward_rows": (forwards,), "forward_front": (forwards, layers),
            "forward_experts": (forwards, layers), "routed": (rows, layers, top_k),
            "routed_weight": (rows, layers, top_k), "ahead": (len(self.ahead), rows, layers, top_k),
            "ahead_score": (len(self.ahead), rows, layers, top_k),
        }  # fmt: skip
        for name, expected in shapes.items():
            if getattr(self, name).shape != expected:
                found.append(f"{name} is {getattr(self, name).shape}, not {expected}")
        if self.step_chunks.sum() != chunks or self.step_forwards.sum() != forwards:
            found.append("steps do not add up to their chunks and forwards")
        counts = ("step_chunks", "step_forwards", "chunk_pass", "chunk_rows", "forward_rows")
        found += [f"{name} is below 0" for name in counts if (getattr(self, name) < 0).any()]
        low, high = self.chunk_layers.T if chunks else np.zeros((2, 0))
        if not ((low >= 0) & (low < high) & (high <= layers)).all():
            found.append("chunk_layers names layers that the model does not have")
        drafted, accepted = self.step_drafted, self.step_accepted
        if not ((accepted >= 0) & (accepted <= drafted) & (drafted <= shape.draft_tokens)).all():
            found.append("more tokens are accepted than drafted, or drafted than K")
        for name in ("routed", "ahead", "predicted"):
            values = getattr(self, name)
            if values.size and not (values.min() >= -1 and values.max() < max(shape.experts)):
                found.append(f"{name} names experts that the model does not have")
        for name in ("step_rest", "chunk_seconds", "forward_front", "forward_experts"):
            values = getattr(self, name)
            if values.size and not (np.isfinite(values).all() and values.min() >= 0):
                found.append(f"{name} holds values that are not durations")
        return found

    def _wrong_types(self) -> list[str]:
        """List arrays of another kind of number, or with another number of dimensions, than theirs."""
        found = []
        for name in _ARRAYS:
            values, kind, dimensions = getattr(self, name), "f" if name in _REAL else "i", _DIMENSIONS.get(name, 1)
            if values.dtype.kind != kind or values.ndim != dimensions:
                found.append(f"{name} is {values.dtype} with {values.ndim} dimensions")
        return found

    def save(self, path: Path) -> None:
        """Write the file; it appears under its name only when it is complete."""
        header = {"format": FORMAT, "version": VERSION, "shape": asdict(self.shape), "about": self.about}
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        try:
            with atomic_write(path) as place, place.open("wb") as file:
                np.savez_compressed(file, header=np.array(json.dumps(header)), **arrays)
        except OSError as error:
            raise UsageError(f"cannot write {path} ({error.strerror}); choose another file") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote; raise UsageError for any other file."""
        try:
            with path.open("rb") as raw:
                complete = zipfile.is_zipfile(raw)
            if not complete:
                raise UsageError(f"{path} is not a complete trace; record one with `spmoe trace record`")
            with np.load(path, allow_pickle=False) as file:
                if "header" not in file.files:
                    raise UsageError(f"{path} is not a trace; record one with `spmoe trace record`")
                header = _header(path, file["header"])
                stored = _VERSION_1_NAMES if header["version"] == 1 else {}
                missing = [name for name in _ARRAYS if stored.get(name, name) not in file.files]
                if missing:
                    raise UsageError(f"{path} lacks {', '.join(missing)}; record it again")
                arrays = {name: file[stored.get(name, name)] for name in _ARRAYS}
        except OSError as error:
            raise UsageError(f"cannot read {path} ({error.strerror or error}); check the path") from error
        except (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
            raise UsageError(f"{path} is not a complete trace ({error}); record it again") from error
        return cls(_shape(path, header), header["about"], **arrays)


_ARRAYS = [f.name for f in fields(Trace) if f.name not in ("shape", "about")]
_REAL = (
    "step_rest",
    "chunk_seconds",
    "predicted_score",
    "forward_front",
    "forward_experts",
    "routed_weight",
    "ahead_score",
)
_DIMENSIONS = {"chunk_layers": 2, "predicted": 2, "predicted_score": 2, "forward_front": 2, "forward_experts": 2}
_DIMENSIONS |= {"routed": 3, "routed_weight": 3, "ahead": 4, "ahead_score": 4}  # all others have one


def _header(path: Path, text: np.ndarray) -> dict[str, Any]:
    try:
        header = decode_json(str(text))
        kind, version = header["format"], header["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is not a trace; record one with `spmoe trace record`") from error
    if kind != FORMAT:
        raise UsageError(f"{path} is not a trace; record one with `spmoe trace record`")
    if version not in (1, VERSION):
        raise UsageError(f"{path} is a trace of version {version}, not {VERSION}; record it again")
    return header if isinstance(header.get("about"), dict) else {**header, "about": {}}


def _shape(path: Path, header: dict[str, Any]) -> Shape:
    values = header.get("shape")
    names = {f.name for f in fields(Shape)}
    if not isinstance(values, dict) or set(values) != names or not isinstance(values["experts"], list):
        raise UsageError(f"the header of {path} does not describe the model; record it again")
    return Shape(**{**values, "experts": tuple(values["experts"])})
