"""A target that drafts for itself with quantized experts: exact, on one attention state, and its own prophet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import EXPERTS, LAYERS, TOP_K, Pair, greedy, memory_for, reference, submodules_with
from spmoe import LLM, SamplingParams
from spmoe.config import EngineConfig
from spmoe.draft.self import QuantizedSelfRunner, SelfDraft
from spmoe.engine.plan import make_plan
from spmoe.errors import StoreError, UsageError
from spmoe.models.hidden_states import LayerObserver
from spmoe.models.shipped import sample_text
from spmoe.predict.policies.draft_gate import DraftGate
from spmoe.types import Draft, Routing
from spmoe.verify.filters import probabilities

COUNT = 14
PROMPTS = ([84], [(29 * i + 7) % 251 for i in range(11)])
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> Callable[[Path], list[list[int]]]:
    known: dict[Path, list[list[int]]] = {}

    def of(directory: Path) -> list[list[int]]:
        if directory not in known:
            model = reference(directory)
            known[directory] = [greedy(model, prompt, COUNT) for prompt in PROMPTS]
        return known[directory]

    return of


def build(target: Path, name: str = "int8", **options: Any) -> LLM:
    return LLM(str(target), f"self:{name}", progress=False, **options)


def own(llm: LLM) -> QuantizedSelfRunner:
    drafter = llm.engine.loop.drafter
    assert isinstance(drafter, SelfDraft)
    assert isinstance(drafter.runner, QuantizedSelfRunner)
    return drafter.runner


def coarse(llm: LLM, target: Path) -> Any:
    """The checkpoint in transformers, with experts as coarse as the draft's."""
    model = reference(target)
    for layer, module in enumerate(submodules_with(model, "gate_up_proj")):
        for expert in range(module.gate_up_proj.shape[0]):
            for name, tensor in own(llm)._experts.tensors(layer, expert).items():
                getattr(module, name).data[expert] = tensor
    return model


# ---- the output is the target's


@pytest.mark.parametrize(
    ("prefetch", "cutoff", "k", "slots"),
    [
        ("draft-gate", "all", 3, "least"),
        ("draft-gate", "1", 5, "least"),
        ("draft-gate", "auto", 1, "half"),
        ("draft-gate", "all", 4, "all"),
        ("on-demand", "all", 3, "least"),
        ("on-demand", "all", 5, "half"),
    ],
)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_greedy_output_is_that_of_transformers(
    pair: Pair, expected: Any, name: str, prefetch: str, cutoff: str, k: int, slots: str
) -> None:
    experts = EXPERTS[reference(pair.target).config.model_type]
    count = {"least": TOP_K, "half": LAYERS * experts // 2, "all": LAYERS * experts}[slots]
    with build(
        pair.target, name, prefetch=prefetch, cutoff=cutoff, num_speculative_tokens=k, prefill_chunk=3,
        expert_memory=memory_for(count),
    ) as llm:  # fmt: skip
        for prompt, tokens in zip(PROMPTS, expected(pair.target), strict=True):
            assert llm.generate(prompt, GREEDY)[0].token_ids == tokens
        counters = llm.engine.counters
        assert counters.drafted > 0
        assert isinstance(llm.engine.loop.policy, DraftGate) == (prefetch == "draft-gate")
        assert (counters.prefetches_requested > 0) == (prefetch == "draft-gate")
        assert llm.engine.parts.target_kv == {}


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["windowed_pair", "partly_dense_pair", "recurrent_target"])
def test_other_kinds_of_targets(request: pytest.FixtureRequest, expected: Any, kind: str, name: str) -> None:
    found = request.getfixturevalue(kind)
    target = found.target if isinstance(found, Pair) else found
    with build(target, name, num_speculative_tokens=4, cutoff="all", expert_memory="50%", prefill_chunk=3) as llm:
        for prompt, tokens in zip(PROMPTS, expected(target), strict=True):
            assert llm.generate(prompt, GREEDY)[0].token_ids == tokens
        assert llm.engine.counters.drafted > 0
        assert llm.engine.counters.prefetches_requested > 0


def test_several_generations_in_turns_keep_to_their_own_states(pair: Pair, expected: Any) -> None:
    with build(pair.target, num_speculative_tokens=3, expert_memory="50%") as llm:
        running = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
        for parts in zip(*running, strict=False):
            assert parts
        for generation, tokens in zip(running, expected(pair.target), strict=True):
            assert generation.run().token_ids == tokens


# ---- one state


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_leaves_the_targets_state_as_it_was(pair: Pair, temperature: float) -> None:
    with build(pair.target, "int4", num_speculative_tokens=4) as llm:
        drafter, sound, compared = own_drafter(llm), own_drafter(llm).propose, 0

        def propose(sequences: Any, k: int, on_chunk: Any) -> list[Draft]:
            nonlocal compared
            kv = llm.engine.parts.target_kv.get(sequences[0].id)
            before = held(kv) if kv is not None else []
            drafts = sound(sequences, k, on_chunk)
            if kv is not None:
                assert kv.length == len(sequences[0].tokens) - 1
                assert all(map(torch.equal, held(kv), before))
                compared += k > 0
            return drafts

        drafter.propose = propose  # type: ignore[method-assign]
        llm.generate(PROMPTS[1], SamplingParams(max_tokens=COUNT, temperature=temperature, seed=5, ignore_eos=True))
        assert compared > 1


