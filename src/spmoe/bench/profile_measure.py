"""Measuring a profile, through the real engine: passes, loads, both at once, and what generations do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

from spmoe.backends.devices import copy_seconds
from spmoe.bench.ceilings import machine
from spmoe.bench.profile import Behaviour, Contention, CopyTime, EngineProfile, PassTime, Subject
from spmoe.draft.model import DraftModel
from spmoe.engine.engine import Engine
from spmoe.engine.profiling import Timed, Timer, expert_share, time_load, time_passes
from spmoe.errors import UsageError
from spmoe.experts.link import EmulatedLink
from spmoe.experts.store import ExpertFile
from spmoe.files import read_into
from spmoe.models.load import expert_file_path
from spmoe.models.runner import ModelRunner
from spmoe.models.shipped import sample_text
from spmoe.predict.latency import evenly_needed
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests, Residency

DRAFT_ROWS = (1, 2, 4, 8)
VERIFY_ROWS = (1, 2, 3, 5, 9)
_SIZES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)  # in experts
_TEXT = 4096  # characters
_TRIES = 7
_PASSES = 9
_ROUNDS = 4  # of copies beside compute
_MOST_PASSES = 32  # in one of them

Tell = Callable[[str], None]


def measure_profile(engine: Engine, behave: Callable[[], tuple[Behaviour, ...]], tell: Tell) -> EngineProfile:
    """Measure everything; `behave` generates, and says what it came to. The engine's policy is as before afterwards."""
    if not engine.target.moe:
        raise UsageError("the model has no experts, so that there is nothing to profile")
    timer, text = Timer(engine.source, engine.clock, engine.room.backend.synchronize), text_tokens(engine)
    spec, inner = engine.store, engine.draft.runner if isinstance(engine.draft, DraftModel) else None
    with _undisturbed(engine):
        tell("timing the draft")
        draft = tuple(_pass_time(inner, rows, timer, text)[0] for rows in DRAFT_ROWS) if inner is not None else ()
        tell("timing verification")
        verified = [_pass_time(engine.target, rows, timer, text, len(spec.experts)) for rows in _verify_rows(engine)]
        needed = evenly_needed(max(spec.experts), engine.target.top_k, verified[-1][0].rows)
        share = expert_share(engine.target, verified[-1][1], spec.layout.nbytes, needed)
        tell("timing copies")
        copies = _copies(engine)
        loads = _loads(engine, timer)
        tell("timing copies beside compute")
        contention = _contention(engine, inner or engine.target, text)
    tell("generating")
    return EngineProfile(
        machine(engine.device), _subject(engine, inner), draft, tuple(one for one, _ in verified), share, copies, loads,
        contention, engine.memory, behave(),
    )  # fmt: skip


@contextmanager
def _undisturbed(engine: Engine) -> Iterator[None]:
    """No policy of its own, and eviction that any prefetch request may claim a slot of."""
    before = engine.config
    engine.reconfigure(prefetch="on-demand", eviction="lru", overlap=True)
    try:
        yield
    finally:
        engine.source.overlap = True
        engine.reconfigure(prefetch=before.prefetch, eviction=before.eviction, overlap=before.overlap)


def text_tokens(engine: Engine) -> list[int]:
    """A text that the model may have been made for, or else any tokens: what experts are used follows from it."""
    found = engine.tokenizer(sample_text()[:_TEXT])["input_ids"] if engine.tokenizer is not None else []
    most = engine.target.vocab_size
    if isinstance(engine.draft, DraftModel):
        most = min(most, engine.draft.runner.vocab_size)
    return [token for token in found if token < most] or list(range(most))


def _subject(engine: Engine, draft: ModelRunner | None) -> Subject:
    config, spec = engine.config, engine.store
    return Subject(
        config.model, config.draft, str(engine.dtype).removeprefix("torch."), engine.device.type, config.shape,
        len(spec.experts), max(spec.experts), engine.target.top_k, spec.layout.nbytes,
        draft.depth_count if draft is not None else 0, engine.slots, config.eviction_policy, config.link_gbps,
    )  # fmt: skip


