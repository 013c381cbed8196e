"""The policy `oracle`: recorded routing of a request is prefetched when the request runs again."""

from __future__ import annotations

from collections.abc import Sequence

from spmoe.predict.policies.base import PrefetchPolicy, RecordedRouting
from spmoe.predict.policies.oracle import Oracle, RoutingRecorder

STEPS: list[list[list[int]]] = [[[3, 1], [0, 2]], [[1], [2]], [[0], [0, 1, 3]]]


def run(
    policy: PrefetchPolicy, sequence_id: int, steps: Sequence[Sequence[Sequence[int]]]
) -> list[list[tuple[int, int]]]:
    found = []
    for layers in steps:
        prefetches = list(policy.begin_step(sequence_id))
        assert all(
            (request.score, request.deadline, request.fetch) == (1.0, request.key.layer, True) for request in prefetches
        )
        found.append([tuple(request.key) for request in prefetches])
        for layer, experts in enumerate(layers):
            assert list(policy.on_routed(layer, experts)) == []
    return found


def recorded() -> RecordedRouting:
    recorder = RoutingRecorder()
    assert run(recorder, 5, STEPS) == [[], [], []], "recording prefetches nothing"
    return recorder.recording


def test_records_the_routing_of_each_step() -> None:
    assert recorded() == [{0: {1, 3}, 1: {0, 2}}, {0: {1}, 1: {2}}, {0: {0}, 1: {0, 1, 3}}]


def test_a_prompt_in_several_chunks_is_one_step() -> None:
    recorder = RoutingRecorder()
    list(recorder.begin_step(1))
    for experts in ([0, 2], [1, 2]):
        list(recorder.on_routed(0, experts))
    assert recorder.recording == [{0: {0, 1, 2}}]


def test_requests_all_experts_of_a_step_in_layer_order() -> None:
    oracle = Oracle(recorded)
    assert run(oracle, 9, STEPS) == [
        [(0, 1), (0, 3), (1, 0), (1, 2)],
        [(0, 1), (1, 2)],
        [(0, 0), (1, 0), (1, 1), (1, 3)],
    ]


def test_every_sequence_starts_at_the_first_step() -> None:
    oracle = Oracle(recorded)
    assert run(oracle, 1, STEPS[:1]) == run(oracle, 2, STEPS[:1])


def test_requests_nothing_after_the_recording_ends() -> None:
    oracle = Oracle(recorded)
    assert run(oracle, 1, [*STEPS, [[0], [0]]])[-1] == []
    assert run(Oracle(list), 1, STEPS) == [[], [], []]
