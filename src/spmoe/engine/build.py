"""Building an engine: check a configuration, load its models and connect all parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from spmoe.backends.devices import choose_device, limit_memory
from spmoe.backends.graphs import CaptureContext
from spmoe.config import EngineConfig, Size, drafter_name, format_bytes
from spmoe.draft.base import DraftContext, Drafter, DraftSources
from spmoe.draft.model import CATCH_UP_ROWS
from spmoe.engine.engine import Engine, configure_experts
from spmoe.engine.memory import (
    MemoryPlan,
    all_resident,
    divide_memory,
    max_sequence_length,
    slot_count,
    weight_bytes,
    with_cpu_copies,
)
from spmoe.engine.parts import EngineParts, LearnedState
from spmoe.engine.profiling import cutoff_inputs, slow_draft_notice
from spmoe.engine.runtime import ExpertRuntime, make_runtime
from spmoe.engine.threads import ComputeTimes, IntraOpThreads, compute_times, loading_threads, set_threads
from spmoe.errors import BudgetError, CheckpointError
from spmoe.experts.eviction import make_eviction
from spmoe.experts.experts import Experts
from spmoe.experts.link import ThrottledTransfer
from spmoe.formats.bf16_packed import MAX_ESCAPES, EscapeOverflow
from spmoe.formats.layout import dtype_name
from spmoe.models.checkpoint import Checkpoint, load_errors
from spmoe.models.expert_formats import choose_format
from spmoe.models.kv import KvState
from spmoe.models.load import load_skeleton, store_spec
from spmoe.models.loaded import (
    LoadedModels,
    draft_skeleton,
    find_target,
    load_target,
    quantized_experts,
    random_weights_notices,
    wide_shape,
)
from spmoe.models.predictors import read_predictor
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.models.tokenizer import require_same_tokenizer, tokenizer_of
from spmoe.observe.clock import RealClock
from spmoe.observe.timeline import Timeline
from spmoe.predict.cutoff import CutoffInputs
from spmoe.predict.governor import usual_draft_tokens
from spmoe.predict.policies import require_no_recording
from spmoe.predict.projection import HiddenStateProjection
from spmoe.registry import DRAFTERS
from spmoe.system.host import available_memory

if TYPE_CHECKING:
    from spmoe.backends.cuda_memory import HostStore


log = logging.getLogger(__name__)


def build(
    config: EngineConfig, store: HostStore | None = None, raise_if_cancelled: Callable[[], None] = lambda: None
) -> Engine:
    """Load target, experts and draft, and connect them.

    `store`: the experts, already in host memory, taken from the runtime of a closed engine. `raise_if_cancelled` is
    called during long work; its exception ends it.
    """
    require_no_recording(config.prefetch)
    config.require_runnable()
    device, escapes = choose_device(config.device), None
    with loading_threads(device.type):
        while True:
            try:
                return _build(config, device, store, raise_if_cancelled, escapes)
            except EscapeOverflow as error:  # other experts may need more; `choose_format` refuses too many
                store, escapes = None, min(2 * error.escapes, max(MAX_ESCAPES, error.escapes))


def _build(
    config: EngineConfig,
    device: torch.device,
    store: HostStore | None,
    raise_if_cancelled: Callable[[], None],
    escapes: int | None,
) -> Engine:
    notices = list[str]()
    checkpoint, load_format = find_target(config.model, config.load_format), config.load_format
    draft_checkpoint = Checkpoint.find(config.draft_model, load_format=load_format) if config.draft_model else None
    tokenizer = tokenizer_of(checkpoint)
    if draft_checkpoint is not None:
        require_same_tokenizer(tokenizer, tokenizer_of(draft_checkpoint), checkpoint, draft_checkpoint)
    wide_shape(config, device)  # raises an error before anything is loaded
    if checkpoint.random:
        _require_host_memory(config, device)
    with (
        _timed("loaded the target without its experts"),
        _out_of_memory(f"the weights of {config.model} without its experts"),
    ):
        models = load_target(config, checkpoint, device, escapes)
    notices += random_weights_notices(models)
    target, spec = models.target, models.spec
    notices += models.notices
    if not models.lossless:
        notices.append(
            f"lossless: no; experts are converted to {config.expert_format}, so the text may differ from that of the "
            "checkpoint's own weights"
        )
    max_length = max_sequence_length(config, target)
    drafter_class = _drafter_class(config, target, notices)
    _require_memory(config, models, drafter_class, draft_checkpoint, max_length)
    sources = DraftSources(drafter_name(config.resolved_draft)[1], draft_checkpoint, models, config.progress)
    with _timed("loaded the draft"), _out_of_memory(f"the draft {config.resolved_draft}"):
        draft = drafter_class.load_runner(sources)
    if (notice := drafter_class.notice(sources, draft)) is not None:
        notices.append(notice)
    if draft is not None and draft.max_positions < target.max_positions:
        notices.append(
            f"the draft reads {draft.max_positions} positions and the target {target.max_positions}; beyond the "
            "former it decodes without speculation"
        )
    if config.max_model_len is not None and config.max_model_len > max_length:
        notices.append(f"the model reads {max_length} positions, so --max-model-len {config.max_model_len} is lowered")
    projection = _find_projection(config, checkpoint, draft_checkpoint, target, draft, notices)
    runners = [runner for runner in (target, draft) if runner is not None]
    extra_bytes = projection.nbytes if projection is not None else 0
    memory = divide_memory(config, device, runners, spec, target.top_k, max_length, extra_bytes)
    held = store.spec.nbytes if store is not None else 0  # already in memory, and reused or freed
    memory = with_cpu_copies(memory, config, device, target, spec, models.expert_format, available_memory() + held)
    notices += memory.notices
    if isinstance(config.device_memory, Size) and memory.limit is not None:
        limit_memory(device, memory.limit)

    with _out_of_memory(f"{memory.slots} expert slots"):
        runtime = make_runtime(config, models, memory.slots, store, raise_if_cancelled, memory.cpu_copies)
    notices += runtime.notices
    threads = IntraOpThreads()
    clock, timeline, transfer = RealClock(), Timeline(), runtime.transfer
    if config.link_gbps is not None:
        transfer = ThrottledTransfer(transfer, spec.layout.nbytes, config.link_gbps, clock, timeline)
    eviction = make_eviction(config.eviction_policy, spec.experts)
    threaded = runtime.cuda is None or config.link_gbps is not None  # with an emulated link, the host waits for copies
    experts = Experts.build(
        runtime.slots, transfer, eviction, spec.layout.nbytes, clock, threaded=threaded, timeline=timeline,
        cpu_path=runtime.cpu_path, residency=runtime.residency,
    )  # fmt: skip
    configure_experts(experts, config)
    try:
        if device.type == "cpu":
            blob = spec.layout.nbytes
            times = compute_times(
                config, checkpoint, draft_checkpoint, target, draft, runtime.slots, blob, models.expert_format
            )
            threads = set_threads(times)
            k = usual_draft_tokens(config.num_speculative_tokens)
            notices += _warn_of_slow_draft(config, times, cutoff_inputs(spec, target.top_k, memory.slots, k), blob)
        target_kv: MutableMapping[int, KvState] = {}
        context = DraftContext(draft, target.vocab_size, device, config.prefill_chunk, experts.run_ahead, target_kv)
        drafter = drafter_class.build(context)
        notices += _rounding_notice(config, models, drafter)
        k = config.max_draft_tokens if drafter.proposes else 0
        with _timed("compared captured and shared forwards"):
            notices += _prepare_runners(config, device, runtime, experts, target, draft, k, memory, max_length)
        target.connect(experts, runtime.backend)
        resident = runtime.cuda is not None and all_resident(config, device, memory.slots, spec)
        parts = EngineParts(
            models, tokenizer, draft_checkpoint, drafter, projection, runtime, experts, memory, max_length, clock,
            target_kv, threads, resident,
        )  # fmt: skip
        parts.load_residents()
        engine = Engine(config, parts, LearnedState({config.eviction_policy: eviction}), notices)
        with _out_of_memory(f"CUDA graphs and KV caches for {memory.context} tokens"):
            engine.prepare()
        return engine
    except BaseException:
        experts.close()
        runtime.close()
        threads.close()
        raise


@contextmanager
def _timed(done: str) -> Iterator[None]:
    """Log how long the work inside has taken."""
    started = time.monotonic()
    yield
    log.info("%s in %.1f s", done, time.monotonic() - started)


@contextmanager
def _out_of_memory(part: str) -> Iterator[None]:
    """Turn the device's out-of-memory error into one line that names the part."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"the device ran out of memory while loading {part}; end other programs that use the device, lower "
            "--device-memory, use --draft ngram, or use a device with more memory"
        ) from error


