"""Sampling defaults come from generation_config.json, and can be turned off."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints import Pair
from spmoe import LLM, SamplingParams
from spmoe.cli.options import sampling_params
from spmoe.engine.sampling import default_sampling_params
from spmoe.errors import CheckpointError

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 3}


def write(directory: Path, settings: dict[str, Any]) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 3, "max_length": 20}, {}),
        (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({**QWEN, "do_sample": False}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"temperature": 0.7, "min_p": 0.05}, {"temperature": 0.7, "min_p": 0.05}),
        ({"do_sample": None, "temperature": 0.7}, {"temperature": 0.7}),
        ({"top_k": 40, "top_p": 0.9}, {}),
        ({"do_sample": True, "temperature": 0}, {}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"max_new_tokens": 2048}, {"max_tokens": 2048}),
    ],
)
def test_rules(tmp_path: Path, settings: dict[str, Any], expected: dict[str, Any]) -> None:
    assert default_sampling_params(write(tmp_path, settings)) == (SamplingParams(**expected), [])


def test_a_checkpoint_without_the_file_is_greedy(tmp_path: Path) -> None:
    assert default_sampling_params(tmp_path) == (SamplingParams(), [])


def test_settings_without_a_counterpart_are_named(tmp_path: Path) -> None:
    off = {
        "suppress_tokens": [],
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "typical_p": 1.0,
        "forced_eos_token_id": None,
    }
    assert default_sampling_params(write(tmp_path, off))[1] == []
    on = {"suppress_tokens": [5], "no_repeat_ngram_size": 3, "bad_words_ids": [[1]], "forced_eos_token_id": 2}
    assert sorted(default_sampling_params(write(tmp_path, on))[1]) == sorted(on)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"do_sample": True, "top_p": 7.0}, "top_p must be above 0 and at most 1, not 7.0"),
        ({"repetition_penalty": -1}, "repetition_penalty must be above 0"),
    ],
)
def test_invalid_settings_are_rejected(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        default_sampling_params(write(tmp_path, settings))
    assert "generation_config.json" in str(caught.value)
    assert "--generation-config none" in str(caught.value)


def test_an_engine_uses_the_defaults_for_requests_without_params(tmp_path: Path, mixtral_pair: Pair) -> None:
    target = tmp_path / "target"
    shutil.copytree(mixtral_pair.target, target)
    write(target, {"do_sample": True, "max_new_tokens": 4, "suppress_tokens": [5]})
    options: dict[str, Any] = {"draft": None, "expert_memory": "100%", "progress": False}
    with LLM(target, **options) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=1.0, max_tokens=4)
        drawn = {tuple(llm.generate("abc")[0].token_ids) for _ in range(5)}
        assert len(drawn) > 1, "sampled"
        assert all(len(one) <= 4 for one in drawn)
        assert 1 <= len(llm.chat([{"role": "user", "content": "x"}])[0].token_ids) <= 4
        assert len(llm.stream("abc").run().token_ids) <= 4
        greedy = llm.generate("abc", SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids
        assert len(greedy) == 9, "params that are given are taken as they are"
        (notice,) = llm.notices
        assert "suppress_tokens" in notice
        assert "not support" in notice
    with LLM(target, generation_config="none", **options) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.notices == []
    write(target, {"temperature": -1})
    with pytest.raises(CheckpointError, match="temperature must be 0 or more"):
        LLM(target, **options)
    with LLM(target, generation_config="none", **options) as llm:
        assert llm.get_default_sampling_params().greedy


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"min_new_tokens": 7}, {"min_tokens": 7}),
        ({"min_new_tokens": 7, "max_new_tokens": 5}, {"min_tokens": 5, "max_tokens": 5}),
    ],
)
def test_least_number_of_tokens(tmp_path: Path, settings: dict[str, Any], expected: dict[str, Any]) -> None:
    assert default_sampling_params(write(tmp_path, settings)) == (SamplingParams(**expected), [])


def test_a_command_may_ask_for_fewer_tokens_than_the_models_least() -> None:
    llm: Any = SimpleNamespace(get_default_sampling_params=lambda: SamplingParams(min_tokens=7))
    assert sampling_params(llm, {"max_tokens": 3}) == SamplingParams(max_tokens=3, min_tokens=3)
    assert sampling_params(llm, {}) == SamplingParams(min_tokens=7)


def test_rounding_that_depends_on_the_draft_is_said_once(mixtral_pair: Pair) -> None:
    options: dict[str, Any] = {"draft": "ngram", "prefetch": "on-demand", "device": "cpu", "progress": False}
    for dtype, k, expected in (("bfloat16", 2, 1), ("float16", 2, 1), ("float32", 2, 0), ("bfloat16", 0, 0)):
        with LLM(mixtral_pair.target, dtype=dtype, num_speculative_tokens=k, **options) as llm:
            assert sum("rounding depends on the number of draft tokens" in notice for notice in llm.notices) == expected
            llm.engine.reconfigure(prefetch="next-gate")
            assert sum("rounding depends" in notice for notice in llm.notices) == expected
