"""A target drafts for itself with quantized experts, shares its KV cache, and predicts its own routing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import LAYERS, TOP_K, Pair, expert_count, greedy, memory_for, reference, submodules_with
from spmoe import LLM, SamplingParams
from spmoe.config import EngineConfig
from spmoe.draft.none import NoDraft
from spmoe.draft.self import QuantizedSelfRunner, SelfDraft
from spmoe.engine.plan import make_plan
from spmoe.engine.request import Request
from spmoe.errors import StoreError, UsageError
from spmoe.models.hidden_states import LayerObserver
from spmoe.models.shipped import sample_text
from spmoe.predict.policies.draft_gate import DraftGate
from spmoe.types import Draft, Routing
from spmoe.verify.filters import probabilities
from spmoe.verify.sampling import PositionNoise

COUNT = 14
PROMPTS = ([84], [(29 * i + 7) % 251 for i in range(11)])
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> Callable[[Path], list[list[int]]]:
    """Return a function that gives the tokens of transformers for every prompt, computed once per checkpoint."""

    @cache
    def tokens_of(directory: Path) -> list[list[int]]:
        model = reference(directory)
        return [greedy(model, prompt, COUNT) for prompt in PROMPTS]

    return tokens_of


class NoObservers:
    """A policy that looks at no hidden states."""

    def observer(self, *args: Any, **options: Any) -> None:
        return None


def build(target: Path, name: str = "int8", **options: Any) -> LLM:
    return LLM(str(target), f"self:{name}", progress=False, **options)


def drafter_of(llm: LLM) -> SelfDraft:
    drafter = llm.engine.loop.drafter
    assert isinstance(drafter, SelfDraft)
    return drafter


def runner_of(llm: LLM) -> QuantizedSelfRunner:
    runner = drafter_of(llm).runner
    assert isinstance(runner, QuantizedSelfRunner)
    return runner


def dequantized(llm: LLM, target: Path) -> Any:
    """Return the checkpoint as a transformers model with the draft's experts, dequantized."""
    model = reference(target)
    for layer, module in enumerate(submodules_with(model, "gate_up_proj")):
        for expert in range(module.gate_up_proj.shape[0]):
            for name, tensor in runner_of(llm)._experts.tensors(layer, expert).items():
                getattr(module, name).data[expert] = tensor
    return model


# ---- exactness


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
def test_greedy_output_equals_transformers(
    pair: Pair, expected: Any, name: str, prefetch: str, cutoff: str, k: int, slots: str
) -> None:
    experts = expert_count(pair.target)
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
def test_sliding_window_dense_layers_and_recurrent_state(
    request: pytest.FixtureRequest, expected: Any, kind: str, name: str
) -> None:
    found = request.getfixturevalue(kind)
    target = found.target if isinstance(found, Pair) else found
    with build(target, name, num_speculative_tokens=4, cutoff="all", expert_memory="50%", prefill_chunk=3) as llm:
        for prompt, tokens in zip(PROMPTS, expected(target), strict=True):
            assert llm.generate(prompt, GREEDY)[0].token_ids == tokens
        assert llm.engine.counters.drafted > 0
        assert llm.engine.counters.prefetches_requested > 0


def test_interleaved_streams_are_independent(pair: Pair, expected: Any) -> None:
    with build(pair.target, num_speculative_tokens=3, expert_memory="50%") as llm:
        streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
        for pieces in zip(*streams, strict=False):
            assert pieces
        for stream, tokens in zip(streams, expected(pair.target), strict=True):
            assert stream.run().token_ids == tokens


# ---- the shared KV cache


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_does_not_change_the_targets_kv_cache(pair: Pair, temperature: float) -> None:
    with build(pair.target, "int4", num_speculative_tokens=4) as llm:
        drafter, original, compared = drafter_of(llm), drafter_of(llm).propose, 0

        def propose(sequences: Any, k: int, observers: Any) -> list[Draft]:
            nonlocal compared
            kv = llm.engine.parts.target_kv.get(sequences[0].id)
            before = kv_tensors(kv) if kv is not None else []
            drafts = original(sequences, k, observers)
            if kv is not None:
                assert not k or kv.length == len(sequences[0].tokens) - 1  # with K = 0, a part of the prompt is read
                assert all(map(torch.equal, kv_tensors(kv), before))
                compared += k > 0
            return drafts

        drafter.propose = propose  # type: ignore[method-assign]
        llm.generate(PROMPTS[1], SamplingParams(max_tokens=COUNT, temperature=temperature, seed=5, ignore_eos=True))
        assert compared > 1


def kv_tensors(kv: Any) -> list[Tensor]:
    """Return copies of the keys and values of every layer, up to the cache's length."""
    assert all(layer.length == kv.length for layer in kv.cache.layers)
    return [t[:, :, : kv.length].clone() for layer in kv.cache.layers for t in (layer.keys, layer.values)]


