"""KV caches of one model: of the sequences that run, and of finished ones, which are kept until their place is needed.

A new prompt starts from the longest prefix that one of them has in common with it. Graphs are captured over the memory
of KV caches, which is another reason to keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from spmoe.models.kv import KvState

MIN_CAPACITY = 1024  # positions; KV caches that graphs are captured over are larger than needed, and are reused


class KvPool:
    """Owner of a model's KV caches."""

    def __init__(self, config: Any, wait: Callable[[], None]) -> None:
        # wait: until no launched kernel writes a KV cache any more that is about to be freed
        self.spare: list[KvState] = []  # of finished sequences, the one that was used last at the end
        self.keeps_graphs = False  # whether graphs are captured over KV caches: they are kept and have round sizes
        self._config = config
        self._wait = wait
        self._limit: int | None = None  # positions of all KV caches; None: not limited
        self._spare_limit = 0  # positions of KV caches that are kept for their contents alone
        self._reuses_prefixes = False
        self._used: WeakSet[KvState] = WeakSet()

    def plan(self, limit: int | None, spare_limit: int, *, reuse_prefixes: bool) -> None:
        """Set the positions that all KV caches, and the kept ones, may have; reuse prefixes from now on, or not."""
        self._limit, self._spare_limit, self._reuses_prefixes = limit, spare_limit, reuse_prefixes

    def clear(self) -> None:
        """Free the KV caches of finished sequences."""
        self._drop(self.spare)

    @property
    def usage(self) -> float | None:
        """Share of all positions that the KV caches of running sequences have; None if they are not limited."""
        return None if self._limit is None else sum(kv.capacity for kv in self._used) / self._limit

    def has_place(self, capacity: int) -> bool:
        """Return whether one more KV cache of so many positions fits, if kept ones are freed for it."""
        used = sum(kv.capacity for kv in self._used)
        return self._limit is None or used + self._size(capacity) <= self._limit

    def take(self, capacity: int, tokens: list[int] | None = None) -> KvState:
        """Return a KV cache of at least `capacity` positions; it has as many of the first tokens as another one had.

        `tokens`: the sequence's own list, which grows with it. At least its last token is left to be read.
        """
        tokens = [] if tokens is None else tokens
        source, common = self._longest_prefix(tokens)
        if source in self.spare and source.capacity >= capacity and source.length <= 2 * common:
            kv = source
        else:  # the source keeps its other tokens, for a sequence that continues them
            kv = self._unused(capacity)
            if source is not None:
                kv.copy_prefix(source, common)
        if kv in self.spare:
            self.spare.remove(kv)
        kv.cut(common)
        kv.tokens = tokens
        self._used.add(kv)
        return kv

    def discard(self, kv: KvState) -> None:
        """Free a KV cache whose contents nobody needs."""
        self._used.discard(kv)

    def give_back(self, kv: KvState) -> None:
        """Keep a finished sequence's KV cache for others, or free it."""
        self._used.discard(kv)
        kv.cut(len(kv.tokens))
        kv.tokens = kv.tokens[: kv.length]
        if self.keeps_graphs or (self._reuses_prefixes and kv.can_rewind and kv.length):
            if not self._reuses_prefixes:
                kv.cut(0)
            self.spare.append(kv)
            self._free_places(0)

    def _longest_prefix(self, tokens: list[int]) -> tuple[KvState | None, int]:
        """Return the KV cache that has the most of the first tokens, and how many; a kept one rather than another."""
        best, most = None, 0
        for kv in [*reversed(self.spare), *self._used] if self._reuses_prefixes else []:
            common = min(_common_prefix(tokens, kv.tokens), kv.length, len(tokens) - 1)
            if common > most:
                best, most = kv, common
        return best, most

    def _unused(self, capacity: int) -> KvState:
        """Return a kept KV cache that is large enough, preferably one with graphs, or a new one."""
        if self.keeps_graphs:
            fitting = [kv for kv in self.spare if kv.capacity >= capacity]
            self._drop([kv for kv in self.spare if kv.capacity < capacity and not self._reuses_prefixes])
            if fitting:
                return max(fitting, key=lambda kv: bool(kv.graphs))  # of several, the one that was used first
        size = self._size(capacity)
        self._free_places(size)
        return KvState(self._config, size)

    def _size(self, capacity: int) -> int:
        return kv_capacity(capacity) if self.keeps_graphs else capacity

    def _free_places(self, needed: int) -> None:
        """Free kept KV caches, the ones used first, until all others and `needed` more positions fit."""
        used = sum(kv.capacity for kv in self._used) + needed

        def fits(kept: Sequence[KvState]) -> bool:
            size = sum(kv.capacity for kv in kept)
            if self._limit is not None:
                return used + size <= self._limit
            return self.keeps_graphs or size <= self._spare_limit

        kept = list(self.spare)
        while kept and not fits(kept):
            kept.pop(0)
        self._drop([kv for kv in self.spare if kv not in kept])

    def _drop(self, dropped: Sequence[KvState]) -> None:
        if dropped:
            self._wait()
            self.spare = [kv for kv in self.spare if kv not in dropped]


def kv_capacity(needed: int) -> int:
    """Return the capacity of KV caches that graphs are captured over, so that most sequences can share one."""
    return max(MIN_CAPACITY, 1 << (needed - 1).bit_length())


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
