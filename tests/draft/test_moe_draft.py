"""A draft model that is an MoE model itself: all of its experts are resident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import (
    VOCABULARY,
    Pair,
    byte_tokenizer,
    greedy_tokens,
    mixtral,
    qwen3_moe,
    reference,
    save,
    seeded,
    submodules_with,
)
from spmoe import LLM, SamplingParams
from spmoe.config import EngineConfig
from spmoe.draft.model import DraftModel
from spmoe.engine.plan import make_plan
from spmoe.errors import UsageError
from spmoe.predict.policies.draft_gate import DraftGate

COUNT = 14
PROMPT = [(29 * i + 7) % 251 for i in range(11)]
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory, mixtral_pair: Pair) -> Path:
    """The Mixtral target with a little noise added to its experts."""
    model = reference(mixtral_pair.target)
    rng = torch.Generator().manual_seed(4)
    for module in submodules_with(model, "gate_up_proj"):
        for weight in (module.gate_up_proj, module.down_proj):
            weight.data += 0.03 * weight.std() * torch.randn(weight.shape, generator=rng)
    return save(model, tmp_path_factory.mktemp("near") / "draft", byte_tokenizer())


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE of another depth, with a dense layer, unrelated to the target."""
    model = seeded(qwen3_moe, 9, num_hidden_layers=4, mlp_only_layers=[0])
    return save(model, tmp_path_factory.mktemp("far") / "draft", byte_tokenizer())


def build(target: Path, draft: Path, **options: Any) -> LLM:
    return LLM(str(target), str(draft), progress=False, num_speculative_tokens=4, **options)


@pytest.mark.parametrize("prefetch", ["draft-gate", "on-demand"])
@pytest.mark.parametrize("draft", ["near", "far"])
def test_greedy_output_equals_transformers(
    request: pytest.FixtureRequest, mixtral_pair: Pair, draft: str, prefetch: str
) -> None:
    directory: Path = request.getfixturevalue(draft)
    with build(mixtral_pair.target, directory, prefetch=prefetch, cutoff="all", expert_memory="50%") as llm:
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
        assert llm.notices == []
        counters = llm.engine.counters
        assert counters.drafted > 0
        if draft == "near":
            assert counters.accepted / counters.drafted > 0.5
        assert (
            isinstance(llm.engine.loop.policy, DraftGate)
            == (counters.prefetches_requested > 0)
            == (prefetch == "draft-gate")
        )


def test_draft_is_resident_and_runs_its_own_experts(mixtral_pair: Pair, near: Path) -> None:
    with build(mixtral_pair.target, near) as llm:
        drafter = llm.engine.loop.drafter
        assert isinstance(drafter, DraftModel)
        whole = sum(p.nbytes for p in reference(near).parameters())
        assert drafter.runner.resident_bytes == whole
        logits = drafter.runner.forward(PROMPT, drafter.runner.new_kv(20), num_logits=len(PROMPT))
        with torch.no_grad():
            torch.testing.assert_close(logits, reference(near)(torch.tensor([PROMPT])).logits[0], atol=1e-4, rtol=1e-4)
    plan = make_plan(EngineConfig.make(model=str(mixtral_pair.target), draft=str(near)))
    assert plan.draft is not None
    assert plan.draft.architecture == "MixtralForCausalLM"
    assert plan.draft.resident_bytes == whole


def test_padded_vocabulary_is_accepted(mixtral_pair: Pair, tmp_path: Path) -> None:
    draft = save(seeded(mixtral, 3, vocab_size=VOCABULARY + 31), tmp_path / "draft", byte_tokenizer())
    with build(mixtral_pair.target, draft) as llm:
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(mixtral_pair.target, PROMPT, COUNT)


def test_another_tokenizer_is_rejected_with_the_first_difference(mixtral_pair: Pair, tmp_path: Path) -> None:
    draft = save(seeded(mixtral, 3), tmp_path / "draft", byte_tokenizer(swap=(100, 200)))
    with pytest.raises(UsageError, match="token 100 is"):
        build(mixtral_pair.target, draft)
