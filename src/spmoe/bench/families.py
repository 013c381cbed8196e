"""Check MoE families: run each one's tiny model with transformers and with the engine, and compare the tokens.

`check_family` checks dense checkpoints, and `check_formats` quantized ones in every format that uploads have. Every
family runs in its own process, so that a crash or a hang costs one row of the table. `markdown_page` writes the table
as docs/families.md, and `formats_page` that of the formats.
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
from textwrap import wrap
from typing import Any

import torch
from torch import Tensor, nn

from spmoe import types
from spmoe.backends.devices import choose_device, device_facts
from spmoe.config import ONE_BY_ONE, SamplingParams
from spmoe.draft.base import Drafter, Observers
from spmoe.engine.llm import LLM
from spmoe.errors import reason
from spmoe.models.checkpoint import quiet
from spmoe.models.families import reference_tokens, save, tiny_draft, tiny_model
from spmoe.models.tiny_quantized import FORMATS, write_quantized

PROMPT = [(13 * i + 5) % 89 for i in range(11)]
MAX_NEW_TOKENS = 20
K = 3
TIMEOUT = 240.0  # seconds for one family
FORMATS_TIMEOUT = 900.0  # seconds for all formats of one family
OK = "ok"
PARTLY = "partly"
NO_LAYOUT = "-"  # experts of such a family are not published in this format
CHECKS = ("loads", "plain", "speculation", "prediction")
CUDA_CHECKS = (*CHECKS, "captured")
_SEEDS = range(8)  # tried in order until the generated text is varied enough
_MIN_DISTINCT_TOKENS = 6


@dataclass(frozen=True)
class FamilyResult:
    """Result of each check of one family: `ok`, or the reason why not."""

    family: str
    loads: str
    plain: str = "not reached"
    speculation: str = "not reached"
    prediction: str = "not reached"
    captured: str = "not on a CUDA device"

    @property
    def exact(self) -> bool:
        """Whether the family loads and is exact with and without speculation; other checks only concern speed."""
        return self.loads == self.plain == self.speculation == OK

    def to_dict(self) -> dict[str, str]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class FormatsResult:
    """Result of each format of one family: `ok`, `-`, or the reason why not."""

    family: str
    formats: dict[str, str]

    @property
    def exact(self) -> bool:
        """Whether every format that the family is published in is exact."""
        return all(answer in (OK, NO_LAYOUT) for answer in self.formats.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


Result = FamilyResult | FormatsResult


class MostlyRightDrafter(Drafter):
    """Runs another drafter, but proposes the expected tokens with some errors."""

    def __init__(self, inner: Drafter, expected: Sequence[int], vocab_size: int) -> None:
        self._inner = inner
        self._expected = [*PROMPT, *expected]
        self._vocab_size = vocab_size

    def propose(self, sequences: Sequence[types.Sequence], k: int, observers: Observers) -> list[types.Draft]:
        self._inner.propose(sequences, k, observers)
        return [types.Draft(self._tokens(len(sequence.tokens), k)) for sequence in sequences]

    def launch(self, sequence: types.Sequence, k: int, observers: Observers) -> None:
        self._inner.launch(sequence, k, observers)

    def prepare(self, k: int, max_num_seqs: int, observers: Observers) -> None:
        self._inner.prepare(k, max_num_seqs, observers)

    def rewind(self, lengths: Mapping[int, int]) -> None:
        self._inner.rewind(lengths)

    def release(self, sequence_id: int) -> None:
        self._inner.release(sequence_id)

    def _tokens(self, start: int, k: int) -> list[int]:
        expected = enumerate(self._expected[start : start + k], start)
        return [(token + _is_wrong(position)) % self._vocab_size for position, token in expected]


def _is_wrong(position: int) -> bool:
    """Return whether the draft is wrong here: irregular, so that drafts are accepted fully, partly and not at all."""
    return (position * position + position // 3) % 5 == 1


def check_family(family: str, directory: Path, device: str = "cpu") -> FamilyResult:
    """Run every check on one family, in this process."""
    found = {"family": family}
    try:
        target, draft, expected = _make_checkpoints(family, directory, device)
        _run_checks(found, target, draft, expected, device)
    except Exception as error:  # any failure of a family's own code becomes a row of the table
        found["loads"] = _describe(error)
    names = {str(directory / "draft"): "the draft", **{str(directory / f"target-{seed}"): family for seed in _SEEDS}}
    for path, name in names.items():
        found = {check: answer.replace(path, name) for check, answer in found.items()}
    return FamilyResult(**found)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {reason(error)}"


def _make_checkpoints(family: str, directory: Path, device: str) -> tuple[str, str, list[int]]:
    """Write a target and an unrelated random draft; return both paths and the target's tokens by transformers."""
    for seed in _SEEDS:
        model = tiny_model(family, seed)
        target = directory / f"target-{seed}"
        save(model, target)
        expected = reference_tokens(target, PROMPT, MAX_NEW_TOKENS, device)
        if len(set(expected)) >= _MIN_DISTINCT_TOKENS:
            break
    draft = directory / "draft"
    text = model.config.get_text_config(decoder=True)
    save(tiny_draft(text.hidden_size, text.vocab_size), draft)
    return str(target), str(draft), expected


