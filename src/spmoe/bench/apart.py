"""Configurations that take turns on one engine, kept apart as if each had an engine of its own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from spmoe.engine.engine import Engine, LearnedState


class Apart:
    """Who comes next finds slots, eviction and policies as it left them, and at first empty and new.

    Else each would be measured on slots that the others, and above all the one before it with the same prompt, have
    filled. Where there are slots for all experts there is nothing to keep apart.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._idle = engine.slots >= engine.store.count
        self._whose: Hashable = None
        self._experiences: dict[Hashable, LearnedState] = {}

    def enter(self, whose: Hashable, changes: dict[str, Any]) -> None:
        """The next requests are this one's, and the engine is so configured; what moves for that is not counted."""
        if self._idle or whose == self._whose:
            self._engine.reconfigure(**changes)
            return
        self._whose = whose
        self._engine.reconfigure(self._experiences.setdefault(whose, LearnedState()), **changes)
