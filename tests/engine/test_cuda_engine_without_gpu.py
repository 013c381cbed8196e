"""The CUDA engine without a GPU: the PyTorch twins of its kernels, on a fake device that runs everything at once.

A replay runs the captured forward again, with the host's work in between. So everything but the hardware is tested:
captured forwards, token chains, expert batches, launches ahead of the host, slots, and copies in chunks. The fake
device is explained in tests/fake_cuda.py.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from checkpoints import (
    Pair,
    byte_tokenizer,
    greedy,
    greedy_tokens,
    longrope,
    memory_for,
    phimoe,
    reference,
    require_longrope_reference,
    save,
    seeded,
    submodules_with,
)
from fake_cuda import FakeCudaDevice, FakeEvent, FakeGraphRecorder
from fake_cuda_engine import FakeCuda, use_fake_cuda

pytest.importorskip("triton", reason="no triton")

from spmoe import LLM, SamplingParams, types
from spmoe.backends.base import routed_experts
from spmoe.backends.cuda import CudaBackend
from spmoe.backends.cuda_runtime import CopyRange
from spmoe.backends.cuda_transfer import CudaTransfer
from spmoe.backends.graphs import Phase
from spmoe.backends.kernels import dense, experts, packed, rotary
from spmoe.bench.configs import make_configs
from spmoe.bench.runs import BenchJob, BenchRunner
from spmoe.bench.scenario import PolicyPair
from spmoe.config import ONE_BY_ONE, Cutoff, Size
from spmoe.engine.engine import _warm_up_tokens
from spmoe.engine.llm import Generation
from spmoe.engine.loop import Loop
from spmoe.errors import TransferError
from spmoe.experts.eviction.draft_informed import DraftInformed
from spmoe.experts.run_ahead import Launched, RunAhead
from spmoe.formats.base import weight_format
from spmoe.models import families, runner
from spmoe.models.decode_graphs import DecodeGraph, DecodeGraphs
from spmoe.models.experts_seam import attach
from spmoe.models.fusion import fuse
from spmoe.models.kv import KvArena, KvState
from spmoe.models.kv_pool import KvPool
from spmoe.models.runner import EagerResult, ModelRunner
from spmoe.models.target import Target
from spmoe.observe.ledger import Counters
from spmoe.predict.governor import LENGTHS, Governor
from spmoe.types import PROMPT_ROWS
from spmoe.verify.greedy import verify_greedy

PROMPT = list(b"def f(x):")
COUNT = 14
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Build engines on the fake device."""
    return use_fake_cuda(monkeypatch)


@pytest.fixture
def no_expert_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let experts be of a kind that the kernels do not implement."""
    monkeypatch.setattr("spmoe.backends.cuda.slot_experts", lambda *args: None)


def generate(target: Path, draft: Path | None, **options: Any) -> list[int]:
    """Generate twice; check that both give the same tokens, and return them."""
    options = {"dtype": "float32", "progress": False, "max_num_seqs": 1, **options}
    with LLM(str(target), str(draft) if draft else None, **options) as llm:
        assert not llm.notices
        first, second = (llm.generate(PROMPT, GREEDY)[0].token_ids for _ in range(2))
        assert first == second, "with all graphs captured and all slots full"
        return first


OPTIONS: list[dict[str, Any]] = [
    {"num_speculative_tokens": 3},
    {"num_speculative_tokens": 3, "expert_memory": memory_for(2), "cutoff": "all"},
    {"num_speculative_tokens": 2, "prefetch": "on-demand"},
    {"num_speculative_tokens": 3, "expert_memory": "100%"},
    {"num_speculative_tokens": 3, "enforce_eager": True},
    {"num_speculative_tokens": 3, "prefetch": "next-gate"},
    {"num_speculative_tokens": 2, "prefetch": "draft-gate+next-gate"},
    {"num_speculative_tokens": 3, "prefetch": "activation", "expert_memory": memory_for(3)},
    {"num_speculative_tokens": 3, "prefetch": "adaptive", "expert_memory": memory_for(3)},
    {"num_speculative_tokens": 2, "prefetch": "next-gate", "eviction": "lru-per-layer"},
    {"num_speculative_tokens": "auto"},
]


# options run with both families and both drafts, and every draft with both families, but not in all combinations
@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        (family, ("good", "random")[(number + other) % 2], options)
        for number, options in enumerate(OPTIONS)
        for other, family in enumerate(("mixtral", "qwen"))
    ],
    ids=str,
)
def test_tokens_equal_those_of_transformers(
    cuda: FakeCuda, request: pytest.FixtureRequest, family: str, kind: str, options: dict[str, Any]
) -> None:
    pair: Pair = request.getfixturevalue(f"{family}_pair")
    assert generate(pair.target, getattr(pair, kind), **options) == greedy_tokens(pair.target, PROMPT, COUNT)
    assert (cuda.recorder.replayed > 0) != options.get("enforce_eager", False)


def test_fused_kernels_do_not_change_tokens(cuda: FakeCuda, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels run in captured and in eager forwards."""
    launched: list[tuple[Phase, int]] = []  # phase and number of rows

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: Any = None) -> Tensor:
        # row by row: batch-invariant, as the kernel
        return torch.cat([dense.small_batch_linear_plain(row[None], weight, bias) for row in x])

    def linears(x: Tensor, weights: Any, biases: Any, tile: Any) -> list[Tensor]:
        launched.append((cuda.recorder.phase, len(x)))
        return [linear(x, *given) for given in zip(weights, biases, strict=True)]

    for kernels, names in ((dense, ("rms_norm", "gated_linear", "route")), (rotary, ("apply_rotary",))):
        for name in names:
            monkeypatch.setattr(kernels, name, getattr(kernels, f"{name}_plain"))
    monkeypatch.setattr(dense, "small_batch_linear", linear)
    monkeypatch.setattr(dense, "fused_linears", linears)
    monkeypatch.setattr("spmoe.models.runner.fuse", fuse)
    expected = greedy_tokens(pair.target, PROMPT, COUNT)
    assert generate(pair.target, pair.good, num_speculative_tokens=3) == expected
    assert {(Phase.EAGER, len(PROMPT)), (Phase.CAPTURE, 1), (Phase.CAPTURE, 4)} <= set(launched)


