"""The cutoff: how many layers the draft stage may prefetch for, from a profile and an analytical latency model.

Two forms. `fastest_cutoff` predicts the time of a step for every depth, and takes the greatest that is as good as any,
or none where prefetching gains nothing: where the link is the bottleneck, copies that come too late to hide wholly
still hide in part, and so does what the host does between layers, which the model does not know.
`just_in_time_cutoff` is stricter, nothing may be late: with k missing experts per layer, `t_io` seconds per expert,
`t_draft` and `t_verify` seconds per layer, K draft tokens and L_all layers, the first L layers may be prefetched for as
long as

    memory:   l * k                 <=  free slots + (l - 1) * n
    time:     l * k * t_io          <=  K * L_all * t_draft + (l - 1) * t_verify        for every l <= L

where n is the number of experts a layer uses: once it has run, its slots may be written again, and a copy for layer l
is only due when the l - 1 layers before it have run. So every layer's experts arrive just in time, into a free slot.
The first form keeps the bound on memory. k is what requests have shown, and until then what even routing would give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spmoe.config import Cutoff, CutoffMode
from spmoe.predict.latency import Costs, Guess, Step, evenly_needed, predict_step

RECALL, PRECISION = 0.9, 0.95  # of draft-driven prediction, over the rows of a step, as the pair that ships shows them
_INDIFFERENCE = 0.005
ENOUGH_STEPS = 16  # verified ones, from which on the number of missing experts is believed


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured on this machine, for this pair and these settings."""

    draft_seconds_per_layer: float  # one draft pass of one token
    draft_layers: int
    verify_seconds_per_layer: float  # K + 1 rows, experts resident
    seconds_per_expert: float  # store to slot
    free_slots: int  # slots beyond what one layer needs at once
    missing_per_layer: float | None = None  # as real requests showed it; None: not known yet
    expert_share: float = 0.0  # of a verified layer, what comes after its router has chosen


@dataclass(frozen=True, slots=True)
class CutoffInputs:
    """What the formula needs besides the profile."""

    layers: int  # MoE layers of the target
    experts_per_layer: int
    top_k: int
    slots: int
    draft_tokens: int

    @property
    def needed_per_layer(self) -> float:
        """Expected experts of a layer that K + 1 rows need between them, under even routing."""
        return evenly_needed(self.experts_per_layer, self.top_k, self.draft_tokens + 1)

    @property
    def free_slots(self) -> int:
        """Slots beyond what one layer is expected to need at once."""
        return max(0, self.slots - math.ceil(self.needed_per_layer))

    @property
    def missing_per_layer(self) -> float:
        """Those of them that no slot holds."""
        return self.needed_per_layer * max(0.0, 1 - self.slots / (self.layers * self.experts_per_layer))


def choose_cutoff(cutoff: Cutoff, profile: Profile | None, inputs: CutoffInputs) -> int:
    """How many layers may be prefetched for."""
    if cutoff.mode is CutoffMode.AUTO and profile is not None:
        return fastest_cutoff(profile, inputs)
    if cutoff.mode is CutoffMode.JUST_IN_TIME and profile is not None:
        return just_in_time_cutoff(profile, inputs)
    return min(cutoff.layers, inputs.layers) if cutoff.mode is CutoffMode.FIXED else inputs.layers


def just_in_time_cutoff(profile: Profile, inputs: CutoffInputs) -> int:
    """The largest L that satisfies both bounds; all layers when nothing is ever missing."""
    missing, window = _missing(profile, inputs), _draft_window(profile, inputs)
    if missing <= 0.0:
        return inputs.layers
    for layer in range(1, inputs.layers + 1):
        due = window + (layer - 1) * profile.verify_seconds_per_layer
        if not _has_room(layer, profile, inputs) or layer * missing * profile.seconds_per_expert > due:
            return layer - 1
    return inputs.layers


def fastest_cutoff(profile: Profile, inputs: CutoffInputs) -> int:
    """The greatest depth, of those that have room, whose step is predicted to be as fast as the fastest; 0 if that is.

    Deeper was faster where the model saw no difference; and where it sees none from 0, there is nothing to hide.
    """
    depths = [0]
    while depths[-1] < inputs.layers and _has_room(depths[-1] + 1, profile, inputs):
        depths.append(depths[-1] + 1)
    if _missing(profile, inputs) <= 0.0:
        return inputs.layers
    times = [step_seconds(profile, inputs, depth) for depth in depths]
    enough = (1 + _INDIFFERENCE) * min(times)
    fast = [depth for depth, time in zip(depths, times, strict=True) if time <= enough]
    return fast[-1] if fast[0] else 0


def step_seconds(profile: Profile, inputs: CutoffInputs, cutoff: int) -> float:
    """The predicted time of a step that prefetches for the first `cutoff` layers."""
    return predict_step(
        Step(
            costs=Costs(
                draft_pass=profile.draft_layers * profile.draft_seconds_per_layer,
                verify_layer=profile.verify_seconds_per_layer,
                load=profile.seconds_per_expert,
                expert_share=profile.expert_share,
            ),
            policy="draft-gate",
            layers=inputs.layers,
            passes=inputs.draft_tokens,
            cutoff=cutoff,
            missing=_missing(profile, inputs),
            needed=inputs.needed_per_layer,
            row_share=inputs.top_k / inputs.experts_per_layer,
            draft=Guess(RECALL, PRECISION),
        )
    ).seconds


def _missing(profile: Profile, inputs: CutoffInputs) -> float:
    return inputs.missing_per_layer if profile.missing_per_layer is None else profile.missing_per_layer


def _draft_window(profile: Profile, inputs: CutoffInputs) -> float:
    return inputs.draft_tokens * profile.draft_layers * profile.draft_seconds_per_layer


def _has_room(layers: int, profile: Profile, inputs: CutoffInputs) -> bool:
    return layers * _missing(profile, inputs) <= profile.free_slots + (layers - 1) * inputs.needed_per_layer
