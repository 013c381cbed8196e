"""The Python interface: `LLM` and `Generation`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Self

from spmoe.config import Cutoff, EngineConfig, SamplingParams, Size, StructuredOutputsParams
from spmoe.engine.build import build
from spmoe.engine.engine import Engine
from spmoe.engine.engine_thread import EngineClosed, EngineThread, Job, Sink
from spmoe.engine.outputs import RequestOutput
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
from spmoe.engine.request import Request, eos_tokens
from spmoe.engine.sampling import default_sampling_params
from spmoe.engine.scheduler import Scheduler
from spmoe.engine.stats import Stats
from spmoe.errors import PromptError, UsageError
from spmoe.files import config_directory, model_directory
from spmoe.models.chat_template import render_chat
from spmoe.models.shipped import shipped_pair
from spmoe.models.tokenizer import encode, tokenizer_json
from spmoe.verify.grammar import Grammar, GrammarCompiler

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
        prefetch: str = "auto",
        cutoff: str | int | Cutoff = "auto",
        projection: bool = True,
        eviction: str = "auto",
        expert_memory: str | int | Size | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        expert_format: str = "auto",
        max_model_len: int | None = None,
        prefill_chunk: int = 512,
        max_num_seqs: int = 8,
        enable_prefix_caching: bool = True,
        link_gbps: float | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        device_memory: str | int | Size | None = "auto",
        pin_memory: bool = True,
        verify_experts: Literal["once", "sample", "always"] = "once",
        cpu_experts: int | Literal["off", "auto"] = "off",
        residency_check: Literal["auto", "host", "device"] = "auto",
        batching: bool = True,
        overlap: bool = True,
        enforce_eager: bool = False,
        shape: str | None = None,
        progress: bool = True,
        generation_config: Literal["auto", "none"] = "auto",
        load_format: Literal["auto", "dummy"] = "auto",
        store: HostStore | None = None,
        **unknown: Never,  # so that a misspelt option is answered with the list of options
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "store", "unknown")}
        options = {name: value for name, value in given.items() if value is not None or name not in _CHOSEN}
        config = EngineConfig.make(**with_default_pair({**options, **unknown}))
        find_directory = config_directory if config.random_weights else model_directory
        directory = find_directory(config.model)  # None: a hub id
        defaults = None if directory is None else _sampling_defaults(config, directory)  # before anything is loaded
        self._thread = EngineThread()  # the engine is built, used and closed there
        self._engine_in: list[Engine] = []  # the engine, once it is built
        self._close = weakref.finalize(self, _close, self._thread, self._engine_in)
        self._sequence_ids, self._request_ids = count(1), count()
        try:
            self.engine: Engine = self._thread.call(lambda: _build(config, store, self._thread, self._engine_in))
            defaults = defaults or _sampling_defaults(config, self.engine.parts.models.checkpoint.directory)
        except BaseException:
            self.close()
            raise
        self._scheduler = Scheduler(self.engine, config.max_num_seqs)  # used on the engine's thread alone
        self._grammars = GrammarCompiler(
            partial(tokenizer_json, self.engine.parts.tokenizer), eos_tokens(self.engine), self.engine.target.vocab_size
        )
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

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the engine's thread has ended."""
        return not self._thread.is_open

    @property
    def num_preemptions(self) -> int:
        """Number of times that a sequence was swapped out to host memory because KV memory ran out."""
        return self._scheduler.preemptions

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt, several at a time. There is one SamplingParams for all, or one per prompt.

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
        return self._generate(
            [self.apply_chat_template(conversation) for conversation in conversations], sampling_params
        )

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> Generation:
        """Return an answer to one conversation, to iterate over."""
        return self._stream(self.apply_chat_template(parse_conversation(messages)), sampling_params)

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
        """End all requests; release slots, threads and files. Idempotent."""
        self._close()

    def _generate(self, prompts: list[ParsedPrompt], sampling_params: Any) -> list[RequestOutput]:
        params = parse_params(sampling_params, len(prompts), self._default_params)
        requests = [self.new_request(*one) for one in zip(prompts, params, strict=True)]  # checks all before any runs
        generations = [generation for request in requests for generation in request]
        try:
            for generation in generations:
                generation.start()
            return [combined_output([generation.run() for generation in request]) for request in requests]
        finally:
            for generation in generations:
                generation.cancel()

    def _stream(self, prompt: ParsedPrompt, sampling_params: Any) -> Generation:
        (params,) = parse_params(sampling_params, 1, self._default_params)
        if params.n != 1:
            raise UsageError(f"a stream is one completion, but n is {params.n}; set it to 1, or use LLM.generate")
        return self.new_request(prompt, params)[0]

    def new_request(
        self, prompt: ParsedPrompt, params: SamplingParams, request_id: str | None = None
    ) -> list[Generation]:
        """Check a request and return its `n` completions, not started; seeds count up from the given one."""
        token_ids = self._token_ids(prompt)
        self._check_params(params)
        structured = params.structured_outputs
        grammar = None if structured is None else self.compile_grammar(structured)
        request_id = str(next(self._request_ids)) if request_id is None else request_id
        seeds = [None if params.seed is None else (params.seed + index) % _MAX_SEED for index in range(params.n)]
        return [
            Generation(
                self,
                Request(
                    self.engine,
                    self._scheduler,
                    next(self._sequence_ids),
                    token_ids,
                    replace(params, seed=seed),
                    prompt.text,
                    request_id,
                    index,
                    grammar,
                ),
            )
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
            ids = encode(self.get_tokenizer(), text)
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
                    raise UsageError(
                        f"{name} has token {token}, outside the model's vocabulary of {vocabulary}; remove it"
                    )
        if self.engine.parts.tokenizer is None and params.stop_strings:
            raise UsageError(
                f"{self.engine.config.model} ships no tokenizer, so stop strings cannot be found; leave them out"
            )

    def compile_grammar(self, params: StructuredOutputsParams, name: str | None = None) -> Grammar:
        """Compile a constraint on the output, or return it from the cache; raise UsageError if that cannot be done.

        `name`: what to call the constraint in errors.
        """
        if self.engine.parts.tokenizer is None:
            raise UsageError(f"{self.engine.config.model} ships no tokenizer, which structured_outputs needs; add one")
        return self._grammars.compile(params, name)

    def apply_chat_template(self, messages: list[Message], **options: Any) -> ParsedPrompt:
        """Render a conversation as a prompt; `options`, such as `tools`, go to the model's template."""
        tokenizer, name = self.get_tokenizer(), self.engine.config.model
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(f"{name} has no chat template; use `spmoe run` or LLM.generate")
        if not messages:
            raise PromptError("the conversation is empty; give at least one message")
        text = render_chat(tokenizer, messages, name, **options)
        ids = encode(tokenizer, text, add_special_tokens=False)
        return ParsedPrompt(text, ids)


class Generation:
    """A completion in progress. Iterate over it for text; `completion` is the result so far, also after Ctrl-C.

    It runs on the engine's thread from `start` or the first iteration on, also while nobody iterates. The engine's side
    does not refer to this object, so that a generation ends when it is dropped.
    """

    def __init__(self, llm: LLM, request: Request) -> None:
        self.request = request
        self._llm = llm  # an engine is not closed while a generation is in use
        self._job: Job[str] | None = None
        self._pieces = self._iterate()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    @property
    def token_ids(self) -> list[int]:
        """Tokens so far."""
        return self.request.token_ids

    @property
    def finish_reason(self) -> str:
        """Reason why the generation has ended; "interrupted" until then."""
        return self.request.finish_reason

    def start(self) -> None:
        """Start now instead of with the first iteration."""
        if self._job is None:
            self.request.arrive()
            self._job = self._llm._thread.job(self.request.steps)

    def stop(self) -> None:
        """End the generation after the current step; callable from a signal handler or another thread."""
        self.request.stop()

    def cancel(self) -> None:
        """End the generation after the current step; the text of that step is lost."""
        if self._job is not None:
            self._job.cancel()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called, even if the generation had ended by then."""
        return self.request.stopped

    def send_results(self, sink: Sink) -> Callable[[], None]:
        """Generate to the end, and send the result so far after each step to a sink; return a function that cancels.

        Use this, or iterate, but not both.
        """
        self.request.arrive()
        return self._llm._thread.send_job(self.request.results, sink)

    def run(self) -> RequestOutput:
        """Generate to the end."""
        for _ in self:
            pass
        return self.completion

    @property
    def completion(self) -> RequestOutput:
        """The result so far, between two steps."""
        try:
            return self._llm._thread.call(self.request.completion)
        except EngineClosed:
            return self.request.completion()

    def _iterate(self) -> Iterator[str]:
        """Yield the text; end the request if the iteration ends early."""
        self.start()
        job = self._job
        assert job is not None
        try:
            for piece in job:
                if piece:
                    yield piece
        finally:
            job.cancel()


def _build(config: EngineConfig, store: HostStore | None, thread: EngineThread, engine_in: list[Engine]) -> Engine:
    """Build an engine on its thread; stop early if the caller does not want it any more."""
    engine_in.append(build(config, store, thread.require_open))
    return engine_in[0]


def _close(thread: EngineThread, engine_in: list[Engine]) -> None:
    """Close the engine on its thread, and end the thread."""
    thread.close(lambda: engine_in[0].close() if engine_in else None)


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


def combined_output(parts: list[RequestOutput]) -> RequestOutput:
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
