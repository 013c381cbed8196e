"""Verification: greedy tokens of the engine, under every configuration, against transformers on the same checkpoint.

The engine generates first and is closed; then the reference has its memory. The reference reads prompt and output in
one forward and must find each generated token most likely, which equals greedy search up to the first divergence and
still checks what follows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from spmoe.bench.runs import AroundGeneration, IsolatedConfigs
from spmoe.config import DraftTokens, SamplingParams, max_draft_tokens
from spmoe.engine.engine import Engine
from spmoe.engine.llm import LLM, Generation
from spmoe.errors import PromptError, SpmoeError, UsageError
from spmoe.formats.layout import dtype_name
from spmoe.models.reference import GENERATE, Reference, Scored
from spmoe.models.shipped import sample_text
from spmoe.predict.policies import needs_recording, without_draft
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES

# A divergence is a near-tie if the reference's two logits are at most this many steps apart; a step is the distance of
# neighbouring values of the dtype. Two correct computations differ by up to about this: transformers' own forward, with
# and without a KV cache or with other experts kernels, moves the distance of the two most likely tokens of the shipped
# pair by 1 to 3 steps (median) and by 7 to 16 (99th percentile), in every dtype.
NEAR_TIE_STEPS = 16
EQUAL, NEAR_TIE, DIFFERENT, NOT_COMPARED = "equal", "near-tie", "different", "not compared"
_TEXTS = ("The history of the printing press begins with", "def fibonacci(n):\n")
_LONG_EXTRA = 64  # tokens of the long built-in prompt beyond the first prefill chunk
_RANDOM_LENGTHS = (8, 40)  # of random prompts for checkpoints without a tokenizer, beside the long one

Notify = Callable[[str], None]
Report = Callable[[int, int, str], None]  # (done, total, detail)


# ---- configurations


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """One configuration of the engine: a row of the result table."""

    prefetch: str
    draft_tokens: DraftTokens  # K
    eviction: str = "auto"

    def __str__(self) -> str:
        eviction = "" if self.eviction == "auto" else f", {self.eviction}"
        return f"{self.prefetch}, K={self.draft_tokens}{eviction}"

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options that a loaded engine is reconfigured with."""
        return {
            "prefetch": self.prefetch,
            "num_speculative_tokens": self.draft_tokens,
            "eviction": self.eviction,
        }


def make_configs(
    prefetches: Iterable[str], draft_tokens: Iterable[DraftTokens], evictions: Iterable[str]
) -> list[VerifyConfig]:
    """Return the cross product without duplicates; with K = 0, policies that predict from the draft are on-demand."""
    found = []
    for prefetch, eviction, k in product(prefetches, evictions, draft_tokens):
        if needs_recording(prefetch):
            raise UsageError(
                f"prefetch policy {prefetch} needs recorded routing, which `spmoe verify` has none of; leave it out"
            )
        found.append(VerifyConfig(prefetch if k else without_draft(prefetch), k, eviction))
    return list(dict.fromkeys(found))


def every_config(prefetch: str, draft_tokens: Sequence[DraftTokens], eviction: str) -> list[VerifyConfig]:
    """Return every prefetch policy with every K (also 1 and auto), and every eviction policy with the last K."""
    prefetches = [prefetch, *(name for name in PREFETCH_POLICIES.names() if not needs_recording(name))]
    ks = [*draft_tokens, 1, "auto"] if any(draft_tokens) else list(draft_tokens)
    found = make_configs(prefetches, ks, [eviction])
    return list(dict.fromkeys(found + make_configs([prefetch], [draft_tokens[-1]], EVICTION_POLICIES.names())))


def without_drafts(configs: Iterable[VerifyConfig]) -> list[VerifyConfig]:
    """Return the configurations with K = 0, without duplicates: for an engine whose draft proposes nothing."""
    return list(dict.fromkeys(VerifyConfig(without_draft(one.prefetch), 0, one.eviction) for one in configs))


def largest_draft(configs: Iterable[VerifyConfig]) -> int:
    """Return the K to build the engine with: forwards are captured for up to that many draft tokens."""
    return max(max_draft_tokens(config.draft_tokens) for config in configs)


# ---- prompts


