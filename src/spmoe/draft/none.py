"""No draft: plain decoding, through the same step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from spmoe import types
from spmoe.draft.base import DraftContext, Drafter, Observers
from spmoe.registry import DRAFTERS


@DRAFTERS.register("none")
class NoDraft(Drafter):
    """Proposes nothing."""

    proposes = False

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        return cls()

    def propose(self, sequences: Sequence[types.Sequence], k: int, observers: Observers) -> list[types.Draft]:
        return [types.Draft([]) for _ in sequences]
