"""The trace file: what real generations routed, predicted and took, in one compact file.

A trace is an `.npz` of plain arrays (no pickle) whose entry `header` is JSON text. Three
levels of records refer to each other by counts: steps have chunks (of the draft's passes) and forwards (of the target);
chunks and forwards have rows. docs/traces.md describes every field.
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

from spmoe.errors import UsageError
from spmoe.files import atomic_write

FORMAT = "spmoe trace"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """The target and the draft, as far as a replay must know them."""

    experts: tuple[int, ...]  # by MoE layer
    top_k: int
    expert_bytes: int
    draft_layers: int
    draft_tokens: int  # K
    depth: int  # copies that kept the transfer busy
    chunk_bytes: int | None  # pieces in which prefetch requests moved; None: whole
    window: int  # such pieces that a demand waits for
    slots: int
    link_bytes_per_second: float

    @property
    def layers(self) -> int:
        """MoE layers."""
        return len(self.experts)

    def problems(self) -> list[str]:
        """What cannot be true of any model and machine."""
        least = {
            "top_k": 1,
            "expert_bytes": 1,
            "draft_layers": 0,
            "draft_tokens": 0,
            "depth": 1,
            "window": 1,
            "slots": 1,
        }
        whole: dict[str, tuple[object, int]] = {
            f"experts of layer {n}": (count, 1) for n, count in enumerate(self.experts)
        }
        whole |= {name: (getattr(self, name), bound) for name, bound in least.items()}
        if self.chunk_bytes is not None:
            whole["chunk_bytes"] = (self.chunk_bytes, 1)
        found = [f"{name} is {value!r}" for name, (value, bound) in whole.items() if not _is_whole(value, bound)]
        link = self.link_bytes_per_second
        if not isinstance(link, (int, float)) or not 0 <= link < math.inf:
            found.append(f"link_bytes_per_second is {link!r}")
        return found if self.experts else ["no layer has experts"]


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Trace:
    """Arrays, each checked against the others when it is made. `-1` stands for no expert."""

    shape: Shape
    about: dict[str, Any]  # model, draft, settings, versions, profile, and the recorded run's own totals
    # by step
    step_request: np.ndarray  # int32 [steps]
    step_drafted: np.ndarray  # int16
    step_accepted: np.ndarray  # int16
    step_slabs: np.ndarray  # int16
    step_forwards: np.ndarray  # int16
    step_rest: np.ndarray  # float32, seconds outside of chunks and layers
    # by chunk: layers whose experts the draft foretold together
    slab_pass: np.ndarray  # int16, which pass of its step
    slab_layers: np.ndarray  # int16 [chunks, 2], from and until
    slab_seconds: np.ndarray  # float32, since the chunk before it
    slab_rows: np.ndarray  # int32
    # by foretold row and layer: all rows of chunk 0, layer after layer, then those of chunk 1
    foretold: np.ndarray  # int16 [.., top_k]
    foretold_score: np.ndarray  # float16 [.., top_k]
    # by forward
    forward_rows: np.ndarray  # int32 [forwards]
    forward_front: np.ndarray  # float32 [forwards, layers], seconds before the experts
    forward_experts: np.ndarray  # float32 [forwards, layers], seconds of the experts, waiting not included
    # by row
    chosen: np.ndarray  # int16 [rows, layers, top_k]
    weight: np.ndarray  # float16 [rows, layers, top_k]
    ahead: np.ndarray  # int16 [depth, rows, layers, top_k], as the target's own state foretold 1, 2, .. layers before
    ahead_score: np.ndarray  # float16 [depth, rows, layers, top_k]

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise UsageError(f"the trace contradicts itself ({problem}); record it anew")

    def __len__(self) -> int:
        return len(self.step_request)

    @property
    def verified(self) -> int:
        """Steps that had a draft."""
        return int((self.step_drafted > 0).sum())

    def _problems(self) -> list[str]:
        if found := [*self.shape.problems(), *self._wrong_kinds()]:
            return found
        shape = self.shape
        layers, top_k = shape.layers, shape.top_k
        steps, chunks, forwards = len(self.step_request), len(self.slab_pass), len(self.forward_rows)
        foretold = int((self.slab_rows * (self.slab_layers[:, 1] - self.slab_layers[:, 0])).sum()) if chunks else 0
        rows = int(self.forward_rows.sum())
        wanted = {
            "step_request": (steps,), "step_drafted": (steps,), "step_accepted": (steps,), "step_slabs": (steps,),
            "step_forwards": (steps,), "step_rest": (steps,), "slab_pass": (chunks,), "slab_layers": (chunks, 2),
            "slab_seconds": (chunks,), "slab_rows": (chunks,), "foretold": (foretold, top_k),
            "foretold_score": (foretold, top_k), "forward_rows": (forwards,), "forward_front": (forwards, layers),
            "forward_experts": (forwards, layers), "chosen": (rows, layers, top_k), "weight": (rows, layers, top_k),
            "ahead": (len(self.ahead), rows, layers, top_k), "ahead_score": (len(self.ahead), rows, layers, top_k),
        }  # fmt: skip
        for name, expected in wanted.items():
            if getattr(self, name).shape != expected:
                found.append(f"{name} is {getattr(self, name).shape}, not {expected}")
        if self.step_slabs.sum() != chunks or self.step_forwards.sum() != forwards:
            found.append("steps do not add up to their chunks and forwards")
        counts = ("step_slabs", "step_forwards", "slab_pass", "slab_rows", "forward_rows")
        found += [f"{name} is below 0" for name in counts if (getattr(self, name) < 0).any()]
        low, high = self.slab_layers.T if chunks else np.zeros((2, 0))
        if not ((low >= 0) & (low < high) & (high <= layers)).all():
            found.append("slab_layers names layers that the model does not have")
        drafted, accepted = self.step_drafted, self.step_accepted
        if not ((accepted >= 0) & (accepted <= drafted) & (drafted <= shape.draft_tokens)).all():
            found.append("more is accepted than drafted, or drafted than can be")
        for name in ("chosen", "ahead", "foretold"):
            values = getattr(self, name)
            if values.size and not (values.min() >= -1 and values.max() < max(shape.experts)):
                found.append(f"{name} names experts that the model does not have")
        for name in ("step_rest", "slab_seconds", "forward_front", "forward_experts"):
            values = getattr(self, name)
            if values.size and not (np.isfinite(values).all() and values.min() >= 0):
                found.append(f"{name} holds times that are none")
        return found

    def _wrong_kinds(self) -> list[str]:
        """Arrays that are no arrays of numbers, or of another kind of number or dimension."""
        found = []
        for name in _ARRAYS:
            values, kind, dimensions = getattr(self, name), "f" if name in _REAL else "i", _DIMENSIONS.get(name, 1)
            if values.dtype.kind != kind or values.ndim != dimensions:
                found.append(f"{name} is {values.dtype} with {values.ndim} dimensions")
        return found

    def save(self, path: Path) -> None:
        """Write the file; it appears under its name when it is whole."""
        header = {"format": FORMAT, "version": VERSION, "shape": asdict(self.shape), "about": self.about}
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        try:
            with atomic_write(path) as place, place.open("wb") as file:
                np.savez_compressed(file, header=np.array(json.dumps(header)), **arrays)
        except OSError as error:
            raise UsageError(f"cannot write {path} ({error.strerror}); choose another file") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote; anything else is refused."""
        try:
            with path.open("rb") as raw:
                whole = zipfile.is_zipfile(raw)
            if not whole:
                raise UsageError(f"{path} is not a whole trace; record one with `spmoe trace record`")
            with np.load(path, allow_pickle=False) as file:
                if "header" not in file.files:
                    raise UsageError(f"{path} is not a trace; record one with `spmoe trace record`")
                header = _header(path, file["header"])
                missing = [name for name in _ARRAYS if name not in file.files]
                if missing:
                    raise UsageError(f"{path} lacks {', '.join(missing)}; record it anew")
                arrays = {name: file[name] for name in _ARRAYS}
        except OSError as error:
            raise UsageError(f"cannot read {path} ({error.strerror or error}); check the path") from error
        except (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
            raise UsageError(f"{path} is not a whole trace ({error}); record it anew") from error
        return cls(_shape(path, header), header["about"], **arrays)


_ARRAYS = [f.name for f in fields(Trace) if f.name not in ("shape", "about")]
_REAL = ("step_rest", "slab_seconds", "foretold_score", "forward_front", "forward_experts", "weight", "ahead_score")
_DIMENSIONS = {"slab_layers": 2, "foretold": 2, "foretold_score": 2, "forward_front": 2, "forward_experts": 2}
_DIMENSIONS |= {"chosen": 3, "weight": 3, "ahead": 4, "ahead_score": 4}  # of those with more than one


def _header(path: Path, text: np.ndarray) -> dict[str, Any]:
    try:
        header = json.loads(str(text))
        kind, version = header["format"], header["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is not a trace; record one with `spmoe trace record`") from error
    if kind != FORMAT:
        raise UsageError(f"{path} is not a trace; record one with `spmoe trace record`")
    if version != VERSION:
        raise UsageError(f"{path} is a trace of version {version}, not {VERSION}; record it anew")
    return header if isinstance(header.get("about"), dict) else {**header, "about": {}}


def _shape(path: Path, header: dict[str, Any]) -> Shape:
    values = header.get("shape")
    names = {f.name for f in fields(Shape)}
    if not isinstance(values, dict) or set(values) != names or not isinstance(values["experts"], list):
        raise UsageError(f"the header of {path} does not say what the model is like; record it anew")
    return Shape(**{**values, "experts": tuple(values["experts"])})
