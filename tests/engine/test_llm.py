"""The Python interface: prompts, completions, streams, closing and statistics."""

from __future__ import annotations

import gc
import inspect
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import LAYERS, VOCABULARY, Pair, byte_tokenizer, greedy_tokens, memory_for, mistral, save, seeded
from spmoe import LLM, RequestOutput, SamplingParams
from spmoe.config import EngineConfig
from spmoe.engine.llm import _CHOSEN
from spmoe.errors import BudgetError, CheckpointError, PromptError, SpmoeError, UsageError
from spmoe.observe.ledger import Counters
from spmoe.predict.policies.draft_gate import DraftGate
from spmoe.types import PrefetchRequests

PROMPT = "the cat"
TEN = SamplingParams(max_tokens=10, ignore_eos=True)


def build(pair: Pair, draft: str | None = "good", **options: Any) -> LLM:
    options = {"num_speculative_tokens": 3, "expert_memory": "50%", "progress": False, "cutoff": "all", **options}
    return LLM(str(pair.target), str(getattr(pair, draft)) if draft else None, **options)


@pytest.fixture(scope="module")
def llm(mixtral_pair: Pair) -> Iterator[LLM]:
    with build(mixtral_pair) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(mixtral_pair: Pair) -> list[int]:
    """Return the sixteen tokens that transformers generates after PROMPT."""
    return greedy_tokens(mixtral_pair.target, byte_tokenizer()(PROMPT)["input_ids"], 16)


def text_of(tokens: list[int]) -> str:
    return byte_tokenizer().decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def no_state_is_left(llm: LLM) -> bool:
    """Return whether neither target nor draft holds the KV cache of a sequence."""
    return llm.engine.parts.target_kv == {} == llm.engine.loop.drafter._states  # type: ignore[attr-defined]


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("spmoe-")}


# ---- prompts


def test_a_prompt_is_text_or_token_ids(llm: LLM, expected: list[int]) -> None:
    ids = byte_tokenizer()(PROMPT)["input_ids"]
    for prompt in (PROMPT, ids, tuple(ids)):
        (completion,) = llm.generate(prompt, TEN)
        assert isinstance(completion, RequestOutput)
        assert completion.token_ids == expected[:10]
        assert completion.text == text_of(expected[:10])
        assert completion.stats.prompt_tokens == len(ids)


def test_prompts_may_be_mappings(llm: LLM, expected: list[int]) -> None:
    ids = byte_tokenizer()(PROMPT)["input_ids"]
    prompts: list[Any] = [{"prompt": PROMPT}, {"prompt_token_ids": ids}, {"prompt": "shown", "prompt_token_ids": ids}]
    outputs = llm.generate([*prompts, PROMPT, ids], TEN)
    assert [output.token_ids for output in outputs] == [expected[:10]] * 5
    assert [output.prompt for output in outputs] == [PROMPT, None, "shown", PROMPT, None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert [llm.generate(prompt, TEN)[0].token_ids for prompt in prompts] == [expected[:10]] * 3
    assert llm.stream(prompts[1], TEN).run().token_ids == expected[:10]


def test_a_result_has_the_fields_of_vllm(llm: LLM, expected: list[int]) -> None:
    first, second = llm.generate([PROMPT, "other"], TEN)
    assert first.request_id != second.request_id
    assert first.finished
    (output,) = first.outputs
    assert (output.index, output.text, output.token_ids) == (0, text_of(expected[:10]), expected[:10])
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert (output.logprobs, output.cumulative_logprob) == (None, None)
    assert (first.text, first.token_ids, first.finish_reason) == (output.text, output.token_ids, output.finish_reason)


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([]) == llm.generate((), TEN) == llm.generate([], []) == llm.chat([]) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts must be text, .* or a list of those, not 5"),
        (None, "prompts must be .*, not None"),
        (b"abc", "prompts must be .*, not b'abc'"),
        ({1, 2}, "prompts must be .*, not set"),
        (iter(["a"]), "prompts must be .*, not list_iterator"),
        ([1, "a"], "a prompt must be .*, not 1"),
        (["a", None], "a prompt must be .*, not None"),
        ([["a"]], "a prompt must be .*, not \\['a'\\]"),
        ([True], "a prompt must be .*, not True"),
        ([1.5], "a prompt must be .*, not 1.5"),
        ({}, "has neither"),
        ({"text": "a"}, "not text; leave it out"),
        ({"prompt": 5}, "must be text, not 5"),
        ({"prompt_token_ids": "abc"}, "must be a list of token ids, not 'abc'"),
        ({"prompt_token_ids": [1, "a"]}, "must be a list of token ids"),
        ([{"prompt": "a", "multi_modal_data": {}}], "not multi_modal_data"),
        (["x" * 10, ["y" * 200]], r"not \['y+\.\.\."),
    ],
)
def test_wrong_types_of_prompts_are_rejected(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        llm.generate(prompts, TEN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (5, "sampling_params must be SamplingParams or a list of them, not 5"),
        ({"max_tokens": 5}, "sampling_params must be SamplingParams .* not {'max_tokens': 5}"),
        ([TEN], "sampling_params has 1 entries, but prompts has 2"),
        ([], "sampling_params has 0 entries, but prompts has 2"),
        ([TEN, None], "not a list with None"),
        (replace(TEN, logit_bias={VOCABULARY: 1.0}), f"logit_bias has token {VOCABULARY}"),
        (replace(TEN, stop_token_ids=[VOCABULARY]), f"stop_token_ids has token {VOCABULARY}"),
    ],
)
def test_wrong_sampling_params_are_rejected_before_anything_runs(llm: LLM, params: Any, message: str) -> None:
    before = llm.engine.counters
    with pytest.raises(UsageError, match=message):
        llm.generate([PROMPT, "other"], params)
    assert llm.engine.counters == before


