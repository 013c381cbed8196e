"""Experts on the CPU beside a CUDA device: hidden states to the host, experts from their blobs, results back.

A layer's hidden states and routing weights are copied to pinned memory once. The thread of the CPU path waits for that
copy's event, computes an expert with the operators of its format, and writes its weighted rows into pinned memory. A
kernel on the compute stream reads them there: a copy would queue behind the experts that are being moved. The memory
is used again only after the event behind that kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spmoe.backends.cpu import CpuBackend, expert_shapes, run_projections
from spmoe.backends.cpu_copies import CopyLayout, CpuCopies
from spmoe.backends.devices import pinned_zeros
from spmoe.experts.cpu_path import ComputedRows, CpuThread, CpuWork
from spmoe.experts.memory_store import MemoryStore
from spmoe.experts.transfer import DeviceEvent
from spmoe.formats.expert import WHOLE, ExpertFormat
from spmoe.system.host import processor
from spmoe.types import ExpertKey

_RESERVED_CORES = 2  # for the thread that launches kernels, and for everything else


class RowStream(Protocol):
    """Compute stream of the device, as far as rows pass through host memory."""

    def copy_to_host(self, target: Tensor, source: Tensor) -> None:
        """Launch a copy into pinned memory."""
        ...

    def record_event(self) -> DeviceEvent:
        """Return an event behind everything launched so far."""
        ...

    def place_results(self, values: Tensor, pairs: Tensor, first: int, sums: Tensor) -> None:
        """Launch a kernel that reads results in pinned memory and writes them to the rows of their pairs.

        A result of pair p goes to row p - first, if there is such a row.
        """
        # values: [results, hidden] float32, pairs: [results] int64, sums: [splits, pairs, hidden] float32
        ...


class SentRows(NamedTuple):
    """A layer's rows in pinned memory, once the copies that were launched have ended."""

    hidden: Tensor  # [rows, hidden]
    weights: Tensor  # [rows, top_k]


SendRows = Callable[[], tuple[SentRows, DeviceEvent]]


