"""POST /v1/completions: from requests to parameters, and from results to responses and chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from spmoe.engine.outputs import CompletionOutput
from spmoe.engine.prompts import ParsedPrompt
from spmoe.serve.http import event
from spmoe.serve.logprobs import CompletionLogprobs
from spmoe.serve.protocol import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from spmoe.serve.service import Service, Submission


class Completion:
    """One request to /v1/completions; the constructor checks model and parameters."""

    prompt_field = "prompt"

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        service.require_model(request.model)
        self.id = f"cmpl-{uuid4().hex}"
        self.params = request.sampling_params(
            service.default_params(), service.default_max_tokens(DEFAULT_COMPLETION_TOKENS), request.num_logprobs
        )
        self.num_prompts = len(request.prompt)
        self._service = service
        self._request = request
        self._created = int(time.time())

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""
        return self._request.stream

    def tokenize(self) -> list[ParsedPrompt]:
        """Return the prompts with their token ids."""
        self._service.check_constraint(self._request.constraint)
        return [self._service.tokenize_prompt(prompt) for prompt in self._request.prompt]

    async def respond(self, submission: Submission) -> dict[str, Any]:
        """Run to the end and return the response."""
        outputs = [result.outputs[0] for result in await submission.run_to_end()]
        choices = [_Sent(self, index).choice(output, True) for index, output in enumerate(outputs)]
        return {**self._head(), "choices": choices, "usage": submission.usage(), "spmoe": submission.stats.to_dict()}

    async def stream(self, submission: Submission) -> AsyncGenerator[bytes, None]:
        """Run and yield chunks; the last one has the statistics."""
        include_usage = self._request.include_usage
        head = {**self._head(), "usage": None} if include_usage else self._head()
        sent = [_Sent(self, number) for number in range(len(submission.results))]
        unfinished = len(sent)
        async with aclosing(submission.run()) as results:
            async for progress in results:
                output = progress.output.outputs[0]
                unfinished -= progress.finished
                choice = sent[progress.choice].choice(output, progress.finished)
                if choice is None:
                    continue
                last = {"spmoe": submission.stats.to_dict()} if not unfinished and not include_usage else {}
                yield event({**head, "choices": [choice], **last})
        if include_usage:
            yield event({**head, "choices": [], "usage": submission.usage(), "spmoe": submission.stats.to_dict()})

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.model_name,
        }


class _Sent:
    """Part of a completion that its client has."""

    def __init__(self, completion: Completion, index: int) -> None:
        self._index = index
        self._text = 0  # characters
        self._tokens = 0
        self._logprobs = CompletionLogprobs(completion._service.tokenizer)

    def choice(self, output: CompletionOutput, finished: bool) -> dict[str, Any] | None:
        """Return the new part; None if there is none."""
        new, logprobs = output.text[self._text :], None
        if output.logprobs is not None and (positions := output.logprobs[self._tokens :]):
            logprobs = self._logprobs.read(positions)
        self._text, self._tokens = len(output.text), len(output.token_ids)
        if not new and logprobs is None and not finished:
            return None
        return {
            "index": self._index,
            "text": new,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason if finished else None,
            "stop_reason": output.stop_reason if finished else None,
        }
