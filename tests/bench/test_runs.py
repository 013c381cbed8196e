"""Benchmark runs: their order, the engines they run on, interrupts, and the length of prompts."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from checkpoints import Pair, byte_tokenizer
from spmoe.bench import runs
from spmoe.bench.configs import BenchConfig, make_configs
from spmoe.bench.records import config_records, find_differences, machine_record
from spmoe.bench.runs import BenchJob, BenchRunner, require_context
from spmoe.bench.scenario import PolicyPair
from spmoe.config import Size
from spmoe.engine.engine import Engine
from spmoe.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spmoe.engine.llm import Generation

HALF, WHOLE = Size(share=0.5), Size(share=1.0)
PROMPTS = ["the cat", "a much longer prompt than that one", "x"]


def make_job(pair: Pair, configs: list[BenchConfig], **changes: Any) -> BenchJob:
    engine = {
        "model": str(pair.target),
        "draft": str(pair.good),
        "shape": None,
        "link_gbps": None,
        "enforce_eager": False,
        "device": "cpu",
        "progress": False,
        **changes.pop("engine", {}),
    }
    prompts = [byte_tokenizer()(prompt)["input_ids"] for prompt in PROMPTS]
    values = {"output_len": 8, "repeat": 2, "warmup": 1, **changes}
    return BenchJob(engine, configs, prompts, **values)


def configs_of(memories: list[Size], policies: list[str], draft_tokens: list[int]) -> list[BenchConfig]:
    return make_configs(memories, [PolicyPair(prefetch=policy) for policy in policies], draft_tokens)


# ---- runs


@pytest.fixture(scope="module")
def finished(mixtral_pair: Pair) -> tuple[BenchRunner, list[str]]:
    messages: list[str] = []
    configs = configs_of([HALF, Size(share=0.75)], ["draft-gate", "on-demand"], [0, 3])
    runner = BenchRunner(
        make_job(mixtral_pair, configs),
        messages.append,
        on_progress=lambda done, total, detail="": messages.append(f"{done} of {total}: {detail}"),
    )
    runner.run()
    return runner, messages


def test_configurations_take_turns(finished: tuple[BenchRunner, list[str]]) -> None:
    runner, _ = finished
    turns = [runner.runs[start : start + 3] for start in range(0, len(runner.runs), 3)]
    assert len(turns) == 2 * 2 * len(PROMPTS)
    for number, turn in enumerate(turns):
        assert {run.config for run in turn} == set(runner.job.configs[:3] if number < 6 else runner.job.configs[3:])
        assert {(run.repeat, run.prompt) for run in turn} == {divmod(number % 6, len(PROMPTS))}
    for half in (turns[:6], turns[6:]):
        firsts = [turn[0].config for turn in half]
        assert all(firsts.count(config) == 2 for config in firsts), "each is first equally often"


def test_one_engine_is_loaded_per_budget(finished: tuple[BenchRunner, list[str]]) -> None:
    _, messages = finished
    assert [words for words in messages if words.startswith("loading")] == [
        "loading, 50% of the experts in slots",
        "loading, 75% of the experts in slots",
        "loading, 100% of the experts in slots",
    ]
    assert sum("warm-up" in words for words in messages) == 3 + 3 + 2
    runs = [words for words in messages if "; prompt " in words]
    assert runs[0] == "0 of 48: 50%, on-demand, K=0; prompt 1, repeat 1"
    assert runs[35] == "35 of 48: 75%, draft-gate, K=3; prompt 3, repeat 2"
    assert len(runs) == 48, "36 that count, and 12 with all experts in slots"


def test_all_runs_generate_the_same_tokens(finished: tuple[BenchRunner, list[str]]) -> None:
    runner, _ = finished
    assert find_differences(runner.runs, runner.runs) == []
    assert find_differences(runner.resident_runs, runner.runs) == []
    for run in runner.runs:
        assert len(run.completion.token_ids) == 8
        assert run.completion.stats.draft_tokens == run.config.draft_tokens
        assert run.completion.stats.prefetch == run.config.prefetch
        assert run.completion.stats.slots == (6 if run.config.memory == HALF else 9)


def test_nothing_is_loaded_with_all_experts_in_slots(finished: tuple[BenchRunner, list[str]]) -> None:
    runner, _ = finished
    assert [run.config.draft_tokens for run in runner.resident_runs] == [0, 3, 3, 0] * 3
    assert all(run.completion.stats.counters.loads == 0 for run in runner.resident_runs)


def test_no_extra_engine_if_resident_step_is_given_or_in_a_budget(mixtral_pair: Pair) -> None:
    messages: list[str] = []
    configs = configs_of([HALF, WHOLE], ["on-demand"], [0, 2])
    options = {"output_len": 2, "repeat": 1, "warmup": 0, "resident": {2: 0.5}}
    runner = BenchRunner(make_job(mixtral_pair, configs, **options), messages.append)
    runner.run()
    assert sum(words.startswith("loading") for words in messages) == 2, "the engine of the budget of 100% is used"
    assert {run.config.draft_tokens for run in runner.resident_runs} == {0}
    sources = {row["num_speculative_tokens"]: row["all_resident_source"] for row in config_records(runner)}
    assert sources == {0: "measured", 2: "given"}


def test_resident_step_is_estimated_if_experts_do_not_fit(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "all_experts_fit", lambda *facts: False)
    messages: list[str] = []
    configs = configs_of([HALF], ["on-demand"], [0])
    job = make_job(mixtral_pair, configs, output_len=4, repeat=1, engine={"link_gbps": 0.01})
    runner = BenchRunner(job, messages.append)
    runner.run()
    assert sum(words.startswith("loading") for words in messages) == 1
    assert "estimate" in messages[-1]
    (row,) = config_records(runner)
    assert row["all_resident_source"] == "estimated"
    compute = row["draft_seconds_per_step"] + row["verify_seconds_per_step"] - row["stall_seconds_per_step"]
    assert row["all_resident_step_seconds"] == pytest.approx(compute)
    assert row["stall_seconds_per_step"] > compute / 10, "the link is slow"
    assert machine_record(runner)["link_source"] == "emulated"


def test_closed_engines_are_freed(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two engines would have to fit on the device."""
    engines: list[weakref.ref[Any]] = []

    class Llm(runs.LLM):
        def __init__(self, *args: Any, **options: Any) -> None:
            assert not [engine for engine in engines if engine() is not None]
            super().__init__(*args, **options)
            engines.append(weakref.ref(self.engine.target.model))

    monkeypatch.setattr(runs, "LLM", Llm)
    configs = configs_of([HALF, Size(share=0.75)], ["draft-gate"], [2])
    BenchRunner(make_job(mixtral_pair, configs, output_len=4, repeat=1), lambda words: None).run()
    assert len(engines) == 3
    assert not [engine for engine in engines if engine() is not None]


