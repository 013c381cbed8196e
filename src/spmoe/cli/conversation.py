"""A conversation: its turns, the part of them that fits in the context, and the file that it is saved to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from spmoe.errors import PromptError, UsageError, reason
from spmoe.files import decode_json, write_text

Message = dict[str, str]  # {"role": ..., "content": ...}, as chat templates take them


class Conversation:
    """An optional system message and the messages after it. A turn is a user's message and the answer to it.

    No message is ever removed to make room: `fit` only chooses the turns that the model reads, and `save` writes all.
    """

    def __init__(self, system: str | None = None, messages: Sequence[Message] = ()) -> None:
        self.messages = list(messages)  # without the system message
        self.omitted = 0  # oldest turns that the model does not read, because the context is full
        self._system = system

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a saved conversation, or a JSON list of messages; raise UsageError if it is neither."""
        try:
            data: Any = decode_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {path} ({error.strerror}); check the path") from error
        except ValueError as error:
            raise UsageError(f"{path} is not a saved conversation: it is not JSON ({reason(error)})") from error
        messages = data.get("messages") if isinstance(data, dict) else data
        if not isinstance(messages, list):
            raise UsageError(f'{path} is not a saved conversation: it has no list of "messages"')
        for number, message in enumerate(messages, start=1):
            roles = ("system", "user", "assistant") if number == 1 else ("user", "assistant")
            if not isinstance(message, dict) or message.get("role") not in roles:
                raise UsageError(f"message {number} in {path} must have a role of {', '.join(roles)}; correct it")
            if not isinstance(message.get("content"), str):
                raise UsageError(f"message {number} in {path} must have text as its content; correct it")
        kept = [{"role": message["role"], "content": _require_text(message["content"])} for message in messages]
        system = kept.pop(0)["content"] if kept and kept[0]["role"] == "system" else None
        return cls(system, kept)

    def save(self, path: Path, model: str) -> None:
        """Write all messages as JSON, with the model's name; raise UsageError if that fails."""
        saved = {"model": model, "messages": [*self.head, *self.messages]}
        write_text(path, json.dumps(saved, indent=2, ensure_ascii=False) + "\n")

    @property
    def head(self) -> list[Message]:
        """The system message, if there is one."""
        return [{"role": "system", "content": self._system}] if self._system is not None else []

    @property
    def prompt(self) -> list[Message]:
        """Messages that the model reads: the system message and the turns that were not omitted."""
        return [*self.head, *self.messages[self._asked[self.omitted] if self.omitted else 0 :]]

    @property
    def waiting(self) -> bool:
        """Whether the last message is a user's, without an answer."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None removes it."""
        self._system = _require_text(text) if text is not None else None

    def reset(self) -> None:
        """Remove all messages but the system message."""
        self.messages, self.omitted = [], 0

    def ask(self, text: str) -> None:
        """Append a user's message, in place of one that was not answered."""
        _require_text(text)
        if self.waiting:
            self.messages.pop()
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Append the answer to the last message."""
        self.messages.append({"role": "assistant", "content": text})

    def ask_again(self) -> None:
        """Remove the last answer, so that the message before it waits for one; raise UsageError if there is none."""
        if not self._asked:
            raise UsageError("there is no message to answer again; write one")
        del self.messages[self._asked[-1] + 1 :]

    def fit(self, count: Callable[[list[Message]], int], limit: int, reserve: int) -> int:
        """Omit as few of the oldest turns as leaves `reserve` of `limit` tokens for the answer; return how many more.

        The last turn always stays, with whatever is left for the answer; PromptError is raised if that is nothing.
        `count` returns the number of tokens of some messages.
        """
        before, self.omitted = self.omitted, 0
        while (tokens := count(self.prompt)) > limit - max(reserve, 1) and self.omitted < len(self._asked) - 1:
            self.omitted += 1
        if tokens >= limit:
            self.omitted = before
            raise PromptError(
                f"the message alone makes a prompt of {tokens} tokens but the context holds {limit}; shorten the "
                "message or the system message"
            )
        return max(self.omitted - before, 0)

    @property
    def _asked(self) -> list[int]:
        """Indices of the users' messages, where turns start."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "user"]


def _require_text(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise PromptError("the message is not text: it has bytes that are not UTF-8; convert it to UTF-8")
    return text