def _verify_rows(engine: Engine) -> list[int]:
    """As many as steps may have; where forwards are recorded, those that are."""
    recorded = engine.config.most_draft_tokens + 1 if engine.room.recorder is not None else max(VERIFY_ROWS)
    return [rows for rows in VERIFY_ROWS if rows <= recorded]


def _pass_time(
    runner: ModelRunner, rows: int, timer: Timer, text: Sequence[int], layers: int | None = None
) -> tuple[PassTime, list[Timed]]:
    """Of one network; per MoE layer of a target, else per decoder layer."""
    found = time_passes(runner, rows, timer, text, _PASSES)
    times = [one.own_seconds for one in found]
    typical = median(times)
    return PassTime(rows, min(times), typical, typical / (layers or runner.depth_count)), found


def _copies(engine: Engine) -> tuple[CopyTime, ...]:
    """Parts of an expert, and several: what moves bytes is asked directly, below slots and queue."""
    blob, found = engine.store.layout.nbytes, list[CopyTime]()
    with _mover(engine, round(max(_SIZES) * blob)) as move:
        for experts in _SIZES:
            size = max(1, round(experts * blob))
            times = move(size)
            found.append(CopyTime(experts, size, min(times), median(times)))
    return tuple(found)


@contextmanager
def _mover(engine: Engine, most: int) -> Iterator[Callable[[int], list[float]]]:
    """A function that moves so many bytes as the engine does, several times, and says how long that took."""
    clock = engine.clock

    def timed(move: Callable[[int], object]) -> Callable[[int], list[float]]:
        def several(size: int) -> list[float]:
            moments = [clock.now()]
            for _ in range(_TRIES):
                move(size)
                moments.append(clock.now())
            return [end - start for start, end in pairwise(moments)]

        return several

    if engine.config.link_gbps is not None:
        link = EmulatedLink(engine.config.link_gbps * 1e9, clock)
        yield timed(lambda size: link.wait(link.enter(size, urgent=True)))
    elif engine.device.type == "cuda":
        yield lambda size: copy_seconds(engine.device, size, _TRIES, pinned=engine.config.pin_memory)
    else:
        file, buffer = ExpertFile.open(expert_file_path(engine.checkpoint, engine.dtype)), memoryview(bytearray(most))
        start = file.offset(next(iter(file.spec.keys())))

        def read(size: int) -> int:
            return read_into(file.fd, buffer[:size], start)

        try:
            read(most)
            yield timed(read)
        finally:
            file.close()


def _loads(engine: Engine, timer: Timer) -> tuple[CopyTime, ...]:
    """Experts of a layer that no slot holds, so many demanded at once."""
    layers, blob, found, size, layer = len(engine.store.experts), engine.store.layout.nbytes, list[CopyTime](), 1, 0
    most = min(engine.slots, min(engine.store.experts)) if engine.slots < engine.store.count else 0
    while size <= most:
        times = []
        for _ in range(_TRIES):
            layer = (layer + 1) % layers
            absent = _make_absent(engine, layer, size)
            timed = time_load(timer, layer, absent[:size])
            if timed.loads == size:
                times.append(timed.seconds)
        if times:
            found.append(CopyTime(size, size * blob, min(times), median(times)))
        size = most if size < most < 2 * size else 2 * size
    return tuple(found)


def _make_absent(engine: Engine, layer: int, count: int) -> list[int]:
    """Experts of a layer that are in no slot; where they are fewer, other layers' have theirs before."""

    def absent() -> list[int]:
        every = range(engine.store.experts[layer])
        return [expert for expert in every if engine.source.cache.get(ExpertKey(layer, expert)) is None]

    layers = len(engine.store.experts)
    for other in (n % layers for n in range(layer + 1, layer + layers)):
        if len(absent()) >= count:
            break
        engine.source.begin_step()
        for _ in engine.source.use(other, range(min(engine.slots, engine.store.experts[other]))):
            pass
        engine.source.end_step()
    return absent()


