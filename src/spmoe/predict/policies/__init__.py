"""Prefetch policies, one file per name, and how a name becomes a policy.

`A+B` runs registered policies side by side; all but the first request only experts that they find likely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spmoe.errors import UsageError
from spmoe.predict.policies._combined import CombinedPolicy
from spmoe.predict.policies.base import NO_RECORDING, Need, PolicyContext, PrefetchPolicy
from spmoe.registry import ON_DEMAND, PREFETCH_POLICIES


@dataclass(frozen=True)
class PolicyPlan:
    """The policies that run under a name, after fallbacks."""

    classes: tuple[type[PrefetchPolicy], ...]
    notices: tuple[str, ...]  # for the user: where another policy runs than the one asked for, and why

    @property
    def name(self) -> str:
        """Name of the policy that runs, such as `draft-gate+next-gate`."""
        return "+".join(cls.name for cls in self.classes)

    @property
    def uses_cutoff(self) -> bool:
        """Whether a cutoff must be known before the policy is built."""
        return any(cls.uses_cutoff for cls in self.classes)

    def sources(self, context: PolicyContext) -> str:
        """Return the names of the policies that predict in this context, such as `draft-gate+next-gate`."""
        return "+".join(name for cls in self.classes for name in cls.sources(context))

    def label(self, context: PolicyContext) -> str:
        """Return the name to show, with what is chosen in this context."""
        sources = self.sources(context)
        return self.name if sources == self.name else f"{self.name} ({sources})"

    @property
    def admits(self) -> bool:
        """Whether prefetches are admitted one by one."""
        return any(cls.admits for cls in self.classes)

    def build(self, context: PolicyContext) -> PrefetchPolicy:
        """Make the policy; all parts after the first are secondary."""
        first, *others = self.classes
        policy = first.build(context)
        if not others:
            return policy
        secondary = replace(context, secondary=True)
        return CombinedPolicy([policy, *(cls.build(secondary) for cls in others)])


def make_policy(name: str, context: PolicyContext) -> tuple[PrefetchPolicy, tuple[str, ...]]:
    """Make the policy of this name, or its fallback; return it with notices for the user."""
    plan = plan_policy(name, context)
    return plan.build(context), plan.notices


def plan_policy(name: str, context: PolicyContext) -> PolicyPlan:
    """Decide which policies run under a name: those whose needs are met, and fallbacks for the others."""
    wanted, found, notices = policy_classes(name), dict[str, type[PrefetchPolicy]](), list[str]()
    for cls in wanted:
        used, reasons = _resolve(cls, context)
        redundant = used.name in found or (len(wanted) > 1 and used.name == ON_DEMAND)
        if reasons := [reason for reason in reasons if reason]:
            instead = f"{used.name} is used instead of {cls.name}" + (f": {used.summary}" if used.summary else "")
            notices.append("; ".join([*reasons, f"{cls.name} is left out" if redundant else instead]))
        if not redundant:
            found[used.name] = used
    unmet = context.unmet.get(Need.DRAFT_STATES)
    if unmet and context.draft_depth is not None and any(cls.admits for cls in found.values()):
        notices.append(f"{unmet}; no expert is predicted from the draft")
    classes = tuple(found.values()) or (PREFETCH_POLICIES.load(ON_DEMAND),)
    count, gated = len(context.experts_per_layer), len(context.gated_layers)
    if gated < count and any(_calls_gates(cls, context) for cls in classes):
        notices.append(
            f"{count - gated} of {count} MoE layers have no gate that can be called alone; their experts are loaded on "
            "demand"
        )
    return PolicyPlan(classes, tuple(notices))


def policy_classes(name: str) -> tuple[type[PrefetchPolicy], ...]:
    """Load the class of each policy in a name such as `A` or `A+B`."""
    return tuple(PREFETCH_POLICIES.load(part) for part in name.split("+"))


def require_no_recording(name: str) -> None:
    """Raise UsageError if a policy needs recorded routing: for engines that have none."""
    for cls in policy_classes(name):
        if Need.RECORDED_ROUTING in cls.needs:
            raise _refusal(cls, NO_RECORDING)


def needs_recording(name: str) -> bool:
    """Return whether a policy needs recorded routing."""
    return any(Need.RECORDED_ROUTING in cls.needs for cls in policy_classes(name))


def without_draft(name: str) -> str:
    """Return the parts of a policy that need no draft; on-demand if there are none."""
    return "+".join(cls.name for cls in policy_classes(name) if Need.DRAFT_STATES not in cls.needs) or ON_DEMAND


def _resolve(cls: type[PrefetchPolicy], context: PolicyContext) -> tuple[type[PrefetchPolicy], list[str]]:
    """Follow fallbacks from `cls` to a policy whose needs are met; return it with the reasons for leaving others."""
    reasons: list[str] = []
    tried = {cls.name}
    while unmet := [need for need in Need if need in cls.needs and need in context.unmet]:
        reasons.append(context.unmet[unmet[0]])
        fallback = cls.fallback(context)
        if fallback is None:
            raise _refusal(cls, reasons[-1])
        if fallback in tried:
            raise ValueError(f"prefetch policy {cls.name} falls back to {fallback}, which was tried before it")
        tried.add(fallback)
        cls = PREFETCH_POLICIES.load(fallback)
    return cls, reasons


def _refusal(cls: type[PrefetchPolicy], reason: str) -> UsageError:
    return UsageError(f"prefetch policy {cls.name} cannot run: {reason}")


def _calls_gates(cls: type[PrefetchPolicy], context: PolicyContext) -> bool:
    from_draft = Need.DRAFT_STATES in cls.needs and not context.draft_routes
    return from_draft or Need.TARGET_STATES in cls.needs