class CpuExperts:
    """Memory and arithmetic of experts on the CPU. Layers run one after the other and share it.

    `copy_budget`: bytes of host memory for copies of packed experts; 0: they are dequantized for every call.
    """

    def __init__(self, store: MemoryStore, format: ExpertFormat, stream: RowStream, copy_budget: int = 0) -> None:
        self.stream = stream
        self.copies = CpuCopies(format, copy_budget)
        self._store = store
        self._format = format
        self._copy_layouts: dict[int, CopyLayout] = {}  # by layer
        self._arithmetic = CpuBackend(format)
        self._sent: dict[tuple[int, int, int, torch.dtype, torch.dtype], SentRows] = {}
        self._captured: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # memory for results of captured layers
        self._values = torch.empty(0, 0)
        self._pairs = torch.empty(0, dtype=torch.int64)
        self._placed: DeviceEvent | None = None  # behind the kernels that read `_values` and `_pairs` last

    def send(self, hidden: Tensor, weights: Tensor) -> SentRows:
        """Launch the copies of a layer's rows to the host. The memory is fixed for each number of rows."""
        (rows, width), top_k = hidden.shape, weights.shape[1]
        size = 1 << max(0, rows - 1).bit_length()  # few sizes, whatever the lengths of prompts
        key = (size, width, top_k, hidden.dtype, weights.dtype)
        if key not in self._sent:
            self._sent[key] = SentRows(
                pinned_zeros(size, width, dtype=hidden.dtype), pinned_zeros(size, top_k, dtype=weights.dtype)
            )
        sent = SentRows(*(memory[:rows] for memory in self._sent[key]))
        self.stream.copy_to_host(sent.hidden, hidden)
        self.stream.copy_to_host(sent.weights, weights)
        return sent

    def send_now(self, hidden: Tensor, weights: Tensor) -> tuple[SentRows, DeviceEvent]:
        """Launch the copies of a layer's rows to the host; return the event behind them, too."""
        return self.send(hidden, weights), self.stream.record_event()

    def take_results(self, count: int, width: int) -> tuple[Tensor, Tensor]:
        """Return pinned memory for results and their pairs, once kernels have read the results before."""
        if self._placed is not None:
            self._placed.synchronize()
            self._placed = None
        if self._values.shape[1] != width or len(self._values) < count:
            size = 1 << max(0, count - 1).bit_length()
            self._values = pinned_zeros(size, width, dtype=torch.float32)
            self._pairs = pinned_zeros(size)
        return self._values[:count], self._pairs[:count]

    def captured_results(self, count: int, width: int) -> tuple[Tensor, Tensor]:
        """Return pinned memory for results and their pairs that a captured kernel reads, in every layer the same."""
        if (count, width) not in self._captured:
            self._captured[count, width] = pinned_zeros(count, width, dtype=torch.float32), pinned_zeros(count)
        return self._captured[count, width]

    def place(self, pairs: Tensor, values: Tensor, sums: Sequence[tuple[int, Tensor]]) -> None:
        """Launch kernels that write results into the sums of one or several passes, each with its first pair."""
        for first, rows in sums:
            self.stream.place_results(values, pairs, first, rows)
        self._placed = self.stream.record_event()

    def needs_copy(self, experts: Any, key: ExpertKey, rows: int) -> bool:
        """Return whether `copy` makes a copy of an expert that so many rows are routed to."""
        layout = self._copy_layout(experts, key.layer)
        return key not in self.copies and layout.serves(rows) and self.copies.can_hold(layout)

    def has_place_for_copy(self, experts: Any, layer: int) -> bool:
        """Return whether a copy of one more expert of a layer can be kept without dropping another."""
        return self.copies.has_place(self._copy_layout(experts, layer))

    def copy(self, experts: Any, key: ExpertKey, rows: int) -> float:
        """Make a copy of an expert if it needs one; return the seconds that it took, 0 if it needs none."""
        if not self.needs_copy(experts, key, rows):
            return 0.0
        started = time.perf_counter()
        self.copies.make(key, self._views(experts, key), self._copy_layout(experts, key.layer))
        return time.perf_counter() - started

    def compute(self, experts: Any, key: ExpertKey, x: Tensor) -> Tensor:
        """Return one expert's feed-forward, computed from its copy or blob."""  # x: [rows, hidden] -> [rows, hidden]
        views = self._views(experts, key)
        if key in self.copies and self._copy_layout(experts, key.layer).serves(len(x)):
            return run_projections(experts, views, x, self.copies.get(key).project)
        return self._arithmetic.compute_expert(experts, views, x)

    def _views(self, experts: Any, key: ExpertKey) -> Mapping[str, Tensor]:
        views = self._store.spec.layout.views(self._store.blob(key))
        return self._format.views(views, expert_shapes(experts)) if WHOLE in views else views

    def _copy_layout(self, experts: Any, layer: int) -> CopyLayout:
        if layer not in self._copy_layouts:
            self._copy_layouts[layer] = CopyLayout.of(self._format, expert_shapes(experts))
        return self._copy_layouts[layer]


