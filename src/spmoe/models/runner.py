"""The model runner: a transformers causal language model with hidden-state hooks and KV caches.

Drafts and targets are both model runners. A forward runs eagerly, through transformers' own code, or replays a captured
graph if it has few rows and continues a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from spmoe.backends.base import INVARIANT_ROWS
from spmoe.experts.run_ahead import ReadTokens
from spmoe.models import attention
from spmoe.models.fusion import fuse, split_sequences
from spmoe.models.hidden_states import HiddenStateHooks, LayerObserver, OnChunk, OnHiddenStates
from spmoe.models.inspection import Inspection, inspect_model
from spmoe.models.kv import KvState, can_rewind, position_arguments
from spmoe.models.kv_pool import KvPool
from spmoe.models.longrope import LongRope, rope_for_length
from spmoe.models.ragged import BATCH_ROWS, RaggedPart, batch_rows_up_to, positions_depend_on_others, run_ragged
from spmoe.models.rotary import use_tables
from spmoe.verify.greedy import RowArgmax, argmax_rows, read_argmax

if TYPE_CHECKING:
    from spmoe.backends.graphs import CaptureContext
    from spmoe.models.decode_graphs import DecodeGraphs


class ForwardResult(Protocol):
    """Logits of a forward, and their argmax per row."""

    @property
    def logits(self) -> Tensor:
        """Logits [num_logits, vocabulary]; the next replay of the same graph overwrites them."""
        ...

    def argmax(self) -> RowArgmax:
        """Wait for the device; return the argmax of each row of logits."""
        ...


class EagerResult:
    """Result of an eager forward."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def argmax(self) -> RowArgmax:
        return read_argmax(argmax_rows(self.logits))


