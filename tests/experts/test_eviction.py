"""The eviction contract, for every policy; the scores of each; and why draft-informed beats LRU on a cyclic scan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from experts_helpers import BLOB, MarkedSlots, requests_for
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.errors import UsageError
from spmoe.experts.cache import ExpertCache
from spmoe.experts.eviction import Eviction, make_eviction
from spmoe.experts.eviction.activation import ActivationAware
from spmoe.experts.eviction.draft_informed import DraftInformed
from spmoe.experts.eviction.lfru import FrequencyOverRecency
from spmoe.experts.eviction.lfu import LeastFrequentlyUsed
from spmoe.experts.eviction.lru import LeastRecentlyUsed
from spmoe.experts.experts import Experts
from spmoe.experts.link import VirtualTransfer
from spmoe.observe.clock import VirtualClock
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests

EXPERTS = (3, 1, 4)
KEYS = [ExpertKey(layer, e) for layer, count in enumerate(EXPERTS) for e in range(count)]
INFINITY = float("inf")

modest = settings(max_examples=150, deadline=None, derandomize=True)
every_policy = pytest.mark.parametrize("name", EVICTION_POLICIES.names())
events = st.one_of(
    st.tuples(st.sampled_from(["insert", "remove", "use", "prompt"]), st.sampled_from(KEYS)),
    st.tuples(st.just("prefetch"), st.tuples(st.sampled_from(KEYS), st.sampled_from([0.0, 0.2, 1.0]))),
    st.tuples(st.just("layer"), st.integers(0, len(EXPERTS) - 1)),
    st.tuples(st.just("step"), st.none()),
)
histories = st.lists(events, max_size=40)


def held(keys: Iterable[ExpertKey] = (), shape: tuple[int, int] = (len(EXPERTS), max(EXPERTS))) -> np.ndarray:
    """Make the mask of experts that must not be evicted."""
    mask = np.zeros(shape, dtype=bool)
    for key in keys:
        mask[key] = True
    return mask


def play(eviction: Eviction, history: list[tuple[str, object]]) -> set[ExpertKey]:
    """Play a history, without impossible events; return the experts that are resident at its end."""
    resident: set[ExpertKey] = set()
    for event, value in history:
        match event:
            case "insert" if value not in resident:
                resident.add(value)
                eviction.on_insert(value)
            case "remove" if value in resident:
                resident.remove(value)
                eviction.on_remove(value)
            case "use" if value in resident:
                eviction.on_use(value.layer, [value.expert])
            case "prompt":
                eviction.on_prompt(value.layer, [value.expert], [0.4])
            case "prefetch":
                key, score = value
                eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(key, score, key.layer)]))
            case "layer":
                eviction.on_layer(value)
            case "step":
                eviction.begin_step()
    return resident


def test_unknown_name_is_refused() -> None:
    with pytest.raises(
        UsageError, match="unknown eviction policy 'magic'; choose one of activation, adaptive, draft-inf"
    ):
        make_eviction("magic", EXPERTS)


@every_policy
@modest
@given(history=histories, n=st.integers(0, 9), pinned=st.sets(st.sampled_from(KEYS)))
def test_victims_are_exactly_n_or_none_and_never_held(
    name: str, history: list[tuple[str, object]], n: int, pinned: set[ExpertKey]
) -> None:
    eviction = make_eviction(name, EXPERTS)
    resident = play(eviction, history)
    victims = eviction.victims(n, held(pinned), INFINITY)
    if len(resident - pinned) < n:
        assert victims is None
    else:
        assert victims is not None
        assert len(victims) == len(set(victims)) == n
        assert set(victims) <= resident - pinned
        assert all(type(key) is ExpertKey and type(key.layer) is type(key.expert) is int for key in victims)


@every_policy
@modest
@given(
    history=histories,
    questions=st.lists(st.tuples(st.integers(0, 9), st.sets(st.sampled_from(KEYS)), st.floats(0, 1)), min_size=1),
)
def test_choosing_victims_changes_nothing(
    name: str, history: list[tuple[str, object]], questions: list[tuple[int, set[ExpertKey], float]]
) -> None:
    """Compare two policies with the same history; only one of them chose victims in between."""
    asked, plain = make_eviction(name, EXPERTS), make_eviction(name, EXPERTS)
    resident = play(asked, history)
    assert play(plain, history) == resident
    for n, pinned, below in questions:
        asked.victims(n, held(pinned), below)
        asked.victims(n, held(pinned), INFINITY)
        asked.victims(len(resident) + 1, held(pinned), INFINITY)
    for n in range(len(resident) + 1):
        for below in (0.0, 0.3, INFINITY):
            assert asked.victims(n, held(), below) == plain.victims(n, held(), below)
    assert [asked.score(key) for key in KEYS] == [plain.score(key) for key in KEYS]


@modest
@given(history=histories)
def test_scores_of_draft_informed_are_chances(history: list[tuple[str, object]]) -> None:
    eviction = DraftInformed(EXPERTS, swap_margin=1.0)
    assert eviction.scores_are_chances
    play(eviction, history)
    assert all(0.0 <= eviction.score(key) <= 1.0 for key in KEYS)


@modest
@given(
    history=histories,
    n=st.integers(0, 4),
    pinned=st.sets(st.sampled_from(KEYS)),
    below=st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.9, 1.0]),
)
def test_draft_informed_evicts_the_lowest_scores_below_the_bound(
    history: list[tuple[str, object]], n: int, pinned: set[ExpertKey], below: float
) -> None:
    eviction = DraftInformed(EXPERTS, swap_margin=1.0)  # so that `score` is the score of a resident
    free = play(eviction, history) - pinned
    cheap = [key for key in free if eviction.score(key) < below]
    victims = eviction.victims(n, held(pinned), below)
    if len(cheap) < n:
        assert victims is None
    else:
        assert victims is not None
        assert [eviction.score(key) for key in victims] == sorted(eviction.score(key) for key in free)[:n]


# ---- least recently used


def lru(*resident: tuple[int, int]) -> LeastRecentlyUsed:
    eviction = LeastRecentlyUsed((4, 4, 4))
    for key in resident:
        eviction.on_insert(ExpertKey(*key))
    return eviction


def order(eviction: Eviction, below: float = INFINITY) -> list[tuple[int, int]]:
    """Return resident experts in the order of their eviction."""
    found: list[ExpertKey] = []
    while (victims := eviction.victims(len(found) + 1, np.zeros(eviction.shape, dtype=bool), below)) is not None:
        found = victims
    return [tuple(key) for key in found]


def test_lru_evicts_least_recently_used_first() -> None:
    eviction = lru((0, 0), (0, 1), (0, 2))
    assert order(eviction) == [(0, 0), (0, 1), (0, 2)]
    eviction.on_use(0, [0])
    assert order(eviction) == [(0, 1), (0, 2), (0, 0)]
    eviction.on_remove(ExpertKey(0, 2))
    assert order(eviction) == [(0, 1), (0, 0)]
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(0, 1), 1.0, 0)]))
    assert order(eviction) == [(0, 0), (0, 1)]


def test_lru_prefetches_do_not_evict_each_other() -> None:
    eviction = lru((0, 0), (1, 0), (2, 0))
    bound = eviction.score(ExpertKey(2, 1))
    assert bound < INFINITY
    for key in (ExpertKey(0, 0), ExpertKey(1, 0)):
        eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(key, 1.0, key.layer)]))
    assert order(eviction, bound) == [(2, 0)]
    assert set(order(eviction)) == {(0, 0), (1, 0), (2, 0)}, "a demand load evicts any"
    eviction.on_layer(1)
    assert order(eviction, bound) == [(2, 0), (0, 0)], "layer 0 has run"
    eviction.on_use(1, [0])
    assert order(eviction, bound) == [(2, 0), (0, 0), (1, 0)], "it was used"
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(2, 0), 1.0, 2)]))
    assert order(eviction, bound) == [(0, 0), (1, 0)]
    eviction.begin_step()
    assert order(eviction, bound) == [(0, 0), (1, 0), (2, 0)], "the protection ends with the step"


# ---- draft-informed


def draft_informed(*resident: tuple[int, int], experts: Sequence[int] = (4, 4, 4, 4)) -> DraftInformed:
    eviction = DraftInformed(experts, decay=0.8, discount=0.3)
    for key in resident:
        eviction.on_insert(ExpertKey(*key))
    return eviction


def test_predicted_expert_is_kept_longer_than_a_frequent_one() -> None:
    frequent, predicted = ExpertKey(2, 0), ExpertKey(2, 1)
    eviction = draft_informed(frequent, predicted)
    for _ in range(2):
        eviction.on_use(frequent.layer, [frequent.expert])
        eviction.begin_step()
    assert order(eviction) == [predicted, frequent]
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(predicted, 0.3, 2)]))
    assert order(eviction) == [frequent, predicted]
    eviction.on_layer(1)
    assert order(eviction) == [frequent, predicted], "its layer is next"
    eviction.on_layer(2)
    assert order(eviction) == [predicted, frequent], (
        "experts that a running layer uses are held; for the others the frequency counts"
    )
    eviction.begin_step()
    assert order(eviction) == [predicted, frequent], "a prediction is valid for one step"


@pytest.mark.parametrize("right", [True, False])
def test_predictions_count_as_far_as_they_were_right(right: bool) -> None:
    constant, predicted, third = ExpertKey(2, 0), ExpertKey(2, 1), ExpertKey(2, 2)
    eviction = draft_informed(constant, predicted)
    for _ in range(40):
        eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(constant if right else third, 1.0, 2)]))
        eviction.on_use(constant.layer, [constant.expert])
        eviction.begin_step()
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(predicted, 1.0, 2)]))
    expected = [constant, predicted] if right else [predicted, constant]
    assert order(eviction) == expected, "a prediction against an expert that every step uses"


def test_score_of_an_unpredicted_expert_falls_with_every_draft_pass() -> None:
    frequent = ExpertKey(2, 0)
    eviction = draft_informed(frequent)
    scores = []
    for step in range(30):
        eviction.begin_step()
        scores = [eviction.score(frequent)]
        for _ in range(4):
            eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(2, 3), 1.0, 2)]))
            scores.append(eviction.score(frequent))
        eviction.on_use(2, [3])
        if step % 2:
            eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(frequent, 1.0, 2)]))
            eviction.on_use(frequent.layer, [frequent.expert])
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 5, "each of four passes that do not predict it lowers its score"


def test_predictions_do_not_change_other_layers() -> None:
    eviction = draft_informed((1, 0), (2, 0))
    eviction.on_use(2, [0])
    eviction.begin_step()
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 3), 1.0, 1)]))
    assert order(eviction) == [(1, 0), (2, 0)]


def test_keeps_the_expert_with_the_higher_prediction_score() -> None:
    eviction = draft_informed((1, 0), (1, 1), (1, 2))
    for expert, score in ((1, 0.9), (0, 0.6), (0, 0.1), (2, 0.5)):
        eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, expert), score, 1)]))
    assert order(eviction) == [(1, 2), (1, 0), (1, 1)], "the highest score counts"
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 0), 1.0, 1)]))
    assert order(eviction) == [(1, 2), (1, 1), (1, 0)]


def test_predictions_are_forgotten_with_the_step() -> None:
    frequent, predicted, other = ExpertKey(2, 0), ExpertKey(2, 1), ExpertKey(2, 2)
    eviction = draft_informed(frequent, predicted)
    eviction.on_use(frequent.layer, [frequent.expert])
    eviction.begin_step()
    before = eviction.score(frequent)
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(predicted, 1.0, 2)]))
    assert eviction.score(frequent) < before, "its layer was predicted, without it"
    eviction.begin_step()
    undisturbed = draft_informed(frequent, predicted)
    undisturbed.on_use(frequent.layer, [frequent.expert])
    undisturbed.begin_step()
    undisturbed.begin_step()
    assert eviction.score(frequent) == undisturbed.score(frequent), "only the frequency counts without predictions"
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(other, 1.0, 2)]))
    assert order(eviction) == [predicted, frequent], "the old prediction is void"


def test_frequent_expert_outlives_a_draft_that_does_not_predict_it() -> None:
    """Neither expert is predicted for this step; one of them will be used in one of the next."""
    frequent, rare, constant = ExpertKey(2, 0), ExpertKey(1, 0), ExpertKey(2, 3)
    eviction = DraftInformed([4] * 4)
    for key in (frequent, rare):
        eviction.on_insert(key)
    for step in range(60):
        keys = (constant, frequent) if step % 2 else (constant,)
        eviction.on_prefetches(
            PrefetchRequests.of([PrefetchRequest(key, 1.0, 2) for key in keys])
        )  # predictions are always right
        for key in keys:
            eviction.on_use(key.layer, [key.expert])
        eviction.begin_step()
    eviction.on_use(rare.layer, [rare.expert])
    eviction.begin_step()
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(constant, 1.0, 2)]))
    assert order(eviction) == [rare, frequent]


def test_prompt_sets_the_frequency() -> None:
    often, seldom, never = ExpertKey(1, 0), ExpertKey(1, 1), ExpertKey(1, 2)
    eviction = draft_informed(often, seldom, never)
    for _ in range(3):  # used by earlier requests
        eviction.on_use(1, [never.expert])
        eviction.begin_step()
    for shares in ((0.9, 0.05), (0.7, 0.15)):  # a prompt in two chunks, each of which uses both
        eviction.on_use(1, [often.expert, seldom.expert])
        eviction.on_prompt(1, [often.expert, seldom.expert], shares)
    eviction.begin_step()
    assert order(eviction) == [never, seldom, often]
    share = np.array([0.8, 0.1, 0.0, 0.0])
    frequency = 0.3 * np.array([0, 0, 1 - 0.8**3, 0]) + 0.7 * (1 - (1 - share) ** 4)
    assert eviction._frequency[1] == pytest.approx(frequency)
    eviction.begin_step()
    assert eviction._frequency[1] == pytest.approx(0.8 * frequency), "the prompt counts once"
    assert not eviction._frequency[[0, 2, 3]].any()


def test_frequency_decays_with_every_step() -> None:
    old, new = ExpertKey(1, 0), ExpertKey(1, 1)
    eviction = draft_informed(old, new)
    for _ in range(2):
        eviction.on_use(old.layer, [old.expert])
        eviction.begin_step()
    before = eviction.score(old)
    eviction.begin_step()
    assert 0.5 * before < eviction.score(old) < before
    eviction.on_use(new.layer, [new.expert])
    eviction.begin_step()
    assert eviction.score(old) > eviction.score(new) > 0, "two old uses still count more than one new use"
    for _ in range(2):
        eviction.on_use(new.layer, [new.expert])
        eviction.begin_step()
    assert order(eviction) == [old, new]


def test_two_uses_in_a_step_count_once() -> None:
    eviction = draft_informed((0, 0), (0, 1))
    for _ in range(3):
        eviction.on_use(0, [0])
    eviction.on_use(0, [1])
    eviction.begin_step()
    assert eviction.score(ExpertKey(0, 0)) == eviction.score(ExpertKey(0, 1)) > 0


def test_keeps_experts_of_the_layers_that_run_sooner() -> None:
    eviction = draft_informed((0, 0), (1, 0), (2, 0), (3, 0))
    for layer in range(4):
        eviction.on_use(layer, [0])
    eviction.begin_step()
    assert order(eviction) == [(3, 0), (2, 0), (1, 0), (0, 0)]
    eviction.on_layer(1)
    assert order(eviction) == [(1, 0), (0, 0), (3, 0), (2, 0)], "the running layer runs again after a whole cycle"


def test_equal_scores_evict_least_recently_used_first() -> None:
    eviction = draft_informed((0, 0), (0, 1), (0, 2))
    eviction.on_use(0, [0])
    assert order(eviction) == [(0, 1), (0, 2), (0, 0)]


def test_prefetch_evicts_only_experts_with_clearly_lower_scores() -> None:
    """With all slots taken, a prefetch gets a slot unless the resident expert is predicted too."""
    for predicted_too in (False, True):
        eviction = DraftInformed((4, 4))
        cache = ExpertCache(1, eviction)
        reservation = next(cache.reserve_for_demand([ExpertKey(1, 0)]), None)
        assert reservation is not None
        cache.mark_ready(reservation.entry)
        eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 1), 0.9, 1)]))
        if predicted_too:
            eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 0), 0.8, 1)]))
        reserved = cache.reserve(ExpertKey(1, 1))
        assert (reserved is None) == predicted_too
        assert (cache.get(ExpertKey(1, 0)) is not None) == predicted_too


# ---- by frequency


def run_steps(policy: LeastFrequentlyUsed | FrequencyOverRecency, *steps: Sequence[int]) -> None:
    """Make experts 0, 1 and 2 of layer 0 resident, and run steps that use some of them."""
    for expert in range(3):
        policy.on_insert(ExpertKey(0, expert))
    for used in steps:
        policy.begin_step()
        policy.on_layer(0)
        for expert in used:
            policy.on_use(0, [expert])


def scores_of(policy: LeastFrequentlyUsed | FrequencyOverRecency) -> list[float]:
    return [float(score) for score in policy.scores()[0, :3]]


def test_lfu_scores_by_the_decayed_share_of_steps() -> None:
    policy = LeastFrequentlyUsed((4, 4), decay=0.5)
    run_steps(policy, [0, 1], [0], [2])
    assert scores_of(policy) == pytest.approx([0.375, 0.125, 0.5])
    assert order(policy) == [(0, 1), (0, 0), (0, 2)]
    policy.on_use(0, [2])
    assert scores_of(policy) == pytest.approx([0.375, 0.125, 0.5]), "two uses in a step count once"
    policy.begin_step()
    assert scores_of(policy) == pytest.approx([0.1875, 0.0625, 0.25])


def test_lfru_scores_by_uses_over_steps_since_the_last() -> None:
    policy = FrequencyOverRecency((4, 4))
    run_steps(policy, [0, 1], [0], [0], [2])
    assert scores_of(policy) == pytest.approx([3 / 2, 1 / 4, 1 / 1])
    assert order(policy) == [(0, 1), (0, 2), (0, 0)]
    for _ in range(2):
        policy.begin_step()
    assert scores_of(policy) == pytest.approx([3 / 4, 1 / 6, 1 / 3])


@pytest.mark.parametrize("make", [LeastFrequentlyUsed, FrequencyOverRecency])
def test_counting_policies_keep_predicted_experts_until_their_layer_ran(make: type[LeastFrequentlyUsed]) -> None:
    policy = make((4, 4))
    run_steps(policy, [0, 1], [0])
    bound = policy.score(ExpertKey(1, 0))
    assert bound < INFINITY
    policy.begin_step()
    policy.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(0, 2), 0.1, 0)]))
    assert order(policy, bound) == [(0, 1), (0, 0)]
    assert order(policy) == [(0, 1), (0, 0), (0, 2)], "it is evicted last, but a demand load evicts any"
    policy.on_layer(1)
    assert order(policy, bound) == [(0, 2), (0, 1), (0, 0)], "its layer has run"


# ---- activation-aware


def test_activation_keeps_experts_that_similar_requests_use_next() -> None:
    policy = ActivationAware((4, 4, 4, 4))
    for sequence_id, expert in ((1, 0), (2, 3)):
        for _ in range(3):  # the first step reads the prompt
            policy.begin_step(sequence_id)
            for layer in range(4):
                policy.on_layer(layer)
                policy.on_use(layer, [expert])
    for key in ((1, 0), (1, 3), (3, 0), (3, 3)):
        policy.on_insert(ExpertKey(*key))
    policy.begin_step(3)
    policy.on_layer(0)
    policy.on_use(0, [3])
    assert policy.score(ExpertKey(1, 3)) == pytest.approx(1.0), "its layer is next"
    assert policy.score(ExpertKey(3, 3)) == pytest.approx(0.5), "two of four layers run before"
    assert policy.score(ExpertKey(1, 0)) == 0.0
    assert order(policy) == [(1, 0), (3, 0), (3, 3), (1, 3)]


def test_prefetch_scores_count_without_past_requests() -> None:
    policy = ActivationAware((4, 4))
    policy.begin_step(1)
    policy.on_prefetches(
        PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 0), 0.6, 1), PrefetchRequest(ExpertKey(1, 0), 0.2, 1)])
    )
    assert policy.score(ExpertKey(1, 0)) == pytest.approx(0.6 / 2)
    policy.on_layer(0)
    assert policy.score(ExpertKey(1, 0)) == pytest.approx(0.6)
    policy.on_layer(1)
    assert policy.score(ExpertKey(1, 0)) == 0.0, "its layer runs"
    policy.begin_step(1)
    assert policy.score(ExpertKey(1, 0)) == 0.0


# ---- a cyclic scan, larger than the slots


def loads_per_step(name: str, slots: int, steps: int, *, predicted: bool) -> list[int]:
    """Return the demand loads of each step when four layers use the same two experts in every step."""
    layers, used = 4, (1, 3)
    clock = VirtualClock()
    transfer = VirtualTransfer(clock, BLOB, BLOB)
    policy = make_eviction(name, [4] * layers)
    experts = Experts.build(MarkedSlots(slots), transfer, policy, BLOB, clock, threaded=False)
    counters = experts.ledger.counters
    experts.scheduler.step_budget = 0  # predictions inform eviction only; nothing is prefetched
    loads = []
    for _ in range(steps):
        before = counters.demand_loads
        experts.step.begin()
        if predicted:
            experts.scheduler.request(requests_for(*((layer, e) for layer in range(layers) for e in used)))
        for layer in range(layers):
            for _batch in experts.access.use(layer, used):
                clock.sleep(1.0)
        experts.step.end()
        loads.append(counters.demand_loads - before)
    experts.close()
    assert counters.prefetch_loads == 0
    return loads


@pytest.mark.parametrize("predicted", [False, True])
def test_draft_informed_beats_lru_on_a_cyclic_scan(predicted: bool) -> None:
    slots, steps = 6, 6  # eight experts are used in turn
    assert loads_per_step("lru", slots, steps, predicted=False) == [8] * steps, "each is evicted just before its use"
    loads = loads_per_step("draft-informed", slots, steps, predicted=predicted)
    assert loads[0] == 8
    assert max(loads[1:]) <= 4, "at least half of the slots keep experts that are used again"


def test_every_policy_loads_once_if_all_experts_fit() -> None:
    for name in EVICTION_POLICIES.names():
        assert loads_per_step(name, 8, 4, predicted=True) == [8, 0, 0, 0]


def recomputed_scores(policy: DraftInformed) -> np.ndarray:
    """Compute every score from the documented formula, without intermediate results."""
    layers, frequency, accuracy = np.arange(policy.shape[0]), policy._frequency, policy._accuracy
    over = np.minimum(1.0, policy._passes / policy._usual_passes)[:, None]
    unpredicted = frequency * (1 - over * (1 - accuracy.unpredicted_factor))
    chance = accuracy.chance(policy._times_predicted, policy._best_score)
    predicted = np.where(policy._times_predicted > 0, np.maximum(chance, unpredicted), unpredicted)
    to_come = ((policy._passes > 0) & (layers > policy._position))[:, None]
    nearness = policy._discount ** ((layers - policy._position - 1) % len(layers) / len(layers))
    later = policy._discount * frequency / (1 - (1 - frequency) * policy._discount)
    expected = np.where(to_come, predicted, frequency)
    scores: np.ndarray = (expected + (1 - expected) * later) * nearness[:, None]
    return scores


@modest
@given(histories=st.lists(st.tuples(histories, st.booleans()), min_size=1, max_size=4))
def test_incremental_scores_equal_recomputed_ones(
    histories: list[tuple[list[tuple[str, object]], bool]],
) -> None:
    """Only changed layers are computed again; the result must not depend on when scores are read."""
    policy = DraftInformed(EXPERTS)
    for history, read in histories:
        for event in history:
            play(policy, [("insert", event[1]), event] if event[0] == "use" else [event])
            if read:
                assert np.allclose(policy.scores(), recomputed_scores(policy))
    assert np.allclose(policy.scores(), recomputed_scores(policy))