def test_each_prompt_may_have_its_own_params(llm: LLM, expected: list[int]) -> None:
    outputs = llm.generate([PROMPT, PROMPT], [replace(TEN, max_tokens=3), replace(TEN, max_tokens=7)])
    assert [output.token_ids for output in outputs] == [expected[:3], expected[:7]]


def test_several_prompts_come_back_in_order(llm: LLM, expected: list[int]) -> None:
    ids = byte_tokenizer()(PROMPT)["input_ids"]
    alone = llm.generate("other", TEN)[0].token_ids
    assert alone != expected[:10]
    for prompts in (["other", PROMPT, "other"], [byte_tokenizer()("other")["input_ids"], ids, "other"]):
        assert [c.token_ids for c in llm.generate(prompts, TEN)] == [alone, expected[:10], alone]


def test_all_prompts_are_checked_before_any_runs(llm: LLM) -> None:
    before = llm.engine.counters.copy()
    with pytest.raises(PromptError):
        llm.generate(["good", ""], TEN)
    assert llm.engine.counters == before


def test_decoding_is_greedy_by_default(mixtral_pair: Pair, expected: list[int]) -> None:
    with build(mixtral_pair, max_model_len=len(PROMPT) + 16) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        tokens = llm.generate(PROMPT)[0].token_ids
        assert tokens == expected[: len(tokens)]
        assert "".join(llm.stream(PROMPT)) == text_of(tokens)


def test_chat_applies_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    written = "user: hello\nassistant: "
    (answer,) = llm.chat(messages, TEN)
    assert answer.token_ids == llm.generate(written, TEN)[0].token_ids
    assert answer.prompt == written
    assert "".join(llm.stream_chat(messages, TEN)) == llm.generate(written, TEN)[0].text
    with pytest.raises(PromptError, match="no such role"):
        llm.chat([{"role": "refused", "content": "hello"}], TEN)


def test_chat_takes_several_conversations(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("hello", "bye")]
    separate = [llm.chat(conversation, TEN)[0].token_ids for conversation in conversations]
    assert [output.token_ids for output in llm.chat(conversations, TEN)] == separate
    assert separate[0] != separate[1]
    short = llm.chat(conversations, [replace(TEN, max_tokens=2), TEN])
    assert [output.token_ids for output in short] == [separate[0][:2], separate[1]]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (5, "a conversation must be a list of messages .*, not 5"),
        ("hello", "a conversation must be a list of messages .*, not 'hello'"),
        ({"role": "user", "content": "x"}, "a conversation must be a list"),
        (["hello"], "a conversation must be a list of messages .*, not 'hello'"),
        ([{"content": "x"}], "a message must be .*, not {'content': 'x'}"),
        ([[{"role": "user", "content": "x"}], 5], "a conversation must be a list .*, not 5"),
        ([[]], "the conversation is empty"),
    ],
)
def test_wrong_conversations_are_rejected(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.chat(messages, TEN)


def test_the_tokenizer_can_be_had(llm: LLM, expected: list[int]) -> None:
    assert llm.generate(llm.get_tokenizer()(PROMPT)["input_ids"], TEN)[0].token_ids == expected[:10]


def test_chat_needs_a_template(tmp_path: Path, mixtral_pair: Pair) -> None:
    target = tmp_path / "target"
    shutil.copytree(mixtral_pair.target, target)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    for leftover in target.glob("*.jinja"):
        leftover.unlink()
    tokenizer.save_pretrained(target)
    with LLM(str(target), None, progress=False) as llm, pytest.raises(UsageError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([1, VOCABULARY], f"vocabulary of {VOCABULARY}"),
        ([-1], f"vocabulary of {VOCABULARY}"),
        ([1] * 256, "256 tokens but the context holds 256"),
        ("x" * 300, "300 tokens but the context holds 256"),
    ],
)
def test_invalid_prompts_are_rejected(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        llm.generate(prompt, TEN)
    with pytest.raises(PromptError, match=message):
        llm.stream(prompt, TEN)


def test_token_ids_work_without_a_tokenizer(tmp_path: Path, mixtral_pair: Pair, expected: list[int]) -> None:
    target = tmp_path / "target"
    shutil.copytree(mixtral_pair.target, target, ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    with LLM(str(target), None, progress=False) as llm:
        completion = llm.generate(byte_tokenizer()(PROMPT)["input_ids"], TEN)[0]
        assert completion.token_ids == expected[:10]
        assert completion.text == ""
        with pytest.raises(UsageError, match="no tokenizer"):
            llm.generate(PROMPT, TEN)
        with pytest.raises(UsageError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "hello"}])
        with pytest.raises(UsageError, match="stop strings"):
            llm.generate([1, 2], SamplingParams(stop="x"))


