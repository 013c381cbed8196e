"""Engines whose missing experts are computed on the CPU: tokens, faults, statistics and threads, on a fake device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from checkpoints import Pair, dense_model, greedy, reference, save_pair
from fake_cuda import engine_threads
from fake_cuda_engine import FakeCuda, use_fake_cuda
from spmoe import LLM, SamplingParams
from spmoe.backends.cpu_experts import CpuExperts
from spmoe.engine.llm import Generation
from spmoe.engine.outputs import RequestOutput
from spmoe.models import families
from spmoe.models.decode_graphs import DecodeGraphs
from spmoe.observe.ledger import Counters

PROMPT = list(b"def f(x):")
LONG_PROMPT = [(29 * i + 7) % 251 for i in range(75)]
COUNT = 10
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)
FORMATS = [
    "bf16-packed",
    "bfloat16",
    "fp8-block128",
    "fp8-channel",
    "fp8-tensor",
    "int4-g32",
    "int4-asym-g64",
    "int4-g128",
    "int8-channel",
    "int8-g32",
    "int8-g64",
    "int8-g128",
    "mxfp4",
    "nvfp4",
]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Build engines on the fake device."""
    return use_fake_cuda(monkeypatch)


@pytest.fixture(scope="module")
def rounded_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target and drafts whose weights bfloat16 holds."""
    made = save_pair(tmp_path_factory.mktemp("rounded"), "mixtral")
    for path in (made.target, made.good, made.random):
        reference(path).bfloat16().save_pretrained(path)
    return made


def build(target: Path, draft: Path | None, k: int = 0, **options: Any) -> LLM:
    given: dict[str, Any] = {"expert_memory": "30%", "cpu_experts": 1, "dtype": "float32", "progress": False}
    return LLM(str(target), str(draft) if draft else None, num_speculative_tokens=k, **{**given, **options})


def cpu_of(llm: LLM) -> CpuExperts:
    """Return the memory and arithmetic of an engine's experts on the CPU."""
    cuda = llm.engine.parts.runtime.cuda
    assert cuda is not None
    assert cuda.cpu is not None
    return cuda.cpu


def check_paths(counters: Counters, share: float | None) -> None:
    """Compare the experts that took each path with a forced share."""
    missing = counters.cpu_experts + counters.demand_loads
    assert missing > 0
    assert counters.asked == counters.hits + counters.late + missing
    if share is not None:
        assert counters.cpu_experts == pytest.approx(share * missing, abs=1)
    assert not counters.cpu_failures
    assert (counters.cpu_seconds > 0) == (counters.cpu_experts > 0)


