"""Texts of a trace decoded with any K, with other acceptance and locality, and by the governor."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from traces import make_trace, on_link

from spmoe.config import Size
from spmoe.errors import UsageError
from spmoe.replay.governed import FixedK, Governed, compare, decode_all
from spmoe.replay.replay import ReplayConfig
from spmoe.replay.text import ReplayText, StepTimes, TextDecoder, read_texts
from spmoe.replay.trace import Trace

TIMES = StepTimes(draft_pass=1e-4, layer=5e-4, row=1e-5)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(k=8, steps=40)


@pytest.fixture(scope="module")
def texts(trace: Trace) -> list[ReplayText]:
    return read_texts(trace)


def test_texts_hold_every_accepted_token(trace: Trace, texts: list[ReplayText]) -> None:
    for number, text in enumerate(texts):
        own = (trace.step_sequence == number) & (trace.step_drafted > 0)
        assert len(text.tokens) == (trace.step_accepted[own] + 1).sum()
        assert len(text.rejected) == (trace.step_drafted[own] - trace.step_accepted[own]).sum()
        assert len(text.prompt) == 1


def test_a_step_as_recorded_needs_what_the_recorded_one_did(trace: Trace, texts: list[ReplayText]) -> None:
    """Rows follow the text as far as it was accepted; the rows behind were rejected at the same place."""
    text, token = texts[0], 0
    rows = np.concatenate(([0], np.cumsum(trace.forward_rows)))
    for step in np.flatnonzero((trace.step_sequence == 0) & (trace.step_drafted > 0)):
        accepted, drafted = int(trace.step_accepted[step]), int(trace.step_drafted[step])
        if not accepted or accepted < drafted:  # a draft that was accepted as a whole may go on rightly
            plan = text.plan(token, drafted, TIMES)
            assert plan.accepted == accepted
            assert np.array_equal(plan.forwards[0].routed, trace.routed[rows[step] : rows[step + 1]])
        token += accepted + 1


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_acceptance_is_scaled(texts: list[ReplayText], rate: float) -> None:
    found = [text.scaled(rate, seed=seed).acceptance for text in texts for seed in range(10)]
    assert mean(found) == pytest.approx(rate, abs=0.05)


def test_locality_is_scaled(texts: list[ReplayText]) -> None:
    def shared(text: ReplayText) -> float:
        routed = text.tokens.routed
        return float((routed[1:] == routed[:-1]).all(axis=-1).mean())

    low, same, high = (mean(shared(text.scaled(locality=x)) for text in texts) for x in (-0.9, 0.0, 0.6))
    assert high > same + 0.4
    assert abs(low - same) < 0.1, "tokens of this trace are independent of each other"
    assert shared(texts[0].scaled(locality=1.0)) == 1.0


@pytest.mark.parametrize("k", [0, 1, 3, 8, 12])
def test_any_k_decodes_the_same_number_of_tokens(trace: Trace, texts: list[ReplayText], k: int) -> None:
    (found,) = decode_all(texts[:1], trace.shape, ReplayConfig(), TIMES, FixedK(k), tokens=100)
    assert found.tokens == 100
    assert set(found.lengths[:-1]) <= set(range(k + 1))
    assert max(found.lengths) == k


def test_wrong_drafts_only_cost_time(trace: Trace, texts: list[ReplayText]) -> None:
    wrong = [text.scaled(0.0) for text in texts]
    plain, drafted = (
        decode_all(wrong, trace.shape, ReplayConfig("on-demand"), TIMES, FixedK(k), tokens=60) for k in (0, 4)
    )
    assert all(len(one.lengths) == 60 for one in drafted)
    assert sum(one.seconds for one in drafted) > 1.5 * sum(one.seconds for one in plain)


def test_steps_without_a_draft_prefetch_nothing(trace: Trace, texts: list[ReplayText]) -> None:
    decoder = TextDecoder(trace.shape, ReplayConfig("draft-gate", memory=Size.parse("50%")), TIMES)
    text = replace(texts[0], prompt=[])
    try:
        decoder.decode(text, 40, FixedK(0))
        assert decoder.counters.prefetch_loads == 0
        decoder.decode(text, 40, FixedK(4))
        assert decoder.counters.prefetch_loads > 0
    finally:
        decoder.close()


def test_traces_without_drafts_are_refused(trace: Trace) -> None:
    with pytest.raises(UsageError, match="no drafts"):
        read_texts(make_trace(k=0, steps=8))


@pytest.mark.parametrize(
    ("acceptance", "locality", "slots", "link"),
    [(0.1, 0.0, "50%", 1e9), (0.95, 0.6, "50%", 1e9), (0.9, 0.0, "90%", 1e10), (0.5, -0.5, "25%", 1e9)],
)
def test_the_governor_loses_little_on_scaled_texts(
    trace: Trace, texts: list[ReplayText], acceptance: float, locality: float, slots: str, link: float
) -> None:
    shape = on_link(trace, link_bytes_per_second=link).shape
    scaled = [text.scaled(acceptance, locality, seed) for seed, text in enumerate(texts)]
    found = compare(scaled, shape, ReplayConfig(memory=Size.parse(slots)), TIMES, tokens=192, fixed=(0, 2, 8))
    assert found.of_best(slice(0, 1)) > 0.85
    assert found.of_best(slice(1, None)) > 0.9
    assert found.of_plain(slice(0, 1)) > 0.93
    assert found.of_plain(slice(1, None)) > 0.95


def test_the_governor_chooses_other_lengths_for_other_texts(trace: Trace, texts: list[ReplayText]) -> None:
    config, lengths = ReplayConfig(memory=Size.parse("90%")), []
    for acceptance in (0.0, 1.0):
        scaled = [text.scaled(acceptance, 0.5) for text in texts]
        chooser = Governed(8, trace.shape)
        lengths.append(mean(decode_all(scaled, trace.shape, config, TIMES, chooser, tokens=128)[-1].lengths))
    assert lengths[0] < 0.5 < 4 < lengths[1]
