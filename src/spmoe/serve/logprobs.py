"""Log-probabilities in the shapes of both endpoints; tokens that are part of a character are given as bytes."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any

from spmoe.engine.outputs import Logprob

LEAST_LOGPROB = -9999.0  # instead of minus infinity, which JSON lacks; as in vLLM
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of tokenizers with byte fallback
# Symbols of byte-level tokenizers, as in GPT-2: visible characters of Latin-1 are their own bytes, and the other bytes
# are numbered from 256 on.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_LEVEL = {chr(byte): byte for byte in _VISIBLE} | {
    chr(256 + number): byte for number, byte in enumerate(sorted({*range(256)} - {*_VISIBLE}))
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
