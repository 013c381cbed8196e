"""The CUDA backend: grouped kernels that read experts in their slots; plain products for large experts of many rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spmoe.backends.base import (
    INVARIANT_ROWS,
    MAX_KERNEL_ROWS,
    ExpertsForward,
    Gate,
    kernel_gate,
    kernel_row_limit,
    routed_experts,
    rows_by_sequence,
)
from spmoe.backends.cpu import CpuBackend, ExpertSum, expert_shapes
from spmoe.backends.cpu_experts import CapturedCpuLayer, CpuExperts, CpuRows
from spmoe.backends.cuda_memory import DeviceSlots, HostStore
from spmoe.backends.cuda_runtime import CopyRange, CudaRuntime
from spmoe.backends.devices import pinned_zeros
from spmoe.backends.graphs import GraphRecorder, HostWork, Phase
from spmoe.backends.kernels.experts import (
    ExpertScratch,
    ExpertShape,
    ScratchBuffer,
    SlotExperts,
    place_results,
    reduce_experts,
    run_expert_batch,
    slot_experts,
    slot_matrices,
)
from spmoe.backends.kernels.inputs import take_batch
from spmoe.backends.kernels.packed import SlotMatrix, dequantize_matrix
from spmoe.backends.residency import CudaResidency, follow_layer
from spmoe.experts.access import ExpertBatch
from spmoe.experts.cache import PinnedLayer
from spmoe.experts.experts import Experts
from spmoe.experts.transfer import DeviceEvent
from spmoe.formats.expert import ExpertFormat, Shapes
from spmoe.types import ExpertKey

_OVERLAP_BYTES = 32 * 2**20  # of an expert: resident ones of this size run while others arrive; else all at once
_TIMED_COPIES = 256  # whose times are kept until they are taken
_RING = 4096  # expert batches that may be posted and not taken; a step has fewer, and ends when all have run


Place = Callable[[CpuRows, Tensor], None]  # rows of the layer, and results of the CPU: write them into the sums


class CudaCopyStream:
    """A stream for copies beside the compute stream. `timed`: measure how long copies take."""

    def __init__(self, runtime: CudaRuntime, device: torch.device, *, timed: bool = False) -> None:
        self._runtime = runtime
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._compute = torch.cuda.current_stream(device)
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._timed = timed
        self._copies: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_TIMED_COPIES)

    def copy(self, ranges: Sequence[CopyRange]) -> DeviceEvent:
        start = torch.cuda.Event(enable_timing=True) if self._timed else None
        if start is not None:
            start.record(self._stream)
        self._runtime.copy(ranges, self._stream)
        end = torch.cuda.Event(blocking=True, enable_timing=self._timed)  # a thread that waits for it sleeps
        end.record(self._stream)
        if start is not None:
            self._copies.append((sum(copied.nbytes for copied in ranges), start, end))
        return end

    def signal(self, copied: CopyRange) -> None:
        self._runtime.copy([copied], self._stream)

    def wait_event(self, event: DeviceEvent) -> None:
        self._stream.wait_event(event)  # type: ignore[arg-type]

    def bind_compute_stream(self) -> None:
        self._compute = torch.cuda.current_stream(self._device)

    def record_compute_event(self) -> DeviceEvent:
        event = torch.cuda.Event()
        event.record(self._compute)
        return event

    def compute_wait_event(self, event: DeviceEvent) -> None:
        stream = torch.cuda.current_stream(self._device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(event)  # type: ignore[arg-type]
        after.record(stream)
        self._waits.append((before, after))

    def take_stall_seconds(self) -> float:
        count = len(self._waits)
        while count and not self._waits[count - 1][1].query():
            count -= 1
        over, self._waits = self._waits[:count], self._waits[count:]  # waits end in order
        return float(sum(before.elapsed_time(after) for before, after in over)) / 1000

    def take_copy_times(self) -> list[tuple[int, float]]:
        found = []
        while self._copies and self._copies[0][2].query():  # copies end in order
            nbytes, start, end = self._copies.popleft()
            found.append((nbytes, float(start.elapsed_time(end)) / 1000))
        return found

    def synchronize(self) -> None:
        self._stream.synchronize()


class CudaRowStream:
    """The compute stream, as the CPU path uses it."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder = recorder

    def copy_to_host(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record_event(self) -> DeviceEvent:
        event: Any = self._recorder.new_event()
        event.record()
        return event  # type: ignore[no-any-return]

    def place_results(self, values: Tensor, pairs: Tensor, first: int, sums: Tensor) -> None:
        place_results(values, pairs, first, sums)


class CudaBlobAddresses:
    """Addresses of blobs in the host store and of slots on the device."""

    def __init__(self, store: HostStore, slots: DeviceSlots) -> None:
        self.nbytes = store.spec.layout.nbytes
        self._store = store
        self._slots = slots

    def source(self, key: ExpertKey) -> int:
        return self._store.address(key)

    def slot(self, slot: int) -> int:
        return self._slots.address(slot)


class CudaBackend:
    """Experts on one CUDA device and, with `cpu`, on the CPU beside it."""

    def __init__(
        self,
        slots: DeviceSlots,
        recorder: GraphRecorder,
        format: ExpertFormat,
        cpu: CpuExperts | None = None,
        residency: CudaResidency | None = None,
    ) -> None:
        self.slots = slots
        self.cpu = cpu
        self.residency = residency  # None: the host decides in every layer which experts run
        self.recorder = recorder
        self.all_resident = False
        self.dtype: torch.dtype = getattr(torch, slots.layout.dtype)
        self.format = format
        self.plain = CpuBackend(self.format)
        self.dense = CpuBackend()  # for experts that were dequantized
        self._dense = torch.empty(0, dtype=self.dtype, device=slots.arena.device)  # one dequantized matrix
        self.batch_slots = torch.zeros_like(slots.table[0])  # [experts], slots of the expert batch that runs
        self._cursor = torch.zeros(1, dtype=torch.int64, device=slots.arena.device)  # expert batches taken
        self._ring = pinned_zeros(_RING, len(self.batch_slots), dtype=torch.int32)
        self._ring_rows = self._ring.numpy()
        self._posted = 0
        self._scratches: dict[tuple[int, ExpertShape, int], ScratchBuffer] = {}  # by top-k, sizes and pass
        self._routed: dict[tuple[int, int, int], Tensor] = {}

    def experts_forward(self, layer: int, experts: Experts) -> ExpertsForward:
        return CudaExperts(layer, experts, self)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.slots.arena.device)

    def post(self, slots: np.ndarray | int = -1) -> None:
        """Post the slots of the expert batch that runs next; -1 for experts that are not in it."""  # [experts]
        self._ring_rows[self._posted % _RING] = slots
        self._posted += 1

    def post_batch(self, batch: ExpertBatch) -> None:
        """Post an expert batch to run next."""
        row = self._ring_rows[self._posted % _RING]
        row.fill(-1)
        row[list(batch.experts)] = batch.slots
        self._posted += 1

    def take_batch(self) -> None:
        """Launch the kernel that makes the next posted batch the one that runs."""
        take_batch(self._ring, self._cursor, self.batch_slots)

    def keep_resident(self, slots: Mapping[ExpertKey, int]) -> None:
        """Give the device the slots of all experts, once: from now on the host need not know the routed experts."""
        for key, slot in slots.items():
            self.slots.table[key] = slot
        self.all_resident = True

    def scratch(self, rows: int, top_k: int, shape: ExpertShape, number: int = 0) -> ExpertScratch:
        """Return memory for one kernel pass over some rows. Layers run one after the other and share it."""
        key = (top_k, shape, number)
        if key not in self._scratches:
            self._scratches[key] = ScratchBuffer(top_k, shape, self.slots.arena.device)
        return self._scratches[key].scratch(rows)

    @contextmanager
    def resync_on_failure(self) -> Iterator[None]:
        """After a failure inside, drop posted batches that the device has not taken, so that both count alike again."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # of a device that is broken
                self._posted = int(self._cursor)  # waits for the device
            raise

    def routed_buffer(self, layer: int, rows: int, top_k: int) -> Tensor:
        """Return the pinned memory in which the host reads a layer's routed experts."""  # [rows, top_k] int64
        key = (layer, rows, top_k)
        if key not in self._routed:
            self._routed[key] = pinned_zeros(rows, top_k)
        return self._routed[key]

    def inspect(self, experts: nn.Module) -> LayerKernels:
        """Return how kernels run the experts of a layer."""
        shapes = expert_shapes(experts)
        matrices = slot_matrices(self.slots.arena, self.format, shapes)
        found, gate = slot_experts(matrices, shapes), kernel_gate(experts)
        # also for packed experts by the size of dense ones: both run in the same way, with the same bits
        limit = kernel_row_limit(self.dtype.itemsize * sum(math.prod(shape) for shape in shapes.values()))
        return LayerKernels(shapes, limit, matrices, None if found is None or gate is None else (found, gate))

    def dequantized(self, batches: Iterable[ExpertBatch], kernels: LayerKernels) -> Iterator[ExpertBatch]:
        """Yield experts one at a time, with weights that are dequantized when they are read."""
        for batch in batches:
            if batch.computed is not None:
                yield batch
                continue
            for expert, slot in zip(batch.experts, batch.slots, strict=True):
                yield ExpertBatch(batch.layer, (expert,), (slot,), (DequantizedWeights(self, slot, kernels),))

    def dense_matrix(self, outs: int, ins: int) -> Tensor:
        """Return memory for one dense matrix, the same for all: kernels run in the order in which they are launched."""
        if self._dense.numel() < outs * ins:
            self._dense = self._dense.new_empty(outs * ins)
        return self._dense[: outs * ins].view(outs, ins)