def encode_prompts(engine: Engine, texts: Sequence[str], token_ids: Sequence[list[int]], count: int) -> list[list[int]]:
    """Return the prompts as token ids; without any, the built-in ones, shortened to the context less `count` tokens."""
    tokenizer, vocabulary, limit = engine.parts.tokenizer, engine.target.vocab_size, engine.parts.max_model_len - count
    if limit < 1:
        raise PromptError(
            f"--max-tokens {count} leaves no room for a prompt in the context of {engine.parts.max_model_len}; lower it"
        )
    if not texts and not token_ids:
        return [ids[:limit] for ids in _built_in_prompts(engine)]
    if texts and tokenizer is None:
        raise UsageError(
            f"{engine.config.model} ships no tokenizer, so a text cannot be a prompt; give --prompt-token-ids, or "
            "neither for random tokens"
        )
    prompts = [*(tokenizer(text, verbose=False)["input_ids"] for text in texts), *map(list, token_ids)]
    for number, ids in enumerate(prompts, 1):
        if not ids:
            raise PromptError(f"prompt {number} is empty; give at least one token")
        if len(ids) > limit:
            raise PromptError(
                f"prompt {number} has {len(ids)} tokens, which with --max-tokens {count} exceeds the context of "
                f"{engine.parts.max_model_len}; shorten it or lower --max-tokens"
            )
        if not all(0 <= token < vocabulary for token in ids):
            raise PromptError(
                f"prompt {number} has token ids outside the model's vocabulary of {vocabulary}; remove them"
            )
    return prompts


def _built_in_prompts(engine: Engine) -> list[list[int]]:
    """Return two short prompts and one that is longer than a prefill chunk; random tokens without a tokenizer."""
    long = engine.config.prefill_chunk + _LONG_EXTRA
    tokenizer = engine.parts.tokenizer
    if tokenizer is not None:
        short = [tokenizer(text)["input_ids"] for text in _TEXTS]
        return [*short, tokenizer(sample_text()[: 20 * long], verbose=False)["input_ids"][:long]]
    rng = torch.Generator().manual_seed(0)
    return [torch.randint(engine.target.vocab_size, (n,), generator=rng).tolist() for n in (*_RANDOM_LENGTHS, long)]


# ---- results


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A generated token that the reference does not find most likely."""

    position: int  # index in the output
    ours: int
    theirs: int
    margin: float  # reference logit of their token less that of ours
    steps: float  # the margin in steps of the dtype

    @property
    def near_tie(self) -> bool:
        """Whether the margin is within rounding; false if a logit is not a number."""
        return self.steps <= NEAR_TIE_STEPS

    @classmethod
    def of(cls, position: int, ours: int, scored: Scored, dtype: torch.dtype) -> Mismatch:
        """Make one from the reference's logits."""
        margin = scored.logit - scored.own_logit
        largest = max(abs(scored.logit), abs(scored.own_logit))
        return cls(position, ours, scored.token, margin, margin / spacing(largest, dtype))


@dataclass(frozen=True, slots=True)
class Check:
    """One output compared with the reference."""

    compared: int  # tokens
    mismatches: tuple[Mismatch, ...] = ()

    @property
    def verdict(self) -> str:
        """EQUAL, NEAR_TIE or DIFFERENT."""
        if not self.mismatches:
            return EQUAL
        return NEAR_TIE if all(mismatch.near_tie for mismatch in self.mismatches) else DIFFERENT


@dataclass(frozen=True, slots=True)
class ConfigResult:
    """All checks of one configuration."""

    config: VerifyConfig
    policy: str | None  # that ran: the one asked for, or its fallback; None if nothing ran
    checks: Mapping[int, Check]  # by index of the prompt
    drafted: int = 0  # tokens
    accepted: int = 0  # draft tokens; with none, speculation was not tested

    @property
    def compared(self) -> int:
        """Number of tokens compared."""
        return sum(check.compared for check in self.checks.values())

    @property
    def verdict(self) -> str:
        """The worst verdict of all prompts; NOT_COMPARED if there is none."""
        return worst(check.verdict for check in self.checks.values())

    @property
    def divergence(self) -> tuple[int, Mismatch] | None:
        """The first mismatch that leads to the verdict, with the index of its prompt."""
        found = [(prompt, one) for prompt, check in sorted(self.checks.items()) for one in check.mismatches]
        if self.verdict == DIFFERENT:
            found = [(prompt, one) for prompt, one in found if not one.near_tie]
        return found[0] if found else None


def worst(verdicts: Iterable[str]) -> str:
    """Return the worst of several verdicts; NOT_COMPARED if there is none, or if one is."""
    order = (DIFFERENT, NOT_COMPARED, NEAR_TIE, EQUAL)
    return min(verdicts, key=order.index, default=NOT_COMPARED)


