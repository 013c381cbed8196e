"""The output is exactly that of transformers, with every drafter, policy, budget and K."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from checkpoints import (
    EXPERTS,
    LAYERS,
    TOP_K,
    Pair,
    byte_tokenizer,
    greedy,
    memory_for,
    reference,
    save,
    save_pair,
    seeded,
)
from checkpoints import mistral as make_mistral
from checkpoints import mixtral as make_mixtral
from checkpoints import qwen3_moe as make_qwen3_moe
from spmoe import LLM, SamplingParams
from spmoe.backends import cpu
from spmoe.backends.cpu import CpuBackend
from spmoe.config import max_draft_tokens
from spmoe.engine.engine import Engine
from spmoe.experts.access import ExpertBatch
from spmoe.models.kv import KvState
from spmoe.observe.ledger import Counters
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import Draft, VerifyResult
from spmoe.verify.greedy import RowArgmax, verify_greedy
from spmoe.verify.sampling import verify_sampled

COUNT = 14  # tokens generated per prompt
SHORT = [84]
LONG = [(29 * i + 7) % 251 for i in range(11)]  # longer than a prefill chunk, and no multiple of it
PROMPTS = (SHORT, LONG)

SLOTS = {family: (TOP_K, TOP_K + 1, LAYERS * n // 2, LAYERS * n) for family, n in EXPERTS.items()}
AXES: Mapping[str, Sequence[Any]] = {
    "family": ("mixtral", "qwen3_moe"),
    "prefetch": ("on-demand", "draft-gate", "next-gate", "draft-gate+next-gate", "activation", "adaptive"),
    "num_speculative_tokens": (0, 1, 3, 5, "auto"),
    "slots": (0, 1, 2, 3),  # index into SLOTS: the minimum, one more, half of all experts, all experts
    "cutoff": ("all", "1", "auto"),
    "draft": ("good", "random"),
    "eviction": ("auto", *EVICTION_POLICIES.names()),
    "prefill_chunk": (3, 512),
}


def pairs_of(row: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    return {(a, row[a], b, row[b]) for a, b in combinations(AXES, 2)}


def covering_rows() -> list[dict[str, Any]]:
    """Return few rows that together contain every pair of values of every two axes."""
    missing = {(a, x, b, y) for a, b in combinations(AXES, 2) for x, y in product(AXES[a], AXES[b])}
    rows = []
    while missing:
        a, x, b, y = min(missing, key=str)
        row = {a: x, b: y}
        for axis in (axis for axis in AXES if axis not in row):
            gains = {
                value: sum((p, row[p], axis, value) in missing or (axis, value, p, row[p]) in missing for p in row)
                for value in AXES[axis]
            }
            row[axis] = max(gains, key=lambda value: gains[value])
        rows.append({axis: row[axis] for axis in AXES})
        missing -= pairs_of(rows[-1])
    return rows


ROWS = covering_rows()


def name_of(row: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in row.values())


@pytest.fixture(scope="module")
def expected() -> Callable[[Path], list[list[int]]]:
    """Return a function that gives the tokens of transformers for every prompt, computed once per checkpoint."""

    @cache
    def tokens_of(directory: Path) -> list[list[int]]:
        model = reference(directory)
        return [greedy(model, prompt, COUNT) for prompt in PROMPTS]

    return tokens_of


def build(target: Path, draft: Path | None = None, **options: Any) -> LLM:
    return LLM(str(target), None if draft is None else str(draft), progress=False, **options)


def settings(row: Mapping[str, Any], pair: Pair) -> dict[str, Any]:
    """Return the row as engine options."""
    options = {**row, "draft": getattr(pair, row["draft"]), "target": pair.target}
    options["expert_memory"] = memory_for(SLOTS[options.pop("family")][options.pop("slots")])
    return options


def assert_exact(llm: LLM, expected: list[list[int]]) -> None:
    """Check the tokens of every prompt."""
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        completion = llm.generate(prompt, params)[0]
        assert completion.token_ids == tokens
        assert completion.finish_reason == "length"


# ---- greedy


def test_rows_contain_every_pair_of_values() -> None:
    covered = set().union(*(pairs_of(row) for row in ROWS))
    for a, b in combinations(AXES, 2):
        for x, y in product(AXES[a], AXES[b]):
            assert (a, x, b, y) in covered
    assert len(ROWS) < 60, "a covering subset, not the product"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_greedy_output_equals_transformers(
    row: Mapping[str, Any], mixtral_pair: Pair, qwen_pair: Pair, expected: Any
) -> None:
    family = row["family"]
    pair = {"mixtral": mixtral_pair, "qwen3_moe": qwen_pair}[family]
    with build(**settings(row, pair)) as llm:
        engine: Engine = llm.engine
        assert_exact(llm, expected(pair.target))
        drafting = row["num_speculative_tokens"] != 0
        predicting = drafting and "draft-gate" in row["prefetch"]
        assert engine.slots == SLOTS[family][row["slots"]], "the budget of this row"
        assert engine.experts.pool.peak_slots <= engine.slots
        assert engine.notices == []
        assert engine.loop.max_draft_tokens == max_draft_tokens(row["num_speculative_tokens"])
        own = row["prefetch"] if row["prefetch"] in ("activation", "adaptive") else "draft-informed"
        assert engine.learned.evictions.keys() == {own if row["eviction"] == "auto" else row["eviction"]}
        assert engine.loop.policy.uses_cutoff == predicting
        counters = engine.counters
        assert (counters.drafted > 0) == drafting
        if predicting and row["cutoff"] != "auto":
            assert engine.prefetching.cutoff == (LAYERS if row["cutoff"] == "all" else 1)
            assert counters.prefetches_requested > 0
        if not predicting:
            assert (counters.prefetches_requested > 0) == (row["prefetch"] not in ("on-demand", "draft-gate"))
            assert counters.prefetch_loads <= counters.prefetches_requested


def test_oracle_is_exact_and_requests_every_routed_expert(pair: Pair, expected: Any) -> None:
    """Run and record each prompt, then run it again with the oracle policy."""
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    with build(pair.target, pair.good, num_speculative_tokens=3, prefetch="on-demand", expert_memory="50%") as llm:
        for prompt, tokens in zip(PROMPTS, expected(pair.target), strict=True):
            llm.engine.reconfigure(prefetch="on-demand")
            with llm.engine.record() as recording:
                assert llm.generate(prompt, params)[0].token_ids == tokens
            llm.engine.recording = recording
            llm.engine.reconfigure(prefetch="oracle")
            completion = llm.generate(prompt, params)[0]
            assert completion.token_ids == tokens
            counters = completion.stats.counters
            assert completion.stats.prefetch == "oracle"
            assert counters.steps == len(recording)
            assert counters.prefetches_requested == sum(len(experts) for step in recording for experts in step.values())
            assert counters.prefetch_used > 0


def test_checkpoints_make_the_comparison_meaningful(pair: Pair, expected: Any) -> None:
    """Greedy tokens vary, there are no near-ties, and tokens of a good draft are accepted and rejected."""
    model = reference(pair.target)
    for prompt, tokens in zip(PROMPTS, expected(pair.target), strict=True):
        assert len(set(tokens)) >= 6
        with torch.no_grad():
            best = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-3
    rates = {}
    for name in ("good", "random"):
        with build(pair.target, getattr(pair, name), num_speculative_tokens=5) as llm:
            assert_exact(llm, expected(pair.target))
            rates[name] = llm.engine.counters.accepted / llm.engine.counters.drafted
    assert 0.2 < rates["good"] < 0.95
    assert rates["random"] < 0.1


@pytest.mark.parametrize("prefetch", ["on-demand", "draft-gate"])
def test_llama_draft_works_with_both_families(pair: Pair, llama_draft: Path, prefetch: str, expected: Any) -> None:
    with build(
        pair.target, llama_draft, num_speculative_tokens=3, prefetch=prefetch, cutoff="all", expert_memory="50%"
    ) as llm:
        assert_exact(llm, expected(pair.target))
        assert llm.notices == []


@pytest.mark.parametrize("layout", ["fused", "sharded"])
def test_other_checkpoint_layouts_give_the_same_output(tmp_path: Path, pair: Pair, layout: str, expected: Any) -> None:
    copy = save(reference(pair.target), tmp_path / layout, byte_tokenizer(), layout)
    with build(copy, pair.good, num_speculative_tokens=3, expert_memory="50%") as llm:
        assert_exact(llm, expected(pair.target))


@pytest.mark.parametrize("draft", ["good", "random"])
@pytest.mark.parametrize("slots", [TOP_K, LAYERS * EXPERTS["mixtral"]])
@pytest.mark.parametrize(("prefetch", "k"), [("on-demand", 0), ("on-demand", 3), ("draft-gate", 5)])
def test_text_longer_than_the_sliding_window(
    windowed_pair: Pair, prefetch: str, k: int, slots: int, draft: str, expected: Any
) -> None:
    window = reference(windowed_pair.target).config.sliding_window
    assert window < COUNT
    with build(
        windowed_pair.target,
        getattr(windowed_pair, draft),
        prefetch=prefetch,
        num_speculative_tokens=k,
        expert_memory=memory_for(slots),
        prefill_chunk=3,
    ) as llm:
        assert_exact(llm, expected(windowed_pair.target))


@pytest.mark.parametrize("draft", ["good", "random"])
@pytest.mark.parametrize("cutoff", ["all", 1])
def test_target_with_dense_layers(partly_dense_pair: Pair, draft: str, cutoff: Any, expected: Any) -> None:
    with build(
        partly_dense_pair.target,
        getattr(partly_dense_pair, draft),
        num_speculative_tokens=3,
        cutoff=cutoff,
        expert_memory=memory_for(5),
        prefill_chunk=3,
    ) as llm:
        assert_exact(llm, expected(partly_dense_pair.target))
        assert len(llm.engine.target.moe) == 2
        assert llm.engine.counters.prefetches_requested > 0


def test_recurrent_state_is_restored_from_its_snapshot(recurrent_target: Path, qwen_pair: Pair, expected: Any) -> None:
    """After a partly accepted draft, the state is restored and the accepted tokens are read again."""
    options = {"num_speculative_tokens": 3, "expert_memory": "50%", "enable_prefix_caching": False}
    for chunk in (3, 512):
        with build(recurrent_target, qwen_pair.random, prefill_chunk=chunk, **options) as llm:
            assert_exact(llm, expected(recurrent_target))
            assert llm.engine.counters.drafted > 0
            assert llm.notices == []


def test_target_that_cannot_roll_back_decodes_without_speculation_and_warns(
    recurrent_target: Path, qwen_pair: Pair, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmoe.models.inspection._resumes", lambda model: False)
    options = {"expert_memory": "50%", "enable_prefix_caching": False}
    with build(recurrent_target, qwen_pair.random, num_speculative_tokens=3, prefill_chunk=3, **options) as llm:
        assert_exact(llm, expected(recurrent_target))
        assert llm.engine.counters.drafted == 0
        (notice,) = llm.notices
        assert str(recurrent_target) in notice
        assert "cannot be rolled back" in notice
        assert "without speculation" in notice
    with build(recurrent_target, **options) as llm:
        assert_exact(llm, expected(recurrent_target))
        assert llm.notices == [], "speculation was not requested"


def test_eos_inside_an_accepted_draft_ends_the_output(tmp_path: Path, pair: Pair, expected: Any) -> None:
    """EOS is a token that greedy decoding reaches; transformers and the engine must stop at the same place."""
    tokens = expected(pair.target)[1]
    end = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    copy = tmp_path / "target"
    shutil.copytree(pair.target, copy)
    model = reference(copy)
    model.generation_config.eos_token_id = end
    model.generation_config.save_pretrained(copy)
    ids = torch.tensor([LONG])
    stopped = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COUNT, pad_token_id=0
    )[0, len(LONG) :].tolist()
    assert stopped[-1] == end
    assert len(stopped) < COUNT
    for k in (0, 5):
        with build(copy, pair.good, num_speculative_tokens=k, expert_memory="50%") as llm:
            completion = llm.generate(LONG, SamplingParams(max_tokens=COUNT))[0]
            assert completion.token_ids == stopped
            assert completion.finish_reason == "stop"


@pytest.mark.parametrize("draft", ["good", "random"])
def test_proposals_are_the_drafts_own_greedy_tokens(pair: Pair, draft: str) -> None:
    """A draft with a KV cache that was rolled back wrongly would propose other tokens; the output would not show it."""
    model = reference(getattr(pair, draft))
    with build(pair.target, getattr(pair, draft), num_speculative_tokens=3, prefill_chunk=3) as llm:
        drafter = llm.engine.loop.drafter
        original, proposals = drafter.propose, []

        def propose(sequences: Any, k: int, observers: Any) -> list[Draft]:
            before = list(sequences[0].tokens)
            drafts = original(sequences, k, observers)
            proposals.append((before, drafts[0].tokens, k))
            return drafts

        drafter.propose = propose
        llm.generate(LONG, SamplingParams(max_tokens=COUNT, ignore_eos=True))
    assert proposals[0][1:] == ([], 0), "the first step only reads the prompt"
    assert len(proposals) > 3
    for tokens, proposed, k in proposals[1:]:
        assert proposed == (greedy(model, tokens, k) if k else [])


# ---- bits of the logits


@pytest.fixture(scope="module")
def top_4_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE with four experts per token, so that the order of addition matters."""
    model = seeded(make_qwen3_moe, 60, num_experts_per_tok=4)
    return save(model, tmp_path_factory.mktemp("top-4") / "target", byte_tokenizer())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "four experts"])
