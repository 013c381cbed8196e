"""From a profile to the time of a step: for any policy of the latency model, K, cutoff, number of slots and link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spmoe.bench.profile import Behaviour, CopyTime, EngineProfile, PassTime
from spmoe.errors import UsageError
from spmoe.predict.latency import BLIND, SURE, Costs, Guess, Habits, Step, StepTime, predict_step


@dataclass(frozen=True, slots=True)
class Needs:
    """What a step of some policy needs, misses and is told ahead; experts per layer."""

    needed: float
    missing: float
    draft: Guess = BLIND
    own: Guess = BLIND


class NeedsOf(Protocol):
    """Where needs are known from."""

    def __call__(self, policy: str, draft_tokens: int, slots: int) -> Needs: ...


class ShownNeeds:
    """As the profile's own generations showed them, carried to other K and budgets by the rules of `Habits`."""

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile

    def __call__(self, policy: str, draft_tokens: int, slots: int) -> Needs:
        shown, subject = _shown(self._profile, policy), self._profile.subject
        habits = Habits(
            subject.layers, subject.experts_per_layer, subject.top_k, shown.slots, shown.draft_tokens + 1, shown.needed,
            shown.missing,
        )  # fmt: skip
        rows = draft_tokens + 1
        draft, own = (
            Guess(shown.draft_recall, shown.draft_precision or 1.0),
            Guess(shown.own_recall, shown.own_precision or 1.0),
        )
        return Needs(habits.needed_for(rows), habits.missing_for(rows, slots), draft, own)


class Predictor:
    """The latency model over one profile; `needs` is what its own generations showed unless given."""

    def __init__(self, profile: EngineProfile, needs: NeedsOf | None = None) -> None:
        self.profile = profile
        self._needs = needs or ShownNeeds(profile)

    def needs(self, policy: str, draft_tokens: int, slots: int) -> Needs:
        """What such a step needs and misses."""
        return self._needs(policy, draft_tokens, slots)

    def step(
        self,
        policy: str,
        draft_tokens: int,
        cutoff: int,
        slots: int,
        *,
        link: float | None = None,
        missing: float | None = None,
        costs: Costs | None = None,
    ) -> StepTime:
        """Predict a step; `link` in bytes per second, `missing` and `costs` where they are known better."""
        needs, subject = self.needs(policy, draft_tokens, slots), self.profile.subject
        found = needs.missing if missing is None else missing
        return predict_step(
            Step(
                costs or self.costs(policy, draft_tokens, found, link), policy, subject.layers,
                draft_tokens, cutoff, found, max(needs.needed, found),
                subject.top_k / subject.experts_per_layer, needs.draft, SURE if policy == "oracle" else needs.own,
                slots, self._by_layer(policy),
            )
        )  # fmt: skip

    def _by_layer(self, policy: str) -> tuple[float, ...]:
        """How layers share what is missing, as the policy's own generations showed it."""
        shown = _shown(self.profile, policy)
        return tuple(one / shown.missing for one in shown.missing_by_layer) if shown.missing else ()

    def costs(self, policy: str, draft_tokens: int, missing: float, link: float | None = None) -> Costs:
        """What the parts take: as long as in this policy's own generations, scaled by rows as single passes are."""
        profile, shown = self.profile, _shown(self.profile, policy)
        contention = profile.contention
        compute = contention.compute_slowdown if contention is not None else 1.0
        load = self.load_seconds(missing, link)
        # what those generations took had copies beside it for a part of the time
        busy = (
            min(1.0, shown.loads * self.load_seconds(shown.missing) / shown.step_seconds) if shown.step_seconds else 0.0
        )
        alone = 1 + (compute - 1) * busy
        rows = _at(profile.verify, draft_tokens + 1) / _at(profile.verify, shown.rows)
        draft_pass = shown.draft_seconds / shown.passes if shown.passes else _at(profile.draft, 1)
        return Costs(
            draft_pass / alone,
            shown.compute_seconds * rows / profile.subject.layers / alone,
            load,
            profile.expert_share,
            compute,
            contention.link_slowdown if contention is not None else 1.0,
        )

    def load_seconds(self, together: float, link: float | None = None) -> float:
        """One expert, so many asked for at once; over another link its bytes take that, and what was added here."""
        profile = self.profile
        if not profile.loads:
            return profile.subject.expert_bytes / link if link else 0.0
        here = per_expert(profile.loads, together)
        if link is None:
            return here
        raw = next((one.median for one in profile.copies if one.experts == 1.0), here)
        return max(0.0, here - raw) + profile.subject.expert_bytes / link


def _shown(profile: EngineProfile, policy: str) -> Behaviour:
    """What generations under a policy showed or, where there were none, those that fetched nothing ahead."""
    found = profile.behaviour(policy) or profile.behaviour("on-demand")
    if found is None:
        raise UsageError("the profile holds no generations to go by; make it anew with `spmoe profile -o FILE`")
    return found


def _at(times: Sequence[PassTime], rows: float) -> float:
    """A pass's median at so many rows: on the line between its neighbours, and on from the last two."""
    return _line([(one.rows, one.median) for one in times], rows) if times else 0.0


def per_expert(times: Sequence[CopyTime], together: float) -> float:
    """Seconds of one load where so many are asked for at once."""
    return _line([(one.experts, one.median / one.experts) for one in times], min(together, times[-1].experts))


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    after = next((i for i, (at, _) in enumerate(points) if at >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))
