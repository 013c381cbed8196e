"""Rehearsals: the runs from which the oracle knows what comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmoe.bench.apart import Apart
from spmoe.bench.settings import Setting
from spmoe.engine.llm import LLM
from spmoe.predict.policies.base import RecordedRouting


class Rehearsals:
    """Each run that the oracle is to know is made once before, on demand; being greedy, it takes the same steps again.

    `complete` runs a prompt to so many tokens.
    """

    def __init__(self, complete: Callable[[LLM, list[int], int], Any]) -> None:
        self._complete = complete
        self._recordings: dict[tuple[object, ...], RecordedRouting] = {}

    def prepare(self, llm: LLM, apart: Apart, setting: Setting, prompt: list[int], tokens: int) -> None:
        """Have the engine know what its next run will use, where that is for the oracle."""
        if setting.prefetch != "oracle":
            return
        run = (setting.memory, setting.draft_tokens, tuple(prompt), tokens)
        if run not in self._recordings:
            apart.enter(("rehearsal", setting.eviction), {**setting.changes, "prefetch": "on-demand"})
            with llm.engine.record() as recording:
                self._complete(llm, prompt, tokens)
            self._recordings[run] = recording
        llm.engine.recording = self._recordings[run]
