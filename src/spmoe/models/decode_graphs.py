"""Programs: forwards of a few rows, recorded once per row count and replayed with new tokens.

Greedy draft tokens never visit the host on their way from one forward to the next: each program ends by noting its
choice in a chain that the next one reads, and the host looks at predictions and tokens while the device runs ahead. So
does the forward that verifies them begin: its first graph waits on the device, behind the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from spmoe.backends.devices import pinned_zeros
from spmoe.backends.graphs import GraphRecorder
from spmoe.backends.kernels.inputs import (
    append_token,
    chain_tokens,
    load_chained_inputs,
    load_inputs,
    new_token_chain,
    pending_tokens,
    set_chain_length,
)
from spmoe.models.attention import device_length
from spmoe.models.hidden_states import LayerObserver, OnChunk
from spmoe.models.kv import KvState
from spmoe.types import Routing
from spmoe.verify.greedy import RowArgmax, argmax_rows, read_argmax

Observing = Callable[
    [LayerObserver | None, OnChunk], AbstractContextManager[None]
]  # what shows chunks of a forward inside


class GraphKey(NamedTuple):
    """What a recorded forward was recorded for."""

    rows: int
    keep: int
    chunks: int  # 0: nobody watches
    choices: int | None = None  # entries of the vocabulary that the greedy choice is among; None: no choice is made
    place: int = 0  # in a chain; those behind the first take their token from it
    question: str = ""  # what the watch asks


@dataclass
class CapturedChunk:
    """What a watch asked about a chunk of layers, and where the answer arrives."""

    depths: range
    residual: Tensor  # [depths, rows, hidden], on the device
    asked: Routing | None  # on the device
    answer: Routing | None  # pinned
    arrived: Any  # an event


class DecodeGraphs:
    """Records and replays a model's forwards."""

    def __init__(self, model: Any, observing: Observing, recorder: GraphRecorder) -> None:
        self.model = model
        self.observing = observing
        self.recorder = recorder
        self.leader: DecodeGraphs | None = (
            None  # whose chains these forwards may take tokens from; before any is recorded
        )
        self.chain = new_token_chain(model.device)
        self._chain_here = pinned_zeros(len(self.chain))
        self._arrived = recorder.new_event()
        self._chained = (-1, 0)  # the turn in which a chain was last begun, and its length
        self._found: list[int] = []  # the tokens of the last chain that was begun, once they are fetched
        self._begun: tuple[ref[DecodeGraph], int, int, int] | None = None  # a forward, token and length, and its turn
        self._last: ref[DecodeGraph] | None = None

    def forward(self, tokens: list[int], kv: KvState, keep: int, observer: LayerObserver | None) -> Tensor:
        """Append tokens; the logits are overwritten by the next forward of as many rows."""  # -> [keep, vocabulary]
        graph = self.prepare(len(tokens), kv, keep, observer)
        if not self._is_begun(graph, tokens, kv.length):
            graph.begin(tokens, kv.length)
        graph.finish(observer)
        graph.report()
        kv.advance(len(tokens))
        self._last = ref(graph)
        return graph.logits

    def begin(self, token: int, following: int, kv: KvState, observer: LayerObserver | None) -> None:
        """Begin to append a token, and those that the leader's chain, launched just now, will have chosen.

        It is finished by a `forward` of these tokens; what else is launched before that makes it void.
        """
        if self.leader is not None and self.leader._chained == (self.recorder.turns, following):
            graph = self.prepare(1 + following, kv, 1 + following, observer)
            graph.begin([token, *pending_tokens(following)], kv.length)
            self._begun = (ref(graph), token, kv.length, self.recorder.turns)

    def argmax(self, logits: Tensor) -> RowArgmax | None:
        """The largest of each row and its place, where the last forward gave these logits; waits for its end."""
        last = self._last() if self._last is not None else None
        return last.best() if last is not None and last.logits is logits else None

    def _is_begun(self, graph: DecodeGraph, tokens: list[int], length: int) -> bool:
        begun, self._begun = self._begun, None
        known = (ref(graph), tokens[0], length, self.recorder.turns)
        return begun == known and self.leader is not None and self.leader._found == tokens[1:]

    def prepare(self, rows: int, kv: KvState, keep: int, observer: LayerObserver | None) -> DecodeGraph:
        """What `forward` replays, recorded if it has not been."""
        chunks, question = (0, "") if observer is None else (observer.chunks, observer.question)
        return self._graph_for(GraphKey(rows, keep, chunks, question=question), kv, observer)

    def prepare_greedy(
        self, rows: int, kv: KvState, observers: Sequence[LayerObserver | None], choices: int
    ) -> list[DecodeGraph]:
        """What `greedy` replays, recorded as far as it has not been."""
        chain = []
        for place, observer in enumerate(observers):
            chunks = observer.chunks if observer is not None else 0
            chain.append(self._graph_for(GraphKey(1 if place else rows, 1, chunks, choices, place), kv, observer))
        return chain

    def greedy(
        self, tokens: list[int], kv: KvState, observers: Sequence[LayerObserver | None], choices: int
    ) -> Callable[[], list[int]]:
        """Launch as many forwards as there are watches; called, what is returned shows them chunks, and has the tokens.

        Each forward's most likely token follows these; all but the last are appended when they are fetched. What else
        is launched before that makes them void.
        """
        chain, self._found = self.prepare_greedy(len(tokens), kv, observers, choices), []
        for place, (graph, observer) in enumerate(zip(chain, observers, strict=True)):
            graph.begin(None if place else tokens, kv.length)
            graph.finish(observer)
        self._chain_here.copy_(self.chain, non_blocking=True)
        self._arrived.record()
        self._chained = (self.recorder.turns, len(chain))

        def fetch() -> list[int]:
            self.recorder.be_patient(True)
            try:
                for graph in chain:
                    graph.report()
            finally:
                self.recorder.be_patient(False)
            kv.advance(len(tokens) + len(chain) - 1)
            self.recorder.wait_and_pump(self._arrived)
            self._found = chain_tokens(self._chain_here, len(chain))
            return list(self._found)

        return fetch

    def _graph_for(self, key: GraphKey, kv: KvState, observer: LayerObserver | None) -> DecodeGraph:
        whose = (self, key)  # a target and its quantized self run over the same states
        if whose not in kv.decode_graphs:
            kv.decode_graphs[whose] = DecodeGraph(self, key, kv, observer)
        graph: DecodeGraph = kv.decode_graphs[whose]
        return graph


