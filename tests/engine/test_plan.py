"""The plan of `spmoe info` and the engine that is built from the same configuration agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints import LAYERS, Pair, byte_tokenizer, memory_for, mistral, save, seeded
from spmoe import LLM
from spmoe.config import EngineConfig
from spmoe.engine.plan import Plan, make_plan
from spmoe.errors import BudgetError, UsageError


@pytest.fixture(scope="module")
def drafts(mixtral_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Return drafts by kind."""
    root: Path = tmp_path_factory.mktemp("drafts")
    narrow = save(seeded(mistral, 5, hidden_size=48), root / "narrow", byte_tokenizer())
    short = save(seeded(mistral, 5, max_position_embeddings=32), root / "short", byte_tokenizer())
    models = {"good": mixtral_pair.good, "narrow": narrow, "short": short}
    return {"none": None, "ngram": "ngram", "self": "self:int8", **{name: str(path) for name, path in models.items()}}


def plan_and_engine(pair: Pair, draft: str | None, **options: Any) -> tuple[Plan, LLM]:
    options = {"model": str(pair.target), "draft": draft, "progress": False, "cutoff": "all", **options}
    return make_plan(EngineConfig.make(**options)), LLM(**options)


@pytest.mark.parametrize("draft", ["none", "ngram", "self", "good", "narrow", "short"])
@pytest.mark.parametrize("prefetch", ["draft-gate", "draft-gate+next-gate", "next-gate", "adaptive", "on-demand"])
def test_policy_and_cutoff_are_those_of_the_engine(
    mixtral_pair: Pair, drafts: dict[str, str | None], draft: str, prefetch: str
) -> None:
    plan, llm = plan_and_engine(mixtral_pair, drafts[draft], prefetch=prefetch)
    with llm:
        assert plan.prefetch.policy == llm.engine.loop.policy.name
        assert plan.prefetch.cutoff_layers == llm.engine.prefetching.cutoff
        assert bool(plan.prefetch.notices) == (plan.prefetch.policy != prefetch and draft != "none")
        assert plan.memory == llm.engine.parts.memory


@pytest.mark.parametrize("draft", ["good", "self", "short"])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"expert_memory": "100%"},
        {"expert_memory": memory_for(3)},
        {"max_model_len": 20},
        {"num_speculative_tokens": 0},
    ],
    ids=str,
)
def test_memory_is_that_of_the_engine(
    mixtral_pair: Pair, drafts: dict[str, str | None], draft: str, options: dict[str, Any]
) -> None:
    plan, llm = plan_and_engine(mixtral_pair, drafts[draft], **options)
    with llm:
        assert plan.memory == llm.engine.parts.memory
        assert plan.target.max_length == llm.engine.parts.max_model_len
        assert plan.target.expert_bytes == plan.memory.slot_bytes
        parts = plan.target.resident_bytes + (plan.draft.resident_bytes if plan.draft is not None else 0)
        assert parts == plan.memory.resident


def test_errors_are_those_of_the_engine(mixtral_pair: Pair) -> None:
    model = str(mixtral_pair.target)
    for options, error in (
        ({"expert_memory": memory_for(2) - 1}, BudgetError),
        ({"device": "cpu", "device_memory": "1GiB"}, UsageError),
    ):
        messages = []
        for make in (lambda o: make_plan(EngineConfig.make(**o)), lambda o: LLM(**o, progress=False)):
            with pytest.raises(error) as caught:
                make({"model": model, **options})
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_a_profile_is_not_needed_for_a_fixed_cutoff(mixtral_pair: Pair) -> None:
    config = EngineConfig.make(model=str(mixtral_pair.target), draft=str(mixtral_pair.good), cutoff=2)
    plan = make_plan(config)
    assert (plan.prefetch.cutoff, plan.prefetch.cutoff_layers) == ("2", 2)
    assert LAYERS > 2