def _require_host_memory(config: EngineConfig, device: torch.device) -> None:
    """Raise BudgetError, before a weight is drawn, if random weights do not fit in host memory."""
    # found again, since a skeleton marks its configuration
    checkpoint = Checkpoint.find(config.model, weights=False, load_format=config.load_format)
    with load_errors(checkpoint):
        target = Target(load_skeleton(checkpoint))
    dtype, paths = checkpoint.dtype(config.dtype), [layer.path for layer in target.moe]
    format = choose_format(config.expert_format, checkpoint, target.model, paths, dtype)
    experts = store_spec(checkpoint, target.model, paths, dtype, format).nbytes
    others = weight_bytes(target, dtype) if device.type == "cpu" else 0
    if experts + others > (free := available_memory()):
        raise BudgetError(
            f"{config.model} needs {format_bytes(experts + others)} of host memory, {format_bytes(experts)} of it for "
            f"experts in {format.weight.label}, but only {format_bytes(free)} are free; free some memory, choose a "
            "smaller --expert-format, or use a smaller model"
        )


def _require_memory(
    config: EngineConfig,
    models: LoadedModels,
    drafter_class: type[Drafter],
    draft_checkpoint: Checkpoint | None,
    max_length: int,
) -> None:
    """Raise BudgetError, before the draft is loaded, if the memory cannot be divided."""
    target, spec = models.target, models.spec
    if models.device.type == "cpu":
        slot_count(config, spec, target.top_k)
        return
    if config.shape is not None:  # a widened draft is made when it is loaded
        return
    runners, extra_bytes = list[ModelRunner]([target]), 0
    if drafter_class.proposes and draft_checkpoint is not None:
        runners.append(draft_skeleton(draft_checkpoint))
    if drafter_class.proposes and config.self_draft_scheme is not None:
        extra_bytes = quantized_experts(spec, target.moe, config.self_draft_scheme).nbytes
    divide_memory(config, models.device, runners, spec, target.top_k, max_length, extra_bytes, models.dtype)


