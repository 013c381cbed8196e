"""The profile: a short measurement, made once per machine, pair and settings, that the cutoff is computed from."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from spmoe.config import home
from spmoe.experts.source import ExpertSource
from spmoe.files import atomic_write
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.observe.clock import Clock
from spmoe.observe.timeline import Activity
from spmoe.predict.cutoff import CutoffInputs, Profile

PASSES = 5  # timed passes, after one that warms up


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
        with atomic_write(path) as place:
            place.write_text(json.dumps(asdict(profile), indent=2))
    except OSError:
        pass


def measure(
    target: Target,
    draft: ModelRunner,
    source: ExpertSource,
    inputs: CutoffInputs,
    clock: Clock,
    synchronize: Callable[[], None] = lambda: None,
) -> Profile:
    """Time single draft passes, verification passes with their stalls taken out, and expert loads.

    `synchronize` waits for a device that computes, and receives experts, behind the host's back.
    """
    timer = Timer(source, clock, synchronize)
    load = _seconds_per_expert(timer, inputs)
    verify, draft_passes = time_passes(target, inputs.draft_tokens + 1, timer), time_passes(draft, 1, timer)
    return Profile(
        fastest(draft_passes) / draft.depth_count,
        draft.depth_count,
        fastest(verify) / inputs.layers,
        load,
        inputs.free_slots,
        expert_share=expert_share(target, verify, source.blob_bytes, inputs.needed_per_layer),
    )


@dataclass(frozen=True, slots=True)
class Timed:
    """How long something took that the source took part in."""

    seconds: float
    stall_seconds: float  # of them, that compute waited for copies
    expert_seconds: float  # of them, from a router's choice to the end of its layer's experts, waiting not included
    loads: int  # demanded

    @property
    def own_seconds(self) -> float:
        """Without the waiting."""
        return self.seconds - self.stall_seconds


def fastest(times: Sequence[Timed]) -> float:
    """What the machine can do; anything above it is somebody else's load."""
    return min(one.own_seconds for one in times)


def expert_share(target: Target, verified: Sequence[Timed], blob_bytes: int, needed: float) -> float:
    """What part of a layer's time its experts take, as measured where the host computes them.

    A device's kernels run behind the host's back; there it is the experts' part of the weights that a layer reads.
    """
    if target.model.device.type == "cpu":
        return median(max(0.0, one.expert_seconds / one.own_seconds) for one in verified)
    return needed * blob_bytes / (needed * blob_bytes + target.resident_bytes / max(1, target.depth_count))


class Timer:
    """Times what the source takes part in, from one moment at which nothing is under way to the next."""

    def __init__(self, source: ExpertSource, clock: Clock, synchronize: Callable[[], None]) -> None:
        self.source = source
        self._clock = clock
        self._synchronize = synchronize

    def time(self, work: Callable[[], object]) -> Timed:
        """Run it as a step of its own."""
        timeline = self.source.timeline
        self.source.begin_step()
        self._synchronize()
        before, mark, recording = self.source.counters.copy(), len(timeline.spans), timeline.recording
        timeline.recording = True
        try:
            started = self._clock.now()
            work()
            self._synchronize()
            seconds = self._clock.now() - started
            self.source.end_step()
            layers = sum(one.end - one.start for one in timeline.spans[mark:] if one.activity is Activity.LAYER)
        finally:
            timeline.recording = recording
            del timeline.spans[mark:]
        spent = self.source.counters.minus(before)
        return Timed(seconds, spent.stall_seconds, layers - spent.stall_seconds, spent.demand_loads)


def time_passes(
    runner: ModelRunner, rows: int, timer: Timer, text: Sequence[int] | None = None, passes: int = PASSES
) -> list[Timed]:
    """Passes of so many rows, each continuing the one before, over a text or any tokens; one before does not count."""
    text = text or range(runner.vocab_size)
    kv = runner.new_kv(rows * (passes + 2) + 1)
    found = []
    try:
        runner.forward(
            [text[0]], kv, keep=1
        )  # a state that has begun: only such a one is continued by recorded forwards
        for number in range(passes + 1):
            tokens = [text[(number * rows + i) % len(text)] for i in range(rows)]
            found.append(timer.time(lambda tokens=tokens: runner.forward(tokens, kv, keep=rows)))  # type: ignore[misc]
    finally:
        runner.release_kv(kv)
    return found[1:]


def time_load(timer: Timer, layer: int, experts: Sequence[int]) -> Timed:
    """Have experts of a layer, those that are in no slot demanded together."""
    return timer.time(lambda: list(timer.source.use(layer, experts)))


def _seconds_per_expert(timer: Timer, inputs: CutoffInputs) -> float:
    """Throughput of demand loads, as many at once as a layer may ask for."""
    batch = range(min(inputs.slots, inputs.experts_per_layer))
    found = [time_load(timer, layer, batch) for layer in range(min(inputs.layers, PASSES))]
    times = [one.seconds / one.loads for one in found if one.loads]
    return median(times) if times else 0.0
