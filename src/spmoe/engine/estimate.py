"""The estimate of `spmoe plan`: memory and time per token of a model on hardware that may not be here.

Models are built on the meta device, memory is divided by the functions that the engine uses, and the latency model
predicts the time of a step. docs/planning.md explains the assumptions, and where their numbers come from.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from spmoe.backends.cpu import expert_shapes
from spmoe.backends.cpu_copies import needs_copies
from spmoe.config import EngineConfig, Size, drafter_name, format_bytes, home
from spmoe.engine.hardware import HOST_SHARE, Hardware, find_hardware
from spmoe.engine.memory import (
    MemoryPlan,
    cpu_copy_budget,
    divide_memory,
    expert_copy_bytes,
    extra_draft_bytes,
    max_sequence_length,
    weight_bytes,
)
from spmoe.engine.plan import memory_dict
from spmoe.engine.prefetching import DraftSide, policy_context, policy_name
from spmoe.engine.profiling import cutoff_inputs, profile_path, profile_settings, read_profile
from spmoe.errors import BudgetError, UsageError
from spmoe.experts.store import StoreSpec
from spmoe.formats.expert import ExpertFormat
from spmoe.formats.layout import dtype_name
from spmoe.models.checkpoint import Checkpoint, load_errors
from spmoe.models.expert_formats import choose_format, expert_parameters, is_lossless, own_format
from spmoe.models.expert_shards import reads_in_place
from spmoe.models.load import load_skeleton, store_spec
from spmoe.models.loaded import draft_skeleton, quantized_experts
from spmoe.models.predictors import find_predictor
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.predict.cutoff import Profile
from spmoe.predict.governor import LENGTHS
from spmoe.predict.latency import (
    NO_PREDICTION,
    ObservedDemand,
    PredictionQuality,
    StepCosts,
    StepInputs,
    expected_experts,
    predict_step,
)
from spmoe.predict.policies import plan_policy
from spmoe.system.disk import disk_of

# ---- assumptions; docs/planning.md has their sources

_PROCESS_BYTES = 2 * 2**30  # host memory of Python, PyTorch and the CUDA runtime, besides the experts
_LAYER_SECONDS = {"cuda": 45e-6, "cpu": 0.0}  # of a layer besides reading its weights, as measured on an H200
_PREFETCH_QUALITY = PredictionQuality(recall=0.75, precision=0.85)  # of experts that are not resident, as recorded
_ACCEPTANCE = {"model": 0.7, "self:int8": 0.95, "self:int4": 0.9, "ngram": 0.6}  # of a draft token, if it was reached
_LENGTHS = [k for k in LENGTHS if 0 < k <= 8]  # K to choose from; longer drafts rest on rare acceptances
_MIN_GAIN = 1.05  # that a draft must reach to be recommended
_CPU_EFFICIENCY = 0.85  # of the host memory's bandwidth that products of few rows reach
_DEQUANTIZED = 0.05  # of that rate, for packed experts that no copy was made of
_INT4_OPERATOR = 0.65  # of that rate, for copies in the layout of PyTorch's operator, as measured on 16 cores
_SMALL_FORMAT = "int4-g128"  # the smallest conversion; a quarter of 16 bits
_CPU_GAIN = 1.1  # from which on experts on the CPU are recommended: they round differently
_PROPOSING = {"ngram": 0.5}  # share of steps with a draft; every step if it is not listed


@dataclass(frozen=True, slots=True)
class RoutingAssumption:
    """Assumed routing, as a point of the curve that `ObservedDemand` scales to other budgets.

    `needed`: distinct experts of a step / those under even routing; `missing`: share of needed experts that are not
    resident when half of all experts are. Both are for steps of one row and of several rows.
    """

    needed: tuple[float, float]
    missing: tuple[float, float]

    def demand(self, spec: StoreSpec, top_k: int, rows: int) -> ObservedDemand:
        """Return the demand of steps with this many rows, at half of the experts."""
        several, most = int(rows > 1), max(spec.experts)
        needed = self.needed[several] * expected_experts(most, top_k, rows)
        layers = len(spec.experts)
        return ObservedDemand(layers, most, top_k, layers * most // 2, rows, needed, needed * self.missing[several])


# recorded: traces of the shipped pair and of extras/fine, replayed on demand with the default eviction policy
ROUTING = {
    "even": RoutingAssumption(needed=(1.0, 1.0), missing=(0.5, 0.5)),
    "recorded": RoutingAssumption(needed=(1.0, 0.88), missing=(0.38, 0.41)),
}
_LIKELY = "recorded"  # the assumption that recommendations are made by


# ---- the estimate


@dataclass(frozen=True, slots=True)
class TokenTime:
    """Times per output token under one assumption about routing, in seconds."""

    hit_rate: float  # share of needed experts that are resident
    link_bytes: float  # per token
    device_bytes: float  # read per token
    floor_seconds: float  # the longer of both transfers, perfectly overlapped
    seconds: float  # predicted
    limit: str  # "link", "disk" or "device memory bandwidth"


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run the model: a draft and K."""

    draft: str | None
    num_speculative_tokens: int
    policy: str | None  # prefetch policy; None: does not fit
    memory: MemoryPlan | None  # None: does not fit
    problem: str | None  # why it does not fit
    acceptance: float  # assumed chance that a draft token is accepted, if it was reached
    tokens_per_step: float
    times: dict[str, TokenTime]  # by assumption about routing; "measured" alone with a profile
    cpu_times: dict[str, TokenTime] = field(default_factory=dict)  # with experts on the CPU too; empty: no such path

    @property
    def likely(self) -> TokenTime:
        """Time by the profile of this machine or, without one, under the likely assumption."""
        return self.times.get("measured") or self.times[_LIKELY]

    @property
    def likely_with_cpu(self) -> TokenTime | None:
        """Likely time with `--cpu-experts auto`; None if there is no second path."""
        return self.cpu_times.get("measured") or self.cpu_times.get(_LIKELY)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Everything that `spmoe plan` shows."""

    model: str
    architecture: str
    dtype: str
    parameters: int
    download_bytes: int
    weights: str  # "checkpoint", or "random" with --load-format dummy
    layers: int  # MoE layers
    experts_per_layer: int
    top_k: int
    expert_format: str
    lossless: bool  # whether experts have the checkpoint's weights, in the run's dtype
    expert_bytes: int
    all_experts_bytes: int
    dense_bytes: int
    hardware: Hardware
    host_missing: int  # bytes of host memory that experts need and that are not there
    disk_missing: int  # bytes of disk space for the expert file that are not there, on the CPU
    cases: tuple[Case, ...]
    best: Case | None  # None: nothing fits
    command: str | None  # to run the best case; None: nothing fits
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = asdict(self)
        values["cases"] = [_case_dict(case) for case in self.cases]
        values["best"] = None if self.best is None else self.cases.index(self.best)
        return values


def _case_dict(case: Case) -> dict[str, Any]:
    return {**asdict(case), "memory": None if case.memory is None else memory_dict(case.memory)}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Choices of the user; None: open."""

    draft: str | None
    draft_tokens: int | None
    acceptance: float | None


