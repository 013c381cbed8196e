"""On demand: wishes for nothing. Experts move when a router asks for them, and not before."""

from __future__ import annotations

from collections.abc import Iterable

from spmoe.types import Accepted, Seen, Stage, Wish


class OnDemand:
    """The baseline that prefetching is measured against."""

    stages: frozenset[Stage] = frozenset()

    def on_seen(self, seen: Seen) -> Iterable[Wish]:
        return ()

    def on_accept(self, accepted: Accepted) -> None:
        pass