@pytest.mark.parametrize(
    ("share", "k", "eager"),
    [*((share, k, False) for share in (0.0, 0.5, 1.0, None) for k in (0, 4)), (0.5, 0, True), (0.5, 4, True)],
)
def test_tokens_equal_those_of_transformers(
    cuda: FakeCuda, mixtral_pair: Pair, share: float | None, k: int, eager: bool
) -> None:
    cuda.cpu_share = share
    with build(mixtral_pair.target, mixtral_pair.good, k, enforce_eager=eager) as llm:
        completion = llm.generate(PROMPT, GREEDY)[0]
        assert not llm.notices
    assert completion.token_ids == greedy(reference(mixtral_pair.target), PROMPT, COUNT)
    check_paths(completion.stats.counters, share)


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_of_every_format_equal_those_of_the_dequantized_model(
    cuda: FakeCuda, rounded_pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Few rows run in the grouped kernels; the prompt runs expert by expert."""
    monkeypatch.setattr("spmoe.backends.cuda.kernel_row_limit", lambda nbytes: 8)
    expected = greedy(dense_model(rounded_pair.target, name), LONG_PROMPT, COUNT)
    for share, k in ((0.5, 4), (1.0, 0)):
        cuda.cpu_share = share
        with build(rounded_pair.target, rounded_pair.good, k, expert_format=name) as llm:
            completion = llm.generate(LONG_PROMPT, GREEDY)[0]
            assert cpu_of(llm).copies.nbytes > 0
        assert completion.token_ids == expected
        check_paths(completion.stats.counters, share)


@pytest.mark.parametrize(("budget", "copied"), [(0, False), (100_000, True)], ids=["no copies", "few copies"])
def test_copies_stay_within_their_budget(cuda: FakeCuda, rounded_pair: Pair, budget: int, copied: bool) -> None:
    """Experts without a copy are dequantized; an expert whose copy was dropped is copied again."""
    cuda.cpu_share, cuda.copy_budget = 1.0, budget
    with build(rounded_pair.target, None, expert_format="int4-g32") as llm:
        completion = llm.generate(PROMPT, GREEDY)[0]
        assert (0 < cpu_of(llm).copies.nbytes <= budget) == copied
    assert completion.token_ids == greedy(dense_model(rounded_pair.target, "int4-g32"), PROMPT, COUNT)
    counters = completion.stats.counters
    assert (counters.cpu_copies > 0) == copied
    assert counters.cpu_experts > 0


@pytest.mark.parametrize("limit", [8, 512], ids=["one by one", "in passes"])
def test_prompts_equal_those_of_transformers(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """A prompt of 75 rows runs expert by expert, or in two passes of the kernels."""
    monkeypatch.setattr("spmoe.backends.cuda.kernel_row_limit", lambda nbytes: limit)
    cuda.cpu_share = 0.5
    with build(mixtral_pair.target, None) as llm:
        completion = llm.generate(LONG_PROMPT, GREEDY)[0]
    assert completion.token_ids == greedy(reference(mixtral_pair.target), LONG_PROMPT, COUNT)
    check_paths(completion.stats.prompt_counters, 0.5)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_requests_together_have_the_text_of_lone_ones(cuda: FakeCuda, mixtral_pair: Pair, share: float) -> None:
    cuda.cpu_share = share
    prompts = [PROMPT, list(b"import os"), list(b"the cat")]
    with build(mixtral_pair.target, mixtral_pair.good, 2, max_num_seqs=3) as llm:
        completions = llm.generate(prompts, GREEDY)
        steps = llm.engine.counters.steps
    model = reference(mixtral_pair.target)
    assert [one.token_ids for one in completions] == [greedy(model, prompt, COUNT) for prompt in prompts]
    check_paths(_sum(completions), share)
    assert steps == sum(one.stats.counters.steps for one in completions)


@pytest.mark.parametrize("check", ["host", "device"])
def test_steps_of_many_rows_add_results_of_the_cpu_in_every_pass(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    """Experts of captured forwards run in passes of 16 rows."""
    cuda.cpu_share = 1.0
    forward_batch, rows = DecodeGraphs.forward_batch, list[int]()

    def noted(self: DecodeGraphs, parts: Any, observer: Any) -> Any:
        rows.append(sum(len(part.tokens) for part in parts))
        return forward_batch(self, parts, observer)

    monkeypatch.setattr(DecodeGraphs, "forward_batch", noted)
    prompts = [[number, *PROMPT[number % 5 :]] for number in range(12)]
    options = {"max_num_seqs": 12, "expert_memory": "60%", "prefetch": "on-demand", "residency_check": check}
    with build(mixtral_pair.target, mixtral_pair.good, 3, **options) as llm:
        completions = llm.generate(prompts, GREEDY)
        residency = llm.engine.parts.runtime.residency
        assert (getattr(residency, "followed", 0) > 0) == (check == "device")
    model = reference(mixtral_pair.target)
    assert [one.token_ids for one in completions] == [greedy(model, prompt, COUNT) for prompt in prompts]
    assert max(rows) == 48
    assert _sum(completions).cpu_experts > 0


def _sum(completions: list[RequestOutput]) -> Counters:
    total = Counters()
    for one in completions:
        total = total.plus(one.stats.counters)
    return total


def test_experts_with_biases_and_transposed_weights(cuda: FakeCuda, tmp_path: Path) -> None:
    families.save(families.tiny_model("gpt_oss"), tmp_path)
    cuda.cpu_share, prompt = 1.0, list(range(2, 11))
    with build(tmp_path, None, expert_memory="50%") as llm:
        assert llm.generate(prompt, GREEDY)[0].token_ids == greedy(reference(tmp_path), prompt, COUNT)
        assert llm.engine.counters.cpu_experts > 0


def test_nothing_is_computed_on_the_cpu_if_all_experts_are_resident(cuda: FakeCuda, mixtral_pair: Pair) -> None:
    cuda.cpu_share = 1.0
    with build(mixtral_pair.target, mixtral_pair.good, 2, expert_memory="100%") as llm:
        llm._thread.call(lambda: llm.engine.experts.load_all(llm.engine.spec.experts))
        counters = llm.generate(PROMPT, GREEDY)[0].stats.counters
    assert counters.cpu_experts == counters.demand_loads == 0


def test_engines_without_the_option_have_no_thread_and_send_no_rows(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(CpuExperts, "send", lambda self, hidden, weights: sent.append(1))
    with build(mixtral_pair.target, mixtral_pair.good, 2, cpu_experts="off") as llm:
        counters = llm.generate(PROMPT, GREEDY)[0].stats.counters
        assert llm.engine.experts.cpu_path is None
        assert "spmoe-cpu-experts" not in {thread.name for thread in engine_threads()}
    assert (counters.cpu_experts, counters.path_choices, counters.timed_bytes, sent) == (0, 0, 0, [])


def test_engine_on_a_cpu_says_that_there_is_no_second_path(mixtral_pair: Pair) -> None:
    with build(mixtral_pair.target, None, cpu_experts="auto", device="cpu") as llm:
        assert llm.notices == [
            "--cpu-experts auto has no effect with --device cpu: all experts are computed on the CPU"
        ]
        assert llm.engine.experts.cpu_path is None


# ---- faults


def _raise(error: BaseException) -> Callable[..., Tensor]:
    def compute(self: CpuExperts, *arguments: Any) -> Tensor:
        raise error

    return compute


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the thread that dies
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no such operator"), "no such operator"),
        (SystemExit(), "the thread that computes experts has died"),
    ],
    ids=["operator", "thread"],
)
def test_experts_that_the_cpu_cannot_compute_are_moved(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, error: BaseException, reason: str
) -> None:
    cuda.cpu_share = 0.5
    with build(mixtral_pair.target, mixtral_pair.good, 2) as llm:
        monkeypatch.setattr(CpuExperts, "compute", _raise(error))
        completions = [llm.generate(PROMPT, GREEDY)[0] for _ in range(2)]
        notices = [f"experts could not be computed on the CPU ({reason}); they are moved to the GPU instead"]
        assert llm.notices == notices
        monkeypatch.undo()
        use_fake_cuda(monkeypatch)
        completions.append(llm.generate(PROMPT, GREEDY)[0])
        assert llm.notices == notices, "one notice"
    expected = greedy(reference(mixtral_pair.target), PROMPT, COUNT)
    assert [one.token_ids for one in completions] == [expected] * 3
    first = completions[0].stats.counters
    assert first.cpu_experts == 0
    assert 0 < first.cpu_failures <= first.demand_loads, "each of them was moved"
    assert completions[2].stats.counters.cpu_failures == 0
    assert completions[2].stats.counters.cpu_experts > 0


def test_some_experts_of_a_layer_fail(cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of the others are used."""
    cuda.cpu_share = 1.0
    compute, calls = CpuExperts.compute, list[int]()

    def fail_every_third(self: CpuExperts, *arguments: Any) -> Tensor:
        calls.append(1)
        if not len(calls) % 3:
            raise MemoryError
        return compute(self, *arguments)

    monkeypatch.setattr(CpuExperts, "compute", fail_every_third)
    with build(mixtral_pair.target, mixtral_pair.good, 2) as llm:
        completion = llm.generate(PROMPT, GREEDY)[0]
    assert completion.token_ids == greedy(reference(mixtral_pair.target), PROMPT, COUNT)
    assert completion.stats.counters.cpu_experts > 0
    assert completion.stats.counters.cpu_failures > 0


def test_no_thread_is_left_after_cancellation_recovery_and_close(
    cuda: FakeCuda, mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, expected = engine_threads(), greedy(reference(mixtral_pair.target), PROMPT, COUNT)
    cuda.cpu_share = 1.0
    llm = build(mixtral_pair.target, mixtral_pair.good, 2)
    cancelled: Generation = llm.stream(PROMPT, GREEDY)
    next(iter(cancelled))
    cancelled.stop()
    list(cancelled)
    place, broken = CpuExperts.place, list[int]()

    def fail_once(self: CpuExperts, *arguments: Any) -> None:
        if not broken:
            broken.append(1)
            raise RuntimeError("injected")
        place(self, *arguments)

    monkeypatch.setattr(CpuExperts, "place", fail_once)
    with pytest.raises(RuntimeError, match="injected"):
        llm.generate(PROMPT, GREEDY)
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
    names = [thread.name for thread in engine_threads() - before]
    assert names.count("spmoe-cpu-experts") == 1
    llm.close()
    assert engine_threads() == before
