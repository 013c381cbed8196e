"""On demand: wishes for nothing. Experts move when a router asks for them, and not before."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from spmoe.types import Accepted, Seen, Stage, Wish


class OnDemand:
    """The baseline that prefetching is measured against."""

    name = "on-demand"
    stages: frozenset[Stage] = frozenset()
    last_pass = False

    def ask(self, stage: Stage, depths: range, residual: Tensor) -> None:
        pass

    def on_seen(self, seen: Seen) -> Iterable[Wish]:
        return ()

    def on_accept(self, accepted: Accepted) -> None:
        pass
