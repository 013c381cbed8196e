"""KV caches of one model: of the sequences that run, and of finished ones, which are kept until their place is needed.

A new prompt starts from the longest prefix that one of them has in common with it. A sequence takes more positions as
it grows; one that has to wait for others can be swapped out to host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmoe.models.kv import KvArena, KvState

SCRATCH_POSITIONS = 64  # of the range that warm-ups of captured forwards write to
_FIRST_POSITIONS = 1024  # of an arena that is not allocated at once
_GROWTH = 256  # positions that a sequence gets beyond the ones it needs, if there is place
_COMPARED_TOKENS = 256  # at a time
_FEW_TOKENS = 16  # of a kept KV cache, which are read again quickly; to keep them, no prefix is copied


def kv_sizes(length: int, rows: int, most: int) -> tuple[int, int]:
    """Return the positions that a sequence of `length` tokens needs for `rows` more, and those it should get.

    `most`: tokens that it will have at its end.
    """
    least = min(most, length + rows)
    return least, min(most, least + _GROWTH)


class KvPool:
    """Owner of a model's KV caches."""

    def __init__(self, config: Any, on_move: Callable[[], None] = lambda: None) -> None:
        # on_move: called before KV caches move to other places in the arena
        self.arena = KvArena(on_move)
        self.spare: list[KvState] = []  # of finished sequences, the one that was used last at the end
        self._config = config
        self._limit: int | None = None  # positions of all KV caches; None: not limited
        self._spare_limit = 0  # positions of KV caches that are kept for their contents, if there is no other limit
        self.reuses_prefixes = False
        self._used: list[KvState] = []
        self._used_positions = 0
        self._scratch: KvState | None = None

    def plan(self, limit: int | None, expected: int, *, reuse_prefixes: bool, at_once: bool = True) -> None:
        """Set the positions that all KV caches may have; reuse prefixes from now on, or not.

        `expected`: positions to allocate, and to keep for finished sequences if there is no limit. Unless `at_once`,
        few are allocated first, and more as they are needed.
        """
        self._limit, self._spare_limit, self.reuses_prefixes = limit, expected, reuse_prefixes
        self.arena.plan((expected if at_once else min(expected, _FIRST_POSITIONS)) + SCRATCH_POSITIONS)

    @property
    def scratch(self) -> KvState:
        """A range that holds nothing; it stays when it was asked for once."""
        if self._scratch is None:
            self._scratch = KvState(self._config, SCRATCH_POSITIONS, self.arena)
        return self._scratch

    @property
    def usage(self) -> float | None:
        """Share of all positions that the KV caches of running sequences have; None if they are not limited."""
        return None if self._limit is None else self._used_positions / self._limit

    def has_place(self, capacity: int) -> bool:
        """Return whether so many more positions fit, if kept KV caches are freed for them."""
        return self._limit is None or self._used_positions + capacity <= self._limit

    def take(self, capacity: int, tokens: list[int] | None = None, preferred: int = 0) -> KvState:
        """Return a KV cache of at least `capacity` positions; it has as many of the first tokens as another one had.

        `tokens`: the sequence's own list, which grows with it. At least its last token is left to be read.
        `preferred`: positions to give it if there is place for them.
        """
        tokens = [] if tokens is None else tokens
        capacity = preferred if preferred > capacity and self.has_place(preferred) else capacity
        source, common = self._longest_prefix(tokens)
        if source is not None and source in self.spare and self._takes_over(source, common, capacity):
            kv = source
            kv.cut(common)
            self._free_places(max(0, capacity - kv.capacity), [kv])
            self.arena.place(kv, capacity)
            self.spare.remove(kv)
        else:  # the source keeps its other tokens, for a sequence that continues them
            self._free_places(capacity, [] if source is None else [source])
            kv = KvState(self._config, capacity, self.arena)
            if source is not None:
                kv.copy_prefix(source, common)
                self._free_places(0)  # now of the source
        kv.tokens = tokens
        self._set_used([*self._used, kv])
        return kv

    def num_reusable(self, tokens: list[int]) -> int:
        """Return how many of the first tokens a KV cache that is taken now would have."""
        return self._longest_prefix(tokens)[1]

    def reserve(self, kv: KvState, capacity: int, preferred: int) -> bool:
        """Give a running sequence's KV cache at least `capacity` positions; return whether there is place for them."""
        if capacity <= kv.capacity:
            return True
        for size in (preferred, capacity):
            if self.has_place(size - kv.capacity):
                self.grow(kv, size)
                return True
        return False

    def grow(self, kv: KvState, capacity: int) -> None:
        """Give a running sequence's KV cache at least `capacity` positions, also beyond the limit."""
        if capacity > kv.capacity:
            self._free_places(capacity - kv.capacity)
            self.arena.place(kv, capacity)
            self._set_used(self._used)

    def swap_out(self, kv: KvState) -> None:
        """Move a running sequence's KV cache to host memory."""
        kv.swap_out()
        self._set_used([one for one in self._used if one is not kv])

    def swap_in(self, kv: KvState, capacity: int, preferred: int) -> None:
        """Move it back, to at least `capacity` positions, also beyond the limit."""
        capacity = preferred if self.has_place(preferred) else capacity
        self._free_places(capacity)
        kv.swap_in(capacity)
        self._set_used([*self._used, kv])

    def discard(self, kv: KvState) -> None:
        """Free a KV cache whose contents nobody needs."""
        self._set_used([one for one in self._used if one is not kv])
        self.arena.remove(kv)

    def give_back(self, kv: KvState) -> None:
        """Keep a finished sequence's KV cache for others, or free it."""
        kv.cut(len(kv.tokens))
        kv.tokens = kv.tokens[: kv.length]
        if not self.reuses_prefixes or not kv.can_rewind or not kv.length or kv.is_swapped_out or kv.is_lost:
            self.discard(kv)
            return
        self._set_used([one for one in self._used if one is not kv])
        self.arena.place(kv, kv.length)
        self.spare.append(kv)
        self._free_places(0)

    def _set_used(self, used: list[KvState]) -> None:
        self._used = used
        self._used_positions = sum(kv.capacity for kv in used)  # other threads read it

    def _longest_prefix(self, tokens: list[int]) -> tuple[KvState | None, int]:
        """Return the KV cache that has the most of the first tokens, and how many; a kept one rather than another."""
        best, most = None, 0
        for kv in [*reversed(self.spare), *self._used] if self.reuses_prefixes else []:
            common = min(common_prefix(tokens, kv.tokens), kv.length, len(tokens) - 1)
            if common > most and not kv.is_lost:
                best, most = kv, common
        return best, most

    def _takes_over(self, source: KvState, common: int, capacity: int) -> bool:
        """Return whether a sequence continues a kept KV cache itself rather than a copy of its first positions.

        A copy leaves the other tokens to a sequence that continues them, but may free the KV caches of others.
        """
        lost = source.length - common
        if not self.has_place(capacity + source.capacity):
            return True
        if lost > common:
            return False
        if lost <= _FEW_TOKENS:
            return True
        kept = sum(kv.capacity for kv in self.spare) + capacity
        return kept > self._spare_limit if self._limit is None else self._used_positions + kept > self._limit

    def _free_places(self, needed: int, besides: Sequence[KvState] = ()) -> None:
        """Free kept KV caches, the ones used first, until all others and `needed` more positions fit.

        `besides`: KV caches that are not freed; those that are not in use count as if they were.
        """
        used = needed + sum(kv.capacity for kv in {*self._used, *besides})

        def fits(kept: Sequence[KvState]) -> bool:
            size = sum(kv.capacity for kv in kept)
            return size <= self._spare_limit if self._limit is None else used + size <= self._limit

        kept = [kv for kv in self.spare if kv not in besides]
        while kept and not fits(kept):
            kept.pop(0)
        self._drop([kv for kv in self.spare if kv not in kept and kv not in besides])

    def _drop(self, dropped: Sequence[KvState]) -> None:
        for kv in dropped:
            self.arena.remove(kv)
        self.spare = [kv for kv in self.spare if kv not in dropped]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two sequences have in common."""
    length = min(len(one), len(other))
    for start in range(0, length, _COMPARED_TOKENS):  # slices are compared much faster than tokens
        parts = [tokens[start : min(start + _COMPARED_TOKENS, length)] for tokens in (one, other)]
        if parts[0] != parts[1]:
            return start + next(i for i, (a, b) in enumerate(zip(*parts, strict=True)) if a != b)
    return length
