"""The CUDA engine without a device: its kernels' plain twins, its streams a double that does everything at once.

What a recorded forward replays here is the forward itself, with the host's work in between, so that everything but the
hardware is real: programs, chains of draft tokens, batches, the device's length, slots, copies in chunks.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from checkpoints import Pair, byte_tokenizer, greedy, longrope, memory_for, phimoe, reference, save, seeded

pytest.importorskip("triton", reason="no triton")

from spmoe import LLM, SamplingParams
from spmoe.backends.base import routed_experts
from spmoe.backends.cuda import CudaBackend, CudaBlobAddresses
from spmoe.backends.cuda_memory import DeviceSlots, HostStore
from spmoe.backends.cuda_runtime import CopyRange
from spmoe.backends.cuda_transfer import CudaTransfer
from spmoe.backends.graphs import Between, CapturedGraph, Phase, Stopwatch
from spmoe.backends.kernels import attention, dense, experts, inputs, quantized, rotary
from spmoe.bench.configs import make_configs
from spmoe.bench.runs import BenchJob, BenchRunner
from spmoe.bench.scenario import PolicyPair
from spmoe.config import Cutoff, Size
from spmoe.engine import build
from spmoe.engine.llm import Generation
from spmoe.engine.runtime import ExpertRuntime
from spmoe.errors import TransferError
from spmoe.experts.eviction.draft_informed import DraftInformed
from spmoe.experts.run_ahead import RunAhead
from spmoe.models.experts_seam import attach
from spmoe.models.fusion import fuse
from spmoe.models.gates import FusedGates
from spmoe.predict.draft_length import LENGTHS, DraftLength
from spmoe.types import PROMPT_ROWS
from spmoe.verify.greedy import GreedyVerifier

PROMPT = list(b"def f(x):")
COUNT = 14
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


class Passed:
    """An event of a device that is always done."""

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class UnderWay(Passed):
    """The end of a copy that compute must be put behind."""

    def query(self) -> bool:
        return False


class ImmediateCopyStream:
    """Copies that are over when they are submitted; `refuse` may raise instead."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse

    def copy(self, pieces: Sequence[CopyRange]) -> Passed:
        self._refuse()
        for to, source, nbytes in pieces:
            ctypes.memmove(to, source, nbytes)
        return Passed()

    def wait_event(self, event: object) -> None:
        pass

    def bind_compute_stream(self) -> None:
        pass

    def record_compute_event(self) -> Passed:
        return Passed()

    def compute_wait_event(self, event: object) -> None:
        pass

    def take_stall_seconds(self) -> float:
        return 0.0

    def synchronize(self) -> None:
        pass


class EndOfGraph(Exception):
    """The host has something to do from here on."""


class Rerunner:
    """Records a forward by remembering it, and replays it by running it again.

    What is begun runs up to where the host has something to do; the rest runs all of it again, with the inputs that
    were staged when it was begun, and only if nothing else has been since.
    """

    def __init__(self) -> None:
        self.phase = Phase.EAGER
        self.stopwatch = Stopwatch()
        self.recorded = 0
        self.replayed = 0
        self._replaying = self._beginning = False
        self._splits = 0
        self._ran = 0  # graphs
        self._staged: list[Tensor] | None = None  # by what is begun, and for what is finished
        self._notes: list[Callable[[], None]] = []

    def capture(self, forward: Callable[[], Tensor]) -> tuple[CapturedGraph, Tensor]:
        try:
            self.phase = Phase.WARMUP
            forward()
            self.phase, self._splits = Phase.CAPTURE, 0
            result = forward().clone()
        finally:
            self.phase = Phase.EAGER
        self.recorded += 1
        recording = CapturedGraph()

        begun: list[Any] = [0, None]  # as which graph, and with which inputs

        def run(*, beginning: bool) -> None:
            self.phase, self._replaying, self._beginning = Phase.CAPTURE, True, beginning
            try:
                result.copy_(forward())
            except EndOfGraph:
                result.fill_(float("nan"))
                self._notes.clear()
            finally:
                self.phase, self._replaying, self._beginning = Phase.EAGER, False, False

        def first() -> None:
            self.replayed += 1
            self._ran += 1
            self._staged = None
            run(beginning=len(recording.pieces) > 1)
            begun[:] = self._ran, self._staged

        def rest() -> None:
            assert begun[0] == self._ran, "another graph may have written over what was begun"
            self._staged = begun[1]
            run(beginning=False)

        recording.pieces += [first, rest] if self._splits else [first]
        return recording, result

    def stage(self, inbox: Tensor, chain: Tensor, other: Tensor, *inputs_: Tensor) -> None:
        if self._replaying and not self._beginning and self._staged is not None:  # the rest of what was begun
            for there, staged in zip((chain, *inputs_), self._staged, strict=True):
                there.copy_(staged)
            return
        inputs.load_inputs_plain(inbox, chain, other, *inputs_)
        if self._beginning:
            self._staged = [tensor.clone() for tensor in (chain, *inputs_)]

    def split(self, between: Callable[[], None]) -> None:
        self._split()
        if self._replaying:
            between()

    def split_around(self, work: Callable[[], None], between: Between) -> None:
        self._split()
        if self._replaying:
            between(work, self.take_observations())

    def _split(self) -> None:
        self._splits += 1
        if self._beginning:
            raise EndOfGraph

    def observe_later(self, later: Callable[[], None]) -> None:
        if self._replaying:
            self._notes.append(later)

    def take_observations(self) -> list[Callable[[], None]]:
        notes, self._notes = self._notes, []
        return notes

    def wait(self) -> None:
        pass

    def new_event(self) -> Passed:
        return Passed()


