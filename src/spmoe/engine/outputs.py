"""Results of requests, with the names of vLLM's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from spmoe.engine.stats import Stats

INTERRUPTED = "interrupted"  # finish reason of a completion that was stopped, or has not ended yet


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position, before penalties, temperature and filters."""

    logprob: float
    rank: int  # 1: the most likely token
    decoded_token: str | None  # None without a tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int  # among the `n` completions of the prompt
    text: str
    token_ids: list[int]  # with the final EOS or stop token
    finish_reason: str  # "stop", "length" or "interrupted"
    stop_reason: int | str | None = None  # stop token or stop string that ended it; None: EOS, or not ended by one
    cumulative_logprob: float | None = None  # None unless `logprobs` was given
    logprobs: list[dict[int, Logprob]] | None = None  # by position: the token itself first, then the most likely ones

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "cumulative_logprob": self.cumulative_logprob,
            "logprobs": None
            if self.logprobs is None
            else [{str(token): asdict(one) for token, one in position.items()} for position in self.logprobs],
        }


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Result of one prompt. `text`, `token_ids` and `finish_reason` are those of the first completion."""

    request_id: str
    prompt: str | None  # None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    stats: Stats

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Finish reason of the first completion."""
        return self.outputs[0].finish_reason

    @property
    def usage(self) -> dict[str, int]:
        """Token counts of all completions, under the names of OpenAI's API."""
        prompt, output = self.stats.prompt_tokens, self.stats.output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON: the first completion's and, with `n` or `logprobs`, a list of all in full."""
        full = len(self.outputs) > 1 or self.outputs[0].logprobs is not None
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            **({"outputs": [one.to_dict() for one in self.outputs]} if full else {}),
            "usage": self.usage,
            "stats": self.stats.to_dict(),
        }