def test_host_store_is_passed_to_the_next_engine(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading experts into it takes longer than everything else."""

    class Store:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    made, given = Store(), list[Any]()

    class Llm(runs.LLM):
        def __init__(self, *, store: Any, **options: Any) -> None:
            assert not made.closed
            super().__init__(**options)
            given.append(store)
            self.engine.parts.runtime.store = store or made

    monkeypatch.setattr(runs, "LLM", Llm)
    configs = configs_of([HALF, Size(share=0.75)], ["on-demand"], [0])
    BenchRunner(make_job(mixtral_pair, configs, output_len=2, repeat=1), lambda words: None).run()
    assert given == [None, made, made]
    assert made.closed == 1


def test_stop_ends_the_benchmark_and_keeps_runs(mixtral_pair: Pair) -> None:
    started: list[Generation] = []

    @contextmanager
    def around_generation(generation: Generation) -> Iterator[None]:
        started.append(generation)
        if len(started) == 6:  # two of them are warm-up
            generation.stop()
        yield

    configs = configs_of([HALF], ["draft-gate"], [0, 3])
    runner = BenchRunner(make_job(mixtral_pair, configs), lambda words: None, around_generation)
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    assert len(runner.runs) == 3
    rows = config_records(runner)
    assert [row["runs"] for row in rows] == [1, 2]
    assert {row["all_resident_source"] for row in rows} == {"estimated"}


def test_stop_in_the_last_step_ends_the_benchmark(mixtral_pair: Pair) -> None:
    @contextmanager
    def around_generation(generation: Generation) -> Iterator[None]:
        yield
        generation.stop()

    runner = BenchRunner(
        make_job(mixtral_pair, configs_of([HALF], ["on-demand"], [0])), lambda words: None, around_generation
    )
    with pytest.raises(KeyboardInterrupt):
        runner.run()


# ---- the oracle


def test_oracle_records_each_request_once(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    original, recorded = Engine.record, []

    def record(self: Engine) -> Any:
        recorded.append((self.slots, self.config.prefetch, self.loop.max_draft_tokens))
        return original(self)

    monkeypatch.setattr(Engine, "record", record)
    configs = configs_of([HALF, Size(share=0.75)], ["oracle", "on-demand"], [0, 3])
    runner = BenchRunner(make_job(mixtral_pair, configs, resident={0: 0.1, 3: 0.1}), lambda words: None)
    runner.run()
    assert sorted(recorded) == [(slots, "on-demand", k) for slots in (6, 9) for k in (0, 3) for _ in PROMPTS]
    assert find_differences(runner.runs, runner.runs) == []
    for run in runner.runs:
        assert run.completion.stats.prefetch == run.config.prefetch
        assert (run.completion.stats.counters.prefetches_requested > 0) == (run.config.prefetch == "oracle")


# ---- length of prompts


def test_prompt_and_output_must_fit_in_the_context() -> None:
    require_context([[1] * 6], 4, 10)
    with pytest.raises(PromptError, match=r"prompt 2 has 7 tokens.*--output-len 4.*context of 10"):
        require_context([[1], [1] * 7], 4, 10)
