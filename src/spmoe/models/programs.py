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

from spmoe.backends.devices import page_locked
from spmoe.backends.graphs import Recorder
from spmoe.backends.kernels.inputs import chosen, go_on, go_on_from, new_chain, stage, stage_chained, to_be_chosen
from spmoe.models.attention import device_length
from spmoe.models.kv import KvState
from spmoe.models.taps import OnSlab, Watch
from spmoe.types import Routing
from spmoe.verify.greedy import Best, best_rows, read_best

Watching = Callable[[Watch | None, OnSlab], AbstractContextManager[None]]  # what shows slabs of a forward inside


class ProgramKey(NamedTuple):
    """What a recorded forward was recorded for."""

    rows: int
    keep: int
    slabs: int  # 0: nobody watches
    choices: int | None = None  # entries of the vocabulary that the greedy choice is among; None: no choice is made
    place: int = 0  # in a chain; those behind the first take their token from it
    question: str = ""  # what the watch asks


@dataclass
class Slab:
    """What a watch asked about a slab of layers, and where the answer arrives."""

    depths: range
    residual: Tensor  # [depths, rows, hidden], on the device
    asked: Routing | None  # on the device
    answer: Routing | None  # page-locked
    arrived: Any  # an event


class Programs:
    """Records and replays a model's forwards."""

    def __init__(self, model: Any, watching: Watching, recorder: Recorder) -> None:
        self.model = model
        self.watching = watching
        self.recorder = recorder
        self.leader: Programs | None = None  # whose chains these forwards may take tokens from; before any is recorded
        self.chain = new_chain(model.device)
        self._chain_here = page_locked(len(self.chain))
        self._arrived = recorder.new_event()
        self._chained = (-1, 0)  # the turn in which a chain was last begun, and its length
        self._found: list[int] = []  # the tokens of the last chain that was begun, once they are fetched
        self._begun: tuple[ref[Program], int, int, int] | None = None  # a forward, token and length, and its turn
        self._last: ref[Program] | None = None

    def forward(self, tokens: list[int], kv: KvState, keep: int, watch: Watch | None) -> Tensor:
        """Append tokens; the logits are overwritten by the next forward of as many rows."""  # -> [keep, vocabulary]
        program = self.prepare(len(tokens), kv, keep, watch)
        if not self._is_begun(program, tokens, kv.length):
            program.begin(tokens, kv.length)
        program.finish(watch)
        program.report()
        kv.advance(len(tokens))
        self._last = ref(program)
        return program.logits

    def begin(self, token: int, following: int, kv: KvState, watch: Watch | None) -> None:
        """Begin to append a token, and those that the leader's chain, launched just now, will have chosen.

        It is finished by a `forward` of these tokens; what else is launched before that makes it void.
        """
        if self.leader is not None and self.leader._chained == (self.recorder.turns, following):
            program = self.prepare(1 + following, kv, 1 + following, watch)
            program.begin([token, *to_be_chosen(following)], kv.length)
            self._begun = (ref(program), token, kv.length, self.recorder.turns)

    def best_of(self, logits: Tensor) -> Best | None:
        """The largest of each row and its place, where the last forward gave these logits; waits for its end."""
        last = self._last() if self._last is not None else None
        return last.best() if last is not None and last.logits is logits else None

    def _is_begun(self, program: Program, tokens: list[int], length: int) -> bool:
        begun, self._begun = self._begun, None
        known = (ref(program), tokens[0], length, self.recorder.turns)
        return begun == known and self.leader is not None and self.leader._found == tokens[1:]

    def prepare(self, rows: int, kv: KvState, keep: int, watch: Watch | None) -> Program:
        """What `forward` replays, recorded if it has not been."""
        slabs, question = (0, "") if watch is None else (watch.slabs, watch.question)
        return self._program(ProgramKey(rows, keep, slabs, question=question), kv, watch)

    def prepare_greedy(self, rows: int, kv: KvState, watches: Sequence[Watch | None], choices: int) -> list[Program]:
        """What `greedy` replays, recorded as far as it has not been."""
        chain = []
        for place, watch in enumerate(watches):
            slabs = watch.slabs if watch is not None else 0
            chain.append(self._program(ProgramKey(1 if place else rows, 1, slabs, choices, place), kv, watch))
        return chain

    def greedy(
        self, tokens: list[int], kv: KvState, watches: Sequence[Watch | None], choices: int
    ) -> Callable[[], list[int]]:
        """Launch as many forwards as there are watches; called, what is returned shows them slabs, and has the tokens.

        Each forward's most likely token follows these; all but the last are appended when they are fetched. What else
        is launched before that makes them void.
        """
        chain, self._found = self.prepare_greedy(len(tokens), kv, watches, choices), []
        for place, (program, watch) in enumerate(zip(chain, watches, strict=True)):
            program.begin(None if place else tokens, kv.length)
            program.finish(watch)
        self._chain_here.copy_(self.chain, non_blocking=True)
        self._arrived.record()
        self._chained = (self.recorder.turns, len(chain))

        def fetch() -> list[int]:
            self.recorder.be_patient(True)
            try:
                for program in chain:
                    program.report()
            finally:
                self.recorder.be_patient(False)
            kv.advance(len(tokens) + len(chain) - 1)
            self.recorder.sit_out(self._arrived)
            self._found = chosen(self._chain_here, len(chain))
            return list(self._found)

        return fetch

    def _program(self, key: ProgramKey, kv: KvState, watch: Watch | None) -> Program:
        whose = (self, key)  # a target and its quantized self run over the same states
        if whose not in kv.programs:
            kv.programs[whose] = Program(self, key, kv, watch)
        program: Program = kv.programs[whose]
        return program