# ---- end of a generation


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
def test_max_tokens_is_exact(llm: LLM, expected: list[int], count: int) -> None:
    completion = llm.generate(PROMPT, replace(TEN, max_tokens=count))[0]
    assert completion.token_ids == expected[:count]
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("k", [0, 4])
def test_max_model_len_is_never_exceeded(mixtral_pair: Pair, expected: list[int], k: int) -> None:
    with build(mixtral_pair, num_speculative_tokens=k, max_model_len=len(PROMPT) + 6) as llm:
        completion = llm.generate(PROMPT, TEN)[0]
        assert completion.token_ids == expected[:6]
        assert completion.finish_reason == "length"


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory, mixtral_pair: Pair, expected: list[int]) -> tuple[Pair, int]:
    """Return the pair with an EOS token that greedy decoding generates, and the number of tokens up to it."""
    at = next(i for i, t in enumerate(expected) if i >= 4 and t not in expected[:i])
    target = tmp_path_factory.mktemp("ending") / "target"
    shutil.copytree(mixtral_pair.target, target)
    generation = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [3, expected[at]]}))
    return replace(mixtral_pair, target=target), at + 1


@pytest.mark.parametrize("k", [0, 5])
def test_eos_ends_a_generation_and_is_among_its_tokens(ending: tuple[Pair, int], expected: list[int], k: int) -> None:
    pair, count = ending
    with build(pair, num_speculative_tokens=k) as llm:
        completion = llm.generate(PROMPT, SamplingParams(max_tokens=16))[0]
        assert completion.token_ids == expected[:count]
        assert completion.finish_reason == "stop"
        assert completion.text == text_of(expected[: count - 1]), "the end token has no text"
        on_time = llm.generate(PROMPT, SamplingParams(max_tokens=count))[0]
        assert (on_time.token_ids, on_time.finish_reason) == (expected[:count], "stop")
        through = llm.generate(PROMPT, SamplingParams(max_tokens=16, ignore_eos=True))[0]
        assert (through.token_ids, through.finish_reason) == (expected, "length")
        assert through.text == text_of(expected)


def test_eos_of_the_tokenizer_ends_a_generation_too(tmp_path: Path, mixtral_pair: Pair, expected: list[int]) -> None:
    """Some checkpoints declare EOS only in the tokenizer."""
    at = next(i for i, t in enumerate(expected) if i >= 4 and t not in expected[:i])
    target = tmp_path / "target"
    shutil.copytree(mixtral_pair.target, target)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(expected[at])
    tokenizer.save_pretrained(target)
    with LLM(str(target), None, progress=False) as llm:
        completion = llm.generate(PROMPT, SamplingParams(max_tokens=16))[0]
    assert (completion.token_ids, completion.finish_reason) == (expected[: at + 1], "stop")


