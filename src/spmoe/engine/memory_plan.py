"""How fast memory is divided: a noun that profiles keep, so it is apart from the work of dividing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How fast memory is divided, in bytes."""

    slots: int  # a count
    slot_bytes: int
    resident: int  # weights of target and draft
    kv: int  # both attention states, at the longest context planned for
    workspace: int
    context: int  # positions
    limit: int | None  # that nothing may exceed; None: not limited
