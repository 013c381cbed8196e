"""Ctrl-C at random moments, a few times; `tests/interrupts.py` does so many times."""

from __future__ import annotations

import pytest

from checkpoints import Pair
from interrupts import InterruptedEngine


@pytest.mark.parametrize("budget", ["17%", "50%"])
def test_engine_recovers_from_interrupts(mixtral_pair: Pair, budget: str) -> None:
    engine = InterruptedEngine(
        0, str(mixtral_pair.target), str(mixtral_pair.good), expert_memory=budget, dtype="float32"
    )
    problems = engine.interrupt(30, rebuild_every=8)
    engine.close()
    assert engine.interrupted > 10
    assert not problems