def test_logits_of_plain_decoding_have_the_bits_of_eager_transformers(
    case: str, dtype: torch.dtype, mixtral_pair: Pair, qwen_pair: Pair, top_4_target: Path
) -> None:
    directory, budgets = {
        "mixtral": (mixtral_pair.target, SLOTS["mixtral"]),
        "qwen3_moe": (qwen_pair.target, SLOTS["qwen3_moe"]),
        "four experts": (top_4_target, (4, 5, 12, 24)),
    }[case]
    model = reference(directory, dtype, experts_implementation="eager")
    assert model.config._experts_implementation == "eager"
    cache = DynamicCache(config=model.config)
    tokens, logits = LONG, []
    for _ in range(8):
        with torch.no_grad():
            output = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        logits.append((tokens, output.logits[0]))
        tokens = [int(output.logits[0, -1].argmax())]
    for slots in budgets:
        name = str(dtype).removeprefix("torch.")
        with build(directory, expert_memory=memory_for(slots, dtype), dtype=name) as llm:
            assert llm.engine.slots == slots
            kv = llm.engine.target.new_kv(len(LONG) + len(logits))
            for tokens, expected_logits in logits:
                assert torch.equal(llm.engine.target.forward(tokens, kv, num_logits=len(tokens)), expected_logits)