@dataclass(frozen=True)
class _Models:
    """A target and, if it is a model, its draft, on the meta device."""

    checkpoint: Checkpoint
    target: Target
    dtype: torch.dtype
    format: ExpertFormat
    spec: StoreSpec
    draft_checkpoint: Checkpoint | None
    draft: ModelRunner | None

    @classmethod
    def find(cls, config: EngineConfig, draft: str | None) -> _Models:
        checkpoint = Checkpoint.find(config.model, weights=False, load_format=config.load_format)
        with load_errors(checkpoint):
            target = Target(load_skeleton(checkpoint))
        is_model = draft is not None and drafter_name(draft)[0] == "model"
        draft_checkpoint = None
        if draft is not None and is_model:
            draft_checkpoint = Checkpoint.find(draft, weights=False, load_format=config.load_format)
        runner = draft_skeleton(draft_checkpoint) if draft_checkpoint is not None else None
        dtype = checkpoint.dtype(config.dtype)
        paths = [layer.path for layer in target.moe]
        format = choose_format(config.expert_format, checkpoint, target.model, paths, dtype)
        spec = store_spec(checkpoint, target.model, paths, dtype, format)
        return cls(checkpoint, target, dtype, format, spec, draft_checkpoint, runner)

    def in_dtype(self, dtype: torch.dtype, expert_format: str) -> _Models:
        """Return the same models to run in another dtype."""
        format = choose_format(expert_format, self.checkpoint, self.target.model, self.paths, dtype)
        spec = store_spec(self.checkpoint, self.target.model, self.paths, dtype, format)
        return replace(self, dtype=dtype, format=format, spec=spec)

    @property
    def read_in_place(self) -> bool:
        """Whether experts on a CPU are read from the checkpoint's own files."""
        return reads_in_place(self.checkpoint, self.target.model, self.paths, self.spec, self.format)

    @property
    def paths(self) -> list[str]:
        """Paths of the experts modules."""
        return [layer.path for layer in self.target.moe]

    @property
    def lossless(self) -> bool:
        """Whether experts have the checkpoint's weights, in the run's dtype."""
        own, _ = own_format(self.checkpoint, self.target.model, self.paths, self.dtype)
        return is_lossless(self.format, own, self.checkpoint)


