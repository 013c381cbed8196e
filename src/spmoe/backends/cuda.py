"""The CUDA backend: experts in grouped kernels that read slots in place; large ones of many rows in plain products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spmoe.backends.base import MOST_ROWS, ExpertsForward, gate_activation, kernel_name, kernel_rows, routed_experts
from spmoe.backends.cpu import CpuBackend
from spmoe.backends.cuda_memory import DeviceSlots, HostStore
from spmoe.backends.cuda_runtime import CopyRange, CudaRuntime
from spmoe.backends.devices import pinned_zeros
from spmoe.backends.graphs import GraphRecorder, Phase
from spmoe.backends.kernels.experts import ExpertLayout, ExpertScratch, ScratchBuffer, reduce_experts, run_expert_batch
from spmoe.backends.kernels.inputs import take_batch
from spmoe.experts.batches import ExpertBatch, PinnedLayer
from spmoe.experts.source import ExpertSource
from spmoe.experts.transfer import Event
from spmoe.types import ExpertKey

_RING = 4096  # batches that may be on their way to the device; a step has fewer, and ends when all have run


class CudaCopyStream:
    """A stream for copies beside the stream that computes."""

    def __init__(self, driver: CudaRuntime, device: torch.device) -> None:
        self._driver = driver
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._compute = torch.cuda.current_stream(device)
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def copy(self, pieces: Sequence[CopyRange]) -> Event:
        self._driver.copy(pieces, self._stream)
        end = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        end.record(self._stream)
        return end

    def wait_for(self, event: Event) -> None:
        self._stream.wait_event(event)  # type: ignore[arg-type]

    def bind_compute_stream(self) -> None:
        self._compute = torch.cuda.current_stream(self._device)

    def record_compute_event(self) -> Event:
        point = torch.cuda.Event()
        point.record(self._compute)
        return point

    def compute_wait_event(self, event: Event) -> None:
        stream = torch.cuda.current_stream(self._device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(event)  # type: ignore[arg-type]
        after.record(stream)
        self._waits.append((before, after))

    def stalled_seconds(self) -> float:
        count = len(self._waits)
        while count and not self._waits[count - 1][1].query():
            count -= 1
        over, self._waits = self._waits[:count], self._waits[count:]  # they end in order: all before one that is over
        return float(sum(before.elapsed_time(after) for before, after in over)) / 1000

    def drain(self) -> None:
        self._stream.synchronize()


class CudaBlobAddresses:
    """Blobs in the host store, slots on the device."""

    def __init__(self, store: HostStore, slots: DeviceSlots) -> None:
        self.nbytes = store.spec.layout.nbytes
        self._store = store
        self._slots = slots

    def source(self, key: ExpertKey) -> int:
        return self._store.address(key)

    def slot(self, slot: int) -> int:
        return self._slots.address(slot)


class CudaBackend:
    """Experts on one CUDA device."""

    def __init__(self, slots: DeviceSlots, recorder: GraphRecorder) -> None:
        self.slots = slots
        self.recorder = recorder
        self.all_resident = False
        self.plain = CpuBackend()
        self.dtype: torch.dtype = getattr(torch, slots.layout.dtype)
        self.arena = slots.arena.view(self.dtype)  # [slots, blob elements]
        self.batch = torch.zeros_like(slots.table[0])  # [experts], the slots of the batch that runs
        self._cursor = torch.zeros(1, dtype=torch.int64, device=slots.arena.device)
        self._ring = pinned_zeros(_RING, len(self.batch), dtype=torch.int32)
        self._places = self._ring.numpy()
        self._posted = 0
        self.put_off: tuple[int, list[Callable[[], None]]] = (-1, [])  # a layer, and what it had noted
        self._scratches: dict[tuple[int, int], ScratchBuffer] = {}  # by top-k and part
        self._chosen: dict[tuple[int, int, int], Tensor] = {}

    def port(self, layer: int, source: ExpertSource) -> ExpertsForward:
        return CudaExperts(layer, source, self)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.slots.arena.device)

    def post(self, slots: np.ndarray | int = -1) -> None:
        """Say where the experts of the next batch to run are; -1 for those that are not in it."""  # [experts]
        self._places[self._posted % _RING] = slots
        self._posted += 1

    def post_batch(self, batch: ExpertBatch) -> None:
        """The same of a batch."""
        place = self._places[self._posted % _RING]
        place.fill(-1)
        place[list(batch.experts)] = batch.slots
        self._posted += 1

    def take_batch(self) -> None:
        """On the device: the batch posted next is the one that runs."""
        take_batch(self._ring, self._cursor, self.batch)

    def stay_resident(self, slots: Mapping[ExpertKey, int]) -> None:
        """Every expert is in a slot for good: the device is told once, and the host need not know what is chosen."""
        for key, slot in slots.items():
            self.slots.table[key] = slot
        self.all_resident = True

    def scratch(self, rows: int, top_k: int, expert_layout: ExpertLayout, part: int = 0) -> ExpertScratch:
        """Places for what experts compute of a part of the rows. Layers run one after the other and share them."""
        if (top_k, part) not in self._scratches:
            self._scratches[top_k, part] = ScratchBuffer(top_k, expert_layout, self.dtype, self.slots.arena.device)
        return self._scratches[top_k, part].scratch(rows)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around batches: whatever goes wrong inside, what is posted next is what the device takes next."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # of a device that is broken
                self._posted = int(self._cursor)  # waits for what was submitted
            raise

    def chosen(self, layer: int, rows: int, top_k: int) -> Tensor:
        """Where the host reads which experts a layer's router chose."""  # [rows, top_k] int64, pinned
        key = (layer, rows, top_k)
        if key not in self._chosen:
            self._chosen[key] = pinned_zeros(rows, top_k)
        return self._chosen[key]

    def expert_layout(self, experts: Any) -> ExpertLayout | None:
        """Where the grouped kernels find an expert's weights in a blob; None where they cannot run such experts."""
        fields = {field.name: field for field in self.slots.layout.fields}
        if fields.keys() != {"gate_up_proj", "down_proj"} or gate_activation(experts) is None:
            return None
        gate_up, down, size = fields["gate_up_proj"], fields["down_proj"], self.dtype.itemsize
        return ExpertLayout(down.shape[0], down.shape[1], gate_up.offset // size, down.offset // size)


class CudaExperts:
    """One layer's experts. While a forward is recorded, the host's part of the work goes between two graphs."""

    def __init__(self, layer: int, source: ExpertSource, backend: CudaBackend) -> None:
        self._layer = layer
        self._source = source
        self._backend = backend
        self._table = backend.slots.table[layer]  # [experts]
        self._expert_layout: ExpertLayout | None = None
        self._looked = False

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if not self._looked:
            self._expert_layout, self._looked = self._backend.expert_layout(experts), True
        expert_layout, (rows, top_k) = self._expert_layout, index.shape
        backend, recorder = self._backend, self._backend.recorder
        if expert_layout is None or rows > (
            kernel_rows(backend.slots.layout.nbytes) if recorder.phase is Phase.EAGER else MOST_ROWS
        ):
            return self._run_plain(experts, hidden, index, weights)
        parts = [slice(start, min(start + MOST_ROWS, rows)) for start in range(0, rows, MOST_ROWS)]
        scratches = [backend.scratch(p.stop - p.start, top_k, expert_layout, at) for at, p in enumerate(parts)]
        activation, arena, out = str(kernel_name(experts.act_fn)), backend.arena, hidden.new_empty(hidden.shape)

        def run(table: Tensor) -> None:
            for part, scratch in zip(parts, scratches, strict=True):
                run_expert_batch(
                    hidden[part], index[part], weights[part], table, arena, expert_layout, activation, scratch
                )

        def run_next_batch() -> None:
            backend.take_batch()
            run(backend.batch)

        if backend.all_resident:
            run(self._table)
        elif recorder.phase is Phase.EAGER:
            needed, shares = self._wait_for_choice(index)
            with backend.in_step():
                self._run_batches(run_next_batch, needed, shares=shares)
        else:
            if recorder.phase is Phase.WARMUP:
                with backend.in_step():
                    backend.post()  # no expert is in this batch; the kernels are compiled
                    run_next_batch()
            chosen = backend.chosen(self._layer, rows, top_k)
            chosen.copy_(index, non_blocking=True)
            here, known = chosen.view(-1).numpy(), recorder.new_event()
            recorder.split_around(run_next_batch, lambda submit, notes: self._run_ahead(submit, here, known, notes))
        for part, scratch in zip(parts, scratches, strict=True):
            reduce_experts(scratch, out[part])
        return out

    def _wait_for_choice(self, index: Tensor) -> tuple[list[int], list[float]]:
        """The experts that rows chose, and which share of them did; copies that are under way go on meanwhile."""
        if len(self._source.loads):
            known = self._backend.recorder.new_event()
            known.record()
            self._source.transfer.wait_and_pump(known)
        return routed_experts(index)

    def _run_plain(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Experts that the kernels do not know, or many rows: one product after the other, led by the host."""

        def run(notes: Sequence[Callable[[], None]] = ()) -> Tensor:
            needed, shares = self._wait_for_choice(index)
            for note in notes:
                note()
            batches = self._source.use(self._layer, needed, shares=shares)
            return self._backend.plain.run_experts(experts, hidden, index, weights, batches)

        recorder = self._backend.recorder
        if recorder.phase is Phase.EAGER:
            return run()
        out, notes = torch.zeros_like(hidden), recorder.take_notes()

        def between() -> None:
            with torch.inference_mode():  # which recording was in, and replaying is not
                out.copy_(run(notes))

        recorder.split(between)
        return out

    def _run_ahead(
        self, run: Callable[[], None], chosen: np.ndarray, known: Any, notes: list[Callable[[], None]]
    ) -> None:
        """Give the device what is READY before the host knows what is needed, which it reads meanwhile."""
        known.record()
        pinned = self._source.open(self._layer)
        try:
            with self._backend.in_step():
                self._run_pinned(run, chosen, known, notes, pinned)
        except BaseException:
            self._source.shut(pinned)
            raise

    def _run_pinned(
        self,
        run: Callable[[], None],
        chosen: np.ndarray,
        known: Any,
        notes: list[Callable[[], None]],
        pinned: PinnedLayer,
    ) -> None:
        if (pinned.slots >= 0).any():
            self._backend.post(pinned.slots)
            run()
        self._catch_up(known)  # while the device is busy
        self._source.transfer.wait_and_pump(known)
        needed = sorted(set(chosen.tolist()))
        if self._source.use_pinned(pinned, needed):
            self._backend.put_off = (self._layer, notes)
        else:
            self._run_batches(run, needed, pinned, notes)

    def _catch_up(self, known: Any) -> None:
        """What the layer before has put off: its hits, what it foretells, and prefetch requests that are to be submitted.

        Those only until the router's choice is known: the device has a batch left then, and must not run dry.
        """
        source, patient = self._source, self._source.patient
        source.patient = True
        try:
            source.book()
            (layer, notes), self._backend.put_off = self._backend.put_off, (-1, [])
            if layer == self._layer - 1:  # else that forward was given up, or is over
                for note in notes:
                    note()
        finally:
            source.patient = patient
        source.see_to_wishes(known)

    def _run_batches(
        self,
        run: Callable[[], None],
        needed: list[int],
        pinned: PinnedLayer | None = None,
        notes: Sequence[Callable[[], None]] = (),
        shares: Sequence[float] = (),
    ) -> None:
        """Run the experts that the router has chosen as they come."""
        batches = self._source.use(self._layer, needed, pinned, shares)
        batch = next(batches, None)  # what is missing has been demanded by now
        for note in notes:
            note()
        while batch is not None:
            self._backend.post_batch(batch)
            run()
            batch = next(batches, None)
