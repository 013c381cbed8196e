"""`spmoe bench`: what configurations cost, on the same prompts in turns, and how near that is to the machine's best."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from spmoe.cli.options import ctrl_c_stops, read_text_file, stderr
from spmoe.config import EngineConfig, Size
from spmoe.errors import SpmoeError, UsageError

if TYPE_CHECKING:
    from spmoe.bench.runs import Bench, Job

T = TypeVar("T")


def bench(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Directory or hub id of an MoE model; default: the pair that ships."),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft with the same tokenizer.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="CUDA: widen the pair to the sizes of this architecture, as mixtral-8x7b.")
    ] = None,
    expert_memory: Annotated[
        str, typer.Option(help="Memory for experts: sizes (6GiB) or shares (25%), with commas between them.")
    ] = "25%",
    prefetch: Annotated[
        str, typer.Option(help="Prefetch policies, with commas; see spmoe run.")
    ] = "draft-gate,on-demand",
    num_speculative_tokens: Annotated[
        str, typer.Option("--num-speculative-tokens", "-k", help="Tokens drafted per step, with commas; 0: on demand.")
    ] = "0,4",
    output_len: Annotated[int, typer.Option(min=2, help="Tokens to generate in each run.")] = 100,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines (prompt, question or turns) or paragraphs of text; default: a sample."),
    ] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Take no more prompts than this.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Times that each prompt is run.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Runs of each configuration, before, that do not count.")] = 1,
    cutoff: Annotated[str, typer.Option(help="Layers that may be prefetched for: auto, none, or a number.")] = "auto",
    eviction: Annotated[str, typer.Option(help="What leaves full slots: draft-informed or lru.")] = "draft-informed",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto (as the checkpoint is).")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    link_gbps: Annotated[
        float | None, typer.Option(help="Emulate a slower link to the experts, in gigabytes per second.")
    ] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="CUDA: no recorded graphs.")] = False,
    resident_step_ms: Annotated[
        str | None,
        typer.Option(help="Milliseconds of a step with every expert in a slot, by K (0=12,4=30), if known already."),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write JSON lines to this file; '-': standard output.")
    ] = None,
) -> None:
    """Measure configurations against each other: every combination of memory, policy and draft length.

    Greedy, to a fixed length, prompt by prompt in turns. Ctrl-C shows what there is so far.
    """
    options: dict[str, Any] = {
        "model": model,
        "draft": draft,
        "shape": shape,
        "cutoff": cutoff,
        "eviction": eviction,
        "dtype": dtype,
        "device": device,
        "link_gbps": link_gbps,
        "enforce_eager": enforce_eager,
        "progress": sys.stderr.isatty(),
    }
    lists = _Lists(
        _listed("--expert-memory", expert_memory, Size.parse),
        _listed("--prefetch", prefetch, str),
        _listed("--num-speculative-tokens", num_speculative_tokens, _whole),
    )
    _check(options, lists)
    given = dict(_listed("--resident-step-ms", resident_step_ms, _step_time)) if resident_step_ms is not None else {}
    text = read_text_file(prompts) if prompts is not None else None
    _require_writable(json_file)

    job = _job(options, lists, text, prompts, max_prompts, output_len, repeat, warmup, frozenset(given))
    _run(job, {k: ms / 1e3 for k, ms in given.items()}, json_file)


@dataclass(frozen=True)
class _Lists:
    """What configurations are combined from."""

    memories: list[Size]
    policies: list[str]
    draft_tokens: list[int]


def _listed(name: str, text: str, convert: Callable[[str], T]) -> list[T]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{name} takes values with commas between them, not {text!r}")
    try:
        return list(dict.fromkeys(convert(word) for word in words))
    except ValueError as error:
        raise UsageError(f"{name} cannot be {text!r}: {error}") from error


def _whole(word: str) -> int:
    if not word.isdecimal():
        raise ValueError(f"{word!r} is not a whole number")
    return int(word)


def _step_time(word: str) -> tuple[int, float]:
    k, _, milliseconds = word.partition("=")
    try:
        time = float(milliseconds)
    except ValueError:
        time = 0.0
    if not 0 < time < float("inf"):
        raise ValueError("write K=milliseconds, as 0=12.5,4=30")
    return _whole(k.strip()), time


def _check(options: dict[str, Any], lists: _Lists) -> None:
    """Refuse bad values before anything heavy is imported."""
    for policy in lists.policies:
        for k in lists.draft_tokens:
            config = EngineConfig.make(
                **{**options, "model": options["model"] or ""}, prefetch=policy, num_speculative_tokens=k
            )  # fmt: skip
    drafted = config.draft is not None or (options["model"] is None and options["draft"] is None)
    if any(lists.draft_tokens) and not drafted:
        raise UsageError("drafting tokens takes a draft; give one with --draft, or --num-speculative-tokens 0")


def _require_writable(file: str | None) -> None:
    if file is None or file == "-":
        return
    path = Path(file)
    there = path if path.exists() else path.parent
    if path.is_dir() or not there.exists() or not os.access(there, os.W_OK):
        raise UsageError(f"cannot write {path}; choose a file in a directory that exists and can be written")


def _job(
    options: dict[str, Any],
    lists: _Lists,
    text: str | None,
    path: Path | None,
    max_prompts: int | None,
    output_len: int,
    repeat: int,
    warmup: int,
    resident_known: frozenset[int],
) -> Job:
    """Everything that can be refused without loading a weight is refused here."""
    from spmoe.backends.devices import choose_device
    from spmoe.bench.runs import Job, parse_prompts, require_room, sample_prompts, settings_of
    from spmoe.engine.llm import with_default_pair
    from spmoe.engine.materials import wide_shape
    from spmoe.engine.plan import make_plan
    from spmoe.models.checkpoint import Checkpoint
    from spmoe.models.tokenizer import load_tokenizer

    options = with_default_pair(options)
    config = EngineConfig.make(**options, num_speculative_tokens=0)
    wide_shape(config, choose_device(config.device))
    texts = parse_prompts(text, path) if text is not None and path is not None else sample_prompts()
    tokenizer = load_tokenizer(Checkpoint.find(config.model).directory)
    if tokenizer is None:
        raise UsageError(f"{config.model} ships no tokenizer, so it cannot read prompts; add its tokenizer.json")
    encoded = [tokenizer(one)["input_ids"] for one in texts[:max_prompts]]
    for memory in lists.memories:
        if config.shape is None or memory.share is not None:  # a share is the same number of wide experts
            plan = make_plan(EngineConfig.make(**{**options, "expert_memory": memory}, num_speculative_tokens=0))
            if config.shape is None:
                require_room(encoded, output_len, plan.context)
    settings = settings_of(lists.memories, lists.policies, lists.draft_tokens)
    return Job(options, settings, encoded, output_len, repeat, warmup, resident_known)


def _run(job: Job, given: dict[int, float], json_file: str | None) -> None:
    from spmoe.bench.runs import Bench

    err = stderr()
    if job.engine["link_gbps"] is not None:
        err.print(f"note: emulated link of {job.engine['link_gbps']:g} GB/s; times are not this machine's own")
    running = Bench(job, lambda words: err.print(words, soft_wrap=True), ctrl_c_stops)
    interrupted = False
    try:
        running.run()
    except KeyboardInterrupt:
        interrupted = True
        err.print(f"interrupted after {len(running.runs)} runs")
    except BaseException:
        _show(running, given, json_file, interrupted=True)  # what took long is not lost
        raise
    parted = _show(running, given, json_file, interrupted)
    if interrupted:
        raise typer.Exit(130)
    if parted is not None:
        raise SpmoeError(f"tokens that must be the same are not: {parted}; please report this machine and its versions")


def _show(bench: Bench, given: dict[int, float], json_file: str | None, interrupted: bool) -> str | None:
    """Print and write what there is; where tokens differ that must not, if they do."""
    from spmoe.bench.figures import machine_record, records

    if not bench.runs:
        return None
    machine = {**machine_record(bench), "interrupted": interrupted}
    rows = records(bench, given)
    lines = "".join(json.dumps(record) + "\n" for record in (machine, *rows))
    if json_file == "-":
        sys.stdout.write(lines)
    else:
        _print(machine, rows)
        if json_file is not None:
            _write(Path(json_file), lines)
    return next((row["differs"] for row in rows if row["differs"]), None) if machine["dtype"] == "float32" else None


def _write(path: Path, lines: str) -> None:
    try:
        path.write_text(lines)
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror}); choose another file") from error


def _print(machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    table, console = _table(rows), Console(highlight=False, markup=False, emoji=False)
    wide = Console(width=10 * sum(map(len, _COLUMNS)))
    console.width = max(console.width, wide.measure(table).maximum)  # a row is one line, also where that is too long
    link = "emulated link" if machine["link_source"] == "emulated" else f"link ({machine['link_source']})"
    link_speed, memory_speed = machine["link_bytes_per_second"] / 1e9, machine["memory_bytes_per_second"] / 1e9
    console.print(
        f"{machine['device']}, {machine['dtype']}, {machine['shape'] or machine['model']}; {link} {link_speed:.3g} "
        f"GB/s, memory {memory_speed:.3g} GB/s; prompts: {machine['prompts']}, each {machine['repeat']} times, "
        f"{machine['output_len']} tokens",
        soft_wrap=True,
    )
    console.print(table)
    console.print(_LEGEND, style="dim", soft_wrap=True)
    steps = {row["num_speculative_tokens"]: row for row in rows}
    told = [
        f"{1e3 * row['all_resident_step_seconds']:.3g} ms at K={k} ({row['resident_source']}{_host(row)})"
        for k, row in sorted(steps.items())
    ]
    console.print(f"step with all experts in slots: {', '.join(told)}", style="dim", soft_wrap=True)
    target, draft = (1e3 * machine[f"{name}_read_seconds"] for name in ("active", "draft"))
    read = f"reading weights once: {target:.3g} ms those of one row, {draft:.3g} ms the draft's"
    console.print(read, style="dim", soft_wrap=True)


def _host(row: dict[str, Any]) -> str:
    seconds = row["host_seconds_per_layer"]
    return "" if seconds is None else f", of it {1e6 * seconds:.3g} us per layer outside of recorded forwards"


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(show(row) for show in _COLUMNS.values()))
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"


def _milliseconds_of(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: _milliseconds(row[key])


def _percent_of(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: _percent(row[key])


def _millions_of(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key] / 1e6:.1f}"


_LEGEND = (
    "TPOT, TTFT, step: ms per output token (median; 10th to 90th percentile), to the first token, per step, and of a "
    "step draft, verify and, within it, stall; acc: tokens per drafted step; hit: % of experts that were there; "
    "MB/tok: moved; useful: MB per step moved and used; GB/s: moved, over the time; used, late, waste: % of what was "
    "prefetched; same: % of prompts with the first row's tokens; eff: max(useful / link, step with all experts in "
    "slots) / step, in %"
)
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "memory": lambda row: str(row["expert_memory"]),
    "prefetch": lambda row: str(row["prefetch"]),
    "K": lambda row: str(row["num_speculative_tokens"]),
    "TPOT": lambda row: _milliseconds(row["tpot_seconds"]["median"]),
    "10-90%": lambda row: "-".join(_milliseconds(row["tpot_seconds"][key]) for key in ("p10", "p90")),
    "TTFT": lambda row: _milliseconds(row["ttft_seconds"]["median"]),
    "tok/s": lambda row: f"{row['tokens_per_second']:.1f}",
    "acc": lambda row: "-" if row["mean_acceptance_length"] is None else f"{row['mean_acceptance_length']:.2f}",
    "steps": lambda row: str(row["steps"]),
    "step": _milliseconds_of("step_seconds"),
    "draft": _milliseconds_of("draft_seconds_per_step"),
    "verify": _milliseconds_of("verify_seconds_per_step"),
    "stall": _milliseconds_of("stall_seconds_per_step"),
    "hit": _percent_of("hit_rate"),
    "MB/tok": _millions_of("bytes_moved_per_token"),
    "useful": _millions_of("useful_bytes_per_step"),
    "GB/s": lambda row: f"{row['link_bytes_per_second'] / 1e9:.3g}",
    "used": _percent_of("prefetch_used_share"),
    "late": _percent_of("prefetch_late_share"),
    "waste": _percent_of("prefetch_wasted_share"),
    "same": _percent_of("identical_share"),
    "eff": _percent_of("pipeline_efficiency"),
}
