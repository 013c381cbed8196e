"""Benchmark runs: what is run in which order, on which engines, and which prompts there are."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from checkpoints import Pair, byte_tokenizer
from spmoe.bench import runs
from spmoe.bench.figures import differences, machine_record, records
from spmoe.bench.runs import Bench, Job, require_room
from spmoe.bench.settings import Setting, System
from spmoe.bench.settings import settings_of as all_settings_of
from spmoe.config import Size
from spmoe.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spmoe.engine.llm import Generation

HALF, WHOLE = Size(share=0.5), Size(share=1.0)
PROMPTS = ["the cat", "a much longer prompt than that one", "x"]


def job_for(pair: Pair, settings: list[Setting], **changes: Any) -> Job:
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
    return Job(engine, settings, prompts, **values)


def settings_of(memories: list[Size], policies: list[str], draft_tokens: list[int]) -> list[Setting]:
    return all_settings_of(memories, [System(policy) for policy in policies], draft_tokens)


# ---- runs


@pytest.fixture(scope="module")
def finished(mixtral_pair: Pair) -> tuple[Bench, list[str]]:
    said: list[str] = []
    settings = settings_of([HALF, Size(share=0.75)], ["draft-gate", "on-demand"], [0, 3])
    bench = Bench(job_for(mixtral_pair, settings), said.append)
    bench.run()
    return bench, said


def test_configurations_take_turns(finished: tuple[Bench, list[str]]) -> None:
    bench, _ = finished
    turns = [bench.runs[start : start + 3] for start in range(0, len(bench.runs), 3)]
    assert len(turns) == 2 * 2 * len(PROMPTS)
    for number, turn in enumerate(turns):
        assert {run.setting for run in turn} == set(bench.job.settings[:3] if number < 6 else bench.job.settings[3:])
        assert {(run.repeat, run.prompt) for run in turn} == {divmod(number % 6, len(PROMPTS))}
    for half in (turns[:6], turns[6:]):
        firsts = [turn[0].setting for turn in half]
        assert all(firsts.count(setting) == 2 for setting in firsts), "each begins as often as the others"


def test_one_engine_serves_a_budget(finished: tuple[Bench, list[str]]) -> None:
    _, said = finished
    assert [words for words in said if words.startswith("loading")] == [
        "loading, 50% of the experts in slots",
        "loading, 75% of the experts in slots",
        "loading, 100% of the experts in slots",
    ]
    assert sum(words.startswith("warming up") for words in said) == 3 + 3 + 2
    assert "run 1 of 36: 50%, on-demand, K=0; prompt 1, repeat 1" in said
    (last,) = [words for words in said if words.startswith("run 36 of 36: ")]
    assert last.startswith("run 36 of 36: 75%, draft-gate, K=3; prompt 3, repeat 2; ")
    assert last.endswith(" s left")


def test_every_run_writes_the_same(finished: tuple[Bench, list[str]]) -> None:
    bench, _ = finished
    assert differences(bench.runs, bench.runs) == []
    assert differences(bench.resident, bench.runs) == []
    for run in bench.runs:
        assert len(run.completion.token_ids) == 8
        assert run.completion.stats.draft_tokens == run.setting.draft_tokens
        assert run.completion.stats.prefetch == run.setting.prefetch
        assert run.completion.stats.slots == (6 if run.setting.memory == HALF else 9)


def test_with_all_experts_in_slots_nothing_moves(finished: tuple[Bench, list[str]]) -> None:
    bench, _ = finished
    assert [run.setting.draft_tokens for run in bench.resident] == [0, 3, 3, 0] * 3
    assert all(run.completion.stats.counters.loads == 0 for run in bench.resident)


def test_what_is_known_or_fits_in_a_budget_is_not_loaded_for(mixtral_pair: Pair) -> None:
    said: list[str] = []
    settings = settings_of([HALF, WHOLE], ["on-demand"], [0, 2])
    options = {"output_len": 2, "repeat": 1, "warmup": 0, "resident": {2: 0.5}}
    bench = Bench(job_for(mixtral_pair, settings, **options), said.append)
    bench.run()
    assert sum(words.startswith("loading") for words in said) == 2, "the budget of 100% serves as well"
    assert {run.setting.draft_tokens for run in bench.resident} == {0}
    sources = {row["num_speculative_tokens"]: row["resident_source"] for row in records(bench)}
    assert sources == {0: "measured", 2: "given"}


def test_what_does_not_fit_is_estimated(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "all_experts_fit", lambda *facts: False)
    said: list[str] = []
    settings = settings_of([HALF], ["on-demand"], [0])
    job = job_for(mixtral_pair, settings, output_len=4, repeat=1, engine={"link_gbps": 0.01})
    bench = Bench(job, said.append)
    bench.run()
    assert sum(words.startswith("loading") for words in said) == 1
    assert "estimate" in said[-1]
    (row,) = records(bench)
    assert row["resident_source"] == "estimated"
    compute = row["draft_seconds_per_step"] + row["verify_seconds_per_step"] - row["stall_seconds_per_step"]
    assert row["all_resident_step_seconds"] == pytest.approx(compute)
    assert row["stall_seconds_per_step"] > compute / 10, "the link is slow"
    assert machine_record(bench)["link_source"] == "emulated"


def test_closed_engines_are_gone(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or two of them would have to fit on the device."""
    engines: list[weakref.ref[Any]] = []

    class Llm(runs.LLM):
        def __init__(self, *args: Any, **options: Any) -> None:
            assert not [engine for engine in engines if engine() is not None]
            super().__init__(*args, **options)
            engines.append(weakref.ref(self.engine.target.model))

    monkeypatch.setattr(runs, "LLM", Llm)
    settings = settings_of([HALF, Size(share=0.75)], ["draft-gate"], [2])
    Bench(job_for(mixtral_pair, settings, output_len=4, repeat=1), lambda words: None).run()
    assert len(engines) == 3
    assert not [engine for engine in engines if engine() is not None]


def test_engines_hand_their_host_store_on(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading experts into it is what takes longest."""

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
    settings = settings_of([HALF, Size(share=0.75)], ["on-demand"], [0])
    Bench(job_for(mixtral_pair, settings, output_len=2, repeat=1), lambda words: None).run()
    assert given == [None, made, made]
    assert made.closed == 1


def test_a_stop_ends_it_and_keeps_what_there_is(mixtral_pair: Pair) -> None:
    started: list[Generation] = []

    @contextmanager
    def observer(generation: Generation) -> Iterator[None]:
        started.append(generation)
        if len(started) == 6:  # two of them to warm up
            generation.stop()
        yield

    settings = settings_of([HALF], ["draft-gate"], [0, 3])
    bench = Bench(job_for(mixtral_pair, settings), lambda words: None, observer)
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert len(bench.runs) == 3
    rows = records(bench)
    assert [row["runs"] for row in rows] == [1, 2]
    assert {row["resident_source"] for row in rows} == {"estimated"}


def test_a_stop_in_the_last_step_counts_too(mixtral_pair: Pair) -> None:
    @contextmanager
    def observer(generation: Generation) -> Iterator[None]:
        yield
        generation.stop()

    bench = Bench(job_for(mixtral_pair, settings_of([HALF], ["on-demand"], [0])), lambda words: None, observer)
    with pytest.raises(KeyboardInterrupt):
        bench.run()


# ---- the room that prompts leave


def test_prompts_must_leave_room() -> None:
    require_room([[1] * 6], 4, 10)
    with pytest.raises(PromptError, match=r"prompt 2 has 7 tokens.*--output-len 4.*context of 10"):
        require_room([[1], [1] * 7], 4, 10)
