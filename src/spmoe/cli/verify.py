"""`spmoe verify`: compare greedy tokens of this engine with transformers on a checkpoint."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from spmoe.cli.interrupts import import_engine
from spmoe.cli.listed import parse_list, parse_whole
from spmoe.cli.options import (
    Json,
    ctrl_c_stops,
    load,
    read_text,
    read_text_file,
    stderr,
    takes_shared_options_except,
)
from spmoe.cli.output import Console, is_quiet
from spmoe.cli.output import note as print_note
from spmoe.config import (
    DraftTokens,
    format_bytes,
    parse_eviction_policy,
    parse_num_speculative_tokens,
    parse_prefetch_policy,
)
from spmoe.errors import UsageError, suggestion
from spmoe.observe.progress import progress_bar

if TYPE_CHECKING:
    import torch

    from spmoe.bench.verification import ConfigResult, ConversionCost, Verification, VerifyConfig
    from spmoe.formats.expert import ExpertFormat
    from spmoe.models.checkpoint import Checkpoint
    from spmoe.models.reference import Reference, ReferencePlan

_METHODS = ("auto", "generate", "forward", "layers")
_ADVICE = {
    "near-tie": "near-ties are within rounding: at most {steps} steps of {dtype}; --dtype float32 decides them",
    "different": "the difference is more than rounding: at most {steps} steps of {dtype}; if it remains with --dtype "
    "float32, report it",
}


@takes_shared_options_except("generation_config", "load_format")  # greedy decoding of real weights only
def verify(
    engine: dict[str, Any],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text to complete; may be given several times; '-' reads standard input."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="File of prompts: JSON lines or paragraphs; see spmoe bench --prompts."),
    ] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Use at most this many prompts of the file.")] = None,
    prompt_token_ids: Annotated[
        list[str] | None,
        typer.Option(metavar="IDS", help="Prompt as token ids separated by commas; may be given several times."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate and compare per prompt.")] = 32,
    prefetch: Annotated[
        str, typer.Option(help="Prefetch policies, separated by commas; see spmoe run.")
    ] = "draft-gate,on-demand",
    num_speculative_tokens: Annotated[
        str,
        typer.Option(
            "--num-speculative-tokens", "-k", help="Draft tokens per step: numbers or auto, separated by commas."
        ),
    ] = "0,4",
    eviction: Annotated[str, typer.Option(help="Eviction policies, separated by commas; see spmoe run.")] = "auto",
    every: Annotated[
        bool, typer.Option("--all", help="Also every other prefetch policy and eviction policy, K = 1 and K = auto.")
    ] = False,
    reference: Annotated[
        str,
        typer.Option(
            help="How transformers runs: generate, forward (one pass over prompt and output), layers (the same with "
            "one layer in memory at a time), or auto (generate if the model fits in memory, else layers)."
        ),
    ] = "auto",
    cost: Annotated[
        bool,
        typer.Option(
            "--cost", help="With a lossy --expert-format: measure greedy agreement and KL divergence from the original."
        ),
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="Text file for --cost. Default: Python source that ships with spmoe.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="With --cost: number of windows of the text.")] = 4,
    window: Annotated[int, typer.Option(min=16, help="With --cost: tokens per window.")] = 256,
    as_json: Json = False,
) -> None:
    """Compare greedy tokens of this engine with transformers on the same checkpoint, under several configurations.

    Without prompts, a few built-in ones are used. The exit code is 0 if all tokens are equal or near-ties, 1 if not.
    With a lossy --expert-format, transformers runs the dequantized weights. Ctrl-C compares the tokens generated so
    far.
    """
    if text is not None and not cost:
        raise UsageError("--text is the text that --cost measures on; add --cost")
    words = read_text_file(text) if text is not None else None
    prefetches = parse_list("--prefetch", prefetch, parse_prefetch_policy)
    draft_tokens: list[DraftTokens] = parse_list("-k", num_speculative_tokens, parse_num_speculative_tokens)
    evictions = parse_list("--eviction", eviction, parse_eviction_policy)
    if reference not in _METHODS:
        raise UsageError(
            f"--reference must be one of {', '.join(_METHODS)}, not {reference!r}{suggestion(reference, _METHODS)}"
        )
    token_ids = [parse_ids(text) for text in prompt_token_ids or ()]
    texts = _read_prompts(prompt or (), prompts, max_prompts)

    import_engine()
    from spmoe.backends.devices import choose_device
    from spmoe.bench.verification import every_config, make_configs
    from spmoe.models.checkpoint import Checkpoint
    from spmoe.models.reference import plan_reference
    from spmoe.models.shipped import shipped_pair

    configs = make_configs(prefetches, draft_tokens, evictions)
    if every:
        configs = list(dict.fromkeys(configs + every_config(prefetches[0], draft_tokens, evictions[0])))
    checkpoint = Checkpoint.find(engine["model"] or shipped_pair()[0])  # the engine reads its own, and changes it
    # before the engine takes memory: it is closed when transformers runs
    plan = plan_reference(checkpoint, checkpoint.dtype(engine["dtype"]), choose_device(engine["device"]), reference)
    for note in plan.notes:
        print_note(note)
    generated = _generate(
        engine, configs, texts, token_ids, max_tokens, _Text(words, window, windows) if cost else None
    )
    verification = generated.verification
    if verification.outputs:
        if verification.interrupted:
            _notify("Interrupted: comparing the tokens so far; Ctrl-C again ends at once")
        with _keep_results(verification):
            _compare(generated, checkpoint, plan)
    _print_results(generated, plan, as_json)
    if verification.interrupted:
        raise typer.Exit(130)
    if verification.verdict not in ("equal", "near-tie"):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Text:
    """Text to measure the cost of a conversion on; None: the one that ships."""

    text: str | None
    window: int  # tokens
    count: int  # of windows


@dataclass
class _Generated:
    """Outputs of an engine that is closed, and what the reference needs to know of it."""

    verification: Verification
    model: str
    device: torch.device
    tokenizer: Any
    threads: int
    format: ExpertFormat
    lossless: bool
    windows: list[list[int]] = field(default_factory=list)  # tokens of the text for the cost of a conversion
    cost: ConversionCost | None = None


def parse_ids(text: str) -> list[int]:
    """Parse token ids that are separated by commas or spaces."""
    words = text.replace(",", " ").split()
    try:
        return [parse_whole(word) for word in words]
    except ValueError as error:
        raise UsageError(f"--prompt-token-ids takes whole numbers separated by commas, not {text!r}") from error


def _read_prompts(prompt: Sequence[str], prompts: str | None, max_prompts: int | None) -> list[str]:
    texts = [read_text(text) for text in prompt]
    if prompts is not None:
        from spmoe.bench.prompts import find_prompts

        texts += find_prompts(prompts).first(max_prompts).prompts
    elif max_prompts is not None:
        raise UsageError("--max-prompts limits the prompts of a file; name it with --prompts")
    return texts


def _generate(
    engine: dict[str, Any],
    configs: list[VerifyConfig],
    texts: list[str],
    token_ids: list[list[int]],
    max_tokens: int,
    text: _Text | None,
) -> _Generated:
    """Build the engine, generate under every configuration, and close it, so that the reference has its memory."""
    import torch

    from spmoe.backends.devices import empty_device_cache
    from spmoe.bench.predictability import read_windows
    from spmoe.bench.verification import Verification, encode_prompts, largest_draft, without_drafts
    from spmoe.models.shipped import sample_text

    k = largest_draft(configs)
    options = {**engine, **configs[0].engine_options, "num_speculative_tokens": k}
    with load(options, progress=True) as llm:
        parts, shown = llm.engine.parts, list(llm.notices)
        if k and not parts.drafter.proposes:
            configs = without_drafts(configs)
            print_note(f"the engine drafts nothing with this model and draft: K = 0 is verified, not K = {k}")
        prompts = encode_prompts(llm.engine, texts, token_ids, max_tokens)
        verification = Verification(prompts, configs, max_tokens, parts.models.dtype)
        with _keep_results(verification), progress_bar("Generating", not is_quiet()) as report:
            verification.generate(llm, report, ctrl_c_stops)
        for notice in llm.notices:
            if notice not in shown:
                print_note(notice)
        found = _Generated(
            verification,
            llm.engine.config.model,
            llm.engine.device,
            parts.tokenizer,
            torch.get_num_threads(),
            parts.models.expert_format,
            parts.models.lossless,
        )
        if text is not None and not parts.models.lossless:
            found.windows = read_windows(llm.engine, text.text or sample_text(), text.window, text.count)
        elif text is not None:
            print_note("--cost has nothing to measure: experts are not converted, or without loss")
    del llm, parts
    gc.collect()  # a closed engine keeps its weights and captured graphs until it is collected
    empty_device_cache(found.device)
    return found


def _compare(generated: _Generated, checkpoint: Checkpoint, plan: ReferencePlan) -> None:
    """Load the reference and compare, with as many threads as the engine ran with."""
    import torch

    from spmoe.bench.verification import conversion_cost

    verification = generated.verification
    loaded = plan.weight_bytes if plan.whole else plan.layer_bytes
    _notify(f"Loading transformers' own model, {format_bytes(loaded)}{'' if plan.whole else ' at a time'}")
    format = None if generated.lossless else generated.format
    before, converted = torch.get_num_threads(), list[torch.Tensor]()
    torch.set_num_threads(generated.threads)
    try:
        with _reference(checkpoint, verification, plan, format) as reference:
            verification.compare(reference, plan.method, _notify)
            if generated.windows:
                _notify(f"Measuring the conversion on {len(generated.windows)} windows of text")
                converted = list(reference.logits(generated.windows))
        if converted:
            with _reference(checkpoint, verification, plan, None) as reference:
                original = reference.logits(generated.windows)
                generated.cost = conversion_cost(generated.windows, original, converted)
    finally:
        torch.set_num_threads(before)


@contextmanager
def _reference(
    checkpoint: Checkpoint, verification: Verification, plan: ReferencePlan, format: ExpertFormat | None
) -> Iterator[Reference]:
    """Load the reference; layers that it runs one at a time are shown as progress."""
    from spmoe.models.reference import Reference

    with (
        progress_bar("Layers in transformers", not is_quiet()) as report,
        Reference(
            checkpoint, verification.dtype, plan, lambda done, total: report(done, total, ""), format
        ) as reference,
    ):
        yield reference


@contextmanager
def _keep_results(verification: Verification) -> Iterator[None]:
    """End the work inside on Ctrl-C, without losing its results so far."""
    try:
        yield
    except KeyboardInterrupt:
        verification.interrupted = True


def _print_results(generated: _Generated, plan: ReferencePlan, as_json: bool) -> None:
    from spmoe.bench.verification import NEAR_TIE_STEPS, to_dict
    from spmoe.formats.layout import dtype_name
    from spmoe.models.families import transformers_version
    from spmoe.models.reference import EXPERTS
    from spmoe.models.shipped import shipped_pair

    verification = generated.verification
    if as_json:
        about = {
            "transformers": transformers_version,
            "method": plan.method,
            "device": plan.device.type,
            "experts": EXPERTS,
            "weight_bytes": plan.weight_bytes,
            "notes": list(plan.notes),
        }
        found = {
            "model": generated.model,
            "device": generated.device.type,
            "expert_format": generated.format.weight.label,
            "lossless": generated.lossless,
            "conversion": None if generated.cost is None else asdict(generated.cost),
            "reference": about,
        }
        print(json.dumps(found | to_dict(verification, generated.tokenizer)))
        return
    for note in verification.notes:
        print_note(note)
    dtype = dtype_name(verification.dtype)
    name = "the included pair" if generated.model == shipped_pair()[0] else generated.model
    console = Console(highlight=False, markup=False, emoji=False)
    console.print_whole(_table(verification.results))
    for line in _divergences(verification, generated.tokenizer):
        console.print(line, soft_wrap=True)
    console.print(
        f"{verification.verdict}{' so far, interrupted' * verification.interrupted}: {name} in {dtype} on "
        f"{generated.device.type}, against transformers {transformers_version} ({plan.method}, on {plan.device.type})",
        soft_wrap=True,
    )
    if not generated.lossless:
        console.print(
            f"lossless: no; transformers ran the weights that {generated.format.weight.label} holds, dequantized",
            soft_wrap=True,
        )
    if (cost := generated.cost) is not None:
        console.print(
            f"against the original weights, on {cost.tokens} tokens of text: greedy agreement "
            f"{100 * cost.greedy_agreement:.2f}%, KL divergence {cost.kl_divergence:.3g} nats per token (99th "
            f"percentile {cost.kl_divergence_p99:.3g}), perplexity {cost.perplexity:.4g} instead of "
            f"{cost.original_perplexity:.4g}",
            soft_wrap=True,
        )
    if (advice := _ADVICE.get(verification.verdict)) is not None:
        console.print(advice.format(steps=NEAR_TIE_STEPS, dtype=dtype), soft_wrap=True)


def _table(results: Sequence[ConfigResult]) -> Table:
    from spmoe.bench.verification import DIFFERENT

    table = Table(box=None, pad_edge=False)
    with_eviction = any(result.config.eviction != "auto" for result in results)
    headings = ["prefetch", "K", *(["eviction"] * with_eviction), "tokens", "drafted", "accepted", "verdict"]
    for heading in (*headings, "first divergence"):
        right = heading in ("K", "tokens", "drafted", "accepted")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for result in results:
        config = result.config
        runs = "" if result.policy in (None, config.prefetch) else f" (runs {result.policy})"
        table.add_row(
            config.prefetch + runs,
            str(config.draft_tokens),
            *([config.eviction] * with_eviction),
            str(result.compared),
            *((str(result.drafted), str(result.accepted)) if config.draft_tokens else ("-", "-")),
            result.verdict.upper() if result.verdict == DIFFERENT else result.verdict,
            "" if (found := result.divergence) is None else f"prompt {found[0] + 1}, token {found[1].position + 1}",
        )
    return table


def _divergences(verification: Verification, tokenizer: Any) -> list[str]:
    """Describe each divergence of the table once: both tokens, and the reference's margin between them."""
    from spmoe.bench.verification import token_text
    from spmoe.formats.layout import dtype_name

    lines = []
    for prompt, one in (result.divergence for result in verification.results if result.divergence is not None):
        ours, theirs = (
            str(token) if (text := token_text(tokenizer, token)) is None else f"{text!r} ({token})"
            for token in (one.ours, one.theirs)
        )
        lines.append(
            f"prompt {prompt + 1}, token {one.position + 1}: {ours} here, {theirs} in transformers; logit margin "
            f"{one.margin:.3g} ({one.steps:.3g} steps of {dtype_name(verification.dtype)})"
        )
    return list(dict.fromkeys(lines))


def _notify(text: str) -> None:
    stderr().print(text, soft_wrap=True)
