"""Captured forwards of a few rows: one graph per number of rows, replayed with new tokens of any sequences.

Greedy draft tokens never visit the host on their way from one pass to the next: each graph ends by appending its argmax
to a token chain on the device, and the next graph reads it there. The forward that verifies a draft begins the same
way: its first graph waits on the device, behind the draft. `RunAhead` says which of these launches are valid.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spmoe.backends.devices import pinned_zeros
from spmoe.backends.graphs import CaptureContext
from spmoe.backends.kernels.inputs import (
    append_token,
    chain_tokens,
    load_chained_inputs,
    load_inputs,
    new_token_chain,
    pending_tokens,
    set_chain_range,
)
from spmoe.backends.residency import FollowedForward
from spmoe.experts.run_ahead import KvRange, ReadTokens
from spmoe.models.attention import device_ranges
from spmoe.models.hidden_states import LayerObserver, OnChunk
from spmoe.models.kv import KvState, kernel_cache
from spmoe.models.kv_pool import KvPool
from spmoe.models.ragged import BATCH_ROWS, RaggedPart
from spmoe.types import Routing
from spmoe.verify.greedy import RowArgmax, argmax_rows, read_argmax

# context in which a forward's hidden states are shown, chunk by chunk, to the callable
Observing = Callable[[LayerObserver | None, OnChunk], AbstractContextManager[None]]
_TRIES = 3  # of a forward that gives up because the host did not answer in time


class GraphKey(NamedTuple):
    """Properties in which captured forwards differ."""

    rows: int
    num_logits: int
    chunks: int  # of hidden states that are shown; 0: none
    choices: int | None = None  # size of the vocabulary that a greedy draft selects from; None: not a draft pass
    draft_pass: int = 0  # number of the greedy draft pass; passes after the first read their token from the chain
    observer: str = ""  # the observer's key
    is_batch: bool = False  # whether each row belongs to a sequence of its own


def _key(rows: int, num_logits: int, observer: LayerObserver | None) -> GraphKey:
    """Return the key of a forward of one sequence that is not a greedy draft pass."""
    if observer is None:
        return GraphKey(rows, num_logits, 0)
    return GraphKey(rows, num_logits, observer.chunks, observer=observer.key)


def _batch_inputs(parts: Sequence[RaggedPart]) -> tuple[list[int], list[KvRange]]:
    """Return tokens and ranges of a forward's rows: a sequence each, and the last one as often as rows are captured."""
    tokens, ranges = list[int](), list[KvRange]()
    for part in parts:
        start, length, capacity = part.kv.range
        tokens += part.tokens
        ranges += [(start, length + row, capacity) for row in range(len(part.tokens))]
    repeated = next(rows for rows in BATCH_ROWS if rows >= len(tokens)) - len(tokens)
    return tokens + tokens[-1:] * repeated, ranges + ranges[-1:] * repeated


@dataclass
class CapturedChunk:
    """Hidden states of a chunk of layers, and the routing that the observer predicts from them."""

    depths: range
    residual: Tensor  # [depths, rows, hidden], on the device
    device_routing: Routing | None  # kept alive because every replay writes it
    host_routing: Routing | None  # pinned
    arrived: Any  # CUDA event


class BatchRows:
    """Result of one sequence in a forward of several."""

    def __init__(self, graph: DecodeGraph, rows: slice) -> None:
        self._graph = graph
        self._rows = rows

    @property
    def logits(self) -> Tensor:
        return self._graph.logits[self._rows]

    def argmax(self) -> RowArgmax:
        values, tokens = self._graph.argmax()
        return values[self._rows], tokens[self._rows]


