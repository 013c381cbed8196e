"""Counting the uses of experts."""

from __future__ import annotations

import threading

import numpy as np

from spmoe.observe import expert_uses
from spmoe.observe.expert_uses import ExpertUses


def test_counts_forwards_and_uses() -> None:
    uses = ExpertUses(3, 4)
    assert not uses.snapshot().uses.any()
    uses.add(0, [1, 3])
    uses.add(2, (1,))
    first = uses.snapshot()
    uses.add(2, [0, 1])
    assert first.forwards.tolist() == [1, 0, 1]
    assert first.uses.tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]
    second = uses.snapshot()
    assert (second.forwards - first.forwards).tolist() == [0, 0, 1]
    assert (second.uses - first.uses)[2].tolist() == [1, 1, 0, 0]


def test_queue_is_limited_and_shares_stay_right() -> None:
    uses = ExpertUses(1, 2)
    for _ in range(3 * expert_uses._MAX_PENDING):
        uses.add(0, [0])
        uses.add(0, [0, 1])
    counts = uses.snapshot()
    assert counts.forwards.tolist() == [expert_uses._MAX_PENDING]
    assert (counts.uses / counts.forwards).tolist() == [[1.0, 0.5]]


def test_snapshots_while_another_thread_counts() -> None:
    uses, forwards = ExpertUses(2, 3), 2000  # fewer than the queue holds: none is lost
    thread = threading.Thread(target=lambda: [uses.add(number % 2, [0, 2]) for number in range(forwards)])
    thread.start()
    while thread.is_alive():
        counts = uses.snapshot()
        assert np.array_equal(counts.uses[:, 0], counts.forwards)
    thread.join()
    assert uses.snapshot().forwards.sum() == forwards
