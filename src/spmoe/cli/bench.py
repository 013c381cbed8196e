"""`spmoe bench`: what configurations cost, on the same prompts in turns, and how near that is to the machine's best."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from spmoe.cli.listed import listed, whole, whole_or_auto
from spmoe.cli.options import ctrl_c_stops, require_writable, stderr
from spmoe.config import BUILTIN_DRAFTS
from spmoe.errors import SpmoeError, UsageError
from spmoe.files import model_directory, write_text

if TYPE_CHECKING:
    from spmoe.bench.results import Group
    from spmoe.bench.runs import Bench, Job
    from spmoe.config import DraftTokens

T = TypeVar("T")
_K = "--num-speculative-tokens"
_KEEP_SECONDS = 20.0  # between two writings of what there is


def bench(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Directory or hub id of an MoE model; default: the pair that ships."),
    ] = None,
    scenario: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What to compare, as TOML; the options below win over it.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft with the same tokenizer; see spmoe run.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="CUDA: widen the pair to the sizes of this architecture, as mixtral-8x7b.")
    ] = None,
    expert_memory: Annotated[
        str | None, typer.Option(help="Memory for experts: sizes (6GiB) or shares, with commas; default 25%.")
    ] = None,
    prefetch: Annotated[
        str | None, typer.Option(help="Prefetch policies, with commas; default draft-gate,on-demand.")
    ] = None,
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option(
            "--num-speculative-tokens", "-k", help="Tokens drafted per step, with commas, and auto; default 0,4."
        ),
    ] = None,
    output_len: Annotated[int | None, typer.Option(min=2, help="Tokens of each run; default 100.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="JSON lines or paragraphs of text; humaneval, gsm8k or mt-bench of the hub; default: sample."
        ),
    ] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Take no more prompts than this.")] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Times that each prompt is run; default 3.")] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Runs of each configuration, before, that do not count; default 1.")
    ] = None,
    cutoff: Annotated[
        str | None, typer.Option(help="Layers to prefetch for, with commas: auto, just-in-time, none, numbers, every.")
    ] = None,
    eviction: Annotated[str | None, typer.Option(help="What leaves full slots, with commas; see spmoe run.")] = None,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Also measure what each part is worth, by switching it off.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto (as it is stored).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
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
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the results that the file of --json holds.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page of plots and tables (HTML) to this file.")
    ] = None,
) -> None:
    """Measure configurations against each other: every combination of memory, policy and draft length.

    Greedy, to a fixed length, prompt by prompt in turns. Ctrl-C keeps what there is; --resume goes on with it.
    """
    from spmoe.bench.scenario import SHIPPED, Scenario, convert, read_scenario

    for name in (model, draft):
        if name and name not in (SHIPPED, "none", *BUILTIN_DRAFTS):
            model_directory(name)  # says why it can be none, before anything heavy is imported
    options: dict[str, tuple[str, Any]] = {
        "models": ("MODEL", model),
        "drafts": ("--draft", draft),
        "shapes": ("--shape", shape),
        "budgets": ("--expert-memory", _listed("--expert-memory", expert_memory, str)),
        "policies": ("--prefetch", _listed("--prefetch", prefetch, str)),
        "evictions": ("--eviction", _listed("--eviction", eviction, str)),
        "draft_tokens": (_K, _listed(_K, num_speculative_tokens, whole_or_auto)),
        "cutoffs": ("--cutoff", _listed("--cutoff", cutoff, str)),
        "prompts": ("--prompts", prompts),
        "max_prompts": ("--max-prompts", max_prompts),
        "output_len": ("--output-len", output_len),
        "repeat": ("--repeat", repeat),
        "warmup": ("--warmup", warmup),
        "ablation": ("--ablation", ablation or None),
        "dtype": ("--dtype", dtype),
        "device": ("--device", device),
        "links": ("--link-gbps", link_gbps),
        "enforce_eager": ("--enforce-eager", enforce_eager or None),
    }
    given = {key: value for key, (_, value) in options.items() if value is not None}
    for key, value in given.items():
        convert(key, value, options[key][0])
    read = Scenario("", "", "options", ({},)) if scenario is None else read_scenario(scenario)
    matrices = read.matrices(given)
    resident = dict(_listed("--resident-step-ms", resident_step_ms, _step_time) or [])
    if resume and json_file in (None, "-"):
        raise UsageError("--resume takes the file that results are in; name it with --json")
    require_writable(json_file, report)

    from spmoe.bench.jobs import cases_of, make_job

    labels = {
        "scenario": read.name or None,
        "scenario_text": read.text or None,
        "command": shlex.join(["spmoe", *sys.argv[1:]]),
    }
    by_k: dict[DraftTokens, float] = {k: ms / 1e3 for k, ms in resident.items()}
    progress = sys.stderr.isatty()
    jobs = [make_job(case, progress, by_k, labels) for matrix in matrices for case in cases_of(matrix)]
    _Benchmark(jobs, json_file, resume, report).run()


def _listed(name: str, text: str | None, convert: Callable[[str], T]) -> list[T] | None:
    return None if text is None else listed(name, text, convert)


def _step_time(word: str) -> tuple[int, float]:
    k, _, milliseconds = word.partition("=")
    try:
        time = float(milliseconds)
    except ValueError:
        time = 0.0
    if not 0 < time < float("inf"):
        raise ValueError("write K=milliseconds, as 0=12.5,4=30")
    return whole(k.strip()), time


class _Benchmark:
    """Jobs one after the other, and what becomes of their results."""

    def __init__(self, jobs: list[Job], json_file: str | None, resume: bool, report: Path | None) -> None:
        from spmoe.bench.results import read_results

        self._jobs = jobs
        self._file = Path(json_file) if json_file not in (None, "-") else None
        self._to_stdout = json_file == "-"
        self._report = report
        exists = self._file is not None and self._file.exists()
        self._before: list[Group] = read_results(self._file) if resume and exists and self._file else []
        self._done: list[Group] = []
        self._written = time.monotonic()
        self._err = stderr()

    def run(self) -> None:
        """Run everything; whatever happens, what there is is shown and written."""
        parted: str | None = None
        try:
            for number, job in enumerate(self._jobs):
                if len(self._jobs) > 1:
                    self._tell(f"case {number + 1} of {len(self._jobs)}: {_name(job)}")
                found = self._run_job(job)
                parted = parted or found
        finally:
            self._finish()
        if parted is not None:
            raise SpmoeError(
                f"tokens that must be the same are not: {parted}; please report this machine and its versions"
            )

    def _run_job(self, job: Job) -> str | None:
        """Run one; where tokens differ that must not, if they do."""
        from spmoe.bench.resume import find_stored
        from spmoe.bench.runs import Bench
        from spmoe.engine.llm import threads_for

        if (link := job.engine["link_gbps"]) is not None:
            self._tell(f"note: emulated link of {link:g} GB/s; times are not this machine's own")
        stored = None
        if (found := find_stored(job, self._before)) is not None:
            number, stored = found
            del self._before[number]
            self._tell(f"{len(stored.runs)} of {job.total} runs are there already")
        running = Bench(job, self._tell, ctrl_c_stops, stored, lambda: self._keep(running))
        interrupted = False
        try:
            with threads_for(job.engine["model"], job.engine["shape"]):
                running.run()
        except KeyboardInterrupt:
            interrupted = True
            self._tell(f"interrupted after {len(running.runs)} runs")
        except BaseException:
            self._take(running, interrupted=True)  # what took long is not lost
            raise
        parted = self._take(running, interrupted)
        if interrupted:
            raise typer.Exit(130)
        return parted

    def _take(self, running: Bench, interrupted: bool) -> str | None:
        """Keep and show a job's results; where tokens differ that must not, if they do."""
        if (group := _group(running, interrupted)) is None:
            return None
        self._done.append(group)
        if not self._to_stdout:
            from spmoe.cli.bench_table import print_table

            print_table(group.machine, group.rows, legend=len(self._done) == 1)
        differs = next((row["differs"] for row in group.rows if row["differs"]), None)
        return differs if group.machine["dtype"] == "float32" else None

    def _keep(self, running: Bench) -> None:
        """Write what there is now and then, for the case that this ends in a way that leaves no time to."""
        if self._file is None or time.monotonic() - self._written < _KEEP_SECONDS:
            return
        group = _group(running, interrupted=True)
        self._write([*self._done, *([group] if group is not None else [])])

    def _write(self, groups: list[Group]) -> None:
        from spmoe.bench.results import write_results

        if self._file is not None:
            write_results(self._file, [*groups, *self._before])
        self._written = time.monotonic()

    def _finish(self) -> None:
        if not self._done:
            return
        if self._to_stdout:
            sys.stdout.write("".join(group.lines() for group in self._done))
        self._write(self._done)
        if self._report is not None:
            from spmoe.bench.report import html_report

            write_text(self._report, html_report([*self._done, *self._before]))
            self._tell(f"report: {self._report}")

    def _tell(self, words: str) -> None:
        self._err.print(words, soft_wrap=True)


def _name(job: Job) -> str:
    from spmoe.bench.figures import case_of
    from spmoe.bench.labels import model_name

    case, link = case_of(job), job.engine["link_gbps"]
    words = [case["matrix"], model_name(case), f"prompts: {case['prompt_set']}"]
    return ", ".join([word for word in words if word] + ([f"{link:g} GB/s"] if link is not None else []))


def _group(running: Bench, interrupted: bool) -> Group | None:
    from spmoe.bench.figures import machine_record, records
    from spmoe.bench.results import Group

    if not (rows := records(running)):
        return None
    others = running.stored.others if running.stored is not None else []
    return Group({**machine_record(running), "interrupted": interrupted}, [*rows, *others])
