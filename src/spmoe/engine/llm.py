"""The Python interface: `LLM`, `Generation` and `Completion`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from spmoe import types
from spmoe.config import EngineConfig, SamplingParams
from spmoe.engine.build import build
from spmoe.engine.engine import Engine
from spmoe.engine.stats import Stats
from spmoe.engine.text import TextStream
from spmoe.errors import BudgetError, PromptError, SpmoeError, UsageError, reason
from spmoe.models.shipped import shipped_pair

if TYPE_CHECKING:
    from spmoe.backends.cuda_memory import HostStore

Prompt = str | Sequence[int]
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of one prompt."""

    text: str
    token_ids: list[int]  # generated tokens, with the final EOS
    finish_reason: str  # "stop", "length" or "interrupted"
    stats: Stats

    @property
    def usage(self) -> dict[str, int]:
        """Token counts, under the names of OpenAI's API."""
        prompt, output = self.stats.prompt_tokens, self.stats.output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "stats": self.stats.to_dict(),
        }


class LLM:
    """An MoE model whose experts are loaded on demand, with an optional draft. A context manager; else call `close`.

    Without a model, the small pair that ships with the package runs. Options are those of `EngineConfig`. `store`:
    experts that a closed engine has left in host memory; see `spmoe.engine.build.build`.
    """

    def __init__(
        self, model: str | None = None, draft: str | None = "auto", *, store: HostStore | None = None, **options: Any
    ) -> None:
        config = EngineConfig.make(**with_default_pair({"model": model, "draft": draft, **options}))
        self.engine: Engine = build(config, store)
        self._lock = threading.Lock()
        self._next_id = 0
        self._ended: deque[types.Sequence] = deque()  # their KV caches are to be released
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def notices(self) -> list[str]:
        """Differences between the options and the running engine, and their reasons."""
        return self.engine.notices

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Complete each prompt, one after the other. A prompt is text or token ids."""
        single = isinstance(prompts, str) or not prompts or isinstance(prompts[0], int)
        batch: Any = [prompts] if single else prompts
        generations = [self.stream(prompt, params) for prompt in batch]  # checks every prompt before any runs
        return [generation.run() for generation in generations]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Return a completion to iterate over, which yields text as it is generated."""
        return Generation(self, self._encode(prompt), params or SamplingParams())

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation of `{"role": ..., "content": ...}` messages."""
        return self.stream_chat(messages, params).run()

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Generation:
        """Return an answer to a conversation, to iterate over."""
        tokenizer = self._tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(f"{self.engine.config.model} has no chat template; use `spmoe run` or LLM.generate")
        try:
            ids = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # templates raise their own errors through jinja
            raise PromptError(
                f"the chat template of {self.engine.config.model} rejects these messages ({reason(error)}); change "
                "them, or use `spmoe run` or LLM.generate"
            ) from error
        return self.stream(ids, params)

    def close(self) -> None:
        """Release slots, threads and files. Idempotent."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def _tokenizer(self) -> Any:
        if self.engine.parts.tokenizer is None:
            raise UsageError(
                f"{self.engine.config.model} ships no tokenizer; add its tokenizer.json, or give LLM.generate token ids"
            )
        return self.engine.parts.tokenizer

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty; give at least one character")
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise PromptError("the prompt is not text: it has bytes that are not UTF-8; convert it to UTF-8")
            ids: list[int] = self._tokenizer()(prompt)["input_ids"]
        else:
            ids = list(prompt)
        limit, vocabulary = self.engine.parts.max_model_len, self.engine.target.vocab_size
        if not ids:
            raise PromptError("the prompt is empty; give at least one token")
        if len(ids) >= limit:
            raise PromptError(f"the prompt has {len(ids)} tokens but the context holds {limit}; shorten the prompt")
        if not all(isinstance(i, int) and 0 <= i < vocabulary for i in ids):
            raise PromptError(f"the prompt has token ids outside the model's vocabulary of {vocabulary}; remove them")
        return ids

    def _new_sequence(self, prompt: list[int], params: SamplingParams, max_new_tokens: int) -> types.Sequence:
        rng = torch.Generator()
        if params.seed is None:
            rng.seed()
        else:
            rng.manual_seed(params.seed)
        with self._lock:
            self._next_id += 1
            return types.Sequence(self._next_id, list(prompt), len(prompt), params, rng, len(prompt) + max_new_tokens)

    def _step(self, sequence: types.Sequence, max_new_tokens: int) -> list[int]:
        with self._lock:
            if self._closed:
                raise SpmoeError("the engine is closed")
            self._release_ended()
            try:
                return self.engine.step(sequence, max_new_tokens)
            except torch.OutOfMemoryError as error:
                raise BudgetError(
                    f"a context of {sequence.capacity} tokens does not fit in the device's memory beside the weights "
                    "and the experts; lower --expert-memory, or raise --device-memory if it is set"
                ) from error

    def _release(self, sequence: types.Sequence) -> None:
        """Release a finished sequence, without waiting for the lock.

        The garbage collector may call this inside a step of the same thread; then the next step releases it.
        """
        self._ended.append(sequence)
        if self._lock.acquire(blocking=False):
            try:
                self._release_ended()
            finally:
                self._lock.release()

    def _release_ended(self) -> None:
        while self._ended:
            self.engine.loop.release(self._ended.popleft())