class DecodeGraph:
    """One recorded forward over one attention state."""

    def __init__(self, owner: DecodeGraphs, key: GraphKey, kv: KvState, observer: LayerObserver | None) -> None:
        model, self._recorder = owner.model, owner.recorder
        self._inbox = pinned_zeros(key.rows + 1)  # tokens, and how many came before
        self._inbox[key.rows] = kv.length
        self._told = self._inbox.numpy()  # the same memory
        self._argmax: Tensor | None = None  # of each row of logits, where the host will look at them
        if key.choices is None:
            self._argmax = pinned_zeros(2, min(key.keep, key.rows), dtype=torch.float64)
        self._over = self._recorder.new_event()
        self._watch: LayerObserver | None = None
        self._chunks: list[CapturedChunk] = []
        self._answers: list[Routing | None] = []
        ids = torch.zeros(1, key.rows, dtype=torch.int64, device=model.device)
        positions, length = torch.zeros_like(ids), ids.new_zeros(1)
        self._inputs = (ids, positions, length)  # every replay writes there: nobody else may be given that memory

        def forward() -> Tensor:
            self._chunks.clear()
            if key.place:
                load_chained_inputs(owner.chain, ids, positions, length)
            else:
                load_inputs(self._inbox, owner.chain, (owner.leader or owner).chain, ids, positions, length)
            on_layers = self._capture_chunk(observer is not None and observer.at_once)
            with torch.inference_mode(), device_length(length), owner.observing(observer, on_layers):
                output = model(
                    input_ids=ids,
                    position_ids=positions,
                    past_key_values=kv.cache,
                    use_cache=True,
                    logits_to_keep=key.keep,
                )
                logits: Tensor = output.logits[0]
                if key.choices is not None:
                    append_token(owner.chain, logits[-1, : key.choices].argmax(), key.rows)
                elif self._argmax is not None:
                    self._argmax.copy_(argmax_rows(logits), non_blocking=True)
            return logits

        if key.place:  # else it is rehearsed where the last chain ended, which may be amid what this state holds
            set_chain_length(owner.chain, kv.length)
        self._recording, self.logits = self._recorder.record(forward)

    def begin(self, tokens: list[int] | None, length: int) -> None:
        """Submit the forward up to where the host looks at it; without tokens, of the one chosen last."""
        if tokens is not None:
            self._told[:] = [*tokens, length]
        self._recorder.turns += 1
        self._recording.begin()

    def finish(self, observer: LayerObserver | None) -> None:
        """Submit the rest."""
        self._watch = observer
        self._recording.finish()
        if self._argmax is not None:
            self._over.record()

    def best(self) -> RowArgmax | None:
        """The largest of each row's logits and its place, unless it made a choice itself; waits for them."""
        if self._argmax is None:
            return None
        self._recorder.wait_and_pump(self._over)
        return read_argmax(self._argmax)

    def report(self) -> None:
        """Tell the watch what it asked for, chunk by chunk as it arrives, unless it was told at once."""
        if self._watch is None or self._watch.at_once:
            return
        for chunk in self._chunks:
            self._recorder.while_waiting()
            self._recorder.wait_and_pump(chunk.arrived)
            self._tell(chunk)

    def _tell(self, chunk: CapturedChunk) -> None:
        if self._watch is not None:
            self._watch.tell(chunk.depths, chunk.residual, chunk.answer)

    def _capture_chunk(self, at_once: bool) -> OnChunk:
        def on_layers(depths: range, residual: Tensor, asked: Routing | None) -> None:
            number = len(self._chunks)
            if number == len(self._answers):  # pinned memory cannot be had while recording
                self._answers.append(
                    None if asked is None else Routing(*(pinned_zeros(*t.shape, dtype=t.dtype) for t in asked))
                )
            answer = self._answers[number]
            if asked is not None and answer is not None:
                for there, here in zip(asked, answer, strict=True):
                    here.copy_(there, non_blocking=True)
            chunk = CapturedChunk(depths, residual, asked, answer, self._recorder.new_event())
            self._chunks.append(chunk)
            if at_once:
                self._recorder.note(lambda: self._tell(chunk))
            else:
                self._recorder.split(chunk.arrived.record)

        return on_layers
