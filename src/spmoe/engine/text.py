"""Streaming detokenization: complete characters only, and stop strings across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmoe.errors import SpmoeError, is_panic, reason

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 6
_MAX_CHARACTER_TOKENS = 4  # of one character, if each is a byte


class TextStream:
    """Detokenizes one sequence incrementally; released text is final.

    Text that may be the start of a stop string, and incomplete characters, are held back until that is decided. A stop
    string ends the text only if its last character comes after the first `min_tokens` tokens.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str], min_tokens: int = 0) -> None:
        self.text = ""  # all released text
        self.stop_reason: str | None = None  # the stop string that was found
        self._min_tokens = min_tokens
        self._tokenizer = tokenizer
        self._stop = stop
        self._pushed = 0  # tokens
        self._ids = self._context_of(prompt)  # without those that have no text at all
        self._decoded = len(self._ids)  # ids whose text is in `_held` or released
        self._next_try = 0  # number of undecoded ids at which an incomplete character is looked at again
        self._context = 0  # first id that decoding still needs
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop_reason is not None

    def push(self, token: int) -> str:
        """Append a token; return the text that it releases."""
        self._pushed += 1
        self._ids.append(token)
        waiting = len(self._ids) - self._decoded
        if waiting > 1 and self._last_has_no_text():
            self._ids.pop()  # a special token inside a character
            return ""
        if _MAX_CHARACTER_TOKENS < waiting < self._next_try and self._ends_inside_a_character():
            return ""  # a run of bytes that are no characters: each look at it decodes all of it
        new = self._undecoded()
        if not new and self._last_has_no_text():
            self._ids.pop()
        if not new or new.endswith(_REPLACEMENT):
            self._next_try = 2 * waiting
            return ""
        self._context, self._decoded, self._next_try = self._decoded, len(self._ids), 0
        return self._release(new)

    def finish(self) -> str:
        """End the stream; return the text that was still held back."""
        if self.stopped:
            return ""
        new, self._decoded = self._undecoded(), len(self._ids)
        released = self._release(new)
        if not self.stopped:
            released += self._held
            self.text += self._held
            self._held = ""
        return released

    def _undecoded(self) -> str:
        """Return the text of the ids that are not decoded yet."""
        before = self._decode(self._ids[self._context : self._decoded])
        after = self._decode(self._ids[self._context :])
        if not after.startswith(before):
            before = before.rstrip(_REPLACEMENT)  # the new ids complete a character that the prompt started
        return after[len(before) :]

    def _release(self, new: str) -> str:
        """Append new text; return it up to a stop string, or up to a possible start of one."""
        self._held += new
        found = [(start, stop) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if found and self._pushed > self._min_tokens:
            start, self.stop_reason = min(found, key=lambda one: one[0])
            released, self._held = self._held[:start], ""
        else:
            overlap = max((_overlap(self._held, stop) for stop in self._stop), default=0)
            end = len(self._held) - overlap
            released, self._held = self._held[:end], self._held[end:]
        self.text += released
        return released

    def _context_of(self, prompt: Sequence[int]) -> list[int]:
        """Return the end of the prompt: a token's text can depend on the tokens before it.

        It does not begin inside a character, as single bytes of byte-fallback tokenizers do: such a tokenizer turns
        all bytes of a run into replacement characters if the run is not complete. Nor does it begin with a token that
        has no text: some tokenizers drop the space before the first text.
        """
        start = max(0, len(prompt) - _CONTEXT_TOKENS)
        while start and (not (text := self._decode([prompt[start]])) or _REPLACEMENT in text):
            start -= 1
        return list(prompt[start:])

    def _last_has_no_text(self) -> bool:
        """Return whether the last id is a special token: it has no text, here and alone."""
        if self._decode(self._ids[-1:]):
            return False
        end = self._ids[-_CONTEXT_TOKENS:]
        return self._decode(end) == self._decode(end[:-1])

    def _ends_inside_a_character(self) -> bool:
        return self._decode(self._ids[-_MAX_CHARACTER_TOKENS:]).endswith(_REPLACEMENT)

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        try:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        except BaseException as error:
            if is_panic(error):
                raise SpmoeError(
                    f"the tokenizer cannot decode its tokens ({reason(error)}); check its files"
                ) from error
            raise
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