def make_estimate(
    config: EngineConfig,
    draft: str | None,
    draft_tokens: int | None,
    acceptance: float | None = None,
    *,
    device: str = "cuda",
    device_memory: int | None = None,
    host_memory: int | None = None,
    link_gbps: float | None = None,
    device_gbps: float | None = None,
    host_gbps: float | None = None,
) -> Estimate:
    """Estimate a model's memory and time per token.

    `draft`: that the user has chosen; None: drafts that need no other model are compared. `draft_tokens`: K; None: the
    best one of several. `acceptance`: chance that a draft token is accepted; None: assumed by the kind of draft.
    """
    models, wanted = _Models.find(config, draft), _Wanted(draft, draft_tokens, acceptance)
    blob = models.spec.layout.nbytes
    hardware = find_hardware(device, blob, device_memory, host_memory, link_gbps, device_gbps, host_gbps)
    cases = _compare(config, models, hardware, wanted)
    fitting = [case for case in cases if case.memory is not None]
    best = min(fitting, key=_seconds_to_compare) if fitting else None
    needs = models.spec.nbytes + _PROCESS_BYTES
    host_missing = max(0, needs - hardware.host_memory) if device == "cuda" else 0
    writes = device == "cpu" and not (config.random_weights or models.read_in_place)
    disk_missing = max(0, models.spec.nbytes - disk_of(home()).free) if writes else 0
    dense_bytes = weight_bytes(models.target, models.dtype)
    return Estimate(
        model=config.model,
        architecture=type(models.target.model).__name__,
        dtype=dtype_name(models.dtype),
        parameters=dense_bytes // models.dtype.itemsize + expert_parameters(models.target.model, models.paths),
        download_bytes=models.checkpoint.download_bytes
        + (models.draft_checkpoint.download_bytes if models.draft_checkpoint is not None else 0),
        weights="random" if models.checkpoint.random else "checkpoint",
        layers=len(models.spec.experts),
        experts_per_layer=max(models.spec.experts),
        top_k=models.target.top_k,
        expert_format=models.format.weight.label,
        lossless=models.lossless,
        expert_bytes=blob,
        all_experts_bytes=models.spec.nbytes,
        dense_bytes=dense_bytes,
        hardware=hardware,
        host_missing=host_missing,
        disk_missing=disk_missing,
        cases=tuple(cases),
        best=best,
        command=None if best is None else _command(config, best, hardware, models.spec.count),
        advice=tuple(_advice(config, models, hardware, best, host_missing, disk_missing, wanted)),
    )


def _compare(config: EngineConfig, models: _Models, hardware: Hardware, wanted: _Wanted) -> list[Case]:
    """Return plain decoding and every draft to compare, each with its best K."""
    cases = [_case(config, replace(models, draft=None, draft_checkpoint=None), hardware, None, 0, wanted)]
    if wanted.draft_tokens == 0 or (wanted.draft is not None and drafter_name(wanted.draft)[0] == "none"):
        return cases
    by_itself = (
        ["ngram", "self:int4"] if hardware.device == "cuda" else ["ngram"]
    )  # quantized experts are slow on a CPU
    lengths = [wanted.draft_tokens] if wanted.draft_tokens is not None else _LENGTHS
    for draft in [wanted.draft] if wanted.draft is not None else by_itself:
        tried = [_case(config, models, hardware, draft, k, wanted) for k in lengths]
        cases.append(min(tried, key=lambda case: case.likely.seconds if case.memory is not None else float("inf")))
    return cases