def test_memory_is_counted_for_one_kv_cache_and_the_quantized_experts(pair: Pair) -> None:
    with build(pair.target, "int4") as llm, LLM(str(pair.target), None, progress=False) as plain:
        runner = runner_of(llm)
        assert llm.engine.parts.memory.kv == plain.engine.parts.memory.kv
        assert llm.engine.parts.memory.resident == plain.engine.parts.memory.resident + runner.resident_bytes
        (notice,) = llm.notices
        assert "int4" in notice
        assert "KiB" in notice


def test_target_experts_are_restored_after_success_and_error(pair: Pair) -> None:
    with build(pair.target) as llm:
        runner, target = runner_of(llm), llm.engine.target
        forwards = [moe_layer.experts.spmoe_forward for moe_layer in target.moe]
        kv = runner.new_kv(8)
        runner.forward([1, 2], kv, num_logits=1)
        assert [moe_layer.experts.spmoe_forward for moe_layer in target.moe] == forwards
        observer = LayerObserver(1, lambda depths, residual: None, lambda depths, residual, routing: 1 / 0)  # type: ignore[arg-type, return-value]
        with pytest.raises(ZeroDivisionError):
            runner.forward([1], kv, num_logits=1, observer=observer)
        assert [moe_layer.experts.spmoe_forward for moe_layer in target.moe] == forwards


# ---- proposals and predictions


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_proposals_are_the_quantized_models_argmax(pair: Pair, name: str) -> None:
    with build(pair.target, name, num_speculative_tokens=4, prefill_chunk=3) as llm:
        drafter, proposals = drafter_of(llm), []
        original = drafter.propose

        def propose(sequences: Any, k: int, observers: Any) -> list[Draft]:
            proposals.append((list(sequences[0].tokens), k))
            return original(sequences, k, observers)

        drafter.propose = propose  # type: ignore[method-assign]
        llm.generate(PROMPTS[1], GREEDY)
        model, exact = dequantized(llm, pair.target), reference(pair.target)
        tokens, k = proposals[2]
        assert k == 4
        # the target itself has read all tokens but the last; the quantized runner reads only the last
        with torch.no_grad():
            cache = exact(torch.tensor([tokens[:-1]]), use_cache=True).past_key_values
            proposed, step = [], tokens[-1:]
            for _ in range(k):
                step = [int(model(torch.tensor([step]), past_key_values=cache).logits[0, -1].argmax())]
                proposed += step
        sequence = Request(llm.engine, llm._scheduler, 99, tokens, GREEDY)._new_sequence()
        llm.engine.parts.target_kv[sequence.id] = kv = llm.engine.target.new_kv(64)
        llm.engine.target.forward(tokens[:-1], kv, num_logits=1)
        assert original([sequence], k, NoObservers())[0].tokens == proposed


def test_sampled_proposals_are_drawn_from_the_quantized_models_distribution(pair: Pair) -> None:
    params = SamplingParams(max_tokens=COUNT, temperature=0.7, top_k=20, seed=3)
    with build(pair.target, "int4", num_speculative_tokens=3) as llm:
        sequence = Request(llm.engine, llm._scheduler, 99, PROMPTS[1], params)._new_sequence()
        llm.engine.parts.target_kv[sequence.id] = kv = llm.engine.target.new_kv(64)
        llm.engine.target.forward(PROMPTS[1][:-1], kv, num_logits=1)
        (draft,) = drafter_of(llm).propose([sequence], 3, NoObservers())
        model, exact = dequantized(llm, pair.target), reference(pair.target)
    with torch.no_grad():
        cache = exact(torch.tensor([PROMPTS[1][:-1]]), use_cache=True).past_key_values
        logits = model(torch.tensor([[PROMPTS[1][-1], *draft.tokens[:-1]]]), past_key_values=cache).logits[0]
    noise, first = PositionNoise(3), len(PROMPTS[1])
    rows = enumerate(probabilities(logits, params))
    assert draft.tokens == [noise.pick(probs, first + position) for position, probs in rows]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["qwen_pair", "partly_dense_pair"])
