"""The prefetch policy of an engine, made from the engine's parts, and its cutoff."""

from __future__ import annotations

from dataclasses import replace

from spmoe.config import CutoffMode
from spmoe.draft.base import Drafter
from spmoe.draft.model import DraftModel
from spmoe.draft.none import NoDraft
from spmoe.draft.self_quantized import QuantizedSelfRunner
from spmoe.engine.cutoffs import cutoff_inputs, profile_settings, usual_draft_tokens
from spmoe.engine.engine import Engine
from spmoe.engine.profiling import measure, profile_path, read_profile, write_profile
from spmoe.models.target import Target
from spmoe.observe.ledger import Counters
from spmoe.predict.cutoff import choose_cutoff
from spmoe.predict.policies import plan_policy
from spmoe.predict.policies.base import NO_RECORDING, Need, PolicyContext, PrefetchPolicy
from spmoe.predict.projection import HiddenStateProjection


def make_policy(engine: Engine) -> PrefetchPolicy:
    """Make the policy that the configuration names, or its fallback; append notices to the engine's."""
    context = policy_context(engine)
    plan = plan_policy(engine.config.prefetch, context)
    engine.notices += [notice for notice in plan.notices if notice not in engine.notices]
    if plan.uses_cutoff:
        engine.cutoff = _find_cutoff(engine)
        context = replace(context, cutoff=engine.cutoff)
    policy = plan.build(context)
    if policy.learns:
        policy = _keep(engine, policy)
    if policy.uses_step_budget:
        # more bytes than the slots hold would evict prefetches of the same step before they are used
        engine.source.grants.step_budget = engine.slots * engine.store.layout.nbytes
    return policy


def policy_context(engine: Engine) -> PolicyContext:
    """Collect everything that policies may be built from, except the cutoff."""
    target, drafter = engine.target, engine.loop.drafter
    runner = drafter.runner if isinstance(drafter, DraftModel) else None
    recorded = engine.recording is not None
    return PolicyContext(
        experts_per_layer=engine.store.experts,
        gates=target,
        gated_layers=target.gated,
        drafting=not isinstance(drafter, NoDraft),
        draft_depth=None if runner is None else runner.depth_count,
        draft_routes=isinstance(runner, QuantizedSelfRunner),
        projection=engine.projection,
        recorded_routing=lambda: engine.recording or [],  # the engine gets another recording for every request
        unmet={
            **_unmet_by_draft(drafter, target, engine.projection),
            **_unmet_by_target(target),
            **({} if recorded else {Need.RECORDED_ROUTING: NO_RECORDING}),
        },
    )


def _keep(engine: Engine, policy: PrefetchPolicy) -> PrefetchPolicy:
    """Return the policy that learned from earlier requests with this configuration; keep `policy` if there is none."""
    key = (engine.config.prefetch, engine.config.num_speculative_tokens)
    kept = engine.learned.policies.setdefault(key, policy)
    if engine.cutoff is not None:
        kept.set_cutoff(engine.cutoff)
    return kept


def _find_cutoff(engine: Engine) -> int:
    """Choose the cutoff from a profile, which is measured if there is none yet."""
    config, target, drafter = engine.config, engine.target, engine.loop.drafter
    usual = usual_draft_tokens(config.num_speculative_tokens)
    inputs = cutoff_inputs(engine.store, target.top_k, engine.slots, usual)
    if config.cutoff.mode is not CutoffMode.FIXED:
        if not isinstance(drafter, DraftModel):
            return len(engine.store.experts)  # the profile is one of a draft and a target
        file = profile_path(profile_settings(config, engine.checkpoint, engine.draft_checkpoint, inputs))
        engine.profile_file = file
        engine.profile, steps = engine.learned.learnt.get(file, (read_profile(file), Counters()))
        if engine.profile is None:
            wait = engine.room.backend.synchronize
            engine.profile = measure(target, drafter.runner, engine.source, inputs, engine.clock, wait)
            write_profile(file, engine.profile)
        engine.since = engine.loop.counters.minus(steps)
    return choose_cutoff(config.cutoff, engine.profile, inputs)


def _unmet_by_target(target: Target) -> dict[Need, str]:
    """Say why policies cannot predict from the target's hidden states, if they cannot."""
    if not target.gated:
        return {Need.TARGET_STATES: "the target's gates cannot be called alone"}
    if not target.has_hidden_states:
        return {Need.TARGET_STATES: "the target's hidden states cannot be read"}
    return {}


def _unmet_by_draft(drafter: Drafter, target: Target, projection: HiddenStateProjection | None) -> dict[Need, str]:
    """Say why policies cannot predict from the draft, if they cannot; "" where nothing is drafted."""
    if isinstance(drafter, NoDraft):
        return {Need.DRAFT_STATES: ""}
    if not isinstance(drafter, DraftModel):
        return {Need.DRAFT_STATES: "a draft without a model has no hidden states to predict experts from"}
    draft = drafter.runner
    if isinstance(draft, QuantizedSelfRunner):
        return {}  # its own routers predict
    if not target.gated:
        return {Need.DRAFT_STATES: "the target's gates cannot be called alone"}
    if not draft.has_hidden_states:
        return {Need.DRAFT_STATES: "the draft's hidden states cannot be read"}
    if draft.hidden_size != target.hidden_size and projection is None:
        reason = (
            f"the draft is {draft.hidden_size} wide and the target {target.hidden_size}, so the target's gates do not "
            "accept the draft's hidden states unless `spmoe fit-predictor` fits maps between them"
        )
        return {Need.DRAFT_STATES: reason}
    return {}
