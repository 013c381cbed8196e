"""Intra-op threads of an engine on the CPU: as many as its own forwards run fastest with.

PyTorch starts with one thread per core. Threads of small matrix products mostly wait for each other, so a small model
may be many times slower on all cores than on one. When an engine is built, its forwards are timed with 1, 2, 4, ...
threads; the result is cached on disk. `OMP_NUM_THREADS`, or a call of `torch.set_num_threads`, is honoured instead.

`torch.set_num_threads` sets the calling thread, and threads that PyTorch has not run on yet. So the number is set when
the engine is built, for whatever the building thread does next, and again around every step, on the thread that runs
it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from spmoe.backends.cpu import CpuBackend
from spmoe.backends.devices import choose_device
from spmoe.config import EngineConfig, home
from spmoe.experts.access import ExpertBatch
from spmoe.experts.slots import Slots
from spmoe.files import decode_json, write_json_cache
from spmoe.formats.expert import ExpertFormat
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.experts_seam import attach
from spmoe.models.load import origin_of
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.predict.governor import usual_draft_tokens
from spmoe.system.origin import origins_to_json

TIMED_PROMPT_ROWS = 32  # rows that stand for a prompt; a prompt of half as many runs with the prompt's threads
_PASSES = 5  # timed passes, unless they take longer than _SECONDS
_SECONDS = 0.1  # for the timed passes of one model with one number of threads; there are at least two
_LONG_PASS = 0.5  # seconds from which on a warm-up pass is not repeated
_GAIN = 0.9  # more threads must take at most this share of the time: they also cost the rest of the machine
_SLOWER = 1.05  # relative time from which on no more threads are tried
_GIVE_UP = 2.0  # relative time of a pass from which on the others are not run
_EXPERT_BYTES = 256 * 2**20  # weights that passes cycle through: more than a processor's caches hold
_CPU_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """Numbers of threads that an engine runs fastest with, and times of its passes with them, without loads.

    Times are those of the fastest pass: anything above is other work on the machine.
    """

    threads: int  # of decode steps
    prompt_threads: int
    verify_seconds: float  # target, K + 1 rows
    plain_seconds: float  # target, one row
    draft_seconds: float | None  # draft, one row; None: no model drafts


# ---- the setting


class _ProcessSetting:
    """The process's own number of threads, kept while engines use theirs."""

    def __init__(self) -> None:
        self.startup = torch.get_num_threads()  # when this module was imported
        self._lock = threading.Lock()
        self._engines = 0
        self._own = self.startup

    @property
    def own(self) -> int:
        """The number that would be in force without engines."""
        return self._own if self._engines else torch.get_num_threads()

    def hold(self) -> None:
        """Keep the present number, unless another engine has kept it."""
        with self._lock:
            self._own = self.own
            self._engines += 1

    def release(self) -> None:
        """Restore the number that was kept, when the last engine is closed."""
        with self._lock:
            self._engines -= 1
            if not self._engines:
                torch.set_num_threads(self._own)


_process = _ProcessSetting()


class IntraOpThreads:
    """Numbers of threads that an engine computes with; None leaves them alone."""

    def __init__(self, decode: int | None = None, prompt: int | None = None) -> None:
        self.decode, self.prompt = decode, prompt
        self._held = decode is not None
        if decode is not None:
            _process.hold()
            torch.set_num_threads(decode)

    @contextmanager
    def in_force(self, rows: int) -> Iterator[None]:
        """Compute a forward of `rows` rows on the calling thread; its own setting is restored afterwards."""
        wanted = self.prompt if 2 * rows >= TIMED_PROMPT_ROWS else self.decode
        before = torch.get_num_threads()
        if wanted is None or wanted == before:
            yield
            return
        torch.set_num_threads(wanted)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        """Restore the process's setting, unless another engine is open. Idempotent."""
        if self._held:
            self._held = False
            _process.release()


@contextmanager
def loading_threads(device_type: str) -> Iterator[None]:
    """Load models for the CPU on one thread, unless the user chose a number: copies hardly gain from more."""
    threads = IntraOpThreads(1, 1) if device_type == "cpu" and len(thread_counts()) > 1 else IntraOpThreads()
    try:
        yield
    finally:
        threads.close()