class CpuRows:
    """One layer's routed experts for the CPU path; implements `CpuLayer`.

    `index`: routed experts, on the host. `send` is called when the CPU gets an expert; it returns the rows and the
    event behind their copy, which a captured graph has launched already. `results`: memory for results and their
    pairs that a captured kernel reads; None: memory that `place` reads.
    """

    def __init__(
        self,
        cpu: CpuExperts,
        layer: int,
        experts: Any,
        index: np.ndarray,
        send: SendRows,
        results: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        # index: [rows, top_k]
        self._cpu = cpu
        self._layer = layer
        self._experts = experts
        self._index = index
        self._send = send
        self._results = results
        self._sent: tuple[SentRows, DeviceEvent] | None = None
        self._parts: dict[int, tuple[slice, Tensor, Tensor]] = {}  # by expert: its results, rows and top-k positions
        self._values = self._pairs = torch.empty(0)
        numbers, counts = np.unique(index, return_counts=True)
        self._rows = dict(zip(numbers.tolist(), counts.tolist(), strict=True))

    @property
    def rows(self) -> Mapping[int, int]:
        return self._rows

    def needs_copy(self, expert: int) -> bool:
        return self._cpu.needs_copy(self._experts, ExpertKey(self._layer, expert), self._rows[expert])

    @property
    def has_place_for_copy(self) -> bool:
        return self._cpu.has_place_for_copy(self._experts, self._layer)

    def place(self, values: Tensor, sums: Sequence[tuple[int, Tensor]]) -> None:
        """Launch kernels that write the results into the sums of one or several passes, each with its first pair."""
        self._cpu.place(self._pairs, values, sums)

    @torch.inference_mode()  # on during eager forwards, off during replay
    def begin(self, experts: Sequence[int]) -> None:
        self._sent = self._send()
        count, width = sum(self._rows[e] for e in experts), self._sent[0].hidden.shape[1]
        values, pairs = self._results or self._cpu.take_results(count, width)
        self._values, self._pairs = values[:count], pairs[:count]
        start, top_k = 0, self._index.shape[1]
        for expert in experts:
            # rows in eager's order, should a product depend on it
            position, row = (torch.from_numpy(found) for found in np.nonzero((self._index == expert).T))
            part = slice(start, start + len(row))
            self._parts[expert] = (part, row, position)
            self._pairs[part] = row * top_k + position
            start = part.stop

    def work(self, expert: int) -> CpuWork:
        def compute() -> float:
            if self._sent is None:
                raise AssertionError("`begin` was not called")
            sent, known = self._sent
            known.synchronize()  # before anything of the rows is read
            part, row, position = self._parts[expert]
            key = ExpertKey(self._layer, expert)
            with torch.inference_mode():
                copy_seconds = self._cpu.copy(self._experts, key, len(row))
                out = self._cpu.compute(self._experts, key, sent.hidden[row])
                self._values[part] = out.float() * sent.weights[row, position, None].float()
            return copy_seconds

        return compute

    @torch.inference_mode()
    def results(self, experts: Sequence[int]) -> ComputedRows:
        parts = [self._parts[expert] for expert in experts]
        if len(parts) < len(self._parts):  # others have failed: close the gaps
            kept = torch.cat([torch.arange(part.start, part.stop) for part, _, _ in parts])
            self._values[: len(kept)] = self._values[kept]
            self._pairs[: len(kept)] = self._pairs[kept]
            self._values, self._pairs = self._values[: len(kept)], self._pairs[: len(kept)]
        rows, positions = (torch.cat([part[i] for part in parts]) for i in (1, 2))  # type: ignore[misc]
        return ComputedRows(rows, positions, self._values)


@dataclass(frozen=True)
class CapturedCpuLayer:
    """A layer whose rows a captured graph copies to the host, and whose results a captured kernel reads."""

    cpu: CpuExperts
    layer: int
    experts: Any
    top_k: int
    sent: SentRows
    results: tuple[Tensor, Tensor]  # memory for results and their pairs

    def __call__(self, routed: np.ndarray, known: DeviceEvent) -> CpuRows:
        """Return the layer's routed experts; the rows are on the host once `known` has passed."""  # routed: [pairs]
        index = routed.reshape(-1, self.top_k)
        return CpuRows(self.cpu, self.layer, self.experts, index, lambda: (self.sent, known), self.results)


def cpu_thread(threads: int | None) -> CpuThread:
    """Start the thread of the CPU path, whose operations use so many intra-op threads; None: of most cores."""
    count = threads or max(1, processor().usable_cores - _RESERVED_CORES)
    before = torch.get_num_threads()

    def prepare() -> None:
        torch.set_num_threads(count)
        torch.get_num_threads()  # PyTorch adopts the number for good when a thread first asks for it

    try:
        return CpuThread(prepare)
    finally:
        torch.set_num_threads(before)  # PyTorch gives the last number that was set to every new thread