def own_drafter(llm: LLM) -> SelfDraft:
    drafter = llm.engine.loop.drafter
    assert isinstance(drafter, SelfDraft)
    return drafter


def held(kv: Any) -> list[Tensor]:
    assert all(layer.length == kv.length for layer in kv.cache.layers)
    return [t[:, :, : kv.length].clone() for layer in kv.cache.layers for t in (layer.keys, layer.values)]


def test_no_second_state_is_paid_for(pair: Pair) -> None:
    with build(pair.target, "int4") as llm, LLM(str(pair.target), progress=False) as plain:
        runner = own(llm)
        assert llm.engine.parts.memory.kv == plain.engine.parts.memory.kv
        assert llm.engine.parts.memory.resident == plain.engine.parts.memory.resident + runner.resident_bytes
        (notice,) = llm.notices
        assert "int4" in notice
        assert "KiB" in notice


def test_the_target_has_its_experts_back_whatever_happens(pair: Pair) -> None:
    with build(pair.target) as llm:
        runner, target = own(llm), llm.engine.target
        ports = [moe_layer.experts.spmoe_forward for moe_layer in target.moe]
        kv = runner.new_kv(8)
        runner.forward([1, 2], kv, num_logits=1)
        assert [moe_layer.experts.spmoe_forward for moe_layer in target.moe] == ports
        observer = LayerObserver(1, lambda depths, residual: None, lambda depths, residual, routing: 1 / 0)  # type: ignore[arg-type, return-value]
        with pytest.raises(ZeroDivisionError):
            runner.forward([1], kv, num_logits=1, observer=observer)
        assert [moe_layer.experts.spmoe_forward for moe_layer in target.moe] == ports


# ---- what it proposes and foretells


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_it_proposes_what_the_quantized_model_would_say(pair: Pair, name: str) -> None:
    with build(pair.target, name, num_speculative_tokens=4, prefill_chunk=3) as llm:
        drafter, proposals = own_drafter(llm), []
        sound = drafter.propose

        def propose(sequences: Any, k: int, on_chunk: Any) -> list[Draft]:
            proposals.append((list(sequences[0].tokens), k))
            return sound(sequences, k, on_chunk)

        drafter.propose = propose  # type: ignore[method-assign]
        llm.generate(PROMPTS[1], GREEDY)
        model, exact = coarse(llm, pair.target), reference(pair.target)
        tokens, k = proposals[2]
        assert k == 4
        # the text so far was read by the target itself, and only what is new by its quantized self
        with torch.no_grad():
            cache = exact(torch.tensor([tokens[:-1]]), use_cache=True).past_key_values
            said, step = [], tokens[-1:]
            for _ in range(k):
                step = [int(model(torch.tensor([step]), past_key_values=cache).logits[0, -1].argmax())]
                said += step
        sequence = llm._new_sequence(tokens, GREEDY, 10)
        llm.engine.parts.target_kv[sequence.id] = kv = llm.engine.target.new_kv(64)
        llm.engine.target.forward(tokens[:-1], kv, num_logits=1)
        assert sound([sequence], k, None)[0].tokens == said