def test_tokens_do_not_depend_on_changing_draft_lengths(
    cuda: FakeCuda, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft after steps without one has more pending tokens than its graphs were captured for."""
    rng = random.Random(3)
    monkeypatch.setattr(Governor, "learn", lambda self, step: setattr(self, "current", rng.choice(LENGTHS)))
    expected = greedy_tokens(pair.target, PROMPT, COUNT)
    for _ in range(3):
        assert generate(pair.target, pair.good, num_speculative_tokens="auto") == expected
    assert cuda.recorder.replayed > 0


def test_captured_drafts_propose_and_predict_as_eager_ones(cuda: FakeCuda, pair: Pair) -> None:
    """Wrong drafts would not change the output, only how much is accepted and prefetched."""
    found = []
    for eager in (False, True):
        options = {"num_speculative_tokens": 3, "cutoff": "all", "enforce_eager": eager, "progress": False}
        options |= ONE_BY_ONE
        with LLM(str(pair.target), str(pair.good), dtype="float32", **options) as llm:  # type: ignore[arg-type]
            counters = llm.generate(PROMPT, GREEDY)[0].stats.counters
            found.append((counters.drafted_at, counters.accepted_at, counters.prefetches_requested))
    assert found[0] == found[1]
    assert found[0][1][0] > 0


def test_switching_policies_does_not_replay_graphs_of_another_policy(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    """Each policy makes the requests that it makes with eager forwards, and the same routing is recorded."""
    expected, found = greedy_tokens(mixtral_pair.target, PROMPT, COUNT), []
    for eager in (False, True):
        options = {"num_speculative_tokens": 3, "prefetch": "on-demand", "enforce_eager": eager, "progress": False}
        options |= ONE_BY_ONE
        with LLM(str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", **options) as llm:  # type: ignore[arg-type]
            with llm.engine.record() as recording:
                assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
            llm.engine.recording = recording
            prefetches = {}
            for prefetch in ("next-gate", "adaptive", "activation", "oracle", "draft-gate+next-gate", "next-gate"):
                llm.engine.reconfigure(prefetch=prefetch, cutoff=Cutoff.parse("all"))
                completion = llm.generate(PROMPT, GREEDY)[0]
                assert completion.token_ids == expected
                prefetches[prefetch] = completion.stats.counters.prefetches_requested
            found.append((recording, prefetches))
    assert found[0] == found[1]
    assert all(found[0][1].values())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("self:int4", {}),
        ("self:int4", {"expert_memory": memory_for(2)}),
        ("self:int8", {"expert_memory": "100%"}),
    ],
    ids=str,
)
def test_quantized_self_drafts_as_in_eager_forwards(
    cuda: FakeCuda, pair: Pair, name: str, options: dict[str, Any]
) -> None:
    """Its forwards are captured over the KV caches of the target, and its own routing is the prediction."""
    found: list[Any] = []
    for eager in (False, True):
        given = {**options, "num_speculative_tokens": 3, "cutoff": "all", "enforce_eager": eager}
        with LLM(str(pair.target), name, dtype="float32", progress=False, **given) as llm:
            assert not [notice for notice in llm.notices if "captured" in notice]
            runner = llm.engine.parts.drafter.runner
            assert runner is not None
            assert runner.captures != eager
            completions = [llm.generate(PROMPT, GREEDY)[0] for _ in range(2)]
            found.append(completions[0].token_ids)
            counters = completions[0].stats.counters
            found.append((counters.drafted_at, counters.accepted_at, counters.prefetches_requested))
            assert completions[1].token_ids == completions[0].token_ids
    assert found[:2] == found[2:]
    assert found[0] == greedy_tokens(pair.target, PROMPT, COUNT)
    assert found[1][1][0] > 0
    assert found[1][2] > 0


@pytest.mark.parametrize("name", ["int4-asym-g32", "fp8-block128", "mxfp4"])
def test_tokens_of_packed_experts_equal_those_of_the_dequantized_model(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Few rows run in the grouped kernels, and the prompt expert by expert, dequantized."""
    monkeypatch.setattr("spmoe.backends.cuda.kernel_row_limit", lambda nbytes: 8)
    calls, format = list[str](), weight_format(name)

    def dequantize(*args: Any) -> Tensor:
        calls.append(args[0].name)
        return packed.dequantize_matrix_plain(*args)

    monkeypatch.setattr("spmoe.backends.cuda.dequantize_matrix", dequantize)
    model = reference(mixtral_pair.target)
    for module in submodules_with(model, "gate_up_proj"):
        for weights in (module.gate_up_proj.data, module.down_proj.data):
            for weight in weights:
                weight.copy_(format.dequantize(format.quantize(weight), torch.float32))
    expected = greedy(model, PROMPT * 3, COUNT)
    for draft, options in (
        (None, {"expert_memory": "30%"}),
        (mixtral_pair.good, {"expert_memory": "30%", "num_speculative_tokens": 3}),
        (mixtral_pair.good, {"expert_memory": "100%", "num_speculative_tokens": 3, "enforce_eager": True}),
    ):
        with LLM(
            str(mixtral_pair.target), str(draft) if draft else None, dtype="float32", progress=False,
            expert_format=name, **options,
        ) as llm:  # fmt: skip
            assert llm.generate(PROMPT * 3, GREEDY)[0].token_ids == expected
    assert set(calls) == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize("draft", [None, "self:int4"])
def test_packed_gpt_oss_runs_in_the_kernels(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: str | None
) -> None:
    """Its experts have biases, alternating rows of gate and up, and clamp both; dense ones are transposed."""
    families.save(families.tiny_model("gpt_oss"), tmp_path)
    model, calls, format, prompt = reference(tmp_path), set[str](), weight_format("mxfp4"), list(range(2, 11))
    for module in submodules_with(model, "gate_up_proj"):
        for weights in (module.gate_up_proj.data, module.down_proj.data):
            for weight in weights:
                weight.copy_(format.dequantize(format.quantize(weight.T), torch.float32).T)

    def run(*args: Any) -> None:
        calls.add(args[4].down.format.name)
        experts.run_expert_batch_plain(*args)

    for user in ("backends.cuda", "backends.kernels.experts"):
        monkeypatch.setattr(f"spmoe.{user}.run_expert_batch", run)
    options: dict[str, Any] = {"expert_format": "mxfp4", "expert_memory": "50%", "num_speculative_tokens": 3}
    with LLM(str(tmp_path), draft, dtype="float32", progress=False, **options) as llm:
        assert llm.generate(prompt, GREEDY)[0].token_ids == greedy(model, prompt, COUNT)
    assert calls == {"mxfp4"} | ({"int4-asym-g32"} if draft else set())


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe_swa", "mimo_v2_flash"])
@pytest.mark.parametrize("expert_memory", ["50%", "100%"])
def test_attention_sinks_are_captured(cuda: FakeCuda, tmp_path: Path, family: str, expert_memory: str) -> None:
    """Prompts longer and shorter than a sliding window, alone and together."""
    families.save(families.tiny_model(family), tmp_path)
    model, prompts = reference(tmp_path), [list(range(2, 2 + count)) for count in (9, 40, 23)]
    expected = [greedy(model, prompt, COUNT) for prompt in prompts]
    options: dict[str, Any] = {"num_speculative_tokens": 3, "expert_memory": expert_memory, "prefill_chunk": 16}
    with LLM(str(tmp_path), "ngram", dtype="float32", progress=False, **options) as llm:
        assert llm.engine.target.captures
        assert not [notice for notice in llm.notices if "CUDA graphs" in notice]
        before = cuda.recorder.replayed
        assert [together(llm, [prompt])[0] for prompt in prompts] == expected
        assert together(llm, prompts) == expected
        assert cuda.recorder.replayed > before


def test_target_and_its_quantized_self_have_separate_graphs(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    with LLM(str(mixtral_pair.target), "self:int4", dtype="float32", progress=False, num_speculative_tokens=2) as llm:
        llm.generate(PROMPT, GREEDY)
        runners = (llm.engine.target, llm.engine.parts.drafter.runner)
        assert runners[1] is not None
        target, draft = (runner._graphs for runner in runners if runner is not None)
        assert target is not None
        assert draft is not None
        assert target.arena is draft.arena
        assert not set(target._captured.values()) & set(draft._captured.values())


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no kernels"])
@pytest.mark.parametrize("length", [PROMPT_ROWS - 1, 3 * PROMPT_ROWS])
def test_eviction_policy_gets_the_share_of_prompt_rows_of_each_expert(
    cuda: FakeCuda,
    mixtral_pair: Pair,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    kernels: bool,
) -> None:
    if not kernels:
        request.getfixturevalue("no_expert_kernels")
    shown: dict[int, list[Any]] = {}
    monkeypatch.setattr(
        DraftInformed, "on_prompt", lambda self, layer, *routed: shown.setdefault(layer, []).append(routed)
    )
    with LLM(str(mixtral_pair.target), None, dtype="float32", progress=False, expert_memory=memory_for(3)) as llm:
        shown.clear()  # of the prompts that compile kernels; they are forgotten
        llm.generate([[(7 * i) % 200 for i in range(length)]], SamplingParams(max_tokens=4, ignore_eos=True))
        layers, top_k = len(llm.engine.target.moe), llm.engine.target.top_k
    assert len(shown) == (layers if length >= PROMPT_ROWS else 0)
    for ((routed, shares),) in shown.values():
        assert len(routed) == len(shares) > top_k
        assert sum(shares) == pytest.approx(top_k)
        assert all(round(share * length) == pytest.approx(share * length) for share in shares)


@pytest.fixture
def launched_ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Collect, for each captured forward of the target, whether its first graph was launched behind the draft."""
    found: list[bool] = []
    take_verify = RunAhead.take_verify

    def take(self: RunAhead, graph: Any, tokens: list[int], ranges: Any) -> bool:
        found.append(take_verify(self, graph, tokens, ranges))
        return found[-1]

    monkeypatch.setattr(RunAhead, "take_verify", take)
    return found


@pytest.mark.parametrize("draft", ["good", "random", "self:int8"])
@pytest.mark.parametrize("memory", [memory_for(3), "100%"])
def test_verification_is_launched_behind_the_draft(
    cuda: FakeCuda, pair: Pair, launched_ahead: list[bool], draft: str, memory: str
) -> None:
    name = draft if ":" in draft else str(getattr(pair, draft))
    options = {"num_speculative_tokens": 3, "expert_memory": memory, "dtype": "float32", "progress": False}
    with LLM(str(pair.target), name, cutoff="all", **options) as llm:  # type: ignore[arg-type]
        launched_ahead.clear()
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(pair.target, PROMPT, COUNT)
    assert len(launched_ahead) >= 3
    assert all(launched_ahead[:-1]), "the last step may have no draft, if it may add only one token"


@pytest.mark.parametrize("memory", [memory_for(3), "100%"])
@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=0.8, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", [None, "good"])
def test_plain_steps_are_launched_before_the_host_has_accounted_for_the_last(
    cuda: FakeCuda,
    mixtral_pair: Pair,
    launched_ahead: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    draft: str | None,
    params: SamplingParams,
    memory: str,
) -> None:
    name = name_of(mixtral_pair, draft)
    options: dict[str, Any] = {"dtype": "float32", "progress": False, "expert_memory": memory}
    with LLM(str(mixtral_pair.target), name, num_speculative_tokens=0, enforce_eager=True, **options) as llm:
        expected = llm.generate(PROMPT, params)[0].token_ids
    replayed: list[int] = []  # forwards that were replayed when a step begins to account
    account, launch_first = Loop._account, DecodeGraph.launch_first
    starts: list[object] = []

    def noted_account(*args: Any) -> None:
        replayed.append(len(starts))
        account(*args)

    def noted_launch(self: DecodeGraph, tokens: list[int] | None, ranges: Any) -> None:
        starts.append(tokens)
        launch_first(self, tokens, ranges)

    monkeypatch.setattr(Loop, "_account", noted_account)
    monkeypatch.setattr(DecodeGraph, "launch_first", noted_launch)
    with LLM(str(mixtral_pair.target), name, num_speculative_tokens=0 if draft is None else "auto", **options) as llm:
        monkeypatch.setattr(Loop, "_num_draft_tokens", lambda *args: 0)
        monkeypatch.setattr(Loop, "_wants_comparison", lambda *args: False)
        launched_ahead.clear()
        starts.clear()
        replayed.clear()
        assert llm.generate(PROMPT, params)[0].token_ids == expected
        assert launched_ahead == [True] * (COUNT - 1)
        # the step that reads the prompt launches the first one, and the last step launches none
        assert replayed == [*range(1, COUNT), COUNT - 1]
        assert len(starts) == COUNT - 1
        launched_ahead.clear()
        streams = [llm.stream(PROMPT, params) for _ in range(2)]
        live = [iter(stream) for stream in streams]
        while live:
            live = [pieces for pieces in live if next(pieces, None) is not None]
        assert [stream.token_ids for stream in streams] == [expected] * 2


def test_no_plain_step_is_launched_before_the_draft_is_compared(
    cuda: FakeCuda, mixtral_pair: Pair, launched_ahead: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison would discard it."""
    discarded: list[bool] = []
    note_launch = RunAhead.note_launch

    def noted(self: RunAhead) -> None:
        discarded.append(not self._launching and self.launched is Launched.VERIFY)
        note_launch(self)

    monkeypatch.setattr(RunAhead, "note_launch", noted)
    monkeypatch.setattr(Loop, "_num_draft_tokens", lambda *args: 0)
    monkeypatch.setattr(Governor, "wants_comparison", lambda self, tokens, free=False: tokens >= 3)
    options: dict[str, Any] = {"num_speculative_tokens": "auto", "dtype": "float32", "progress": False}
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), **options) as llm:
        discarded.clear()
        launched_ahead.clear()
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
    assert not any(discarded)
    assert launched_ahead.count(False) > 1, "steps that begin with a comparison"
    assert launched_ahead.count(True) > 1


