"""Shared parts of the endpoints: admission of requests, preparation on a thread, results, and the end of the server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from spmoe.config import DEFAULT_MAX_TOKENS, SamplingParams
from spmoe.engine.async_llm import AsyncLLM
from spmoe.engine.engine_thread import EngineClosed
from spmoe.engine.outputs import RequestOutput
from spmoe.engine.prompts import ParsedPrompt
from spmoe.engine.stats import Stats
from spmoe.errors import PromptError, SpmoeError, UsageError, reason
from spmoe.models.chat_template import render_messages
from spmoe.models.tokenizer import encode
from spmoe.serve.config import ServeConfig
from spmoe.serve.http import RETRY_AFTER_SECONDS, SHUTTING_DOWN, ApiError
from spmoe.serve.metrics import Metrics
from spmoe.serve.protocol import ChatMessage, Constraint, GenerationRequest, Tool, bad_request
from spmoe.serve.tools import ReplyParser, make_reply_parser

T = TypeVar("T")
log = logging.getLogger(__name__)

_MAX_SEED = 2**63


class Job(Protocol):
    """A request to generate text, checked as far as it can be without tokenizing."""

    id: str
    params: SamplingParams
    num_prompts: int
    prompt_field: str  # of the request

    def tokenize(self) -> list[ParsedPrompt]:
        """Return the prompts with their token ids."""
        ...


class Service:
    """An engine as the endpoints use it. Methods run on one event loop."""

    def __init__(self, llm: AsyncLLM, config: ServeConfig) -> None:
        self.llm = llm
        self.config = config
        self.created = int(time.time())
        self.metrics = Metrics(llm, config.served_model_names[0], lambda: self.waiting)
        self.draining = asyncio.Event()  # the server ends: requests under way go on, new ones are refused
        self._accepted = 0  # completions that are not finished
        self._active: set[str] = set()  # ids of requests in the engine
        self._submissions: dict[Submission, None] = {}  # not closed, in order of arrival
        self._notices = len(llm.llm.notices)  # that are known: the first ones are printed before the server starts
        # Tokenizers and templates take long for long prompts, so that they do not run on the event loop. One thread:
        # tokenizers are not made for several.
        self._executor = ThreadPoolExecutor(1, "spmoe-serve")
        longest = None if self.tokenizer is None else max(map(len, self.tokenizer.get_vocab()))
        self._max_characters = None if longest is None else longest * self.max_model_len
        if config.tool_call_parser is not None:
            self.reply_parser([])  # refuses a tokenizer that the parser cannot work with

    @property
    def model_name(self) -> str:
        """Name of the model in responses."""
        return self.config.served_model_names[0]

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model; None if it ships none."""
        return self.llm.llm.engine.parts.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return self.llm.llm.engine.parts.max_model_len

    @property
    def waiting(self) -> int:
        """Completions that wait for their first step."""
        return max(0, self._accepted - self.llm.load.running)

    def require_model(self, name: str | None) -> None:
        """Raise ApiError unless this is a name of the served model; None is."""
        if name is not None and name not in self.config.served_model_names:
            names = ", ".join(self.config.served_model_names)
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {names}",
                param="model",
                code="model_not_found",
            )

    # ---- work that is not for the event loop

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run a function on the thread for prompts; a refusal of the engine becomes an ApiError."""
        with self.refusals():
            return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn refusals of the engine into ApiErrors."""
        try:
            yield
        except SpmoeError as error:
            raise engine_error(error) if self.llm.failure is not None else bad_request(error) from error

    def tokenize(self, text: str, field: str, **options: Any) -> list[int]:
        """Return the token ids of a text; `field`: where the request has it."""
        self._require_fitting(len(text), field)
        return encode(self.llm.llm.get_tokenizer(), text, **options)

    def _require_fitting(self, characters: int, field: str) -> None:
        """Raise ApiError if a text exceeds the context even with the longest tokens: tokenizing it takes seconds."""
        if self._max_characters is not None and characters > self._max_characters:
            raise self._too_long(f"at most {self._max_characters} characters", f"{characters} characters", field)

    def _too_long(self, limit: str, size: str, field: str) -> ApiError:
        """Return the error of a prompt that exceeds the context; clients know it by its code or its first words."""
        return ApiError(
            400,
            f"This model's maximum context length is {limit}, but the {field} resulted in {size}; reduce the length of "
            f"the {field}",
            param=field,
            code="context_length_exceeded",
        )

    def tokenize_prompt(self, prompt: ParsedPrompt) -> ParsedPrompt:
        """Return a prompt with its token ids."""
        if prompt.token_ids is not None or not prompt.text:
            return prompt
        return replace(prompt, token_ids=self.tokenize(prompt.text, "prompt"))

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        *,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> ParsedPrompt:
        """Return a conversation as a prompt; raise UsageError for parts that the chat template does not read."""
        template = self.chat_template()
        if not template:
            raise UsageError("messages need a chat template, which the model lacks; use /v1/completions")
        self._require_fitting(sum(len(message.content or "") for message in messages), "messages")
        if tools:
            if self.config.tool_call_parser is None:
                raise UsageError(
                    "tools need a server that was started with --tool-call-parser hermes or gpt-oss; leave tools out"
                )
            self.require_in_template("tools", "tools")
            options["tools"] = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
        rendered = [_template_message(message, template) for message in messages]
        try:
            text = render_messages(self.llm.llm.get_tokenizer(), rendered, "the model's chat template", **options)
        except PromptError as error:
            raise ApiError(400, str(error), param="messages") from error
        return ParsedPrompt(text, self.tokenize(text, "messages", add_special_tokens=add_special_tokens))

    def require_in_template(self, variable: str, field: str) -> None:
        """Raise UsageError if the chat template does not read a variable; `field`: where the request has it."""
        if variable not in self.chat_template():
            raise UsageError(f"{field} has no effect: the model's chat template does not read it; leave it out")

    def check_constraint(self, constraint: Constraint | None) -> None:
        """Compile a constraint on the output, which the engine then has in its cache; an error names the field."""
        if constraint is not None:
            self.llm.llm.compile_grammar(*constraint)

    def chat_template(self) -> str:
        """Return the source of the chat template; empty if there is none."""
        return str(getattr(self.tokenizer, "chat_template", None) or "")

    def reply_parser(self, tools: Sequence[Any]) -> ReplyParser:
        """Return a parser for one answer."""
        return make_reply_parser(self.config.tool_call_parser, self.tokenizer, bool(tools))

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters of requests that give none."""
        return self.llm.llm.get_default_sampling_params()

    def default_max_tokens(self, otherwise: int) -> int:
        """Return the model's own `max_tokens`, or another number if it declares none."""
        declared = self.default_params().max_tokens
        return declared if declared != DEFAULT_MAX_TOKENS else otherwise

    # ---- requests

    async def submit(self, job: Job) -> Submission:
        """Admit a request, tokenize its prompts on the thread for prompts, check it, and return it, not started.

        Every completion is a request of its own to the engine: they share its steps.
        """
        if self.draining.is_set():
            raise ApiError(503, SHUTTING_DOWN)
        if (failure := self.llm.failure) is not None:
            raise ApiError(503, failure)
        completions = job.num_prompts * job.params.n
        self._require_room(completions)
        self._accepted += completions
        submission = Submission(self, job.id, job.params.n, completions)
        self._submissions[submission] = None
        try:
            await self.in_thread(lambda: submission.create(self._tokenize_job(job), job.params))
        except BaseException:
            await submission.close()
            raise
        return submission

    def _tokenize_job(self, job: Job) -> list[ParsedPrompt]:
        """Return the prompts of a request; raise ApiError if one of them exceeds the context."""
        prompts, limit = job.tokenize(), self.max_model_len
        longest = max(len(prompt.token_ids or ()) for prompt in prompts)
        if longest >= limit:
            raise self._too_long(f"{limit} tokens", f"{longest} tokens", job.prompt_field)
        return prompts

    def _require_room(self, completions: int) -> None:
        limit = self.config.max_queued_requests
        if completions > limit:
            raise ApiError(400, f"a request may have at most {limit} completions on this server, not {completions}")
        if self.waiting + completions > limit:
            raise ApiError(
                429,
                f"the queue is full: {self.waiting} requests wait, and the limit is {limit}; try again later",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )

    async def abort_all(self) -> None:
        """End all requests after the step under way; their clients get an error."""
        for request_id in list(self._active):
            await self.llm.abort(request_id)

    def requests(self) -> list[RequestProgress]:
        """Return the completions that run or wait, in order of arrival."""
        return [one for submission in self._submissions for one in submission.unfinished()]

    def log_notices(self) -> None:
        """Log what the engine has noticed since the last call, such as a draft that has failed."""
        notices = self.llm.llm.notices[self._notices :]
        self._notices += len(notices)
        for notice in notices:
            log.warning("note: %s", notice)

    def close(self) -> None:
        """End the thread for prompts."""
        self._executor.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Progress:
    """Result so far of one completion."""

    choice: int  # number among all completions of the request
    output: RequestOutput
    finished: bool


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """One completion that runs or waits."""

    id: str
    running: bool  # whether it has tokens
    age_seconds: float  # since the request arrived
    prompt_tokens: int | None  # None: not tokenized yet
    cached_tokens: int | None  # of the prompt; None: not known before the first token
    output_tokens: int