def spacing(value: float, dtype: torch.dtype) -> float:
    """Return the distance of neighbouring values of a dtype at `value`."""
    limits = torch.finfo(dtype)
    if not math.isfinite(value):
        return math.nan
    return limits.eps * 2.0 ** max(math.frexp(abs(value))[1] - 1, math.frexp(limits.tiny)[1] - 1)


# ---- the comparison


@dataclass
class Verification:
    """Outputs of the engine and their checks. Results so far are available at any time, also after an interrupt."""

    prompts: list[list[int]]  # token ids
    configs: list[VerifyConfig]
    max_tokens: int
    dtype: torch.dtype
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    outputs: dict[tuple[VerifyConfig, int], list[int]] = field(default_factory=dict)  # tokens by prompt's index
    _policies: dict[VerifyConfig, str] = field(default_factory=dict)
    _drafts: dict[VerifyConfig, tuple[int, int]] = field(default_factory=dict)  # tokens drafted and accepted
    _checks: dict[tuple[int, tuple[int, ...]], Check] = field(default_factory=dict)  # by prompt and output

    @property
    def results(self) -> list[ConfigResult]:
        """Results so far, one per configuration."""
        found = []
        for config in self.configs:
            keys = {prompt: (prompt, tuple(out)) for (one, prompt), out in self.outputs.items() if one == config}
            checks = {prompt: self._checks[key] for prompt, key in keys.items() if key in self._checks}
            drafts = self._drafts.get(config, (0, 0))
            found.append(ConfigResult(config, self._policies.get(config), checks, *drafts))
        return found

    @property
    def verdict(self) -> str:
        """The worst verdict of all configurations."""
        return worst(result.verdict for result in self.results)

    def generate(
        self,
        llm: LLM,
        report: Report,
        around_generation: AroundGeneration = lambda generation: nullcontext(),
    ) -> None:
        """Complete every prompt under every configuration; a generation that is stopped ends it early."""
        isolated, total = IsolatedConfigs(llm.engine), len(self.configs) * len(self.prompts)
        for done, (config, prompt) in enumerate(product(self.configs, range(len(self.prompts)))):
            where = f"{config}; prompt {prompt + 1} of {len(self.prompts)} ({len(self.prompts[prompt])} tokens)"
            report(done, total, where)
            isolated.select(config, config.engine_options)
            self._policies[config] = llm.engine.loop.policy.name
            generation, before = (
                greedy_generation(llm, self.prompts[prompt], self.max_tokens),
                llm.engine.counters.copy(),
            )
            with around_generation(generation):
                generation.run()
            counts, (drafted, accepted) = llm.engine.counters.minus(before), self._drafts.get(config, (0, 0))
            self._drafts[config] = (drafted + counts.drafted, accepted + counts.accepted)
            if generation.token_ids:
                self.outputs[config, prompt] = list(generation.token_ids)
            if generation.stopped:
                self.interrupted = True
                return
        report(total, total, "")

    def compare(self, reference: Reference, method: str, notify: Notify) -> None:
        """Compare every output with the reference; equal outputs are compared once."""
        distinct = dict.fromkeys((prompt, tuple(output)) for (_, prompt), output in self.outputs.items())
        rest = list(distinct)
        if method == GENERATE:
            rest = self._compare_generated(reference, rest, notify)
        if not rest:
            return
        notify(f"Comparing with transformers' forward: {len(rest)} output{'s' * (len(rest) > 1)}")
        sequences = [(self.prompts[prompt], list(output)) for prompt, output in rest]
        for index, scored in reference.score(sequences):
            self._checks[rest[index]] = self._check(rest[index][1], scored)

    def _compare_generated(
        self, reference: Reference, keys: Sequence[tuple[int, tuple[int, ...]]], notify: Notify
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Compare with transformers' `generate`; return the outputs that remain if it cannot run this model."""
        for prompt in sorted({prompt for prompt, _ in keys}):
            outputs = [key for key in keys if key[0] == prompt]
            notify(f"Comparing with transformers' generate: prompt {prompt + 1} of {len(self.prompts)}")
            try:
                generated = reference.generate(self.prompts[prompt], max(len(output) for _, output in outputs))
            except SpmoeError as error:
                self.notes.append(f"generate of transformers failed, so its forward is compared with ({error})")
                return [key for key in keys if key not in self._checks]
            for key in outputs:
                output = key[1]
                first = next(
                    (i for i, (a, b) in enumerate(zip(output, generated.tokens, strict=False)) if a != b), None
                )
                if first is None:
                    self._checks[key] = Check(len(output))
                    continue
                ((_, scored),) = reference.score([(self.prompts[prompt], list(output))])
                check = self._check(output, scored)
                found = Mismatch.of(first, output[first], generated.score(first, output[first]), self.dtype)
                if not found.near_tie and len(scored) > first and scored[first].token == output[first]:
                    self.notes.append(
                        f"prompt {prompt + 1}, token {first + 1}: generate of transformers differs from its own "
                        "forward without a KV cache, which agrees with this engine and is compared with"
                    )
                    self._checks[key] = check
                else:
                    later = (one for one in check.mismatches if one.position > first)
                    self._checks[key] = Check(max(check.compared, first + 1), (found, *later))
        return []

    def _check(self, output: Sequence[int], scored: Sequence[Scored]) -> Check:
        rows = enumerate(zip(output, scored, strict=False))
        found = tuple(Mismatch.of(i, own, one, self.dtype) for i, (own, one) in rows if own != one.token)
        return Check(len(scored), found)


def greedy_generation(llm: LLM, prompt: list[int], count: int) -> Generation:
    """Return a greedy generation of `count` tokens; end-of-text tokens do not end it."""
    return llm.stream(prompt, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))


