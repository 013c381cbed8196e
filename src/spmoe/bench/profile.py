"""The profile file of `spmoe profile`, and predictions of whole steps from it. Imports no torch.

Units are seconds, bytes and experts, unless a name says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from spmoe.errors import UsageError
from spmoe.files import decode_json, write_text
from spmoe.predict.latency import ObservedDemand, PredictionQuality, StepCosts, StepInputs, StepTime, predict_step
from spmoe.registry import ON_DEMAND

FORMAT, VERSION = "spmoe profile", 2
PROFILED_POLICIES = (ON_DEMAND, "next-gate", "draft-gate", "draft-gate+next-gate")


# ---- the file

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class _Record(BaseModel):
    """Immutable record that refuses unknown fields, missing fields and values of another type."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Subject(_Record):
    """The models and options that a profile was measured with."""

    model: str
    draft: str | None
    dtype: str
    device: str
    shape: str | None  # architecture whose sizes the pair was widened to
    layers: Count  # MoE layers
    experts_per_layer: Positive
    top_k: Positive
    expert_bytes: Count
    draft_layers: Count
    slots: Count
    eviction: str
    emulated_link_gbps: Number | None
    expert_format: str | None = None  # None: not recorded
    lossless: bool = True  # whether experts had the checkpoint's weights, in the run's dtype

    def difference(self, other: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return the first value that differs from `other`, as text: this one's and the other's; None if none does."""
        for name, value in other.items():
            if (ours := getattr(self, name)) != value:
                return _describe(name, ours), _describe(name, value)
        return None


def _describe(name: str, value: Any) -> str:
    if name == "emulated_link_gbps":
        return "the machine's own link" if value is None else f"an emulated link of {value:g} GB/s"
    if name == "shape":
        return "a model that is not widened" if value is None else f"the shape {value}"
    if name == "expert_bytes":
        return f"experts of {value} bytes"
    return f"{name.replace('_', ' ')} {value}"


class PolicyStats(_Record):
    """Means per step of generations under one prefetch policy, every layer prefetched for, without prompts."""

    policy: str
    draft_tokens: Count  # K
    slots: Count
    steps: Count
    tokens: Number
    draft_passes: Number
    draft_seconds: Number
    verify_seconds: Number  # without stalls
    stall_seconds: Number
    needed: Number  # experts per layer
    missing: Number  # needed experts per layer that were not resident when the step began
    missing_by_layer: tuple[Number, ...]
    draft_recall: Number  # share of the missing experts that the draft stage predicted
    draft_precision: Number  # share of the draft stage's predictions of absent experts that were needed
    verify_recall: Number  # share of the other missing experts that the target's layers predicted while verifying
    verify_precision: Number

    @property
    def step_seconds(self) -> float:
        """Mean time of a step."""
        return self.draft_seconds + self.verify_seconds + self.stall_seconds


class EngineProfile(_Record):
    """The profile file (`spmoe profile -o FILE`), stored as JSON."""

    format: Literal["spmoe profile"] = "spmoe profile"
    version: Literal[2] = 2
    machine: dict[str, Any]
    subject: Subject
    draft_pass_seconds: Number | None  # one row; None: no draft model
    verify_seconds: Annotated[dict[Positive, Number], Field(min_length=1)]  # by rows, without stalls
    expert_share: Number  # share of a verified layer that comes after its router
    load_seconds: dict[Positive, Number]  # by experts that one layer demands together; empty: all are resident
    policies: tuple[PolicyStats, ...]

    @field_validator("policies")
    @classmethod
    def _require_on_demand(cls, policies: tuple[PolicyStats, ...]) -> tuple[PolicyStats, ...]:
        if not any(one.policy == ON_DEMAND for one in policies):
            raise ValueError(f"{ON_DEMAND} is missing")
        return policies

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return self.model_dump(mode="json")

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def stats(self, policy: str) -> PolicyStats:
        """Return the statistics of a policy; those of on-demand if the policy was not profiled."""
        by_name = {one.policy: one for one in self.policies}
        return by_name.get(policy) or by_name[ON_DEMAND]


def read_engine_profile(path: Path) -> EngineProfile:
    """Read a profile file; raise UsageError that names the field if anything is wrong with it."""
    advice = "make one with `spmoe profile -o FILE`"
    try:
        text = path.read_text(encoding="utf-8")
        values = decode_json(text)
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); check the path") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a profile: it is not JSON; {advice}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UsageError(f"{path} is not a profile: its field format is not {FORMAT!r}; {advice}")
    if values.get("version") != VERSION:
        raise UsageError(f"{path} is a profile of version {values.get('version')}, not {VERSION}; measure it again")
    try:
        return EngineProfile.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(f"{path} is damaged: {_first_error(error)}; measure it again") from error


def _first_error(error: ValidationError) -> str:
    found = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"]).lstrip(".")
    message = found["msg"].removeprefix("Value error, ")
    value = "" if isinstance(found["input"], (dict, list, tuple)) else f", not {str(found['input'])[:40]!r}"
    return f"{field}: {message[0].lower()}{message[1:]}{value}"


# ---- predicting


class Predictor:
    """The latency model with the inputs of one profile, scaled to other K, cutoffs and numbers of slots."""

    def __init__(self, profile: EngineProfile) -> None:
        self.profile = profile

    def demand(self, policy: str, draft_tokens: int, slots: int) -> tuple[float, float]:
        """Return needed and missing experts per layer."""
        stats, subject = self.profile.stats(policy), self.profile.subject
        observed = ObservedDemand(
            subject.layers,
            subject.experts_per_layer,
            subject.top_k,
            stats.slots,
            stats.draft_tokens + 1,
            stats.needed,
            stats.missing,
        )
        return observed.needed_for(draft_tokens + 1), observed.missing_for(draft_tokens + 1, slots)

    def costs(self, policy: str, draft_tokens: int, missing: float) -> StepCosts:
        """Return the times of the policy's generations; verification is scaled by rows as single passes are."""
        profile, stats = self.profile, self.profile.stats(policy)
        verify = profile.verify_seconds
        scale = _interpolate(verify, draft_tokens + 1) / _interpolate(verify, stats.draft_passes + 1)
        drafted = stats.draft_seconds / stats.draft_passes if stats.draft_passes else profile.draft_pass_seconds or 0.0
        verify_layer = stats.verify_seconds * scale / profile.subject.layers
        return StepCosts(drafted, verify_layer, self.load_seconds(missing), profile.expert_share)

    def load_seconds(self, together: float) -> float:
        """Return the seconds of one expert's load where `together` experts are demanded at once."""
        per_expert = {count: seconds / count for count, seconds in self.profile.load_seconds.items()}
        return _interpolate(per_expert, min(together, max(per_expert))) if per_expert else 0.0

    def step(
        self,
        policy: str,
        draft_tokens: int,
        cutoff: int,
        slots: int,
        *,
        missing: float | None = None,
        costs: StepCosts | None = None,
    ) -> StepTime:
        """Predict a step; `missing` (experts per layer) and `costs` replace the profile's values."""
        stats, subject = self.profile.stats(policy), self.profile.subject
        needed, predicted_missing = self.demand(policy, draft_tokens, slots)
        missing = predicted_missing if missing is None else missing
        return predict_step(
            StepInputs(
                costs=costs or self.costs(policy, draft_tokens, missing),
                layers=subject.layers,
                draft_passes=draft_tokens,
                cutoff=cutoff,
                missing=missing,
                needed=max(needed, missing),
                row_share=subject.top_k / subject.experts_per_layer,
                from_draft=PredictionQuality(stats.draft_recall, stats.draft_precision or 1.0),
                from_previous_layer=PredictionQuality(stats.verify_recall, stats.verify_precision or 1.0),
                slots=slots,
                missing_by_layer=tuple(one / stats.missing for one in stats.missing_by_layer) if stats.missing else (),
            )
        )


def _interpolate(values: Mapping[int, float], x: float) -> float:
    """Interpolate linearly; extrapolate beyond the last point, and return the first value before the first."""
    points = sorted(values.items())
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    after = next((i for i, (at, _) in enumerate(points) if at >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))
