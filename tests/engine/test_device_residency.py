"""Forwards that look their experts up on the device, on a fake device that runs them beside the host.

The forward runs in a thread of its own, so a slot that is overwritten while a layer reads it changes tokens.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoints import Pair, greedy_tokens, memory_for
from fake_cuda_engine import FakeCuda, JoinedResidency, use_fake_cuda

pytest.importorskip("triton", reason="no triton")

from spmoe import LLM, SamplingParams, types
from spmoe.backends import cuda, residency
from spmoe.backends.cpu_experts import CpuExperts
from spmoe.backends.cuda_runtime import CopyRange
from spmoe.backends.graphs import CapturedGraph
from spmoe.backends.kernels import residency as kernels
from spmoe.backends.residency import CudaResidency
from spmoe.config import EngineConfig
from spmoe.engine.loop import Loop
from spmoe.engine.runtime import make_residency
from spmoe.errors import TransferError
from spmoe.experts.paths import PathChooser, PathTime
from spmoe.experts.prefetch import PrefetchScheduler
from spmoe.models import decode_graphs
from spmoe.models.decode_graphs import DecodeGraphs
from spmoe.verify.sampling import PositionNoise

PROMPT = list(b"def f(x):")
PROMPTS = [PROMPT, list(b"import"), list(b"class Reader:"), list(b"if x: y = 3")]
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


def residency_of(llm: LLM) -> JoinedResidency:
    residency = llm.engine.parts.runtime.residency
    assert isinstance(residency, JoinedResidency)
    return residency


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
@pytest.mark.parametrize(
    ("family", "overlap_bytes"), [("mixtral", 1), ("qwen", 2**40)], ids=["resident-first", "all-at-once"]
)
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
        assert residency_of(llm).followed > 0
    assert found == [greedy_tokens(pair.target, PROMPT, COUNT)] * 2


@pytest.mark.parametrize("prefetch", ["draft-gate", "next-gate", "activation"])
def test_followed_forwards_predict_and_prefetch(fake: FakeCuda, mixtral_pair: Pair, prefetch: str) -> None:
    with make(mixtral_pair, num_speculative_tokens=2, expert_memory="60%", prefetch=prefetch, cutoff="all") as llm:
        llm.generate(PROMPT, GREEDY)
        before = llm.engine.counters.prefetches_requested
        llm.generate(PROMPT, GREEDY)  # a prefix of the prompt is read already: the forwards are followed ones
        assert llm.engine.counters.prefetches_requested > before


def test_forwards_whose_experts_do_not_fit_are_left_to_the_host(fake: FakeCuda, pair: Pair) -> None:
    with make(pair, num_speculative_tokens=3, expert_memory=memory_for(2)) as llm:
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(pair.target, PROMPT, COUNT)
        assert residency_of(llm).followed == 0


@pytest.mark.parametrize("k", [0, 2])
def test_requests_share_followed_forwards(
    fake: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    forward_batch, followed = DecodeGraphs.forward_batch, list[int]()
    with make(mixtral_pair, num_speculative_tokens=k, expert_memory="80%", max_num_seqs=4) as llm:
        residency = residency_of(llm)

        def run(self: DecodeGraphs, *args: Any) -> Any:
            before = residency.followed
            result = forward_batch(self, *args)
            followed.append(residency.followed - before)
            return result

        monkeypatch.setattr(DecodeGraphs, "forward_batch", run)
        for _ in range(2):
            found = [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]
            assert found == [greedy_tokens(mixtral_pair.target, prompt, COUNT) for prompt in PROMPTS]
    assert 1 in followed


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("k", [0, 2])
def test_missing_experts_are_computed_on_the_cpu(fake: FakeCuda, pair: Pair, share: float, k: int) -> None:
    fake.cpu_share = share
    with make(pair, num_speculative_tokens=k, expert_memory="60%", cpu_experts=1, prefetch="on-demand") as llm:
        llm.generate(PROMPT, GREEDY)
        before = llm.engine.counters.cpu_experts
        for _ in range(3):  # a prefix of the prompt is read already: most forwards are followed ones
            assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(pair.target, PROMPT, COUNT)
        assert llm.engine.counters.cpu_experts > before
        assert residency_of(llm).followed > 0
        assert not llm.engine.counters.cpu_failures


def test_experts_that_the_cpu_cannot_compute_are_moved(
    fake: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: CpuExperts, *args: Any) -> Any:
        raise ZeroDivisionError("injected failure")

    fake.cpu_share = 1.0
    with make(mixtral_pair, num_speculative_tokens=2, expert_memory="60%", cpu_experts=1) as llm:
        monkeypatch.setattr(CpuExperts, "compute", fail)
        for _ in range(3):
            assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
        assert llm.engine.counters.cpu_failures > 0
        assert residency_of(llm).followed > 0


def test_failed_copies_end_the_request_only(fake: FakeCuda, pair: Pair) -> None:
    expected = greedy_tokens(pair.target, PROMPT, COUNT)
    with make(pair, num_speculative_tokens=2, expert_memory="60%", prefetch="on-demand") as llm:
        for _ in range(3):
            fake.device.failing_copies, fake.device.failure = 10**6, TransferError("injected failure")
            with pytest.raises(TransferError, match="injected failure"):
                llm.generate(PROMPT, GREEDY)
            fake.device.failing_copies = 0
            assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


def test_an_error_behind_a_launched_forward_does_not_hang(
    fake: FakeCuda, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next verification is launched when the step accounts; nobody follows it then."""
    account, left = Loop._account, [3]

    def fail(self: Loop, *args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise ZeroDivisionError("injected failure")
        account(self, *args)

    monkeypatch.setattr(Loop, "_account", fail)
    with make(pair, num_speculative_tokens=2, expert_memory="60%", draft="random") as llm:
        with pytest.raises(Exception, match="injected failure"):
            llm.generate(PROMPT, GREEDY)
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(pair.target, PROMPT, COUNT)
        assert residency_of(llm).followed > 0


def test_streams_that_are_stopped_leave_no_forward_behind(fake: FakeCuda, pair: Pair) -> None:
    expected = greedy_tokens(pair.target, PROMPT, COUNT)
    with make(pair, num_speculative_tokens=2, expert_memory="60%") as llm:
        for count in range(1, 6):
            stream = llm.stream(PROMPT, GREEDY)
            for _ in zip(range(count), stream, strict=False):
                pass
            stream.stop()
            stream.run()
            assert not residency_of(llm).under_way
            assert stream.token_ids == expected[: len(stream.token_ids)]


# ---- whether it can be used


class SideBySide:
    """Runs the kernels of a forward in a thread, as a device does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._thread = threading.Thread()
        monkeypatch.setattr(residency, "check_residency", partial(self._launch, kernels.check_residency_plain))
        monkeypatch.setattr(residency, "end_forward", partial(self._launch, kernels.end_forward_plain))
        monkeypatch.setattr(residency, "pinned_zeros", lambda *size, dtype=torch.int64: torch.zeros(*size, dtype=dtype))

    def _launch(self, kernel: Callable[..., None], *args: Any, **options: Any) -> None:
        before = self._thread

        def run() -> None:
            if before.ident is not None:
                before.join()
            kernel(*args, **options)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        if args[-1].words[kernels.ABORTED] == residency._NEVER_WAIT:  # a capture ends with an idle device
            self._thread.join()


class Signals:
    """A transfer whose copies are made at once, or never."""

    def __init__(self, arrive: bool = True) -> None:
        self._arrive = arrive

    def begin_forward(self) -> None:
        pass

    def end_forward(self) -> None:
        pass

    def signal(self, copied: CopyRange) -> None:
        if self._arrive:
            ctypes.memmove(*copied)


def make_for(signals: Signals, **options: Any) -> tuple[residency.CudaResidency | None, list[str]]:
    models = SimpleNamespace(spec=SimpleNamespace(experts=[4, 4], count=8), device=torch.device("cpu"))
    config, notices = EngineConfig.make(model="", residency_check="device", **options), list[str]()
    return make_residency(config, models, 4, signals, notices), notices  # type: ignore[arg-type]


def test_the_first_forward_is_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    SideBySide(monkeypatch)
    found, notices = make_for(Signals())
    assert found is not None
    assert not found.under_way
    assert notices == []


def test_a_trial_that_fails_leaves_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    SideBySide(monkeypatch)
    monkeypatch.setattr(residency, "_TRIAL_SECONDS", 0.05)
    found, notices = make_for(Signals(arrive=False))
    assert found is None
    assert notices == [
        "--residency-check device does not work here (the device has not reached a layer for 0.05 s); "
        "the host checks instead"
    ]


def test_machines_and_settings_that_would_hang_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    SideBySide(monkeypatch)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "memory order of aarch64" in make_for(Signals())[1][0]
    monkeypatch.undo()
    SideBySide(monkeypatch)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "CUDA_LAUNCH_BLOCKING is set" in make_for(Signals())[1][0]


@pytest.mark.parametrize(
    ("options", "name"), [({"link_gbps": 1.0}, "--link-gbps"), ({"enforce_eager": True}, "--enforce-eager")]
)
def test_options_without_captured_forwards_are_named(options: dict[str, Any], name: str) -> None:
    assert make_for(Signals(), **options) == (None, [f"--residency-check device has no effect with {name}"])


def test_no_layer_is_looked_up_on_a_cpu(pair: Pair) -> None:
    with make(pair, "", num_speculative_tokens=0, device="cpu", expert_memory="60%") as llm:
        assert "--residency-check device has no effect with --device cpu" in llm.notices


def after_launches(monkeypatch: pytest.MonkeyPatch, residency: JoinedResidency, work: Callable[[Loop], None]) -> None:
    """Do this on the engine's thread whenever the next verification has been launched."""
    launch_next = Loop._launch_next

    def launch(self: Loop, turn: types.Turn) -> None:
        launch_next(self, turn)
        if residency.under_way:
            work(self)

    monkeypatch.setattr(Loop, "_launch_next", launch)


def test_a_process_that_was_suspended_goes_on(fake: FakeCuda, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has given up waiting for the host; the forward runs again."""
    with make(pair, num_speculative_tokens=2, expert_memory="60%", prefetch="on-demand") as llm:
        residency, given_up = residency_of(llm), list[bool]()
        llm.generate(PROMPT, GREEDY)

        def suspend(loop: Loop) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "WAIT_SECONDS", 0.0)
                residency.wait_for_report(residency.tickets)
            given_up.append(bool(residency.buffers.words[kernels.TIMED_OUT] >= residency._first))

        after_launches(monkeypatch, residency, suspend)
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(pair.target, PROMPT, COUNT)
        assert any(given_up)


def test_a_layer_that_waits_too_long_for_the_cpu_is_tried_again_without_it(
    fake: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has learned that the CPU is slow, the choice of paths would take it again."""
    compute = CpuExperts.compute

    def compute_slowly(self: CpuExperts, *args: Any) -> Any:
        time.sleep(0.15)
        return compute(self, *args)

    with make(
        mixtral_pair, "", num_speculative_tokens=0, expert_memory="60%", cpu_experts=1, prefetch="on-demand"
    ) as llm:
        llm.generate(PROMPT, GREEDY)
        monkeypatch.setattr(PathTime, "learn", lambda *args, **kwargs: None)
        cpu_path = llm.engine.experts.cpu_path
        assert cpu_path is not None
        cpu_path.chooser = PathChooser()
        monkeypatch.setattr(kernels, "WAIT_SECONDS", 0.1)
        monkeypatch.setattr("spmoe.experts.access._FOLLOWED_SECONDS", 0.05)
        monkeypatch.setattr(CpuExperts, "compute", compute_slowly)
        before = llm.engine.counters.cpu_experts
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
        assert llm.engine.counters.cpu_experts > before


def test_a_forward_that_always_gives_up_ends_the_request(
    fake: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(mixtral_pair, num_speculative_tokens=0, expert_memory="60%", prefetch="on-demand") as llm:
        with monkeypatch.context() as patch:
            patch.setattr(CudaResidency, "_has_timed_out", True)
            with pytest.raises(Exception, match="waited too long"):
                llm.generate(PROMPT, GREEDY)
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(mixtral_pair.target, PROMPT, COUNT)


class _Stop(Exception):
    """Ends work of another sequence."""


def test_other_work_aborts_a_launched_forward_first(
    fake: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for the device, which may wait for the host."""
    other = types.Sequence(10**6, list(range(99)), 99, GREEDY, PositionNoise(0), 120)
    with make(mixtral_pair, num_speculative_tokens=2, expert_memory="60%", prefill_chunk=8, max_num_seqs=2) as llm:
        residency, graphs = residency_of(llm), llm.engine.target._graphs
        assert graphs is not None
        done, allocate, grow = set[int](), decode_graphs.pinned_zeros, Loop._grow_kv

        def checked_allocate(*size: int, **options: Any) -> Any:
            assert not residency.under_way
            return allocate(*size, **options)

        def checked_grow(self: Loop, sequence: types.Sequence) -> None:
            if sequence is other:
                assert not residency.under_way
                raise _Stop
            grow(self, sequence)

        monkeypatch.setattr(decode_graphs, "pinned_zeros", checked_allocate)
        monkeypatch.setattr(Loop, "_grow_kv", checked_grow)
        work: list[Callable[[Loop], object]] = [
            lambda loop: loop.resume(other),
            lambda loop: loop.preempt(other),
            lambda loop: loop.release(other),
            lambda loop: loop.read_prompt(other),
            lambda loop: loop.step([types.Turn(other, 9)]),
            lambda loop: graphs.prepare(3, 2, None),
            lambda loop: graphs.clear(),
        ]

        def run(loop: Loop) -> None:
            number = min({*range(len(work))} - done, default=None)
            if number is not None:
                with suppress(_Stop):
                    work[number](loop)
                assert not residency.under_way, number
                done.add(number)

        after_launches(monkeypatch, residency, run)
        for _ in range(4):
            assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(mixtral_pair.target, PROMPT, COUNT)
        assert len(done) == len(work)


def test_a_launch_that_fails_ends_the_request_only(
    fake: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device never runs its tickets, so nobody may wait for them."""
    with make(mixtral_pair, num_speculative_tokens=0, expert_memory="60%") as llm:
        llm.generate(PROMPT, GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(CapturedGraph, "launch_first", lambda self: 1 / 0)
            with pytest.raises(Exception, match="division by zero"):
                llm.generate(PROMPT, GREEDY)
        residency_of(llm)._recorder.launches_followed = False
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == greedy_tokens(mixtral_pair.target, PROMPT, COUNT)


def test_prefetches_of_a_layer_are_submitted_only_while_the_device_is_busy(
    fake: FakeCuda, qwen_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are queued first; then at least one chunk per layer is submitted, and more until the next report."""
    requested, events = list[bool](), list[object]()
    request, submit = PrefetchScheduler.request, PrefetchScheduler.submit
    following: list[bool] = []

    def follow(*args: Any) -> None:
        following.append(True)
        try:
            follow_layer(*args)
        finally:
            following.pop()

    def note_request(self: PrefetchScheduler, *args: Any) -> None:
        if following:
            requested.append(self._held)
        request(self, *args)

    def note_submit(self: PrefetchScheduler, until: Any = None) -> None:
        if following:
            events.append(until)
        submit(self, until)

    follow_layer = residency.follow_layer
    monkeypatch.setattr(cuda, "follow_layer", follow)
    monkeypatch.setattr(PrefetchScheduler, "request", note_request)
    monkeypatch.setattr(PrefetchScheduler, "submit", note_submit)
    options = {"num_speculative_tokens": 0, "expert_memory": "60%", "prefetch": "next-gate", "cutoff": "all"}
    with make(qwen_pair, **options) as llm:
        output = llm.generate(PROMPT, GREEDY)[0]
        assert output.token_ids == greedy_tokens(qwen_pair.target, PROMPT, COUNT)
        assert llm.engine.counters.prefetch_loads > 0
    assert requested
    assert all(requested)
    assert events
    assert None not in events