# ---- sampling


SAMPLING = SamplingParams(max_tokens=COUNT, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)


@pytest.mark.parametrize("k", [0, 3])
def test_seeded_sampling_is_reproducible_with_any_policy_and_budget(pair: Pair, k: int) -> None:
    outputs = []
    for prefetch, share in (("on-demand", "25%"), ("draft-gate", "50%"), ("draft-gate", "100%")):
        with build(
            pair.target, pair.good, num_speculative_tokens=k, prefetch=prefetch, cutoff="all", expert_memory=share
        ) as llm:
            outputs += [llm.generate(LONG, SAMPLING)[0].token_ids for _ in range(2)]
            other = llm.generate(LONG, SamplingParams(max_tokens=COUNT, temperature=0.9, seed=12, ignore_eos=True))
            assert other[0].token_ids != outputs[0]
    assert len(outputs) == 6
    assert all(output == outputs[0] for output in outputs)


def test_seeded_text_depends_on_neither_the_draft_nor_k(pair: Pair) -> None:
    outputs = []
    for draft, k in ((None, 0), (pair.good, 1), (pair.good, 4), (pair.random, 3), ("ngram", 5), (pair.good, "auto")):
        with build(pair.target, draft, num_speculative_tokens=k, expert_memory="50%") as llm:
            outputs.append(llm.generate(LONG, SAMPLING)[0].token_ids)
    assert len(set(map(tuple, outputs))) == 1


