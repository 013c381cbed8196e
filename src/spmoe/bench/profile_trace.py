"""What a step needs and misses, from a recorded trace in place of a profile's own generations."""

from __future__ import annotations

from spmoe.bench.profile import EngineProfile
from spmoe.bench.profile_predict import Needs, per_expert
from spmoe.config import Cutoff, CutoffMode, Size
from spmoe.errors import UsageError
from spmoe.predict.latency import BLIND, Guess
from spmoe.replay.replay import ReplayConfig, Replayer
from spmoe.replay.trace import Trace

_QUICK_LINK = 1e6  # gigabytes per second: whatever is wished for arrives


class TraceNeeds:
    """As a recorded trace shows them when it is replayed with that policy, K and budget."""

    def __init__(self, trace: Trace, profile: EngineProfile) -> None:
        subject, shape = profile.subject, trace.shape
        ours = (subject.layers, subject.experts_per_layer, subject.top_k)
        if ours != (shape.layers, max(shape.experts), shape.top_k):
            raise UsageError(
                f"the trace is of a model with {shape.top_k} of {max(shape.experts)} experts in {shape.layers} layers, "
                f"and this one has {ours[2]} of {ours[1]} in {ours[0]}; record one of this model"
            )
        self._replayer = Replayer(trace)
        self._eviction, self._blob = subject.eviction, shape.expert_bytes
        load = per_expert(profile.loads, 1.0) if profile.loads else 0.0
        self._link = self._blob / load / 1e9 if load else _QUICK_LINK
        self._known: dict[tuple[str, int, int], Needs] = {}

    def __call__(self, policy: str, draft_tokens: int, slots: int) -> Needs:
        asked = (policy, draft_tokens, slots)
        if asked not in self._known:
            self._known[asked] = self._replay(policy, draft_tokens, slots)
        return self._known[asked]

    def _replay(self, policy: str, draft_tokens: int, slots: int) -> Needs:
        memory, every = Size(bytes=slots * self._blob), Cutoff(CutoffMode.ALL)
        as_here, at_once = (
            self._replayer.run(ReplayConfig(policy, self._eviction, draft_tokens, every, memory, link))
            for link in (self._link, _QUICK_LINK)
        )
        c, steps, guess = as_here.counters, as_here.steps * self._replayer.trace.shape.layers, BLIND
        if (told := at_once.counters).prefetch_loads:  # whatever was named has moved
            guess = Guess(
                told.prefetch_used / max(1, told.useful_loads), max(1, told.prefetch_used) / told.prefetch_loads
            )
        by_draft = "draft-gate" in policy.split("+")
        return Needs(c.asked / steps, c.useful_loads / steps, *((guess, BLIND) if by_draft else (BLIND, guess)))
