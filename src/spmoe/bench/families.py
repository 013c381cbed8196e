"""The proof that a family works: its tiny checkpoint is run by transformers and by the engine, and must say the same.

Every family runs in a process of its own, so that a crash or a hang costs one row of the table.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spmoe import types
from spmoe.config import SamplingParams
from spmoe.draft.base import ChunkObserver, Drafter
from spmoe.engine.llm import LLM
from spmoe.errors import reason
from spmoe.models.checkpoint import quiet
from spmoe.models.families import reference_tokens, save, tiny_draft, tiny_model

PROMPT = [(13 * i + 5) % 89 for i in range(11)]
COUNT = 20  # tokens generated
K = 3
TIMEOUT = 240.0  # seconds for one family
OK = "ok"
IN_PART = "in part"
CHECKS = ("loads", "plain", "speculation", "prediction")
CUDA_CHECKS = (*CHECKS, "recorded")
_SEEDS = range(8)  # tried until a checkpoint says something that is not all the same
_DISTINCT = 6


@dataclass(frozen=True)
class VerifyResult:
    """What came of one family: `ok`, or why not, for each check."""

    family: str
    loads: str
    plain: str = "not reached"
    speculation: str = "not reached"
    prediction: str = "not reached"
    recorded: str = "not on a CUDA device"

    @property
    def holds(self) -> bool:
        """Whether it loads and is exact, with and without speculation; the rest only makes it faster."""
        return self.loads == self.plain == self.speculation == OK

    def to_dict(self) -> dict[str, str]:
        """Plain values, for JSON."""
        return asdict(self)


class Replay:
    """A draft that is right most of the time: what is expected, with an error here and there."""

    def __init__(self, inner: Drafter, expected: Sequence[int], vocabulary: int) -> None:
        self._inner = inner
        self._expected = [*PROMPT, *expected]
        self._vocabulary = vocabulary

    def propose(self, sequences: Sequence[types.Sequence], k: int, on_chunk: ChunkObserver | None) -> list[types.Draft]:
        self._inner.propose(sequences, k, on_chunk)
        return [types.Draft(self._tokens(len(sequence.tokens), k)) for sequence in sequences]

    def begin(self, sequence: types.Sequence, k: int, on_chunk: ChunkObserver | None) -> None:
        self._inner.begin(sequence, k, on_chunk)

    def prepare(self, k: int, on_chunk: ChunkObserver | None) -> None:
        self._inner.prepare(k, on_chunk)

    def rewind(self, lengths: Mapping[int, int]) -> None:
        self._inner.rewind(lengths)

    def release(self, sequence_id: int) -> None:
        self._inner.release(sequence_id)

    def _tokens(self, start: int, k: int) -> list[int]:
        right = enumerate(self._expected[start : start + k], start)
        return [(token + _is_wrong(place)) % self._vocabulary for place, token in right]


def _is_wrong(place: int) -> bool:
    """No pattern that steps could fall in with: drafts are kept whole, in part and not at all."""
    return (place * place + place // 3) % 5 == 1


def prove(family: str, directory: Path, device: str = "cpu") -> VerifyResult:
    """Run every check on one family, in this process."""
    found = {"family": family}
    try:
        target, draft, expected = _checkpoints(family, directory, device)
        _check(found, target, draft, expected, device)
    except Exception as error:  # whatever a family's own code raises is a row of the table
        found["loads"] = _told(error)
    names = {str(directory / "draft"): "the draft", **{str(directory / f"target-{seed}"): family for seed in _SEEDS}}
    for path, name in names.items():
        found = {check: answer.replace(path, name) for check, answer in found.items()}
    return VerifyResult(**found)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {reason(error)}"


def _checkpoints(family: str, directory: Path, device: str) -> tuple[str, str, list[int]]:
    """A target, a draft that knows nothing of it, and what transformers says the target writes."""
    for seed in _SEEDS:
        model = tiny_model(family, seed)
        target = directory / f"target-{seed}"
        save(model, target)
        expected = reference_tokens(target, PROMPT, COUNT, device)
        if len(set(expected)) >= _DISTINCT:
            break
    draft = directory / "draft"
    text = model.config.get_text_config(decoder=True)
    save(tiny_draft(text.hidden_size, text.vocab_size), draft)
    return str(target), str(draft), expected


def _check(found: dict[str, str], target: str, draft: str, expected: list[int], device: str) -> None:
    options: dict[str, Any] = {
        "num_speculative_tokens": K,
        "cutoff": "all",
        "dtype": "float32",
        "device": device,
        "progress": False,
    }

    def attempt(check: str, ask: Callable[..., str], *args: Any) -> None:
        if found.get(check, OK) == OK:
            try:
                found[check] = ask(*args)
            except Exception as error:  # other checks may still pass
                found[check] = _told(error)

    with LLM(target, draft, expert_memory="100%", **options) as llm:
        engine = llm.engine
        sizes = [engine.target.top_k, max(engine.target.top_k, engine.slots // 2)]
        budgets = [size * engine.store.layout.nbytes for size in sizes]
        found["loads"] = OK
        if device != "cpu":
            attempt("recorded", _recorded, llm)
        attempt("plain", _plain, llm, expected)
        attempt("prediction", _prediction, llm)
        attempt("speculation", _speculation, llm, expected)
    for budget in budgets:
        with LLM(target, draft, expert_memory=budget, prefill_chunk=4, **options) as llm:
            attempt("speculation", _speculation, llm, expected)
            attempt("plain", _plain, llm, expected)


def _recorded(llm: LLM) -> str:
    """Whether forwards of few rows are graphs, and why not."""
    return next((notice for notice in llm.notices if "of the target cannot be recorded" in notice), OK)


def _plain(llm: LLM, expected: list[int]) -> str:
    llm.engine.reconfigure(prefetch="on-demand", num_speculative_tokens=0)
    return _same(llm, expected, "")


def _speculation(llm: LLM, expected: list[int]) -> str:
    engine = llm.engine
    if engine.draft is None:
        return next(iter(llm.notices), "the engine decodes without speculation")
    for prefetch in ("draft-gate", "on-demand"):
        for kind in ("a random draft", "a good draft"):
            engine.reconfigure(prefetch=prefetch, num_speculative_tokens=K)
            before = engine.loop.counters.copy()
            own = engine.loop.drafter
            if kind == "a good draft":
                engine.loop.drafter = Replay(own, expected, engine.target.vocab_size)
            try:
                answer = _same(llm, expected, f"with {kind}, {prefetch}, {engine.slots} slots: ")
            finally:
                engine.loop.drafter = own
            if answer != OK:
                return answer
            counters = engine.loop.counters.minus(before)
            if kind == "a good draft" and not 0 < counters.accepted < counters.drafted:
                return f"{counters.accepted} of {counters.drafted} draft tokens were kept, so nothing was proved"
    return OK


def _prediction(llm: LLM) -> str:
    target = llm.engine.target
    if target.gated and (right := own_predictions(llm)) < 1.0:
        return f"the gates, asked alone, name {100 * right:.0f}% of the experts that are used"
    routers, norms = (sum(getattr(moe_layer, end) is None for moe_layer in target.moe) for end in ("router", "norm"))
    how = f"{IN_PART}: " if target.gated else ""
    if routers:
        return f"{how}no router was found for {routers} of {len(target.moe)} MoE layers"
    return f"{how}no norm was found before the router of {norms} of {len(target.moe)} MoE layers" if norms else OK


def own_predictions(llm: LLM) -> float:
    """The share of experts that the gates name when they are asked about the target's own hidden states."""
    target, kv = llm.engine.target, llm.engine.target.new_kv(len(PROMPT))
    seen: dict[int, Tensor] = {}
    used: dict[int, Tensor] = {}
    handles = []
    for layer, moe_layer in enumerate(target.moe):
        if moe_layer.norm is None or moe_layer.router is None:
            continue
        tapped = moe_layer.router.router if isinstance(moe_layer.norm, nn.Identity) else moe_layer.norm

        def tap(module: nn.Module, args: tuple[Tensor, ...], layer: int = layer) -> None:
            seen[layer] = args[0].reshape(-1, args[0].shape[-1])

        def note(module: nn.Module, args: Any, kwargs: Any, layer: int = layer) -> None:
            used[layer] = args[1] if len(args) > 1 else kwargs["top_k_index"]

        handles.append(tapped.register_forward_pre_hook(tap))
        handles.append(moe_layer.experts.register_forward_pre_hook(note, with_kwargs=True))
    try:
        target.forward(PROMPT, kv, keep=1)
    finally:
        for handle in handles:
            handle.remove()
    named = [target.route([layer], seen[layer][None]).experts[0] for layer in used]  # each: [rows, top_k]
    hits = [(a[:, :, None] == b[:, None, :]).any(1).float().mean() for a, b in zip(named, used.values(), strict=True)]
    return float(torch.stack(hits).mean())