class Double:
    """What a double of the device has seen."""

    def __init__(self) -> None:
        self.recorder = Rerunner()
        self.failing = False

    def refuse(self) -> None:
        if self.failing:
            raise TransferError("injected: the link had a bad moment")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    """Engines are built on the double."""
    it = Double()
    for user in ("backends.cuda", "models.decode_graphs"):  # there is no device that could lock pages
        monkeypatch.setattr(
            f"spmoe.{user}.pinned_zeros", lambda *size, dtype=torch.int64: torch.zeros(*size, dtype=dtype)
        )
    for user, kernels, names in (
        ("backends.cuda", experts, ("run_expert_batch", "reduce_experts")),
        ("backends.cuda", inputs, ("take_batch",)),
        ("models.decode_graphs", inputs, ("load_inputs", "load_chained_inputs", "append_token")),
        ("backends.kernels.attention", attention, ("append_kv", "decode_attention")),
        ("backends.kernels.quantized", quantized, ("run_quantized_experts",)),
        ("backends.kernels.dense", dense, ("norm_and_route_layers",)),
    ):
        for name in names:
            monkeypatch.setattr(f"spmoe.{user}.{name}", getattr(kernels, f"{name}_plain"))
    monkeypatch.setattr("spmoe.models.decode_graphs.load_inputs", it.recorder.stage)

    monkeypatch.setattr("spmoe.backends.quantize.kernels_run_on", lambda device: True)

    def make_runtime(config: Any, models: Any, count: int, store: Any = None) -> ExpertRuntime:
        slots = DeviceSlots(count, models.spec, torch.device("cpu"))
        store = HostStore(models.spec, runtime=None, pinned=False)  # type: ignore[arg-type]
        with models.experts() as fill:
            store.fill(fill, lambda done, total: None)
        backend = CudaBackend(slots, it.recorder)  # type: ignore[arg-type]
        backend.synchronize = lambda: None  # type: ignore[method-assign]
        transfer = CudaTransfer(ImmediateCopyStream(it.refuse), CudaBlobAddresses(store, slots), chunk=1000)
        recorder: Any = None if config.enforce_eager else it.recorder
        return ExpertRuntime(slots, transfer, backend, recorder, backend, store)

    monkeypatch.setattr(build, "make_runtime", make_runtime)
    monkeypatch.setattr("spmoe.models.runner.fuse", lambda model: lambda: None)  # proved elsewhere, and slow here
    return it


def generate(target: Path, draft: Path | None, **options: Any) -> list[int]:
    with LLM(str(target), str(draft) if draft else None, dtype="float32", progress=False, **options) as llm:
        assert not llm.notices
        first, second = (llm.generate(PROMPT, GREEDY)[0].token_ids for _ in range(2))
        assert first == second, "with everything recorded and slots full"
        return first


