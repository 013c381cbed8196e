"""Prompts, conversations and sampling parameters, in every form that `LLM` accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from spmoe.config import SamplingParams
from spmoe.errors import UsageError

_FORMS = 'text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}'


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; `prompt`, their text, is only reported."""

    prompt_token_ids: Sequence[int]
    prompt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt as text, as token ids, or both; token ids count."""

    text: str | None = None
    token_ids: list[int] | None = None


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Read one prompt; raise UsageError if it has none of the forms."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    if _is_list(prompt) and all(_is_token(token) for token in prompt):
        return ParsedPrompt(token_ids=[int(token) for token in prompt])
    raise UsageError(f"a prompt must be {_FORMS}, not {_shown(prompt)}")


def parse_prompts(prompts: Any) -> list[ParsedPrompt]:
    """Read one prompt or a list of them. A list of token ids is one prompt; an empty list has none."""
    if isinstance(prompts, (str, Mapping)):
        return [parse_prompt(prompts)]
    if not _is_list(prompts):
        raise UsageError(f"prompts must be {_FORMS}, or a list of those, not {_shown(prompts)}")
    if prompts and all(_is_token(token) for token in prompts):
        return [parse_prompt(prompts)]
    return [parse_prompt(prompt) for prompt in prompts]


def parse_conversations(messages: Any) -> list[list[Message]]:
    """Read one conversation (a list of messages) or a list of them."""
    if _is_list(messages) and messages and not isinstance(messages[0], Mapping):
        return [parse_conversation(conversation) for conversation in messages]
    return [parse_conversation(messages)] if messages or not _is_list(messages) else []


def parse_conversation(messages: Any) -> list[Message]:
    """Read one conversation; raise UsageError if it is not a list of messages."""
    form = '{"role": ..., "content": ...}'
    if not _is_list(messages):
        raise UsageError(f"a conversation must be a list of messages {form}, not {_shown(messages)}")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise UsageError(f"a message must be {form}, not {_shown(message)}")
    return list(messages)


def parse_params(params: Any, count: int, default: SamplingParams) -> list[SamplingParams]:
    """Return one SamplingParams per prompt; one is used for all, None is the default."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if not _is_list(params):
        raise UsageError(f"sampling_params must be SamplingParams or a list of them, not {_shown(params)}")
    if len(params) != count:
        raise UsageError(
            f"sampling_params has {len(params)} entries, but prompts has {count}; give one for all, or one per prompt"
        )
    for one in params:
        if not isinstance(one, SamplingParams):
            raise UsageError(f"sampling_params must be SamplingParams or a list of them, not a list with {_shown(one)}")
    return list(params)


def _parse_mapping(prompt: Mapping[Any, Any]) -> ParsedPrompt:
    if unknown := sorted(map(str, prompt.keys() - {"prompt", "prompt_token_ids"})):
        raise UsageError(f"a prompt has the key prompt or prompt_token_ids, not {', '.join(unknown)}; leave it out")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise UsageError("a prompt has the key prompt or prompt_token_ids, and this one has neither; give one")
    if text is not None and not isinstance(text, str):
        raise UsageError(f"the key prompt of a prompt must be text, not {_shown(text)}")
    if token_ids is None:
        return ParsedPrompt(text)
    if not _is_list(token_ids) or not all(_is_token(token) for token in token_ids):
        raise UsageError(f"the key prompt_token_ids of a prompt must be a list of token ids, not {_shown(token_ids)}")
    return ParsedPrompt(text, [int(token) for token in token_ids])


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _is_token(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _shown(value: Any) -> str:
    """Return a value's text on one line of at most 60 characters, with its type if that text does not show it."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= 60 else f"{text[:57]}..."
    plain = value is None or isinstance(value, (str, bytes, int, float, list, tuple, dict))
    return text if plain else f"{type(value).__name__} {text}"
