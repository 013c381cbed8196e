"""Programs: forwards of a few rows, recorded once per row count and replayed with new tokens.

Greedy draft tokens never visit the host on their way from one forward to the next: each program ends by noting its
choice in a chain that the next one reads, and the host looks at predictions and tokens while the device runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spmoe.backends.devices import page_locked
from spmoe.backends.graphs import Recorder
from spmoe.backends.kernels.inputs import chosen, go_on, go_on_from, new_chain, stage, stage_chained
from spmoe.models.attention import device_length
from spmoe.models.kv import KvState
from spmoe.models.taps import OnSlab, Watch
from spmoe.types import Routing

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
        self.chain = new_chain(model.device)
        self._chain_here = page_locked(len(self.chain))
        self._arrived = recorder.new_event()

    def forward(self, tokens: list[int], kv: KvState, keep: int, watch: Watch | None) -> Tensor:
        """Append tokens; the logits are overwritten by the next forward of as many rows."""  # -> [keep, vocabulary]
        program = self.prepare(len(tokens), kv, keep, watch)
        program.launch(watch, tokens, kv.length)
        program.report()
        kv.advance(len(tokens))
        return program.logits

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
        chain = self.prepare_greedy(len(tokens), kv, watches, choices)
        chain[0].launch(watches[0], tokens, kv.length)
        for program, watch in zip(chain[1:], watches[1:], strict=True):
            program.launch(watch)
        self._chain_here.copy_(self.chain, non_blocking=True)
        self._arrived.record()

        def fetch() -> list[int]:
            self.recorder.be_patient(True)
            try:
                for program in chain:
                    program.report()
            finally:
                self.recorder.be_patient(False)
            kv.advance(len(tokens) + len(chain) - 1)
            self.recorder.sit_out(self._arrived)
            return chosen(self._chain_here, len(chain))

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
                stage(self._inbox, owner.chain, ids, positions, length)
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
            return logits

        if key.place:  # else it is rehearsed where the last chain ended, which may be amid what this state holds
            go_on_from(owner.chain, kv.length)
        self._recording, self.logits = self._recorder.record(forward)

    def launch(self, watch: Watch | None, tokens: list[int] | None = None, length: int = 0) -> None:
        """Submit the forward; without tokens, of the one chosen last."""
        self._watch = watch
        if tokens is not None:
            self._inbox.copy_(torch.tensor([*tokens, length]))
        self._recording.replay()

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
