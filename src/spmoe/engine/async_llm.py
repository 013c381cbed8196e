"""The asynchronous Python interface: `AsyncLLM`, with the names of vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple, Self

from spmoe.config import SamplingParams
from spmoe.engine.llm import LLM, Generation, combined_output
from spmoe.engine.outputs import RequestOutput
from spmoe.engine.prompts import Message, ParsedPrompt, Prompt, parse_conversation, parse_params, parse_prompt
from spmoe.errors import UsageError, reason


class Load(NamedTuple):
    """Number of requests that an engine works on."""

    running: int  # have read at least a part of their prompts
    waiting: int


class AsyncLLM:
    """An engine for asynchronous programs. A context manager; else call `close`.

    Options are those of `LLM`. Requests of any number of tasks run together.
    """

    def __init__(self, *args: Any, llm: LLM | None = None, **options: Any) -> None:
        # llm: an engine to use instead of a new one; it is closed with this object
        self.llm = LLM(*args, **options) if llm is None else llm
        self._numbers = count()
        self._active: dict[str, _Active] = {}  # by request id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def load(self) -> Load:
        """Requests that run, and requests that wait for their first step."""
        active = [*self._active.values()]  # a copy: requests may come from several threads
        running = sum(request.started for request in active)
        return Load(running, len(active) - running)

    @property
    def failure(self) -> str | None:
        """Reason why no request can run any more; None while the engine works."""
        if (failure := self.llm.engine.failure) is not None:
            return f"the engine failed ({reason(failure)}) and could not be restored"
        return "the engine is closed" if self.llm.closed else None

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt; yield its result so far after every step that adds tokens, and the whole one last.

        The request is checked at once, and its id is taken until the iterator has ended. It starts with the first
        iteration, and ends when the iterator is closed or dropped, or its task is cancelled. With `n` completions, all
        of them are in each result. Steps that end while the caller does something else are one result, so that a slow
        caller holds no memory.
        """
        return self._run(parse_prompt(prompt), sampling_params, request_id)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation; see `generate`. Further options, such as `tools`, go to the chat template."""
        prompt = self.llm.apply_chat_template(parse_conversation(messages), **template_options)
        return self._run(prompt, sampling_params, request_id)

    async def abort(self, request_id: str) -> None:
        """End a request after the step under way; its iterator ends with the result so far. Unknown ids are ignored."""
        if (active := self._active.get(request_id)) is not None:
            active.stop()

    def close(self) -> None:
        """End all requests and close the engine. Idempotent."""
        self.llm.close()

    def _run(
        self, prompt: ParsedPrompt, sampling_params: SamplingParams | None, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        request_id = f"request-{next(self._numbers)}" if request_id is None else request_id
        (params,) = parse_params(sampling_params, 1, self.llm.get_default_sampling_params())
        active = _Active(self.llm.new_request(prompt, params, request_id))
        if self._active.setdefault(request_id, active) is not active:
            raise UsageError(f"a request with the id {request_id} runs already; choose another id")

        def forget() -> None:
            if self._active.get(request_id) is active:
                del self._active[request_id]

        return _Results(active, forget)


class _Results(AsyncGenerator[RequestOutput, None]):
    """Results so far of one request, whose id is taken until this object is closed or dropped."""

    def __init__(self, active: _Active, forget: Callable[[], None]) -> None:
        self._steps = self._iterate(active, forget)
        self._forget = forget

    def __del__(self) -> None:
        self._forget()

    async def asend(self, value: None) -> RequestOutput:
        return await self._steps.asend(value)

    async def athrow(self, *error: Any) -> RequestOutput:
        return await self._steps.athrow(*error)

    async def aclose(self) -> None:
        await self._steps.aclose()
        self._forget()  # iteration may not have begun

    @staticmethod
    async def _iterate(active: _Active, forget: Callable[[], None]) -> AsyncGenerator[RequestOutput, None]:
        try:
            async for results in active:
                yield combined_output(results)
        finally:
            active.cancel()
            forget()


class _Active:
    """A request in progress: iterate over it for the results so far of all its completions."""

    def __init__(self, generations: list[Generation]) -> None:
        self.started = False
        self._generations = generations
        self._cancels: list[Callable[[], None]] = []

    async def __aiter__(self) -> AsyncGenerator[list[RequestOutput], None]:
        loop, inbox = asyncio.get_running_loop(), _Inbox(len(self._generations))
        latest = [generation.request.completion() for generation in self._generations]
        for number, generation in enumerate(self._generations):
            self._cancels.append(generation.send_results(_LoopSink(loop, inbox, number)))
        while True:
            new = await inbox.receive()  # also what arrived, until the end, while the caller had the last result
            grown = any(len(result.token_ids) > len(latest[number].token_ids) for number, result in new.items())
            for number, result in new.items():
                latest[number] = result
            self.started = self.started or bool(new)
            if not inbox.unfinished or all(result.finished for result in latest):
                break
            if grown:
                yield list(latest)
        yield latest

    def stop(self) -> None:
        """End all completions after the step under way."""
        for generation in self._generations:
            generation.stop()

    def cancel(self) -> None:
        """End all completions; nothing is received any more."""
        for cancel in self._cancels:
            cancel()


class _Inbox:
    """Newest result of each completion that the event loop has not read yet. Results are cumulative."""

    def __init__(self, completions: int) -> None:
        self.unfinished = completions
        self._new: dict[int, RequestOutput] = {}  # by number of the completion
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def take(self, number: int, kind: str, value: Any) -> None:
        """Keep a message of a completion; called on the event loop."""
        if kind == "item":
            self._new[number] = value
        elif kind == "error":
            self._error = value
        else:
            self.unfinished -= 1
        self._changed.set()

    async def receive(self) -> dict[int, RequestOutput]:
        """Wait for news; return new results by number of the completion. Raise the error of a completion."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        new, self._new = self._new, {}
        return new


class _LoopSink:
    """Passes messages of one completion from the engine's thread to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: _Inbox, number: int) -> None:
        self._loop = loop
        self._inbox = inbox
        self._number = number

    def put(self, message: tuple[str, Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._inbox.take, self._number, *message)
