"""The eviction contract, for every rule; what each is worth, and what makes the draft-informed one better than LRU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from experts_helpers import BLOB, MarkedSlots
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.config import EVICTION_RULES
from spmoe.experts.activation_aware import ActivationAware
from spmoe.experts.cache import ExpertCache
from spmoe.experts.draft_informed import DraftInformed
from spmoe.experts.eviction import Eviction, make_eviction
from spmoe.experts.frequency import FrequencyOverRecency, LeastFrequentlyUsed
from spmoe.experts.link import VirtualTransfer
from spmoe.experts.lru import LeastRecentlyUsed
from spmoe.experts.source import ExpertSource
from spmoe.observe.clock import VirtualClock
from spmoe.observe.ledger import Counters
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests

EXPERTS = (3, 1, 4)
KEYS = [ExpertKey(layer, e) for layer, count in enumerate(EXPERTS) for e in range(count)]
INFINITY = float("inf")

modest = settings(max_examples=150, deadline=None, derandomize=True)
rules = pytest.mark.parametrize("name", EVICTION_RULES)
events = st.one_of(
    st.tuples(st.sampled_from(["insert", "remove", "use", "read"]), st.sampled_from(KEYS)),
    st.tuples(st.just("wish"), st.tuples(st.sampled_from(KEYS), st.sampled_from([0.0, 0.2, 1.0]))),
    st.tuples(st.just("reach"), st.integers(0, len(EXPERTS) - 1)),
    st.tuples(st.just("step"), st.none()),
)
histories = st.lists(events, max_size=40)


def held(keys: Iterable[ExpertKey] = (), shape: tuple[int, int] = (len(EXPERTS), max(EXPERTS))) -> np.ndarray:
    """What is not to be evicted, as rules take it."""
    mask = np.zeros(shape, dtype=bool)
    for key in keys:
        mask[key] = True
    return mask


def play(eviction: Eviction, history: list[tuple[str, object]]) -> set[ExpertKey]:
    """Tell the rule a history, leaving out what could not have happened; what is resident at its end."""
    resident: set[ExpertKey] = set()
    for event, what in history:
        match event:
            case "insert" if what not in resident:
                resident.add(what)
                eviction.on_insert(what)
            case "remove" if what in resident:
                resident.remove(what)
                eviction.on_remove(what)
            case "use" if what in resident:
                eviction.on_use(what.layer, [what.expert])
            case "read":
                eviction.on_prompt(what.layer, [what.expert], [0.4])
            case "wish":
                key, score = what
                eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(key, score, key.layer)]))
            case "reach":
                eviction.on_layer(what)
            case "step":
                eviction.begin_step()
    return resident


@rules
@modest
@given(history=histories, n=st.integers(0, 9), pinned=st.sets(st.sampled_from(KEYS)))
def test_exactly_n_or_none_and_never_a_pinned_one(
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


@rules
@modest
@given(
    history=histories,
    questions=st.lists(st.tuples(st.integers(0, 9), st.sets(st.sampled_from(KEYS)), st.floats(0, 1)), min_size=1),
)
def test_asking_changes_nothing(
    name: str, history: list[tuple[str, object]], questions: list[tuple[int, set[ExpertKey], float]]
) -> None:
    """Atomic: of two rules with one history, the one that was asked, in vain or not, answers like the other."""
    curious, plain = make_eviction(name, EXPERTS), make_eviction(name, EXPERTS)
    resident = play(curious, history)
    assert play(plain, history) == resident
    for n, pinned, below in questions:
        curious.victims(n, held(pinned), below)
        curious.victims(n, held(pinned), INFINITY)
        curious.victims(len(resident) + 1, held(pinned), INFINITY)
    for n in range(len(resident) + 1):
        for below in (0.0, 0.3, INFINITY):
            assert curious.victims(n, held(), below) == plain.victims(n, held(), below)
    assert [curious.worth(key) for key in KEYS] == [plain.worth(key) for key in KEYS]


@modest
@given(
    history=histories,
    n=st.integers(0, 4),
    pinned=st.sets(st.sampled_from(KEYS)),
    below=st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.9, 1.0]),
)
def test_draft_informed_gives_up_the_least_worth_and_only_below_the_bound(
    history: list[tuple[str, object]], n: int, pinned: set[ExpertKey], below: float
) -> None:
    eviction = DraftInformed(EXPERTS, swap_margin=1.0)  # so that `worth` is what a resident is worth
    free = play(eviction, history) - pinned
    cheap = [key for key in free if eviction.worth(key) < below]
    victims = eviction.victims(n, held(pinned), below)
    if len(cheap) < n:
        assert victims is None
    else:
        assert victims is not None
        assert [eviction.worth(key) for key in victims] == sorted(eviction.worth(key) for key in free)[:n]


# ---- least recently used


def lru(*resident: tuple[int, int]) -> LeastRecentlyUsed:
    eviction = LeastRecentlyUsed((4, 4, 4))
    for key in resident:
        eviction.on_insert(ExpertKey(*key))
    return eviction


def order(eviction: Eviction, below: float = INFINITY) -> list[tuple[int, int]]:
    """Resident keys as they would leave."""
    found: list[ExpertKey] = []
    while (victims := eviction.victims(len(found) + 1, np.zeros(eviction.shape, dtype=bool), below)) is not None:
        found = victims
    return [tuple(key) for key in found]


def test_lru_orders_by_last_use() -> None:
    eviction = lru((0, 0), (0, 1), (0, 2))
    assert order(eviction) == [(0, 0), (0, 1), (0, 2)]
    eviction.on_use(0, [0])
    assert order(eviction) == [(0, 1), (0, 2), (0, 0)]
    eviction.on_remove(ExpertKey(0, 2))
    assert order(eviction) == [(0, 1), (0, 0)]
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(0, 1), 1.0, 0)]))
    assert order(eviction) == [(0, 0), (0, 1)]


def test_lru_wishes_do_not_push_each_other_out() -> None:
    eviction = lru((0, 0), (1, 0), (2, 0))
    bound = eviction.worth(ExpertKey(2, 1))
    assert bound < INFINITY
    for key in (ExpertKey(0, 0), ExpertKey(1, 0)):
        eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(key, 1.0, key.layer)]))
    assert order(eviction, bound) == [(2, 0)]
    assert set(order(eviction)) == {(0, 0), (1, 0), (2, 0)}, "a demand load takes any"
    eviction.on_layer(1)
    assert order(eviction, bound) == [(2, 0), (0, 0)], "the turn of layer 0 is over"
    eviction.on_use(1, [0])
    assert order(eviction, bound) == [(2, 0), (0, 0), (1, 0)], "it has had its turn"
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(2, 0), 1.0, 2)]))
    assert order(eviction, bound) == [(0, 0), (1, 0)]
    eviction.begin_step()
    assert order(eviction, bound) == [(0, 0), (1, 0), (2, 0)], "the promises of a step end with it"


# ---- draft-informed


def informed(*resident: tuple[int, int], experts: Sequence[int] = (4, 4, 4, 4)) -> DraftInformed:
    eviction = DraftInformed(experts, decay=0.8, discount=0.3)
    for key in resident:
        eviction.on_insert(ExpertKey(*key))
    return eviction


def test_a_predicted_expert_outlives_a_habitual_one() -> None:
    habitual, predicted = ExpertKey(2, 0), ExpertKey(2, 1)
    eviction = informed(habitual, predicted)
    for _ in range(2):
        eviction.on_use(habitual.layer, [habitual.expert])
        eviction.begin_step()
    assert order(eviction) == [predicted, habitual]
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(predicted, 0.3, 2)]))
    assert order(eviction) == [habitual, predicted]
    eviction.on_layer(1)
    assert order(eviction) == [habitual, predicted], "its turn is next"
    eviction.on_layer(2)
    assert order(eviction) == [predicted, habitual], "what a running layer uses is pinned; for the rest habit counts"
    eviction.begin_step()
    assert order(eviction) == [predicted, habitual], "a prediction is for one step"


@pytest.mark.parametrize("honest", [True, False])
def test_the_draft_is_believed_as_far_as_its_words_came_true(honest: bool) -> None:
    constant, predicted, third = ExpertKey(2, 0), ExpertKey(2, 1), ExpertKey(2, 2)
    eviction = informed(constant, predicted)
    for _ in range(40):
        eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(constant if honest else third, 1.0, 2)]))
        eviction.on_use(constant.layer, [constant.expert])
        eviction.begin_step()
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(predicted, 1.0, 2)]))
    expected = [constant, predicted] if honest else [predicted, constant]
    assert order(eviction) == expected, "its word against a habit that never failed"


def test_silence_counts_the_more_the_more_of_the_draft_is_over() -> None:
    habitual = ExpertKey(2, 0)
    eviction = informed(habitual)
    worths = []
    for step in range(30):
        eviction.begin_step()
        worths = [eviction.worth(habitual)]
        for _ in range(4):
            eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(2, 3), 1.0, 2)]))
            worths.append(eviction.worth(habitual))
        eviction.on_use(2, [3])
        if step % 2:
            eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(habitual, 1.0, 2)]))
            eviction.on_use(habitual.layer, [habitual.expert])
    assert worths == sorted(worths, reverse=True)
    assert len(set(worths)) == 5, "each of four passes that do not name it takes something from it"


def test_a_layer_the_draft_did_not_speak_of_keeps_its_habits() -> None:
    eviction = informed((1, 0), (2, 0))
    eviction.on_use(2, [0])
    eviction.begin_step()
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 3), 1.0, 1)]))
    assert order(eviction) == [(1, 0), (2, 0)]


def test_the_surer_of_two_predictions_is_kept() -> None:
    eviction = informed((1, 0), (1, 1), (1, 2))
    for expert, score in ((1, 0.9), (0, 0.6), (0, 0.1), (2, 0.5)):
        eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, expert), score, 1)]))
    assert order(eviction) == [(1, 2), (1, 0), (1, 1)], "the highest score counts"
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 0), 1.0, 1)]))
    assert order(eviction) == [(1, 2), (1, 1), (1, 0)]


def test_what_the_draft_said_is_forgotten_with_the_step() -> None:
    habitual, predicted, other = ExpertKey(2, 0), ExpertKey(2, 1), ExpertKey(2, 2)
    eviction = informed(habitual, predicted)
    eviction.on_use(habitual.layer, [habitual.expert])
    eviction.begin_step()
    worth = eviction.worth(habitual)
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(predicted, 1.0, 2)]))
    assert eviction.worth(habitual) < worth, "the draft spoke of its layer, and not of it"
    eviction.begin_step()
    undisturbed = informed(habitual, predicted)
    undisturbed.on_use(habitual.layer, [habitual.expert])
    undisturbed.begin_step()
    undisturbed.begin_step()
    assert eviction.worth(habitual) == undisturbed.worth(habitual), "only habit counts where the draft is silent"
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(other, 1.0, 2)]))
    assert order(eviction) == [predicted, habitual], "an old prediction is none"


def test_what_is_in_daily_use_outlives_a_draft_that_does_not_name_it() -> None:
    """Neither is of use in this step, as far as is known; one of them will be in one of the next."""
    daily, rare, constant = ExpertKey(2, 0), ExpertKey(1, 0), ExpertKey(2, 3)
    eviction = DraftInformed([4] * 4)
    for key in (daily, rare):
        eviction.on_insert(key)
    for step in range(60):
        keys = (constant, daily) if step % 2 else (constant,)
        eviction.on_prefetches(
            PrefetchRequests.of([PrefetchRequest(key, 1.0, 2) for key in keys])
        )  # the draft's words and its silence are true
        for key in keys:
            eviction.on_use(key.layer, [key.expert])
        eviction.begin_step()
    eviction.on_use(rare.layer, [rare.expert])
    eviction.begin_step()
    eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(constant, 1.0, 2)]))
    assert order(eviction) == [rare, daily]


def test_a_prompt_says_how_often_an_expert_is_chosen() -> None:
    often, seldom, never = ExpertKey(1, 0), ExpertKey(1, 1), ExpertKey(1, 2)
    eviction = informed(often, seldom, never)
    for _ in range(3):  # what those before used
        eviction.on_use(1, [never.expert])
        eviction.begin_step()
    for shares in ((0.9, 0.05), (0.7, 0.15)):  # a prompt in two parts, each of which uses both
        eviction.on_use(1, [often.expert, seldom.expert])
        eviction.on_prompt(1, [often.expert, seldom.expert], shares)
    eviction.begin_step()
    assert order(eviction) == [never, seldom, often]
    share = np.array([0.8, 0.1, 0.0, 0.0])
    habit = 0.3 * np.array([0, 0, 1 - 0.8**3, 0]) + 0.7 * (1 - (1 - share) ** 4)
    assert eviction._frequency[1] == pytest.approx(habit)
    eviction.begin_step()
    assert eviction._frequency[1] == pytest.approx(0.8 * habit), "it counts once"
    assert not eviction._frequency[[0, 2, 3]].any()


def test_frequency_decays_with_every_step() -> None:
    old, new = ExpertKey(1, 0), ExpertKey(1, 1)
    eviction = informed(old, new)
    for _ in range(2):
        eviction.on_use(old.layer, [old.expert])
        eviction.begin_step()
    worth = eviction.worth(old)
    eviction.begin_step()
    assert 0.5 * worth < eviction.worth(old) < worth
    eviction.on_use(new.layer, [new.expert])
    eviction.begin_step()
    assert eviction.worth(old) > eviction.worth(new) > 0, "twice, a while ago, still beats once"
    for _ in range(2):
        eviction.on_use(new.layer, [new.expert])
        eviction.begin_step()
    assert order(eviction) == [old, new]


def test_being_used_twice_in_a_step_counts_once() -> None:
    eviction = informed((0, 0), (0, 1))
    for _ in range(3):
        eviction.on_use(0, [0])
    eviction.on_use(0, [1])
    eviction.begin_step()
    assert eviction.worth(ExpertKey(0, 0)) == eviction.worth(ExpertKey(0, 1)) > 0


def test_of_equal_habits_the_one_whose_turn_comes_sooner_is_kept() -> None:
    eviction = informed((0, 0), (1, 0), (2, 0), (3, 0))
    for layer in range(4):
        eviction.on_use(layer, [0])
    eviction.begin_step()
    assert order(eviction) == [(3, 0), (2, 0), (1, 0), (0, 0)]
    eviction.on_layer(1)
    assert order(eviction) == [(1, 0), (0, 0), (3, 0), (2, 0)], "the running layer's own turn is a whole cycle off"


def test_among_equals_the_least_recently_used_goes_first() -> None:
    eviction = informed((0, 0), (0, 1), (0, 2))
    eviction.on_use(0, [0])
    assert order(eviction) == [(0, 1), (0, 2), (0, 0)]


def test_a_wish_takes_only_from_what_is_clearly_worth_less() -> None:
    """With all slots taken, a prefetch request gets one when the draft is against what is there, and none when it is for it."""
    for predicted_too in (False, True):
        eviction = DraftInformed((4, 4))
        cache = ExpertCache(1, eviction)
        reservation = next(cache.reserve_for_demand([ExpertKey(1, 0)]), None)
        assert reservation is not None
        cache.loaded(reservation.entry)
        eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 1), 0.9, 1)]))
        if predicted_too:
            eviction.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 0), 0.8, 1)]))
        wished = cache.reserve(ExpertKey(1, 1))
        assert (wished is None) == predicted_too
        assert (cache.get(ExpertKey(1, 0)) is not None) == predicted_too


# ---- by frequency


def counting(rule: LeastFrequentlyUsed | FrequencyOverRecency, *steps: Sequence[int]) -> None:
    """Experts 0, 1 and 2 of layer 0 are resident; each step uses some of them."""
    for expert in range(3):
        rule.on_insert(ExpertKey(0, expert))
    for used in steps:
        rule.begin_step()
        rule.on_layer(0)
        for expert in used:
            rule.on_use(0, [expert])


def worths(rule: LeastFrequentlyUsed | FrequencyOverRecency) -> list[float]:
    return [float(worth) for worth in rule._all_worths()[0, :3]]


def test_lfu_is_the_decayed_share_of_steps() -> None:
    rule = LeastFrequentlyUsed((4, 4), decay=0.5)
    counting(rule, [0, 1], [0], [2])
    assert worths(rule) == pytest.approx([0.375, 0.125, 0.5])
    assert order(rule) == [(0, 1), (0, 0), (0, 2)]
    rule.on_use(0, [2])
    assert worths(rule) == pytest.approx([0.375, 0.125, 0.5]), "twice in a step counts once"
    rule.begin_step()
    assert worths(rule) == pytest.approx([0.1875, 0.0625, 0.25])


def test_lfru_is_uses_over_the_steps_since_the_last() -> None:
    rule = FrequencyOverRecency((4, 4))
    counting(rule, [0, 1], [0], [0], [2])
    assert worths(rule) == pytest.approx([3 / 2, 1 / 4, 1 / 1])
    assert order(rule) == [(0, 1), (0, 2), (0, 0)]
    for _ in range(2):
        rule.begin_step()
    assert worths(rule) == pytest.approx([3 / 4, 1 / 6, 1 / 3])


@pytest.mark.parametrize("make", [LeastFrequentlyUsed, FrequencyOverRecency])
def test_counting_rules_keep_what_was_wished_for_until_its_turn(make: type[LeastFrequentlyUsed]) -> None:
    rule = make((4, 4))
    counting(rule, [0, 1], [0])
    bound = rule.worth(ExpertKey(1, 0))
    assert bound < INFINITY
    rule.begin_step()
    rule.on_prefetches(PrefetchRequests.of([PrefetchRequest(ExpertKey(0, 2), 0.1, 0)]))
    assert order(rule, bound) == [(0, 1), (0, 0)]
    assert order(rule) == [(0, 1), (0, 0), (0, 2)], "it goes last, but a demand takes any"
    rule.on_layer(1)
    assert order(rule, bound) == [(0, 2), (0, 1), (0, 0)], "its turn is over"


# ---- activation-aware


def test_what_like_requests_use_next_is_kept() -> None:
    rule = ActivationAware((4, 4, 4, 4))
    for sequence_id, expert in ((1, 0), (2, 3)):
        for _ in range(3):  # the first of them reads the prompt
            rule.begin_step(sequence_id)
            for layer in range(4):
                rule.on_layer(layer)
                rule.on_use(layer, [expert])
    for key in ((1, 0), (1, 3), (3, 0), (3, 3)):
        rule.on_insert(ExpertKey(*key))
    rule.begin_step(3)
    rule.on_layer(0)
    rule.on_use(0, [3])
    assert rule.worth(ExpertKey(1, 3)) == pytest.approx(1.0), "it is next"
    assert rule.worth(ExpertKey(3, 3)) == pytest.approx(0.5), "two of four layers come before"
    assert rule.worth(ExpertKey(1, 0)) == 0.0
    assert order(rule) == [(1, 0), (3, 0), (3, 3), (1, 3)]


def test_a_wish_is_worth_its_score_where_nothing_more_is_known() -> None:
    rule = ActivationAware((4, 4))
    rule.begin_step(1)
    rule.on_prefetches(
        PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 0), 0.6, 1), PrefetchRequest(ExpertKey(1, 0), 0.2, 1)])
    )
    assert rule.worth(ExpertKey(1, 0)) == pytest.approx(0.6 / 2)
    rule.on_layer(0)
    assert rule.worth(ExpertKey(1, 0)) == pytest.approx(0.6)
    rule.on_layer(1)
    assert rule.worth(ExpertKey(1, 0)) == 0.0, "its turn has come"
    rule.begin_step(1)
    assert rule.worth(ExpertKey(1, 0)) == 0.0


# ---- a cyclic scan, larger than the slots


def loads_per_step(name: str, slots: int, steps: int, *, told: bool) -> list[int]:
    """Demand loads of each step when four layers use the same two experts each, over and over."""
    layers, used = 4, (1, 3)
    clock, counters = VirtualClock(), Counters()
    source = ExpertSource(
        MarkedSlots(slots),
        VirtualTransfer(clock, BLOB, BLOB),
        make_eviction(name, [4] * layers),
        BLOB,
        clock,
        counters,
        threaded=False,
    )
    source.grants.step_budget = 0  # the draft informs what to keep; nothing is fetched ahead
    loads = []
    for _ in range(steps):
        before = counters.demand_loads
        source.begin_step()
        if told:
            source.prefetch(
                PrefetchRequests.of(
                    PrefetchRequest(ExpertKey(layer, e), 0.9, layer) for layer in range(layers) for e in used
                )
            )
        for layer in range(layers):
            for _batch in source.use(layer, used):
                clock.sleep(1.0)
        source.end_step()
        loads.append(counters.demand_loads - before)
    source.close()
    assert counters.prefetch_loads == 0
    return loads


@pytest.mark.parametrize("told", [False, True])
def test_a_cyclic_scan_defeats_lru_but_not_draft_informed(told: bool) -> None:
    slots, steps = 6, 6  # eight experts go round
    assert loads_per_step("lru", slots, steps, told=False) == [8] * steps, "each is evicted just before its turn"
    informed = loads_per_step("draft-informed", slots, steps, told=told)
    assert informed[0] == 8
    assert max(informed[1:]) <= 4, "at least half of the slots keep what comes round again"


def test_when_everything_fits_both_load_once() -> None:
    for name in EVICTION_RULES:
        assert loads_per_step(name, 8, 4, told=True) == [8, 0, 0, 0]


def plainly(rule: DraftInformed) -> np.ndarray:
    """What every expert is worth by the rule's words, from what it has been told, nothing kept from before."""
    layers, habit, reliability = np.arange(rule.shape[0]), rule._frequency, rule._reliability
    spoken = np.minimum(1.0, rule._passes / rule._usual_passes)[:, None]
    silent = habit * (1 - spoken * (1 - reliability.silence))
    word = reliability.of(rule._named, rule._score)
    told = np.where(rule._named > 0, np.maximum(word, silent), silent)
    to_come = ((rule._passes > 0) & (layers > rule._position))[:, None]
    near = rule._discount ** ((layers - rule._position - 1) % len(layers) / len(layers))
    later = rule._discount * habit / (1 - (1 - habit) * rule._discount)
    expected = np.where(to_come, told, habit)
    worths: np.ndarray = (expected + (1 - expected) * later) * near[:, None]
    return worths


@modest
@given(histories=st.lists(st.tuples(histories, st.booleans()), min_size=1, max_size=4))
def test_draft_informed_keeps_up_with_what_it_is_told(
    histories: list[tuple[list[tuple[str, object]], bool]],
) -> None:
    """Only what something was said about is worked out anew; that must never show, whether it is asked often or not."""
    rule = DraftInformed(EXPERTS)
    for history, ask in histories:
        for event in history:
            play(rule, [("insert", event[1]), event] if event[0] == "use" else [event])
            if ask:
                assert np.allclose(rule._all_worths(), plainly(rule))
    assert np.allclose(rule._all_worths(), plainly(rule))
