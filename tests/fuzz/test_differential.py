"""The fuzzer: a few cases hold, faults are detected, and a failure is made smaller and printed as a command."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import replace
from typing import Any

import differential
import pytest
from differential import Case, Outcome, describe, draw_case, fuzz, make_tokenizer, run_case, shrink

from spmoe.backends import cpu
from spmoe.engine.text import TextStream
from spmoe.models.families import VOCABULARY
from spmoe.verify.greedy import verify_greedy

SEED, CASES = 0, 6

SPECULATIVE = Case(
    "mixtral",
    weights=4,
    draft="mostly-right",
    slots=0.3,
    options={"num_speculative_tokens": 3, "prefill_chunk": 2},
    requests=[
        {"prompt": [60, 62, 61, 60, 62], "max_tokens": 10, "ignore_eos": True},
        {"prompt": [50], "max_tokens": 2},
    ],
)


def test_engine_equals_transformers() -> None:
    """`python tests/fuzz/differential.py --seconds 600 --seed 1` runs for longer."""
    kinds, tokens = Counter[str](), 0
    for number, case, outcome in fuzz(SEED, None, CASES):
        assert not outcome.failed, f"seed {SEED}, case {number}: {describe(case, outcome)}"
        kinds[outcome.kind] += 1
        tokens += outcome.tokens
    assert kinds["equal"] >= CASES - 1, kinds
    assert tokens > 10 * CASES


def test_drawn_cases_are_repeatable_and_printable() -> None:
    case = draw_case(SEED, 3)
    assert case == draw_case(SEED, 3) != draw_case(SEED, 4)
    command = shlex.split(describe(case, Outcome("different", "why")).splitlines()[-1])
    assert command[:3] == ["python", "tests/fuzz/differential.py", "--case"]
    assert Case.parse(command[3]) == case


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_tokenizers_spell_characters_in_bytes(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    assert len(tokenizer) == VOCABULARY
    texts = [tokenizer.decode(tokens) for tokens in differential._SPELLED]
    assert texts == [*differential._CHARACTERS, "".join(differential._CHARACTERS)]


# ---- faults


def accept_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(draft: Any, argmax: Any) -> Any:
        result = verify_greedy(draft, argmax)
        return result._replace(accepted=min(result.accepted + 1, len(draft.tokens)))

    monkeypatch.setattr("spmoe.engine.loop.verify_greedy", verify)


def scale_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    original = cpu.run_expert
    monkeypatch.setattr(cpu, "run_expert", lambda *args: 1.5 * original(*args))


def decode_without_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextStream, "_undecoded", lambda self: self._decode(self._ids[self._decoded :]))


def fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(*args: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr("spmoe.engine.loop.verify_greedy", verify)


def test_fault_free_case_is_equal() -> None:
    outcome = run_case(SPECULATIVE)
    assert (outcome.kind, outcome.tokens) == ("equal", 12)


@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        (accept_one_too_many, "different", "instead of"),
        (scale_experts, "different", "margin"),
        (decode_without_context, "different", "text"),
        (fail, "error", "ValueError: broken"),
    ],
)
def test_fault_is_detected(fault: Any, kind: str, detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    whole = {"logit_bias": {str(token): -100.0 for token in differential._PARTIAL}}  # no parts of characters
    requests = [{**request, **whole} for request in SPECULATIVE.requests]
    outcome = run_case(replace(SPECULATIVE, tokenizer="byte-fallback", requests=requests))
    assert outcome.kind == kind
    assert detail in outcome.detail


def test_failing_case_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault shows with speculation only, so that the draft and K stay; everything else goes."""
    monkeypatch.setattr(differential, "run_case", lambda case: Outcome("different" if fails(case) else "equal"))

    def fails(case: Case) -> bool:
        long = any(request.get("max_tokens", 256) >= 3 for request in case.requests)
        return case.draft == "mostly-right" and case.options.get("num_speculative_tokens", 4) > 0 and long

    found = shrink(SPECULATIVE, "different")
    assert found == Case("mixtral", weights=4, draft="mostly-right", requests=[{"prompt": [62], "max_tokens": 3}])
