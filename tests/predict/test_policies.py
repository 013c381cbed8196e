"""Policies by name: needs, fallbacks, notices, and policies joined by +."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from test_next_gate import ShiftedGates, chunk

from spmoe.errors import UsageError
from spmoe.predict.policies import make_policy, plan_policy, policy_classes, require_no_recording
from spmoe.predict.policies._combined import CombinedPolicy
from spmoe.predict.policies.adaptive import Adaptive
from spmoe.predict.policies.auto import Auto, choose_sources
from spmoe.predict.policies.base import Need, PolicyContext, PrefetchPolicy
from spmoe.predict.policies.draft_gate import DraftGate
from spmoe.predict.policies.next_gate import NextGate
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES
from spmoe.types import (
    NO_PREFETCHES,
    DraftOutcome,
    ExpertKey,
    LayerChunk,
    PrefetchRequest,
    PrefetchRequests,
    Routing,
    Stage,
)

GATES = ShiftedGates(range(4), 4)
NO_STATES = {Need.DRAFT_STATES: "no states"}
NO_GATES = {Need.TARGET_STATES: "no gates"}
FULL = PolicyContext(
    experts_per_layer=[6] * 4,
    gates=GATES,
    gated_layers=range(4),
    drafting=True,
    draft_depth=4,
    cutoff=2,
    recorded_routing=list,
)
NO_DRAFT = replace(FULL, drafting=False, draft_depth=None, unmet={Need.DRAFT_STATES: ""})
NGRAM = replace(FULL, draft_depth=None, unmet=NO_STATES)


def used_name(name: str, context: PolicyContext) -> str:
    policy, notices = make_policy(name, context)
    assert notices == ()
    return policy.name


@pytest.mark.parametrize("name", PREFETCH_POLICIES.names())
def test_a_policy_is_made_when_its_needs_are_met(name: str) -> None:
    assert used_name(name, FULL) == name
    (cls,) = policy_classes(name)
    assert cls.summary
    assert cls.eviction in EVICTION_POLICIES
    assert all(isinstance(need, Need) for need in cls.needs)


@pytest.mark.parametrize("second", PREFETCH_POLICIES.names())
@pytest.mark.parametrize("first", PREFETCH_POLICIES.names())
def test_any_two_policies_can_be_joined(first: str, second: str) -> None:
    parts = [name for name in dict.fromkeys((first, second)) if name != "on-demand"] or ["on-demand"]
    assert used_name(f"{first}+{second}", FULL) == "+".join(parts)


@pytest.mark.parametrize(
    ("name", "context", "used", "notice"),
    [
        ("draft-gate", NO_DRAFT, "on-demand", None),
        ("draft-gate+next-gate", NO_DRAFT, "next-gate", None),
        ("draft-gate", NGRAM, "next-gate", "no states; next-gate is used instead of draft-gate: the target's own"),
        (
            "draft-gate+next-gate",
            NGRAM,
            "next-gate",
            "no states; next-gate is used instead of draft-gate: the target's",
        ),
        (
            "draft-gate",
            replace(NGRAM, unmet=NO_STATES | NO_GATES),
            "on-demand",
            "no states; no gates; on-demand is used instead of draft-gate: experts are loaded on demand",
        ),
        (
            "draft-gate",
            replace(FULL, unmet=NO_STATES),
            "next-gate",
            "no states; next-gate is used instead of draft-gate: the target's own",
        ),
        (
            "draft-gate+next-gate",
            replace(FULL, unmet=NO_STATES),
            "next-gate",
            "no states; next-gate is used instead of draft-gate: the target's",
        ),
        ("draft-gate+next-gate", replace(FULL, unmet=NO_GATES), "draft-gate", "no gates; next-gate is left out"),
        ("next-gate", replace(FULL, unmet=NO_GATES), "on-demand", "no gates; on-demand is used instead of next-gate"),
        ("adaptive", replace(FULL, unmet=NO_GATES), "on-demand", "no gates; on-demand is used instead of adaptive"),
        ("activation", replace(FULL, unmet=NO_GATES | NO_STATES), "activation", None),
        ("on-demand", replace(FULL, unmet=NO_GATES | NO_STATES), "on-demand", None),
    ],
)
def test_unmet_needs_lead_to_a_fallback_and_a_notice(
    name: str, context: PolicyContext, used: str, notice: str | None
) -> None:
    policy, notices = make_policy(name, context)
    assert policy.name == used
    if notice is None:
        assert notices == ()
    else:
        assert len(notices) == 1
        assert notices[0].startswith(notice)


@pytest.mark.parametrize(
    ("context", "copies_per_layer", "sources"),
    [
        (FULL, None, [DraftGate]),
        (FULL, 9.0, [DraftGate]),  # however fast the link is
        (replace(FULL, unmet=NO_GATES), None, [DraftGate]),
        (NO_DRAFT, None, []),  # how fast the link is is not known
        (NO_DRAFT, 0.99, []),  # a copy takes longer than a layer
        (NO_DRAFT, 1.0, [NextGate]),
        (NGRAM, None, []),
        (NGRAM, 0.5, []),
        (NGRAM, 2.0, [NextGate]),
        (replace(FULL, unmet=NO_STATES), 2.0, [NextGate]),  # hidden states that the target's gates do not accept
        (replace(NGRAM, unmet=NO_STATES | NO_GATES), 9.0, []),
    ],
)
def test_auto_chooses_what_predicts_and_pays(
    context: PolicyContext, copies_per_layer: float | None, sources: list[type[PrefetchPolicy]]
) -> None:
    context = replace(context, copies_per_layer=copies_per_layer)
    assert choose_sources(context) == sources
    plan = plan_policy("auto", context)
    if context.draft_depth is not None and context.unmet.get(Need.DRAFT_STATES):
        assert plan.notices == (f"{context.unmet[Need.DRAFT_STATES]}; no expert is predicted from the draft",)
    else:
        assert plan.notices == (), "nothing was asked for that cannot be had"
    assert plan.label(context) == f"auto ({sources[0].name if sources else 'on-demand'})"
    policy = plan.build(context)
    assert isinstance(policy, Auto)
    assert policy.admits
    assert [type(part) for part in policy.parts] == sources
    assert policy.stages == frozenset().union(*(source.stages for source in sources))


def test_layers_without_callable_gates_are_mentioned_by_policies_that_call_gates() -> None:
    context = replace(FULL, gated_layers=[0, 2])
    for name in ("draft-gate", "next-gate", "adaptive", "draft-gate+next-gate"):
        (notice,) = plan_policy(name, context).notices
        assert notice.startswith("2 of 4 MoE layers have no gate")
    for name in ("on-demand", "activation", "oracle"):
        assert plan_policy(name, context).notices == ()
    assert plan_policy("draft-gate", replace(context, draft_routes=True)).notices == ()


def test_layers_without_callable_gates_are_not_predicted() -> None:
    policy, _ = make_policy("draft-gate", replace(FULL, gated_layers=[0, 2]))
    assert {request.key.layer for request in policy.on_chunk(chunk(Stage.DRAFT, range(4)))} == {0, 2}
    policy, _ = make_policy("draft-gate", replace(FULL, gated_layers=[0, 2], draft_routes=True))
    assert {request.key.layer for request in policy.on_chunk(chunk(Stage.DRAFT, range(4)))} == {0, 1, 2, 3}


def test_a_policy_that_needs_a_recording_refuses_to_run_without_one() -> None:
    with pytest.raises(UsageError, match="oracle cannot run: nothing was recorded"):
        plan_policy("oracle", replace(FULL, unmet={Need.RECORDED_ROUTING: "nothing was recorded"}))
    for name in ("oracle", "draft-gate+oracle"):
        with pytest.raises(UsageError, match=r"oracle cannot run: .*`spmoe bench`.*choose another policy"):
            require_no_recording(name)
    require_no_recording("draft-gate+next-gate")


def test_unknown_names_are_refused() -> None:
    for name in ("magic", "draft-gate+magic"):
        with pytest.raises(UsageError, match=r"unknown prefetch policy 'magic'; choose one of activation, .*oracle"):
            make_policy(name, FULL)


def test_fallbacks_that_form_a_circle_are_an_error(registered: None) -> None:
    with pytest.raises(ValueError, match="circle falls back to circle"):
        plan_policy("circle", replace(FULL, unmet=NO_GATES))


@pytest.fixture
def registered() -> Iterator[None]:
    @PREFETCH_POLICIES.register("circle")
    class Circle(PrefetchPolicy):
        needs = frozenset({Need.TARGET_STATES})

        @classmethod
        def fallback(cls, context: PolicyContext) -> str:
            return "circle"

    yield
    del PREFETCH_POLICIES._classes["circle"]


# ---- declarations


def test_cutoff_applies_to_policies_that_use_it() -> None:
    for name, uses in (("draft-gate", True), ("draft-gate+next-gate", True), ("next-gate", False), ("oracle", False)):
        assert plan_policy(name, FULL).uses_cutoff == uses
        assert make_policy(name, FULL)[0].uses_cutoff == uses
    policy, _ = make_policy("draft-gate+next-gate", FULL)
    fetched = [{r.key.layer for r in policy.on_chunk(chunk(Stage.DRAFT, range(4))) if r.fetch}]
    policy.set_cutoff(3)
    fetched.append({r.key.layer for r in policy.on_chunk(chunk(Stage.DRAFT, range(4))) if r.fetch})
    assert fetched == [{0, 1}, {0, 1, 2}]
    make_policy("next-gate", FULL)[0].set_cutoff(3)  # no effect, no error


def test_without_a_cutoff_all_layers_are_fetched() -> None:
    policy, _ = make_policy("draft-gate", replace(FULL, cutoff=None))
    assert all(request.fetch for request in policy.on_chunk(chunk(Stage.DRAFT, range(4))))


@pytest.mark.parametrize(
    ("name", "budget", "learns"),
    [
        ("on-demand", False, False),
        ("oracle", False, False),
        ("draft-gate", True, False),
        ("adaptive", True, True),
        ("activation", True, True),
        ("draft-gate+oracle", True, False),
        ("draft-gate+activation", True, True),
    ],
)
def test_budget_and_learning_are_declared(name: str, budget: bool, learns: bool) -> None:
    policy, _ = make_policy(name, FULL)
    assert (policy.uses_step_budget, policy.learns) == (budget, learns)


def test_the_second_policy_of_two_requests_only_likely_experts() -> None:
    routing = Routing(torch.tensor([[[5, 1]]]), torch.tensor([[[0.75, 0.25]]]))
    shown = LayerChunk(Stage.VERIFY, range(1), torch.empty(0), routing)
    found = {}
    for name in ("next-gate", "draft-gate+next-gate", "next-gate+draft-gate"):
        found[name] = {request.key.expert for request in make_policy(name, FULL)[0].on_chunk(shown)}
    assert found == {"next-gate": {1, 5}, "draft-gate+next-gate": {5}, "next-gate+draft-gate": {1, 5}}


# ---- policies side by side


def test_each_part_is_shown_its_stages() -> None:
    draft, target = DraftGate(GATES, 4, 4), NextGate(GATES)
    policy = CombinedPolicy([draft, target])
    assert policy.name == "draft-gate+next-gate"
    assert policy.stages == {Stage.PREFILL, Stage.DRAFT, Stage.VERIFY}
    for stage, part in ((Stage.DRAFT, draft), (Stage.PREFILL, draft), (Stage.VERIFY, target)):
        shown = chunk(stage, range(1, 2))
        assert list(policy.on_chunk(shown)) == list(part.on_chunk(shown)) != []
        combined, own = (p.predict_routing(stage, range(1, 2), shown.residual) for p in (policy, part))
        assert combined is not None
        assert own is not None
        assert torch.equal(combined.experts, own.experts)
    policy.on_accept(DraftOutcome(4, 2))


@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("on_device", [False, True])
def test_parts_that_share_a_stage_get_their_own_routing(depth: int, on_device: bool) -> None:
    def parts() -> list[PrefetchPolicy]:
        return [NextGate(GATES), Adaptive(GATES), NextGate(GATES, ahead=2)]

    policy, shown = CombinedPolicy(parts()), chunk(Stage.VERIFY, range(depth, depth + 1))
    if on_device:
        routing = policy.predict_routing(Stage.VERIFY, shown.depths, shown.residual)
        assert (routing is None) == (depth == 3)
        shown = replace(shown, routing=routing)
    found = {(request.key, request.score) for request in policy.on_chunk(shown)}
    alone = [part.on_chunk(chunk(Stage.VERIFY, range(depth, depth + 1))) for part in parts()]
    assert found == {(request.key, request.score) for requests in alone for request in requests}


class Scripted(PrefetchPolicy):
    """Requests one expert whenever it is called, and records the calls."""

    name = "scripted"

    def __init__(self, layer: int, score: float) -> None:
        self.calls: list[object] = []
        self._requests = PrefetchRequests.of([PrefetchRequest(ExpertKey(layer, 3), score, layer)])

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        self.calls.append(sequence_id)
        return self._requests

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        self.calls.append((layer, *experts))
        return self._requests if experts else NO_PREFETCHES

    def on_accept(self, outcome: DraftOutcome) -> None:
        self.calls.append(outcome)


def test_requests_of_all_parts_are_merged() -> None:
    parts = [Scripted(1, 0.5), Scripted(2, 0.25), Scripted(1, 0.75)]
    policy = CombinedPolicy(parts)
    assert {tuple(r.key): r.score for r in policy.begin_step(7)} == {(1, 3): 0.75, (2, 3): 0.25}
    assert {tuple(r.key): r.score for r in policy.on_routed(0, [4])} == {(1, 3): 0.75, (2, 3): 0.25}
    assert list(policy.on_routed(0, [])) == []
    policy.on_accept(outcome := DraftOutcome(4, 2))
    assert all(part.calls == [7, (0, 4), (0,), outcome] for part in parts)