def test_predicted_routing_is_that_of_its_own_routers(request: pytest.FixtureRequest, kind: str, chunks: int) -> None:
    pair: Pair = request.getfixturevalue(kind)
    with build(pair.target, "int4") as llm:
        runner, shown = runner_of(llm), list[tuple[range, Routing]]()
        model, outputs = dequantized(llm, pair.target), list[Any]()
        for gate in [m.gate for m in submodules_with(model, "experts")]:
            gate.register_forward_hook(lambda gate, args, output: outputs.append(output))
        with torch.no_grad():
            model(torch.tensor([PROMPTS[1]]))

        def show(depths: range, residual: Tensor, routing: Routing | None) -> None:
            assert routing is not None
            shown.append((depths, routing))

        runner.forward(
            PROMPTS[1], runner.new_kv(20), num_logits=1, observer=LayerObserver(chunks, lambda *_: None, show)
        )
        policy = DraftGate(llm.engine.target, runner.depth_count, cutoff=9)
        assert len(shown) == min(chunks, len(outputs))
        layers = [layer for depths, _ in shown for depth in depths for layer in policy._layers_at[depth]]
        assert layers == list(range(len(outputs)))
        experts, scores = (
            torch.cat([getattr(routing, name) for _, routing in shown]) for name in ("experts", "scores")
        )
        for (_, weights, index), routed, shares in zip(outputs, experts, scores, strict=True):
            assert torch.equal(routed, index)
            torch.testing.assert_close(shares, (weights / weights.sum(-1, keepdim=True)).float(), atol=1e-4, rtol=1e-4)


def test_included_pair_accepts_more_tokens_of_itself_than_of_its_draft() -> None:
    prompt, rates, outputs = sample_text()[6000:6600], {}, set()
    for draft in ("auto", "self:int8", "self:int4"):
        with LLM(draft=draft, num_speculative_tokens=4, dtype="float32", progress=False, cutoff="all") as llm:
            completion = llm.generate(prompt, SamplingParams(max_tokens=64, ignore_eos=True))[0]
            outputs.add(tuple(completion.token_ids))
            rates[draft] = completion.stats.counters.accepted / completion.stats.counters.drafted
    assert len(outputs) == 1, "the output does not depend on the draft"
    assert rates["self:int8"] > 0.95
    assert rates["self:int8"] >= rates["self:int4"] > 0.7
    assert rates["self:int4"] > rates["auto"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("memory", ["10%", "100%"])
@pytest.mark.parametrize("draft", ["self:int8", "self:int4"])
def test_captured_on_cuda_with_the_tokens_of_the_cpu(draft: str, memory: str) -> None:
    prompts, params = [sample_text()[:400], "import os\n"], SamplingParams(max_tokens=40, ignore_eos=True)
    found, rates = {}, {}
    for device in ("cpu", "cuda"):
        options: dict[str, Any] = {"dtype": "float32", "expert_memory": memory, "num_speculative_tokens": 4}
        with LLM(draft=draft, device=device, progress=False, **options) as llm:
            found[device] = [[c.token_ids for c in llm.generate(prompts, params)] for _ in range(2)]
            counters = llm.engine.counters
            rates[device] = counters.accepted / counters.drafted
            assert device == "cpu" or runner_of(llm).captures
    assert found["cuda"] == found["cpu"]
    assert rates["cuda"] == pytest.approx(rates["cpu"], abs=0.02)  # wrong quantized products change only this


# ---- files, plans and options


def test_experts_are_quantized_once_and_checked_when_read(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path))
    for attempt in range(2):
        for name in ("int8", "int4"):
            build(pair.target, name).close()
        files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "experts").glob("*.safetensors")}
        if attempt == 0:
            first = files
    assert files == first
    assert sorted(name.rpartition("-")[2] for name in files) == [
        "float32.safetensors",
        "int4.safetensors",
        "int8.safetensors",
    ]
    (quantized,) = (tmp_path / "experts").glob("*int4.safetensors")
    data = bytearray(quantized.read_bytes())
    data[-5000] ^= 1
    quantized.write_bytes(data)
    with pytest.raises(StoreError, match="checksum"):
        build(pair.target, "int4")


def test_plan_counts_the_quantized_experts(pair: Pair) -> None:
    options = {"num_speculative_tokens": 4, "prefetch": "draft-gate"}
    with build(pair.target, "int4", **options) as llm:
        plan = make_plan(EngineConfig.make(model=str(pair.target), draft="self:int4", **options))
        assert plan.draft is not None
        assert plan.draft.name == "self:int4"
        assert plan.draft.architecture == "the target with int4 experts"
        assert plan.draft.resident_bytes == runner_of(llm).resident_bytes
        assert plan.prefetch.policy == "draft-gate"
        assert plan.memory.kv == llm.engine.parts.memory.kv


@pytest.mark.parametrize("draft", ["self", "self:int3", "self:", "self:INT4"])
def test_unknown_quantization_is_rejected(draft: str) -> None:
    with pytest.raises(UsageError, match="self:int8 or self:int4"):
        EngineConfig.make(model="m", draft=draft)


def test_nothing_is_quantized_without_draft_tokens(pair: Pair) -> None:
    with build(pair.target, num_speculative_tokens=0) as llm:
        assert llm.notices == []
        assert isinstance(llm.engine.parts.drafter, NoDraft)