def _same(llm: LLM, expected: list[int], setting: str) -> str:
    found = llm.generate(PROMPT, SamplingParams(max_tokens=len(expected), ignore_eos=True))[0].token_ids
    if found == expected:
        return OK
    first = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
    return f"{setting}token {first + 1} of {len(expected)} differs from what transformers writes"


# ---- many families, each in a process


def prove_all(
    families: Iterable[str],
    workers: int = 2,
    on_done: Callable[[VerifyResult, float], None] = lambda result, seconds: None,
    device: str = "cpu",
) -> list[VerifyResult]:
    """Every family's verdict, in the order asked for."""
    waiting, running, verdicts = list(families), dict[str, _Job](), dict[str, VerifyResult]()
    order = list(waiting)
    while waiting or running:
        while waiting and len(running) < workers:
            family = waiting.pop(0)
            running[family] = _Job(family, device)
        for family, job in list(running.items()):
            if (result := job.result()) is not None:
                verdicts[family] = result
                on_done(result, time.monotonic() - job.started)
                del running[family]
        time.sleep(0.02)
    return [verdicts[family] for family in order]


class _Job:
    """One family under way."""

    def __init__(self, family: str, device: str) -> None:
        # forked, it need not import everything once more; but CUDA does not outlive a fork
        forks = hasattr(os, "fork") and device == "cpu"
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self.family = family
        self.started = time.monotonic()
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(family, device, sender), daemon=True)
        self._process.start()
        sender.close()

    def result(self) -> VerifyResult | None:
        """What came of it, when something has."""
        if self._receiver.poll():
            try:
                result: VerifyResult = self._receiver.recv()
            except EOFError:
                self._process.join()
                return VerifyResult(self.family, f"its process ended with exit code {self._process.exitcode}")
            self._process.join()
            return result
        if time.monotonic() - self.started > TIMEOUT:
            self._process.kill()
            self._process.join()
            return VerifyResult(self.family, f"not done after {TIMEOUT:.0f} s")
        return None


def _work(family: str, device: str, sender: Any) -> None:
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # float32 is meant, in convolutions too
    warnings.simplefilter("ignore")  # what families' own code warns of is neither ours nor about exactness
    with tempfile.TemporaryDirectory() as directory, quiet():
        os.environ["SPMOE_HOME"] = str(Path(directory) / "home")
        sender.send(prove(family, Path(directory), device))
    sender.close()