class DecodeGraphs:
    """Captures and replays a model's forwards."""

    def __init__(self, model: Any, observing: Observing, kv_pool: KvPool, capture: CaptureContext) -> None:
        self.model = model
        self.observing = observing
        self.arena = kv_pool.arena
        self._scratch = kv_pool.scratch
        self._captured: dict[GraphKey, DecodeGraph] = {}
        self._generation = self.arena.generation  # of the memory that graphs are captured over
        self.recorder = capture.recorder
        self.run_ahead = capture.run_ahead
        self.chain = new_token_chain(model.device) if capture.chain is None else capture.chain
        self.draft_chain = self.chain if capture.draft_chain is None else capture.draft_chain
        self._host_chain = pinned_zeros(len(self.chain))
        self._arrived = capture.recorder.new_event()
        self.residency = capture.residency

    def clear(self) -> None:
        """Drop all captured forwards: those of an experiment, or over memory that is not used any more."""
        if self._captured:
            self.run_ahead.note_launch()
            self.recorder.wait()  # one of them may still run
            self._captured.clear()

    def forward(self, tokens: list[int], kv: KvState, num_logits: int, observer: LayerObserver | None) -> DecodeGraph:
        """Append tokens to a sequence; return the graph, which has the logits until its next replay."""
        graph = self.prepare(len(tokens), num_logits, observer)
        if not self.run_ahead.take_verify(graph, tokens, [kv.range]):
            graph.launch_first(tokens, [kv.range])
        graph.launch_rest(observer)
        graph.show_chunks()
        kv.advance(len(tokens))
        return graph

    def forward_if_captured(
        self, tokens: list[int], kv: KvState, num_logits: int, observer: LayerObserver | None
    ) -> BatchRows | None:
        """Append tokens to a sequence with a graph that is captured already; return None if there is none.

        A graph that has logits of every row, to verify a draft, serves too.
        """
        for count in (num_logits, len(tokens)):
            if self._generation == self.arena.generation and _key(len(tokens), count, observer) in self._captured:
                graph = self.forward(tokens, kv, count, observer)
                return BatchRows(graph, slice(count - num_logits, count))
        return None

    def forward_batch(self, parts: Sequence[RaggedPart], observer: LayerObserver | None) -> list[BatchRows]:
        """Append tokens to several sequences; the results are valid until the graph's next replay.

        Each row is a sequence of its own for the kernels. The last row is repeated up to a captured number of rows: it
        needs no other experts, and writes the same keys and values to the same place.
        """
        tokens, ranges = _batch_inputs(parts)
        graph = self.prepare_batch(len(tokens), observer)
        if not self.run_ahead.take_verify(graph, tokens, ranges):
            graph.launch_first(tokens, ranges)
        graph.launch_rest(observer)
        graph.show_chunks()
        for part in parts:
            part.kv.advance(len(part.tokens))
        ends = accumulate(len(part.tokens) for part in parts)
        return [BatchRows(graph, slice(end - part.num_logits, end)) for part, end in zip(parts, ends, strict=True)]

    def launch_batch(self, parts: Sequence[RaggedPart], observer: LayerObserver | None) -> None:
        """Launch the first graph of `forward_batch` for sequences that have no drafts."""
        tokens, ranges = _batch_inputs(parts)

        def launch() -> DecodeGraph:
            graph = self.prepare_batch(len(tokens), observer)
            graph.launch_first(tokens, ranges)
            return graph

        self.run_ahead.launch_verify(0, tokens, ranges, launch)

    def launch_verify(self, token: int, k: int, kv: KvState, observer: LayerObserver | None) -> None:
        """Launch the first graph of the forward that verifies a token and the launched draft's K tokens."""

        def launch() -> DecodeGraph:
            graph = self.prepare(1 + k, 1 + k, observer)
            graph.launch_first([token, *pending_tokens(k)], [kv.range])
            return graph

        self.run_ahead.launch_verify(k, [token], [kv.range], launch)

    def launch_greedy(
        self, tokens: list[int], kv: KvState, observers: Sequence[LayerObserver | None], choices: int
    ) -> ReadTokens:
        """Launch n greedy decode steps, one per observer; return a callable that waits for their n tokens.

        The first step appends `tokens`, each later step the token that the step before selected. When the tokens are
        read, the KV cache holds all of them but the last.
        """
        graphs = self.prepare_greedy(len(tokens), observers, choices)
        for number, (graph, observer) in enumerate(zip(graphs, observers, strict=True)):
            graph.launch_first(None if number else tokens, [kv.range])
            graph.launch_rest(observer)
        self._host_chain.copy_(self.chain, non_blocking=True)
        self._arrived.record()

        def read() -> list[int]:
            with self.run_ahead.reading_predictions():
                for graph in graphs:
                    graph.show_chunks()
            kv.advance(len(tokens) + len(graphs) - 1)
            self.run_ahead.wait(self._arrived)
            return chain_tokens(self._host_chain, len(graphs))

        return read

    def prepare(self, rows: int, num_logits: int, observer: LayerObserver | None) -> DecodeGraph:
        """Return the graph that `forward` replays; capture it if it is missing."""
        return self._graph(_key(rows, num_logits, observer), observer)

    def prepare_batch(self, rows: int, observer: LayerObserver | None) -> DecodeGraph:
        """Return the graph that `forward_batch` replays for so many rows; capture it if it is missing."""
        return self._graph(_key(rows, rows, observer)._replace(is_batch=True), observer)

    def prepare_greedy(self, rows: int, observers: Sequence[LayerObserver | None], choices: int) -> list[DecodeGraph]:
        """Return the graphs that `launch_greedy` replays; capture those that are missing."""
        graphs = []
        for number, observer in enumerate(observers):
            chunks = observer.chunks if observer is not None else 0
            key = GraphKey(1 if number else rows, 1, chunks, choices, draft_pass=number)
            graphs.append(self._graph(key, observer))
        return graphs

    def _graph(self, key: GraphKey, observer: LayerObserver | None) -> DecodeGraph:
        if self._generation != self.arena.generation:
            self.clear()
            self._generation = self.arena.generation
        if key not in self._captured:
            self.run_ahead.note_launch()  # a capture allocates memory and waits for the device
            self._captured[key] = DecodeGraph(self, key, (self._scratch.start, 1, self._scratch.capacity), observer)
        return self._captured[key]