def set_threads(times: ComputeTimes | None) -> IntraOpThreads:
    """Use the measured numbers of threads from now on; change nothing if none were measured or the user chose one."""
    if times is None or len(thread_counts()) == 1:
        return IntraOpThreads()
    return IntraOpThreads(times.threads, times.prompt_threads)


def thread_counts() -> list[int]:
    """Return the numbers of threads to try: 1, 2, 4, ... and PyTorch's default, or only the one that the user chose."""
    own = _process.own
    if os.environ.get("OMP_NUM_THREADS") or own != _process.startup or own not in _default_counts(own):
        return [own]
    return [count for count in (1 << power for power in range(own.bit_length())) if count < own] + [own]


def _default_counts(default: int) -> set[int]:
    """Return the numbers that PyTorch may start with: physical or logical cores. `default` if they are not known."""
    try:
        cpus = os.sched_getaffinity(0)
        cores = {
            tuple(
                (_CPU_TOPOLOGY / f"cpu{cpu}/topology" / name).read_text() for name in ("physical_package_id", "core_id")
            )
            for cpu in cpus
        }
    except (AttributeError, OSError):  # not Linux, or no such files
        return {default}
    return {len(cpus), len(cores)}


# ---- the measurement


class _SlotExperts:
    """Runs a layer's experts on the contents of slots, whatever these are: for times without loads."""

    def __init__(self, slots: Slots, count: int, format: ExpertFormat | None) -> None:
        self._weights = [slots.weights(slot) for slot in range(count)]
        self._next = 0
        self._backend = CpuBackend(format)
        for tensors in self._weights:
            for tensor in tensors.values():
                tensor.zero_()

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return self._backend.run_experts(experts, hidden, index, weights, self._batches(torch.unique(index).tolist()))

    def _batches(self, routed: Sequence[int]) -> Iterable[ExpertBatch]:
        for expert in routed:
            slot, self._next = self._next, (self._next + 1) % len(self._weights)
            yield ExpertBatch(0, (expert,), (slot,), (self._weights[slot],))


