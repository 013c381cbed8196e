"""Tool calls in answers: parsers for the formats of Hermes and Qwen, and of gpt-oss (harmony).

A parser reads one answer as it grows. It returns text and reasoning as soon as they are certain, and a tool call when
it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from pydantic_core import from_json, to_json

from spmoe.engine.text import TextStream
from spmoe.errors import UsageError
from spmoe.verify.grammar import JSON_WHITESPACE


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete tool call of an answer."""

    name: str
    arguments: str  # a JSON object
    id: str = field(default_factory=lambda: f"call_{uuid4().hex}")

    def to_dict(self) -> dict[str, Any]:
        """Return the call in OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class Reply:
    """New parts of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class ReplyParser(Protocol):
    """Reads one answer."""

    def read(self, text: str, token_ids: Sequence[int], finished: bool) -> Reply:
        """Take the whole answer so far; return what is new and certain. `finished`: nothing follows."""
        ...


def make_reply_parser(name: str | None, tokenizer: Any | None, with_tools: bool) -> ReplyParser:
    """Return a parser for one answer; raise UsageError if the model's tokenizer lacks the format's tokens."""
    if name == "gpt-oss":  # its answers have channels, with and without tools
        return HarmonyParser(tokenizer)
    return HermesParser() if name == "hermes" and with_tools else PlainText()


class PlainText:
    """Answers without a format."""

    def __init__(self) -> None:
        self._read = 0  # characters

    def read(self, text: str, token_ids: Sequence[int], finished: bool) -> Reply:
        """Return the new text."""
        new, self._read = text[self._read :], len(text)
        return Reply(new)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
CALL_ENDS = {"hermes": _CLOSE}  # text at which a call ends; a call of gpt-oss ends with an end-of-text token


class HermesParser:
    """Answers in which a call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    White space around calls is dropped. A call that is not valid JSON stays text.
    """

    def __init__(self) -> None:
        self._read = 0  # characters
        self._held = ""  # text that may belong to a call, or is white space before one
        self._after_call = False

    def read(self, text: str, token_ids: Sequence[int], finished: bool) -> Reply:
        """Return new text and calls."""
        self._held += text[self._read :]
        self._read = len(text)
        reply = Reply()
        while (start := self._held.find(_OPEN)) >= 0 and (end := self._held.find(_CLOSE, start)) >= 0:
            before, inside = self._held[:start], self._held[start + len(_OPEN) : end]
            self._held = self._held[end + len(_CLOSE) :]
            call = _hermes_call(inside)
            self._add_text(reply, before.rstrip() if call is not None else f"{before}{_OPEN}{inside}{_CLOSE}")
            if call is not None:
                reply.calls.append(call)
                self._after_call = True
        start = self._held.find(_OPEN)
        certain = len(self._held) if finished else start if start >= 0 else _certain(self._held)
        if not finished:  # white space may stand before a call
            certain = len(self._held[:certain].rstrip())
        released, self._held = self._held[:certain], self._held[certain:]
        self._add_text(reply, released)
        return reply

    def _add_text(self, reply: Reply, text: str) -> None:
        text = text.lstrip() if self._after_call else text
        if text:
            reply.content += text
            self._after_call = False


def hermes_grammar(functions: Sequence[tuple[str, dict[str, Any] | None]], *, several: bool) -> str:
    """Return a grammar in Lark's syntax for one call of one of these functions, or for one call and more.

    A function is a name and the JSON schema of its arguments; None: it has no arguments.
    """
    rules = ["start: call" + (' ("\\n" call)*' if several else "")]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, (name, schema) in enumerate(functions):
        before, after = f'{_OPEN}\n{{"name": {_json(name)}, "arguments": ', f"}}\n{_CLOSE}"
        schema = {"type": "object", "additionalProperties": False} if schema is None else schema
        schema = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema}
        rules.append(f"call_{number}: {_json(before)} arguments_{number} {_json(after)}")
        rules.append(f"arguments_{number}: %json {_json(schema)}")
    return "\n".join(rules)


