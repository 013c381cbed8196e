"""The cache: which expert is in which slot, and in which state. Bookkeeping only: no threads, no bytes, no time.

One pool of slots serves all layers. A key is in at most one slot; a slot that is being written or is pinned (in use)
is never given to another key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spmoe.experts.eviction import Eviction
from spmoe.experts.transfer import Ticket
from spmoe.types import ExpertKey, Residency


@dataclass(slots=True, eq=False)
class Entry:
    """An expert that has a slot."""

    key: ExpertKey
    slot: int
    prefetched: bool  # came by a wish and has not been needed yet
    state: Residency = Residency.LOADING
    ticket: Ticket | None = None  # while LOADING, and after a failure
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
        self._eviction = eviction
        self._entries: dict[ExpertKey, Entry] = {}
        self._by_layer: defaultdict[int, dict[ExpertKey, Entry]] = defaultdict(dict)
        self._held: set[ExpertKey] = set()  # pinned or LOADING: not to be evicted
        self._free = list(range(slot_count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._entries)

    def change_eviction(self, eviction: Eviction) -> None:
        """Another rule decides from now on; the old one is told that everything left, the new one that it came."""
        for key in self._entries:
            self._eviction.removed(key)
            eviction.inserted(key)
        self._eviction = eviction

    def get(self, key: ExpertKey) -> Entry | None:
        """The key's entry, if it has a slot."""
        return self._entries.get(key)

    def entries(self) -> list[Entry]:
        """Everything that has a slot."""
        return list(self._entries.values())

    def ready_of(self, layer: int) -> list[Entry]:
        """A layer's experts that are READY."""
        return [entry for entry in self._by_layer[layer].values() if entry.state is Residency.READY]

    def reserve(self, key: ExpertKey, *, prefetched: bool) -> Reservation | None:
        """Take a slot for an ABSENT key, which is LOADING from then on; None when no slot may be taken.

        A wish takes only what eviction holds to be worth less than the wished expert; a demand takes any.
        """
        if key in self._entries:
            raise ValueError(f"{key} already has a slot")
        evicted = None
        if not self._free:
            below = self._eviction.worth(key) if prefetched else float("inf")
            victims = self._eviction.victims(1, self._held, below, key.layer)
            if victims is None:
                return None
            evicted = self._remove(victims[0])
        return self._place(key, prefetched, evicted)

    def reserve_for_demand(self, keys: Sequence[ExpertKey]) -> Iterator[Reservation]:
        """Slots for as many of these ABSENT keys of a layer, from the first, as can be had, one after the other.

        Their victims are chosen together, before the first.
        """
        if any(key in self._entries for key in keys):
            raise ValueError("one of these already has a slot")
        lacking = len(keys) - len(self._free)
        evictable = len(self._entries) - len(self._held)
        victims: list[ExpertKey] | None = []
        if lacking > 0:
            victims = self._eviction.victims(min(lacking, evictable), self._held, float("inf"), keys[0].layer)
        leaving: list[ExpertKey | None] = [None] * min(len(keys), len(self._free))
        for key, victim in zip(keys, [*leaving, *(victims or ())], strict=False):
            yield self._place(key, False, None if victim is None else self._remove(victim))

    def pin(self, entry: Entry) -> None:
        """Somebody uses the expert: it stays until unpinned as often."""
        entry.pins += 1
        self._held.add(entry.key)

    def unpin(self, entry: Entry) -> None:
        """One use is over."""
        entry.pins -= 1
        if not entry.pins and entry.state is Residency.READY:
            self._held.discard(entry.key)

    def pin_all(self, entries: Sequence[Entry]) -> None:
        """The same for many at once."""
        for entry in entries:
            entry.pins += 1
        self._held.update([entry.key for entry in entries])

    def unpin_all(self, entries: Sequence[Entry]) -> None:
        """The same for many at once."""
        held = self._held
        for entry in entries:
            entry.pins -= 1
            if not entry.pins and entry.state is Residency.READY:
                held.discard(entry.key)

    def loaded(self, entry: Entry) -> None:
        """The copy ended well: READY."""
        entry.state, entry.ticket = Residency.READY, None
        if not entry.pins:
            self._held.discard(entry.key)

    def failed(self, entry: Entry) -> None:
        """The copy ended badly: ABSENT, and the slot is free again. The ticket stays, for those who wait for it."""
        entry.pins = 0
        self._remove(entry.key)

    def _place(self, key: ExpertKey, prefetched: bool, evicted: Entry | None) -> Reservation:
        entry = Entry(key, self._free.pop(), prefetched)
        self._entries[key] = self._by_layer[key.layer][key] = entry
        self._held.add(key)
        self._eviction.inserted(key)
        self.peak = max(self.peak, len(self._entries))
        return Reservation(entry, evicted)

    def _remove(self, key: ExpertKey) -> Entry:
        entry = self._entries.pop(key)
        del self._by_layer[key.layer][key]
        self._held.discard(key)
        entry.state = Residency.ABSENT
        self._eviction.removed(key)
        self._free.append(entry.slot)
        return entry