@pytest.mark.parametrize("memory", [memory_for(3), "100%"])
def test_another_request_invalidates_the_launched_verification(
    cuda: FakeCuda, mixtral_pair: Pair, launched_ahead: list[bool], memory: str
) -> None:
    prompts = [PROMPT, list(b"class A"), PROMPT]
    expected = [greedy_tokens(mixtral_pair.target, prompt, COUNT) for prompt in prompts]
    options = {"num_speculative_tokens": 3, "expert_memory": memory, "dtype": "float32", "progress": False}
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), **options) as llm:  # type: ignore[arg-type]
        launched_ahead.clear()
        streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
        live = [iter(stream) for stream in streams]
        while live:
            live = [pieces for pieces in live if next(pieces, None) is not None]
    assert [stream.token_ids for stream in streams] == expected
    assert not all(launched_ahead)


class PendingEvent(FakeEvent):
    """An event that the host never sees as passed."""

    def query(self) -> bool:
        return False


class StallingDevice(FakeCudaDevice):
    """Compute has to wait for every copy, 100 seconds each."""

    def __init__(self) -> None:
        super().__init__(immediate=True)
        self._waiting = self._ended = 0

    def copy(self, ranges: Sequence[CopyRange]) -> FakeEvent:
        super().copy(ranges)  # the bytes are there when kernels run
        event = PendingEvent(self)
        event.passed = True
        return event

    def compute_wait_event(self, event: object) -> None:
        self._waiting += 1

    def end_waits(self) -> int:
        """End the waits so far; return their number."""
        ended, self._waiting = self._waiting, 0
        self._ended += ended
        return ended

    def take_stall_seconds(self) -> float:
        ended, self._ended = self._ended, 0
        return 100.0 * ended