class ModelRunner:
    """Runs tokens through a model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.inspection: Inspection = inspect_model(model)
        self.can_rewind = can_rewind(model.config)
        self.longrope = LongRope.of(model)
        text = model.config.get_text_config(decoder=True)
        self.hidden_size: int = text.hidden_size
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self.max_positions: int = text.max_position_embeddings
        self.depth_count = self.inspection.depth_count
        self._hooks = HiddenStateHooks(self.inspection.norms)
        self._graphs: DecodeGraphs | None = None
        self._captured_rows = 0
        self.kv_pool = KvPool(model.config, self._invalidate_launched)
        self.batches = False  # whether `run_batch` works; see `try_batching`
        self.batching_failure: str | None = None  # the reason why it does not
        self._joins_kv = False  # whether the model computes with cached keys before attention; see `run_ragged`

    @property
    def has_hidden_states(self) -> bool:
        """Whether every layer's residual stream can be observed."""
        return self._hooks.complete

    @property
    def captures(self) -> bool:
        """Whether forwards of few rows are captured and replayed."""
        return self._graphs is not None

    @property
    def reads_together(self) -> bool:
        """Whether `read_batch` works, such that no sequence's text depends on the others.

        Products with cached keys of all sequences, joined, would round by the number of rows.
        """
        return self.batches and self._is_invariant and not self._joins_kv and self.inspection.resumes

    @property
    def max_batch_rows(self) -> int:
        """Most rows of several sequences in one forward, such that no sequence's text depends on the others."""
        return BATCH_ROWS[-1] if self._is_invariant else INVARIANT_ROWS

    @property
    def _is_invariant(self) -> bool:
        """Whether no sequence's text depends on the number of rows in a forward.

        Models whose forwards are captured have batch-invariant kernels, and read sequence by sequence. Without these,
        products in 16-bit types round by the number of rows. CPUs in 16-bit types make no promise.
        """
        return self.captures or self.model.device.type == "cpu" or self.model.dtype == torch.float32

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that stay in memory; tied ones count once."""
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in self.model.parameters()}
        return sum(storages.values())

    def new_kv(self, capacity: int, tokens: list[int] | None = None, preferred: int = 0) -> KvState:
        """Return a KV cache for one sequence of up to `capacity` positions; see `KvPool.take`."""
        return self.kv_pool.take(capacity, tokens, preferred)

    def release_kv(self, kv: KvState) -> None:
        """Keep a finished sequence's KV cache for another sequence, or free it."""
        self.kv_pool.give_back(kv)

    @contextmanager
    def temporary_kv(self, capacity: int) -> Iterator[KvState]:
        """Provide a KV cache whose contents nobody needs afterwards."""
        kv = self.new_kv(capacity)
        try:
            yield kv
        finally:
            self.kv_pool.discard(kv)

    @property
    def reuse_failure(self) -> str | None:
        """Reason why no prompt can start from the KV cache of an earlier one; None if it can."""
        if not self.can_rewind:
            return "the model keeps other state than keys and values"
        if positions_depend_on_others(self.model):
            return "positions depend on the length of the prompt"
        return None

    def plan_kv(self, limit: int | None, expected: int, *, reuse_prefixes: bool) -> None:
        """Limit the positions of KV caches; reuse prefixes of earlier sequences, if the model allows it."""
        # captured forwards of models that compute with cached keys before attention do so for the whole arena
        at_once = self._graphs is None or not self._joins_kv
        self.kv_pool.plan(
            limit, expected, reuse_prefixes=reuse_prefixes and self.reuse_failure is None, at_once=at_once
        )

    def _invalidate_launched(self) -> None:
        """Discard what was launched ahead of the host: it used the places that KV caches had."""
        if self._graphs is not None:
            self._graphs.run_ahead.note_launch()

    def forward(
        self,
        tokens: list[int],
        kv: KvState,
        num_logits: int,
        on_hidden_states: OnHiddenStates | None = None,
        observer: LayerObserver | None = None,
        total_length: int = 0,
    ) -> Tensor:
        """Append tokens to a sequence and return the logits of the last `num_logits` of them; see `run`."""
        return self.run(tokens, kv, num_logits, on_hidden_states, observer, total_length).logits

    def run(
        self,
        tokens: list[int],
        kv: KvState,
        num_logits: int,
        on_hidden_states: OnHiddenStates | None = None,
        observer: LayerObserver | None = None,
        total_length: int = 0,
    ) -> ForwardResult:
        """Append tokens to a sequence. Hidden states go to an observer or, raw, to `on_hidden_states`.

        `total_length`: full prompt length if these tokens are only a chunk of it; selects the RoPE variant.
        """
        end = max(total_length, kv.length + len(tokens))
        crosses = self.longrope.crosses(kv.length, end)
        graphs = self._usable_graphs(len(tokens), kv)
        # a prompt is never read by captured forwards: which ones there are depends on K, and their roundings differ
        if graphs is not None and on_hidden_states is None and not crosses and not total_length:
            if num_logits == len(tokens):
                return graphs.forward(tokens, kv, num_logits, observer)
            # it may have any number of rows, and a capture takes longer than an eager forward
            if (result := graphs.forward_if_captured(tokens, kv, num_logits, observer)) is not None:
                return result
        if self._graphs is not None:
            self._graphs.run_ahead.note_launch()
        ids = torch.tensor([tokens], device=self.model.device)
        raw = self._hooks.listen(on_hidden_states) if on_hidden_states is not None else nullcontext()
        rope = rope_for_length(self.model, end) if crosses else nullcontext()
        with torch.inference_mode(), self.observing(observer), raw, rope, attention.without_cudnn():
            output = self.model(
                input_ids=ids,
                past_key_values=kv.cache,
                use_cache=True,
                logits_to_keep=num_logits,
                **position_arguments(self.model, ids, kv.length),
            )
        kv.length += len(tokens)
        return EagerResult(output.logits[0])

    def run_batch(self, parts: Sequence[RaggedPart], observer: LayerObserver | None = None) -> list[ForwardResult]:
        """Append tokens to several sequences in one forward; requires `batches`. Captured if it has few rows."""
        if (graphs := self._usable_batch_graphs(parts)) is not None:
            return list[ForwardResult](graphs.forward_batch(parts, observer))
        return self._run_ragged(parts, observer)

    def read_batch(self, parts: Sequence[RaggedPart], observer: LayerObserver | None) -> list[ForwardResult]:
        """Append the prompts of several sequences in one forward; requires `reads_together`. It is never captured."""
        return self._run_ragged(parts, observer)

    def launch_batch(self, parts: Sequence[RaggedPart], observer: LayerObserver | None) -> None:
        """Launch, if possible, the first graph of a forward of sequences that have no drafts.

        `run_batch` with the same parts then launches only the rest.
        """
        if (graphs := self._usable_batch_graphs(parts)) is not None:
            graphs.launch_batch(parts, observer)

    def _run_ragged(self, parts: Sequence[RaggedPart], observer: LayerObserver | None = None) -> list[ForwardResult]:
        self._invalidate_launched()
        with torch.inference_mode(), self.observing(observer), attention.without_cudnn():
            found = run_ragged(self.model, parts, joins=self._joins_kv)
        return [EagerResult(logits) for logits in found]

    def try_batching(self) -> None:
        """Find out whether sequences can share a forward: `batches`, or `batching_failure` says why not.

        Logits of two sequences together are compared with those of each sequence alone.
        """
        if not self.can_rewind:
            self.batching_failure = "the model keeps other state than keys and values"
        elif positions_depend_on_others(self.model):
            self.batching_failure = "positions depend on the longest sequence of a forward"
        else:
            self.batching_failure = self._try_ragged()
            if self.batching_failure is None and self._graphs is not None:
                self.batching_failure = self._compare_batch(self.run_batch)
                self._graphs.clear()
        self.batches = self.batching_failure is None

    def stop_batching(self, failure: str) -> None:
        """Let no forward run several sequences from now on, for this reason."""
        self.batches, self.batching_failure = False, failure

    def _try_ragged(self) -> str | None:
        """Find out whether eager forwards of several sequences work, and whether they need cached keys joined."""
        self._joins_kv = False
        if self._compare_batch(self._run_ragged) is None:
            return None
        self._joins_kv = True
        return self._compare_batch(self._run_ragged)

    def _compare_batch(self, run_batch: Callable[[Sequence[RaggedPart]], list[ForwardResult]]) -> str | None:
        """Compare the logits of two sequences of unequal lengths, together and alone; return why they differ."""

        def text(start: int, count: int) -> list[int]:
            return [number % self.vocab_size for number in range(start, start + count)]

        prompts, new = [text(3, 6), text(20, 3)], [text(9, 2), text(23, 3)]
        try:
            with ExitStack() as stack:
                states = [stack.enter_context(self.temporary_kv(64)) for _ in prompts]
                for prompt, kv in zip(prompts, states, strict=True):
                    self.forward(prompt, kv, 1)
                parts = [RaggedPart(tokens, kv, len(tokens)) for tokens, kv in zip(new, states, strict=True)]
                together = torch.cat([result.logits for result in run_batch(parts)])
                for prompt, kv in zip(prompts, states, strict=True):
                    kv.rewind(len(prompt))
                alone = [self.forward(tokens, kv, len(tokens)).clone() for tokens, kv in zip(new, states, strict=True)]
        except Exception as error:  # whatever a model's own code raises
            return str(error) or type(error).__name__
        expected = torch.cat(alone)
        if not torch.allclose(together.float(), expected.float(), rtol=0, atol=_tolerance(expected)):
            return "several sequences at once do not give the result of each alone"
        return None

    def observing(
        self, observer: LayerObserver | None, on_chunk: OnChunk | None = None
    ) -> AbstractContextManager[None]:
        """Show a forward's hidden states, and the routing predicted from them, to the observer or to `on_chunk`."""
        if observer is None:
            return self._hooks.listen(None)
        show = on_chunk or observer.show
        listener = observer.collect(
            self.depth_count, lambda depths, states: show(depths, states, observer.predict(depths, states))
        )
        return self._hooks.listen(listener)

    def greedy_launcher(
        self, tokens: list[int], kv: KvState, observers: Sequence[LayerObserver | None], choices: int
    ) -> Callable[[], ReadTokens] | None:
        """Return a callable that launches n greedy decode steps after these tokens; None if they are not captured.

        There is one step per observer. Each token is the argmax of the first `choices` logits.
        """
        if (graphs := self._usable_graphs(len(tokens), kv)) is None:
            return None
        return lambda: graphs.launch_greedy(tokens, kv, observers, choices)

    def launch_verify(self, token: int, k: int, kv: KvState, observer: LayerObserver | None) -> None:
        """Launch, if possible, the first graph of the forward of a token and of the launched draft's K tokens.

        `run` with all of these tokens then launches only the rest.
        """
        rows = 1 + k
        crosses = self.longrope.crosses(kv.length, kv.length + rows)
        if not crosses and (graphs := self._usable_graphs(rows, kv)) is not None:
            graphs.launch_verify(token, k, kv, observer)

    def prepare(self, rows: int, num_logits: int, observer: LayerObserver | None) -> None:
        """Capture the forward of `rows` tokens."""
        if self._graphs is not None and rows <= self._captured_rows:
            self._graphs.prepare(rows, num_logits, observer)

    def prepare_batches(self, most_rows: int, observer: LayerObserver | None) -> None:
        """Capture the forwards of several sequences with up to so many rows."""
        if self._graphs is not None and self.batches:
            for rows in batch_rows_up_to(most_rows):
                self._graphs.prepare_batch(rows, observer)

    def prepare_greedy(self, rows: int, observers: Sequence[LayerObserver | None], choices: int) -> None:
        """Capture the forwards of a greedy draft."""
        if self._graphs is not None and rows <= self._captured_rows:
            self._graphs.prepare_greedy(rows, observers, choices)

    def capture_forwards(self, capture: CaptureContext, rows: int) -> str | None:
        """Replay forwards of up to this many rows and positions from now on; return the reason if that is impossible.

        Fused norms, attention and the captured forward are compared with the unchanged model on a few tokens.
        """
        if not self.can_rewind:
            return "it keeps other state than keys and values"
        tokens = [[i % self.vocab_size for i in range(5)], [5 % self.vocab_size, 6 % self.vocab_size]]
        before, expected = self.model.config._attn_implementation, self._try(tokens)
        undo = [fuse(self.model), split_sequences(self.model)]
        try:
            from spmoe.models.decode_graphs import DecodeGraphs

            undo.append(use_tables(self.model, min(capture.max_positions, self.max_positions)))
            attention.use(self.model)
            self._graphs = DecodeGraphs(self.model, self.observing, self.kv_pool, capture)
            self._captured_rows = 2
            found = self._try(tokens)
        except Exception as error:  # whatever a model's own code raises during capture
            reason = str(error) or type(error).__name__
        else:
            if torch.allclose(found.float(), expected.float(), rtol=0, atol=_tolerance(expected)):
                self._try_ragged()  # for `plan_kv`
                self._captured_rows = rows
                self._graphs.clear()
                return None
            reason = "it does not give the same result when captured"
        self._graphs, self._captured_rows = None, 0
        self.model.set_attn_implementation(before)
        for restore in undo:
            restore()
        return reason

    def _try(self, chunks: list[list[int]]) -> Tensor:
        with self.temporary_kv(64) as kv:
            for tokens in chunks:
                logits = self.forward(tokens, kv, len(tokens))
            return logits.clone()

    def _usable_graphs(self, rows: int, kv: KvState) -> DecodeGraphs | None:
        """Return the captured forwards if they can run this many rows; None also while the KV cache is empty."""
        return self._graphs if kv.length > 0 and rows <= self._captured_rows else None

    def _usable_batch_graphs(self, parts: Sequence[RaggedPart]) -> DecodeGraphs | None:
        """Return the captured forwards if they can run these sequences together."""
        rows = sum(len(part.tokens) for part in parts)
        return self._graphs if rows <= BATCH_ROWS[-1] and all(part.kv.length for part in parts) else None


def _tolerance(logits: Tensor) -> float:
    """Return the allowed difference between two computations of the same logits: some roundings of the largest."""
    return 64 * torch.finfo(logits.dtype).eps * max(1.0, float(logits.float().abs().max()))
