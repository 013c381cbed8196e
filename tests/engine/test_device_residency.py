"""Forwards that look their experts up on the device, on a fake device that runs them beside the host.

The forward runs in a thread of its own, so a slot that is overwritten while a layer reads it changes tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from checkpoints import Pair, greedy_tokens, memory_for
from fake_cuda_engine import FakeCuda, JoinedGate, use_fake_cuda

pytest.importorskip("triton", reason="no triton")

from spmoe import LLM, SamplingParams
from spmoe.backends import cuda

PROMPT = list(b"def f(x):")
COUNT = 14
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Build engines on the fake device; threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield use_fake_cuda(monkeypatch)
    sys.setswitchinterval(before)


def make(pair: Pair, draft: str = "good", **options: Any) -> LLM:
    options = {"dtype": "float32", "progress": False, "max_num_seqs": 1, "residency_check": "device", **options}
    return LLM(str(pair.target), str(getattr(pair, draft)) if draft else None, **options)


def gate_of(llm: LLM) -> JoinedGate:
    gate = llm.engine.parts.runtime.gate
    assert isinstance(gate, JoinedGate)
    return gate


OPTIONS: list[dict[str, Any]] = [
    {"num_speculative_tokens": 0},
    {"num_speculative_tokens": 3},
    {"num_speculative_tokens": 3, "draft": "random"},
    {"num_speculative_tokens": 3, "expert_memory": "90%"},
    {"num_speculative_tokens": 2, "prefetch": "on-demand"},
    {"num_speculative_tokens": 3, "prefetch": "next-gate"},
    {"num_speculative_tokens": 2, "prefetch": "draft-gate+next-gate", "eviction": "lru-per-layer"},
    {"num_speculative_tokens": 3, "prefetch": "activation"},
    {"num_speculative_tokens": "auto"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("overlap_bytes", [1, 2**40], ids=["resident-first", "all-at-once"])
@pytest.mark.parametrize("family", ["mixtral", "qwen"])
def test_tokens_equal_those_of_transformers(
    fake: FakeCuda,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    overlap_bytes: int,
    options: dict[str, Any],
) -> None:
    monkeypatch.setattr(cuda, "_OVERLAP_BYTES", overlap_bytes)
    pair: Pair = request.getfixturevalue(f"{family}_pair")
    with make(pair, **{"expert_memory": "60%", **options}) as llm:
        assert not llm.notices
        found = [llm.generate(PROMPT, GREEDY)[0].token_ids for _ in range(2)]
        assert gate_of(llm).followed > 0
    assert found == [greedy_tokens(pair.target, PROMPT, COUNT)] * 2


def test_forwards_whose_experts_do_not_fit_are_left_to_the_host(fake: FakeCuda, pair: Pair) -> None:
    with make(pair, num_speculative_tokens=3, expert_memory=memory_for(2)) as llm:
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(pair.target, PROMPT, COUNT)
        assert gate_of(llm).followed == 0
