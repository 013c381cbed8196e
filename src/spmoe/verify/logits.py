"""Logits processors of a request, and log-probabilities of its tokens.

A verification computes the logits of several positions at once. Each row is processed with the history that it would
have in plain decoding: prompt, output, and the draft tokens before it. So the output is that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Self

import torch
from torch import Tensor

from spmoe.config import SamplingParams
from spmoe.types import Sequence, TokenLogprobs
from spmoe.verify.grammar import GrammarMask


class LogitsProcessors:
    """Grammar, minimum length, biases and penalties of one sequence, applied in this order, in float32 in host memory.

    `end_tokens` are masked until `min_tokens` tokens are generated, unless the grammar allows nothing else. Presence
    and frequency penalties count the output's tokens, the repetition penalty also the prompt's.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        end_tokens: Collection[int],
        prompt_length: int,
        vocab_size: int,
        grammar: GrammarMask | None = None,
    ) -> None:
        self._sampling = sampling
        self._grammar = grammar
        self._end_tokens = sorted(token for token in end_tokens if token < vocab_size)  # others are never generated
        self._prompt_length = prompt_length
        bias = sampling.logit_bias or {}
        self._biased, self._biases = list(bias), torch.tensor(list(bias.values()), dtype=torch.float32)
        self._penalizes = bool(sampling.presence_penalty or sampling.frequency_penalty) or (
            sampling.repetition_penalty != 1.0
        )
        self._counted = 0  # tokens of the sequence in the two tensors below; it never loses one
        size = vocab_size if self._penalizes else 0
        self._seen = torch.zeros(size, dtype=torch.bool)  # in prompt or output
        self._output_counts = torch.zeros(size)

    @classmethod
    def of(
        cls,
        sampling: SamplingParams,
        end_tokens: Collection[int],
        prompt_length: int,
        vocab_size: int,
        grammar: GrammarMask | None = None,
    ) -> Self | None:
        """Return the processors that the parameters ask for; None if they change no logits."""
        made = cls(sampling, end_tokens, prompt_length, vocab_size, grammar)
        return made if made.applies(prompt_length) else None

    def applies(self, length: int) -> bool:
        """Return whether the logits after `length` tokens of prompt and output are changed."""
        masks = bool(self._end_tokens) and length - self._prompt_length < self._sampling.min_tokens
        return self._grammar is not None or self._penalizes or bool(self._biased) or masks

    def process(self, logits: Tensor, tokens: list[int], draft: list[int]) -> Tensor:
        """Return processed logits. The last row follows `tokens` and `draft`, each earlier row one draft token less."""
        # [rows, vocabulary] -> [rows, vocabulary] float32
        scores = logits.to("cpu", torch.float32, copy=True)
        first = len(draft) + 1 - len(scores)  # draft tokens before the first row
        generated = len(tokens) - self._prompt_length + first
        if self._grammar is not None:
            self._grammar.apply(scores, tokens[self._prompt_length :], draft)
        for row in range(min(len(scores), self._sampling.min_tokens - generated)):
            if self._grammar is None or self._can_go_on(scores[row]):
                scores[row, self._end_tokens] = float("-inf")
        if self._biased:
            scores[:, self._biased] += self._biases
        if self._penalizes:
            self._count(tokens)
            seen, counts = self._seen.clone(), self._output_counts.clone()
            for row in range(-first, len(scores)):
                if row >= 0:
                    scores[row] = self._penalized(scores[row], seen, counts)
                if (place := first + row) < len(draft):
                    seen[draft[place]] = True
                    counts[draft[place]] += 1
        return scores

    def _can_go_on(self, scores: Tensor) -> bool:
        """Return whether the grammar allows another token than an end token."""  # scores: [vocabulary]
        others = torch.ones(len(scores), dtype=torch.bool)
        others[self._end_tokens] = False
        return bool(scores[others].max() > float("-inf"))

    def _count(self, tokens: list[int]) -> None:
        """Count the tokens that are new since the last call."""
        new = tokens[self._counted :]
        output = torch.tensor(new[max(0, self._prompt_length - self._counted) :], dtype=torch.int64)
        self._seen[torch.tensor(new, dtype=torch.int64)] = True
        self._output_counts.index_add_(0, output, torch.ones(len(output)))
        self._counted = len(tokens)

    def _penalized(self, scores: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
        # each: [vocabulary]
        sampling = self._sampling
        if (penalty := sampling.repetition_penalty) != 1.0:
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        scores = scores - sampling.frequency_penalty * counts
        return scores - sampling.presence_penalty * (counts > 0)


def process_logits(logits: Tensor, sequence: Sequence, draft: list[int]) -> Tensor:
    """Apply the sequence's processors; return the same tensor if there are none.

    The last row follows the sequence and the draft tokens, each earlier row one draft token less.
    """
    processors = sequence.processors
    if processors is None or not processors.applies(len(sequence.tokens)):
        return logits
    return processors.process(logits, sequence.tokens, draft)


def token_logprobs(logits: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of tokens, one per row, and of the `count` most likely ones; -1: of all.

    They are those of the model itself: before processors, temperature and filters.
    """
    # logits: [rows, vocabulary]; rows after the last token are not used
    logprobs = logits[: len(tokens)].float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs >= chosen).sum(dim=-1).tolist()
    top = logprobs.topk(logprobs.shape[-1] if count < 0 else min(count, logprobs.shape[-1]), dim=-1)
    rows = zip(chosen[:, 0].tolist(), ranks, top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprobs(value, rank, dict(zip(ids, values, strict=True))) for value, rank, ids, values in rows]