@pytest.mark.parametrize("k", [0, 5])
def test_a_stop_string_ends_a_generation(mixtral_pair: Pair, k: int) -> None:
    with build(mixtral_pair, num_speculative_tokens=k) as llm:
        whole = llm.generate(PROMPT, replace(TEN, max_tokens=40))[0]
        stop = next(whole.text[i : i + 2] for i in range(2, 40) if whole.text[i : i + 2].isascii())
        assert len(stop) == 2
        completion = llm.generate(PROMPT, replace(TEN, max_tokens=40, stop=[stop, "never written"]))[0]
        assert completion.finish_reason == "stop"
        assert completion.text == whole.text[: whole.text.index(stop)]
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        assert stop in text_of(completion.token_ids)
        assert stop not in text_of(completion.token_ids[:-1])


@pytest.mark.parametrize("k", [0, 5])
def test_a_stop_token_ends_a_generation(mixtral_pair: Pair, expected: list[int], k: int) -> None:
    at = next(i for i, t in enumerate(expected) if i >= 4 and t not in expected[:i])
    with build(mixtral_pair, num_speculative_tokens=k) as llm:
        params = replace(TEN, max_tokens=16, stop_token_ids=[255, expected[at]])
        output = llm.generate(PROMPT, params)[0].outputs[0]
        assert output.token_ids == expected[: at + 1]
        assert output.text == text_of(expected[:at]), "the stop token has no text"
        assert (output.finish_reason, output.stop_reason) == ("stop", expected[at])
        later = llm.generate(PROMPT, replace(params, min_tokens=at + 2))[0].outputs[0]
        assert expected[at] not in later.token_ids[: at + 2]
        assert len(later.token_ids) >= at + 2


def test_the_stop_string_is_reported_and_waits_for_min_tokens(llm: LLM) -> None:
    whole = llm.generate(PROMPT, replace(TEN, max_tokens=40))[0]
    stop = next(whole.text[i] for i in range(2, 40) if whole.text[i].isascii())
    params = replace(TEN, max_tokens=40, stop=["never written", stop])
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    later = llm.generate(PROMPT, replace(params, min_tokens=len(output.token_ids)))[0].outputs[0]
    assert len(later.token_ids) > len(output.token_ids)
    assert later.text.startswith(output.text + stop)


# ---- several completions


def test_n_completions_differ_and_are_repeatable(llm: LLM) -> None:
    params = replace(TEN, temperature=1.0, seed=5, n=3)
    (result,) = llm.generate(PROMPT, params)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    tokens = [output.token_ids for output in result.outputs]
    assert len({tuple(one) for one in tokens}) == 3
    assert [output.token_ids for output in llm.generate(PROMPT, params)[0].outputs] == tokens
    single = [replace(params, n=1, seed=5 + index) for index in range(3)]
    assert [one.token_ids for one in llm.generate([PROMPT] * 3, single)] == tokens, "seeds count up"
    assert result.finished
    assert result.usage == {"prompt_tokens": len(PROMPT), "completion_tokens": 30, "total_tokens": len(PROMPT) + 30}


def test_statistics_of_n_completions(llm: LLM) -> None:
    before = llm.engine.counters
    result = llm.generate(PROMPT, replace(TEN, temperature=1.0, seed=5, n=3))[0]
    stats = result.stats
    assert (stats.output_tokens, stats.completions) == (30, 3)
    assert stats.counters.tokens == llm.engine.counters.minus(before).tokens == 30
    assert stats.prompt_counters.steps == 3
    assert 0 < stats.ttft_seconds < stats.latency_seconds
    assert stats.tpot_seconds == pytest.approx(stats.decode_seconds / (30 - 3))
    data = json.loads(json.dumps(result.to_dict()))
    assert [one["token_ids"] for one in data["outputs"]] == [one.token_ids for one in result.outputs]
    assert data["token_ids"] == result.token_ids


def test_a_stream_is_one_completion(llm: LLM) -> None:
    with pytest.raises(UsageError, match="n is 2"):
        llm.stream(PROMPT, replace(TEN, temperature=1.0, n=2))


# ---- streams


def test_a_stream_yields_the_same_text_in_pieces(llm: LLM) -> None:
    stream = llm.stream(PROMPT, replace(TEN, max_tokens=30))
    pieces = list(stream)
    whole = llm.generate(PROMPT, replace(TEN, max_tokens=30))[0]
    assert "".join(pieces) == whole.text
    assert len(pieces) > 5
    assert all(pieces)
    assert stream.completion.token_ids == whole.token_ids
    assert stream.completion.finish_reason == "length"
    assert list(stream) == [], "the stream has ended"