@dataclass(frozen=True)
class LayerKernels:
    """How kernels run the experts of one layer."""

    shapes: Shapes  # of one expert's tensors in its module
    row_limit: int  # of eager forwards
    matrices: Mapping[str, SlotMatrix | None]  # projections by name; None: kernels cannot read it
    grouped: tuple[SlotExperts, Gate] | None  # None: grouped kernels do not implement these experts


class DequantizedWeights(Mapping[str, Tensor]):
    """Tensors of the expert in a slot, as its module would hold them.

    A matrix is dequantized when it is read, and valid until the next one is.
    """

    def __init__(self, backend: CudaBackend, slot: int, kernels: LayerKernels) -> None:
        self._backend = backend
        self._slot = slot
        self._kernels = kernels

    def __getitem__(self, name: str) -> Tensor:
        backend, matrix = self._backend, self._kernels.matrices.get(name)
        if matrix is not None:
            dense = dequantize_matrix(matrix, self._slot, backend.dense_matrix(matrix.outs, matrix.ins))
        else:
            views = backend.format.layout(self._kernels.shapes).views(backend.slots.arena[self._slot])
            if name in views:
                return views[name]  # a bias
            dense = backend.format.weight.dequantize(backend.format.parts(views, name), backend.dtype)
        return dense.T if backend.format.transposed else dense

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels.shapes)

    def __len__(self) -> int:
        return len(self._kernels.shapes)