@pytest.mark.parametrize(
    "options",
    [
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
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["good", "random"])
def test_tokens_are_those_of_transformers(double: Double, pair: Pair, kind: str, options: dict[str, Any]) -> None:
    expected = greedy(reference(pair.target), PROMPT, COUNT)
    assert generate(pair.target, getattr(pair, kind), **options) == expected
    assert (double.recorder.replayed > 0) != options.get("enforce_eager", False)


def test_projections_at_once_change_no_token(double: Double, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that is fused, by twins of the kernels, in forwards that are recorded and in those that are not."""
    launched: list[tuple[Phase, int]] = []  # and how many rows

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: Any = None) -> Tensor:
        return torch.cat([dense.small_batch_linear_plain(row[None], weight, bias) for row in x])  # each by itself

    def linears(x: Tensor, weights: Any, biases: Any, tile: Any) -> list[Tensor]:
        launched.append((double.recorder.phase, len(x)))
        return [linear(x, *given) for given in zip(weights, biases, strict=True)]

    for kernels, names in ((dense, ("rms_norm", "gated_linear", "route")), (rotary, ("apply_rotary",))):
        for name in names:
            monkeypatch.setattr(kernels, name, getattr(kernels, f"{name}_plain"))
    monkeypatch.setattr(dense, "small_batch_linear", linear)
    monkeypatch.setattr(dense, "fused_linears", linears)
    monkeypatch.setattr("spmoe.models.runner.fuse", fuse)
    expected = greedy(reference(pair.target), PROMPT, COUNT)
    assert generate(pair.target, pair.good, num_speculative_tokens=3) == expected
    assert {(Phase.EAGER, len(PROMPT)), (Phase.CAPTURE, 1), (Phase.CAPTURE, 4)} <= set(launched)


def test_drafts_of_lengths_that_change(double: Double, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that follow steps without a draft, which have more to read than was recorded."""
    dice = random.Random(3)
    monkeypatch.setattr(DraftLength, "learn", lambda self, *step: setattr(self, "current", dice.choice(LENGTHS)))
    expected = greedy(reference(pair.target), PROMPT, COUNT)
    for _ in range(3):
        assert generate(pair.target, pair.good, num_speculative_tokens="auto") == expected
    assert double.recorder.replayed > 0


def test_recorded_drafts_say_and_foretell_what_eager_ones_do(double: Double, pair: Pair) -> None:
    """Output would be right whatever the draft says; how much of it is kept, and what it prefetch requests for, would not."""
    found = []
    for eager in (False, True):
        options = {"num_speculative_tokens": 3, "cutoff": "all", "enforce_eager": eager, "progress": False}
        with LLM(str(pair.target), str(pair.good), dtype="float32", **options) as llm:  # type: ignore[arg-type]
            counters = llm.generate(PROMPT, GREEDY)[0].stats.counters
            found.append((counters.drafted_at, counters.accepted_at, counters.prefetches_requested))
    assert found[0] == found[1]
    assert found[0][1][0] > 0


def test_policies_in_turn_see_what_they_would_see_alone(double: Double, mixtral_pair: Pair) -> None:
    """Forwards recorded for what one policy asks are not replayed for another; routers tell what they tell eagerly."""
    expected, found = greedy(reference(mixtral_pair.target), PROMPT, COUNT), []
    for eager in (False, True):
        options = {"num_speculative_tokens": 3, "prefetch": "on-demand", "enforce_eager": eager, "progress": False}
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
def test_a_target_drafts_for_itself(double: Double, pair: Pair, name: str, options: dict[str, Any]) -> None:
    """Recorded, over the target's own states, with what its routers choose as prediction, as when not recorded."""
    found = []
    for eager in (False, True):
        given = {**options, "num_speculative_tokens": 3, "cutoff": "all", "enforce_eager": eager}
        with LLM(str(pair.target), name, dtype="float32", progress=False, **given) as llm:
            assert not [notice for notice in llm.notices if "captured" in notice]
            assert llm.engine.parts.drafter.runner.captures != eager
            completions = [llm.generate(PROMPT, GREEDY)[0] for _ in range(2)]
            found.append(completions[0].token_ids)
            counters = completions[0].stats.counters
            found.append((counters.drafted_at, counters.accepted_at, counters.prefetches_requested))
            assert completions[1].token_ids == completions[0].token_ids
    assert found[:2] == found[2:]
    assert found[0] == greedy(reference(pair.target), PROMPT, COUNT)
    assert found[1][1][0] > 0
    assert found[1][2] > 0


def test_drafting_for_itself_and_verifying_are_recorded_apart(double: Double, mixtral_pair: Pair) -> None:
    with LLM(str(mixtral_pair.target), "self:int4", dtype="float32", progress=False, num_speculative_tokens=2) as llm:
        llm.generate(PROMPT, GREEDY)
        (kv,) = llm.engine.target._spare
        assert {owner for owner, _ in kv.graphs} == {llm.engine.target._graphs, llm.engine.parts.drafter.runner._graphs}


@pytest.mark.parametrize("known", [True, False], ids=["in kernels", "one by one"])
@pytest.mark.parametrize("length", [PROMPT_ROWS - 1, 3 * PROMPT_ROWS])
def test_eviction_hears_what_share_of_a_long_prompt_chose_an_expert(
    double: Double, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, length: int, known: bool
) -> None:
    if not known:
        monkeypatch.setattr(CudaBackend, "expert_layout", lambda self, experts: None)
    heard: dict[int, list[Any]] = {}
    monkeypatch.setattr(DraftInformed, "on_prompt", lambda self, layer, *said: heard.setdefault(layer, []).append(said))
    with LLM(str(mixtral_pair.target), dtype="float32", progress=False, expert_memory=memory_for(3)) as llm:
        llm.generate([[(7 * i) % 200 for i in range(length)]], SamplingParams(max_tokens=4, ignore_eos=True))
        layers, top_k = len(llm.engine.target.moe), llm.engine.target.top_k
    assert len(heard) == (layers if length >= PROMPT_ROWS else 0)
    for ((chosen, shares),) in heard.values():
        assert len(chosen) == len(shares) > top_k
        assert sum(shares) == pytest.approx(top_k)
        assert all(round(share * length) == pytest.approx(share * length) for share in shares)


@pytest.fixture
def gone_on(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every recorded forward of the target, whether it went on from what had been begun behind the draft."""
    found: list[bool] = []
    take_verify = RunAhead.take_verify

    def looked(self: RunAhead, graph: Any, tokens: list[int], length: int) -> bool:
        found.append(take_verify(self, graph, tokens, length))
        return found[-1]

    monkeypatch.setattr(RunAhead, "take_verify", looked)
    return found


@pytest.mark.parametrize("draft", ["good", "random", "self:int8"])
@pytest.mark.parametrize("memory", [memory_for(3), "100%"])
def test_verification_is_begun_behind_the_draft(
    double: Double, pair: Pair, gone_on: list[bool], draft: str, memory: str
) -> None:
    name = draft if ":" in draft else str(getattr(pair, draft))
    options = {"num_speculative_tokens": 3, "expert_memory": memory, "dtype": "float32", "progress": False}
    with LLM(str(pair.target), name, cutoff="all", **options) as llm:  # type: ignore[arg-type]
        gone_on.clear()
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy(reference(pair.target), PROMPT, COUNT)
    assert len(gone_on) >= 3
    assert all(gone_on[:-1]), "but for the last, whose draft is none where there is room for one token only"


@pytest.mark.parametrize("memory", [memory_for(3), "100%"])
def test_what_was_begun_is_void_when_another_request_comes_between(
    double: Double, mixtral_pair: Pair, gone_on: list[bool], memory: str
) -> None:
    prompts = [PROMPT, list(b"class A"), PROMPT]
    expected = [greedy(reference(mixtral_pair.target), prompt, COUNT) for prompt in prompts]
    options = {"num_speculative_tokens": 3, "expert_memory": memory, "dtype": "float32", "progress": False}
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), **options) as llm:  # type: ignore[arg-type]
        gone_on.clear()
        streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
        live = [iter(stream) for stream in streams]
        while live:
            live = [pieces for pieces in live if next(pieces, None) is not None]
    assert [stream.token_ids for stream in streams] == expected
    assert not all(gone_on)


def test_what_compute_waited_is_counted_in_the_step_in_which_it_waited(
    double: Double, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the device ends a step's waits only while the host asks for its result."""
    running, over, steps = list[object](), list[object](), list[int]()
    copy, verify = ImmediateCopyStream.copy, GreedyVerifier.verify

    def synchronized(self: GreedyVerifier, *args: Any) -> Any:
        steps.append(len(running))
        over.extend(running)
        running.clear()
        return verify(self, *args)

    def take(self: ImmediateCopyStream) -> float:
        waited = 100.0 * len(over)
        over.clear()
        return waited

    monkeypatch.setattr(ImmediateCopyStream, "copy", lambda self, pieces: copy(self, pieces) and UnderWay())
    monkeypatch.setattr(ImmediateCopyStream, "compute_wait_event", lambda self, event: running.append(event))
    monkeypatch.setattr(ImmediateCopyStream, "take_stall_seconds", take)
    monkeypatch.setattr(GreedyVerifier, "verify", synchronized)
    with LLM(str(mixtral_pair.target), dtype="float32", progress=False, expert_memory=memory_for(3)) as llm:
        stats = llm.generate(PROMPT, GREEDY)[0].stats
    assert min(steps) > 0
    assert stats.prompt_counters.stall_seconds // 100 == steps[0]
    assert stats.decode_counters.stall_seconds // 100 == sum(steps[1:])


def test_what_is_rehearsed_late_in_a_chain_leaves_the_state_as_it_is(double: Double, mixtral_pair: Pair) -> None:
    """The first request has room for a draft of one; the next, whose text is longer, records the rest of a chain."""
    expected = greedy(reference(mixtral_pair.target), PROMPT, COUNT)
    options = {"num_speculative_tokens": 3, "dtype": "float32", "progress": False}
    with LLM(str(mixtral_pair.target), "self:int8", **options) as llm:  # type: ignore[arg-type]
        llm.generate([7], SamplingParams(max_tokens=3, ignore_eos=True))
        (kv,) = llm.engine.target._spare
        llm.generate(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
        before = [layer.keys[:, :, : len(PROMPT)].clone() for layer in kv.cache.layers]
        completion = llm.generate(PROMPT, GREEDY)[0]
        assert [kv] == llm.engine.target._spare, "the same state served all"
        for layer, keys in zip(kv.cache.layers, before, strict=True):
            assert torch.equal(layer.keys[:, :, : len(PROMPT)], keys)
    assert completion.token_ids == expected


@pytest.mark.parametrize("known", [True, False], ids=["in kernels", "one by one"])
def test_wishes_are_submitted_while_an_eager_forward_waits_for_a_router(
    double: Double, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    if not known:
        monkeypatch.setattr(CudaBackend, "expert_layout", lambda self, experts: None)
    transfers, waiting = list[CudaTransfer](), {True: 0, False: 0}  # before a wait is over, and after it

    class Unhurried(Passed):
        """A point that compute reaches when nothing is left to submit."""

        def query(self) -> bool:
            left = sum(len(transfer._waiting) for transfer in transfers)
            waiting[True] += left
            return not left

    def looked(index: Tensor) -> Any:
        waiting[False] += sum(len(transfer._waiting) for transfer in transfers)
        return routed_experts(index)

    monkeypatch.setattr(Rerunner, "new_event", lambda self: Unhurried())
    monkeypatch.setattr("spmoe.backends.cuda.routed_experts", looked)
    with LLM(
        str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", progress=False, num_speculative_tokens=3,
        expert_memory=memory_for(4), prefetch="draft-gate", cutoff="all", enforce_eager=True,
    ) as llm:  # fmt: skip
        transfers.append(llm.engine.parts.runtime.transfer)  # type: ignore[arg-type]
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy(reference(mixtral_pair.target), PROMPT, COUNT)
    assert waiting[True] > 0
    assert waiting[False] == 0


def test_benchmarks_record_nothing_in_runs_that_count(
    double: Double, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmoe.bench.runs.measure_ceilings", lambda engine: None)
    said: list[str] = []
    recorded: dict[str, int] = {}

    @contextmanager
    def observer(generation: Generation) -> Iterator[None]:
        before = double.recorder.recorded
        yield
        recorded[said[-1]] = recorded.get(said[-1], 0) + double.recorder.recorded - before

    pairs = [PolicyPair(prefetch=name) for name in ("draft-gate", "on-demand", "next-gate", "activation")]
    configs = make_configs([Size(share=0.5)], pairs, [3, 2])
    engine = {"model": str(mixtral_pair.target), "draft": str(mixtral_pair.good), "device": "cpu", "progress": False}
    engine |= {"shape": None, "link_gbps": None, "enforce_eager": False, "dtype": "float32"}
    prompts = [byte_tokenizer()(prompt)["input_ids"] for prompt in ("the cat", "a longer prompt")]
    job = BenchJob(engine, configs, prompts, output_len=9, repeat=1, warmup=1, resident={2: 1.0, 3: 1.0})
    BenchRunner(job, said.append, observer).run()
    counted = {words: count for words, count in recorded.items() if words.startswith("run")}
    assert len(counted) == 2 * len(configs)
    assert not any(counted.values()), counted


@pytest.mark.parametrize("draft", ["good", "self:int8", None])
@pytest.mark.parametrize("prefetch", ["draft-gate+next-gate", "on-demand"])
def test_after_preparations_requests_record_nothing(
    double: Double, mixtral_pair: Pair, draft: str | None, prefetch: str
) -> None:
    name = str(mixtral_pair.good) if draft == "good" else draft
    options: dict[str, Any] = {"num_speculative_tokens": 3 if draft else 0, "prefetch": prefetch, "progress": False}
    with LLM(str(mixtral_pair.target), name, dtype="float32", expert_memory=memory_for(5), **options) as llm:
        llm.engine.loop.prepare()  # there is no state yet
        llm.generate(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
        llm.engine.loop.prepare()
        recorded = double.recorder.recorded
        for count in range(1, 12):
            expected = greedy(reference(mixtral_pair.target), PROMPT, count)
            assert llm.generate(PROMPT, SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids == expected
        assert double.recorder.recorded == recorded > 0


def test_plain_decoding_is_recorded_too(double: Double, pair: Pair) -> None:
    assert generate(pair.target, None) == greedy(reference(pair.target), PROMPT, COUNT)
    assert double.recorder.replayed >= 2 * (COUNT - 1)


def test_experts_that_the_kernels_do_not_know(double: Double, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "expert_layout", lambda self, experts: None)
    expected = greedy(reference(pair.target), PROMPT, COUNT)
    assert generate(pair.target, pair.good, num_speculative_tokens=3) == expected
    assert double.recorder.replayed


def test_experts_that_the_kernels_do_not_know_are_foretold_too(
    double: Double, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaBackend, "expert_layout", lambda self, experts: None)
    prefetches = []
    for eager in (False, True):
        options = {"num_speculative_tokens": 0, "prefetch": "next-gate", "enforce_eager": eager, "progress": False}
        with LLM(str(mixtral_pair.target), dtype="float32", **options) as llm:  # type: ignore[arg-type]
            prefetches.append(llm.generate(PROMPT, GREEDY)[0].stats.counters.prefetches_requested)
    assert prefetches[0] == prefetches[1] > COUNT


def test_predictions_are_one_kernel(double: Double, mixtral_pair: Pair) -> None:
    options: dict[str, Any] = {"num_speculative_tokens": 0, "expert_memory": memory_for(4), "progress": False}
    with LLM(str(mixtral_pair.target), dtype="float32", **options) as llm:
        assert isinstance(llm.engine.target._stacked, FusedGates)
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy(reference(mixtral_pair.target), PROMPT, COUNT)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prefetch", ["draft-gate", "activation"])
def test_wishes_move_before_the_draft_is_over(
    double: Double, mixtral_pair: Pair, prefetch: str, temperature: float
) -> None:
    options: dict[str, Any] = {"num_speculative_tokens": 3, "expert_memory": memory_for(8), "cutoff": "all"}
    with LLM(
        str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", progress=False, prefetch=prefetch, **options
    ) as llm:
        scheduler, granted, verifying = llm.engine.experts.scheduler, list[bool](), False
        grant, over, begin = scheduler._submit_chunk, scheduler.finish_draft, scheduler.begin_step

        def note() -> bool:
            if some := grant():
                granted.append(verifying)
            return some

        def tell(call: Callable[..., None], value: bool) -> Callable[..., None]:
            def told(*args: Any) -> None:
                nonlocal verifying
                verifying = value
                call(*args)

            return told

        scheduler._submit_chunk = note  # type: ignore[method-assign]
        scheduler.finish_draft, scheduler.begin_step = tell(over, True), tell(begin, False)  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=1)
        for text in (b"class A: pass", b"import os\n"):  # what one learns of a request the next is told of
            llm.generate(list(text), params)
        assert False in granted
        assert llm.engine.counters.prefetch_used > 0
        assert not scheduler._held


def test_nothing_is_seen_to_where_nothing_may_overlap(double: Double, mixtral_pair: Pair) -> None:
    with LLM(str(mixtral_pair.target), None, dtype="float32", progress=False, overlap=False) as llm:
        scheduler = llm.engine.experts.scheduler
        scheduler.pump = lambda *args: pytest.fail("whoever requests a prefetch waits for it")  # type: ignore[method-assign]
        scheduler.submit()


@pytest.mark.parametrize("memory", [memory_for(3), "100%"])
@pytest.mark.parametrize(("length", "sizes"), [(64, {64}), (65, {64, 1}), (150, {64, 22}), (250, {64, 58})])
@pytest.mark.parametrize("parts", [2, 8])
def test_prompts_are_read_by_the_kernels_part_by_part(
    double: Double,
    mixtral_pair: Pair,
    memory: Any,
    length: int,
    sizes: set[int],
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each expert is moved once for all parts; of more parts than that, each has a product of its own."""
    plain, found = experts.run_expert_batch_plain, set[int]()
    monkeypatch.setattr("spmoe.backends.base._MAX_KERNEL_PASSES", parts)
    monkeypatch.setattr(
        "spmoe.backends.cuda.run_expert_batch", lambda hidden, *rest: (found.add(len(hidden)), plain(hidden, *rest))[1]
    )
    prompt = [n * n % 251 for n in range(length)]
    options: dict[str, Any] = {"num_speculative_tokens": 0, "prefetch": "on-demand", "expert_memory": memory}
    with LLM(str(mixtral_pair.target), dtype="float32", progress=False, **options) as llm:
        completion = llm.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True))[0]
        assert completion.token_ids == greedy(reference(mixtral_pair.target), prompt, 2)
        count = llm.engine.spec.count
    assert (sizes <= found) == (length <= 64 * parts)
    assert completion.stats.counters.demand_loads <= count + 2 * 2 * count // 8


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_chunks_smaller_than_a_draft(double: Double, mixtral_pair: Pair, chunk: int) -> None:
    """Recorded forwards of as many rows have one place for their logits."""
    expected = greedy(reference(mixtral_pair.target), PROMPT, COUNT)
    assert generate(mixtral_pair.target, mixtral_pair.good, num_speculative_tokens=4, prefill_chunk=chunk) == expected


def test_an_interrupt_leaves_waves_in_step(double: Double, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between saying where a batch's experts are and launching it: the next batch must not be taken for that one."""
    expected, post = greedy(reference(mixtral_pair.target), PROMPT, COUNT), CudaBackend.post
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


@pytest.mark.parametrize("calls", range(1, 7))  # until it comes: there are three layers
def test_an_interrupt_leaves_the_target_its_own_experts(
    double: Double, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Amid giving its modules those of the draft, and amid giving them back."""
    left = [calls]

    def attached(experts: Any, port: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        attach(experts, port)

    with LLM(str(mixtral_pair.target), "self:int4", dtype="float32", progress=False, num_speculative_tokens=2) as llm:
        assert len(llm.engine.target.moe) == 3
        monkeypatch.setattr("spmoe.draft.self.attach", attached)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, GREEDY)
        expected = greedy(reference(mixtral_pair.target), PROMPT, COUNT)
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


def test_prompts_of_any_length_share_what_they_compute_in(double: Double, mixtral_pair: Pair) -> None:
    with LLM(str(mixtral_pair.target), None, dtype="float32", progress=False, expert_memory=memory_for(4)) as llm:
        backend = llm.engine.parts.runtime.cuda
        assert backend is not None
        for length in (3, 64, 65, 100, 127, 129, 180, 240):
            llm.generate([5] * length, SamplingParams(max_tokens=1, ignore_eos=True))
        assert len(backend._scratches) == 4, "one for each part of the longest"


def test_windows_are_kept(double: Double, windowed_pair: Pair) -> None:
    expected = greedy(reference(windowed_pair.target), PROMPT, COUNT)
    assert generate(windowed_pair.target, windowed_pair.good, num_speculative_tokens=3) == expected


@pytest.fixture
def host_refused(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, rotary embeddings cannot be made with the host's help while a forward is recorded."""
    own = PhimoeRotaryEmbedding.forward

    @wraps(own)
    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        if double.recorder.phase is Phase.CAPTURE:
            raise RuntimeError("cannot copy between CPU and CUDA tensors")
        return own(self, x, position_ids)

    monkeypatch.setattr(PhimoeRotaryEmbedding, "forward", forward)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("change", [None, 12, 18])
def test_rotary_embeddings_made_on_the_host(
    double: Double, host_refused: None, tmp_path: Path, change: int | None, k: int
) -> None:
    """By table, also where the context grows past the position at which they change."""
    made = seeded(phimoe, 3, **({} if change is None else {"rope_parameters": longrope(change)}))
    target = save(made, tmp_path, byte_tokenizer())
    expected = greedy(reference(target), PROMPT, COUNT)
    with LLM(str(target), "self:int8" if k else None, dtype="float32", progress=False, num_speculative_tokens=k) as llm:
        assert not [notice for notice in llm.notices if "captured" in notice]
        for _ in range(2):
            completion = llm.generate(PROMPT, GREEDY)[0]
            assert completion.token_ids == expected
            assert bool(completion.stats.counters.accepted) == bool(k)
    assert double.recorder.replayed > COUNT


@pytest.mark.parametrize("memory", [memory_for(3), "100%"])
@pytest.mark.parametrize("chunk", [7, 12])
def test_what_was_begun_is_void_when_the_state_is_read_anew(
    double: Double, host_refused: None, tmp_path: Path, chunk: int, memory: str
) -> None:
    """Where embeddings change: in chunks that end in the very rows that were begun, or in fewer than are verified."""
    target = save(seeded(phimoe, 3, rope_parameters=longrope(12)), tmp_path, byte_tokenizer())
    options: dict[str, Any] = {"num_speculative_tokens": 3, "prefill_chunk": chunk, "expert_memory": memory}
    with LLM(str(target), "self:int8", dtype="float32", progress=False, **options) as llm:
        for _ in range(2):
            assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy(reference(target), PROMPT, COUNT)


def test_without_tables_they_are_not_recorded(
    double: Double, host_refused: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmoe.models.rotary.make_table", lambda *args: None)
    target = save(seeded(phimoe, 3), tmp_path, byte_tokenizer())
    with LLM(str(target), dtype="float32", progress=False, num_speculative_tokens=0) as llm:
        (notice,) = llm.notices
        assert "forwards of the target are not captured as CUDA graphs (cannot copy between" in notice
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy(reference(target), PROMPT, COUNT)
    assert not double.recorder.replayed


def test_two_generations_in_turns_have_states_of_their_own(double: Double, mixtral_pair: Pair) -> None:
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


def test_a_failing_copy_is_told_and_forgotten(double: Double, mixtral_pair: Pair) -> None:
    options = {"expert_memory": memory_for(3), "num_speculative_tokens": 3, "progress": False}
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", **options) as llm:
        expected = greedy(reference(mixtral_pair.target), PROMPT, COUNT)
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
        double.failing = True
        with pytest.raises(TransferError, match="bad moment"):
            llm.generate(PROMPT, GREEDY)
        double.failing = False
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


def test_sampling_is_repeatable_and_on_the_host(double: Double, mixtral_pair: Pair) -> None:
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=1.0, seed=5)
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", progress=False) as llm:
        recorded = [llm.generate(PROMPT, params)[0].token_ids for _ in range(2)]
    assert recorded[0] == recorded[1]


def test_what_is_recorded_is_profiled_too(double: Double, mixtral_pair: Pair) -> None:
    from spmoe.bench.profile_runs import Workload, measure_profile

    options = {"num_speculative_tokens": 4, "prefetch": "on-demand", "expert_memory": memory_for(6), "link_gbps": 0.5}
    with LLM(str(mixtral_pair.target), str(mixtral_pair.good), dtype="float32", progress=False, **options) as llm:  # type: ignore[arg-type]
        profile = measure_profile(llm, 2, Workload([PROMPT], 8))
        expected = greedy(reference(mixtral_pair.target), PROMPT, COUNT)
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected, "nothing that was measured is left in a slot"
    assert list(profile.verify_seconds) == [1, 2, 3, 5], "those that are recorded"
    assert list(profile.load_seconds) == [1, 2, 4]
    assert len(profile.policies) == 4
    assert all(0 < one.missing <= one.needed for one in profile.policies)
