"""The cache: which expert is in which slot, and in which state. Bookkeeping only: no threads, no bytes, no time.

One pool of slots serves all layers. A key is in at most one slot; a slot that is being written or is pinned (in use)
is never given to another key. Beside an entry for each expert that has a slot there are tables of all of them, so that
what is asked of a whole layer, or of all, costs as much as of one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spmoe.experts.batches import PinnedLayer
from spmoe.experts.eviction import Eviction, ScoredEviction
from spmoe.experts.transfer import CopyHandle
from spmoe.types import ExpertKey, Residency


@dataclass(slots=True, eq=False)
class Entry:
    """An expert that has a slot."""

    key: ExpertKey
    slot: int
    prefetched: bool  # came by a prefetch request and has not been needed yet
    state: Residency = Residency.LOADING
    handle: CopyHandle | None = None  # while LOADING, and after a failure
    pins: int = 0


class Reservation(NamedTuple):
    """A slot for a key, and what had to leave it."""

    entry: Entry
    evicted: Entry | None


class ExpertCache:
    """Slots by key. Not thread-safe: its owner holds a lock."""

    def __init__(self, slot_count: int, eviction: Eviction) -> None:
        self.slot_count = slot_count
        self.peak = 0
        shape = eviction.shape
        self.present = np.zeros(shape, dtype=bool)  # has a slot
        self.prefetched = np.zeros(shape, dtype=bool)  # as its entry says
        self._ready = np.full(shape, -1, dtype=np.int32)  # the slot of what is READY
        self._held = np.zeros(shape, dtype=bool)  # pinned or LOADING: not to be evicted
        self._open = [0] * shape[0]  # how often each layer is open: nothing of it is evicted either
        self.eviction = eviction
        self._entries: dict[ExpertKey, Entry] = {}
        self._free = list(range(slot_count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._entries)

    def change_eviction(self, eviction: Eviction) -> None:
        """Another rule decides from now on; the old one is told that everything left, the new one that it came."""
        for key in self._entries:
            self.eviction.on_remove(key)
            eviction.on_insert(key)
        self.eviction = eviction

    def exchange(self, eviction: Eviction, keys: Collection[ExpertKey]) -> list[Entry]:
        """Have just these in slots, and a rule decide that had left them there; those of them that are LOADING.

        Neither that rule nor the one before is told of it: each knows what it left.
        """
        self.eviction = ScoredEviction([self.present.shape[1]] * self.present.shape[0])
        for key in [key for key in self._entries if key not in keys]:
            self._remove(key)
        loading = [self._place(key, False, None).entry for key in keys if key not in self._entries]
        self.eviction = eviction
        return loading

    def get(self, key: ExpertKey) -> Entry | None:
        """The key's entry, if it has a slot."""
        return self._entries.get(key)

    def entries(self) -> list[Entry]:
        """Everything that has a slot."""
        return list(self._entries.values())

    def open(self, layer: int) -> PinnedLayer:
        """What a layer has READY; nothing of it leaves until it is shut."""
        self._open[layer] += 1
        return PinnedLayer(layer, self._ready[layer].copy())

    def shut(self, pinned: PinnedLayer) -> None:
        """Let go of it. Idempotent."""
        if pinned.is_open:
            pinned.is_open = False
            self._open[pinned.layer] -= 1

    def reserve(self, key: ExpertKey) -> Reservation | None:
        """Take a slot for a wished ABSENT key, which is LOADING from then on; None when no slot may be taken.

        It takes only what eviction holds to be worth less than the wished expert.
        """
        if key in self._entries:
            raise ValueError(f"{key} already has a slot")
        evicted = None
        if not self._free:
            victims = self.eviction.victims(1, self._staying(), self.eviction.score(key), key.layer)
            if victims is None:
                return None
            evicted = self._remove(victims[0])
        return self._place(key, True, evicted)

    def reserve_for_demand(self, keys: Sequence[ExpertKey]) -> Iterator[Reservation]:
        """Slots for as many of these ABSENT keys of a layer, from the first, as can be had, one after the other.

        Their victims are chosen together, before the first; any that may leave will do.
        """
        if any(key in self._entries for key in keys):
            raise ValueError("one of these already has a slot")
        lacking = len(keys) - len(self._free)
        victims: list[ExpertKey] | None = []
        if lacking > 0:
            staying = self._staying()
            evictable = int(np.count_nonzero(self.present & ~staying))
            victims = self.eviction.victims(min(lacking, evictable), staying, float("inf"), keys[0].layer)
        leaving: list[ExpertKey | None] = [None] * min(len(keys), len(self._free))
        for key, victim in zip(keys, [*leaving, *(victims or ())], strict=False):
            yield self._place(key, False, None if victim is None else self._remove(victim))

    def pin(self, entry: Entry) -> None:
        """Somebody uses the expert: it stays until unpinned as often."""
        entry.pins += 1
        self._held[entry.key] = True

    def unpin(self, entry: Entry) -> None:
        """One use is over."""
        entry.pins -= 1
        if not entry.pins and entry.state is Residency.READY:
            self._held[entry.key] = False

    def needed(self, entry: Entry) -> None:
        """What came by a prefetch request has been needed."""
        entry.prefetched = self.prefetched[entry.key] = False

    def loaded(self, entry: Entry) -> None:
        """The copy ended well: READY."""
        entry.state, entry.handle = Residency.READY, None
        self._ready[entry.key] = entry.slot
        self._held[entry.key] = entry.pins > 0

    def failed(self, entry: Entry) -> None:
        """The copy ended badly: ABSENT, and the slot is free again. The ticket stays, for those who wait for it."""
        entry.pins = 0
        self._remove(entry.key)

    def retire(self, slot: int) -> None:
        """A free slot may still be written, nobody knows until when: it is given to no one any more."""
        self._free.remove(slot)

    def _staying(self) -> np.ndarray:
        """What is not to be evicted."""  # bool [layers, experts]
        if not any(self._open):
            return self._held
        staying = self._held.copy()
        staying[np.flatnonzero(self._open)] = True
        return staying

    def _place(self, key: ExpertKey, prefetched: bool, evicted: Entry | None) -> Reservation:
        entry = self._entries[key] = Entry(key, self._free.pop(), prefetched)
        self.present[key] = self._held[key] = True
        self.prefetched[key] = prefetched
        self.eviction.on_insert(key)
        self.peak = max(self.peak, len(self._entries))
        return Reservation(entry, evicted)

    def _remove(self, key: ExpertKey) -> Entry:
        entry = self._entries.pop(key)
        self.present[key] = self._held[key] = self.prefetched[key] = False
        self._ready[key] = -1
        entry.state = Residency.ABSENT
        self.eviction.on_remove(key)
        self._free.append(entry.slot)
        return entry
