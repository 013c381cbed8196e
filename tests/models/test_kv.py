"""KV caches: after a rollback, results are as if the removed tokens had never been read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import Pair
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.inspection import inspect_model
from spmoe.models.kv import KvState, can_rewind
from spmoe.models.load import load_dense
from spmoe.models.runner import ModelRunner

PROMPT = [(31 * i + 5) % 251 for i in range(10)]
WRONG = [200, 3, 77]
RIGHT = [9, 141, 60, 18]
CAPACITY = 40


def runner_of(directory: Path) -> ModelRunner:
    return ModelRunner(load_dense(Checkpoint.find(str(directory)), torch.float32))


@pytest.fixture(scope="module", params=["mistral", "qwen3", "windowed"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    pair: Pair = request.getfixturevalue(
        {"mistral": "mixtral_pair", "qwen3": "qwen_pair", "windowed": "windowed_pair"}[request.param]
    )
    return runner_of(pair.good)


def run(runner: ModelRunner, kv: KvState, *chunks: list[int]) -> torch.Tensor:
    """Return the logits of the last chunk."""
    for chunk in chunks:
        logits = runner.forward(chunk, kv, num_logits=len(chunk))
    return logits


@pytest.mark.parametrize("keep", [1, 4, len(PROMPT)])
def test_logits_after_rewind_equal_those_of_a_new_cache(runner: ModelRunner, keep: int) -> None:
    kv, fresh = runner.new_kv(CAPACITY), runner.new_kv(CAPACITY)
    run(runner, kv, PROMPT[:keep], [*PROMPT[keep:], *WRONG])
    kv.rewind(keep)
    assert kv.length == keep
    assert torch.equal(run(runner, kv, RIGHT), run(runner, fresh, PROMPT[:keep], RIGHT))
    assert kv.length == keep + len(RIGHT)


def test_repeated_rewinds(runner: ModelRunner) -> None:
    """Append a draft and keep a part of it, as speculative decoding does, until far past the sliding window."""
    kv, tokens = runner.new_kv(CAPACITY), list(PROMPT)
    run(runner, kv, tokens)
    for step in range(6):
        draft = [(step * 50 + i * 7) % 251 for i in range(4)]
        run(runner, kv, draft)
        tokens += draft[: step % 4]
        kv.rewind(len(tokens))
    logits = run(runner, kv, RIGHT)
    whole = run(runner, runner.new_kv(CAPACITY), [*tokens, *RIGHT])[-len(RIGHT) :]
    assert torch.allclose(logits, whole, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits.argmax(dim=-1), whole.argmax(dim=-1))


def test_logits_differ_without_rewind(runner: ModelRunner) -> None:
    """Otherwise the tests above could not fail."""
    kv = runner.new_kv(CAPACITY)
    kept = run(runner, kv, PROMPT, WRONG, RIGHT)
    fresh = run(runner, runner.new_kv(CAPACITY), PROMPT, RIGHT)
    assert not torch.allclose(kept, fresh, atol=1e-2)


def test_reading_in_chunks_gives_equal_logits(runner: ModelRunner) -> None:
    whole = run(runner, runner.new_kv(CAPACITY), PROMPT)
    kv = runner.new_kv(CAPACITY)
    parts = torch.cat([run(runner, kv, PROMPT[start : start + 3]) for start in range(0, len(PROMPT), 3)])
    assert torch.allclose(parts, whole, atol=1e-5, rtol=1e-5)


def test_rewind_to_the_present_length_or_beyond_changes_nothing(runner: ModelRunner) -> None:
    kv, fresh = runner.new_kv(CAPACITY), runner.new_kv(CAPACITY)
    run(runner, kv, PROMPT)
    for length in (len(PROMPT), len(PROMPT) + 5):
        kv.rewind(length)
        assert kv.length == len(PROMPT)
    assert torch.equal(run(runner, kv, RIGHT), run(runner, fresh, PROMPT, RIGHT))


def test_rewind_to_zero_empties_the_cache(runner: ModelRunner) -> None:
    kv, fresh = runner.new_kv(CAPACITY), runner.new_kv(CAPACITY)
    run(runner, kv, WRONG, PROMPT)
    kv.rewind(0)
    assert torch.equal(run(runner, kv, PROMPT), run(runner, fresh, PROMPT))


def test_tokens_outside_the_sliding_window_are_ignored(windowed_pair: Pair) -> None:
    """Three layers with a window of eight tokens depend on the last 22 tokens at most."""
    runner = runner_of(windowed_pair.good)
    tail = [(17 * i + 2) % 251 for i in range(22)]
    logits = [run(runner, runner.new_kv(CAPACITY), [*head, *tail])[-1] for head in ([1, 2, 3], [77, 88, 99])]
    assert torch.allclose(*logits, atol=1e-5)
    near = run(runner, runner.new_kv(CAPACITY), [1, 2, 3, *tail[:-8], 0, *tail[-7:]])[-1]
    assert not torch.allclose(near, logits[0], atol=1e-2)


# ---- capacity


def test_capacity_is_exact(runner: ModelRunner) -> None:
    exact, larger = runner.new_kv(len(PROMPT)), runner.new_kv(CAPACITY)
    assert torch.equal(run(runner, exact, PROMPT), run(runner, larger, PROMPT))
    with pytest.raises(ValueError, match="10 positions"):
        run(runner, exact, [1])
    with pytest.raises(ValueError, match="12 positions"):
        run(runner, runner.new_kv(12), PROMPT, WRONG)


def test_tensors_are_not_reallocated(runner: ModelRunner) -> None:
    kv = runner.new_kv(CAPACITY)
    run(runner, kv, PROMPT)
    addresses = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in kv.cache.layers]
    run(runner, kv, *([token] for token in WRONG))
    kv.rewind(2)
    run(runner, kv, RIGHT)
    assert addresses == [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in kv.cache.layers]
    assert len(addresses) == runner.depth_count
    heads, size = runner.model.config.num_key_value_heads, runner.model.config.head_dim
    assert kv.bytes_per_token == runner.depth_count * 2 * heads * size * 4


# ---- recurrent states


def test_recurrent_state_is_restored_from_its_snapshot(recurrent_target: Path) -> None:
    runner = runner_of(recurrent_target)
    kv, fresh = runner.new_kv(CAPACITY), runner.new_kv(CAPACITY)
    run(runner, kv, PROMPT)
    kv.snapshot()
    run(runner, kv, WRONG)
    kv.rewind(len(PROMPT) + 1)
    assert kv.length == len(PROMPT), "the length of the snapshot, which is shorter than requested"
    assert torch.equal(run(runner, kv, RIGHT), run(runner, fresh, PROMPT, RIGHT))
    with pytest.raises(ValueError, match="cannot be rolled back"):
        kv.rewind(len(PROMPT) + 1)  # a snapshot is used once


def test_model_that_ignores_its_state_is_detected(recurrent_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inspection compares a forward over several tokens with one forward per token."""
    model = load_dense(Checkpoint.find(str(recurrent_target)), torch.float32)
    assert inspect_model(model).resumes
    original = model.forward

    def forward(input_ids: torch.Tensor, past_key_values: Any, **options: Any) -> Any:
        if input_ids.shape[1] > 1 and past_key_values.get_seq_length() > 0:
            past_key_values = KvState(model.config, CAPACITY).cache
        return original(input_ids=input_ids, past_key_values=past_key_values, **options)

    monkeypatch.setattr(model, "forward", forward)
    assert not inspect_model(model).resumes


def test_recurrent_state_without_a_snapshot_cannot_be_rolled_back(recurrent_target: Path) -> None:
    config: Any = Checkpoint.find(str(recurrent_target)).config
    assert not can_rewind(config)
    kv = KvState(config, CAPACITY)
    assert not kv.can_rewind
    kv.length = 5
    kv.rewind(5)
    with pytest.raises(ValueError, match="cannot be rolled back"):
        kv.rewind(4)
    assert kv.length == 5


def test_attention_caches_can_be_rolled_back(mixtral_pair: Pair, windowed_pair: Pair, llama_draft: Path) -> None:
    for directory in (mixtral_pair.target, mixtral_pair.good, windowed_pair.target, windowed_pair.good, llama_draft):
        assert can_rewind(Checkpoint.find(str(directory)).config)