class DecodeGraph:
    """One captured forward. It keeps every tensor alive that its replays write."""

    def __init__(self, owner: DecodeGraphs, key: GraphKey, scratch: KvRange, observer: LayerObserver | None) -> None:
        # scratch: range that the warm-up writes to
        model, self._recorder, self._run_ahead = owner.model, owner.recorder, owner.run_ahead
        sequences = key.rows if key.is_batch else 1
        self._inbox = pinned_zeros(key.rows + 3 * sequences)  # tokens, then the ranges of their sequences, by column
        self._inbox[key.rows :] = torch.tensor(scratch).repeat_interleave(sequences)
        self._inbox_values = self._inbox.numpy()  # the same memory
        self._inbox_read = self._recorder.new_event()  # by the last replay
        self._inbox_written = False
        self._argmax: Tensor | None = None  # of each row of logits, pinned
        if key.choices is None:
            self._argmax = pinned_zeros(2, min(key.num_logits, key.rows), dtype=torch.float64)
        self._finished = self._recorder.new_event()
        self._observer: LayerObserver | None = None
        self._chunks: list[CapturedChunk] = []
        self._host_routings: list[Routing | None] = []  # by chunk, pinned
        ids = torch.zeros(1, key.rows, dtype=torch.int64, device=model.device)
        positions, ranges = torch.zeros_like(ids), ids.new_zeros(3, sequences)
        cache = kernel_cache(owner.arena)
        self._inputs = (ids, positions, ranges, cache)  # kept alive because every replay reads them
        self._residency = owner.residency  # None: the host decides in every layer which experts run

        def forward() -> Tensor:
            self._chunks.clear()
            if self._residency is not None:
                self._residency.restart()
            if key.draft_pass:
                load_chained_inputs(owner.chain, ids, positions, ranges)
            else:
                load_inputs(self._inbox, owner.chain, owner.draft_chain, ids, positions, ranges)
            on_chunk = self._capture_chunk(observer is not None and observer.immediate)
            with torch.inference_mode(), device_ranges(ranges), owner.observing(observer, on_chunk):
                output = model(
                    input_ids=ids,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=key.num_logits,
                )
                logits: Tensor = output.logits[0]
                if key.choices is not None:
                    append_token(owner.chain, logits[-1, : key.choices].argmax(), key.rows)
                elif self._argmax is not None:
                    self._argmax.copy_(argmax_rows(logits), non_blocking=True)
                if self._residency is not None:
                    self._residency.end()
            return logits

        if key.draft_pass:  # without this, the warm-up would write after the last chain, maybe over positions in use
            set_chain_range(owner.chain, *scratch)
        with nullcontext(FollowedForward()) if self._residency is None else self._residency.capture() as self._followed:
            self._captured, self.logits = self._recorder.capture(forward)
        if self._residency is not None and self._followed.layers:
            self._captured.append(self._follow)
        else:
            self._residency = None

    def launch_first(self, tokens: list[int] | None, ranges: Sequence[KvRange]) -> None:
        """Launch the forward up to the first host work. `tokens` None: append the last token of the chain.

        `ranges`: of the sequences, before these tokens.
        """
        self._run_ahead.note_launch()
        if tokens is None:
            self._captured.launch_first()
            return
        if self._inbox_written:  # the last replay may not have begun, if nobody has waited for its result
            self._run_ahead.wait(self._inbox_read)
        self._inbox_values[:] = [*tokens, *itertools.chain.from_iterable(zip(*ranges, strict=True))]
        try:
            self._launch()
        finally:  # also after an error: the next call waits for this event, which must be one that passes
            self._inbox_read.record()
            self._inbox_written = True

    def _launch(self) -> None:
        """Launch the first graph with the inputs that are in the inbox."""
        try:
            if self._residency is not None:
                self._residency.launch(self._followed)
            self._captured.launch_first()
        except BaseException:
            if self._residency is not None:
                self._residency.resync()
            raise

    def _follow(self) -> None:
        """Do the host's part of a forward that is one graph; run it again if it had to wait too long for the host.

        This happens if the host paused between steps. The forward overwrites what it has appended to the KV cache.
        """
        assert self._residency is not None
        for _ in range(_TRIES - 1):
            if self._residency.follow():
                return
            self._launch()
        if not self._residency.follow():
            raise RuntimeError("a layer on the device has waited too long for its experts")

    def launch_rest(self, observer: LayerObserver | None) -> None:
        """Launch the rest of the forward."""
        self._observer = observer
        self._captured.launch_rest()
        if self._argmax is not None:
            self._finished.record()

    def argmax(self) -> RowArgmax:
        """Wait for the device; return the argmax of each row of logits."""
        if self._argmax is None:
            return read_argmax(argmax_rows(self.logits))
        self._run_ahead.wait(self._finished)
        return read_argmax(self._argmax)

    def show_chunks(self) -> None:
        """Show the hidden states to the observer, chunk by chunk as they arrive, unless it was shown them already."""
        if self._observer is None or self._observer.immediate:
            return
        for chunk in self._chunks:
            self._run_ahead.submit_prefetches()
            self._run_ahead.wait(chunk.arrived)
            self._show(chunk)

    def _show(self, chunk: CapturedChunk) -> None:
        if self._observer is not None:
            self._observer.show(chunk.depths, chunk.residual, chunk.host_routing)

    def _capture_chunk(self, immediate: bool) -> OnChunk:
        def on_chunk(depths: range, residual: Tensor, routing: Routing | None) -> None:
            number = len(self._chunks)
            if number == len(self._host_routings):  # in the warm-up: pinned memory cannot be allocated during a capture
                self._host_routings.append(
                    None if routing is None else Routing(*(pinned_zeros(*t.shape, dtype=t.dtype) for t in routing))
                )
            host_routing = self._host_routings[number]
            if routing is not None and host_routing is not None:
                for on_device, on_host in zip(routing, host_routing, strict=True):
                    on_host.copy_(on_device, non_blocking=True)
            chunk = CapturedChunk(depths, residual, routing, host_routing, self._recorder.new_event())
            self._chunks.append(chunk)
            if self._residency is not None and not immediate:
                self._residency.refuse()  # it serves forwards that are one graph
            if immediate:
                self._recorder.observe_later(lambda: self._show(chunk))
            else:
                self._recorder.split(chunk.arrived.record)

        return on_chunk
