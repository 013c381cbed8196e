"""POST /v1/completions: from requests to parameters, and from results to responses and chunks."""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from spmoe.engine.outputs import CompletionOutput, Logprob
from spmoe.engine.prompts import ParsedPrompt
from spmoe.serve.http import event
from spmoe.serve.protocol import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from spmoe.serve.service import Service, Submission

LEAST_LOGPROB = -9999.0  # instead of minus infinity, which JSON lacks; as in vLLM
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of tokenizers with byte fallback
# Symbols of byte-level tokenizers, as in GPT-2: visible characters of Latin-1 are their own bytes, and the other bytes
# are numbered from 256 on.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_LEVEL = {chr(byte): byte for byte in _VISIBLE} | {
    chr(256 + number): byte for number, byte in enumerate(sorted({*range(256)} - {*_VISIBLE}))
}


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
        include_usage, head = self._request.include_usage, self._head()
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
                usage = submission.chunk_usage(self._request)
                yield event({**head, **usage, "choices": [choice], **last})
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


def token_bytes(tokenizer: Any, token: int, text: str) -> bytes:
    """Return the bytes of a token; `text`: the token decoded alone, which shows part of a character as U+FFFD."""
    if _REPLACEMENT not in text:
        return text.encode()
    symbols = tokenizer.convert_ids_to_tokens(token)
    if isinstance(symbols, bytes):
        return symbols
    if found := _BYTE_TOKEN.fullmatch(symbols):
        return bytes([int(found[1], 16)])
    if all(symbol in _BYTE_LEVEL for symbol in symbols):
        return bytes(_BYTE_LEVEL[symbol] for symbol in symbols)
    return text.encode()


class CompletionLogprobs:
    """Log-probabilities of one completion, in the shape of /v1/completions."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._offset = 0  # characters of the tokens so far
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, positions: Sequence[dict[int, Logprob]]) -> dict[str, list[Any]]:
        """Take the next positions and return them; tokens of one character have the same offset."""
        names: list[str] = []
        values: list[float] = []
        top: list[dict[str, float]] = []
        offsets: list[int] = []
        for position in positions:
            candidates: dict[str, float] = {}
            for token, one in position.items():  # the chosen token first
                text = one.decoded_token or ""
                data, value = token_bytes(self._tokenizer, token, text), max(one.logprob, LEAST_LOGPROB)
                name = _name(data, text)
                if not candidates:
                    names.append(name)
                    values.append(value)
                    offsets.append(self._offset)
                    self._offset += len(self._decoder.decode(data))
                candidates.setdefault(name, value)
            top.append(candidates)
        return {"text_offset": offsets, "token_logprobs": values, "tokens": names, "top_logprobs": top}


def _name(data: bytes, text: str) -> str:
    """Return the text of a token, or its bytes in OpenAI's notation if it is part of a character."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)
    return text