class Submission:
    """Completions of one HTTP request, in the order of its prompts; `n` for each. Close it in any case."""

    def __init__(self, service: Service, request_id: str, n: int, completions: int) -> None:
        self.n = n
        self.results: list[RequestOutput | None] = [None] * completions  # newest of each
        self._service = service
        self._request_id = request_id
        self._prompt_lengths: list[int | None] = []  # tokens, by prompt
        self._arrival = time.perf_counter()
        self._held = completions  # that count as accepted and not finished
        self._iterators: list[AsyncGenerator[RequestOutput, None]] = []
        self._ids: list[str] = []

    def create(self, prompts: list[ParsedPrompt], params: SamplingParams) -> None:
        """Check the request and create its completions in the engine; seeds count up from the given one."""
        self._prompt_lengths = [None if prompt.token_ids is None else len(prompt.token_ids) for prompt in prompts]
        for prompt in prompts:
            given: Any = prompt.text if prompt.token_ids is None else {"prompt_token_ids": prompt.token_ids}
            for index in range(params.n):
                seed = None if params.seed is None else (params.seed + index) % _MAX_SEED
                name = f"{self._request_id}-{len(self._iterators)}"
                one = self._service.llm.generate(given, replace(params, n=1, seed=seed), name)
                self._iterators.append(one)
                self._ids.append(name)

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Run all completions; yield the result so far of one whenever it has grown. Raise ApiError if one fails."""
        self._service._active.update(self._ids)
        try:
            completions = [self._run_one(number) for number in range(len(self._iterators))]
            async with aclosing(completions[0] if len(completions) == 1 else _merged(completions)) as results:
                async for progress in results:
                    yield progress
        except Exception as error:
            raise engine_error(error) from error
        finally:
            self._service._active.difference_update(self._ids)

    async def _run_one(self, number: int) -> AsyncGenerator[Progress, None]:
        times = self._service.metrics.start(self._arrival)
        output: RequestOutput | None = None
        try:
            async for output in self._iterators[number]:
                self.results[number] = output
                times.step(output, first_of_prompt=number % self.n == 0)
                yield Progress(number, output, output.finished)
        finally:
            times.end(output)
            self._release(1)
        if output is None or not output.finished:
            raise ApiError(503, "the server ended the request because it is shutting down; send it to another one")

    def _release(self, completions: int) -> None:
        """Count completions as ended, unless `close` was called before."""
        completions = min(completions, self._held)
        self._held -= completions
        self._service._accepted -= completions

    async def run_to_end(self) -> list[RequestOutput]:
        """Run all completions to their ends and return their results."""
        async with aclosing(self.run()) as results:
            async for _ in results:
                pass
        return self.outputs

    def unfinished(self) -> list[RequestProgress]:
        """Return the completions that run or wait."""
        age, lengths = time.perf_counter() - self._arrival, self._prompt_lengths
        return [
            RequestProgress(
                f"{self._request_id}-{number}",
                output is not None,
                age,
                lengths[number // self.n] if lengths else None,
                None if output is None else output.stats.cached_tokens,
                0 if output is None else output.stats.output_tokens,
            )
            for number, output in enumerate(self.results)
            if output is None or not output.finished
        ]

    @property
    def outputs(self) -> list[RequestOutput]:
        """Results of all completions that have one."""
        return [output for output in self.results if output is not None]

    @property
    def stats(self) -> Stats:
        """Statistics of all completions together."""
        return Stats.combined([output.stats for output in self.outputs])

    def usage(self) -> dict[str, Any]:
        """Return token counts; each prompt counts once."""
        firsts = [output for output in self.results[:: self.n] if output is not None]
        prompt = sum(len(output.prompt_token_ids) for output in firsts)
        output_tokens = sum(output.stats.output_tokens for output in self.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output_tokens,
            "total_tokens": prompt + output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.stats.cached_tokens for output in firsts)},
        }

    def chunk_usage(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the field `usage` of a chunk of a stream that is not the last one; empty if it has none."""
        if not request.include_usage:
            return {}
        return {"usage": self.usage() if request.continuous_usage else None}

    async def close(self) -> None:
        """Cancel what runs and leave the queue. Idempotent."""
        self._service._submissions.pop(self, None)
        self._service.log_notices()
        self._release(self._held)
        for one in self._iterators:
            with suppress(RuntimeError):  # it is being iterated: its task is cancelled, and ends it
                await one.aclose()