def _run_checks(found: dict[str, str], target: str, draft: str, expected: list[int], device: str) -> None:
    """Run all checks with all experts resident, then the exactness checks with two smaller budgets."""
    options: dict[str, Any] = {
        "num_speculative_tokens": K,
        "cutoff": "all",
        "dtype": "float32",
        "device": device,
        "progress": False,
        **ONE_BY_ONE,
    }

    def attempt(check: str, run: Callable[..., str], *args: Any) -> None:
        if found.get(check, OK) == OK:
            try:
                found[check] = run(*args)
            except Exception as error:  # the other checks may still pass
                found[check] = _describe(error)

    with LLM(target, draft, expert_memory="100%", **options) as llm:
        engine = llm.engine
        slots = [engine.target.top_k, max(engine.target.top_k, engine.slots // 2)]
        budgets = [count * engine.spec.layout.nbytes for count in slots]
        found["loads"] = OK
        if device != "cpu":
            attempt("captured", _captured, llm)
        attempt("plain", _plain, llm, expected)
        attempt("prediction", _prediction, llm)
        attempt("speculation", _speculation, llm, expected)
    for budget in budgets:
        with LLM(target, draft, expert_memory=budget, prefill_chunk=4, **options) as llm:
            attempt("speculation", _speculation, llm, expected)
            attempt("plain", _plain, llm, expected)


def check_formats(family: str, directory: Path, device: str = "cpu") -> FormatsResult:
    """Check every quantized format of one family, in this process."""
    try:
        source, draft, _ = _make_checkpoints(family, directory, device)
    except Exception as error:  # any failure of a family's own code becomes a row of the table
        return FormatsResult(family, dict.fromkeys(FORMATS, _describe(error)))
    found = {}
    for name in FORMATS:
        packed, dense = directory / f"{name}-packed", directory / f"{name}-dense"
        try:
            if not write_quantized(Path(source), packed, dense, name):
                found[name] = NO_LAYOUT
                continue
            expected = reference_tokens(dense, PROMPT, MAX_NEW_TOKENS, device)
            found[name] = _check_packed(str(packed), draft, expected, device)
        except Exception as error:  # the other formats may still pass
            found[name] = _describe(error).replace(str(packed), family)
    return FormatsResult(family, found)


def _check_packed(target: str, draft: str, expected: list[int], device: str) -> str:
    """Compare tokens, without and with speculation, with all experts in slots and with 30% of them."""
    options: dict[str, Any] = {"num_speculative_tokens": K, "cutoff": "all", "dtype": "float32", **ONE_BY_ONE}
    options["device"] = device
    memory: str | int = "100%"
    for _ in range(2):
        with LLM(target, draft, expert_memory=memory, progress=False, **options) as llm:
            layout, count = llm.engine.spec.layout, max(llm.engine.target.top_k, int(0.3 * llm.engine.spec.count))
            if layout.format == layout.dtype:
                return next((n for n in llm.notices if "expanded" in n), "experts were expanded to dense weights")
            for run in (_plain, _speculation):
                answer = run(llm, expected)
                if answer != OK and not (run is _speculation and not llm.engine.parts.drafter.proposes):
                    return answer
            memory = count * layout.nbytes
    return OK


def _captured(llm: LLM) -> str:
    """Check that forwards of few rows are captured as CUDA graphs."""
    if llm.engine.target.captures:
        return OK
    return next((notice for notice in llm.notices if notice.startswith("forwards of the target")), "not captured")


def _plain(llm: LLM, expected: list[int]) -> str:
    """Check plain decoding."""
    llm.engine.reconfigure(prefetch="on-demand", num_speculative_tokens=0)
    return _compare(llm, expected, "")


def _speculation(llm: LLM, expected: list[int]) -> str:
    """Check speculative decoding with a bad and a good draft, with and without prefetching."""
    engine = llm.engine
    if not engine.parts.drafter.proposes:
        return next(iter(llm.notices), "the engine decodes without speculation")
    for prefetch in ("draft-gate", "on-demand"):
        for kind in ("a random draft", "a good draft"):
            engine.reconfigure(prefetch=prefetch, num_speculative_tokens=K)
            before = engine.counters.copy()
            own = engine.loop.drafter
            if kind == "a good draft":
                engine.loop.drafter = MostlyRightDrafter(own, expected, engine.target.vocab_size)
            try:
                answer = _compare(llm, expected, f"with {kind}, {prefetch}, {engine.slots} slots: ")
            finally:
                engine.loop.drafter = own
            if answer != OK:
                return answer
            counters = engine.counters.minus(before)
            if kind == "a good draft" and not 0 < counters.accepted < counters.drafted:
                return (
                    f"{counters.accepted} of {counters.drafted} draft tokens were accepted, so rollback was not tested"
                )
    return OK


def _prediction(llm: LLM) -> str:
    """Check that every layer's norm and router were found and reproduce the model's own routing."""
    target = llm.engine.target
    if target.gated and (recall := gate_recall(llm)) < 1.0:
        return f"the gates, called alone, select {100 * recall:.0f}% of the experts that the model uses"
    routers, norms = (sum(getattr(moe_layer, name) is None for moe_layer in target.moe) for name in ("router", "norm"))
    prefix = f"{PARTLY}: " if target.gated else ""
    if routers:
        return f"{prefix}no router was found for {routers} of {len(target.moe)} MoE layers"
    return f"{prefix}no norm was found before the router of {norms} of {len(target.moe)} MoE layers" if norms else OK


def gate_recall(llm: LLM) -> float:
    """Return the share of used experts that the gates select when called alone on the target's own hidden states."""
    target = llm.engine.target
    residuals: dict[int, Tensor] = {}
    used: dict[int, Tensor] = {}
    handles = []
    for layer, moe_layer in enumerate(target.moe):
        if moe_layer.norm is None or moe_layer.router is None:
            continue
        hooked = moe_layer.router.router if isinstance(moe_layer.norm, nn.Identity) else moe_layer.norm

        def save_residual(module: nn.Module, args: tuple[Tensor, ...], layer: int = layer) -> None:
            residuals[layer] = args[0].reshape(-1, args[0].shape[-1])

        def save_experts(module: nn.Module, args: Any, kwargs: Any, layer: int = layer) -> None:
            used[layer] = args[1] if len(args) > 1 else kwargs["top_k_index"]

        handles.append(hooked.register_forward_pre_hook(save_residual))
        handles.append(moe_layer.experts.register_forward_pre_hook(save_experts, with_kwargs=True))
    try:
        with target.temporary_kv(len(PROMPT)) as kv:
            target.forward(PROMPT, kv, num_logits=1)
    finally:
        for handle in handles:
            handle.remove()
    predicted = [target.route([layer], residuals[layer][None]).experts[0] for layer in used]  # each: [rows, top_k]
    pairs = zip(predicted, used.values(), strict=True)
    return float(torch.stack([(a[:, :, None] == b[:, None, :]).any(1).float().mean() for a, b in pairs]).mean())


def _compare(llm: LLM, expected: list[int], setting: str) -> str:
    """Generate, and compare with the tokens of transformers."""
    found = llm.generate(PROMPT, SamplingParams(max_tokens=len(expected), ignore_eos=True))[0].token_ids
    if found == expected:
        return OK
    first = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
    return f"{setting}token {first + 1} of {len(expected)} differs from transformers"


# ---- many families, each in its own process


def check_families(
    families: Iterable[str],
    workers: int = 2,
    on_done: Callable[[Any, float], None] = lambda result, seconds: None,
    device: str = "cpu",
    formats: bool = False,
) -> list[Any]:
    """Check families in `workers` processes at a time; return the results in the given order.

    Results are `FormatsResult` with `formats`, otherwise `FamilyResult`.
    """
    waiting, running, results = list(families), dict[str, _Job](), dict[str, Result]()
    order = list(waiting)
    while waiting or running:
        while waiting and len(running) < workers:
            family = waiting.pop(0)
            running[family] = _Job(family, device, formats)
        for family, job in list(running.items()):
            if (result := job.result()) is not None:
                results[family] = result
                on_done(result, time.monotonic() - job.started)
                del running[family]
        time.sleep(0.02)
    return [results[family] for family in order]


class _Job:
    """A process that checks one family. Process pools do not survive a crash, and cannot end a hung worker."""

    def __init__(self, family: str, device: str, formats: bool) -> None:
        # a forked process need not import everything again, but CUDA does not survive a fork
        forks = hasattr(os, "fork") and device == "cpu"
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self.family = family
        self.started = time.monotonic()
        self._formats = formats
        self._limit = FORMATS_TIMEOUT if formats else TIMEOUT
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(family, device, formats, sender), daemon=True)
        self._process.start()
        sender.close()

    def result(self) -> Result | None:
        """Return the result; None while the process runs within its time limit."""
        if self._receiver.poll():
            try:
                result: Result = self._receiver.recv()
            except EOFError:
                self._process.join()
                return self._failed(f"its process ended with exit code {self._process.exitcode}")
            self._process.join()
            return result
        if time.monotonic() - self.started > self._limit:
            self._process.kill()
            self._process.join()
            return self._failed(f"not finished after {self._limit:.0f} s")
        return None

    def _failed(self, why: str) -> Result:
        if self._formats:
            return FormatsResult(self.family, dict.fromkeys(FORMATS, why))
        return FamilyResult(self.family, why)


def _work(family: str, device: str, formats: bool, sender: Any) -> None:
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # convolutions must compute in float32 too
    warnings.simplefilter("ignore")  # warnings of the families' own code do not concern exactness
    with tempfile.TemporaryDirectory() as directory, quiet():
        os.environ["SPMOE_HOME"] = str(Path(directory) / "home")
        sender.send((check_formats if formats else check_family)(family, Path(directory), device))
    sender.close()


# ---- the table as a page


def checks_on(device: str, formats: bool = False) -> tuple[str, ...]:
    """Return the names of the checks on a device, or of the quantized formats."""
    return tuple(FORMATS) if formats else CHECKS if device == "cpu" else CUDA_CHECKS


def short(answer: str) -> str:
    """Shorten an answer to `ok`, `partly`, `-` or `no`."""
    return answer if answer in (OK, NO_LAYOUT) else PARTLY if answer.startswith(PARTLY) else "no"


def answers(result: Result, checks: Sequence[str]) -> list[str]:
    """Return the answers of checks, or of formats."""
    if isinstance(result, FormatsResult):
        return [result.formats[check] for check in checks]
    return [getattr(result, check) for check in checks]


def failures(results: Sequence[Result], checks: Sequence[str]) -> list[str]:
    """Return one line for every check or format that is not `ok`, with its reason."""
    found = [(one.family, *pair) for one in results for pair in zip(checks, answers(one, checks), strict=True)]
    return [f"{family}, {check}: {answer}" for family, check, answer in found if answer not in (OK, NO_LAYOUT)]


def markdown_page(results: Sequence[FamilyResult], version: str, device: str = "cpu") -> str:
    """Write the results as a Markdown page; `version` is that of transformers."""
    checks = checks_on(device)
    counts = ", ".join(f"{sum(getattr(r, check) == OK for r in results)} {check}" for check in checks)
    title, where, command = "Model families", "the CPU", "spmoe families --markdown docs/families.md"
    if device != "cpu":
        title, where = "Model families on CUDA", device_facts(choose_device(device)).name
        command = f"spmoe families --device {device} --markdown docs/families-{device}.md"
    lines = [
        f"# {title}",
        "",
        f"Written by `{command}` with transformers {version}.",
        *_wrap(f"Results of {len(results)} MoE families with a causal language model: {counts}."),
        "",
        f"Each family was built as a tiny model with random weights and run in float32 on {where}.",
        "The checks are:",
        "",
        "- **loads**: the engine loads the checkpoint and writes its experts to the expert file.",
        *_wrap(
            f"- **plain**: greedy decoding gives the same {MAX_NEW_TOKENS} tokens as `generate` of transformers, with "
            "slots for top-k experts, for half of the experts and for all experts."
        ),
        *_wrap(
            f"- **speculation**: so does speculative decoding with {K} draft tokens per step, with a mostly wrong and "
            "a mostly right draft, with draft-gate prefetching and on demand, and with the same three budgets."
        ),
        *_wrap(
            "- **prediction**: the norm and router of every MoE layer were found. Called alone on the model's hidden "
            "states, they select exactly the experts that the model uses. *Partly* means: only for some layers. "
            "Experts of the other layers are loaded on demand."
        ),
    ]
    if "captured" in checks:
        lines.append("- **captured**: forwards of few rows are captured as CUDA graphs and replayed.")
    lines += ["", "[Adding a model](adding-a-model.md) explains what to do about a family that fails.", ""]
    return "\n".join([*lines, *_table(results, checks)]) + "\n"


def formats_page(results: Sequence[FormatsResult], version: str, device: str = "cpu") -> str:
    """Write the results of quantized formats as a Markdown page; `version` is that of transformers."""
    counts = ", ".join(f"{sum(r.formats[name] == OK for r in results)} {name}" for name in FORMATS)
    where, title = "the CPU", "Quantized formats by model family"
    command = "spmoe families --formats --markdown docs/families-formats.md"
    if device != "cpu":
        where, title = device_facts(choose_device(device)).name, f"{title}, on CUDA"
        command = f"spmoe families --formats --device {device} --markdown docs/families-formats-{device}.md"
    lines = [
        f"# {title}",
        "",
        f"Written by `{command}`",
        f"with transformers {version}.",
        *_wrap(f"Families that are exact in each format, of {len(results)}: {counts}."),
        "",
        *_wrap(
            "Each family was built as a tiny model with random weights, quantized and written as uploads in this "
            f"format are, and run in float32 on {where}. *ok* means: its experts stayed packed, and {MAX_NEW_TOKENS} "
            "greedy tokens equal those of transformers' `generate` with the dense model of the dequantized weights: "
            f"without speculation and with {K} draft tokens per step (a mostly wrong and a mostly right draft), with "
            "all experts in slots and with 30% of them. A family that cannot speculate is only run without."
        ),
        "",
        *_wrap("- **fp8**: blocks of 128 x 128, as DeepSeek-V3 and Qwen3 are published."),
        *_wrap("- **int8**, **int4**, **mxfp4**: compressed-tensors, per channel and in groups of 32."),
        *_wrap("- **gptq**, **awq**: 4 bits with zero points, in groups of 32. **nvfp4**: ModelOpt."),
        *_wrap(f"- **{NO_LAYOUT}**: no such layout. Experts that are stored transposed (gpt-oss) come in mxfp4 only."),
        "",
    ]
    return "\n".join([*lines, *_table(results, tuple(FORMATS))]) + "\n"


def _table(results: Sequence[Result], checks: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table, and the reasons of failures."""
    lines = [f"| family | {' | '.join(checks)} |", f"| --- |{' --- |' * len(checks)}"]
    lines += [f"| {one.family} | {' | '.join(short(answer) for answer in answers(one, checks))} |" for one in results]
    if reasons := failures(results, checks):
        lines += ["", "Reasons:", "", *(part for line in reasons for part in _wrap(f"- {line}"))]
    return lines


def _wrap(text: str) -> list[str]:
    """Wrap a paragraph or list item at 100 columns."""
    indent = "  " if text.startswith("- ") else ""
    return wrap(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
