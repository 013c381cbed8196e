"""A network: a transformers causal language model with its taps and KV states, as drafts and targets both are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spmoe.models import attention
from spmoe.models.fusion import fuse
from spmoe.models.hidden_states import HiddenStateHooks, LayerObserver, OnChunk, OnHiddenStates
from spmoe.models.inspection import Inspection, inspect_model
from spmoe.models.kv import KvState, can_rewind
from spmoe.models.longrope import LongRope, rope_for_length
from spmoe.models.rotary import use_tables
from spmoe.verify.greedy import RowArgmax

if TYPE_CHECKING:
    from spmoe.backends.graphs import GraphRecorder
    from spmoe.models.decode_graphs import DecodeGraphs

_SMALLEST_STATE = 1024  # positions; states that programs are recorded over are made larger than needed, and kept


class ModelRunner:
    """Runs tokens through a model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.inspection: Inspection = inspect_model(model)
        self.can_rewind = can_rewind(model.config)
        self.changes = LongRope.of(model)
        text = model.config.get_text_config(decoder=True)
        self.hidden_size: int = text.hidden_size
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self.max_positions: int = text.max_position_embeddings
        self.depth_count = self.inspection.depth_count
        self._hooks = HiddenStateHooks(self.inspection.norms)
        self._graphs: DecodeGraphs | None = None
        self._captured_rows = 0
        self._spare: list[KvState] = []

    @property
    def has_hidden_states(self) -> bool:
        """Whether every layer's residual stream can be seen."""
        return self._hooks.complete

    @property
    def records(self) -> bool:
        """Whether forwards of few rows are recorded and replayed."""
        return self._graphs is not None

    @property
    def spare_states(self) -> list[KvState]:
        """Those that programs are recorded over, of sequences that are over."""
        return self._spare

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that stay in memory; tied ones count once."""
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in self.model.parameters()}
        return sum(storages.values())

    def new_kv(self, capacity: int) -> KvState:
        """Room for the attention state of one sequence."""
        if self._graphs is None:
            return KvState(self.model.config, capacity)
        fitting = [kv for kv in self._spare if kv.capacity >= capacity]
        if len(fitting) < len(self._spare):
            self._graphs.recorder.wait()  # a draft that was begun and is not wanted may still run over one of them
        self._spare = [kv for kv in fitting if kv not in fitting[:1]]
        return fitting[0] if fitting else KvState(self.model.config, state_capacity(capacity))

    def release_kv(self, kv: KvState) -> None:
        """A sequence is over; its state, and what was recorded over it, may serve another."""
        if self._graphs is not None:
            kv.advance(-kv.length)  # every layer, also one that an error left ahead of the others
            self._spare.append(kv)

    def forward(
        self,
        tokens: list[int],
        kv: KvState,
        keep: int,
        on_hidden_states: OnHiddenStates | None = None,
        observer: LayerObserver | None = None,
        total_length: int = 0,
    ) -> Tensor:
        """Append tokens to a sequence; logits of the last `keep` of them. HiddenStateHooks go to a watch or, raw, to `on_hidden_states`.

        The logits of a recorded forward are overwritten by the next one. `reach`: where the text ends that is read in
        one, though these tokens may be only a part of it.
        """
        # -> [keep, vocabulary]
        end = max(total_length, kv.length + len(tokens))
        crosses = self.changes.crosses(kv.length, end)
        if (
            (decode_graphs := self._usable_graphs(len(tokens), kv)) is not None
            and on_hidden_states is None
            and not crosses
        ):
            return decode_graphs.forward(tokens, kv, keep, observer)
        if self._graphs is not None:
            self._graphs.recorder.turns += 1  # what was begun over a state may not be true of it any more
        ids = torch.tensor([tokens], device=self.model.device)
        raw = self._hooks.listen(on_hidden_states) if on_hidden_states is not None else nullcontext()
        whole = rope_for_length(self.model, end) if crosses else nullcontext()
        with torch.inference_mode(), self.observing(observer), raw, whole, attention.without_cudnn():
            output = self.model(input_ids=ids, past_key_values=kv.cache, use_cache=True, logits_to_keep=keep)
        kv.length += len(tokens)
        return output.logits[0]  # type: ignore[no-any-return]

    def observing(
        self, observer: LayerObserver | None, on_layers: OnChunk | None = None
    ) -> AbstractContextManager[None]:
        """While a forward runs inside, ask what a watch asks, and hand chunks and answers on: to it, or elsewhere."""
        if observer is None:
            return self._hooks.listen(None)
        tell = on_layers or observer.tell
        return self._hooks.listen(
            observer.tap(self.depth_count, lambda d, chunk: tell(d, chunk, observer.ask(d, chunk)))
        )

    def greedy(
        self, tokens: list[int], kv: KvState, observers: Sequence[LayerObserver | None], choices: int
    ) -> Callable[[], list[int]]:
        """Begin to append tokens and, one after the other, all but the last of the most likely ones that follow.

        There is one such token, of the first `choices` of the vocabulary, for each watch: who looks on as it is found.
        Called, what is returned finishes it and has them; other forwards before that make it void.
        """
        if (decode_graphs := self._usable_graphs(len(tokens), kv)) is not None:
            return decode_graphs.greedy(tokens, kv, observers, choices)

        def run() -> list[int]:
            found: list[int] = []
            for observer in observers:
                logits = self.forward(found[-1:] or tokens, kv, keep=1, observer=observer)
                found.append(int(logits[-1, :choices].argmax()))
            return found

        return run

    def follow(self, draft: ModelRunner) -> None:
        """What this draft chooses can be appended without the host having seen it. Before anything is recorded."""
        if self._graphs is not None:
            self._graphs.leader = draft._graphs

    def begin(self, token: int, following: int, kv: KvState, observer: LayerObserver | None) -> None:
        """Begin, if that can be, to append a token and as many as the draft that is followed was told to choose.

        `forward` of all of them then goes on with it.
        """
        rows = 1 + following
        if (decode_graphs := self._usable_graphs(rows, kv)) is None or self.changes.crosses(
            kv.length, kv.length + rows
        ):
            return
        decode_graphs.begin(token, following, kv, observer)

    def argmax(self, logits: Tensor) -> RowArgmax | None:
        """The largest of each row and its place, where these are the newest logits and that is on its way already."""
        return self._graphs.argmax(logits) if self._graphs is not None else None

    def prepare(self, rows: int, keep: int, observer: LayerObserver | None) -> None:
        """Have `forward` of so many rows recorded over every state that is there for sequences to come."""
        if self._graphs is not None and rows <= self._captured_rows:
            for kv in self.spare_states:
                self._graphs.prepare(rows, kv, keep, observer)

    def prepare_greedy(self, rows: int, observers: Sequence[LayerObserver | None], choices: int) -> None:
        """The same of `greedy`."""
        if self._graphs is not None and rows <= self._captured_rows:
            for kv in self.spare_states:
                self._graphs.prepare_greedy(rows, kv, observers, choices)

    def capture_forwards(self, recorder: GraphRecorder, rows: int, positions: int) -> str | None:
        """From now on replay forwards of up to this many rows and positions; why that cannot be, if it cannot.

        Fused norms, attention and the recorded forward are tried on a few tokens against the model as it came.
        """
        if not self.can_rewind:
            return "its state is not keys and values alone"
        tokens = [[i % self.vocab_size for i in range(5)], [5 % self.vocab_size, 6 % self.vocab_size]]
        before, expected = self.model.config._attn_implementation, self._try(tokens)
        undo = [fuse(self.model)]
        try:
            from spmoe.models.decode_graphs import DecodeGraphs

            undo.append(use_tables(self.model, min(positions, self.max_positions)))
            attention.use(self.model)
            self._graphs = DecodeGraphs(self.model, self.observing, recorder)
            self._captured_rows = 2
            found = self._try(tokens)
        except Exception as error:  # whatever a model's own code cannot do with it
            reason = str(error) or type(error).__name__
        else:
            if torch.allclose(found.float(), expected.float(), rtol=0, atol=_tolerance(expected)):
                self._captured_rows = rows
                self._spare.clear()
                return None
            reason = "it does not give the same result when recorded"
        self._graphs, self._captured_rows = None, 0
        self.model.set_attn_implementation(before)
        for back in undo:
            back()
        return reason

    def _try(self, batches: list[list[int]]) -> Tensor:
        kv = self.new_kv(64)
        for tokens in batches:
            logits = self.forward(tokens, kv, keep=len(tokens))
        return logits.clone()

    def _usable_graphs(self, rows: int, kv: KvState) -> DecodeGraphs | None:
        """Recorded forwards, if there are such for this many rows and over a state whose memory is there."""
        return self._graphs if kv.length > 0 and rows <= self._captured_rows else None


def state_capacity(needed: int) -> int:
    """Positions of a state that programs are recorded over: enough for most sequences to share one."""
    return max(_SMALLEST_STATE, 1 << (needed - 1).bit_length())


def _tolerance(logits: Tensor) -> float:
    """What two ways to compute the same may differ by: some roundings of the largest logit."""
    return 64 * torch.finfo(logits.dtype).eps * max(1.0, float(logits.float().abs().max()))
