"""The profile: a short measurement, made once per machine, pair and settings, that the cutoff is computed from."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from spmoe.config import home
from spmoe.experts.source import ExpertSource
from spmoe.models.network import Network
from spmoe.models.target import Target
from spmoe.observe.clock import Clock
from spmoe.predict.cutoff import CutoffInputs, Profile

_PASSES = 5  # timed passes, after one that warms up


def profile_path(settings: Mapping[str, Any]) -> Path:
    """Where the profile of these settings on this machine is kept."""
    machine = [platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads(), torch.__version__]
    text = json.dumps([machine, dict(settings)], sort_keys=True, default=str)
    return home() / "profiles" / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def read_profile(path: Path) -> Profile | None:
    """A profile measured earlier; None when there is none that can be read."""
    try:
        values = json.loads(path.read_text())
        learnt = values.pop("missing_per_layer", None)
        measured = values.values() if learnt is None else [*values.values(), learnt]
        sound = all(type(v) in (int, float) and 0 <= v < math.inf for v in measured)
        return Profile(**values, missing_per_layer=learnt) if sound else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def write_profile(path: Path, profile: Profile) -> None:
    """Keep a profile. A cache directory that cannot be written only means measuring again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(asdict(profile), indent=2))
        partial.replace(path)
    except OSError:
        pass


def measure(
    target: Target,
    draft: Network,
    source: ExpertSource,
    inputs: CutoffInputs,
    clock: Clock,
    synchronize: Callable[[], None] = lambda: None,
) -> Profile:
    """Time single draft passes, verification passes with their stalls taken out, and expert loads.

    `synchronize` waits for a device that computes, and receives experts, behind the host's back.
    """
    timer = _Timer(source, clock, synchronize)
    load = _seconds_per_expert(timer, inputs)
    verify = _seconds_per_pass(target, inputs.draft_tokens + 1, timer) / inputs.layers
    drafting = _seconds_per_pass(draft, 1, timer) / draft.depth_count
    return Profile(drafting, draft.depth_count, verify, load, free_slots(inputs))


def free_slots(inputs: CutoffInputs) -> int:
    """Slots beyond what one layer is expected to need at once."""
    return max(0, inputs.slots - math.ceil(inputs.needed_per_layer))


class _Timer:
    """Times what the source takes part in, from one moment at which nothing is under way to the next."""

    def __init__(self, source: ExpertSource, clock: Clock, synchronize: Callable[[], None]) -> None:
        self.source = source
        self._clock = clock
        self._synchronize = synchronize

    def time(self, work: Callable[[], object]) -> tuple[float, float, int]:
        """Seconds, those of them that compute stalled, and loads."""
        self.source.begin_step()
        self._synchronize()
        before, started = self.source.counters.copy(), self._clock.now()
        work()
        self._synchronize()
        seconds = self._clock.now() - started
        self.source.end_step()
        spent = self.source.counters.minus(before)
        return seconds, spent.stall_seconds, spent.demand_loads


def _seconds_per_expert(timer: _Timer, inputs: CutoffInputs) -> float:
    """Throughput of demand loads, as many at once as a layer may ask for."""
    batch = range(min(inputs.slots, inputs.experts_per_layer))
    times = []
    for layer in range(min(inputs.layers, _PASSES)):
        seconds, _, loads = timer.time(lambda layer=layer: list(timer.source.use(layer, batch)))  # type: ignore[misc]
        if loads:
            times.append(seconds / loads)
    return median(times) if times else 0.0


def _seconds_per_pass(network: Network, rows: int, timer: _Timer) -> float:
    kv = network.new_kv(rows * (_PASSES + 2) + 1)
    network.forward([0], kv, keep=1)  # a state that has begun: only such a one is continued by recorded forwards
    tokens = [i % network.vocab_size for i in range(rows)]
    times = []
    for _ in range(_PASSES + 1):
        seconds, stalled, _ = timer.time(lambda: network.forward(tokens, kv, keep=rows))
        times.append(seconds - stalled)
    network.give_back(kv)
    return min(times[1:])  # what the machine can do; anything above it is somebody else's load