def _contention(engine: Engine, runner: ModelRunner, text: Sequence[int]) -> Contention | None:
    """Passes while wished-for experts move, and their copies, against each of them alone; in turns."""
    blobs = _Blobs(engine)
    if blobs.room < 2:
        return None
    passing = _Passes(engine, runner, text)
    moved, seconds = blobs.fetch()
    once = passing.run(1)
    if not moved or not once:
        return None
    passes = min(_MOST_PASSES, max(1, int(seconds / once / 2)))  # so few that copies go on all the while
    alone, together, loads, slowed = list[float](), list[float](), list[float](), list[float]()
    for _ in range(_ROUNDS):
        alone.append(passing.run(passes) / passes)
        moved, seconds = blobs.fetch()
        loads += [seconds / moved] if moved else []
        since, wished = engine.clock.now(), blobs.prefetch()
        together.append(passing.run(passes) / passes)
        took = engine.clock.now() - since
        engine.source.pump()  # which settles what has arrived
        arrived = blobs.arrived(wished)
        slowed += [took / arrived] if arrived else []
        blobs.settle()
    if not loads or not slowed:
        return None
    return Contention(min(alone), min(together), min(loads), min(slowed))  # others' load on the machine left out


class _Passes:
    """Passes of one row, within whatever step has begun."""

    def __init__(self, engine: Engine, runner: ModelRunner, text: Sequence[int]) -> None:
        self._engine, self._network, self._text = engine, runner, text

    def run(self, count: int) -> float:
        """Seconds that they take, waiting for experts not included."""
        engine, runner = self._engine, self._network
        kv = runner.new_kv(count + 2)
        runner.forward([self._text[0]], kv, keep=1)
        engine.room.backend.synchronize()
        stalled, started = engine.source.counters.stall_seconds, engine.clock.now()
        for number in range(count):
            runner.forward([self._text[number % len(self._text)]], kv, keep=1)
            _wait(engine)
            engine.source.pump()  # where nobody else keeps copies going
        took = engine.clock.now() - started
        engine.source.book_stalls()
        runner.release_kv(kv)
        return max(0.0, took - (engine.source.counters.stall_seconds - stalled))


def _wait(engine: Engine) -> None:
    """For compute, while copies go on."""
    if (cuda := engine.room.cuda) is None:
        engine.room.backend.synchronize()
        return
    point = cuda.recorder.new_event()
    point.record()
    engine.source.transfer.wait_and_pump(point)


class _Blobs:
    """Prefetch requests for experts that no slot holds, as many at once as slots can be had for."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._source = engine, engine.source
        self._keys = list(engine.store.keys())
        self.room = min(engine.slots - 1, engine.store.count - engine.slots)
        self._next = 0

    def prefetch(self) -> list[ExpertKey]:
        """Begin a step, and prefetch request for some."""
        self._source.begin_step()
        found: list[ExpertKey] = []
        for _ in self._keys:
            self._next = (self._next + 1) % len(self._keys)
            if len(found) < self.room and self._source.cache.get(self._keys[self._next]) is None:
                found.append(self._keys[self._next])
        beyond = len(self._engine.store.experts)  # a deadline that no layer reaches
        self._source.prefetch(PrefetchRequests.of(PrefetchRequest(key, 1.0, beyond) for key in found))
        self._source.see_to_wishes()
        return found

    def arrived(self, keys: Sequence[ExpertKey]) -> int:
        """How many of them are in slots."""
        entries = [self._source.cache.get(key) for key in keys]
        return sum(one is not None and one.state is Residency.READY for one in entries)

    def fetch(self) -> tuple[int, float]:
        """Copy some with nothing else going on: how many, and how long that took."""
        self._source.overlap = False
        wished, started = self.prefetch(), self._engine.clock.now()
        self.settle()
        return self.arrived(wished), self._engine.clock.now() - started

    def settle(self) -> None:
        """Let what was wished for arrive."""
        self._source.overlap = False
        self._source.draft_is_over()
        self._source.overlap = True
        self._source.end_step()