def _case(
    config: EngineConfig, models: _Models, hardware: Hardware, draft: str | None, k: int, wanted: _Wanted
) -> Case:
    """Divide the memory for one draft and K, and predict times."""
    config = replace(config, draft=draft, num_speculative_tokens=k)
    kind, _ = drafter_name(draft)
    assumed = _ACCEPTANCE.get(draft or "none", _ACCEPTANCE.get(kind, _ACCEPTANCE["model"]))
    acceptance = 0.0 if draft is None else assumed if wanted.acceptance is None else wanted.acceptance
    share = _PROPOSING.get(kind, 1.0)
    tokens = sum(acceptance**i for i in range(k + 1))
    predictor = None
    if models.draft_checkpoint is not None:
        predictor = find_predictor(models.checkpoint, models.draft_checkpoint)
    try:
        memory = _divide(config, models, hardware, predictor is not None)
    except BudgetError as error:
        return Case(draft, k, None, None, str(error), acceptance, 1 + share * (tokens - 1), {})
    side = DraftSide(k > 0, models.draft if k else None, config.self_draft_scheme is not None)
    context = policy_context(models.target, models.spec.experts, side, predictor is not None)
    device = torch.device(hardware.device)
    policy = plan_policy(policy_name(config, device, memory.slots, models.spec), context).sources(context)
    profile = _profile(config, models, memory) if hardware.is_here else None
    step = _Step(config, models, hardware, memory, policy)
    times, cpu_times = _times(step, profile, k, tokens, share), dict[str, TokenTime]()
    if hardware.device == "cuda" and (rates := _cpu_rates(models, hardware, memory.cpu_copies)) is not None:
        cpu_times = _times(replace(step, cpu_rates=rates), profile, k, tokens, share)
    return Case(draft, k, policy, memory, None, acceptance, 1 + share * (tokens - 1), times, cpu_times)


def _times(step: _Step, profile: Profile | None, k: int, tokens: float, share: float) -> dict[str, TokenTime]:
    """Predict times by assumption about routing; `share`: of steps that have a draft."""
    if profile is not None:
        return {"measured": step.by_profile(profile, tokens)}
    times = {name: step.by_bandwidth(routing, k, tokens) for name, routing in ROUTING.items()}
    if share < 1.0:  # steps without a proposal decode one token
        plain = {name: step.by_bandwidth(routing, 0, 1.0) for name, routing in ROUTING.items()}
        weight = share * tokens / (1 + share * (tokens - 1))  # of the tokens that drafted steps yield
        times = {name: _mix(time, plain[name], weight) for name, time in times.items()}
    return times


def _cpu_rates(models: _Models, hardware: Hardware, copies: int) -> tuple[float, float] | None:
    """Return the bytes of experts that the CPU computes per second, beside a busy link and alone; None if it cannot.

    Link and CPU share the bandwidth of the host's memory. `copies`: bytes of host memory for copies of packed experts.
    """
    left = hardware.host_gbps - hardware.link_gbps
    if left <= 0.0:
        return None
    factor = _CPU_EFFICIENCY * 1e9
    if needs_copies(models.format):
        size, spec = expert_copy_bytes(models.target, models.format), models.spec
        held = copies // size / spec.count  # share of experts; the others are moved
        by_operator = all(models.format.repacked_parts(expert_shapes(models.target.moe[0].experts)).values())
        copied = (_INT4_OPERATOR if by_operator else 1.0) * spec.layout.nbytes / size
        factor *= max(_DEQUANTIZED, held * copied)
    return factor * left, factor * hardware.host_gbps


def _seconds_to_compare(case: Case) -> float:
    """Return the likely time of a case; drafting must gain a little more than the assumptions can tell."""
    return case.likely.seconds * (1.0 if case.draft is None else _MIN_GAIN)


