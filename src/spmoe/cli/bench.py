"""`spmoe bench`: measure configurations against each other and against the machine's best."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from spmoe.cli.interrupts import import_engine
from spmoe.cli.listed import parse_draft_tokens, parse_list, parse_whole
from spmoe.cli.options import EMULATED_LINK_NOTE, ctrl_c_stops, require_writable
from spmoe.cli.output import is_quiet, stderr
from spmoe.cli.panels import completion
from spmoe.config import drafter_name
from spmoe.errors import SpmoeError, UsageError
from spmoe.files import config_directory, model_directory, write_text

if TYPE_CHECKING:
    from spmoe.bench.results import WorkloadResults
    from spmoe.bench.runs import BenchJob, BenchRunner
    from spmoe.config import DraftTokens

T = TypeVar("T")
_K = "--num-speculative-tokens"
_SAVE_SECONDS = 20.0  # at most one write of the result file in this time


def bench(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Directory or hub id of an MoE model; default: the shipped pair."),
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(
            help="What to compare: a TOML file, or the name of a scenario that ships, such as quick. Options override "
            "it.",
            autocompletion=completion(lambda: packaged_scenarios()),
        ),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft with the same tokenizer; see spmoe run.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="CUDA: widen the pair to the sizes of this architecture, such as mixtral-8x7b.")
    ] = None,
    expert_memory: Annotated[
        str | None, typer.Option(help="Memory for experts: sizes (6GiB) or shares, separated by commas; default 25%.")
    ] = None,
    prefetch: Annotated[
        str | None, typer.Option(help="Prefetch policies, separated by commas; default draft-gate,on-demand.")
    ] = None,
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="Draft tokens per step: numbers or auto, with commas; default 0,4, or 0 with --draft none.",
        ),
    ] = None,
    output_len: Annotated[int | None, typer.Option(min=2, help="Output tokens per run; default 100.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="File of JSON lines or paragraphs; or humaneval, gsm8k, mt-bench (from the hub); default: sample."
        ),
    ] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Use at most this many prompts.")] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Runs of each prompt per configuration; default 3.")] = None,
    warmup: Annotated[int | None, typer.Option(min=0, help="Warm-up runs per configuration; default 1.")] = None,
    cutoff: Annotated[
        str | None,
        typer.Option(help="Layers to prefetch for, with commas: auto, just-in-time, all, numbers, or every."),
    ] = None,
    eviction: Annotated[str | None, typer.Option(help="Eviction policies, separated by commas; see spmoe run.")] = None,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Also run with each part (prefetch, cutoff, ...) switched off.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto (as stored).")] = None,
    expert_format: Annotated[
        str | None, typer.Option(help="Formats to convert experts to, separated by commas; see spmoe run.")
    ] = None,
    cpu_experts: Annotated[
        str | None, typer.Option(help="CUDA: off, auto or numbers of threads, separated by commas; see spmoe run.")
    ] = None,
    residency_check: Annotated[
        str | None,
        typer.Option(help="CUDA: auto, host or device, or several of them, separated by commas; see spmoe run."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
    link_gbps: Annotated[
        float | None, typer.Option(help="Emulate a slower link to the experts, in gigabytes per second.")
    ] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="CUDA: do not use CUDA graphs.")] = False,
    load_format: Annotated[
        str | None, typer.Option(help="auto, or dummy: random weights for a config.json; see spmoe run.")
    ] = None,
    resident_step_ms: Annotated[
        str | None,
        typer.Option(help="Known duration of a step with all experts in slots, in ms by K, such as 0=12,4=30."),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write JSON lines to this file; '-': standard output.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the runs in the --json file and make only the missing ones.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page of charts and tables to this file.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Print every column of the table.")] = False,
) -> None:
    """Measure every combination of memory, policies and number of draft tokens.

    Greedy decoding to a fixed length; configurations take turns on each prompt. Ctrl-C keeps the results so far;
    --resume continues.
    """
    from spmoe.bench.scenario import SHIPPED, Scenario, read_scenario, validate

    for name in (model, draft):
        if name and name != SHIPPED and drafter_name(name)[0] == "model":
            (config_directory if load_format == "dummy" else model_directory)(name)  # fails before torch is imported
    options: dict[str, tuple[str, Any]] = {
        "models": ("MODEL", model),
        "drafts": ("--draft", draft),
        "shapes": ("--shape", shape),
        "expert_formats": ("--expert-format", _list("--expert-format", expert_format, str)),
        "cpu_experts": ("--cpu-experts", _list("--cpu-experts", cpu_experts, str)),
        "residency_checks": ("--residency-check", _list("--residency-check", residency_check, str)),
        "budgets": ("--expert-memory", _list("--expert-memory", expert_memory, str)),
        "policies": ("--prefetch", _list("--prefetch", prefetch, str)),
        "evictions": ("--eviction", _list("--eviction", eviction, str)),
        "draft_tokens": (_K, _list(_K, num_speculative_tokens, parse_draft_tokens)),
        "cutoffs": ("--cutoff", _list("--cutoff", cutoff, str)),
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
        "load_format": ("--load-format", load_format),
    }
    given = {key: value for key, (_, value) in options.items() if value is not None}
    overrides = validate(given, "options", options={key: option for key, (option, _) in options.items()})
    read = Scenario(None, None, ({},)) if scenario is None else read_scenario(find_scenario(scenario))
    matrices = read.matrices(overrides)
    resident_ms = dict(_list("--resident-step-ms", resident_step_ms, _parse_step_time) or [])
    if resume and json_file in (None, "-"):
        raise UsageError("--resume needs the file with earlier results; name it with --json")
    require_writable(json_file, report)
    if report is not None and json_file is not None and report.resolve() == Path(json_file).resolve():
        raise UsageError(f"--report would overwrite the results in {json_file}; name another file")
    if report is not None:
        from spmoe.bench.charts import require_report_extra

        require_report_extra()

    import_engine()
    from spmoe.bench.jobs import make_job, make_workloads

    labels = {"scenario": read.name, "scenario_text": read.text, "command": shlex.join(["spmoe", *sys.argv[1:]])}
    resident: dict[DraftTokens, float] = {k: ms / 1e3 for k, ms in resident_ms.items()}
    workloads = [workload for matrix in matrices for workload in make_workloads(matrix)]
    jobs = [make_job(workload, not is_quiet(), resident, labels) for workload in workloads]
    _BenchCommand(jobs, json_file, resume, report, wide).run()


def packaged_scenarios() -> dict[str, Path]:
    """Return the scenario files that ship with spmoe, by name."""
    folder = Path(str(files("spmoe") / "scenarios"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_scenario(name: str) -> Path:
    """Return the path of a scenario file, given as a path or by the name of one that ships."""
    path, packaged = Path(name), packaged_scenarios()
    if name in packaged and not path.is_file():
        return packaged[name]
    if path.exists() or path.suffix == ".toml" or len(path.parts) > 1:
        return path
    close = get_close_matches(name, packaged, 1)
    hint = f"did you mean {close[0]}?" if close else "give the path of a TOML file, or one of these"
    raise UsageError(f"there is no scenario {name!r}; {hint} (scenarios that ship: {', '.join(packaged) or 'none'})")


def _list(option: str, text: str | None, parse: Callable[[str], T]) -> list[T] | None:
    return None if text is None else parse_list(option, text, parse)


def _parse_step_time(word: str) -> tuple[int, float]:
    k, _, text = word.partition("=")
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < float("inf"):
        raise ValueError("write K=milliseconds, such as 0=12.5,4=30")
    return parse_whole(k.strip()), milliseconds


class _BenchCommand:
    """Runs jobs one after the other; shows and saves their results."""

    def __init__(
        self, jobs: list[BenchJob], json_file: str | None, resume: bool, report: Path | None, wide: bool
    ) -> None:
        from spmoe.bench.results import read_results

        self._jobs = jobs
        self._file = Path(json_file) if json_file not in (None, "-") else None
        self._to_stdout = json_file == "-"
        self._report = report
        self._wide = wide
        exists = self._file is not None and self._file.exists()
        self._earlier: list[WorkloadResults] = read_results(self._file) if resume and exists and self._file else []
        self._done: list[WorkloadResults] = []
        self._saved_at = time.monotonic()

    def run(self) -> None:
        """Run everything; results so far are shown and saved in any case."""
        difference: str | None = None
        try:
            for number, job in enumerate(self._jobs):
                if len(self._jobs) > 1:
                    self._notify(f"workload {number + 1} of {len(self._jobs)}: {_job_name(job)}")
                found = self._run_job(job)
                difference = difference or found
        finally:
            self._finish()
        if difference is not None:
            raise SpmoeError(f"float32 runs must generate the same tokens: {difference}; please report this as a bug")

    def _run_job(self, job: BenchJob) -> str | None:
        """Run one job; return a forbidden difference of tokens, if there is one."""
        from spmoe.bench.records import find_stored
        from spmoe.bench.runs import BenchRunner
        from spmoe.observe.progress import progress_bar

        if (link := job.engine["link_gbps"]) is not None:
            self._notify(f"note: {EMULATED_LINK_NOTE.format(link)}")
        stored = None
        if (found := find_stored(job, self._earlier)) is not None:
            number, stored = found
            del self._earlier[number]
            self._notify(f"{len(stored.runs)} of {job.total} runs are in the file already")
        interrupted = False
        with progress_bar("Runs", not is_quiet()) as report:
            runner = BenchRunner(
                job, self._notify, ctrl_c_stops, stored, lambda: self._save_now_and_then(runner), report
            )
            try:
                runner.run()
            except KeyboardInterrupt:
                interrupted = True
                self._notify(f"interrupted after {len(runner.runs)} run{'s' * (len(runner.runs) != 1)}")
            except BaseException:
                self._add_results(runner, interrupted=True)  # keep the runs that were made
                raise
        difference = self._add_results(runner, interrupted)
        if interrupted:
            raise typer.Exit(130)
        return difference

    def _add_results(self, runner: BenchRunner, interrupted: bool) -> str | None:
        """Keep and show the results of a job; return a forbidden difference of tokens, if there is one."""
        from spmoe.bench.records import make_results

        if (results := make_results(runner, interrupted)) is None:
            return None
        self._done.append(results)
        if not self._to_stdout:
            from spmoe.cli.bench_table import print_table

            print_table(results.machine, results.rows, legend=len(self._done) == 1, wide=self._wide)
        difference = next((row["difference"] for row in results.rows if row["difference"]), None)
        return difference if results.machine["dtype"] == "float32" else None

    def _save_now_and_then(self, runner: BenchRunner) -> None:
        """Save results while a job runs, in case that the process is killed."""
        from spmoe.bench.records import make_results

        if self._file is None or time.monotonic() - self._saved_at < _SAVE_SECONDS:
            return
        results = make_results(runner, interrupted=True)
        self._save([*self._done, *([results] if results is not None else [])])

    def _save(self, results: list[WorkloadResults]) -> None:
        from spmoe.bench.results import write_results

        if self._file is not None:
            write_results(self._file, [*results, *self._earlier])
        self._saved_at = time.monotonic()

    def _finish(self) -> None:
        if not self._done:
            return
        if self._to_stdout:
            sys.stdout.write("".join(one.to_lines() for one in self._done))
        self._save(self._done)
        if self._report is not None:
            from spmoe.bench.report import html_report

            write_text(self._report, html_report([*self._done, *self._earlier]))
            self._notify(f"report: {self._report}")

    def _notify(self, text: str) -> None:
        stderr().print(text, soft_wrap=True)


def _job_name(job: BenchJob) -> str:
    from spmoe.bench.labels import model_name
    from spmoe.bench.records import workload_record

    record, link = workload_record(job), job.engine["link_gbps"]
    parts = [record["matrix"], model_name(record), record["requested"].get("expert_format")]
    if (on_cpu := record["requested"].get("cpu_experts")) is not None:
        parts.append(f"experts on the CPU: {on_cpu}")
    if (check := record["requested"].get("residency_check")) is not None:
        parts.append(f"residency check: {check}")
    parts.append(f"prompts: {record['prompt_set']}")
    return ", ".join([part for part in parts if part] + ([f"{link:g} GB/s"] if link is not None else []))
