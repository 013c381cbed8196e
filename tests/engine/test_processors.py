"""Penalties, biases, minimum length and log-probabilities are exact under speculation, with every drafter."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_exactness import FALSE_ALARM, p_value

from checkpoints import Pair, byte_tokenizer, greedy_tokens, reference, save_pair, seeded
from checkpoints import mistral as make_mistral
from checkpoints import mixtral as make_mixtral
from spmoe import LLM, SamplingParams
from spmoe.verify.logits import LogitsProcessors

PROMPT = [(29 * i + 7) % 251 for i in range(11)]
COUNT = 16
PLAIN = SamplingParams(max_tokens=COUNT, ignore_eos=True)
EVERYTHING = replace(
    PLAIN,
    repetition_penalty=1.4,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={65: 1.5, 66: -2.0},
    min_tokens=6,
)


@pytest.fixture(scope="module")
def expected(mixtral_pair: Pair) -> list[int]:
    return greedy_tokens(mixtral_pair.target, PROMPT, COUNT)


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory, mixtral_pair: Pair, expected: list[int]) -> Pair:
    """Return the pair with an EOS token that greedy decoding generates early."""
    end = next(t for i, t in enumerate(expected) if i >= 3 and t not in expected[:i])
    target = tmp_path_factory.mktemp("ending") / "target"
    shutil.copytree(mixtral_pair.target, target)
    model = reference(target)
    model.generation_config.eos_token_id = end
    model.generation_config.save_pretrained(target)
    return replace(mixtral_pair, target=target)


def build(pair: Pair, draft: str | None, k: int = 4, **options: Any) -> LLM:
    found = {"good": pair.good, "random": pair.random}.get(draft or "", draft)
    return LLM(pair.target, found, num_speculative_tokens=k, expert_memory="50%", progress=False, **options)


def generate_with_transformers(directory: Path, eos: int | None, **options: Any) -> list[int]:
    ids, model = torch.tensor([PROMPT]), reference(directory)
    model.generation_config.eos_token_id = eos
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COUNT, pad_token_id=0, **options
    )
    found: list[int] = output[0, len(PROMPT) :].tolist()
    return found


DRAFTS = [("good", 0), ("good", 4), ("random", 3), ("ngram", 4), ("self:int8", 3)]


@pytest.fixture(scope="module")
def of_transformers(mixtral_pair: Pair, expected: list[int]) -> list[tuple[SamplingParams, list[int]]]:
    """Return sampling parameters, and the tokens that transformers generates with the same options."""
    bias = {expected[2]: -50.0, 77: 3.0}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
        ({"logit_bias": bias}, {"sequence_bias": {(token,): value for token, value in bias.items()}}),
    ]
    target = mixtral_pair.target
    return [(replace(PLAIN, **ours), generate_with_transformers(target, None, **theirs)) for ours, theirs in cases]


@pytest.mark.parametrize(("draft", "k"), DRAFTS)
def test_greedy_output_equals_transformers(
    mixtral_pair: Pair,
    expected: list[int],
    of_transformers: list[tuple[SamplingParams, list[int]]],
    draft: str,
    k: int,
) -> None:
    with build(mixtral_pair, draft, k) as llm:
        for params, tokens in of_transformers:
            assert tokens != expected, "the option has an effect"
            assert llm.generate(PROMPT, params)[0].token_ids == tokens
        assert (llm.engine.counters.drafted > 0) == (k > 0)


@pytest.mark.parametrize("k", [0, 4])
def test_minimum_length_equals_transformers(ending: Pair, k: int) -> None:
    end = reference(ending.target).generation_config.eos_token_id
    early, late = (generate_with_transformers(ending.target, end, min_new_tokens=count) for count in (0, 9))
    assert early[-1] == end
    assert len(early) < 9 <= len(late)
    with build(ending, "good", k) as llm:
        params = SamplingParams(max_tokens=COUNT)
        assert llm.generate(PROMPT, params)[0].token_ids == early
        assert llm.generate(PROMPT, replace(params, min_tokens=9))[0].token_ids == late
        assert llm.generate(PROMPT, replace(params, min_tokens=9, ignore_eos=True))[0].token_ids[:9] == late[:9]


@pytest.fixture(scope="module")
def processed(mixtral_pair: Pair) -> dict[str, list[int]]:
    """Return the output of plain decoding with each option, and with all of them."""
    with build(mixtral_pair, None, 0) as llm:
        found = {name: llm.generate(PROMPT, params)[0].token_ids for name, params in OPTIONS.items()}
        found["none"] = llm.generate(PROMPT, PLAIN)[0].token_ids
    return found


OPTIONS = {
    "presence": replace(PLAIN, presence_penalty=2.0),
    "frequency": replace(PLAIN, frequency_penalty=1.5),
    "negative frequency": replace(PLAIN, frequency_penalty=-1.0),
    "everything": EVERYTHING,
}


@pytest.mark.parametrize(("draft", "k"), DRAFTS[1:])
def test_greedy_output_equals_plain_decoding(
    mixtral_pair: Pair, processed: dict[str, list[int]], draft: str, k: int
) -> None:
    with build(mixtral_pair, draft, k) as llm:
        for name, params in OPTIONS.items():
            assert processed[name] != processed["none"], "the option has an effect"
            assert llm.generate(PROMPT, params)[0].token_ids == processed[name]
        assert llm.engine.counters.drafted > 0
        if draft == "good":
            assert llm.engine.counters.accepted > 0


def test_processors_that_ignore_the_draft_are_detected(
    mixtral_pair: Pair, processed: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LogitsProcessors.process

    def process(self: LogitsProcessors, logits: torch.Tensor, tokens: list[int], draft: list[int]) -> torch.Tensor:
        return torch.cat([original(self, row[None], tokens, []) for row in logits])

    monkeypatch.setattr(LogitsProcessors, "process", process)
    with build(mixtral_pair, "good") as llm:
        outputs = {name: llm.generate(PROMPT, params)[0].token_ids for name, params in OPTIONS.items()}
    assert any(outputs[name] != processed[name] for name in OPTIONS)


def test_drafts_are_processed_too(mixtral_pair: Pair) -> None:
    """A bias that decides every token leaves nothing to reject."""
    with build(mixtral_pair, "random") as llm:
        output = llm.generate(PROMPT, replace(PLAIN, logit_bias={65: 100.0}))[0]
        assert output.token_ids == [65] * COUNT
        assert output.stats.counters.accepted == output.stats.counters.drafted > 0
        sampled = llm.generate(PROMPT, replace(PLAIN, logit_bias={65: 100.0}, temperature=1.0, seed=1))[0]
        assert sampled.token_ids == [65] * COUNT
        assert sampled.stats.counters.accepted == sampled.stats.counters.drafted > 0


# ---- sampling

DRAWS = 160
WIDTH = 3
START = [84]
SAMPLED = SamplingParams(
    max_tokens=3,
    temperature=0.8,
    top_k=WIDTH,
    ignore_eos=True,
    repetition_penalty=1.3,
    presence_penalty=0.7,
    frequency_penalty=0.5,
    min_tokens=2,
)


@pytest.fixture(scope="module")
def flat_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair with many likely continuations, to which the draft gives other probabilities."""
    return save_pair(
        tmp_path_factory.mktemp("flat"),
        "mixtral",
        noise=0.3,
        target=seeded(make_mixtral, 71, num_hidden_layers=2),
        draft=seeded(make_mistral, 70, num_hidden_layers=2),
    )