def _no_cpu_rows() -> None:
    """Return nothing: there is no CPU path."""


class GroupedSum:
    """Weighted sum of the routed experts of one sequence's rows, by grouped kernels."""

    def __init__(
        self, table: Tensor, experts: SlotExperts, gate: Gate, hidden: Tensor, index: Tensor, weights: Tensor
    ) -> None:
        # table: [experts] int32, slots of the expert batch that runs; hidden: [rows, hidden], index: [rows, top_k]
        self._table = table
        self._experts = experts
        self._gate = gate
        self._out = torch.empty_like(hidden)
        self._passes: list[tuple[slice, Tensor, Tensor, Tensor, ExpertScratch]] = []
        for start in range(0, len(hidden), MAX_KERNEL_ROWS):
            rows = slice(start, min(start + MAX_KERNEL_ROWS, len(hidden)))
            count = rows.stop - start
            scratch = ScratchBuffer(index.shape[1], experts.shape, hidden.device, count).scratch(count)
            self._passes.append((rows, hidden[rows], index[rows], weights[rows], scratch))

    def add(self, batch: ExpertBatch) -> None:
        """Launch the experts of the batch that is in the table, or place the results that the CPU has computed."""
        for rows, hidden, index, weights, scratch in self._passes:
            if batch.computed is None:
                run_expert_batch(hidden, index, weights, self._table, self._experts, self._gate, scratch)
                continue
            done = batch.computed.between(rows.start, rows.stop)
            pairs = (done.rows * index.shape[1] + done.positions).to(hidden.device)
            scratch.partial_sums[:, pairs] = 0.0
            scratch.partial_sums[0, pairs] = done.values.to(hidden.device)

    def finish(self) -> Tensor:
        """Launch the sum of all pairs."""  # [rows, hidden]
        for rows, _, _, _, scratch in self._passes:
            reduce_experts(scratch, self._out[rows])
        return self._out


