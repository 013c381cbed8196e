"""One completion on the engine's side: its steps, its text, and its result."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing

from spmoe import types
from spmoe.config import SamplingParams
from spmoe.engine.engine import Engine
from spmoe.engine.outputs import INTERRUPTED, CompletionOutput, Logprob, RequestOutput
from spmoe.engine.scheduler import Scheduler
from spmoe.engine.stats import Stats
from spmoe.engine.text import TextStream
from spmoe.observe.ledger import Counters
from spmoe.verify.grammar import Grammar, GrammarMask
from spmoe.verify.logits import LogitsProcessors
from spmoe.verify.sampling import PositionNoise


class Request:
    """A completion in progress. Only the engine's thread runs its steps; `stop` may be called from anywhere."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        sequence_id: int,
        prompt: list[int],
        params: SamplingParams,
        prompt_text: str | None = None,
        request_id: str = "0",
        index: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason = INTERRUPTED
        self.stopped = False
        self._stop_reason: int | str | None = None
        self._engine = engine
        self._scheduler = scheduler
        self._sequence_id = sequence_id
        self._params = params
        self._max_new_tokens = min(params.max_tokens, engine.parts.max_model_len - len(prompt))
        self._prompt = prompt
        self._prompt_text = prompt_text
        self._request_id = request_id
        self._index = index
        self._grammar = grammar
        self._grammar_mask: GrammarMask | None = None  # of the sequence
        self._eos = frozenset() if params.ignore_eos else eos_tokens(engine)
        self._stop_tokens = frozenset(params.stop_token_ids or ())
        tokenizer = engine.parts.tokenizer
        self._text = (
            TextStream(tokenizer, prompt, params.stop_strings, params.min_tokens) if tokenizer is not None else None
        )
        self._raw_logprobs: list[types.TokenLogprobs] = []  # of the sequence
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._started = self._first = self._ended = 0.0
        self._counters, self._prompt_counters = Counters(), Counters()
        self._speculation: types.Speculation | None = None  # of the sequence
        self._sequence: types.Sequence | None = None  # once the steps have begun

    def stop(self) -> None:
        """End after the current step."""
        self.stopped = True

    def arrive(self) -> None:
        """Count latency from now on; callable from any thread, before the steps begin."""
        self._started = self._first = self._ended = self._engine.parts.clock.now()

    def steps(self) -> Generator[str | None, None, None]:
        """Run the steps; yield the text of each step, which may be empty, and None while others have their turn."""
        clock = self._engine.parts.clock
        self._engine.learn_cutoff()
        sequence = self._sequence = self._new_sequence()
        self._raw_logprobs = sequence.logprobs
        self._speculation = sequence.speculation
        try:
            self._scheduler.register(sequence, self._max_new_tokens)
            yield None
            while self.finish_reason == INTERRUPTED and not self.stopped:
                new = self._scheduler.next_tokens(sequence, self._max_new_tokens - len(self.token_ids))
                if new is None:
                    yield None
                    continue
                self._ended = clock.now()
                if self._grammar_mask is not None:
                    self._grammar_mask.require_within_limits([*self.token_ids, *new])
                if not self.token_ids:
                    self._first = self._ended
                    self._prompt_counters = self._engine.experts.ledger.snapshot(self._counters)
                pieces: list[str] = []
                for token in new:
                    pieces += self._take(token)
                    if self.finish_reason != INTERRUPTED:
                        self._scheduler.remove(sequence)  # now: another request may run the next step
                        break
                yield "".join(pieces)
            yield self._flush()
        finally:
            self._scheduler.remove(sequence)
            self._flush()

    def results(self) -> Iterator[RequestOutput | None]:
        """Run the steps; yield the result so far after each, and None while others have their turn."""
        with closing(self.steps()) as steps:
            for piece in steps:
                yield None if piece is None else self.completion()

    def completion(self) -> RequestOutput:
        """Return the result so far."""
        engine, wanted = self._engine, self._params.logprobs is not None
        stats = Stats(
            prompt_tokens=len(self._prompt),
            output_tokens=len(self.token_ids),
            ttft_seconds=self._first - self._started,
            latency_seconds=self._ended - self._started,
            counters=engine.experts.ledger.snapshot(self._counters),
            prompt_counters=self._prompt_counters,
            held_bytes=engine.experts.ledger.held_bytes,
            slots=engine.slots,
            peak_slots=engine.experts.pool.peak_slots,
            cutoff_layers=engine.prefetching.cutoff,
            layers=len(engine.target.moe),
            prefetch=engine.policy_label,
            draft_tokens="auto" if engine.loop.governor is not None else engine.loop.max_draft_tokens,
            emulated_link_gbps=engine.config.link_gbps,
            speculation=self._speculation,
            random_weights=engine.config.random_weights,
            expert_format=engine.parts.models.expert_format.weight.label,
            lossless=engine.parts.models.lossless,
            cached_tokens=0 if self._sequence is None else self._sequence.cached_tokens,
        )
        output = CompletionOutput(
            self._index,
            self._text.text if self._text else "",
            list(self.token_ids),
            self.finish_reason,
            self._stop_reason,
            self._cumulative_logprob if wanted else None,
            list(self._logprobs) if wanted else None,
        )
        finished = self.finish_reason != INTERRUPTED
        return RequestOutput(self._request_id, self._prompt_text, list(self._prompt), [output], finished, stats)

    def _new_sequence(self) -> types.Sequence:
        params = self._params
        ends = eos_tokens(self._engine) | {*(params.stop_token_ids or ())}
        if self._grammar is not None:
            self._grammar_mask = GrammarMask(self._grammar, ends)
        return types.Sequence(
            self._sequence_id,
            list(self._prompt),
            len(self._prompt),
            params,
            PositionNoise(params.seed),
            capacity=len(self._prompt) + self._max_new_tokens,
            processors=LogitsProcessors.of(
                params, ends, len(self._prompt), self._engine.target.vocab_size, self._grammar_mask
            ),
            counters=self._counters,
            speculation=types.Speculation() if self._engine.loop.governor is not None else None,
        )

    def _take(self, token: int) -> Iterator[str]:
        """Append one token, yield its text, and set the finish reason if it is the last."""
        if self._params.logprobs is not None:
            self._take_logprobs(token, self._raw_logprobs[len(self.token_ids)])
        self.token_ids.append(token)
        ended = token in self._eos or token in self._stop_tokens
        if self._text is not None and not ended and (piece := self._text.push(token)):
            yield piece
        if ended:
            self.finish_reason = "stop"
            self._stop_reason = None if token in self._eos else token
        elif self._text is not None and self._text.stopped:
            self.finish_reason, self._stop_reason = "stop", self._text.stop_reason
        elif len(self.token_ids) >= self._max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason != INTERRUPTED and (rest := self._flush()):
            yield rest

    def _take_logprobs(self, token: int, found: types.TokenLogprobs) -> None:
        self._cumulative_logprob += found.logprob
        ranked = {token: (found.logprob, found.rank)}  # the generated token first
        for rank, (likely, value) in enumerate(found.top.items(), start=1):
            ranked.setdefault(likely, (value, rank))
        tokenizer = self._engine.parts.tokenizer
        self._logprobs.append(
            {
                token_id: Logprob(value, rank, None if tokenizer is None else tokenizer.decode([token_id]))
                for token_id, (value, rank) in ranked.items()
            }
        )

    def _flush(self) -> str:
        return self._text.finish() if self._text is not None else ""


def eos_tokens(engine: Engine) -> frozenset[int]:
    """Return the tokens that end a text, as the model and its tokenizer declare them."""
    declared = engine.target.model.generation_config.eos_token_id
    found = set(declared) if isinstance(declared, (list, tuple)) else {declared}
    if engine.parts.tokenizer is not None:
        found.add(engine.parts.tokenizer.eos_token_id)
    return frozenset(token for token in found if token is not None)