def test_stalls_are_counted_in_the_step_in_which_they_occur(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device ends the waits of a step only when the host asks for its result."""
    device, steps = StallingDevice(), list[int]()
    cuda.device = device

    def read_result(*args: Any) -> Any:
        steps.append(device.end_waits())
        return verify_greedy(*args)

    monkeypatch.setattr("spmoe.engine.loop.verify_greedy", read_result)
    with LLM(str(mixtral_pair.target), None, dtype="float32", progress=False, expert_memory=memory_for(3)) as llm:
        stats = llm.generate(PROMPT, GREEDY)[0].stats
    assert min(steps) > 0
    assert stats.prompt_counters.stall_seconds // 100 == steps[0]
    assert stats.decode_counters.stall_seconds // 100 == sum(steps[1:])


@pytest.mark.parametrize("rows", [1, 2, 33, 512, 1000])
def test_warm_up_prompts_give_experts_different_numbers_of_rows(rows: int) -> None:
    counts = sorted(Counter(_warm_up_tokens(rows)).values(), reverse=True)
    assert sum(counts) == rows
    assert len(counts) <= rows.bit_length(), "more tokens would load more experts"
    assert all(before - 1 <= 2 * after <= before + 1 or after == 1 for before, after in itertools.pairwise(counts))


def test_warm_up_of_later_draft_passes_keeps_the_kv_cache(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    """The first request drafts one token only, so the later passes are captured during a longer one."""
    expected = greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
    options = {"num_speculative_tokens": 3, "dtype": "float32", "progress": False, **ONE_BY_ONE}
    with LLM(str(mixtral_pair.target), "self:int8", **options) as llm:  # type: ignore[arg-type]
        llm.generate([7], SamplingParams(max_tokens=3, ignore_eos=True))
        target = llm.engine.target
        kept = target.new_kv(2 * len(PROMPT))
        target.forward(PROMPT, kept, 1)
        before = [layer.keys[:, :, : len(PROMPT)].clone() for layer in kept.cache.layers]
        completion = llm.generate(PROMPT, GREEDY)[0]
        for layer, keys in zip(kept.cache.layers, before, strict=True):
            assert torch.equal(layer.keys[:, :, : len(PROMPT)], keys)
    assert completion.token_ids == expected


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no kernels"])
def test_prefetches_are_submitted_while_an_eager_forward_waits_for_a_router(
    cuda: FakeCuda, mixtral_pair: Pair, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    if not kernels:
        request.getfixturevalue("no_expert_kernels")
    transfers = list[CudaTransfer]()
    during, after = list[int](), list[int]()  # prefetches left to submit, during waits for a router and after them

    def left() -> int:
        return sum(len(transfer._waiting) for transfer in transfers)

    class SlowEvent(FakeEvent):
        """An event that has passed when no prefetch is left to submit."""

        def query(self) -> bool:
            during.append(left())
            return not during[-1]

    class SlowRecorder(FakeGraphRecorder):
        def new_event(self) -> FakeEvent:
            return SlowEvent(cuda.device)

    def read_router(index: Tensor) -> Any:
        after.append(left())
        return routed_experts(index)

    cuda.recorder = SlowRecorder()
    monkeypatch.setattr("spmoe.backends.cuda.routed_experts", read_router)
    with LLM(
        str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", progress=False, num_speculative_tokens=3,
        expert_memory=memory_for(4), prefetch="draft-gate", cutoff="all", enforce_eager=True,
    ) as llm:  # fmt: skip
        transfers.append(llm.engine.parts.runtime.transfer)  # type: ignore[arg-type]
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
    assert max(during) > 0
    assert max(after) == 0


def test_benchmarks_capture_only_in_warm_up_runs(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmoe.bench.runs.measure_ceilings", lambda engine: None)
    running: list[str] = []
    captured: dict[str, int] = {}

    @contextmanager
    def observer(generation: Generation) -> Iterator[None]:
        before = cuda.recorder.captured
        yield
        captured[running[-1]] = captured.get(running[-1], 0) + cuda.recorder.captured - before

    pairs = [PolicyPair(prefetch=name) for name in ("draft-gate", "on-demand", "next-gate", "activation")]
    configs = make_configs([Size(share=0.5)], pairs, [3, 2])
    engine = {"model": str(mixtral_pair.target), "draft": str(mixtral_pair.good), "device": "cpu", "progress": False}
    engine |= {"shape": None, "link_gbps": None, "enforce_eager": False, "dtype": "float32"}
    prompts = [byte_tokenizer()(prompt)["input_ids"] for prompt in ("the cat", "a longer prompt")]
    job = BenchJob(engine, configs, prompts, output_len=9, repeat=1, warmup=1, resident={2: 1.0, 3: 1.0})
    runner = BenchRunner(
        job, lambda text: None, observer, on_progress=lambda done, total, detail="": running.append(detail)
    )
    runner.run()
    counted = {run: count for run, count in captured.items() if not run.startswith("warm-up")}
    assert len(counted) == 2 * len(configs)
    assert not any(counted.values()), counted


@pytest.mark.parametrize(
    ("draft", "k"), [*((one, k) for one in ("good", "self:int8") for k in (3, "auto")), ("ngram", "auto"), (None, 0)]
)
@pytest.mark.parametrize("prefetch", ["draft-gate+next-gate", "on-demand"])
def test_requests_capture_nothing(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, draft: str | None, k: Any, prefetch: str
) -> None:
    """Everything is captured when the engine is built: for any K, batches, sampling, and prompts with any rest."""
    rng = random.Random(3)
    monkeypatch.setattr(Governor, "learn", lambda self, step: setattr(self, "current", rng.choice(LENGTHS)))
    plan = KvPool.plan  # a device's memory for KV caches is allocated at once, and has a limit
    monkeypatch.setattr(KvPool, "plan", lambda self, limit, expected, **options: plan(self, 2048, 2048, **options))
    options: dict[str, Any] = {"num_speculative_tokens": k, "prefetch": prefetch, "prefill_chunk": 32}
    options |= {"dtype": "float32", "expert_memory": memory_for(5), "progress": False}
    with LLM(str(mixtral_pair.target), name_of(mixtral_pair, draft), **options) as llm:
        captured, prompts = cuda.recorder.captured, [PROMPT, *OTHER_PROMPTS]
        expected = [greedy_tokens(mixtral_pair.target, prompt, COUNT) for prompt in prompts]
        assert together(llm, prompts) == expected
        for count in range(1, 12):
            expected = greedy_tokens(mixtral_pair.target, PROMPT, count)
            assert llm.generate(PROMPT, SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids == expected
        for seed in range(3):
            llm.generate(PROMPT, replace(GREEDY, max_tokens=30, temperature=seed / 2, seed=seed))
        for rest in range(1, 5):
            prompt = [rng.randrange(250) for _ in range(32 + rest)]
            expected = greedy_tokens(mixtral_pair.target, prompt, 3)
            for _ in range(2):  # the second time, all but one token are read already
                assert llm.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids == expected
        assert cuda.recorder.captured == captured > 0


def test_sampled_requests_replay_captured_forwards(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = list[int]()  # logits of forwards

    def count(logits: Tensor) -> EagerResult:
        eager.append(len(logits))
        return EagerResult(logits)

    sampled = replace(GREEDY, temperature=0.8, seed=1)
    with LLM(
        str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", num_speculative_tokens=3, progress=False
    ) as llm:
        llm.generate(PROMPT, sampled)
        monkeypatch.setattr(runner, "EagerResult", count)
        llm.generate(PROMPT, sampled)
        assert eager == [1], "the last token of the prompt; the others are read already"


@pytest.mark.parametrize("rest", [1, 2, 4])
def test_the_end_of_a_prompt_is_read_alike_for_every_k(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, rest: int
) -> None:
    """Captured forwards round differently, and which ones there are depends on K."""
    eager, prompt = list[int](), [(7 * place) % 250 for place in range(8 + rest)]
    run = runner.ModelRunner.run

    def noted(self: Any, tokens: list[int], *args: Any, **options: Any) -> Any:
        result = run(self, tokens, *args, **options)
        if isinstance(result, EagerResult):
            eager.append(len(tokens))
        return result

    found = []
    for k in (0, 1, 4, "auto"):
        options: dict[str, Any] = {"num_speculative_tokens": k, "prefill_chunk": 8, "progress": False}
        draft = "ngram" if k else None
        with LLM(str(mixtral_pair.target), draft, dtype="float32", **options) as llm, monkeypatch.context() as patch:
            patch.setattr(runner.ModelRunner, "run", noted)
            llm.generate(prompt, replace(GREEDY, max_tokens=4))
        found.append([*eager])
        eager.clear()
    assert found == [[8, rest]] * 4


def test_preparation_leaves_nothing_in_slots_and_policies(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    with LLM(str(mixtral_pair.target), None, dtype="float32", progress=False, expert_memory=memory_for(5)) as llm:
        engine = llm.engine
        assert not engine.experts.pool.slots_by_key()
        assert engine.counters == Counters()
        assert engine.target.kv_pool.usage is None
        assert not engine.target.kv_pool.spare
        assert engine.target.kv_pool.arena.used == engine.target.kv_pool.scratch.capacity


def test_decoding_without_a_draft_is_captured(cuda: FakeCuda, pair: Pair) -> None:
    assert generate(pair.target, None) == greedy_tokens(pair.target, PROMPT, COUNT)
    assert cuda.recorder.replayed >= 2 * (COUNT - 1)


@pytest.mark.usefixtures("no_expert_kernels")
def test_tokens_without_expert_kernels_equal_those_of_transformers(cuda: FakeCuda, pair: Pair) -> None:
    expected = greedy_tokens(pair.target, PROMPT, COUNT)
    assert generate(pair.target, pair.good, num_speculative_tokens=3) == expected
    assert cuda.recorder.replayed


@pytest.mark.usefixtures("no_expert_kernels")
def test_experts_without_kernels_are_predicted_as_in_eager_forwards(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    prefetches = []
    for eager in (False, True):
        options = {"num_speculative_tokens": 0, "prefetch": "next-gate", "enforce_eager": eager, "progress": False}
        options |= ONE_BY_ONE
        with LLM(str(mixtral_pair.target), None, dtype="float32", **options) as llm:  # type: ignore[arg-type]
            prefetches.append(llm.generate(PROMPT, GREEDY)[0].stats.counters.prefetches_requested)
    assert prefetches[0] == prefetches[1] > COUNT


def test_predictions_use_the_fused_gate_kernel(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[int] = []  # number of layers
    plain = dense.norm_and_route_layers_plain

    def count(x: Tensor, *args: Any) -> Any:
        launches.append(len(x))
        return plain(x, *args)

    monkeypatch.setattr(dense, "norm_and_route_layers", count)
    options: dict[str, Any] = {"num_speculative_tokens": 0, "expert_memory": memory_for(4), "prefetch": "next-gate"}
    with LLM(str(mixtral_pair.target), None, dtype="float32", progress=False, **options) as llm:
        launches.clear()
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
    assert launches


@pytest.mark.parametrize("draft", ["good", "random"])
def test_processors_and_logprobs_of_replayed_forwards(cuda: FakeCuda, mixtral_pair: Pair, draft: str) -> None:
    """Drafts are launched ahead without processors; verification applies them to the graph's logits."""
    params = replace(GREEDY, repetition_penalty=1.6, frequency_penalty=0.5, logit_bias={65: 2.0}, logprobs=2)
    outputs = []
    for k in (0, 3):
        with LLM(
            mixtral_pair.target, getattr(mixtral_pair, draft), dtype="float32", progress=False, num_speculative_tokens=k
        ) as llm:
            outputs.append(llm.generate(PROMPT, params)[0].outputs[0])
    plain, speculated = outputs
    assert plain.token_ids == speculated.token_ids != greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
    assert cuda.recorder.replayed
    assert plain.logprobs is not None
    assert speculated.logprobs is not None
    for one, other in zip(plain.logprobs, speculated.logprobs, strict=True):
        assert list(one) == list(other)
        assert [o.logprob for o in one.values()] == pytest.approx([o.logprob for o in other.values()], abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prefetch", ["draft-gate", "activation"])
def test_prefetches_are_submitted_before_the_draft_ends(
    cuda: FakeCuda, mixtral_pair: Pair, prefetch: str, temperature: float
) -> None:
    options: dict[str, Any] = {"num_speculative_tokens": 3, "expert_memory": memory_for(8), "cutoff": "all"}
    with LLM(
        str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", progress=False, prefetch=prefetch, **options
    ) as llm:
        scheduler, pool = llm.engine.experts.scheduler, llm.engine.experts.pool
        submitted, verifying = list[bool](), False  # for each submission: whether the draft had ended

        def before(call: Callable[..., None], note: Callable[..., None]) -> Callable[..., None]:
            def noted(*args: Any) -> None:
                note(*args)
                call(*args)

            return noted

        def note_submission(entries: list[Any]) -> None:
            if entries:
                submitted.append(verifying)

        def note_stage(value: bool) -> None:
            nonlocal verifying
            verifying = value

        pool.submit = before(pool.submit, note_submission)  # type: ignore[method-assign]
        scheduler.begin_step = before(scheduler.begin_step, lambda: note_stage(False))  # type: ignore[method-assign]
        scheduler.finish_draft = before(scheduler.finish_draft, lambda: note_stage(True))  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=1)
        for text in (b"class A: pass", b"import os\n"):  # some policies learn from one request for the next
            llm.generate(list(text), params)
        assert False in submitted
        assert llm.engine.counters.prefetch_used > 0
        assert not scheduler._held


def test_without_overlap_nothing_is_submitted_in_the_background(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    with LLM(str(mixtral_pair.target), None, dtype="float32", progress=False, overlap=False) as llm:
        scheduler = llm.engine.experts.scheduler
        scheduler.pump = lambda *args: pytest.fail("a request waits for its own copies")  # type: ignore[method-assign]
        scheduler.submit()


@pytest.mark.parametrize("memory", [memory_for(3), "100%"])
@pytest.mark.parametrize(("length", "sizes"), [(64, {64}), (65, {64, 1}), (150, {64, 22}), (250, {64, 58})])
@pytest.mark.parametrize("passes", [2, 8])
def test_kernels_read_prompts_in_passes(
    cuda: FakeCuda,
    mixtral_pair: Pair,
    memory: Any,
    length: int,
    sizes: set[int],
    passes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each expert is loaded once for all passes; prompts that need more passes use a product per expert."""
    plain, rows = experts.run_expert_batch_plain, set[int]()

    def note_rows(hidden: Tensor, *args: Any) -> None:
        rows.add(len(hidden))
        plain(hidden, *args)

    monkeypatch.setattr("spmoe.backends.cuda.kernel_row_limit", lambda expert_bytes: 64 * passes)
    monkeypatch.setattr("spmoe.backends.cuda.run_expert_batch", note_rows)
    prompt = [n * n % 251 for n in range(length)]
    options: dict[str, Any] = {"num_speculative_tokens": 0, "prefetch": "on-demand", "expert_memory": memory}
    with LLM(str(mixtral_pair.target), None, dtype="float32", progress=False, **options) as llm:
        completion = llm.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True))[0]
        assert completion.token_ids == greedy_tokens(mixtral_pair.target, prompt, 2)
        count = llm.engine.spec.count
    assert (sizes <= rows) == (length <= 64 * passes)
    assert completion.stats.counters.demand_loads <= count + 2 * 2 * count // 8


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_prompt_chunks_may_be_smaller_than_a_draft(cuda: FakeCuda, mixtral_pair: Pair, chunk: int) -> None:
    """Replays of one graph overwrite each other's logits."""
    expected = greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
    assert generate(mixtral_pair.target, mixtral_pair.good, num_speculative_tokens=4, prefill_chunk=chunk) == expected


def test_interrupt_between_post_and_launch_loses_no_expert_batch(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was posted and never launched must not run in place of the next one."""
    expected, post = greedy_tokens(mixtral_pair.target, PROMPT, COUNT), CudaBackend.post
    options: dict[str, Any] = {"num_speculative_tokens": 3, "expert_memory": memory_for(8), "progress": False}

    def interrupted(self: CudaBackend, slots: Any = -1) -> None:
        post(self, slots)
        raise KeyboardInterrupt

    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", **options) as llm:
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
        monkeypatch.setattr(CudaBackend, "post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, GREEDY)
        monkeypatch.setattr(CudaBackend, "post", post)
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


@pytest.mark.parametrize("calls", range(1, 7))  # of `attach` until the interrupt; there are three layers
def test_interrupt_restores_the_experts_of_the_target(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """The interrupt comes while its modules get the quantized experts, or while they get their own back."""
    left = [calls]

    def attach_or_interrupt(experts: Any, forward: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        attach(experts, forward)

    with LLM(str(mixtral_pair.target), "self:int4", dtype="float32", progress=False, num_speculative_tokens=2) as llm:
        assert len(llm.engine.target.moe) == 3
        monkeypatch.setattr("spmoe.draft.self.attach", attach_or_interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, GREEDY)
        expected = greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


def test_prompts_of_any_length_share_scratch_memory(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    with LLM(
        str(mixtral_pair.target), None, dtype="float32", progress=False, expert_memory=memory_for(4), **ONE_BY_ONE
    ) as llm:
        backend = llm.engine.parts.runtime.cuda
        assert backend is not None
        for length in (3, 64, 65, 100, 127, 129, 180, 240):
            llm.generate([5] * length, SamplingParams(max_tokens=1, ignore_eos=True))
        assert len(backend._scratches) == 4, "one for each pass over the longest prompt"


def test_sliding_windows_are_kept(cuda: FakeCuda, windowed_pair: Pair) -> None:
    expected = greedy_tokens(windowed_pair.target, PROMPT, COUNT)
    assert generate(windowed_pair.target, windowed_pair.good, num_speculative_tokens=3) == expected


@pytest.fixture
def rotary_needs_the_host(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid the model's own rotary embeddings during a capture, since they would need the host."""
    own = PhimoeRotaryEmbedding.forward

    @wraps(own)
    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        if cuda.recorder.phase is Phase.CAPTURE:
            raise RuntimeError("cannot copy between CPU and CUDA tensors")
        return own(self, x, position_ids)

    monkeypatch.setattr(PhimoeRotaryEmbedding, "forward", forward)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("change", [None, 12, 18])
def test_rotary_tables_replace_embeddings_computed_on_the_host(
    cuda: FakeCuda, rotary_needs_the_host: None, tmp_path: Path, change: int | None, k: int
) -> None:
    """Also where the context grows past the position at which LongRoPE switches."""
    if change is not None:
        require_longrope_reference()
    model = seeded(phimoe, 3, **({} if change is None else {"rope_parameters": longrope(change)}))
    target = save(model, tmp_path, byte_tokenizer())
    expected = greedy_tokens(target, PROMPT, COUNT)
    with LLM(str(target), "self:int8" if k else None, dtype="float32", progress=False, num_speculative_tokens=k) as llm:
        assert not [notice for notice in llm.notices if "captured" in notice]
        for _ in range(2):
            completion = llm.generate(PROMPT, GREEDY)[0]
            assert completion.token_ids == expected
            assert bool(completion.stats.counters.accepted) == bool(k)
    assert cuda.recorder.replayed > COUNT


@pytest.mark.parametrize("memory", [memory_for(3), "100%"])
@pytest.mark.parametrize("chunk", [7, 12])
def test_recomputing_the_kv_cache_invalidates_the_launched_verification(
    cuda: FakeCuda, rotary_needs_the_host: None, tmp_path: Path, chunk: int, memory: str
) -> None:
    """After a LongRoPE switch, the last recomputed chunk may have as many rows as the launched forward, or fewer."""
    require_longrope_reference()
    target = save(seeded(phimoe, 3, rope_parameters=longrope(12)), tmp_path, byte_tokenizer())
    options: dict[str, Any] = {"num_speculative_tokens": 3, "prefill_chunk": chunk, "expert_memory": memory}
    with LLM(str(target), "self:int8", dtype="float32", progress=False, **options) as llm:
        for _ in range(2):
            assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(target, PROMPT, COUNT)


def test_models_without_rotary_tables_are_not_captured(
    cuda: FakeCuda, rotary_needs_the_host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmoe.models.rotary.make_table", lambda *args: None)
    target = save(seeded(phimoe, 3), tmp_path, byte_tokenizer())
    with LLM(str(target), None, dtype="float32", progress=False, num_speculative_tokens=0) as llm:
        (notice,) = llm.notices
        assert "forwards of the target are not captured as CUDA graphs (cannot copy between" in notice
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(target, PROMPT, COUNT)
    assert not cuda.recorder.replayed


def test_interleaved_generations_have_their_own_kv_caches(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", progress=False) as llm:
        prompts = [PROMPT, list(b"import os\n")]
        streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
        running = [iter(stream) for stream in streams]
        while running:
            for stream in list(running):
                if next(stream, None) is None:
                    running.remove(stream)
        model = reference(mixtral_pair.target)
        assert [s.token_ids for s in streams] == [greedy(model, prompt, COUNT) for prompt in prompts]


def test_failed_copy_is_reported_and_later_requests_succeed(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    options: dict[str, Any] = {"expert_memory": memory_for(3), "num_speculative_tokens": 3, "progress": False}
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", **options) as llm:
        expected = greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
        cuda.device.failing_copies, cuda.device.failure = 10**6, TransferError("injected failure")
        with pytest.raises(TransferError, match="injected failure"):
            llm.generate(PROMPT, GREEDY)
        cuda.device.failing_copies = 0
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


def test_sampled_tokens_depend_on_the_seed_only(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=1.0, seed=5)
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", progress=False) as llm:
        first, second = (llm.generate(PROMPT, params)[0].token_ids for _ in range(2))
    assert first == second


def test_captured_forwards_can_be_profiled(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    from spmoe.bench.profile_runs import Workload, measure_profile

    options = {"num_speculative_tokens": 4, "prefetch": "on-demand", "expert_memory": memory_for(6), "link_gbps": 0.5}
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", progress=False, **options) as llm:  # type: ignore[arg-type]
        profile = measure_profile(llm, 2, Workload([PROMPT], 8))
        expected = greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected, "the measurement leaves no wrong expert in a slot"
    assert list(profile.verify_seconds) == [1, 2, 3, 5], "the rows that are captured"
    assert list(profile.load_seconds) == [1, 2, 4]
    assert len(profile.policies) == 4
    assert all(0 < one.missing <= one.needed for one in profile.policies)


def test_random_weights_need_no_checkpoint(cuda: FakeCuda, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **sizes, **experts}))
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "progress": False}
    texts = []
    for k, memory in ((0, "100%"), (0, "30%"), (3, "30%")):
        with LLM(tmp_path, "ngram", num_speculative_tokens=k, expert_memory=memory, **options) as llm:
            texts.append(llm.generate([PROMPT], GREEDY)[0].token_ids)
    assert texts[0] == texts[1] == texts[2]
    assert len({*texts[0]}) > 1


# ---- several requests


OTHER_PROMPTS = [list(b"class A"), list(b"x"), list(range(40, 66))]  # of unequal lengths


@pytest.fixture
def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many sequences each captured forward of several has."""
    found: list[int] = []
    forward_batch = DecodeGraphs.forward_batch

    def run(self: DecodeGraphs, parts: Any, observer: Any) -> Any:
        found.append(len(parts))
        return forward_batch(self, parts, observer)

    monkeypatch.setattr(DecodeGraphs, "forward_batch", run)
    return found


def name_of(pair: Pair, draft: str | None) -> str | None:
    return str(pair.good) if draft == "good" else draft


def together(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    ("family", "draft", "memory"),
    [
        ("qwen", None, memory_for(2)),
        ("mixtral", "good", memory_for(2)),
        ("qwen", "good", "100%"),
        ("mixtral", "self:int4", "100%"),
        ("qwen", "self:int4", memory_for(3)),
    ],
)
def test_requests_together_have_the_text_of_lone_ones(
    cuda: FakeCuda, request: pytest.FixtureRequest, batch_sizes: list[int], family: str, draft: str | None, memory: Any
) -> None:
    """Lone steps before and after replay captured graphs."""
    pair: Pair = request.getfixturevalue(f"{family}_pair")
    prompts, model = [PROMPT, *OTHER_PROMPTS], reference(pair.target)
    expected = [greedy(model, prompt, COUNT) for prompt in prompts]
    options: dict[str, Any] = {"num_speculative_tokens": 2 if draft else 0, "expert_memory": memory}
    with LLM(
        str(pair.target), name_of(pair, draft), dtype="float32", progress=False, prefill_chunk=24, **options
    ) as llm:
        notices = list(llm.notices)
        assert together(llm, prompts[:1]) == expected[:1]
        assert (before := cuda.recorder.replayed) > 0
        batch_sizes.clear()
        assert together(llm, prompts) == expected
        assert max(batch_sizes) == len(prompts)
        assert together(llm, prompts[1:2]) == expected[1:2]
        assert cuda.recorder.replayed > before
        assert llm.notices == notices


@pytest.mark.parametrize("expert_format", ["bfloat16", "int4-g32"])
@pytest.mark.parametrize("memory", [memory_for(2), "100%"])
@pytest.mark.parametrize("lengths", [(20, 9, 30), (70, 20, 5, 90)])
def test_prompts_that_are_read_together_have_the_bits_of_lone_ones(
    cuda: FakeCuda,
    mixtral_pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    expert_format: str,
    memory: Any,
    lengths: tuple[int, ...],
) -> None:
    """Products of many rows round by their number, so each sequence has products of its own."""
    read, read_batch = list[int](), ModelRunner.read_batch

    def noted(self: ModelRunner, parts: Any, *args: Any) -> Any:
        read.append(len(parts))
        return read_batch(self, parts, *args)

    monkeypatch.setattr(ModelRunner, "read_batch", noted)
    monkeypatch.setattr("spmoe.backends.base._PASS_BYTES", 0)  # prompts of more than 64 rows run expert by expert
    prompts = [[(7 * place + 31 * number) % 250 for place in range(length)] for number, length in enumerate(lengths)]
    options: dict[str, Any] = {"expert_memory": memory, "expert_format": expert_format, "prefill_chunk": 256}
    with LLM(
        str(mixtral_pair.target), None, dtype="bfloat16", enable_prefix_caching=False, progress=False, **options
    ) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1)
        alone = [llm.generate(prompt, params)[0].outputs[0] for prompt in prompts]
        assert not read
        generations = [llm.stream(prompt, params) for prompt in prompts]
        llm._thread.call(lambda: [generation.start() for generation in generations])
        found = [generation.run().outputs[0] for generation in generations]
    assert max(read) == len(prompts)
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    assert [one.cumulative_logprob for one in found] == [one.cumulative_logprob for one in alone]


@pytest.mark.parametrize("lengths", [(20, 9, 30), (70, 20, 5, 90)])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "ernie4_5_moe", "minimax_m2"])
def test_dense_layers_of_prompts_that_are_read_together_have_the_bits_of_lone_ones(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, lengths: tuple[int, ...]
) -> None:
    """Also routers that no kernel reproduces: with a bias, or with arguments beside the hidden states."""
    own, read_batch, read = torch.nn.functional.linear, ModelRunner.read_batch, list[int]()

    def rounds_by_rows(x: Tensor, *args: Any) -> Tensor:
        y, rows = own(x, *args), x.numel() // x.shape[-1]
        kernel = sys._getframe(1).f_code.co_filename == dense.__file__
        return y if kernel else (y.float() * (1 + rows % 61 * 1e-4)).to(y.dtype)

    def by_row(plain: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(x: Tensor, *args: Any, tile: Any = None) -> Any:
            assert len(x) <= 64
            rows = [plain(row[None], *args) for row in x]
            return torch.cat(rows) if isinstance(rows[0], Tensor) else tuple(map(torch.cat, zip(*rows, strict=True)))

        return kernel

    def noted(self: ModelRunner, parts: Any, *args: Any) -> Any:
        read.append(len(parts))
        return read_batch(self, parts, *args)

    linear = by_row(dense.small_batch_linear_plain)
    monkeypatch.setattr(dense, "small_batch_linear", linear)
    monkeypatch.setattr(
        dense, "fused_linears", lambda x, ws, bs, tile: [linear(x, *one) for one in zip(ws, bs, strict=True)]
    )
    for name in ("gated_linear", "route"):
        monkeypatch.setattr(dense, name, by_row(getattr(dense, f"{name}_plain")))
    monkeypatch.setattr(dense, "rms_norm", dense.rms_norm_plain)
    monkeypatch.setattr(rotary, "apply_rotary", rotary.apply_rotary_plain)
    monkeypatch.setattr("spmoe.models.runner.fuse", fuse)
    monkeypatch.setattr(torch.nn.functional, "linear", rounds_by_rows)
    monkeypatch.setattr(ModelRunner, "read_batch", noted)
    families.save(families.tiny_model(family), tmp_path)
    prompts = [[2 + (7 * place + 31 * number) % 60 for place in range(n)] for number, n in enumerate(lengths)]
    options: dict[str, Any] = {"dtype": "bfloat16", "prefill_chunk": 256, "enable_prefix_caching": False}
    with LLM(str(tmp_path), None, progress=False, **options) as llm:
        params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=1)
        alone = [llm.generate(prompt, params)[0].outputs[0] for prompt in prompts]
        generations = [llm.stream(prompt, params) for prompt in prompts]
        llm._thread.call(lambda: [generation.start() for generation in generations])
        found = [generation.run().outputs[0] for generation in generations]
        assert llm.engine.target.captures
    assert read == [len(prompts)]
    assert [one.cumulative_logprob for one in found] == [one.cumulative_logprob for one in alone]


@pytest.mark.parametrize("draft", [None, "good", "self:int4"])
def test_conversations_continue_from_their_kv_caches(cuda: FakeCuda, mixtral_pair: Pair, draft: str | None) -> None:
    """KV caches are taken from others that graphs were captured over; a notice would say that drafts are not used."""
    model, name, k = reference(mixtral_pair.target), name_of(mixtral_pair, draft), 2 if draft else 0
    with LLM(str(mixtral_pair.target), name, dtype="float32", progress=False, num_speculative_tokens=k) as llm:
        notices, prompts = list(llm.notices), [PROMPT, *OTHER_PROMPTS[:2]]
        for turn in range(2):
            outputs = llm.generate(prompts, GREEDY)
            assert [one.token_ids for one in outputs] == [greedy(model, prompt, COUNT) for prompt in prompts]
            for one, prompt in zip(outputs, prompts, strict=True):
                assert one.stats.cached_tokens >= (len(prompt) - 4 if turn else 0)
            prompts = [[*prompt, *one.token_ids, 7, 8, 9] for prompt, one in zip(prompts, outputs, strict=True)]
        assert llm.notices == notices


@pytest.mark.parametrize("draft", [None, "good", "self:int4"])
def test_sequences_grow_are_preempted_and_resume(
    cuda: FakeCuda, mixtral_pair: Pair, batch_sizes: list[int], monkeypatch: pytest.MonkeyPatch, draft: str | None
) -> None:
    """Graphs read the places of KV caches, which move all the time, and nothing is captured again for it."""
    count, k, prompts = 30, 2 if draft else 0, [PROMPT, *OTHER_PROMPTS]
    model, params = reference(mixtral_pair.target), replace(GREEDY, max_tokens=count)
    monkeypatch.setattr("spmoe.models.kv_pool._GROWTH", 2)
    with LLM(
        str(mixtral_pair.target),
        name_of(mixtral_pair, draft),
        dtype="float32",
        progress=False,
        num_speculative_tokens=k,
    ) as llm:
        for one in (llm.engine.target, llm.engine.parts.drafter.runner):
            if one is not None:
                one.kv_pool.plan(100, 100, reuse_prefixes=True)
        together(llm, prompts, params)
        generation, captured = llm.engine.target.kv_pool.arena.generation, cuda.recorder.captured
        found = together(llm, prompts, params)
        assert llm.num_preemptions > 0
        assert llm.engine.target.kv_pool.arena.generation == generation
        assert cuda.recorder.captured == captured
    assert found == [greedy(model, prompt, count) for prompt in prompts]
    assert max(batch_sizes) > 1


@pytest.mark.parametrize("memory", [memory_for(3), "100%"])
@pytest.mark.parametrize("counts", [(20, 20, 20), (20, 9, 14)], ids=["end-together", "end-one-by-one"])
def test_plain_steps_of_several_sequences_are_launched_ahead(
    cuda: FakeCuda, mixtral_pair: Pair, launched_ahead: list[bool], counts: tuple[int, ...], memory: str
) -> None:
    """Also while one of them ends; then the launched forward is that of other sequences."""
    model, prompts = reference(mixtral_pair.target), [PROMPT, *OTHER_PROMPTS[:2]]
    options: dict[str, Any] = {"num_speculative_tokens": 0, "expert_memory": memory, "dtype": "float32"}
    with LLM(str(mixtral_pair.target), None, progress=False, **options) as llm:
        launched_ahead.clear()
        found = llm.generate(prompts, [replace(GREEDY, max_tokens=count) for count in counts])
    assert [one.token_ids for one in found] == [greedy(model, *one) for one in zip(prompts, counts, strict=True)]
    assert len(launched_ahead) == max(counts) - 1, "they run together"
    assert launched_ahead.count(False) <= 2 + len(set(counts)), "where sequences have joined or ended"


@pytest.mark.parametrize("draft", [None, "good"])
def test_launched_forwards_count_while_a_kv_cache_grows_in_its_place(
    cuda: FakeCuda, mixtral_pair: Pair, launched_ahead: list[bool], monkeypatch: pytest.MonkeyPatch, draft: str | None
) -> None:
    """It grows in every step if little KV memory is left."""
    options: dict[str, Any] = {"num_speculative_tokens": 3 if draft else 0, "dtype": "float32", "progress": False}
    grown, place = list[int](), KvArena.place

    def noted(self: KvArena, kv: KvState, capacity: int) -> None:
        grown.append(capacity)
        place(self, kv, capacity)

    with LLM(str(mixtral_pair.target), name_of(mixtral_pair, draft), max_num_seqs=1, **options) as llm:
        launched_ahead.clear()
        together(llm, [PROMPT])
        expected = list(launched_ahead)
        launched_ahead.clear()
        monkeypatch.setattr("spmoe.models.kv_pool._GROWTH", 0)
        monkeypatch.setattr(KvArena, "place", noted)
        assert together(llm, [PROMPT]) == [greedy_tokens(mixtral_pair.target, PROMPT, COUNT)]
    assert len(set(grown)) > 3
    first = 0 if draft is None else 1  # the draft's KV cache has no place for a draft before the first step
    assert launched_ahead[first:] == expected[first:]
    assert True in launched_ahead[first:]


def test_nothing_is_launched_that_a_kv_cache_has_no_place_for(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels drop such rows, and a launched forward counts although its range has grown since."""

    def this_step_only(self: Loop, sequence: types.Sequence) -> tuple[int, int]:
        least = min(sequence.capacity, len(sequence.tokens) + self.max_draft_tokens + 1)
        return least, least

    monkeypatch.setattr(Loop, "_kv_sizes", this_step_only)
    options: dict[str, Any] = {"num_speculative_tokens": 3, "dtype": "float32", "progress": False}
    with LLM(str(mixtral_pair.target), name_of(mixtral_pair, "good"), max_num_seqs=1, **options) as llm:
        assert together(llm, [PROMPT]) == [greedy_tokens(mixtral_pair.target, PROMPT, COUNT)]


@pytest.mark.parametrize("draft", [None, "good"])
def test_steps_are_launched_ahead_while_others_wait_for_a_place(
    cuda: FakeCuda, mixtral_pair: Pair, launched_ahead: list[bool], draft: str | None
) -> None:
    """A request that cannot begin before another one has ended takes no turn from those that run."""
    options: dict[str, Any] = {"num_speculative_tokens": 3 if draft else 0, "dtype": "float32", "progress": False}
    with LLM(str(mixtral_pair.target), name_of(mixtral_pair, draft), max_num_seqs=1, **options) as llm:
        launched_ahead.clear()
        together(llm, [PROMPT])
        alone = list(launched_ahead)
        launched_ahead.clear()
        together(llm, [PROMPT] * 3)
    assert launched_ahead == alone * 3


def test_completions_of_a_prompt_copy_its_keys(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    """A completion gets its KV cache from an earlier request, and the prompt from another completion."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, n=4, temperature=1.0, seed=3)
    options: dict[str, Any] = {"num_speculative_tokens": 2, "dtype": "float32", "progress": False}
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), **options, **ONE_BY_ONE) as llm:
        expected = [one.token_ids for one in llm.generate(PROMPT, params)[0].outputs]
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), **options) as llm:
        together(llm, [PROMPT, *OTHER_PROMPTS], replace(params, n=1))
        (output,) = llm.generate(PROMPT, params)
        assert [one.token_ids for one in output.outputs] == expected


def test_kv_caches_of_trials_take_no_place(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    """Forwards that are tried while an engine is built do not make sequences wait."""
    for draft in (str(mixtral_pair.good), "self:int4"):
        with LLM(str(mixtral_pair.target), draft, dtype="float32", progress=False, num_speculative_tokens=2) as llm:
            for one in (llm.engine.target, llm.engine.parts.drafter.runner):
                assert one is not None
                assert len(one.kv_pool._used) == 0


def test_failed_copies_of_a_shared_step_fail_no_other_request(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed step of several sequences each one tries alone; one whose copies still fail gets the error."""
    prompts, model = [PROMPT, *OTHER_PROMPTS], reference(mixtral_pair.target)
    expected = [greedy(model, prompt, COUNT) for prompt in prompts]
    options: dict[str, Any] = {"num_speculative_tokens": 2, "expert_memory": memory_for(2), "prefetch": "on-demand"}
    run_batch, left = runner.ModelRunner.run_batch, list[int]()  # numbers of copies that fail in the next step

    def break_device(self: Any, *args: Any) -> Any:
        if left and isinstance(self, Target):
            cuda.device.failing_copies, cuda.device.failure = left.pop(), TransferError("injected failure")
        return run_batch(self, *args)

    monkeypatch.setattr(runner.ModelRunner, "run_batch", break_device)
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", progress=False, **options) as llm:
        for failures in (1, 10**6):
            left.append(failures)
            streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
            llm._thread.call(lambda streams=streams: [stream.start() for stream in streams])
            errors = 0
            for stream, tokens in zip(streams, expected, strict=True):
                try:
                    stream.run()
                    assert stream.token_ids == tokens
                except TransferError:
                    errors += 1
                    assert stream.token_ids == tokens[: len(stream.token_ids)]
            assert not left
            assert errors == (0 if failures == 1 else len(prompts))
            cuda.device.failing_copies = 0
            assert together(llm, prompts) == expected
            assert not llm.engine.parts.target_kv
