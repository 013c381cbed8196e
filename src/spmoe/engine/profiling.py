"""The profile: a short measurement, made once per machine, pair and settings, that the cutoff is computed from."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
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


def measure(target: Target, draft: Network, source: ExpertSource, inputs: CutoffInputs, clock: Clock) -> Profile:
    """Time single draft passes, verification passes with their stalls taken out, and expert loads."""
    rows = inputs.draft_tokens + 1
    load = _seconds_per_expert(source, inputs, clock)
    verify = _seconds_per_pass(target, rows, source, clock) / inputs.layers
    drafting = _seconds_per_pass(draft, 1, source, clock) / draft.depth_count
    return Profile(drafting, draft.depth_count, verify, load, free_slots(inputs))


def free_slots(inputs: CutoffInputs) -> int:
    """Slots beyond what one layer is expected to need at once."""
    return max(0, inputs.slots - math.ceil(inputs.needed_per_layer))


def _seconds_per_expert(source: ExpertSource, inputs: CutoffInputs, clock: Clock) -> float:
    """Throughput of demand loads, as many at once as a layer may ask for."""
    batch = range(min(inputs.slots, inputs.experts_per_layer))
    times = []
    for layer in range(min(inputs.layers, _PASSES)):
        before, started = source.counters.copy(), clock.now()
        for _ in source.use(layer, batch):
            pass
        loads = source.counters.minus(before).demand_loads
        if loads:
            times.append((clock.now() - started) / loads)
    return median(times) if times else 0.0


def _seconds_per_pass(network: Network, rows: int, source: ExpertSource, clock: Clock) -> float:
    kv = network.new_kv(rows * (_PASSES + 1))
    tokens = [i % network.vocab_size for i in range(rows)]
    times = []
    for _ in range(_PASSES + 1):
        source.begin_step()
        stalled, started = source.counters.stall_seconds, clock.now()
        network.forward(tokens, kv, keep=rows)
        times.append(clock.now() - started - (source.counters.stall_seconds - stalled))
    source.begin_step()
    return min(times[1:])  # what the machine can do; anything above it is somebody else's load
