"""The Python interface: `LLM` and `Generation`."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Self

import torch

from spmoe import types
from spmoe.config import Cutoff, EngineConfig, SamplingParams, Size
from spmoe.engine.build import build
from spmoe.engine.engine import Engine
from spmoe.engine.outputs import INTERRUPTED, CompletionOutput, Logprob, RequestOutput
from spmoe.engine.prompts import (
    Message,
    ParsedPrompt,
    Prompt,
    parse_conversation,
    parse_conversations,
    parse_params,
    parse_prompt,
    parse_prompts,
)
from spmoe.engine.sampling import default_sampling_params
from spmoe.engine.stats import Stats
from spmoe.engine.text import TextStream
from spmoe.errors import BudgetError, PromptError, SpmoeError, UsageError, reason
from spmoe.files import model_directory
from spmoe.models.shipped import shipped_pair
from spmoe.observe.ledger import Counters
from spmoe.verify.logits import LogitsProcessors

if TYPE_CHECKING:
    from spmoe.backends.cuda_memory import HostStore

_MAX_SEED = 2**63
_CHOSEN = ("num_speculative_tokens", "expert_memory", "device_memory")  # None: EngineConfig chooses the default


class LLM:
    """An MoE model whose experts are loaded on demand, with an optional draft. A context manager; else call `close`.

    Without a model, the small pair that ships with the package runs. Options are those of `EngineConfig`, which
    documents them and their defaults. `store`: experts that a closed engine has left in host memory; see
    `spmoe.engine.build.build`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        draft: str | os.PathLike[str] | None = "auto",
        *,
        num_speculative_tokens: int | Literal["auto"] | None = None,
        prefetch: str = "draft-gate",
        cutoff: str | int | Cutoff = "auto",
        projection: bool = True,
        eviction: str = "auto",
        expert_memory: str | int | Size | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        max_model_len: int | None = None,
        prefill_chunk: int = 512,
        link_gbps: float | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        device_memory: str | int | Size | None = "auto",
        pin_memory: bool = True,
        batching: bool = True,
        overlap: bool = True,
        enforce_eager: bool = False,
        shape: str | None = None,
        progress: bool = True,
        generation_config: Literal["auto", "none"] = "auto",
        store: HostStore | None = None,
        **unknown: Never,  # so that a misspelt option is answered with the list of options
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "store", "unknown")}
        options = {name: value for name, value in given.items() if value is not None or name not in _CHOSEN}
        config = EngineConfig.make(**with_default_pair({**options, **unknown}))
        directory = model_directory(config.model)  # None: a hub id
        defaults = None if directory is None else _sampling_defaults(config, directory)  # before anything is loaded
        self.engine: Engine = build(config, store)
        self._lock = threading.Lock()
        self._sequence_ids, self._request_ids = count(1), count()
        self._ended: deque[types.Sequence] = deque()  # their KV caches are to be released
        self._closed = False
        try:
            defaults = defaults or _sampling_defaults(config, self.engine.parts.models.checkpoint.directory)
        except BaseException:
            self.close()
            raise
        self._default_params, notices = defaults
        self.engine.notices.extend(notices)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def notices(self) -> list[str]:
        """Differences between the options and the running engine, and their reasons."""
        return self.engine.notices

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt, one after the other. There is one SamplingParams for all, or one per prompt.

        A prompt is text, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`.
        """
        return self._generate(parse_prompts(prompts), sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generation:
        """Return a completion to iterate over, which yields text as it is generated."""
        return self._stream(parse_prompt(prompt), sampling_params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation of `{"role": ..., "content": ...}` messages, or each of a list of conversations."""
        conversations = parse_conversations(messages)
        return self._generate([self._apply_chat_template(one) for one in conversations], sampling_params)

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> Generation:
        """Return an answer to one conversation, to iterate over."""
        return self._stream(self._apply_chat_template(parse_conversation(messages)), sampling_params)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, of `transformers`; raise UsageError if the model ships none."""
        if self.engine.parts.tokenizer is None:
            raise UsageError(
                f"{self.engine.config.model} ships no tokenizer; add its tokenizer.json, or give LLM.generate token ids"
            )
        return self.engine.parts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that give none: those of generation_config.json, unless that is off."""
        return self._default_params

    def close(self) -> None:
        """Release slots, threads and files. Idempotent."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def _generate(self, prompts: list[ParsedPrompt], sampling_params: Any) -> list[RequestOutput]:
        params = parse_params(sampling_params, len(prompts), self._default_params)
        requests = [self._request(*one) for one in zip(prompts, params, strict=True)]  # checks all before any runs
        return [_combined([generation.run() for generation in request]) for request in requests]

    def _stream(self, prompt: ParsedPrompt, sampling_params: Any) -> Generation:
        (params,) = parse_params(sampling_params, 1, self._default_params)
        if params.n != 1:
            raise UsageError(f"a stream is one completion, but n is {params.n}; set it to 1, or use LLM.generate")
        return self._request(prompt, params)[0]

    def _request(self, prompt: ParsedPrompt, params: SamplingParams) -> list[Generation]:
        """Check a request and return its `n` completions, not started; seeds count up from the given one."""
        token_ids = self._token_ids(prompt)
        self._check_params(params)
        request_id = str(next(self._request_ids))
        seeds = [None if params.seed is None else (params.seed + index) % _MAX_SEED for index in range(params.n)]
        return [
            Generation(self, token_ids, replace(params, seed=seed), prompt.text, request_id, index)
            for index, seed in enumerate(seeds)
        ]

    def _token_ids(self, prompt: ParsedPrompt) -> list[int]:
        if prompt.token_ids is not None:
            ids = prompt.token_ids
        else:
            text = prompt.text or ""
            if not text:
                raise PromptError("the prompt is empty; give at least one character")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise PromptError("the prompt is not text: it has bytes that are not UTF-8; convert it to UTF-8")
            ids = self.get_tokenizer()(text)["input_ids"]
        limit, vocabulary = self.engine.parts.max_model_len, self.engine.target.vocab_size
        if not ids:
            raise PromptError("the prompt is empty; give at least one token")
        if len(ids) >= limit:
            raise PromptError(f"the prompt has {len(ids)} tokens but the context holds {limit}; shorten the prompt")
        if not all(0 <= i < vocabulary for i in ids):
            raise PromptError(f"the prompt has token ids outside the model's vocabulary of {vocabulary}; remove them")
        return list(ids)

    def _check_params(self, params: SamplingParams) -> None:
        vocabulary = self.engine.target.vocab_size
        for name, tokens in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids or ())):
            for token in tokens:
                if token >= vocabulary:
                    raise UsageError(f"{name} has token {token}, outside the model's vocabulary of {vocabulary}")
        if self.engine.parts.tokenizer is None and params.stop_strings:
            raise UsageError(
                f"{self.engine.config.model} ships no tokenizer, so stop strings cannot be found; leave them out"
            )

    def _apply_chat_template(self, messages: list[Message]) -> ParsedPrompt:
        tokenizer, name = self.get_tokenizer(), self.engine.config.model
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(f"{name} has no chat template; use `spmoe run` or LLM.generate")
        if not messages:
            raise PromptError("the conversation is empty; give at least one message")
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as error:  # templates raise their own errors through jinja
            raise PromptError(
                f"the chat template of {name} rejects these messages ({reason(error)}); change them, or use "
                "`spmoe run` or LLM.generate"
            ) from error
        return ParsedPrompt(text, ids)

    def _new_sequence(
        self, prompt: list[int], params: SamplingParams, max_new_tokens: int, counters: Counters | None = None
    ) -> types.Sequence:
        rng = torch.Generator()
        if params.seed is None:
            rng.seed()
        else:
            rng.manual_seed(params.seed)
        ends = eos_tokens(self.engine) | {*(params.stop_token_ids or ())}
        return types.Sequence(
            next(self._sequence_ids),
            list(prompt),
            len(prompt),
            params,
            rng,
            capacity=len(prompt) + max_new_tokens,
            processors=LogitsProcessors.of(params, ends, len(prompt), self.engine.target.vocab_size),
            counters=counters or Counters(),
        )

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
                    "and the experts; lower --max-model-len or --expert-memory"
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

    def __init__(
        self,
        llm: LLM,
        prompt: list[int],
        params: SamplingParams,
        prompt_text: str | None = None,
        request_id: str = "0",
        index: int = 0,
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason = INTERRUPTED
        self._stop_reason: int | str | None = None
        self._llm = llm
        self._engine = llm.engine
        self._params = params
        self._max_new_tokens = min(params.max_tokens, self._engine.parts.max_model_len - len(prompt))
        self._prompt = prompt
        self._prompt_text = prompt_text
        self._request_id = request_id
        self._index = index
        self._eos = frozenset() if params.ignore_eos else eos_tokens(self._engine)
        self._stop_tokens = frozenset(params.stop_token_ids or ())
        tokenizer = self._engine.parts.tokenizer
        self._text = (
            TextStream(tokenizer, prompt, params.stop_strings, params.min_tokens) if tokenizer is not None else None
        )
        self._raw_logprobs: list[types.TokenLogprobs] = []  # of the sequence
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._started = self._first = self._ended = 0.0
        self._counters, self._prompt_counters = Counters(), Counters()
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

    def run(self) -> RequestOutput:
        """Generate to the end."""
        for _ in self:
            pass
        return self.completion

    @property
    def completion(self) -> RequestOutput:
        """The result so far."""
        engine, wanted = self._engine, self._params.logprobs is not None
        stats = Stats(
            prompt_tokens=len(self._prompt),
            output_tokens=len(self.token_ids),
            ttft_seconds=self._first - self._started,
            latency_seconds=self._ended - self._started,
            counters=engine.experts.ledger.snapshot(self._counters),
            prompt_counters=self._prompt_counters,
            held_bytes=engine.counters.held_bytes,
            slots=engine.slots,
            peak_slots=engine.experts.pool.peak_slots,
            cutoff_layers=engine.prefetching.cutoff,
            layers=len(engine.target.moe),
            prefetch=engine.loop.policy.name,
            draft_tokens="auto" if engine.loop.draft_length is not None else engine.loop.max_draft_tokens,
            emulated_link_gbps=engine.config.link_gbps,
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

    def _generate(self) -> Iterator[str]:
        clock = self._engine.parts.clock
        self._engine.learn_cutoff()
        self._started = self._first = self._ended = clock.now()
        sequence = self._llm._new_sequence(self._prompt, self._params, self._max_new_tokens, self._counters)
        self._raw_logprobs = sequence.logprobs
        try:
            while self.finish_reason == INTERRUPTED and not self._stop:
                new = self._llm._step(sequence, self._max_new_tokens - len(self.token_ids))
                self._ended = clock.now()
                if not self.token_ids:
                    self._first = self._ended
                    self._prompt_counters = self._engine.experts.ledger.snapshot(self._counters)
                for token in new:
                    yield from self._take(token)
                    if self.finish_reason != INTERRUPTED:
                        break
            if rest := self._flush():
                yield rest
        finally:
            self._llm._release(sequence)
            self._flush()

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
        ranked = {other: (value, rank) for rank, (other, value) in enumerate(found.top.items(), start=1)}
        ranked = {token: (found.logprob, found.rank)} | {one: ranked[one] for one in ranked if one != token}
        tokenizer = self._engine.parts.tokenizer
        decoded = {one: None if tokenizer is None else tokenizer.decode([one]) for one in ranked}
        self._logprobs.append({one: Logprob(value, rank, decoded[one]) for one, (value, rank) in ranked.items()})

    def _flush(self) -> str:
        return self._text.finish() if self._text is not None else ""


def _sampling_defaults(config: EngineConfig, directory: Path) -> tuple[SamplingParams, list[str]]:
    """Return the parameters of requests that give none, and notices."""
    if config.generation_config == "none":
        return SamplingParams(), []
    params, unsupported = default_sampling_params(directory)
    if not unsupported:
        return params, []
    names = ", ".join(unsupported)
    return params, [
        f"generation_config.json of {config.model} sets {names}, which spmoe does not support; the output is that of "
        "the model without it"
    ]


def _combined(parts: list[RequestOutput]) -> RequestOutput:
    """Return the completions of one prompt as one result."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        outputs=[output for part in parts for output in part.outputs],
        finished=all(part.finished for part in parts),
        stats=Stats.combined([part.stats for part in parts]),
    )


def with_default_pair(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options; without a model, with the target of the small pair that ships with the package."""
    return options if options["model"] is not None else {**options, "model": shipped_pair()[0]}


def eos_tokens(engine: Engine) -> frozenset[int]:
    """Return the tokens that end a text, as the model and its tokenizer declare them."""
    declared = engine.target.model.generation_config.eos_token_id
    found = set(declared) if isinstance(declared, (list, tuple)) else {declared}
    if engine.parts.tokenizer is not None:
        found.add(engine.parts.tokenizer.eos_token_id)
    return frozenset(token for token in found if token is not None)