@pytest.fixture(scope="module")
def biases(flat_pair: Pair) -> dict[int, float]:
    """Favour few tokens, so that continuations repeat tokens and penalties matter."""
    with torch.no_grad():
        best = reference(flat_pair.target)(torch.tensor([START])).logits[0, -1].topk(4).indices.tolist()
    return dict.fromkeys(best, 4.0)


def sequence_probabilities(directory: Path, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation: logits of transformers, processors written out."""
    model = reference(directory)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(params.max_tokens):
        longer = {}
        for tokens, mass in found.items():
            with torch.no_grad():
                row = model(torch.tensor([START + list(tokens)])).logits[0, -1].double()
            if len(tokens) < params.min_tokens:
                row[byte_tokenizer().eos_token_id] = float("-inf")
            for token, value in (params.logit_bias or {}).items():
                row[token] += value
            for token in {*START, *tokens}:
                scale = params.repetition_penalty
                row[token] = row[token] * scale if row[token] < 0 else row[token] / scale
            for token in set(tokens):
                row[token] -= params.frequency_penalty * tokens.count(token) + params.presence_penalty
            best = (row / params.temperature).topk(params.top_k)
            for token, share in zip(best.indices.tolist(), best.values.softmax(dim=-1).tolist(), strict=True):
                longer[(*tokens, token)] = mass * share
        found = longer
    return found


def draw_continuations(pair: Pair, params: SamplingParams) -> list[tuple[int, ...]]:
    with build(pair, "good", 2, prefetch="on-demand") as llm:
        drawn = [tuple(llm.generate(START, replace(params, seed=seed))[0].token_ids) for seed in range(DRAWS)]
        assert 0.1 < llm.engine.counters.accepted / llm.engine.counters.drafted < 0.95
    return drawn


def test_sampled_output_follows_the_processed_distribution(flat_pair: Pair, biases: Mapping[int, float]) -> None:
    params = replace(SAMPLED, logit_bias=biases)
    probabilities = sequence_probabilities(flat_pair.target, params)
    drawn = draw_continuations(flat_pair, params)
    assert p_value(drawn, probabilities) > FALSE_ALARM
    unpenalized = replace(params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    assert p_value(drawn, sequence_probabilities(flat_pair.target, unpenalized)) < FALSE_ALARM, "it would be noticed"


# ---- log-probabilities


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}, {"temperature": 0.9, "seed": 3}])
def test_logprobs_are_those_of_the_model(mixtral_pair: Pair, options: dict[str, Any]) -> None:
    """Penalties and temperature do not change them."""
    model, params = reference(mixtral_pair.target), replace(PLAIN, logprobs=3, **options)
    for draft, k in (("good", 0), ("good", 4)):
        with build(mixtral_pair, draft, k) as llm:
            output = llm.generate(PROMPT, params)[0].outputs[0]
            decode = llm.get_tokenizer().decode
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.log_softmax(dim=-1)
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids) == COUNT
        total = 0.0
        for row, token, found in zip(expected, output.token_ids, output.logprobs, strict=True):
            order = row.argsort(descending=True).tolist()
            assert next(iter(found)) == token
            assert set(found) == {token, *order[:3]}
            for other, one in found.items():
                assert one.logprob == pytest.approx(float(row[other]), abs=1e-4)
                assert one.rank == order.index(other) + 1
                assert one.decoded_token == decode([other])
            total += found[token].logprob
        assert output.cumulative_logprob == pytest.approx(total)


def test_logprobs_end_with_the_text(mixtral_pair: Pair, expected: list[int]) -> None:
    """Tokens that a step generates after a stop token have none."""
    at = next(i for i, t in enumerate(expected) if i >= 3 and t not in expected[:i])
    with build(mixtral_pair, "good") as llm:
        params = replace(PLAIN, stop_token_ids=[expected[at]], logprobs=0)
        output = llm.generate(PROMPT, params)[0].outputs[0]
        assert llm.generate(PROMPT, PLAIN)[0].outputs[0].logprobs is None
    assert output.token_ids == expected[: at + 1]
    assert output.logprobs is not None
    assert [set(one) for one in output.logprobs] == [{token} for token in output.token_ids]