def measure_compute(
    target: Target,
    draft: ModelRunner | None,
    slots: Slots,
    blob_bytes: int,
    k: int,
    counts: Sequence[int],
    format: ExpertFormat | None = None,
) -> ComputeTimes:
    """Time forwards without loads for each number of threads, and choose the fastest.

    The target's experts are empty slots, which are overwritten; connect the target afterwards. A decode step is K draft
    passes and a verification of K + 1 rows.
    """
    forward = _SlotExperts(slots, min(slots.count, max(1, _EXPERT_BYTES // blob_bytes)), format)
    for layer in target.moe:
        attach(layer.experts, forward)
    drafting = [] if draft is None else [_Part(draft, 1, k)]
    verifying = _Part(target, k + 1, 1)
    prompt_part = _Part(target, min(TIMED_PROMPT_ROWS, target.max_positions), 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(counts[0])
        for part in (*drafting, verifying):
            _time_pass(part.runner, 1)  # reads weights that are still in the checkpoint file
        decode = fastest(counts, [*drafting, verifying])  # the draft first: it is the shorter one to give up with
        more = [count for count in counts if count >= decode and verifying.tried(count)]
        prompt = fastest(more, [prompt_part]) if len(more) > 1 else decode
        torch.set_num_threads(decode)
        plain = min(_time_passes(target, 1))
    finally:
        torch.set_num_threads(before)
    drafted = [min(part.seconds[decode]) for part in drafting]
    return ComputeTimes(decode, prompt, min(verifying.seconds[decode]), plain, drafted[0] if drafted else None)


@dataclass
class _Part:
    """Passes of one runner, and their seconds by number of threads."""

    runner: ModelRunner
    rows: int
    count: int  # passes in a step
    seconds: dict[int, list[float]] = field(default_factory=dict)

    def tried(self, threads: int) -> bool:
        """Return whether passes with this number of threads were timed, and not given up."""
        return threads in self.seconds

    def time(self, threads: int) -> float:
        """Time passes with this many threads; return their seconds in a step, or infinity if they are given up.

        A busy machine makes some passes on several threads many times slower, so there the slowest pass counts.
        """
        first = next(iter(self.seconds.values()), None)
        found = _time_passes(self.runner, self.rows, inf if first is None else _GIVE_UP * median(first))
        if not found:
            return inf
        self.seconds[threads] = found
        return self.count * (median(found) if first is None else max(found))


def fastest(counts: Sequence[int], parts: Sequence[_Part]) -> int:
    """Return the number of threads with the shortest time of all parts; a larger one only if it is clearly faster.

    `counts` rise, and the rest is not tried once it gets slower. Leaves PyTorch set to the last number tried.
    """
    best, best_seconds = counts[0], inf
    for count in counts:
        torch.set_num_threads(count)
        seconds = 0.0
        for part in parts:
            seconds += part.time(count)
            if seconds == inf:
                break
        if count == counts[0] or seconds < _GAIN * best_seconds:
            best, best_seconds = count, seconds
        elif seconds > _SLOWER * best_seconds:
            break
    return best


def _time_passes(runner: ModelRunner, rows: int, give_up: float = inf) -> list[float]:
    """Return the seconds of a few passes, after a warm-up pass; of that pass alone if it is long.

    Returns no times if a pass takes longer than `give_up` seconds.
    """
    if (warm_up := _time_pass(runner, rows)) > min(_LONG_PASS, give_up):
        return [] if warm_up > give_up else [warm_up]
    times: list[float] = []
    while len(times) < 2 or (len(times) < _PASSES and sum(times) < _SECONDS):
        times.append(_time_pass(runner, rows))
        if times[-1] > give_up:
            return []
    return times


def _time_pass(runner: ModelRunner, rows: int) -> float:
    """Return the seconds of one pass of `rows` rows."""
    with runner.temporary_kv(rows) as kv:
        started = time.perf_counter()
        runner.forward([row % runner.vocab_size for row in range(rows)], kv, rows)
        return time.perf_counter() - started


# ---- the cache


def compute_times(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft_checkpoint: Checkpoint | None,
    target: Target,
    draft: ModelRunner | None,
    slots: Slots,
    blob_bytes: int,
    format: ExpertFormat | None = None,
) -> ComputeTimes | None:
    """Return the cached times of an engine on the CPU, or measure them; None if nothing depends on them.

    `draft`: the model that drafts, if there is one. The target must be connected to its experts afterwards.
    """
    counts = thread_counts()
    if len(counts) == 1 and draft is None:
        return None
    path = _times_path(config, checkpoint, draft_checkpoint, counts)
    if (known := _read(path)) is not None:
        return known
    k = usual_draft_tokens(config.num_speculative_tokens) if draft is not None else 0
    found = measure_compute(target, draft, slots, blob_bytes, k, counts, format)
    origins = [origin_of(used) for used in (checkpoint, draft_checkpoint) if used is not None]
    write_json_cache(path, {**asdict(found), "origin": origins_to_json(origins)})
    return found


def engine_threads(config: EngineConfig, checkpoint: Checkpoint, draft_checkpoint: Checkpoint | None) -> int:
    """Return the number of threads that an engine's decode steps run with; the present number if it is not known."""
    on_cpu = config.device == "cpu" or (config.device == "auto" and choose_device("auto").type == "cpu")
    counts = thread_counts()
    if not on_cpu or len(counts) == 1:
        return counts[-1]
    known = _read(_times_path(config, checkpoint, draft_checkpoint, counts))
    return torch.get_num_threads() if known is None else known.threads


def _times_path(
    config: EngineConfig, checkpoint: Checkpoint, draft_checkpoint: Checkpoint | None, counts: Sequence[int]
) -> Path:
    machine = [platform.node(), platform.machine(), os.cpu_count(), torch.__version__, list(counts)]
    draft = config.resolved_draft if draft_checkpoint is None else draft_checkpoint.fingerprint
    k = usual_draft_tokens(config.num_speculative_tokens)
    model = [checkpoint.fingerprint, draft, config.dtype, config.expert_format, k]
    digest = hashlib.sha256(json.dumps([machine, model]).encode()).hexdigest()[:20]
    return home() / "profiles" / f"threads-{digest}.json"


def _read(path: Path) -> ComputeTimes | None:
    """Read cached times; None if there are none or if they are damaged."""
    try:
        values = decode_json(path.read_text())
        values.pop("origin")
        found = ComputeTimes(**values)
        numbers = [value for value in asdict(found).values() if value is not None]
        valid = all(type(value) in (int, float) and value > 0 for value in numbers)
        return found if valid and type(found.threads) is int and type(found.prompt_threads) is int else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