def test_outputs_differ_without_a_seed(mixtral_pair: Pair) -> None:
    params = SamplingParams(max_tokens=COUNT, temperature=1.5, ignore_eos=True)
    with build(mixtral_pair.target, num_speculative_tokens=0, expert_memory="100%") as llm:
        first, second = (llm.generate(LONG, params)[0].token_ids for _ in range(2))
    assert first != second  # equal less than once in 10**9 runs: 14 tokens of several bits each


DRAWS = 250
WIDTH = 3  # top_k: possible next tokens
LENGTH = 3
FALSE_ALARM = 1e-4  # share of seeds for which an exact engine would fail the test


def sequence_probabilities(directory: Path) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation, computed by transformers."""
    model = reference(directory)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        with torch.no_grad():
            logits = model(torch.tensor([SHORT + list(tokens) for tokens in found])).logits[:, -1]
        for (tokens, mass), row in zip(found.items(), logits, strict=True):
            best = row.double().topk(WIDTH)
            for token, share in zip(best.indices.tolist(), best.values.softmax(dim=-1).tolist(), strict=True):
                longer[(*tokens, token)] = mass * share
        found = longer
    return found


def p_value(drawn: Sequence[tuple[int, ...]], probabilities: Mapping[tuple[int, ...], float]) -> float:
    """Return the p-value of Pearson's chi-square test. Rare outcomes share a bin."""
    if not set(drawn) <= set(probabilities):
        return 0.0  # the target cannot generate that
    counts, total = Counter(drawn), len(drawn)
    bins: list[tuple[float, int]] = [(total * p, counts[o]) for o, p in probabilities.items() if total * p >= 5]
    bins.append((total - sum(e for e, _ in bins), total - sum(c for _, c in bins)))
    statistic = sum((count - mean) ** 2 / mean for mean, count in bins)
    freedom = torch.tensor((len(bins) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def draw_continuations(pair: Pair) -> tuple[list[tuple[int, ...]], Counters]:
    with build(pair.target, pair.good, num_speculative_tokens=2, expert_memory="100%", prefetch="on-demand") as llm:
        drawn = []
        for seed in range(DRAWS):
            params = SamplingParams(max_tokens=LENGTH, temperature=1.0, top_k=WIDTH, seed=seed, ignore_eos=True)
            drawn.append(tuple(llm.generate(SHORT, params)[0].token_ids))
        return drawn, llm.engine.counters


def accept_everything(sequence: Any, draft: Draft, logits: Tensor) -> VerifyResult:
    """Accept every draft token."""
    bonus = verify_sampled(sequence, Draft([]), logits[-1:])
    return VerifyResult(len(draft.tokens), bonus.next_token)


def use_the_next_row(sequence: Any, draft: Draft, logits: Tensor) -> VerifyResult:
    """Judge each draft token by the logits of the token after it."""
    return verify_sampled(sequence, draft, torch.cat([logits[1:], logits[-1:]]))


@pytest.fixture(scope="module")
def high_entropy_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair with many likely continuations, to which the draft gives other probabilities."""
    return save_pair(
        tmp_path_factory.mktemp("high-entropy"),
        "mixtral",
        noise=0.3,
        target=seeded(make_mixtral, 71, num_hidden_layers=2),
        draft=seeded(make_mistral, 70, num_hidden_layers=2),
    )


@pytest.fixture(scope="module")
def continuations(high_entropy_pair: Pair) -> dict[tuple[int, ...], float]:
    return sequence_probabilities(high_entropy_pair.target)


def test_sampled_output_follows_the_targets_distribution(
    high_entropy_pair: Pair, continuations: Mapping[tuple[int, ...], float]
) -> None:
    assert max(continuations.values()) < 0.2
    drawn, counters = draw_continuations(high_entropy_pair)
    assert 0.2 < counters.accepted / counters.drafted < 0.8, "some tokens are accepted, some are rejected"
    assert p_value(drawn, continuations) > FALSE_ALARM


@pytest.mark.parametrize("broken", [accept_everything, use_the_next_row])
def test_wrong_sampler_is_detected(
    high_entropy_pair: Pair,
    continuations: Mapping[tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[Any, Draft, Tensor], VerifyResult],
) -> None:
    monkeypatch.setattr("spmoe.engine.loop.verify_sampled", broken)
    drawn, _ = draw_continuations(high_entropy_pair)
    assert p_value(drawn, continuations) < FALSE_ALARM


# ---- faults: the comparison above must detect them


def swap_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    original = cpu.run_expert

    def run_expert(experts: Any, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        gate, up = tensors["gate_up_proj"].chunk(2)
        return original(experts, {**tensors, "gate_up_proj": torch.cat([up, gate])}, x)

    monkeypatch.setattr(cpu, "run_expert", run_expert)


def _change_batches(monkeypatch: pytest.MonkeyPatch, change: Callable[[ExpertBatch], ExpertBatch]) -> None:
    original = CpuBackend.run_experts

    def run_experts(
        self: Any, experts: Any, hidden: Tensor, index: Tensor, weights: Tensor, batches: Iterable[ExpertBatch]
    ) -> Tensor:
        return original(self, experts, hidden, index, weights, (change(batch) for batch in batches))

    monkeypatch.setattr(CpuBackend, "run_experts", run_experts)


def drop_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(batch: ExpertBatch) -> ExpertBatch:
        kept = [i for i, expert in enumerate(batch.experts) if expert != 0]
        return ExpertBatch(
            batch.layer,
            tuple(batch.experts[i] for i in kept),
            tuple(batch.slots[i] for i in kept),
            tuple(batch.weights[i] for i in kept),
        )

    _change_batches(monkeypatch, change)


def swap_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    _change_batches(
        monkeypatch,
        lambda batch: ExpertBatch(batch.layer, batch.experts, batch.slots, batch.weights[1:] + batch.weights[:1]),
    )


def ignore_router_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CpuBackend.run_experts

    def run_experts(
        self: Any, experts: Any, hidden: Tensor, index: Tensor, weights: Tensor, batches: Iterable[ExpertBatch]
    ) -> Tensor:
        return original(self, experts, hidden, index, torch.full_like(weights, 1 / TOP_K), batches)

    monkeypatch.setattr(CpuBackend, "run_experts", run_experts)


def rewind_one_short(monkeypatch: pytest.MonkeyPatch) -> None:
    original = KvState.rewind

    def rewind(self: KvState, length: int) -> None:
        before = self.length
        original(self, length)
        for layer in self.cache.layers:
            layer.length = min(length + 1, before)

    monkeypatch.setattr(KvState, "rewind", rewind)


def accept_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(draft: Draft, argmax: RowArgmax) -> VerifyResult:
        accepted = min(verify_greedy(draft, argmax).accepted + 1, len(draft.tokens))
        return VerifyResult(accepted, argmax[1][accepted])

    monkeypatch.setattr("spmoe.engine.loop.verify_greedy", verify)


def test_engine_without_a_fault_is_exact(pair: Pair, expected: Any) -> None:
    with build(pair.target, pair.random, num_speculative_tokens=3, expert_memory="50%") as llm:
        assert_exact(llm, expected(pair.target))


@pytest.mark.parametrize(
    "fault",
    [
        swap_gate_and_up,
        drop_expert,
        swap_slots,
        ignore_router_weights,
        rewind_one_short,
        accept_one_too_many,
    ],
)
def test_fault_is_detected(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], expected: Any
) -> None:
    fault(monkeypatch)
    with (
        build(pair.target, pair.random, num_speculative_tokens=3, expert_memory="50%") as llm,
        pytest.raises(AssertionError),
    ):
        assert_exact(llm, expected(pair.target))
