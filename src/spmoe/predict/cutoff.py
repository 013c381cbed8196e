"""The cutoff: the number of layers, counted from the first, that the draft stage may prefetch for.

`fastest_cutoff` (`--cutoff auto`) predicts the time of a step for every depth with the latency model. It returns the
greatest depth that is as fast as the fastest, or 0 where prefetching gains nothing. A copy that arrives too late still
hides part of its time, so depth rarely costs anything.

`just_in_time_cutoff` (`--cutoff just-in-time`) is stricter: no prefetched expert may be late. With k missing experts
per layer, t_io seconds per expert, t_draft and t_verify seconds per layer, K draft tokens and L_draft draft layers, it
returns the greatest L such that for every l <= L

    memory:   l * k            <=  free slots + (l - 1) * n
    time:     l * k * t_io     <=  K * L_draft * t_draft + (l - 1) * t_verify

n is the number of experts that a layer needs: its slots are free again when it has run. `fastest_cutoff` keeps the
bound on memory. k is learned from requests; until then it follows from uniform routing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spmoe.config import Cutoff, CutoffMode
from spmoe.predict.latency import PredictionQuality, StepCosts, StepInputs, expected_experts, predict_step

DRAFT_QUALITY = PredictionQuality(recall=0.9, precision=0.95)  # of the shipped pair, over the rows of a step
_TOLERANCE = 0.005  # relative difference below which two depths count as equally fast
ENOUGH_STEPS = 16  # verified steps after which the learned number of missing experts is used


@dataclass(frozen=True, slots=True)
class Profile:
    """Times measured on this machine, for one pair of models and one set of options."""

    draft_seconds_per_layer: float  # one draft pass of one token
    draft_layers: int
    verify_seconds_per_layer: float  # K + 1 rows, experts resident
    seconds_per_expert: float  # store to slot
    free_slots: int  # slots beyond the needs of one layer
    missing_per_layer: float | None = None  # learned from requests; None: not known yet
    expert_share: float = 0.0  # share of a verified layer that comes after its router
    layer_seconds: float = 0.0  # one row, experts resident


@dataclass(frozen=True, slots=True)
class CutoffInputs:
    """Inputs of the cutoff besides the profile."""

    layers: int  # MoE layers of the target
    experts_per_layer: int
    top_k: int
    slots: int
    draft_tokens: int  # K

    @property
    def needed_per_layer(self) -> float:
        """Expected experts that K + 1 rows need in a layer, under uniform routing."""
        return expected_experts(self.experts_per_layer, self.top_k, self.draft_tokens + 1)

    @property
    def free_slots(self) -> int:
        """Slots beyond the expected needs of one layer."""
        return max(0, self.slots - math.ceil(self.needed_per_layer))

    @property
    def missing_per_layer(self) -> float:
        """Expected needed experts of a layer that are not resident, under uniform routing."""
        return self.needed_per_layer * max(0.0, 1 - self.slots / (self.layers * self.experts_per_layer))


def choose_cutoff(cutoff: Cutoff, profile: Profile | None, inputs: CutoffInputs) -> int:
    """Return the number of layers to prefetch for; the automatic modes return all layers if there is no profile."""
    if cutoff.mode is CutoffMode.AUTO and profile is not None:
        return fastest_cutoff(profile, inputs)
    if cutoff.mode is CutoffMode.JUST_IN_TIME and profile is not None:
        return just_in_time_cutoff(profile, inputs)
    return min(cutoff.layers, inputs.layers) if cutoff.mode is CutoffMode.FIXED else inputs.layers


def just_in_time_cutoff(profile: Profile, inputs: CutoffInputs) -> int:
    """Return the greatest depth that meets both bounds; all layers if nothing is missing."""
    missing = _missing(profile, inputs)
    if missing <= 0.0:
        return inputs.layers
    draft_seconds = inputs.draft_tokens * profile.draft_layers * profile.draft_seconds_per_layer
    for layer in range(1, inputs.layers + 1):
        deadline = draft_seconds + (layer - 1) * profile.verify_seconds_per_layer
        if not _fits_slots(layer, profile, inputs) or layer * missing * profile.seconds_per_expert > deadline:
            return layer - 1
    return inputs.layers


def fastest_cutoff(profile: Profile, inputs: CutoffInputs) -> int:
    """Return the greatest depth, of those that fit the slots, that is as fast as the fastest; 0 if depth 0 is.

    In measurements the greater depth was faster where the model saw no difference.
    """
    if _missing(profile, inputs) <= 0.0:
        return inputs.layers
    depths = [0]
    while depths[-1] < inputs.layers and _fits_slots(depths[-1] + 1, profile, inputs):
        depths.append(depths[-1] + 1)
    times = [step_seconds(profile, inputs, depth) for depth in depths]
    limit = (1 + _TOLERANCE) * min(times)
    fast = [depth for depth, time in zip(depths, times, strict=True) if time <= limit]
    return fast[-1] if fast[0] else 0


def step_seconds(profile: Profile, inputs: CutoffInputs, cutoff: int) -> float:
    """Predict the time of a step that prefetches for the first `cutoff` layers, in seconds."""
    return predict_step(
        StepInputs(
            costs=StepCosts(
                draft_pass=profile.draft_layers * profile.draft_seconds_per_layer,
                verify_layer=profile.verify_seconds_per_layer,
                load=profile.seconds_per_expert,
                expert_share=profile.expert_share,
            ),
            layers=inputs.layers,
            draft_passes=inputs.draft_tokens,
            cutoff=cutoff,
            missing=_missing(profile, inputs),
            needed=inputs.needed_per_layer,
            row_share=inputs.top_k / inputs.experts_per_layer,
            from_draft=DRAFT_QUALITY,
        )
    ).seconds


def _missing(profile: Profile, inputs: CutoffInputs) -> float:
    return inputs.missing_per_layer if profile.missing_per_layer is None else profile.missing_per_layer


def _fits_slots(layers: int, profile: Profile, inputs: CutoffInputs) -> bool:
    return layers * _missing(profile, inputs) <= profile.free_slots + (layers - 1) * inputs.needed_per_layer