def _mix(first: TokenTime, second: TokenTime, weight: float) -> TokenTime:
    """Return the mean of two times per token, of which the first counts for `weight` of the tokens."""
    names = [one.name for one in fields(TokenTime) if one.name != "limit"]
    means = {name: weight * getattr(first, name) + (1 - weight) * getattr(second, name) for name in names}
    return replace(first, **means)


def _divide(config: EngineConfig, models: _Models, hardware: Hardware, projected: bool) -> MemoryPlan:
    target, spec, draft = models.target, models.spec, models.draft if config.num_speculative_tokens else None
    extra_bytes = extra_draft_bytes(config, target, draft, spec, models.dtype, is_projected=projected)
    runners = [target, draft] if draft is not None else [target]
    arguments = (runners, spec, target.top_k, max_sequence_length(config, target), extra_bytes, models.dtype)
    if hardware.device == "cuda":
        asked = Size(bytes=hardware.device_memory)
        config = replace(config, device_memory=asked if hardware.limits_memory else "auto")
        memory = divide_memory(config, torch.device("cuda"), *arguments, available=hardware.device_memory)
        free = hardware.host_memory - spec.nbytes - _PROCESS_BYTES
        return replace(memory, cpu_copies=cpu_copy_budget(target, spec, models.format, free))
    cpu = torch.device("cpu")
    least = divide_memory(replace(config, expert_memory=Size(share=1.0)), cpu, *arguments)
    left = hardware.device_memory - least.resident - least.kv
    if left < spec.layout.nbytes * target.top_k:
        raise BudgetError(
            f"{format_bytes(least.resident + least.kv)} of weights and KV caches leave no memory for experts in "
            f"{format_bytes(hardware.device_memory)}; use a smaller model, draft or --max-model-len"
        )
    return divide_memory(replace(config, expert_memory=Size(bytes=left)), cpu, *arguments)


def _profile(config: EngineConfig, models: _Models, memory: MemoryPlan) -> Profile | None:
    """Return the profile that a run with these options has measured on this machine, if there is one."""
    inputs = cutoff_inputs(models.spec, models.target.top_k, memory.slots, int(config.num_speculative_tokens))
    return read_profile(profile_path(profile_settings(config, models.checkpoint, models.draft_checkpoint, inputs)))


@dataclass(frozen=True)
class _Step:
    """A step to predict: everything but routing and times."""

    config: EngineConfig
    models: _Models
    hardware: Hardware
    memory: MemoryPlan
    policy: str
    cpu_rates: tuple[float, float] | None = None  # of experts on the CPU, in bytes per second; None: all are loaded

    def by_bandwidth(self, routing: RoutingAssumption, k: int, tokens: float) -> TokenTime:
        """Predict the time per token from bandwidths; a step yields `tokens` tokens."""
        blob, dtype = self.models.spec.layout.nbytes, self.models.dtype
        demand = routing.demand(self.models.spec, self.models.target.top_k, k + 1)
        needed, missing = demand.needed, demand.missing_for(k + 1, self.memory.slots)
        layer_bytes = _read_bytes(self.models.target, dtype) / demand.layers + needed * blob
        draft_bytes = _draft_bytes(self.config, self.models) if k else 0.0
        link, device = self.hardware.link_gbps * 1e9, self.hardware.device_gbps * 1e9
        fixed = _LAYER_SECONDS[self.hardware.device]
        costs = StepCosts(
            draft_pass=draft_bytes / device + fixed * _draft_depth(self.config, self.models),
            verify_layer=layer_bytes / device + fixed,
            load=blob / link,
            expert_share=needed * blob / layer_bytes,
        )
        device_bytes = demand.layers * layer_bytes + k * draft_bytes
        return self._predict(costs, k, needed, missing, tokens, device_bytes, device_bytes / device)

    def by_profile(self, profile: Profile, tokens: float) -> TokenTime:
        """Predict the time per token from a profile; routing is even until the profile knows what is missing."""
        k = int(self.config.num_speculative_tokens)
        inputs = cutoff_inputs(self.models.spec, self.models.target.top_k, self.memory.slots, k)
        needed = inputs.needed_per_layer
        missing = inputs.missing_per_layer if profile.missing_per_layer is None else profile.missing_per_layer
        costs = StepCosts(
            profile.draft_layers * profile.draft_seconds_per_layer,
            profile.verify_seconds_per_layer,
            profile.seconds_per_expert,
            profile.expert_share,
        )
        dense = _read_bytes(self.models.target, self.models.dtype)
        device_bytes = dense + inputs.layers * needed * self.models.spec.layout.nbytes
        device_bytes += k * _draft_bytes(self.config, self.models)
        compute_seconds = inputs.layers * costs.verify_layer + k * costs.draft_pass
        return self._predict(costs, k, needed, min(needed, missing), tokens, device_bytes, compute_seconds)

    def _predict(
        self,
        costs: StepCosts,
        k: int,
        needed: float,
        missing: float,
        tokens: float,
        device_bytes: float,
        device_seconds: float,
    ) -> TokenTime:
        spec, layers = self.models.spec, len(self.models.spec.experts)
        if self.cpu_rates is not None:
            beside, alone = self.cpu_rates
            costs = replace(costs, cpu=spec.layout.nbytes / beside, cpu_alone=spec.layout.nbytes / alone)
        step = StepInputs(
            costs=costs,
            layers=layers,
            draft_passes=k,
            cutoff=layers,
            missing=missing,
            needed=needed,
            row_share=self.models.target.top_k / max(spec.experts),
            from_draft=_PREFETCH_QUALITY if "draft-gate" in self.policy else NO_PREDICTION,
            from_previous_layer=_PREFETCH_QUALITY if "next-gate" in self.policy else NO_PREDICTION,
            slots=self.memory.slots,
        )
        predicted = predict_step(step)
        loaded = layers * missing if self.cpu_rates is None else min(layers * missing, predicted.loads)
        link_seconds = loaded * costs.load
        path = "disk" if self.hardware.device == "cpu" else "link"
        return TokenTime(
            hit_rate=1 - missing / needed,
            link_bytes=loaded * spec.layout.nbytes / tokens,
            device_bytes=device_bytes / tokens,
            floor_seconds=max(link_seconds, device_seconds) / tokens,
            seconds=predicted.seconds / tokens,
            limit=path if link_seconds > device_seconds else "device memory bandwidth",
        )