def _json(value: Any) -> str:
    return to_json(value).decode()


def _certain(text: str) -> int:
    """Return how much of a text cannot be the start of a call."""
    for length in range(min(len(text), len(_OPEN) - 1), 0, -1):
        if text.endswith(_OPEN[:length]):
            return len(text) - length
    return len(text)


def _hermes_call(inside: str) -> ParsedCall | None:
    try:
        found = from_json(inside.strip())
    except ValueError:
        return None
    name, arguments = (found.get("name"), found.get("arguments", {})) if isinstance(found, dict) else (None, None)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ParsedCall(name, to_json(arguments).decode())


_HARMONY = ("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyParser:
    """Answers of gpt-oss: messages with a header, divided by special tokens, which the text does not show.

    The channel `analysis` is reasoning. A message to `functions.NAME` is a call. Everything else is text.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        unknown = getattr(tokenizer, "unk_token_id", None)
        ids = [None if tokenizer is None else tokenizer.convert_tokens_to_ids(token) for token in _HARMONY]
        missing = [token for token, found in zip(_HARMONY, ids, strict=True) if found in (None, unknown)]
        if missing:
            raise UsageError(
                f"tool_call_parser gpt-oss needs the token {missing[0]}, which the model's tokenizer lacks; leave it "
                "out, or choose hermes"
            )
        self._start, self._message, *self._ends = ids
        self._tokenizer: Any = tokenizer
        self._read = 0  # tokens
        self._header: list[list[int]] | None = [[]]  # being read, divided at special tokens; None: inside of a message
        self._recipient: str | None = None
        self._reasoning = False
        self._body = ""  # of a call
        self._stream = self._new_stream()

    def read(self, text: str, token_ids: Sequence[int], finished: bool) -> Reply:
        """Return new text, reasoning and calls."""
        reply = Reply()
        for token in token_ids[self._read :]:
            self._take(token, reply)
        self._read = len(token_ids)
        if finished and self._header is None:  # cut off inside of a message
            self._end_message(reply)
        elif finished and self._header:  # no message at all: the model did not keep to the format
            reply.content += self._decode(self._header)
            self._header = [[]]
        return reply

    def _take(self, token: int, reply: Reply) -> None:
        if token == self._message:
            header = self._decode(self._header or [])
            found = _RECIPIENT.search(header)
            self._recipient = found[1] if found else None
            self._reasoning = self._recipient is None and "analysis" in header
            self._header, self._body, self._stream = None, "", self._new_stream()
        elif token == self._start or token in self._ends:
            if self._header is None:
                self._end_message(reply)
            self._header = [[]]
        elif self._header is not None:
            if self._tokenizer.decode([token], skip_special_tokens=True):
                self._header[-1].append(token)
            else:
                self._header.append([])
        else:
            self._add(self._stream.push(token), reply)

    def _add(self, piece: str, reply: Reply) -> None:
        if self._recipient is not None:
            self._body += piece
        elif self._reasoning:
            reply.reasoning += piece
        else:
            reply.content += piece

    def _end_message(self, reply: Reply) -> None:
        self._add(self._stream.finish(), reply)
        if self._recipient is not None:
            call = _harmony_call(self._recipient, self._body)
            if call is not None:
                reply.calls.append(call)
            else:
                reply.content += self._body
        self._recipient, self._header = None, [[]]

    def _new_stream(self) -> TextStream:
        return TextStream(self._tokenizer, (), ())

    def _decode(self, header: list[list[int]]) -> str:
        texts = (self._tokenizer.decode(ids, skip_special_tokens=True) for ids in header if ids)
        return " ".join(texts)


def _harmony_call(name: str, body: str) -> ParsedCall | None:
    try:
        found = from_json(body.strip() or "{}")
    except ValueError:
        return None
    return ParsedCall(name, to_json(found).decode()) if isinstance(found, dict) else None
