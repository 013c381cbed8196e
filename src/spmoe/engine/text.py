"""From token ids to text, as it is generated: whole characters only, and stop strings wherever they fall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """Turns one sequence's tokens into text that never has to be taken back.

    Text that may be the beginning of a stop string, or half a character, is held back until it is known not to be.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self.text = ""  # all that was released
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids = list(prompt[-6:])  # context, since what a token reads as can depend on the one before
        self._shown = len(self._ids)  # ids whose text is in `_held` or released
        self._context = 0  # first id that decoding still needs
        self._held = ""

    def push(self, token: int) -> str:
        """Add a token; the text that it releases."""
        self._ids.append(token)
        new = self._unshown()
        if not new or new.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return self._release(new)

    def finish(self) -> str:
        """No more tokens: the text that was still held back."""
        if self.stopped:
            return ""
        new, self._shown = self._unshown(), len(self._ids)
        released = self._release(new)
        if not self.stopped:
            released += self._held
            self.text += self._held
            self._held = ""
        return released

    def _unshown(self) -> str:
        """The text of the ids that are not shown yet."""
        before = self._decode(self._ids[self._context : self._shown])
        after = self._decode(self._ids[self._context :])
        if not after.startswith(before):
            before = before.rstrip("\N{REPLACEMENT CHARACTER}")  # a character that the prompt began is whole now
        return after[len(before) :]

    def _release(self, new: str) -> str:
        self._held += new
        hits = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if hits:
            self.stopped = True
            released, self._held = self._held[: min(hits)], ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
            cut = len(self._held) - keep
            released, self._held = self._held[:cut], self._held[cut:]
        self.text += released
        return released

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _overlap(text: str, stop: str) -> int:
    """How much of the end of `text` is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