def _warn_of_slow_draft(
    config: EngineConfig, times: ComputeTimes | None, inputs: CutoffInputs, expert_bytes: int
) -> list[str]:
    """Return a warning if a draft pass takes longer than a step without speculation, on a CPU.

    Loads count only where their speed is known, over an emulated link.
    """
    if times is None or times.draft_seconds is None:
        return []
    load, k = 0.0 if config.link_gbps is None else expert_bytes / (config.link_gbps * 1e9), inputs.draft_tokens
    plain, step = (replace(inputs, draft_tokens=n).missing_per_layer * inputs.layers * load for n in (0, k))
    notice = slow_draft_notice(
        str(config.resolved_draft), k, times.draft_seconds, times.verify_seconds + step, times.plain_seconds + plain
    )
    return [] if notice is None else [notice]


def _rounding_notice(config: EngineConfig, models: LoadedModels, drafter: Drafter) -> list[str]:
    """Return a notice if the text may depend on K: matrix products on a CPU round by the number of rows."""
    dtype = dtype_name(models.dtype)
    if models.device.type != "cpu" or dtype == "float32" or not (drafter.proposes and config.max_draft_tokens):
        return []
    return [
        f"in {dtype} on a CPU, rounding depends on the number of draft tokens: with another -k the text may differ on "
        "near-ties; --dtype float32 avoids it"
    ]


