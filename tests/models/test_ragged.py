"""Forwards over several sequences: every family's logits are those of each sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import longrope, mixtral, qwen3_next, seeded
from spmoe.models import ragged
from spmoe.models.families import families, tiny_config, tiny_model
from spmoe.models.kv import KvState, can_rewind
from spmoe.models.ragged import RaggedPart
from spmoe.models.runner import ModelRunner

# tokens that each of three sequences appends, round by round; the tiny families have sliding windows of 8 positions
ROUNDS = [(11, 1, 5), (1, 4, 2), (3, 1, 1), (1, 9, 1), (2, 1, 6)]
CAPACITY = 32


def runner_of(model: Any) -> ModelRunner:
    found = ModelRunner(model)
    found.try_batching()
    return found


def token_rounds(vocabulary: int) -> Iterator[list[list[int]]]:
    """Yield the new tokens of each sequence, round by round."""
    for number, counts in enumerate(ROUNDS):
        yield [
            [(7 * place + 31 * number + 13 * row + 3) % vocabulary for row in range(count)]
            for place, count in enumerate(counts)
        ]


def new_states(runner: ModelRunner) -> list[KvState]:
    return [runner.new_kv(CAPACITY) for _ in ROUNDS[0]]


def largest_difference(runner: ModelRunner) -> float:
    """Return the largest difference of logits between sequences together and alone, relative to the largest logit."""
    together, alone, found = new_states(runner), new_states(runner), 0.0
    for new in token_rounds(runner.vocab_size):
        parts = [RaggedPart(tokens, kv, len(tokens)) for tokens, kv in zip(new, together, strict=True)]
        results = runner.run_batch(parts)
        for tokens, kv, result in zip(new, alone, results, strict=True):
            expected = runner.forward(tokens, kv, len(tokens))
            assert result.logits.shape == expected.shape
            found = max(found, float((result.logits - expected).abs().max() / expected.abs().max()))
    assert [kv.length for kv in together] == [sum(counts) for counts in zip(*ROUNDS, strict=True)]
    return found


def test_logits_of_every_family_are_those_of_each_sequence_alone() -> None:
    wrong, count = {}, 0
    for name in families():
        if not can_rewind(tiny_config(name)):
            continue
        runner = runner_of(tiny_model(name))
        if not runner.batches:
            continue
        count += 1
        if (difference := largest_difference(runner)) > 1e-4:
            wrong[name] = difference
    assert wrong == {}
    assert count >= 25, "families that can run sequences together"


def test_windows_of_tiny_families_are_crossed() -> None:
    """The rounds above would not test sliding windows if they were longer than the sequences."""
    windows = [tiny_config(name).sliding_window for name in ("gpt_oss", "mimo_v2_flash", "cohere2_moe", "exaone_moe")]
    assert max(windows) < min(sum(counts) for counts in zip(*ROUNDS, strict=True))


@pytest.fixture(scope="module")
def windowed() -> ModelRunner:
    return runner_of(seeded(mixtral, 3, sliding_window=8))


def test_only_the_logits_that_are_asked_for_are_returned(windowed: ModelRunner) -> None:
    new = next(iter(token_rounds(windowed.vocab_size)))
    every, some = (
        windowed.run_batch(
            [RaggedPart(one, kv, count or len(one)) for one, kv, count in zip(new, kvs, counts, strict=True)]
        )
        for kvs, counts in ((new_states(windowed), (0, 0, 0)), (new_states(windowed), (2, 1, 3)))
    )
    for whole, part, count in zip(every, some, (2, 1, 3), strict=True):
        assert part.logits.shape[0] == count
        torch.testing.assert_close(part.logits, whole.logits[-count:], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "dtype", "captures", "together"),
    [
        ("cuda", torch.bfloat16, False, False),
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.float32, False, True),
        ("cpu", torch.bfloat16, False, True),
    ],
)
def test_many_rows_run_together_only_where_results_do_not_depend_on_their_number(
    windowed: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    captures: bool,
    together: bool,
) -> None:
    windowed.try_batching()
    monkeypatch.setattr(type(windowed.model), "device", torch.device(device))
    monkeypatch.setattr(type(windowed.model), "dtype", dtype)
    monkeypatch.setattr(ModelRunner, "captures", captures)
    assert windowed.batches
    assert windowed.reads_together == together
    assert windowed.max_batch_rows == (64 if together else 16)


def test_sequences_rewind_between_rounds(windowed: ModelRunner) -> None:
    """Tokens that were rolled back leave no trace."""
    states, expected = new_states(windowed), new_states(windowed)
    first, second, *_ = token_rounds(windowed.vocab_size)
    for tokens, kv, other in zip(first, states, expected, strict=True):
        windowed.forward(tokens, kv, 1)
        windowed.forward(tokens, other, 1)
    windowed.run_batch([RaggedPart([9, 8, 7], kv, 3) for kv in states])
    for tokens, kv in zip(first, states, strict=True):
        kv.rewind(len(tokens))
    results = windowed.run_batch([RaggedPart(tokens, kv, 1) for tokens, kv in zip(second, states, strict=True)])
    for tokens, other, result in zip(second, expected, results, strict=True):
        torch.testing.assert_close(result.logits, windowed.forward(tokens, other, 1), rtol=0, atol=1e-4)


def test_the_attention_implementation_is_restored(windowed: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    before = windowed.model.config._attn_implementation
    kv = new_states(windowed)[:1]
    windowed.run_batch([RaggedPart([1, 2], one, 1) for one in kv])
    assert windowed.model.config._attn_implementation == before

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("attention failed")

    monkeypatch.setattr(ragged, "_function", fail)
    with pytest.raises(RuntimeError, match="attention failed"):
        windowed.run_batch([RaggedPart([1, 2], one, 1) for one in kv])
    assert windowed.model.config._attn_implementation == before


def mix_masks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every sequence the mask of the first one."""
    of = ragged._RaggedMask.of
    monkeypatch.setattr(ragged._RaggedMask, "of", lambda self, number, forward: of(self, 0, forward))


def mix_keys(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sequences attend to each other's keys."""
    update = ragged._RaggedLayer.update

    def swapped(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        keys, values = update(self, *args, **kwargs)
        return (keys.flip(-2) if isinstance(keys, Tensor) else ragged._Segments(reversed(keys))), values

    monkeypatch.setattr(ragged._RaggedLayer, "update", swapped)


def mix_rows(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a model that adds the mean of all rows of a forward to each of them."""
    model.model.layers[0].register_forward_pre_hook(lambda layer, args: (args[0] + args[0].mean(1, True), *args[1:]))


@pytest.mark.parametrize("mix", [mix_masks, mix_keys, mix_rows])
def test_a_model_that_mixes_sequences_is_detected(
    monkeypatch: pytest.MonkeyPatch, mix: Callable[[Any, pytest.MonkeyPatch], None]
) -> None:
    model = seeded(mixtral, 3, sliding_window=4)
    assert runner_of(model).batches
    mix(model, monkeypatch)
    found = runner_of(model)
    assert not found.batches
    assert found.batching_failure


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (qwen3_next, {}, "the model keeps other state than keys and values"),
        (mixtral, {"rope_parameters": longrope(16)}, "positions depend on the longest sequence of a forward"),
        (
            mixtral,
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            "positions depend on the longest sequence of a forward",
        ),
    ],
    ids=["recurrent", "longrope", "dynamic"],
)
def test_models_that_cannot_share_a_forward_say_why(make: Callable[..., Any], changes: Any, message: str) -> None:
    found = runner_of(seeded(make, 5, **changes))
    assert not found.batches
    assert found.batching_failure == message