@dataclass(frozen=True, slots=True)
class ConversionCost:
    """Difference that a lossy conversion of experts makes on a text: the converted model against its original."""

    tokens: int
    greedy_agreement: float  # share of positions where both models' most likely tokens are equal
    kl_divergence: float  # of the converted model from the original, in nats per token
    kl_divergence_p99: float  # 99th percentile over tokens
    perplexity: float  # of the converted model
    original_perplexity: float


def conversion_cost(
    windows: Sequence[list[int]], original: Iterable[torch.Tensor], converted: Iterable[torch.Tensor]
) -> ConversionCost:
    """Compare the logits of two models, [tokens, vocabulary] for each window of tokens."""
    agreement, divergence, losses = [], [], []
    for window, p, q in zip(windows, original, converted, strict=True):
        p, q = p.log_softmax(dim=-1), q.log_softmax(dim=-1)
        agreement.append(p.argmax(dim=-1) == q.argmax(dim=-1))
        divergence.append((p.exp() * (p - q)).sum(dim=-1))
        following = torch.tensor(window[1:])[:, None]
        losses.append(torch.stack([-one[:-1].gather(1, following)[:, 0] for one in (q, p)]))
    found, loss = torch.cat(divergence).double(), torch.cat(losses, dim=1).double().mean(dim=1).exp()
    return ConversionCost(
        len(found),
        float(torch.cat(agreement).double().mean()),
        float(found.mean()),
        float(found.quantile(0.99)),
        float(loss[0]),
        float(loss[1]),
    )


def to_dict(verification: Verification, tokenizer: Any) -> dict[str, Any]:
    """Return the results as plain values, for JSON."""
    rows = []
    for result in verification.results:
        row: dict[str, Any] = {
            **result.config.engine_options,
            "policy": result.policy,
            "tokens": result.compared,
            "drafted": result.drafted,
            "accepted": result.accepted,
            "verdict": result.verdict,
            "mismatches": sum(len(check.mismatches) for check in result.checks.values()),
            "divergence": None,
        }
        if (found := result.divergence) is not None:
            prompt, one = found
            row["divergence"] = {
                "prompt": prompt,
                "position": one.position,
                "token": one.ours,
                "text": token_text(tokenizer, one.ours),
                "reference_token": one.theirs,
                "reference_text": token_text(tokenizer, one.theirs),
                "logit_margin": one.margin if math.isfinite(one.margin) else None,
                "margin_steps": one.steps if math.isfinite(one.steps) else None,
            }
        rows.append(row)
    return {
        "verdict": verification.verdict,
        "interrupted": verification.interrupted,
        "prompt_tokens": [len(prompt) for prompt in verification.prompts],
        "max_tokens": verification.max_tokens,
        "dtype": dtype_name(verification.dtype),
        "near_tie_steps": NEAR_TIE_STEPS,
        "notes": verification.notes,
        "configurations": rows,
    }


def token_text(tokenizer: Any, token: int) -> str | None:
    """Return a token's text; None without a tokenizer."""
    return None if tokenizer is None else str(tokenizer.decode([token]))