async def _merged(iterators: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all iterators as they come; the first error ends all."""
    items: asyncio.Queue[tuple[str, Any]] = asyncio.Queue(len(iterators))

    async def pass_on(iterator: AsyncGenerator[T, None]) -> None:
        try:
            async for item in iterator:
                await items.put(("item", item))
            await items.put(("end", None))
        except Exception as error:
            await items.put(("error", error))
        finally:
            await iterator.aclose()

    tasks = [asyncio.create_task(pass_on(one)) for one in iterators]
    try:
        unfinished = len(tasks)
        while unfinished:
            kind, value = await items.get()
            if kind == "error":
                raise value
            if kind == "end":
                unfinished -= 1
            else:
                yield value
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _template_message(message: ChatMessage, template: str) -> dict[str, Any]:
    """Return a message for a template; raise UsageError if the template does not read what it has."""
    if message.tool_calls and "tool_calls" not in template:
        raise UsageError("messages have tool_calls, which the model's chat template does not read; leave them out")
    if message.role == "tool" and "tool" not in template:
        raise UsageError("messages have the role tool, which the model's chat template does not read; leave them out")
    found = message.to_template()
    if message.role == "developer" and "developer" not in template:  # many templates drop roles that they do not know
        found["role"] = "system"
    return found


def engine_error(error: BaseException) -> ApiError:
    """Return the answer to a request whose engine failed; the traceback goes to the log only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):  # a constraint on the output that turned out to be too complex
        return bad_request(error)
    log.error("a request failed: %s", reason(error), exc_info=error)
    if isinstance(error, EngineClosed):
        return ApiError(503, "the engine is closed")
    if isinstance(error, SpmoeError):
        return ApiError(500, str(error))
    return ApiError(500, f"the engine failed ({type(error).__name__}: {reason(error)})")
