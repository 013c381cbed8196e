"""What the oracle knows of a benchmark's runs, it knows from the same runs before."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints import Pair, byte_tokenizer
from spmoe.bench.figures import differences
from spmoe.bench.runs import Bench, Job
from spmoe.bench.settings import System, settings_of
from spmoe.config import Size
from spmoe.engine.engine import Engine

PROMPTS = ["the cat", "a longer prompt"]


def test_each_run_of_the_oracle_is_rehearsed_once(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, rehearsed = Engine.record, []

    def record(self: Engine) -> Any:
        rehearsed.append((self.slots, self.config.prefetch, self.loop.draft_tokens))
        return sound(self)

    monkeypatch.setattr(Engine, "record", record)
    memories = [Size(share=0.5), Size(share=0.75)]
    settings = settings_of(memories, [System("oracle"), System("on-demand")], [0, 3])
    engine = {"model": str(mixtral_pair.target), "draft": str(mixtral_pair.good), "device": "cpu", "progress": False}
    engine |= {"shape": None, "link_gbps": None, "enforce_eager": False}
    prompts = [byte_tokenizer()(prompt)["input_ids"] for prompt in PROMPTS]
    bench = Bench(Job(engine, settings, prompts, output_len=8, repeat=2, warmup=1), lambda words: None)
    bench.run()
    expected = [(slots, "on-demand", k) for slots in (6, 9) for k in (0, 3) for _ in PROMPTS]
    assert sorted(rehearsed) == expected
    assert differences(bench.runs, bench.runs) == []
    for run in bench.runs:
        assert run.completion.stats.prefetch == run.setting.prefetch
        assert (run.completion.stats.counters.prefetches_requested > 0) == (run.setting.prefetch == "oracle")