class Generation:
    """A completion in progress. Iterate over it for text; `completion` is the result so far, also after Ctrl-C."""

    def __init__(self, llm: LLM, prompt: list[int], params: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.finish_reason = "interrupted"
        self._llm = llm
        self._engine = llm.engine
        self._params = params
        self._max_new_tokens = min(params.max_tokens, self._engine.parts.max_model_len - len(prompt))
        self._prompt = prompt
        self._eos = frozenset() if params.ignore_eos else _eos_tokens(self._engine)
        tokenizer = self._engine.parts.tokenizer
        if tokenizer is None and params.stop_strings:
            raise UsageError(
                f"{self._engine.config.model} ships no tokenizer, so stop strings cannot be found; leave them out"
            )
        self._text = TextStream(tokenizer, prompt, params.stop_strings) if tokenizer is not None else None
        self._started = self._first = self._ended = 0.0
        self._before = self._after_prompt = self._engine.counters.copy()
        self._stop = False
        self._pieces = self._generate()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def stop(self) -> None:
        """End the generation after the current step; callable from a signal handler or another thread."""
        self._stop = True

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called, even if the generation had ended by then."""
        return self._stop

    def run(self) -> Completion:
        """Generate to the end."""
        for _ in self:
            pass
        return self.completion

    @property
    def completion(self) -> Completion:
        """The result so far."""
        engine = self._engine
        stats = Stats(
            prompt_tokens=len(self._prompt),
            output_tokens=len(self.token_ids),
            ttft_seconds=self._first - self._started,
            latency_seconds=self._ended - self._started,
            counters=engine.counters.minus(self._before),
            prompt_counters=self._after_prompt.minus(self._before),
            held_bytes=engine.counters.held_bytes,
            slots=engine.slots,
            peak_slots=engine.experts.pool.peak_slots,
            cutoff_layers=engine.prefetching.cutoff,
            layers=len(engine.target.moe),
            prefetch=engine.loop.policy.name,
            draft_tokens="auto" if engine.loop.draft_length is not None else engine.loop.max_draft_tokens,
            emulated_link_gbps=engine.config.link_gbps,
        )
        return Completion(self._text.text if self._text else "", list(self.token_ids), self.finish_reason, stats)

    def _generate(self) -> Iterator[str]:
        clock = self._engine.parts.clock
        self._engine.learn_cutoff()
        self._before = self._after_prompt = self._engine.counters.copy()
        self._started = self._first = self._ended = clock.now()
        sequence = self._llm._new_sequence(self._prompt, self._params, self._max_new_tokens)
        try:
            while self.finish_reason == "interrupted" and not self._stop:
                new = self._llm._step(sequence, self._max_new_tokens - len(self.token_ids))
                self._ended = clock.now()
                if not self.token_ids:
                    self._first = self._ended
                    self._after_prompt = self._engine.counters.copy()
                for token in new:
                    yield from self._take(token)
                    if self.finish_reason != "interrupted":
                        break
            if rest := self._flush():
                yield rest
        finally:
            self._llm._release(sequence)
            self._flush()

    def _take(self, token: int) -> Iterator[str]:
        """Append one token, yield its text, and set the finish reason if it is the last."""
        self.token_ids.append(token)
        ended = token in self._eos
        if self._text is not None and not ended and (piece := self._text.push(token)):
            yield piece
        if ended or (self._text is not None and self._text.stopped):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason != "interrupted" and (rest := self._flush()):
            yield rest

    def _flush(self) -> str:
        return self._text.finish() if self._text is not None else ""


def with_default_pair(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options; without a model, with the target of the small pair that ships with the package."""
    return {**options, "model": shipped_pair()[0] if options["model"] is None else str(options["model"])}


def _eos_tokens(engine: Engine) -> frozenset[int]:
    declared = engine.target.model.generation_config.eos_token_id
    found = set(declared) if isinstance(declared, (list, tuple)) else {declared}
    if engine.parts.tokenizer is not None:
        found.add(engine.parts.tokenizer.eos_token_id)
    return frozenset(token for token in found if token is not None)