def _read_bytes(runner: ModelRunner, dtype: torch.dtype) -> int:
    """Return the bytes of weights that a decode step reads, without the target's experts.

    Of the input embeddings it reads one row per token, unless they are also the output layer.
    """
    embeddings, output = runner.model.get_input_embeddings().weight, runner.model.get_output_embeddings()
    tied = output is None or output.weight is embeddings
    return weight_bytes(runner, dtype) - (0 if tied else embeddings.numel() * dtype.itemsize)


def _draft_bytes(config: EngineConfig, models: _Models) -> float:
    """Return the bytes that one draft pass reads from device memory."""
    if models.draft is not None:
        return _read_bytes(models.draft, models.dtype)
    if config.self_draft_scheme is None:
        return 0.0
    quantized = quantized_experts(models.spec, models.target.moe, config.self_draft_scheme)
    used = len(models.spec.experts) * models.target.top_k / models.spec.count
    return _read_bytes(models.target, models.dtype) + used * quantized.nbytes


def _draft_depth(config: EngineConfig, models: _Models) -> int:
    """Return the layers of one draft pass."""
    if models.draft is not None:
        return models.draft.depth_count
    return models.target.depth_count if config.self_draft_scheme is not None else 0


# ---- recommendations


def _command(config: EngineConfig, case: Case, hardware: Hardware, experts: int) -> str:
    """Return the command line that runs a case; `experts`: how many the model has."""
    words = ["spmoe", "run", shlex.quote(config.model), "--device", hardware.device]
    if case.draft is None:
        words += ["--draft", "none"]
    else:
        words += ["--draft", shlex.quote(case.draft), "-k", str(case.num_speculative_tokens)]
    if hardware.device == "cpu" and case.memory is not None:
        words += ["--expert-memory", _size_option(case.memory, experts)]
    elif hardware.limits_memory:
        words += ["--device-memory", str(Size(bytes=hardware.device_memory)).replace(" ", "")]
    if config.dtype != "auto":
        words += ["--dtype", config.dtype]
    if config.expert_format != "auto":
        words += ["--expert-format", config.expert_format]
    if config.max_model_len is not None:
        words += ["--max-model-len", str(config.max_model_len)]
    if config.load_format != "auto":
        words += ["--load-format", config.load_format]
    return " ".join(words) + " --prompt 'Hello'"