class CudaExperts:
    """Forward of one layer's experts. In a captured forward, the host's part runs between two graphs."""

    def __init__(self, layer: int, experts: Experts, backend: CudaBackend) -> None:
        self._layer = layer
        self._access = experts.access
        self._pool = experts.pool
        self._run_ahead = experts.run_ahead
        self._backend = backend
        self._table = backend.slots.table[layer]  # [experts]
        self._kernels: LayerKernels | None = None

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if self._kernels is None:
            self._kernels = self._backend.inspect(experts)
        counts = rows_by_sequence(len(index))
        if len(counts) == 1 or len(index) <= INVARIANT_ROWS or self._backend.recorder.phase is not Phase.EAGER:
            return self._run_rows(self._kernels, experts, hidden, index, weights)
        if self._backend.all_resident:
            parts = zip(*(torch.split(t, counts) for t in (hidden, index, weights)), strict=True)
            return torch.cat([self._run_rows(self._kernels, experts, *part) for part in parts])
        return self._run_by_sequence(self._kernels, experts, hidden, index, weights, counts)

    def _run_rows(
        self, kernels: LayerKernels, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        """Run rows that may be computed together."""
        backend, recorder, (rows, top_k) = self._backend, self._backend.recorder, index.shape
        eager = recorder.phase is Phase.EAGER
        if kernels.grouped is None or rows > (kernels.row_limit if eager else MAX_KERNEL_ROWS):
            return self._run_plain(kernels, experts, hidden, index, weights)
        size = MAX_KERNEL_ROWS if eager else INVARIANT_ROWS  # captured rows are those of any sequences
        passes = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
        (found, gate), out = kernels.grouped, hidden.new_empty(hidden.shape)
        scratches = [backend.scratch(p.stop - p.start, top_k, found.shape, number) for number, p in enumerate(passes)]

        def run(table: Tensor) -> None:
            for part, scratch in zip(passes, scratches, strict=True):
                run_expert_batch(hidden[part], index[part], weights[part], table, found, gate, scratch)

        def run_next_batch() -> None:
            backend.take_batch()
            run(backend.batch_slots)

        def place(rows: CpuRows, values: Tensor) -> None:
            sums = [(part.start * top_k, scratch.partial_sums) for part, scratch in zip(passes, scratches, strict=True)]
            with torch.inference_mode():  # off during replay
                rows.place(values, sums)

        if backend.all_resident:
            run(self._table)
        elif eager:
            needed, shares = self._wait_for_router(index)
            on_cpu = self._cpu_rows(experts, hidden, weights, index)
            with backend.resync_on_failure():
                self._run_batches(run_next_batch, needed, shares=shares, on_cpu=on_cpu, place=place)
        elif backend.residency is not None and backend.residency.takes(rows, top_k, self._layer):
            cpu_layer = self._captured_cpu_layer(experts, hidden, weights, index)
            self._run_followed(backend.residency, index, run, cpu_layer)
            if cpu_layer is not None:
                values, pairs = cpu_layer.results
                for part, scratch in zip(passes, scratches, strict=True):
                    first = part.start * top_k
                    place_results(values, pairs, first, scratch.partial_sums, backend.residency.computed)
        else:
            if recorder.phase is Phase.WARMUP:
                with backend.resync_on_failure():
                    backend.post()  # an empty batch, to compile the kernels
                    run_next_batch()
            routed = backend.routed_buffer(self._layer, rows, top_k)
            routed.copy_(index, non_blocking=True)
            on_host, known, cpu = routed.numpy(), recorder.new_event(), backend.cpu
            cpu_rows: Callable[[], CpuRows | None] = _no_cpu_rows
            if cpu is not None:
                sent = cpu.send(hidden, weights), known
                cpu_rows = partial(CpuRows, cpu, self._layer, experts, on_host, lambda: sent)
            recorder.split_around(
                run_next_batch,
                lambda launch, observations: self._run_captured(launch, on_host, known, observations, cpu_rows, place),
            )
        for part, scratch in zip(passes, scratches, strict=True):
            reduce_experts(scratch, out[part])
        return out

    def _run_by_sequence(
        self,
        kernels: LayerKernels,
        experts: nn.Module,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        counts: list[int],
    ) -> Tensor:
        """Run the rows of several sequences, each as it would run alone. Experts are moved once for all of them."""
        backend, sums, start = self._backend, list[tuple[int, int, GroupedSum | ExpertSum]](), 0
        for part in zip(*(torch.split(t, counts) for t in (hidden, index, weights)), strict=True):
            stop = start + len(part[0])
            if kernels.grouped is not None and len(part[0]) <= kernels.row_limit:
                sums.append((start, stop, GroupedSum(backend.batch_slots, *kernels.grouped, *part)))
            else:
                arithmetic = backend.dense if backend.format.is_packed else backend.plain
                sums.append((start, stop, ExpertSum(arithmetic, experts, *part)))
            start = stop
        needed, shares = self._wait_for_router(index)
        on_cpu = self._cpu_rows(experts, hidden, weights, index)
        with (
            closing(self._access.use(self._layer, needed, shares=shares, on_cpu=on_cpu)) as batches,
            backend.resync_on_failure(),
        ):
            for batch in batches:
                if (done := batch.computed) is not None:
                    for first, last, one in sums:
                        one.add(replace(batch, computed=done.between(first, last)))
                    continue
                backend.post_batch(batch)
                backend.take_batch()
                for _, _, one in sums:
                    if isinstance(one, ExpertSum) and backend.format.is_packed:
                        for dense in backend.dequantized([batch], kernels):
                            one.add(dense)
                    else:
                        one.add(batch)
        return torch.cat([one.finish() for _, _, one in sums])

    def _run_plain(
        self, kernels: LayerKernels, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        """Run experts that the kernels do not implement, or many rows: expert by expert, launched by the host."""
        backend = self._backend

        def run(observations: Sequence[HostWork] = ()) -> Tensor:
            needed, shares = self._wait_for_router(index)
            for observe in observations:
                observe()
            on_cpu = self._cpu_rows(experts, hidden, weights, index)
            with closing(self._access.use(self._layer, needed, shares=shares, on_cpu=on_cpu)) as batches:
                if not backend.format.is_packed:
                    return backend.plain.run_experts(experts, hidden, index, weights, batches)
                dense = backend.dequantized(batches, kernels)
                return backend.dense.run_experts(experts, hidden, index, weights, dense)

        recorder = self._backend.recorder
        if recorder.phase is Phase.EAGER:
            return run()
        if backend.residency is not None:
            backend.residency.refuse()
        out, observations = torch.zeros_like(hidden), recorder.take_observations()

        def between() -> None:
            with torch.inference_mode():  # on during capture, off during replay
                out.copy_(run(observations))

        recorder.split(between)
        return out

    def _captured_cpu_layer(
        self, experts: nn.Module, hidden: Tensor, weights: Tensor, index: Tensor
    ) -> CapturedCpuLayer | None:
        """Capture the copies of a layer's rows to the host, if there is a CPU path."""
        if (cpu := self._backend.cpu) is None:
            return None
        results = cpu.captured_results(index.numel(), hidden.shape[1])
        return CapturedCpuLayer(cpu, self._layer, experts, index.shape[1], cpu.send(hidden, weights), results)

    def _run_followed(
        self,
        residency: CudaResidency,
        index: Tensor,
        run: Callable[[Tensor], None],
        cpu_layer: CapturedCpuLayer | None,
    ) -> None:
        """Capture a layer that looks its experts up on the device; the host follows behind."""
        observations = self._backend.recorder.take_observations()
        follow = partial(
            follow_layer, residency, self._layer, self._access, self._run_ahead, index.numel(), observations, cpu_layer
        )
        overlaps = self._backend.slots.layout.nbytes >= _OVERLAP_BYTES
        run(residency.check(self._layer, index, follow, waits=not overlaps))
        if overlaps:
            run(residency.await_missing(self._layer))

    def _wait_for_router(self, index: Tensor) -> tuple[list[int], list[float]]:
        """Return the routed experts and, for a prompt, the share of rows of each; copies go on meanwhile."""
        if self._pool.loads_in_flight:
            known = self._backend.recorder.new_event()
            known.record()
            self._run_ahead.wait(known)
        return routed_experts(index)

    def _cpu_rows(self, experts: nn.Module, hidden: Tensor, weights: Tensor, index: Tensor) -> CpuRows | None:
        """Return the layer's rows for the CPU path, if there is one; the router has finished."""
        if (cpu := self._backend.cpu) is None:
            return None
        return CpuRows(cpu, self._layer, experts, index.cpu().numpy(), lambda: cpu.send_now(hidden, weights))

    def _run_captured(
        self,
        launch: HostWork,
        routed: np.ndarray,
        known: Any,
        observations: list[HostWork],
        cpu_rows: Callable[[], CpuRows | None],
        place: Place,
    ) -> None:
        """Launch the READY experts before the host knows the routed ones, which it reads meanwhile."""
        known.record()
        pinned = self._access.pin_layer(self._layer)
        try:
            with self._backend.resync_on_failure():
                self._run_pinned(launch, routed, known, observations, pinned, cpu_rows, place)
        except BaseException:
            self._access.unpin_layer(pinned)
            raise

    def _run_pinned(
        self,
        launch: HostWork,
        routed: np.ndarray,
        known: Any,
        observations: list[HostWork],
        pinned: PinnedLayer,
        cpu_rows: Callable[[], CpuRows | None],
        place: Place,
    ) -> None:
        access, run_ahead = self._access, self._run_ahead
        if (pinned.slots >= 0).any():
            self._backend.post(pinned.slots)
            launch()
        run_ahead.settle(self._layer)  # the layer before, while the device is busy
        # stop at the router's event: the device has only one batch of work left then, and must not become idle
        run_ahead.submit_prefetches(until=known)
        run_ahead.wait(known)
        access.note_router_finished(pinned)
        needed = sorted(set(routed.ravel().tolist()))
        if access.covers(pinned, needed):
            run_ahead.defer(self._layer, lambda: access.commit(pinned, needed), observations)
        else:
            self._run_batches(launch, needed, pinned, observations, on_cpu=cpu_rows(), place=place)

    def _run_batches(
        self,
        launch: Callable[[], None],
        needed: list[int],
        pinned: PinnedLayer | None = None,
        observations: Sequence[HostWork] = (),
        shares: Sequence[float] = (),
        *,
        on_cpu: CpuRows | None,
        place: Place,
    ) -> None:
        """Launch the routed experts as they arrive, and place the results of those that the CPU computes."""
        with closing(self._access.use(self._layer, needed, pinned, shares, on_cpu)) as batches:
            batch = next(batches, None)  # loads of missing experts have been submitted by now
            for observe in observations:
                observe()
            while batch is not None:
                if batch.computed is not None and on_cpu is not None:
                    place(on_cpu, batch.computed.values)
                else:
                    self._backend.post_batch(batch)
                    launch()
                batch = next(batches, None)
