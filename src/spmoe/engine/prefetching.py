"""Prefetching of an engine: its prefetch policy, the cutoff, and the context that policies are built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from spmoe.config import AUTO_DRAFT, CutoffMode, EngineConfig, drafter_name
from spmoe.draft.base import Drafter
from spmoe.engine.loop import Loop
from spmoe.engine.memory import all_resident
from spmoe.engine.parts import EngineParts, LearnedState
from spmoe.engine.profiling import (
    cutoff_inputs,
    measure,
    profile_path,
    profile_settings,
    read_profile,
    slow_draft_notice,
    write_profile,
)
from spmoe.experts.store import StoreSpec
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.observe.ledger import Counters
from spmoe.predict.costs import Rates
from spmoe.predict.cutoff import ENOUGH_STEPS, CutoffInputs, Profile, choose_cutoff
from spmoe.predict.governor import usual_draft_tokens
from spmoe.predict.policies import plan_policy
from spmoe.predict.policies.base import NO_RECORDING, Need, PolicyContext, PrefetchPolicy, RecordedRouting
from spmoe.predict.projection import HiddenStateProjection
from spmoe.registry import ON_DEMAND


@dataclass
class Prefetching:
    """The prefetch policy of an engine, with its cutoff and the profile that the cutoff comes from."""

    policy: PrefetchPolicy
    config: EngineConfig
    label: str = ""  # name of the policy, with what it has chosen
    cutoff: int | None = None  # layers, counted from the first, that may be prefetched for; None: no cutoff
    step_budget: int | None = None  # bytes that may be prefetched in one step; None: no bound
    notices: tuple[str, ...] = ()
    inputs: CutoffInputs | None = None
    profile: Profile | None = None  # None: the cutoff needs none
    profile_file: Path | None = None  # that caches the profile
    since: Counters = field(default_factory=Counters)  # counts before this configuration began to learn

    def learn_cutoff(self, counters: Counters, loop: Loop) -> None:
        """Choose an automatic cutoff again from the experts that steps have missed, once there are enough steps."""
        counts = counters.minus(self.since)
        if self.profile is None or self.inputs is None or counts.verified < ENOUGH_STEPS:
            return
        missing = counts.missing / counts.verified / self.inputs.layers
        self.profile = replace(self.profile, missing_per_layer=missing)
        if not self.policy.uses_cutoff:
            return
        k = loop.max_draft_tokens if loop.governor is None else round(counts.drafted / counts.verified)
        known = learned_profile(self.profile, loop.rates)
        self.cutoff = choose_cutoff(self.config.cutoff, known, replace(self.inputs, draft_tokens=k))
        self.policy.set_cutoff(self.cutoff)


def learned_profile(profile: Profile, rates: Rates) -> Profile:
    """Return a profile with the rates that steps have shown since it was measured."""
    draft = rates.draft_pass / profile.draft_layers if rates.draft_pass and profile.draft_layers else None
    return replace(
        profile,
        draft_seconds_per_layer=draft or profile.draft_seconds_per_layer,
        seconds_per_expert=rates.load or profile.seconds_per_expert,
    )


@dataclass(frozen=True)
class DraftSide:
    """The draft as prefetch policies see it."""

    drafting: bool  # whether tokens are drafted at all
    runner: ModelRunner | None  # None: no model drafts
    routes_experts: bool  # whether the draft's own routers name the target's experts
    by_default: bool = False  # whether `--draft auto` chose it: then `default_draft_notice` says what predicts experts


def make_prefetching(
    config: EngineConfig,
    parts: EngineParts,
    learned: LearnedState,
    drafter: Drafter,
    recorded: Callable[[], RecordedRouting] | None,
) -> Prefetching:
    """Make the policy that the configuration names, or its fallback, with its cutoff.

    `recorded` returns the routing recorded for the request that runs; None if there is none.
    """
    spec = parts.models.spec
    draft = DraftSide(drafter.proposes, drafter.runner, drafter.routes_experts, config.draft == AUTO_DRAFT)
    context = policy_context(parts.models.target, spec.experts, draft, parts.projection, recorded)
    plan = plan_policy(policy_name(config, parts.models.device, parts.memory.slots, spec), context)
    cutoff = _Cutoff()
    if plan.uses_cutoff:
        on_cpu = parts.models.device.type == "cpu"
        admits = plan.admits and not (on_cpu and drafter.runner is None)  # nothing predicts experts there
        cutoff = _find_cutoff(config, parts, learned, drafter.runner, admits=admits)
        copies = None if on_cpu else _copies_per_layer(cutoff.profile)  # on a CPU, copies take the cores of layers
        context = replace(context, cutoff=cutoff.layers, copies_per_layer=copies)
    policy = plan.build(context)
    if policy.learns:  # reuse the policy that has learned under this configuration
        policy = learned.policies.setdefault((config.prefetch, config.num_speculative_tokens), policy)
        if cutoff.layers is not None:
            policy.set_cutoff(cutoff.layers)
    # more bytes than the slots hold would evict prefetches of the same step before they are used
    budget = parts.memory.slots * spec.layout.nbytes if policy.uses_step_budget else None
    notices = (*plan.notices, *cutoff.notices)
    chosen = default_draft_notice(config, plan.sources(context), parts.models.device.type) if drafter.proposes else None
    if chosen is not None:
        notices = (chosen, *notices)
    return Prefetching(
        policy,
        config,
        plan.label(context),
        cutoff.layers if policy.uses_cutoff else None,
        budget,
        notices,
        cutoff.inputs,
        cutoff.profile,
        cutoff.file,
        cutoff.since,
    )


def default_draft_notice(config: EngineConfig, policy: str, device_type: str) -> str | None:
    """Return the notice of a draft without a model that `--draft auto` chose; None for any other draft."""
    name, _ = drafter_name(config.resolved_draft)
    if config.draft != AUTO_DRAFT or name == "model" or not config.num_speculative_tokens:
        return None
    better = "--draft DIR, a model with the same tokenizer"
    if device_type != "cpu":  # on a CPU, quantized experts are slower than the target's own
        better += ", or --draft self:int4"
    return f"no --draft given: drafting with {name}, prefetching with {policy}; {better}, predicts experts earlier"


def policy_name(config: EngineConfig, device: torch.device, slots: int, spec: StoreSpec) -> str:
    """Return the configured policy; on-demand if every expert stays in a slot, since nothing is left to prefetch."""
    return ON_DEMAND if all_resident(config, device, slots, spec) else config.prefetch


def policy_context(
    target: Target,
    experts_per_layer: Sequence[int],
    draft: DraftSide,
    projection: HiddenStateProjection | bool | None,
    recorded: Callable[[], RecordedRouting] | None = None,
) -> PolicyContext:
    """Return the context that policies are built from; models may be on the meta device.

    `projection` may be True if there is one that is not loaded. The cutoff is not known yet.
    """
    runner = draft.runner
    return PolicyContext(
        experts_per_layer=experts_per_layer,
        gates=target,
        gated_layers=target.gated,
        drafting=draft.drafting,
        draft_depth=None if runner is None else runner.depth_count,
        draft_routes=draft.routes_experts,
        projection=projection if isinstance(projection, HiddenStateProjection) else None,
        recorded_routing=recorded,
        unmet={
            **_unmet_by_draft(draft, target, projection),
            **_unmet_by_target(target),
            **({} if recorded is not None else {Need.RECORDED_ROUTING: NO_RECORDING}),
        },
    )


@dataclass(frozen=True)
class _Cutoff:
    layers: int | None = None
    inputs: CutoffInputs | None = None
    profile: Profile | None = None
    file: Path | None = None
    since: Counters = field(default_factory=Counters)
    notices: tuple[str, ...] = ()


def _copies_per_layer(profile: Profile | None) -> float | None:
    if profile is None or not profile.seconds_per_expert:
        return None
    return profile.layer_seconds / profile.seconds_per_expert


def _find_cutoff(
    config: EngineConfig, parts: EngineParts, learned: LearnedState, draft: ModelRunner | None, *, admits: bool
) -> _Cutoff:
    """Choose the cutoff from a profile, which is measured if there is none yet.

    `admits`: admission needs the profile too, whatever the cutoff is and whether or not there is a draft.
    """
    target, usual = parts.models.target, usual_draft_tokens(config.num_speculative_tokens)
    inputs = cutoff_inputs(parts.models.spec, target.top_k, parts.memory.slots, usual)
    if not admits and (config.cutoff.mode is CutoffMode.FIXED or draft is None):
        return _Cutoff(choose_cutoff(config.cutoff, None, inputs), inputs)
    file = profile_path(profile_settings(config, parts.models.checkpoint, parts.draft_checkpoint, inputs))
    profile, counts = learned.profiles.get(file, (read_profile(file), Counters()))
    if profile is None:
        wait = parts.runtime.backend.synchronize
        profile = measure(target, draft, parts.experts, inputs, parts.clock, wait)
        write_profile(file, profile, parts.origins)
    since = parts.experts.ledger.counters.minus(counts)
    notices: tuple[str, ...] = ()
    if parts.models.device.type != "cpu" and draft is not None:  # on a CPU, `compute_times` measures it for any policy
        drafted = profile.draft_layers * profile.draft_seconds_per_layer
        verified = inputs.layers * profile.verify_seconds_per_layer
        notice = slow_draft_notice(str(config.resolved_draft), usual, drafted, verified, verified)
        notices = () if notice is None else (notice,)
    return _Cutoff(choose_cutoff(config.cutoff, profile, inputs), inputs, profile, file, since, notices)


def _unmet_by_target(target: Target) -> dict[Need, str]:
    """Return why policies cannot predict from the target's hidden states, if they cannot."""
    if not target.gated:
        return {Need.TARGET_STATES: "the target's gates cannot be called alone"}
    if not target.has_hidden_states:
        return {Need.TARGET_STATES: "the target's hidden states cannot be read"}
    return {}


def _unmet_by_draft(
    draft: DraftSide, target: Target, projection: HiddenStateProjection | bool | None
) -> dict[Need, str]:
    """Return why policies cannot predict from the draft, if they cannot; "" if nothing is drafted."""
    runner = draft.runner
    if not draft.drafting:
        return {Need.DRAFT_STATES: ""}
    if draft.routes_experts:
        return {}
    if runner is None:
        reason = "" if draft.by_default else "a draft without a model has no hidden states to predict experts from"
        return {Need.DRAFT_STATES: reason}
    if not target.gated:
        return {Need.DRAFT_STATES: "the target's gates cannot be called alone"}
    if not runner.has_hidden_states:
        return {Need.DRAFT_STATES: "the draft's hidden states cannot be read"}
    if runner.hidden_size != target.hidden_size and not projection:
        reason = (
            f"the draft is {runner.hidden_size} wide and the target {target.hidden_size}, so the target's gates do not "
            "accept the draft's hidden states unless `spmoe fit-predictor` fits maps between them"
        )
        return {Need.DRAFT_STATES: reason}
    return {}
