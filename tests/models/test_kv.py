"""KV states: rolled back, they are as if the forgotten tokens had never been."""

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


def network_of(directory: Path) -> ModelRunner:
    return ModelRunner(load_dense(Checkpoint.find(str(directory)), torch.float32))


@pytest.fixture(scope="module", params=["mistral", "qwen3", "windowed"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    pair: Pair = request.getfixturevalue(
        {"mistral": "mixtral_pair", "qwen3": "qwen_pair", "windowed": "windowed_pair"}[request.param]
    )
    return network_of(pair.good)


def run(runner: ModelRunner, kv: KvState, *chunks: list[int]) -> torch.Tensor:
    """Logits of the last chunk."""
    for chunk in chunks:
        logits = runner.forward(chunk, kv, num_logits=len(chunk))
    return logits


@pytest.mark.parametrize("keep", [1, 4, len(PROMPT)])
def test_after_a_rewind_logits_are_those_of_a_fresh_run(runner: ModelRunner, keep: int) -> None:
    kv, fresh = runner.new_kv(CAPACITY), runner.new_kv(CAPACITY)
    run(runner, kv, PROMPT[:keep], [*PROMPT[keep:], *WRONG])
    kv.rewind(keep)
    assert kv.length == keep
    assert torch.equal(run(runner, kv, RIGHT), run(runner, fresh, PROMPT[:keep], RIGHT))
    assert kv.length == keep + len(RIGHT)


def test_many_rewinds_one_after_the_other(runner: ModelRunner) -> None:
    """Far past the window, as speculation does it: append a draft, keep some of it, go on."""
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


def test_what_is_forgotten_matters(runner: ModelRunner) -> None:
    """Without the rewind the logits are others, so the tests above can fail."""
    kv = runner.new_kv(CAPACITY)
    kept = run(runner, kv, PROMPT, WRONG, RIGHT)
    fresh = run(runner, runner.new_kv(CAPACITY), PROMPT, RIGHT)
    assert not torch.allclose(kept, fresh, atol=1e-2)


def test_chunks_make_no_difference(runner: ModelRunner) -> None:
    whole = run(runner, runner.new_kv(CAPACITY), PROMPT)
    kv = runner.new_kv(CAPACITY)
    parts = torch.cat([run(runner, kv, PROMPT[start : start + 3]) for start in range(0, len(PROMPT), 3)])
    assert torch.allclose(parts, whole, atol=1e-5, rtol=1e-5)


def test_rewinding_to_what_is_held_or_beyond_changes_nothing(runner: ModelRunner) -> None:
    kv, fresh = runner.new_kv(CAPACITY), runner.new_kv(CAPACITY)
    run(runner, kv, PROMPT)
    for length in (len(PROMPT), len(PROMPT) + 5):
        kv.rewind(length)
        assert kv.length == len(PROMPT)
    assert torch.equal(run(runner, kv, RIGHT), run(runner, fresh, PROMPT, RIGHT))


def test_rewinding_to_nothing_starts_over(runner: ModelRunner) -> None:
    kv, fresh = runner.new_kv(CAPACITY), runner.new_kv(CAPACITY)
    run(runner, kv, WRONG, PROMPT)
    kv.rewind(0)
    assert torch.equal(run(runner, kv, PROMPT), run(runner, fresh, PROMPT))


def test_a_window_is_a_window(windowed_pair: Pair) -> None:
    """Tokens out of every layer's sight do not count: three layers of eight tokens see the last 22 at most."""
    runner = network_of(windowed_pair.good)
    tail = [(17 * i + 2) % 251 for i in range(22)]
    logits = [run(runner, runner.new_kv(CAPACITY), [*head, *tail])[-1] for head in ([1, 2, 3], [77, 88, 99])]
    assert torch.allclose(*logits, atol=1e-5)
    near = run(runner, runner.new_kv(CAPACITY), [1, 2, 3, *tail[:-8], 0, *tail[-7:]])[-1]
    assert not torch.allclose(near, logits[0], atol=1e-2)


# ---- capacity


def test_a_state_holds_what_was_asked_for_and_no_more(runner: ModelRunner) -> None:
    exact, roomy = runner.new_kv(len(PROMPT)), runner.new_kv(CAPACITY)
    assert torch.equal(run(runner, exact, PROMPT), run(runner, roomy, PROMPT))
    with pytest.raises(ValueError, match="10 positions"):
        run(runner, exact, [1])
    with pytest.raises(ValueError, match="12 positions"):
        run(runner, runner.new_kv(12), PROMPT, WRONG)


def test_nothing_is_allocated_as_it_fills(runner: ModelRunner) -> None:
    kv = runner.new_kv(CAPACITY)
    run(runner, kv, PROMPT)
    places = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in kv.cache.layers]
    run(runner, kv, *([token] for token in WRONG))
    kv.rewind(2)
    run(runner, kv, RIGHT)
    assert places == [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in kv.cache.layers]
    assert len(places) == runner.depth_count
    heads, size = runner.model.config.num_key_value_heads, runner.model.config.head_dim
    assert kv.bytes_per_token == runner.depth_count * 2 * heads * size * 4


# ---- states that are not of positions alone


def test_a_recurrent_state_goes_back_to_its_mark(recurrent_target: Path) -> None:
    runner = network_of(recurrent_target)
    kv, fresh = runner.new_kv(CAPACITY), runner.new_kv(CAPACITY)
    run(runner, kv, PROMPT)
    kv.snapshot()
    run(runner, kv, WRONG)
    kv.rewind(len(PROMPT) + 1)
    assert kv.length == len(PROMPT), "the mark, before what was asked for"
    assert torch.equal(run(runner, kv, RIGHT), run(runner, fresh, PROMPT, RIGHT))
    with pytest.raises(ValueError, match="cannot be rolled back"):
        kv.rewind(len(PROMPT) + 1)  # a mark serves once


def test_a_model_that_ignores_its_state_is_found_out(recurrent_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a forward over several tokens with one forward per token."""
    model = load_dense(Checkpoint.find(str(recurrent_target)), torch.float32)
    assert inspect_model(model).resumes
    sound = model.forward

    def forward(input_ids: torch.Tensor, past_key_values: Any, **options: Any) -> Any:
        if input_ids.shape[1] > 1 and past_key_values.get_seq_length() > 0:
            past_key_values = KvState(model.config, CAPACITY).cache
        return sound(input_ids=input_ids, past_key_values=past_key_values, **options)

    monkeypatch.setattr(model, "forward", forward)
    assert not inspect_model(model).resumes


def test_a_recurrent_state_without_a_mark_refuses_to_be_rolled_back(recurrent_target: Path) -> None:
    config: Any = Checkpoint.find(str(recurrent_target)).config
    assert not can_rewind(config)
    kv = KvState(config, CAPACITY)
    assert not kv.can_rewind
    kv.length = 5
    kv.rewind(5)
    with pytest.raises(ValueError, match="cannot be rolled back"):
        kv.rewind(4)
    assert kv.length == 5


def test_attention_states_can_be_rolled_back(mixtral_pair: Pair, windowed_pair: Pair, llama_draft: Path) -> None:
    for directory in (mixtral_pair.target, mixtral_pair.good, windowed_pair.target, windowed_pair.good, llama_draft):
        assert can_rewind(Checkpoint.find(str(directory)).config)