def _drafter_class(config: EngineConfig, target: Target, notices: list[str]) -> type[Drafter]:
    """Return the drafter's class; that of `none` if K is 0 or the target's state cannot be rolled back."""
    name, _ = drafter_name(config.resolved_draft if config.num_speculative_tokens else None)
    if config.draft is None and config.num_speculative_tokens:
        notices.append(
            f"--num-speculative-tokens {config.num_speculative_tokens} has no effect without a draft; give --draft "
            "ngram or another one, or leave -k out"
        )
    if name != "none" and not target.inspection.resumes:
        notices.append(
            f"{config.model} keeps a state that does not take several tokens at once, or cannot be rolled back; it "
            "decodes without speculation"
        )
        name = "none"
    found: type[Drafter] = DRAFTERS.load(name)
    return found


def _prepare_runners(
    config: EngineConfig,
    device: torch.device,
    runtime: ExpertRuntime,
    experts: Experts,
    target: Target,
    draft: ModelRunner | None,
    k: int,
    memory: MemoryPlan,
    max_length: int,
) -> list[str]:
    """Let the models capture forwards, share forwards and keep KV caches as far as they can; return notices."""
    notices = list[str]()
    draft_rows = max(CATCH_UP_ROWS) if config.num_speculative_tokens == "auto" else 2
    _capture(runtime, experts, target, draft, k, draft_rows, max_length, notices)
    runners = [runner for runner in (target, draft) if runner is not None]
    if config.max_num_seqs > 1:
        for runner in runners:
            runner.try_batching()
    for runner in runners:
        limit = None if device.type == "cpu" else memory.kv_positions
        runner.plan_kv(limit, memory.kv_positions, reuse_prefixes=config.enable_prefix_caching)
    if config.enable_prefix_caching and (failure := target.reuse_failure) is not None:
        notices.append(f"{config.model} reads every prompt from its start ({failure})")
    return notices


def _capture(
    runtime: ExpertRuntime,
    experts: Experts,
    target: Target,
    draft: ModelRunner | None,
    k: int,
    draft_rows: int,
    max_length: int,
    notices: list[str],
) -> None:
    """Capture forwards of few rows as CUDA graphs if the models allow it: the target's of K + 1."""
    if runtime.recorder is None:
        return
    capture = CaptureContext(runtime.recorder, experts.run_ahead, max_length, residency=runtime.residency)
    plans: list[tuple[str, ModelRunner, int, CaptureContext]] = [("target", target, k + 1, capture)]
    if draft is not None:
        chain = token_chain(target)  # through which the draft's tokens reach their verification
        plans = [
            ("target", target, k + 1, replace(capture, draft_chain=chain)),
            ("draft", draft, draft_rows, replace(capture, chain=chain, residency=None)),
        ]
    for name, runner, rows, context in plans:
        if (reason := runner.capture_forwards(context, rows)) is not None:
            notices.append(f"forwards of the {name} are not captured as CUDA graphs ({reason}); they run slower")


def token_chain(target: Target) -> torch.Tensor:
    """Return the chain through which a draft's tokens reach their verification on the device."""
    from spmoe.backends.kernels.inputs import new_token_chain

    return new_token_chain(target.model.device)


def _find_projection(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft_checkpoint: Checkpoint | None,
    target: Target,
    draft: ModelRunner | None,
    notices: list[str],
) -> HiddenStateProjection | None:
    """Return the projection fitted for this pair, if it is enabled and exists."""
    if not config.projection or config.shape is not None or draft is None or draft_checkpoint is None:
        return None
    try:
        return read_predictor(checkpoint, draft_checkpoint, target, draft)
    except CheckpointError as error:
        notices.append(str(error))
        return None
