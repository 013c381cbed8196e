"""Verification finds equal tokens, near-ties and broken engines, and says where and by how much they diverge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import Pair, greedy, mixtral, save, seeded
from checkpoints import reference as load_stock
from spmoe import LLM
from spmoe.bench.verification import (
    DIFFERENT,
    EQUAL,
    NEAR_TIE,
    NEAR_TIE_STEPS,
    NOT_COMPARED,
    Check,
    Mismatch,
    Verification,
    VerifyConfig,
    encode_prompts,
    every_config,
    largest_draft,
    make_configs,
    spacing,
    to_dict,
    without_drafts,
    worst,
)
from spmoe.engine.llm import Generation
from spmoe.errors import PromptError, SpmoeError, UsageError
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.expert_reader import ExpertReader
from spmoe.models.reference import FORWARD, GENERATE, LAYERS, Generated, Reference, Scored, plan_reference
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES
from spmoe.types import ExpertKey

PROMPTS = [[84, 12, 7], [(29 * i + 7) % 251 for i in range(11)]]
COUNT = 10
ON_DEMAND = VerifyConfig("on-demand", 0)
DRAFTED = VerifyConfig("draft-gate", 3)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the expert files of broken engines away from the other tests."""
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "home"))


def build(pair: Pair, **options: Any) -> LLM:
    options = {"num_speculative_tokens": 3, "expert_memory": "50%", "prefill_chunk": 4, "progress": False, **options}
    return LLM(str(pair.target), str(pair.good), device="cpu", **options)


def generate(llm: LLM, configs: Sequence[VerifyConfig] = (ON_DEMAND, DRAFTED), **options: Any) -> Verification:
    found = Verification(PROMPTS, list(configs), COUNT, llm.engine.parts.models.dtype)
    found.generate(llm, lambda done, total, detail: None, **options)
    return found


def compare(verification: Verification, directory: Path, wanted: str = GENERATE) -> Verification:
    checkpoint = Checkpoint.find(str(directory))
    plan = plan_reference(checkpoint, verification.dtype, torch.device("cpu"), wanted)
    with Reference(checkpoint, verification.dtype, plan) as reference:
        verification.compare(reference, plan.method, lambda text: None)
    return verification


def verdicts(verification: Verification) -> list[str]:
    return [result.verdict for result in verification.results]


# ---- the engine as it is


def test_configurations_are_equal_in_float32(mixtral_pair: Pair) -> None:
    pair = mixtral_pair
    configs = [ON_DEMAND, DRAFTED, VerifyConfig("next-gate", "auto"), VerifyConfig("adaptive", 1, "lru")]
    with build(pair, num_speculative_tokens=largest_draft(configs)) as llm:
        found = generate(llm, configs)
    for wanted in (GENERATE, FORWARD, LAYERS):
        found._checks.clear()
        assert verdicts(found) == [NOT_COMPARED] * len(configs)
        compare(found, pair.target, wanted)
        assert verdicts(found) == [EQUAL] * len(configs)
        assert all(result.compared == len(PROMPTS) * COUNT for result in found.results)
        assert len(found._checks) == len(PROMPTS), "equal outputs are compared once"
    assert found.notes == []
    drafts = {result.config: (result.drafted, result.accepted) for result in found.results}
    assert drafts[ON_DEMAND] == (0, 0)
    assert 0 < drafts[DRAFTED][1] < drafts[DRAFTED][0], "drafts were accepted and rejected"
    stock = load_stock(pair.target)
    assert found.outputs[DRAFTED, 1] == greedy(stock, PROMPTS[1], COUNT)


# ---- broken engines


def broken_expert(llm: LLM) -> None:
    """Change nothing: the expert file was written with one wrong expert."""


def broken_router(llm: LLM) -> None:
    router = llm.engine.target.moe[1].router
    assert router is not None
    weight: Any = router.router.weight
    weight.data.copy_(weight.data.roll(1, dims=0))


@pytest.mark.parametrize("wanted", [GENERATE, LAYERS])
@pytest.mark.parametrize("damage", [broken_expert, broken_router])
def test_broken_engine_is_different(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, damage: Callable[[LLM], None], wanted: str
) -> None:
    fill = ExpertReader.fill

    def fill_wrongly(self: ExpertReader, key: ExpertKey, views: dict[str, Tensor]) -> None:
        fill(self, key, views)
        if damage is broken_expert and key == ExpertKey(1, 2):
            views["down_proj"].neg_()

    monkeypatch.setattr(ExpertReader, "fill", fill_wrongly)
    with build(mixtral_pair) as llm:
        damage(llm)
        found = compare(generate(llm), mixtral_pair.target, wanted)
    assert found.verdict == DIFFERENT
    stock = load_stock(mixtral_pair.target)
    for result in found.results:
        assert result.verdict == DIFFERENT
        assert result.divergence is not None
        prompt, one = result.divergence
        expected, ours = greedy(stock, PROMPTS[prompt], COUNT), found.outputs[result.config, prompt]
        first = next(i for i, (a, b) in enumerate(zip(ours, expected, strict=True)) if a != b)
        assert (one.position, one.ours, one.theirs) == (first, ours[first], expected[first])
        assert one.margin > 1e-3
        assert one.steps > NEAR_TIE_STEPS
        with torch.inference_mode():
            row = stock(input_ids=torch.tensor([[*PROMPTS[prompt], *ours[:first]]])).logits[0, -1]
        assert one.margin == pytest.approx(float(row[one.theirs] - row[one.ours]), abs=1e-4)


