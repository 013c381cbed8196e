"""POST /v1/chat/completions: from conversations to prompts, and from results to messages and chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from uuid import uuid4

from spmoe.engine.outputs import CompletionOutput, Logprob
from spmoe.engine.prompts import ParsedPrompt
from spmoe.errors import UsageError
from spmoe.serve.completions import LEAST_LOGPROB, token_bytes
from spmoe.serve.http import event
from spmoe.serve.protocol import ChatCompletionRequest
from spmoe.serve.service import Service, Submission
from spmoe.serve.tools import CALL_ENDS, Reply

_TEMPLATE_VARIABLES = ("messages", "tools", "add_generation_prompt", "documents")  # not for chat_template_kwargs


class ChatCompletion:
    """One request to /v1/chat/completions; the constructor checks model and parameters."""

    prompt_field = "messages"

    def __init__(self, service: Service, request: ChatCompletionRequest) -> None:
        service.require_model(request.model)
        if request.max_completion_tokens is not None:
            request = request.model_copy(update={"max_tokens": request.max_completion_tokens})
        self.id = f"chatcmpl-{uuid4().hex}"
        self.params = request.sampling_params(
            service.default_params(), service.default_max_tokens(service.max_model_len), request.num_logprobs
        )
        self.num_prompts = 1
        if service.config.tool_call_parser == "gpt-oss" and self.params.stop_strings:
            raise UsageError(
                "stop is not supported with --tool-call-parser gpt-oss, which reads tokens; use stop_token_ids"
            )
        if (constraint := request.constraint) is not None:
            _check_parser(service.config.tool_call_parser, constraint.field, request.requires_call)
        self.one_call = bool(request.active_tools) and not request.parallel_tool_calls
        self.call_end: str | None = None  # stop string at the end of the only call
        if self.one_call and not request.requires_call:  # else the grammar has one call only
            self.call_end = CALL_ENDS.get(service.config.tool_call_parser or "")
        if self.call_end is not None:
            self.params = replace(self.params, stop=(*self.params.stop_strings, self.call_end))
        self._service = service
        self._request = request
        self._created = int(time.time())

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""
        return self._request.stream

    def tokenize(self) -> list[ParsedPrompt]:
        """Return the conversation as a prompt with its token ids."""
        request = self._request
        prompt = self._service.render_chat(request.messages, request.active_tools, **self._template_options())
        self._service.check_constraint(request.constraint)
        return [prompt]

    def _template_options(self) -> dict[str, Any]:
        """Return the variables of the template; raise UsageError for some that it does not read."""
        request = self._request
        options = dict(request.chat_template_kwargs or {})
        if reserved := sorted(options.keys() & set(_TEMPLATE_VARIABLES)):
            raise UsageError(f"chat_template_kwargs must not have {reserved[0]}; leave it out")
        for name in options:
            self._service.require_in_template(name, f"chat_template_kwargs.{name}")
        if request.reasoning_effort is not None:
            self._service.require_in_template("reasoning_effort", "reasoning_effort")
            options["reasoning_effort"] = request.reasoning_effort
        return options

    async def respond(self, submission: Submission) -> dict[str, Any]:
        """Run to the end and return the response."""
        choices = []
        for index, result in enumerate(await submission.run_to_end()):
            output = result.outputs[0]
            answer = _Answer(self)
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", **_message(answer.read(output, True))},
                    "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs),
                    **answer.ending(output),
                }
            )
        head = self._head("chat.completion")
        return {**head, "choices": choices, "usage": submission.usage(), "spmoe": submission.stats.to_dict()}

    async def stream(self, submission: Submission) -> AsyncGenerator[bytes, None]:
        """Run and yield chunks; a tool call comes when it is complete, and the last chunk has the statistics."""
        include_usage, head = self._request.include_usage, self._head("chat.completion.chunk")
        sent = [_Sent(self, number) for number in range(len(submission.results))]
        unfinished = len(sent)
        async with aclosing(submission.run()) as results:
            async for progress in results:
                unfinished -= progress.finished
                usage = submission.chunk_usage(self._request)
                choices = sent[progress.choice].choices(progress.output.outputs[0], progress.finished)
                for choice in choices:
                    last = choice is choices[-1] and not unfinished and not include_usage
                    extra = {"spmoe": submission.stats.to_dict()} if last else {}
                    yield event({**head, **usage, "choices": [choice], **extra})
        if include_usage:
            yield event({**head, "choices": [], "usage": submission.usage(), "spmoe": submission.stats.to_dict()})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._service.model_name}

    def _logprobs(self, positions: Sequence[dict[int, Logprob]]) -> dict[str, Any]:
        return chat_logprobs(self._service.tokenizer, positions, self._request.num_logprobs or 0)


def _check_parser(parser: str | None, field: str, requires_call: bool) -> None:
    """Raise UsageError if a constraint does not fit the format of answers."""
    if parser == "gpt-oss":
        field = "tool_choice" if requires_call else field
        raise UsageError(
            f"{field} is not supported with --tool-call-parser gpt-oss: a grammar would leave no place for the format "
            "of its messages; leave it out"
        )


class _Answer:
    """One answer, read as it grows."""

    def __init__(self, chat: ChatCompletion) -> None:
        self._parser = chat._service.reply_parser(chat._request.active_tools)
        self._one_call = chat.one_call
        self._call_end = chat.call_end
        self.calls = 0

    def read(self, output: CompletionOutput, finished: bool) -> Reply:
        """Take the whole answer so far; return what is new."""
        text = output.text + (self._call_end or "" if self._ended_by_call(output) else "")
        reply = self._parser.read(text, _token_ids(output), finished)
        if self._one_call:
            reply.calls = reply.calls[: 1 - self.calls]
        self.calls += len(reply.calls)
        return reply

    def ending(self, output: CompletionOutput) -> dict[str, Any]:
        """Return the reasons why the answer ended."""
        called = self.calls > 0 and output.finish_reason == "stop"
        return {
            "finish_reason": "tool_calls" if called else output.finish_reason,
            "stop_reason": None if self._ended_by_call(output) else output.stop_reason,
        }

    def _ended_by_call(self, output: CompletionOutput) -> bool:
        return self._call_end is not None and output.stop_reason == self._call_end


class _Sent:
    """Part of an answer that its client has."""

    def __init__(self, chat: ChatCompletion, index: int) -> None:
        self._chat = chat
        self._index = index
        self._answer = _Answer(chat)
        self._tokens = 0
        self._begun = False

    def choices(self, output: CompletionOutput, finished: bool) -> list[dict[str, Any]]:
        """Return the new parts, each for a chunk; the role comes first, the finish reason alone and last."""
        before = self._answer.calls
        reply, logprobs = self._answer.read(output, finished), None
        if output.logprobs is not None and (positions := output.logprobs[self._tokens :]):
            logprobs = self._chat._logprobs(positions)
        self._tokens = len(output.token_ids)
        found = []
        if not self._begun:
            self._begun = True
            found.append(self._choice({"role": "assistant", "content": ""}))
        if reply or logprobs is not None:
            found.append(self._choice(_delta(reply, before), logprobs))
        if finished:
            found.append({**self._choice({}), **self._answer.ending(output)})
        return found

    def _choice(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _token_ids(output: CompletionOutput) -> list[int]:
    """Return the tokens of an answer, without a stop token: it is not part of the text."""
    return output.token_ids[:-1] if isinstance(output.stop_reason, int) else output.token_ids


def _delta(reply: Reply, calls: int) -> dict[str, Any]:
    """Return the new parts of a message in a stream that has had so many calls."""
    delta: dict[str, Any] = {}
    if reply.content or not (reply.reasoning or reply.calls):
        delta["content"] = reply.content
    if reply.reasoning:
        delta["reasoning_content"] = reply.reasoning
    if reply.calls:
        delta["tool_calls"] = [{"index": calls + number, **call.to_dict()} for number, call in enumerate(reply.calls)]
    return delta


def _message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"content": reply.content or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [call.to_dict() for call in reply.calls]
    return message


def chat_logprobs(tokenizer: Any, positions: Sequence[dict[int, Logprob]], top: int) -> dict[str, Any]:
    """Return log-probabilities in the shape of /v1/chat/completions; `top`: most likely tokens per position."""
    content = []
    for position in positions:
        tokens = [(_chat_token(tokenizer, token, one), one.rank) for token, one in position.items()]
        best = [shown for shown, rank in sorted(tokens, key=lambda one: one[1]) if rank <= top]
        content.append({**tokens[0][0], "top_logprobs": best})
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Any, token: int, one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    data = token_bytes(tokenizer, token, text)
    return {"token": text, "logprob": max(one.logprob, LEAST_LOGPROB), "bytes": list(data)}