def _size_option(memory: MemoryPlan, experts: int) -> str:
    """Return the expert memory of a plan as an option's value, rounded up."""
    if memory.slots == experts:
        return "100%"
    size = memory.slots * memory.slot_bytes
    return f"{-(-size // 2**20)}MiB" if size >= 2**30 else f"{-(-size // 2**10)}KiB"


def _packed_seconds(
    config: EngineConfig, models: _Models, hardware: Hardware, best: Case, wanted: _Wanted
) -> float | None:
    """Return the time per token of plain decoding with 4-bit experts; None if the link does not decide the speed."""
    is_wide = models.dtype.itemsize == 2 and not models.format.is_packed
    if hardware.device != "cuda" or config.expert_format != "auto" or not is_wide or best.likely.limit != "link":
        return None
    try:
        packed = models.in_dtype(models.dtype, _SMALL_FORMAT)
    except UsageError:  # matrices that the format cannot have
        return None
    plain = _compare(replace(config, expert_format=_SMALL_FORMAT), packed, hardware, replace(wanted, draft_tokens=0))[0]
    return plain.likely.seconds if plain.memory is not None else None


def _advice(
    config: EngineConfig,
    models: _Models,
    hardware: Hardware,
    best: Case | None,
    host_missing: int,
    disk_missing: int,
    wanted: _Wanted,
) -> list[str]:
    """Return what would help, most important first."""
    own, expanded = own_format(models.checkpoint, models.target.model, models.paths, models.dtype)
    found = [expanded] if expanded is not None and models.format == own else []
    halved = models.dtype.itemsize > 2 and config.dtype == "auto"
    if host_missing:
        helps = "--dtype bfloat16, " if halved else ""
        found.append(
            f"host memory lacks {format_bytes(host_missing)} for all experts: use {helps}a smaller --expert-format or "
            "model, or --device cpu (experts on disk)"
        )
    if disk_missing:
        found.append(f"the expert file needs {format_bytes(disk_missing)} more disk space; set SPMOE_HOME elsewhere")
    if best is None:
        return found
    if halved:
        narrow = _compare(
            replace(config, dtype="bfloat16"), models.in_dtype(torch.bfloat16, config.expert_format), hardware, wanted
        )
        times = [case.likely.seconds for case in narrow if case.memory is not None]
        if times and min(times) < best.likely.seconds:
            found.append(f"--dtype bfloat16 halves all weights: about {1e3 * min(times):.3g} ms per token")
    assert best.memory is not None
    if (seconds := _packed_seconds(config, models, hardware, best, wanted)) is not None:
        found.append(
            f"--expert-format {_SMALL_FORMAT} has a quarter of the bytes: about {1e3 * seconds:.3g} instead of "
            f"{1e3 * best.likely.seconds:.3g} ms per token; it is lossy: `spmoe verify --cost` measures how much"
        )
    if (with_cpu := best.likely_with_cpu) is not None and best.likely.seconds >= _CPU_GAIN * with_cpu.seconds:
        gain = best.likely.seconds / with_cpu.seconds
        rounding = (
            "" if models.dtype == torch.float32 else f"; in {dtype_name(models.dtype)} the CPU rounds differently"
        )
        copies = f"; copies take up to {format_bytes(size)} of host memory" if (size := best.memory.cpu_copies) else ""
        found.append(
            f"--cpu-experts auto also computes missing experts on the CPU: about {1e3 * with_cpu.seconds:.3g} instead "
            f"of {1e3 * best.likely.seconds:.3g} ms per token ({gain:.2g}x){rounding}{copies}"
        )
    if best.memory.slots < models.spec.count and best.likely.limit in ("link", "disk"):
        all_bytes = best.memory.resident + best.memory.kv + best.memory.workspace + models.spec.nbytes
        found.append(
            f"with {format_bytes(all_bytes / 0.95)} of device memory every expert would stay there"
            if hardware.device == "cuda"
            else f"with {format_bytes(all_bytes / HOST_SHARE)} of host memory every expert would stay there"
        )
    return found