def test_tie_in_16_bits_is_a_near_tie(tmp_path: Path) -> None:
    """Let two tokens have the same output weights; the engine prefers the other one by one rounding step."""
    model = seeded(mixtral, 21)
    first = greedy(model.bfloat16(), PROMPTS[0], 1)[0]
    twin = first + 1
    model.lm_head.weight.data[twin] = model.lm_head.weight.data[first]
    target = save(model, tmp_path / "target")
    with LLM(str(target), dtype="bfloat16", device="cpu", num_speculative_tokens=0, progress=False) as llm:
        head = llm.engine.target.model.lm_head.weight.data
        head[twin] *= 1 + torch.finfo(torch.bfloat16).eps
        found = generate(llm, [ON_DEMAND])
    assert found.outputs[ON_DEMAND, 0][0] == twin
    for wanted in (GENERATE, LAYERS):
        found._checks.clear()
        compare(found, target, wanted)
        (result,) = found.results
        assert result.verdict == found.verdict == NEAR_TIE
        assert result.divergence == (0, Mismatch(0, twin, first, 0.0, 0.0))
    assert result.compared == len(PROMPTS) * COUNT, "what follows a near-tie is compared too"


def test_difference_after_a_near_tie_is_found(mixtral_pair: Pair) -> None:
    fake = FakeReference([5, 6, 7, 8], [(5, 0.0), (6, 0.0), (9, 0.0), (1, 3.0)])
    found = with_output([5, 6, 7, 8])
    found.compare(fake, FORWARD, lambda text: None)  # type: ignore[arg-type]
    (result,) = found.results
    assert result.verdict == DIFFERENT
    assert result.divergence is not None
    assert result.divergence[1].position == 3
    assert [one.position for one in result.checks[0].mismatches] == [2, 3]


# ---- transformers that disagrees with itself, or fails


class FakeReference:
    """Reference with given tokens of `generate`, and (token, margin) of a forward at each position."""

    def __init__(self, generated: list[int] | None, forward: list[tuple[int, float]], margin: float = 5.0) -> None:
        self._generated = generated
        self._forward = forward
        self._margin = margin

    def generate(self, prompt: list[int], count: int) -> Generated:
        if self._generated is None:
            raise SpmoeError("transformers 5 cannot run it")
        logits = torch.full((count, 100), 10.0)
        logits[range(count), self._generated] += self._margin
        return Generated(self._generated, logits)

    def score(self, sequences: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[int, list[Scored]]]:
        for index, _ in enumerate(sequences):
            yield index, [Scored(token, 10.0, 10.0 - margin) for token, margin in self._forward]


def with_output(tokens: list[int]) -> Verification:
    found = Verification([[1, 2]], [ON_DEMAND], len(tokens), torch.float32)
    found.outputs[ON_DEMAND, 0] = tokens
    return found


def test_generate_that_differs_from_its_own_forward_is_noted() -> None:
    found = with_output([5, 6, 7])
    agrees = [(5, 0.0), (6, 0.0), (7, 0.0)]
    found.compare(FakeReference([5, 9, 9], agrees), GENERATE, lambda text: None)  # type: ignore[arg-type]
    assert found.verdict == EQUAL
    assert "prompt 1, token 2: generate of transformers differs from its own forward" in found.notes[0]
    found = with_output([5, 6, 7])
    disagrees = [(5, 0.0), (9, 5.0), (7, 0.0)]
    found.compare(FakeReference([5, 9, 9], disagrees), GENERATE, lambda text: None)  # type: ignore[arg-type]
    assert (found.verdict, found.notes) == (DIFFERENT, [])


def test_near_tie_of_generate_counts_even_if_the_forward_agrees() -> None:
    found = with_output([5, 6, 7])
    fake = FakeReference([5, 9, 9], [(5, 0.0), (6, 0.0), (7, 0.0)], margin=4e-6)
    found.compare(fake, GENERATE, lambda text: None)  # type: ignore[arg-type]
    (result,) = found.results
    assert result.verdict == NEAR_TIE
    assert (result.compared, result.checks[0].mismatches[0].position) == (3, 1)


def test_forward_replaces_a_generate_that_fails() -> None:
    found = with_output([5, 6])
    found.compare(FakeReference(None, [(5, 0.0), (6, 0.0)]), GENERATE, lambda text: None)  # type: ignore[arg-type]
    assert found.verdict == EQUAL
    assert "generate of transformers failed" in found.notes[0]


# ---- interrupts


