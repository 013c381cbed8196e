"""The cutoff: how many layers the draft stage may prefetch for, from a profile and an analytical latency model.

With k missing experts per layer, `t_io` seconds per expert, `t_draft` and `t_verify` seconds per layer, K draft tokens
and L_all layers, the first L layers may be prefetched for as long as

    memory:   l * k                 <=  free slots + (l - 1) * n
    time:     l * k * t_io          <=  K * L_all * t_draft + (l - 1) * t_verify        for every l <= L

where n is the number of experts a layer uses: once it has run, its slots may be written again, and a copy for layer l
is only due when the l - 1 layers before it have run. So every layer's experts arrive just in time, into a free slot.
k is what requests have shown, and until then what even routing would give.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured on this machine, for this pair and these settings."""

    draft_seconds_per_layer: float  # one draft pass of one token
    draft_layers: int
    verify_seconds_per_layer: float  # K + 1 rows, experts resident
    seconds_per_expert: float  # store to slot
    free_slots: int  # slots beyond what one layer needs at once
    missing_per_layer: float | None = None  # as real requests showed it; None: not known yet


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
        unused = (1 - self.top_k / self.experts_per_layer) ** (self.draft_tokens + 1)
        return self.experts_per_layer * (1 - unused)

    @property
    def missing_per_layer(self) -> float:
        """Those of them that no slot holds."""
        return self.needed_per_layer * max(0.0, 1 - self.slots / (self.layers * self.experts_per_layer))


def last_pass_pays(profile: Profile, inputs: CutoffInputs) -> bool:
    """Whether one more draft pass, which shows the last draft token's experts too, costs less than they would.

    Of the K + 1 rows that are verified the draft's own K passes have seen all but the last. About half of what that
    row alone needs is missed by the others' predictions and must be loaded while everything waits.
    """
    missing = inputs.missing_per_layer if profile.missing_per_layer is None else profile.missing_per_layer
    unseen = missing * inputs.layers / (inputs.draft_tokens + 1) / 2
    return unseen * profile.seconds_per_expert > profile.draft_layers * profile.draft_seconds_per_layer


def cutoff_layer(profile: Profile, inputs: CutoffInputs) -> int:
    """The largest L that satisfies both bounds; all layers when nothing is ever missing."""
    missing = inputs.missing_per_layer if profile.missing_per_layer is None else profile.missing_per_layer
    if missing <= 0.0:
        return inputs.layers
    draft_window = inputs.draft_tokens * profile.draft_layers * profile.draft_seconds_per_layer
    deepest = 0
    for layer in range(1, inputs.layers + 1):
        in_memory = layer * missing <= profile.free_slots + (layer - 1) * inputs.needed_per_layer
        window = draft_window + (layer - 1) * profile.verify_seconds_per_layer
        in_time = layer * missing * profile.seconds_per_expert <= window
        if not (in_memory and in_time):
            break
        deepest = layer
    return deepest
