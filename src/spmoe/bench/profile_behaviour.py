"""What generations do under each policy: what they need, miss, foretell and take, per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from spmoe.bench.profile import Behaviour
from spmoe.bench.runs import IsolatedConfigs
from spmoe.config import Cutoff, CutoffMode, SamplingParams
from spmoe.engine.engine import Engine
from spmoe.engine.llm import LLM, Completion, Generation
from spmoe.predict.base import PrefetchPolicy
from spmoe.types import DraftOutcome, ExpertKey, LayerChunk, PrefetchRequests, Routing, Stage

OBSERVED = ("on-demand", "next-gate", "draft-gate", "draft-gate+next-gate")
PROMPT = 32  # tokens of a prompt
_MARGIN = 4  # steps within which some text comes, so that a generation can be stopped
_BY = (Stage.DRAFT, Stage.VERIFY)
ALL_LAYERS = Cutoff(CutoffMode.ALL)

LayerObserver = Callable[[Generation], AbstractContextManager[None]]


class Observer(PrefetchPolicy):
    """Stands before an engine's policy, and counts what it names and what routers then choose."""

    def __init__(self, engine: Engine) -> None:
        self._inner, self._source = engine.loop.policy, engine.source
        self.name, self.stages = self._inner.name, self._inner.stages
        self.needed = 0  # experts, in all counted steps
        self.missing = [0] * len(engine.store.experts)  # by layer
        self.named = dict.fromkeys(_BY, 0)  # while they were in no slot, by who named them first
        self.right = dict.fromkeys(_BY, 0)  # of them, needed
        self._request: int | None = None
        self._counted = False  # a step that reads a prompt is not
        self._loaded = 0
        self._by: dict[ExpertKey, Stage] = {}
        self._used: set[ExpertKey] = set()

    def begin_step(self, request: int) -> PrefetchRequests:
        self._counted, self._request = request == self._request, request
        self._loaded = self._source.counters.useful_loads
        self._by, self._used = {}, set()
        return self._note(self._inner.begin_step(request), Stage.DRAFT)

    def ask(self, stage: Stage, depths: range, residual: Tensor) -> Routing | None:
        return self._inner.ask(stage, depths, residual)

    def on_chunk(self, seen: LayerChunk) -> PrefetchRequests:
        return self._note(self._inner.on_chunk(seen), Stage.VERIFY if seen.stage is Stage.VERIFY else Stage.DRAFT)

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        self._used.update(ExpertKey(layer, expert) for expert in experts)
        before, self._loaded = self._loaded, self._source.counters.useful_loads  # which counts this layer's by now
        self.missing[layer] += (self._loaded - before) * self._counted
        return self._note(self._inner.on_routed(layer, experts), Stage.VERIFY)

    def on_accept(self, accepted: DraftOutcome) -> None:
        self._inner.on_accept(accepted)
        if not self._counted:
            return
        self.needed += len(self._used)
        for key, stage in self._by.items():
            self.named[stage] += 1
            self.right[stage] += key in self._used

    def _note(self, prefetches: PrefetchRequests, stage: Stage) -> PrefetchRequests:
        for key in map(ExpertKey, prefetches.layers.tolist(), prefetches.experts.tolist()):
            if self._source.cache.get(key) is None and key not in self._used:
                self._by.setdefault(key, stage)
        return prefetches


def observe(
    llm: LLM,
    draft_tokens: int,
    prompts: Sequence[list[int]],
    output_len: int,
    watch: LayerObserver = lambda generation: nullcontext(),
    policies: Sequence[str] = OBSERVED,
) -> tuple[Behaviour, ...]:
    """Run every prompt under each policy, in turns, after one to warm up; one that comes to another is left out."""
    engine, found = llm.engine, dict[str, list[tuple[Observer, Completion]]]()
    apart = IsolatedConfigs(engine)
    for number, prompt in enumerate([prompts[0], *prompts]):
        for policy in policies:
            changes = {"prefetch": policy, "num_speculative_tokens": draft_tokens, "cutoff": ALL_LAYERS}
            apart.select(policy, changes)
            if engine.loop.policy.name != policy:  # what it needs is not there
                continue
            if number == 0:
                generate(llm, prompt, output_len, watch)
                engine.loop.prepare()
                continue
            inner = engine.loop.policy
            engine.loop.policy = observer = Observer(engine)
            try:
                found.setdefault(policy, []).append((observer, generate(llm, prompt, output_len, watch)))
            finally:
                engine.loop.policy = inner
    return tuple(_behaviour(engine, policy, draft_tokens, runs) for policy, runs in found.items())


def generate(llm: LLM, prompt: list[int], output_len: int, watch: LayerObserver) -> Completion:
    """Greedy, to a length or a little beyond: drafts cut short at the end would be steps of another K."""
    engine = llm.engine
    room = min(output_len + _MARGIN * (engine.loop.draft_tokens + 1), engine.max_model_len - len(prompt))
    generation = llm.stream(prompt, SamplingParams(max_tokens=room, ignore_eos=True))
    enough = False
    with watch(generation):
        for _ in generation:
            if not enough and len(generation.token_ids) >= output_len and not generation.stopped:
                enough = True
                generation.stop()
    if generation.stopped and not enough:
        raise KeyboardInterrupt
    return generation.completion


def _behaviour(engine: Engine, policy: str, k: int, runs: Sequence[tuple[Observer, Completion]]) -> Behaviour:
    decoded, seen = [run.stats.decode_counters for _, run in runs], [observer for observer, _ in runs]
    steps, layers = max(1, sum(one.steps for one in decoded)), len(engine.store.experts)
    stall = sum(one.stall_seconds for one in decoded) / steps
    drafting = sum(one.draft_seconds for one in decoded) / steps
    verifying = sum(one.verify_seconds for one in decoded) / steps
    drafted = sum(one.drafted for one in decoded) / steps
    by_layer = [sum(counts) for counts in zip(*(one.missing for one in seen), strict=True)]
    missing = sum(by_layer)
    named, right = ({by: sum(getattr(one, what)[by] for one in seen) for by in _BY} for what in ("named", "right"))
    return Behaviour(
        policy=policy,
        draft_tokens=k,
        passes=drafted,
        rows=drafted + 1,
        slots=engine.slots,
        steps=steps,
        tokens_per_step=sum(one.tokens for one in decoded) / steps,
        step_seconds=drafting + verifying,
        draft_seconds=drafting,
        compute_seconds=max(0.0, verifying - stall),
        stall_seconds=stall,
        loads=sum(one.loads for one in decoded) / steps,
        needed=sum(one.needed for one in seen) / steps / layers,
        missing=missing / steps / layers,
        missing_by_layer=tuple(one / steps for one in by_layer),
        draft_recall=_share(right[Stage.DRAFT], missing),
        draft_precision=_share(right[Stage.DRAFT], named[Stage.DRAFT]),
        own_recall=_share(right[Stage.VERIFY], missing - right[Stage.DRAFT]),
        own_precision=_share(right[Stage.VERIFY], named[Stage.VERIFY]),
    )


def _share(part: int, whole: int) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0