def test_a_paused_stream_has_a_completion(llm: LLM, expected: list[int]) -> None:
    stream = llm.stream(PROMPT, replace(TEN, max_tokens=400))
    pieces = [next(iter(stream)) for _ in range(3)]
    completion = stream.completion
    assert completion.finish_reason == "interrupted"
    assert 3 <= len(completion.token_ids) < 400
    assert completion.token_ids[:10] == expected[: len(completion.token_ids)][:10]
    assert completion.text.startswith("".join(pieces)), "the engine goes on while nobody reads"
    iter(stream).close()  # type: ignore[attr-defined]
    assert stream.completion.finish_reason == "interrupted"
    assert llm.generate(PROMPT, TEN)[0].token_ids == expected[:10]
    assert no_state_is_left(llm)


def test_stop_ends_a_stream_after_the_current_step(llm: LLM, expected: list[int]) -> None:
    stream = llm.stream(PROMPT, TEN)
    pieces = [next(iter(stream))]
    stream.stop()
    pieces += list(stream)
    assert stream.completion.finish_reason == "interrupted"
    assert "".join(pieces) == stream.completion.text
    assert stream.token_ids == expected[: len(stream.token_ids)]
    assert 1 <= len(stream.token_ids) < 10


def test_tokens_are_kept_when_the_next_draft_cannot_start(
    llm: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def launch(sequence: Any, k: int, observers: Any) -> None:
        if k:  # the prompt has been read
            tried.append(k)
            raise RuntimeError("no memory for that")

    drafter = llm.engine.parts.drafter
    original = drafter.launch
    monkeypatch.setattr(drafter, "launch", launch)
    assert llm.generate(PROMPT, TEN)[0].token_ids == expected[:10], "the request goes on without drafts"
    assert len(tried) == 1, "launched ahead; the failure is raised where the draft is asked for"
    assert "the draft failed (no memory for that); a request goes on without drafts" in llm.notices
    monkeypatch.setattr(drafter, "launch", original)
    result = llm.generate(PROMPT, TEN)[0]
    assert result.token_ids == expected[:10]
    assert result.stats.counters.drafted > 0, "the next request drafts again"


def test_an_unread_stream_runs_nothing(llm: LLM) -> None:
    before = llm.engine.counters.copy()
    stream = llm.stream(PROMPT, TEN)
    assert stream.completion.token_ids == []
    assert stream.completion.usage == {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
    del stream
    gc.collect()
    assert llm.engine.counters == before


def test_an_abandoned_stream_is_released(llm: LLM, expected: list[int]) -> None:
    stream = llm.stream(PROMPT, replace(TEN, max_tokens=400))
    next(iter(stream))
    assert len(llm.engine.parts.target_kv) == 1
    del stream
    gc.collect()
    llm.generate("x", replace(TEN, max_tokens=1))
    assert no_state_is_left(llm)
    assert llm.generate(PROMPT, TEN)[0].token_ids == expected[:10]


def test_an_abandoned_stream_may_be_garbage_collected_during_a_step(
    mixtral_pair: Pair, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may run while its thread holds the engine's lock."""
    with build(mixtral_pair) as llm:
        stream = llm.stream(PROMPT, TEN)
        next(iter(stream))
        run, collected = llm.engine.target.run, []

        def run_and_collect(*args: Any, **options: Any) -> Any:
            if not collected:
                collected.append(gc.collect())
            return run(*args, **options)

        monkeypatch.setattr(llm.engine.target, "run", run_and_collect)
        del stream
        tokens: list[list[int]] = []
        thread = threading.Thread(target=lambda: tokens.append(llm.generate(PROMPT, TEN)[0].token_ids), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "deadlock: it waits for a lock that its own thread holds"
        assert tokens == [expected[:10]]
        assert collected
        assert no_state_is_left(llm)


@pytest.mark.parametrize("prefetch", ["on-demand", "draft-gate"])
def test_interleaved_streams_are_independent(mixtral_pair: Pair, prefetch: str) -> None:
    prompts = [PROMPT, "a dog ran", "x"]
    params = [TEN, replace(TEN, temperature=0.8, seed=4), replace(TEN, max_tokens=5)]
    with build(mixtral_pair, prefetch=prefetch) as llm:
        separate = [llm.generate(p, s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
        streams = [llm.stream(p, s) for p, s in zip(prompts, params, strict=True)]
        running = list(streams)
        while running:
            running = [stream for stream in running if next(iter(stream), None) is not None]
        assert [stream.token_ids for stream in streams] == separate
        assert no_state_is_left(llm)


def test_threads_may_share_an_engine(mixtral_pair: Pair) -> None:
    prompts = [PROMPT, "a dog ran", "x", "yes"]
    with build(mixtral_pair) as llm:
        separate = [llm.generate(p, TEN)[0].token_ids for p in prompts]
        found: dict[str, list[int]] = {}
        threads = [
            threading.Thread(target=lambda p=p: found.update({p: llm.generate(p, TEN)[0].token_ids}))  # type: ignore[misc]
            for p in prompts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[p] for p in prompts] == separate
        llm.generate("x", replace(TEN, max_tokens=1))
        assert no_state_is_left(llm)


# ---- statistics of requests that overlap

COUNTS = ("steps", "tokens", "drafted", "accepted", "hits", "late", "demand_loads", "prefetches_requested")


def assert_counts_add_up(llm: LLM, before: Counters, results: list[RequestOutput]) -> None:
    whole = llm.engine.counters.minus(before)
    for result in results:
        counters = result.stats.counters
        assert counters.tokens == len(result.token_ids) == counters.steps + counters.accepted
        assert counters.asked > 0
        assert sum(counters.drafted_at) == counters.drafted
        assert result.stats.prompt_counters.steps == 1
    for name in COUNTS:
        assert sum(getattr(result.stats.counters, name) for result in results) == getattr(whole, name), name


def test_each_thread_reports_its_own_counts(mixtral_pair: Pair) -> None:
    prompts = {PROMPT: 16, "a dog ran": 32, "x": 48}
    with build(mixtral_pair) as llm:
        alone = {p: llm.generate(p, replace(TEN, max_tokens=n))[0].stats.counters for p, n in prompts.items()}
        before, found = llm.engine.counters, dict[str, RequestOutput]()
        start = threading.Barrier(len(prompts))

        def run(prompt: str, count: int) -> None:
            start.wait()
            found[prompt] = llm.generate(prompt, replace(TEN, max_tokens=count))[0]

        threads = [threading.Thread(target=run, args=one) for one in prompts.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_counts_add_up(llm, before, list(found.values()))
        for prompt, counters in alone.items():
            ours = found[prompt].stats.counters
            assert ours.tokens == counters.tokens
            assert ours.asked <= counters.asked, "steps are shared"


def test_interleaved_streams_report_their_own_counts(mixtral_pair: Pair) -> None:
    with build(mixtral_pair) as llm:
        before = llm.engine.counters
        streams = [llm.stream(prompt, replace(TEN, max_tokens=n)) for prompt, n in ((PROMPT, 9), ("x", 21), ("yes", 5))]
        running = list(streams)
        while running:
            running = [stream for stream in running if next(iter(stream), None) is not None]
            for stream in streams:
                counters = stream.completion.stats.counters
                assert counters.steps <= counters.tokens <= counters.steps + counters.accepted
        assert_counts_add_up(llm, before, [stream.completion for stream in streams])


def test_counts_between_requests_belong_to_none(llm: LLM) -> None:
    stream = llm.stream(PROMPT, TEN)
    done = stream.run().stats.counters
    llm.engine.experts.step.begin()
    llm.engine.experts.ledger.demanded(5)
    assert stream.completion.stats.counters == done


# ---- closing


def test_leaving_the_context_ends_all_threads(mixtral_pair: Pair) -> None:
    before = set(threading.enumerate())
    with build(mixtral_pair) as llm:
        llm.generate(PROMPT, TEN)
        assert own_threads() - before
    assert set(threading.enumerate()) == before
    llm.close()
    for use in (lambda: llm.generate(PROMPT, TEN), lambda: llm.chat([{"role": "user", "content": "x"}], TEN)):
        with pytest.raises(SpmoeError, match="closed"):
            use()


def test_an_error_inside_the_context_ends_all_threads(mixtral_pair: Pair) -> None:
    before = set(threading.enumerate())
    with pytest.raises(PromptError), build(mixtral_pair) as llm:
        llm.generate("")
    assert set(threading.enumerate()) == before


def test_close_during_a_stream(mixtral_pair: Pair, expected: list[int]) -> None:
    before = set(threading.enumerate())
    llm = build(mixtral_pair)
    stream = llm.stream(PROMPT, TEN)
    next(iter(stream))
    llm.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(SpmoeError, match="closed"):
        stream.run()
    completion = stream.completion
    assert completion.finish_reason == "interrupted"
    assert completion.token_ids == expected[: len(completion.token_ids)]
    assert no_state_is_left(llm)


def test_a_failed_build_leaves_no_threads(tmp_path: Path, mixtral_pair: Pair) -> None:
    before = set(threading.enumerate())
    with pytest.raises(BudgetError, match=r"holds 1 expert of .* needs 2 of a layer at once"):
        build(mixtral_pair, expert_memory=memory_for(2) - 1)
    broken = tmp_path / "draft"
    shutil.copytree(mixtral_pair.good, broken)
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(SpmoeError):
        LLM(str(mixtral_pair.target), str(broken), progress=False)
    model = seeded(mistral, 1)
    bare = save(model, tmp_path / "bare")  # ships no tokenizer
    with pytest.raises(UsageError):
        LLM(str(mixtral_pair.target), str(bare), progress=False)
    model.lm_head.weight.data[0, 0] = float("nan")  # found after everything else is loaded
    damaged = save(model, tmp_path / "damaged", byte_tokenizer())
    with pytest.raises(CheckpointError, match="not finite"):
        LLM(str(mixtral_pair.target), str(damaged), progress=False)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)  # the thread pool of transformers' loader may still be ending
    assert set(threading.enumerate()) == before


def test_unknown_options_are_rejected(mixtral_pair: Pair) -> None:
    with pytest.raises(UsageError, match="unknown option expert_slots; the options are batching, "):
        build(mixtral_pair, expert_slots=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 5}, "model must be a directory or hub id, not 5"),
        ({"model": ["a"]}, "model must be a directory or hub id"),
        ({"model": "m", "draft": 5}, "draft must be a directory, hub id or name, not 5"),
        ({"prefetch": None}, "prefetch must be one of .*, not 'None'"),
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens must be a whole number or auto, not 'many'"),
        ({"dtype": torch.float32}, "dtype must be one of .*, not 'torch.float32'"),
        ({"max_model_len": "long"}, "max_model_len must be a whole number, not 'long'"),
        ({"expert_memory": [1]}, "is not a size"),
        ({"pin_memory": "yes"}, "pin_memory must be true or false, not 'yes'"),
        ({"generation_config": "vllm"}, "generation_config must be one of auto, none, not 'vllm'"),
    ],
)
def test_options_of_wrong_types_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        LLM(**options)
    assert "\n" not in str(caught.value)


def test_the_signature_lists_every_option_with_its_default() -> None:
    """So that editors complete and check them. The defaults are those of EngineConfig."""
    parameters = inspect.signature(LLM).parameters.values()
    signature = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "store"}
    assert list(signature) == [field.name for field in fields(EngineConfig)]  # type: ignore[arg-type]
    assert signature.pop("model") is None, "the pair that ships"
    chosen = {name for name in _CHOSEN if signature[name] is None}
    given = {name: value for name, value in signature.items() if name not in chosen}
    assert EngineConfig.make(model="m", **given) == EngineConfig(model="m")
    assert all(p.annotation not in (p.empty, "Any") for p in parameters)


# ---- statistics


@pytest.mark.parametrize("prefetch", ["on-demand", "draft-gate"])
@pytest.mark.parametrize("draft", ["good", "random", None])
def test_counters_add_up(mixtral_pair: Pair, draft: str | None, prefetch: str) -> None:
    with build(mixtral_pair, draft, prefetch=prefetch, expert_memory=memory_for(4)) as llm:
        blob = llm.engine.spec.layout.nbytes
        totals = llm.engine.counters.copy()
        for count in (1, 12):
            completion = llm.generate(PROMPT, replace(TEN, max_tokens=count))[0]
            stats, counters = completion.stats, completion.stats.counters
            assert completion.usage == {
                "prompt_tokens": len(PROMPT),
                "completion_tokens": count,
                "total_tokens": len(PROMPT) + count,
            }
            assert stats.output_tokens == count == counters.tokens
            assert counters.tokens == counters.steps + counters.accepted
            assert counters.accepted <= counters.drafted
            assert sum(counters.drafted_at) == counters.drafted
            assert sum(counters.accepted_at) == counters.accepted
            assert counters.drafted == 0 or draft is not None
            assert counters.asked == counters.hits + counters.late + counters.demand_loads
            assert counters.asked >= counters.steps * LAYERS * 2
            assert counters.demand_bytes == counters.demand_loads * blob
            assert counters.issued_bytes == counters.prefetch_loads * blob
            spent = counters.prefetches_resident + counters.prefetches_stale + counters.prefetches_over_budget
            assert counters.prefetches_requested >= counters.prefetch_loads + spent
            assert stats.peak_slots <= stats.slots == 4
            assert 0 <= stats.ttft_seconds <= stats.latency_seconds
            assert counters.draft_seconds + counters.verify_seconds <= stats.latency_seconds
            assert 0 <= counters.stall_seconds <= counters.verify_seconds
            assert (stats.tpot_seconds is None) == (count == 1)
        whole = llm.engine.counters.minus(totals)
        assert whole.tokens == 13
        assert whole.issued_bytes == whole.used_bytes + whole.wasted_bytes + whole.failed_bytes + whole.held_bytes
        assert 0 <= whole.held_bytes <= 4 * blob
        assert whole.failed_bytes == 0
        used = "on-demand" if draft is None and prefetch == "draft-gate" else prefetch
        assert (whole.prefetches_requested > 0) == (used != "on-demand")
        assert whole.prefetch_loads <= whole.prefetches_requested
        assert stats.prefetch == used
        assert stats.cutoff_layers == (LAYERS if used == "draft-gate" else None)
        assert stats.draft_tokens == (3 if draft else 0)
        assert llm.engine.experts.pool.peak_slots <= 4


def test_completion_converts_to_json(llm: LLM) -> None:
    completion = llm.generate(PROMPT, TEN)[0]
    data = json.loads(json.dumps(completion.to_dict()))
    assert data["text"] == completion.text
    assert data["usage"] == completion.usage
    assert data["finish_reason"] == "length"
    assert data["stats"]["lossless"] is True
    assert data["stats"]["steps"] == completion.stats.counters.steps
    assert data["stats"]["loads"] == completion.stats.counters.loads


def test_statistics_of_a_completion_do_not_change_later(llm: LLM) -> None:
    stream = llm.stream(PROMPT, TEN)
    first = stream.run()
    steps = first.stats.counters.steps
    llm.generate(PROMPT, TEN)
    assert first.stats.counters.steps == steps
    assert llm.generate(PROMPT, TEN)[0].stats.counters.steps == steps


# ---- drafts that differ from the target


def test_a_draft_of_another_width_drafts_but_the_target_predicts_experts(
    tmp_path: Path, mixtral_pair: Pair, expected: list[int]
) -> None:
    draft = save(seeded(mistral, 5, hidden_size=48), tmp_path / "draft", byte_tokenizer())
    options = {"progress": False, "num_speculative_tokens": 3}
    with LLM(str(mixtral_pair.target), str(draft), prefetch="draft-gate", **options) as llm:
        completion = llm.generate(PROMPT, TEN)[0]
        assert completion.token_ids == expected[:10]
        assert completion.stats.counters.drafted > 0
        assert completion.stats.counters.prefetches_requested > 0
        assert completion.stats.prefetch == "next-gate"
        (notice,) = llm.notices
        assert "48 wide and the target 32" in notice
        assert "next-gate is used instead" in notice
    with LLM(str(mixtral_pair.target), str(draft), prefetch="on-demand", **options) as llm:
        assert llm.notices == [], "no policy needs the hidden states"
    with LLM(str(mixtral_pair.target), str(draft), prefetch="auto", **options) as llm:
        (notice,) = llm.notices
        assert "spmoe fit-predictor" in notice
        assert notice.endswith("no expert is predicted from the draft")


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_draft_of_another_depth_predicts_every_layer(
    tmp_path: Path, mixtral_pair: Pair, expected: list[int], depth: int
) -> None:
    draft = save(seeded(mistral, 5, num_hidden_layers=depth), tmp_path / "draft", byte_tokenizer())
    options = {"progress": False, "num_speculative_tokens": 3, "prefetch": "draft-gate", "cutoff": "all"}
    with LLM(str(mixtral_pair.target), str(draft), **options) as llm:
        policy = llm.engine.loop.policy
        assert isinstance(policy, DraftGate)
        original, requested = policy.on_chunk, set()

        def on_chunk(chunk: Any) -> PrefetchRequests:
            prefetches = original(chunk)
            requested.update(prefetches.layers.tolist())
            return prefetches

        policy.on_chunk = on_chunk  # type: ignore[method-assign]
        assert llm.generate(PROMPT, TEN)[0].token_ids == expected[:10]
        assert llm.notices == []
        assert requested == set(range(LAYERS))


def test_a_draft_with_a_shorter_context_stops_drafting_there(
    tmp_path: Path, mixtral_pair: Pair, expected: list[int]
) -> None:
    draft = save(seeded(mistral, 5, max_position_embeddings=len(PROMPT) + 6), tmp_path / "draft", byte_tokenizer())
    with LLM(str(mixtral_pair.target), str(draft), progress=False, num_speculative_tokens=3) as llm:
        completion = llm.generate(PROMPT, replace(TEN, max_tokens=16))[0]
        assert completion.token_ids == expected
        assert 0 < completion.stats.counters.drafted < 12
        assert any(f"draft reads {len(PROMPT) + 6} positions" in notice for notice in llm.notices)
        long = llm.generate("y" * 40, TEN)[0]
        assert len(long.token_ids) == 10
        assert long.stats.counters.drafted == 0
