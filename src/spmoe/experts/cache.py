"""The cache: which expert is in which slot, and in which state. Bookkeeping only: no threads, no bytes, no time.

One pool of slots serves all layers. A key is in at most one slot; a slot that is being written or is pinned is never
given to another key. Tables over all experts repeat the state of the entries, so that one array operation answers a
question about a layer or about all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spmoe.experts.eviction import Eviction
from spmoe.experts.transfer import CopyHandle
from spmoe.types import ExpertKey, Residency


@dataclass(slots=True, eq=False)
class Entry:
    """An expert that has a slot."""

    key: ExpertKey
    slot: int
    prefetched: bool  # loaded by a prefetch request and not used yet
    state: Residency = Residency.LOADING
    handle: CopyHandle | None = None  # while LOADING, and after a failure
    pins: int = 0


class Reservation(NamedTuple):
    """A slot for a key, and the entry that was evicted for it."""

    entry: Entry
    evicted: Entry | None


@dataclass(slots=True)
class PinnedLayer:
    """READY experts of a layer, pinned so that kernels can launch before the routed experts are known."""

    layer: int
    slots: np.ndarray  # int32 [experts]; -1: not READY
    epoch: int  # compute epoch that began with the pin; the transfer's number
    is_pinned: bool = True


class ExpertCache:
    """Slots by key. Not thread-safe: its owner holds a lock."""

    def __init__(self, slot_count: int, eviction: Eviction, ready: np.ndarray | None = None) -> None:
        # ready: memory for the table of READY experts, int32 [layers, experts], if others read it too
        self.slot_count = slot_count
        self.peak = 0  # most slots that were occupied at once
        shape = eviction.shape
        self.present = np.zeros(shape, dtype=bool)  # has a slot
        self.prefetched = np.zeros(shape, dtype=bool)  # same as its entry's flag
        self._ready = np.empty(shape, dtype=np.int32) if ready is None else ready  # slot of each READY expert
        self._ready.fill(-1)
        self._held = np.zeros(shape, dtype=bool)  # pinned or LOADING: not evictable
        self._layer_pins = [0] * shape[0]  # a pinned layer's experts are not evictable either
        self.eviction = eviction
        self._entries: dict[ExpertKey, Entry] = {}
        self._free = list(range(slot_count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._entries)

    def change_eviction(self, eviction: Eviction) -> None:
        """Switch to another eviction policy, and tell both policies that the residents moved over."""
        for key in self._entries:
            self.eviction.on_remove(key)
            eviction.on_insert(key)
        self.eviction = eviction

    def exchange(self, eviction: Eviction, keys: Collection[ExpertKey]) -> list[Entry]:
        """Switch to an eviction policy together with the residents it last had; return the entries to load.

        Neither policy is notified: each still has the residents of the time when it was replaced.
        """
        for key in [key for key in self._entries if key not in keys]:
            self._remove(key, notify=False)
        self.eviction = eviction
        return [self._insert(key, False, None, notify=False).entry for key in keys if key not in self._entries]

    def get(self, key: ExpertKey) -> Entry | None:
        """Return the key's entry, if it has a slot."""
        return self._entries.get(key)

    def entries(self) -> list[Entry]:
        """Return the entry of every expert that has a slot."""
        return list(self._entries.values())

    def pin_layer(self, layer: int, epoch: int) -> PinnedLayer:
        """Pin a layer's READY experts; none of the layer's experts is evicted until `unpin_layer`."""
        self._layer_pins[layer] += 1
        return PinnedLayer(layer, self._ready[layer].copy(), epoch)

    def unpin_layer(self, pinned: PinnedLayer) -> None:
        """Release a pinned layer. Idempotent."""
        if pinned.is_pinned:
            pinned.is_pinned = False
            self._layer_pins[pinned.layer] -= 1

    def reserve(
        self, key: ExpertKey, worth: float = math.inf, is_quiet: Callable[[int], bool] = lambda layer: True
    ) -> Reservation | None:
        """Take a slot for an ABSENT key that is prefetched, LOADING from then on; None if no slot may be taken.

        Only residents that the eviction policy scores below the prefetched expert are evicted for it, and only those
        whose chance of use is below `worth`, if its scores are such chances. A victim stays unless `is_quiet`, called
        with its layer once the table does not name it, returns True: nobody who reads the table uses it. Then one of
        another layer is evicted.
        """
        if key in self._entries:
            raise ValueError(f"{key} already has a slot")
        evicted = None
        if not self._free:
            below = self.eviction.score(key)
            if self.eviction.scores_are_chances:
                below = min(below, worth)
            held = self._not_evictable()
            while True:
                victims = self.eviction.victims(1, held, below, key.layer)
                if victims is None:
                    return None
                (victim,) = victims
                slot, self._ready[victim] = int(self._ready[victim]), -1
                if is_quiet(victim.layer):
                    break
                self._ready[victim] = slot
                held = held.copy()
                held[victim.layer] = True
            evicted = self._remove(victim)
        return self._insert(key, True, evicted)

    def move_losses(self, keys: Sequence[ExpertKey]) -> list[float]:
        """Return, for ABSENT keys of one layer, what it costs later to give each a slot.

        It is the chance that the expert evicted for it is used, less the chance that it is used itself, so it is
        negative for an expert that is worth its slot. Zeros if the eviction policy does not know such chances.
        """
        if not self.eviction.scores_are_chances:
            return [0.0] * len(keys)
        chances = [self.eviction.chance(key) for key in keys]
        evicted = [0.0] * min(len(keys), len(self._free))
        if lacking := len(keys) - len(evicted):
            held = self._not_evictable()
            evictable = int(np.count_nonzero(self.present & ~held))
            victims = self.eviction.victims(min(lacking, evictable), held, math.inf, keys[0].layer) or []
            evicted += sorted(self.eviction.chance(victim) for victim in victims)
            evicted += [1.0] * (len(keys) - len(evicted))  # they wait for a slot
        best_first = sorted(range(len(keys)), key=lambda i: -chances[i])
        losses = [0.0] * len(keys)
        for i, chance in zip(best_first, evicted, strict=True):
            losses[i] = chance - chances[i]
        return losses

    def reserve_for_demand(self, keys: Sequence[ExpertKey]) -> Iterator[Reservation]:
        """Take slots for as many of these ABSENT keys of one layer as possible, in order, one after the other.

        Victims are selected together, before the first slot is taken; any evictable resident qualifies.
        """
        if any(key in self._entries for key in keys):
            raise ValueError("one of these already has a slot")
        lacking = len(keys) - len(self._free)
        victims: list[ExpertKey] | None = []
        if lacking > 0:
            held = self._not_evictable()
            victims = self.eviction.victims(lacking, held, math.inf, keys[0].layer)
            if victims is None:  # fewer can be evicted
                evictable = int(np.count_nonzero(self.present & ~held))
                victims = self.eviction.victims(evictable, held, math.inf, keys[0].layer)
        free: list[ExpertKey | None] = [None] * min(len(keys), len(self._free))
        for key, victim in zip(keys, [*free, *(victims or ())], strict=False):
            yield self._insert(key, False, None if victim is None else self._remove(victim))

    def pin(self, entry: Entry) -> None:
        """Keep the expert in its slot until it is unpinned as often."""
        entry.pins += 1
        self._held[entry.key] = True

    def unpin(self, entry: Entry) -> None:
        """Undo one `pin`."""
        entry.pins -= 1
        if not entry.pins and entry.state is Residency.READY:
            self._held[entry.key] = False

    def mark_used(self, entry: Entry) -> None:
        """Clear the flag of a prefetched expert at its first use."""
        entry.prefetched = self.prefetched[entry.key] = False

    def mark_ready(self, entry: Entry) -> None:
        """Set an entry READY: its copy has ended."""
        entry.state, entry.handle = Residency.READY, None
        self._ready[entry.key] = entry.slot
        self._held[entry.key] = entry.pins > 0

    def mark_failed(self, entry: Entry) -> None:
        """Remove an entry whose copy failed, and free its slot. Waiters find the error in its handle."""
        entry.pins = 0
        self._remove(entry.key)

    def _not_evictable(self) -> np.ndarray:  # bool [layers, experts]
        if not any(self._layer_pins):
            return self._held
        held = self._held.copy()
        held[np.flatnonzero(self._layer_pins)] = True
        return held

    def _insert(self, key: ExpertKey, prefetched: bool, evicted: Entry | None, *, notify: bool = True) -> Reservation:
        entry = self._entries[key] = Entry(key, self._free.pop(), prefetched)
        self.present[key] = self._held[key] = True
        self.prefetched[key] = prefetched
        if notify:
            self.eviction.on_insert(key)
        self.peak = max(self.peak, len(self._entries))
        return Reservation(entry, evicted)

    def _remove(self, key: ExpertKey, *, notify: bool = True) -> Entry:
        entry = self._entries.pop(key)
        self.present[key] = self._held[key] = self.prefetched[key] = False
        self._ready[key] = -1
        entry.state = Residency.ABSENT
        if notify:
            self.eviction.on_remove(key)
        self._free.append(entry.slot)
        return entry