def test_sampled_proposals_come_with_the_distribution_they_were_drawn_from(pair: Pair) -> None:
    params = SamplingParams(max_tokens=COUNT, temperature=0.7, top_k=20, seed=3)
    with build(pair.target, "int4", num_speculative_tokens=3) as llm:
        sequence = llm._new_sequence(PROMPTS[1], params, 10)
        llm.engine.parts.target_kv[sequence.id] = kv = llm.engine.target.new_kv(64)
        llm.engine.target.forward(PROMPTS[1][:-1], kv, num_logits=1)
        (draft,) = own_drafter(llm).propose([sequence], 3, None)
        model, exact = coarse(llm, pair.target), reference(pair.target)
    assert draft.probs is not None
    with torch.no_grad():
        cache = exact(torch.tensor([PROMPTS[1][:-1]]), use_cache=True).past_key_values
        logits = model(torch.tensor([[PROMPTS[1][-1], *draft.tokens[:-1]]]), past_key_values=cache).logits[0]
    torch.testing.assert_close(draft.probs, probabilities(logits, params), atol=1e-3, rtol=1e-2)
    assert all(float(q[token]) > 0 for q, token in zip(draft.probs, draft.tokens, strict=True))


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["qwen_pair", "partly_dense_pair"])
def test_what_it_foretells_is_what_its_routers_choose(request: pytest.FixtureRequest, kind: str, chunks: int) -> None:
    pair: Pair = request.getfixturevalue(kind)
    with build(pair.target, "int4") as llm:
        runner, told = own(llm), list[tuple[range, Routing]]()
        model, chosen = coarse(llm, pair.target), list[Tensor]()
        for gate in [m.gate for m in submodules_with(model, "experts")]:
            gate.register_forward_hook(lambda gate, args, output: chosen.append(output))
        with torch.no_grad():
            model(torch.tensor([PROMPTS[1]]))

        def tell(depths: range, residual: Tensor, routing: Routing | None) -> None:
            assert routing is not None
            told.append((depths, routing))

        runner.forward(
            PROMPTS[1], runner.new_kv(20), num_logits=1, observer=LayerObserver(chunks, lambda *_: None, tell)
        )
        policy = DraftGate(llm.engine.target, runner.depth_count, cutoff=9)
        assert len(told) == min(chunks, len(chosen))
        layers = [layer for depths, _ in told for depth in depths for layer in policy._layers_at[depth]]
        assert layers == list(range(len(chosen)))
        for (_, weights, index), found, scores in zip(
            chosen, torch.cat([r.experts for _, r in told]), torch.cat([r.scores for _, r in told]), strict=True
        ):
            assert torch.equal(found, index)
            torch.testing.assert_close(scores, (weights / weights.sum(-1, keepdim=True)).float(), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_pair_that_ships_accepts_more_of_itself_than_of_its_draft() -> None:
    text, rates, tokens = sample_text(), {}, set()
    for draft in (None, "self:int8", "self:int4"):
        with LLM(draft=draft, dtype="float32", progress=False, cutoff="all") as llm:
            counters = llm.engine.counters
            for start in (0, 6000, 12000, 18000):
                said = llm.generate(text[start : start + 600], SamplingParams(max_tokens=64, ignore_eos=True))[0]
                tokens.add((start, *said.token_ids))
            rates[draft] = counters.accepted / counters.drafted
    assert len(tokens) == 4, "whatever drafts, the output is the target's"
    assert rates["self:int8"] > 0.95
    assert rates["self:int8"] >= rates["self:int4"] > 0.7
    assert rates["self:int4"] > rates[None]  # type: ignore[index]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("memory", ["10%", "100%"])
@pytest.mark.parametrize("draft", ["self:int8", "self:int4"])
def test_on_a_device_it_is_recorded_and_tokens_are_the_cpus(draft: str, memory: str) -> None:
    prompts, params = [sample_text()[:400], "import os\n"], SamplingParams(max_tokens=40, ignore_eos=True)
    found, kept = {}, {}
    for device in ("cpu", "cuda"):
        with LLM(draft=draft, dtype="float32", device=device, expert_memory=memory, progress=False) as llm:
            found[device] = [[c.token_ids for c in llm.generate(prompts, params)] for _ in range(2)]
            counters = llm.engine.counters
            kept[device] = counters.accepted / counters.drafted
            assert device == "cpu" or own(llm).captures
    assert found["cuda"] == found["cpu"]
    assert kept["cuda"] == pytest.approx(kept["cpu"], abs=0.02)  # a wrong product would still give the right tokens


# ---- on disk, in plans and in options


def test_it_is_quantized_once(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path))
    for _ in range(2):
        for name in ("int8", "int4"):
            build(pair.target, name).close()
        files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "experts").glob("*.safetensors")}
        if _ == 0:
            first = files
    assert files == first
    assert sorted(name.rpartition("-")[2] for name in files) == [
        "float32.safetensors",
        "int4.safetensors",
        "int8.safetensors",
    ]
    (coded,) = (tmp_path / "experts").glob("*int4.safetensors")
    data = bytearray(coded.read_bytes())
    data[-5000] ^= 1
    coded.write_bytes(data)
    with pytest.raises(StoreError, match="checksum"):
        build(pair.target, "int4")


def test_the_plan_counts_it(pair: Pair) -> None:
    with build(pair.target, "int4") as llm:
        plan = make_plan(EngineConfig.make(model=str(pair.target), draft="self:int4"))
        assert plan.draft is not None
        assert plan.draft.name == "self:int4"
        assert plan.draft.architecture == "the target with int4 experts"
        assert plan.draft.resident_bytes == own(llm).resident_bytes
        assert plan.prefetch.policy == "draft-gate"
        assert plan.memory.kv == llm.engine.parts.memory.kv


@pytest.mark.parametrize("draft", ["self", "self:int3", "self:", "self:INT4"])
def test_what_is_not_known_is_refused(draft: str) -> None:
    with pytest.raises(UsageError, match="self:int8 or self:int4"):
        EngineConfig.make(model="m", draft=draft)


def test_without_draft_tokens_nothing_is_quantized(pair: Pair) -> None:
    with build(pair.target, num_speculative_tokens=0) as llm:
        assert llm.notices == []
        assert llm.engine.parts.drafter is None
