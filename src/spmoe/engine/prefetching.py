"""Which prefetch policy an engine gets, with what cutoff, and what is left of it where nothing can be predicted."""

from __future__ import annotations

from collections.abc import Callable

from spmoe.config import CutoffMode
from spmoe.draft.model import DraftModel
from spmoe.draft.none import NoDraft
from spmoe.draft.self_quantized import QuantizedSelfRunner
from spmoe.engine.engine import Engine
from spmoe.engine.profiling import (
    cutoff_inputs,
    measure,
    profile_path,
    profile_settings,
    read_profile,
    usual_draft_tokens,
    write_profile,
)
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.observe.ledger import Counters
from spmoe.predict.activation import Activation
from spmoe.predict.adaptive import Adaptive
from spmoe.predict.base import PrefetchPolicy
from spmoe.predict.cutoff import choose_cutoff
from spmoe.predict.draft_gate import DraftGate
from spmoe.predict.next_gate import CombinedPolicy, NextGate
from spmoe.predict.on_demand import OnDemand
from spmoe.predict.oracle import Oracle
from spmoe.predict.projection import HiddenStateProjection


def make_policy(engine: Engine) -> PrefetchPolicy:
    """The policy asked for, or what is left of it; what is missing becomes a notice."""
    wanted, target = engine.config.prefetch, engine.target
    own_signals = bool(target.gated) and target.has_hidden_states
    if wanted == "oracle":
        return Oracle(lambda: engine.recording or [])  # without a budget: what it prefetch requests for is needed
    if wanted == "activation":
        policy = _kept(engine, lambda: Activation(engine.store.experts))
    elif wanted == "adaptive" and own_signals:
        policy = _kept(engine, lambda: Adaptive(target, target.gated))
    else:
        policy = _by_gates(engine, own_signals)
    if not isinstance(policy, OnDemand):
        _note_silent_layers(engine, policy)
        # more than the slots can hold at once would push itself out again within the step
        engine.source.grants.step_budget = engine.slots * engine.store.layout.nbytes
    return policy


def _kept(engine: Engine, make: Callable[[], PrefetchPolicy]) -> PrefetchPolicy:
    """A policy with what it learnt when it ran before."""
    name = (engine.config.prefetch, engine.config.num_speculative_tokens)
    policies = engine.learned.policies
    if name not in policies:
        policies[name] = make()
    return policies[name]


def _by_gates(engine: Engine, own_signals: bool) -> PrefetchPolicy:
    """Prediction by the target's gates, of the draft's states, of the target's own, or both."""
    wanted, target, drafter = engine.config.prefetch, engine.target, engine.loop.drafter
    first = second = None
    if "draft-gate" in wanted and isinstance(drafter, DraftModel):
        first = _draft_gate(engine, drafter)
    elif "draft-gate" in wanted and not isinstance(drafter, NoDraft):
        then = "the target's own layers predict the next one's" if own_signals else "they are loaded on demand"
        _note(engine, f"a draft without a model has no hidden states to predict experts from; {then}")
        second = NextGate(target, only=target.gated) if own_signals else None
    if "next-gate" in wanted and own_signals:
        second = NextGate(target, only=target.gated, sure=first is not None)
    elif "next-gate" in wanted or wanted == "adaptive":
        _note(engine, "the target's gates cannot be called alone, so its layers predict nothing")
    if first is not None and second is not None:
        return CombinedPolicy(first, second)
    return first or second or OnDemand()


def _draft_gate(engine: Engine, drafter: DraftModel) -> DraftGate | None:
    """Prediction from the draft, its cutoff taken from a profile that is made if there is none yet."""
    config, target = engine.config, engine.target
    if (reason := _no_prediction(target, drafter.runner, engine.projection)) is not None:
        _note(engine, f"{reason}; experts are loaded on demand")
        return None
    usual = usual_draft_tokens(config.num_speculative_tokens)
    inputs = cutoff_inputs(engine.store, target.top_k, engine.slots, usual)
    if config.cutoff.mode is not CutoffMode.FIXED:
        file = profile_path(profile_settings(config, engine.checkpoint, engine.draft_checkpoint, inputs))
        engine.profile_file = file
        engine.profile, steps = engine.learned.learnt.get(file, (read_profile(file), Counters()))
        if engine.profile is None:
            wait = engine.room.backend.synchronize
            engine.profile = measure(target, drafter.runner, engine.source, inputs, engine.clock, wait)
            write_profile(file, engine.profile)
        engine.since = engine.loop.counters.minus(steps)
    engine.cutoff = choose_cutoff(config.cutoff, engine.profile, inputs)
    only = None if isinstance(drafter.runner, QuantizedSelfRunner) else target.gated  # its own routers answer for all
    return DraftGate(target, drafter.runner.depth_count, engine.cutoff, engine.projection, only)


def _note_silent_layers(engine: Engine, policy: PrefetchPolicy) -> None:
    """Say so where gates are asked and some layers have none that can be."""
    target, drafter = engine.target, engine.loop.drafter
    own_routers = isinstance(drafter, DraftModel) and isinstance(drafter.runner, QuantizedSelfRunner)
    asks = isinstance(policy, (NextGate, CombinedPolicy)) or (isinstance(policy, DraftGate) and not own_routers)
    if asks and not target.gates_found:
        count, layers = len(target.moe) - len(target.gated), len(target.moe)
        _note(
            engine,
            f"{count} of {layers} MoE layers have no gate that can be called alone; theirs are loaded on demand",
        )


def _note(engine: Engine, notice: str) -> None:
    if notice not in engine.notices:
        engine.notices.append(notice)


def _no_prediction(target: Target, draft: ModelRunner, projection: HiddenStateProjection | None) -> str | None:
    """Why the draft's hidden states cannot go through the target's gates, if they cannot."""
    if isinstance(draft, QuantizedSelfRunner):
        return None  # its own routers answer
    if not target.gated:
        return "the target's gates cannot be called alone"
    if not draft.has_hidden_states:
        return "the draft's hidden states cannot be tapped"
    if draft.hidden_size != target.hidden_size and projection is None:
        return (
            f"the draft is {draft.hidden_size} wide and the target {target.hidden_size}, so its states fit no gate "
            "unless `spmoe fit-predictor` fits maps between them"
        )
    return None