class Program:
    """One recorded forward over one attention state."""

    def __init__(self, owner: Programs, key: ProgramKey, kv: KvState, watch: Watch | None) -> None:
        model, self._recorder = owner.model, owner.recorder
        self._inbox = page_locked(key.rows + 1)  # tokens, and how many came before
        self._inbox[key.rows] = kv.length
        self._told = self._inbox.numpy()  # the same memory
        self._best: Tensor | None = None  # of each row of logits, where the host will look at them
        if key.choices is None:
            self._best = page_locked(2, min(key.keep, key.rows), dtype=torch.float64)
        self._over = self._recorder.new_event()
        self._watch: Watch | None = None
        self._slabs: list[Slab] = []
        self._answers: list[Routing | None] = []
        ids = torch.zeros(1, key.rows, dtype=torch.int64, device=model.device)
        positions, length = torch.zeros_like(ids), ids.new_zeros(1)
        self._inputs = (ids, positions, length)  # every replay writes there: nobody else may be given that memory

        def forward() -> Tensor:
            self._slabs.clear()
            if key.place:
                stage_chained(owner.chain, ids, positions, length)
            else:
                stage(self._inbox, owner.chain, (owner.leader or owner).chain, ids, positions, length)
            on_slab = self._on_slab(watch is not None and watch.at_once)
            with torch.inference_mode(), device_length(length), owner.watching(watch, on_slab):
                output = model(
                    input_ids=ids,
                    position_ids=positions,
                    past_key_values=kv.cache,
                    use_cache=True,
                    logits_to_keep=key.keep,
                )
                logits: Tensor = output.logits[0]
                if key.choices is not None:
                    go_on(owner.chain, logits[-1, : key.choices].argmax(), key.rows)
                elif self._best is not None:
                    self._best.copy_(best_rows(logits), non_blocking=True)
            return logits

        if key.place:  # else it is rehearsed where the last chain ended, which may be amid what this state holds
            go_on_from(owner.chain, kv.length)
        self._recording, self.logits = self._recorder.record(forward)

    def begin(self, tokens: list[int] | None, length: int) -> None:
        """Submit the forward up to where the host looks at it; without tokens, of the one chosen last."""
        if tokens is not None:
            self._told[:] = [*tokens, length]
        self._recorder.turns += 1
        self._recording.begin()

    def finish(self, watch: Watch | None) -> None:
        """Submit the rest."""
        self._watch = watch
        self._recording.finish()
        if self._best is not None:
            self._over.record()

    def best(self) -> Best | None:
        """The largest of each row's logits and its place, unless it made a choice itself; waits for them."""
        if self._best is None:
            return None
        self._recorder.sit_out(self._over)
        return read_best(self._best)

    def report(self) -> None:
        """Tell the watch what it asked for, slab by slab as it arrives, unless it was told at once."""
        if self._watch is None or self._watch.at_once:
            return
        for slab in self._slabs:
            self._recorder.while_waiting()
            self._recorder.sit_out(slab.arrived)
            self._tell(slab)

    def _tell(self, slab: Slab) -> None:
        if self._watch is not None:
            self._watch.tell(slab.depths, slab.residual, slab.answer)

    def _on_slab(self, at_once: bool) -> OnSlab:
        def on_slab(depths: range, residual: Tensor, asked: Routing | None) -> None:
            number = len(self._slabs)
            if number == len(self._answers):  # page-locked memory cannot be had while recording
                self._answers.append(
                    None if asked is None else Routing(*(page_locked(*t.shape, dtype=t.dtype) for t in asked))
                )
            answer = self._answers[number]
            if asked is not None and answer is not None:
                for there, here in zip(asked, answer, strict=True):
                    here.copy_(there, non_blocking=True)
            slab = Slab(depths, residual, asked, answer, self._recorder.new_event())
            self._slabs.append(slab)
            if at_once:
                self._recorder.note(lambda: self._tell(slab))
            else:
                self._recorder.split(slab.arrived.record)

        return on_slab