def test_stopped_generation_keeps_what_was_generated(mixtral_pair: Pair) -> None:
    count = 0

    @contextmanager
    def stop_third(generation: Generation) -> Iterator[None]:
        nonlocal count
        count += 1
        if count == 3:
            generation.stop()
        yield

    with build(mixtral_pair) as llm:
        found = generate(llm, around_generation=stop_third)
    assert found.interrupted
    assert list(found.outputs) == [(ON_DEMAND, 0), (ON_DEMAND, 1)]
    compare(found, mixtral_pair.target)
    assert verdicts(found) == [EQUAL, NOT_COMPARED]
    assert found.verdict == NOT_COMPARED


# ---- margins


def test_spacing_is_that_of_the_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for value in (1.0, 1.5, 2.0, 20.3, 0.3, 0.001):
            exact = torch.tensor(value, dtype=dtype)
            after = torch.nextafter(exact.float(), torch.tensor(math.inf)) if dtype == torch.float32 else None
            if after is None:
                after = (exact.view(torch.int16) + 1).view(dtype)
            assert spacing(float(exact), dtype) == float(after.double() - exact.double()), (dtype, value)
    assert spacing(0.0, torch.float16) > 0
    assert math.isnan(spacing(math.nan, torch.float32))


def test_verdict_follows_the_margin_in_steps() -> None:
    step = 2.0**-4  # of bfloat16 between 8 and 16
    for steps, verdict in ((0, NEAR_TIE), (NEAR_TIE_STEPS, NEAR_TIE), (NEAR_TIE_STEPS + 1, DIFFERENT)):
        one = Mismatch.of(3, 7, Scored(8, 15.0, 15.0 - steps * step), torch.bfloat16)
        assert (one.margin, one.steps) == (steps * step, steps)
        assert Check(5, (one,)).verdict == verdict
    assert not Mismatch.of(0, 7, Scored(8, math.nan, 1.0), torch.bfloat16).near_tie
    assert Check(5).verdict == EQUAL
    assert worst([EQUAL, NEAR_TIE]) == NEAR_TIE
    assert worst([EQUAL, DIFFERENT, NOT_COMPARED]) == DIFFERENT
    assert worst([]) == NOT_COMPARED


# ---- configurations and prompts


def test_configurations() -> None:
    assert make_configs(["draft-gate", "on-demand"], [0, 4], ["auto"]) == [
        ON_DEMAND,
        VerifyConfig("draft-gate", 4),
        VerifyConfig("on-demand", 4),
    ]
    with pytest.raises(UsageError, match="oracle needs recorded routing"):
        make_configs(["oracle"], [4], ["auto"])
    every = every_config("draft-gate", [0, 4], "auto")
    assert {one.prefetch for one in every} == {*PREFETCH_POLICIES.names()} - {"oracle"}
    assert {one.draft_tokens for one in every} == {0, 1, 4, "auto"}
    assert {one.eviction for one in every} == {"auto", *EVICTION_POLICIES.names()}
    assert len(every) == len({*every})
    assert largest_draft(every) == 15
    assert {one.draft_tokens for one in every_config("on-demand", [0], "lru")} == {0}
    assert {one.draft_tokens for one in without_drafts(every)} == {0}


def test_prompts(mixtral_pair: Pair) -> None:
    with build(mixtral_pair, max_model_len=200) as llm:
        engine = llm.engine
        built_in = encode_prompts(engine, [], [], 32)
        assert len(built_in) == 3
        assert len(built_in[2]) == 4 + 64, "longer than a prefill chunk"
        assert max(map(len, encode_prompts(engine, [], [], 190))) == 10, "shortened to the context"
        assert encode_prompts(engine, ["ab"], [[1, 2]], 5) == [engine.parts.tokenizer("ab")["input_ids"], [1, 2]]
        for texts, ids, count, words in (
            ([], [[1, 999]], 5, "outside the model's vocabulary"),
            ([], [[]], 5, "prompt 1 is empty"),
            (["a" * 199], [], 5, "exceeds the context of 200"),
            ([], [], 200, "leaves no room"),
        ):
            with pytest.raises(PromptError, match=words):
                encode_prompts(engine, texts, ids, count)


def test_random_prompts_without_a_tokenizer(tmp_path: Path) -> None:
    target = save(seeded(mixtral, 22), tmp_path / "target")
    with LLM(str(target), device="cpu", num_speculative_tokens=0, prefill_chunk=16, progress=False) as llm:
        first, again = (encode_prompts(llm.engine, [], [], 8) for _ in range(2))
        with pytest.raises(UsageError, match=r"ships no tokenizer.*--prompt-token-ids"):
            encode_prompts(llm.engine, ["text"], [], 8)
        found = Verification(first, [ON_DEMAND], 4, torch.float32)
        found.generate(llm, lambda done, total, detail: None)
    assert first == again
    assert len({token for prompt in first for token in prompt}) > 20
    compare(found, target)
    assert found.verdict == EQUAL
    assert to_dict(found, None)["configurations"][0]["verdict"] == EQUAL
