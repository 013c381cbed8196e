"""Exceptions at any line of the engine, in a sampled form; `tests/fault_injection.py` tries every line."""

from __future__ import annotations

import pytest

from checkpoints import Pair
from fault_injection import FILES, faults, subject


@pytest.mark.parametrize(("draft", "budget"), [("draft", "17%"), ("ngram", "50%")])
def test_engine_recovers_from_an_exception_at_any_line(mixtral_pair: Pair, draft: str, budget: str) -> None:
    name = str(mixtral_pair.good) if draft == "draft" else draft
    options = {"expert_memory": budget, "dtype": "float32", "num_speculative_tokens": 4}
    with subject(str(mixtral_pair.target), name, **options) as tested:
        reached = set(tested.tracer.reached)
        assert {line.file for line in reached} >= {*FILES} - {"experts/workers.py", "experts/prefetch.py"}
        problems = tested.inject_all(faults(reached, 30))
    assert not problems
