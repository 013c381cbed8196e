"""Options that several commands share, and helpers of every command: loading, prompts, output, Ctrl-C."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spmoe.cli.interrupts import import_engine
from spmoe.cli.output import is_quiet, note
from spmoe.cli.output import stderr as stderr  # commands import it from here
from spmoe.cli.panels import in_panel
from spmoe.config import DEFAULT_MAX_TOKENS, ONE_BY_ONE, SHIPPED_PAIR, EngineConfig, SamplingParams, drafter_name
from spmoe.errors import PromptError, UsageError, printable
from spmoe.files import config_directory, model_directory
from spmoe.files import read_text_file as read_text_file  # commands import it from here
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES

if TYPE_CHECKING:
    from spmoe.engine.llm import LLM, Generation

EMULATED_LINK_NOTE = "emulated link of {:g} GB/s: times are not those of this machine's own link"
_PREFETCH = (
    "auto (of draft-gate, next-gate and none what pays here, and of their prefetches those that pay), "
    f"{', '.join(name for name in PREFETCH_POLICIES.names() if name != 'auto')}, or several joined by +"
)
_EVICTION = ", ".join(EVICTION_POLICIES.names())


def _engine(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Directory or hub id of an MoE model; default: the small included pair."),
    ] = None,
    draft: Annotated[
        str,
        typer.Option(
            help="Draft: a model with the same tokenizer, 'ngram', 'self:int8', 'self:int4', 'none', or 'auto': the "
            "included draft for the included model, 'ngram' for any other."
        ),
    ] = "auto",
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="Draft tokens per step: a number from 0 (no drafting) to 64, or auto (as many as pay, measured while "
            "generating); default: auto, or 0 with --draft none.",
        ),
    ] = None,
    prefetch: Annotated[str, typer.Option(help=f"Prefetch policy: {_PREFETCH}.")] = "auto",
    cutoff: Annotated[
        str,
        typer.Option(
            help="MoE layers, counted from the first, to prefetch for while drafting: a number, all, just-in-time, or "
            "auto (from a measured profile)."
        ),
    ] = "auto",
    projection: Annotated[
        bool,
        typer.Option(
            "--projection/--no-projection",
            help="Use the projection that `spmoe fit-predictor` fitted for this pair, if there is one.",
        ),
    ] = True,
    eviction: Annotated[
        str, typer.Option(help=f"Eviction policy: {_EVICTION}, or auto (the one that suits the prefetch policy).")
    ] = "auto",
    expert_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for expert slots: a size (6GiB) or a share of all experts (25%); default: what "
            "--device-memory leaves on CUDA, 25% on the CPU."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Data type to run in: float32, bfloat16, float16 or auto (the checkpoint's).")
    ] = "auto",
    expert_format: Annotated[
        str,
        typer.Option(
            help="Format to convert experts to, such as bf16-packed (lossless) or int4-g128 (lossy); auto: the "
            "checkpoint's own."
        ),
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Longest sequence, prompt and output together, in tokens; default: the model's limit."),
    ] = None,
    link_gbps: Annotated[
        float | None, typer.Option(help="Emulate a slower link to the expert store, in gigabytes per second.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device: cpu (experts on disk), cuda (experts in host memory) or auto.")
    ] = "auto",
    device_memory: Annotated[
        str,
        typer.Option(
            help="CUDA: limit for weights, KV cache, workspace and expert slots together: a size, a share of the free "
            "memory, or auto (95% of it)."
        ),
    ] = "auto",
    pin_memory: Annotated[
        bool,
        typer.Option(
            "--pin-memory/--no-pin-memory", help="CUDA: keep experts in pinned host memory; copies are faster."
        ),
    ] = True,
    verify_experts: Annotated[
        str,
        typer.Option(
            help="CPU: compare experts read from disk with their checksums: once (when first read), sample (also at "
            "one of 16 later reads) or always."
        ),
    ] = "once",
    cpu_experts: Annotated[
        str,
        typer.Option(
            help="CUDA: compute missing experts on the CPU where that is faster than moving them: off, auto (threads "
            "on most cores) or a number of threads. In 16-bit types the CPU rounds differently."
        ),
    ] = "off",
    residency_check: Annotated[
        str,
        typer.Option(
            help="CUDA: who looks up in each layer whether its experts are in slots: host, or device (a whole forward "
            "is one graph, which waits for the host only if an expert is missing); auto: device, if it works here."
        ),
    ] = "auto",
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="CUDA: capture no CUDA graphs, for debugging.")
    ] = False,
    batching: Annotated[
        bool,
        typer.Option("--batching/--no-batching", help="Submit copies that are ready together; off for measuring."),
    ] = True,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="Overlap copies with compute; off for measuring.")
    ] = True,
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling options that are not given: auto (from the model's generation_config.json) or none (greedy)."
        ),
    ] = "auto",
    load_format: Annotated[
        str,
        typer.Option(
            help="Weights: auto (the checkpoint's) or dummy: random ones, for which MODEL is a directory with a "
            "config.json or the name of a configuration that ships, such as mixtral-8x7b."
        ),
    ] = "auto",
) -> dict[str, Any]:
    options = {**locals(), **ONE_BY_ONE}
    config = EngineConfig.make(**{**options, "model": model or ""})  # checked before torch is imported
    config.require_runnable()
    draft_name = config.resolved_draft
    for name in (config.model, draft_name if drafter_name(draft_name)[0] == "model" else None):
        if name:
            (config_directory if config.random_weights else model_directory)(name)
    return {**options, "num_speculative_tokens": config.num_speculative_tokens}


def _sampling(
    max_tokens: Annotated[
        int | None, typer.Option(help=f"Maximum number of tokens to generate; default: {DEFAULT_MAX_TOKENS}.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 takes the most likely token. Default: 0.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens; 0 or -1: from all.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens whose probabilities sum up to this; 1: all."),
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens less likely than this share of the most likely token; 0: none.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Subtract this from the logits of tokens that the output has; -2 to 2.")
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(help="Subtract this from a token's logit for each time that the output has it; -2 to 2."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Penalty on tokens that prompt or output has; 1: off, above 1: less likely.")
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="Generate at least this many tokens before an end or stop token.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed that makes sampling repeatable; default: random.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given several times.")] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option(help="Stop at this token id; may be given several times.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end-of-text token.")] = False,
) -> dict[str, Any]:
    given = {name: value for name, value in locals().items() if value is not None and value is not False}
    SamplingParams(**given)  # checked before torch is imported
    return given


def sampling_params(llm: LLM, given: Mapping[str, Any]) -> SamplingParams:
    """Return the model's default sampling parameters with the given options instead; print what the model sets."""
    defaults, plain = llm.get_default_sampling_params(), SamplingParams()
    if "max_tokens" in given:  # the model's minimum must not contradict the user's maximum
        defaults = replace(defaults, min_tokens=min(defaults.min_tokens, given["max_tokens"]))
    params = replace(defaults, **given)
    names = [f.name for f in fields(plain) if f.name not in given]
    own = [f"{name} {getattr(defaults, name)}" for name in names if getattr(defaults, name) != getattr(plain, name)]
    if own:
        note = f"note: from the model's generation_config.json: {', '.join(own)}; --generation-config none turns it off"
        stderr().print(note, soft_wrap=True)
    return params


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, to standard output.")]

_GROUPS: dict[str, Callable[..., Any]] = {"engine": _engine, "params": _sampling}
_GROUP_PANELS = {"engine": "Model", "params": "Sampling"}  # of options that the table of panels does not list


def takes_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's `engine` and `params` arguments by the options that they are built from.

    An option of the same name that the command declares itself replaces the shared one, and goes to the command.
    """
    return _expand(command, ())


def takes_shared_options_except(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Act as `takes_shared_options`, without the options that would have no effect on the command."""
    return partial(_expand, without=names)


def _expand(command: Callable[..., None], without: Sequence[str]) -> Callable[..., None]:
    own = inspect.signature(command, eval_str=True).parameters
    groups = {
        name: {
            p.name: in_panel(p, _GROUP_PANELS[name])
            for p in inspect.signature(_GROUPS[name], eval_str=True).parameters.values()
        }
        for name in own
        if name in _GROUPS
    }
    for name in without:
        if not any(group.pop(name, None) for group in groups.values()):
            raise ValueError(f"no shared option is called {name}")
    groups = {name: {p: one for p, one in group.items() if p not in own} for name, group in groups.items()}
    expanded = [p for group in groups.values() for p in group.values()]
    expanded += [p for p in own.values() if p.name not in groups]

    @wraps(command)
    def wrapper(**values: Any) -> None:
        made = {name: _GROUPS[name](**{p: values.pop(p) for p in group}) for name, group in groups.items()}
        command(**made, **values)

    signature = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in expanded])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in expanded}
    return wrapper


@contextmanager
def load(engine: dict[str, Any], *, progress: bool = True) -> Iterator[LLM]:
    """Build an engine with progress on standard error, print its notices, and close it at the end."""
    with ExitStack() as held:
        try:
            import_engine()
            from spmoe.engine.llm import LLM

            llm = held.enter_context(LLM(**engine, progress=progress and not is_quiet()))
        except KeyboardInterrupt:
            stderr().print("interrupted while loading")
            raise
        notes = list(llm.notices)
        if (link := llm.engine.config.link_gbps) is not None:
            notes.insert(0, EMULATED_LINK_NOTE.format(link))
        for text in notes:
            note(text)
        yield llm


def require_draft_model(engine: dict[str, Any]) -> None:
    """Raise UsageError, before anything is loaded, if the options name no draft that is a model."""
    model = engine["model"] or str(SHIPPED_PAIR / "target")
    config = EngineConfig.make(**{**engine, "model": model})
    if config.draft_model is None and config.self_draft_scheme is None:
        raise UsageError("this command needs a draft model; give one with --draft")


def read_text(prompt: str) -> str:
    """Return the prompt; `-` reads it from standard input."""
    if prompt == "-":
        prompt = _read_stdin()
    if not prompt:
        raise PromptError("the prompt is empty; give one with --prompt TEXT or on standard input")
    return prompt


def require_writable(*files: str | Path | None) -> None:
    """Raise UsageError for a file that cannot be written; None and `-` (standard output) are skipped."""
    for file in files:
        if file is None or file == "-":
            continue
        path = Path(file)
        existing = path if path.exists() else path.parent
        if path.is_dir() or not existing.exists() or not os.access(existing, os.W_OK):
            raise UsageError(f"cannot write {path}; choose a file in a directory that exists and can be written")


def _read_stdin() -> str:
    if sys.stdin is None:
        raise PromptError("standard input is closed; give the prompt with --prompt")
    if sys.stdin.isatty():
        stderr().print("reading the prompt from standard input; end it with Ctrl-D")
    with readable_stdin():
        return sys.stdin.read()


@contextmanager
def readable_stdin() -> Iterator[None]:
    """Raise PromptError if standard input is not UTF-8 text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise PromptError("standard input is not UTF-8 text; convert it to UTF-8") from error


@contextmanager
def ctrl_c_stops(generation: Generation) -> Iterator[None]:
    """Let Ctrl-C stop the generation after the current step; a second Ctrl-C raises KeyboardInterrupt at once."""
    on_main = threading.current_thread() is threading.main_thread()  # only that one may set handlers
    if not on_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # the program has its own
        yield
        return

    def handle(signum: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        generation.stop()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def stream_text(generation: Generation, *, quiet: bool) -> None:
    """Run a generation and print its text as it comes; after an error or Ctrl-C, print the rest and end the line.

    A terminal gets control characters as escapes, since a model may write sequences that change it; a pipe or a file
    gets the text as it is.
    """
    shown, show = 0, printable if sys.stdout.isatty() else str
    try:
        for piece in generation:
            if not quiet:
                sys.stdout.write(show(piece))
                sys.stdout.flush()
                shown += len(piece)
    finally:
        text = generation.completion.text
        if text and not quiet:
            print(show(text[shown:]), flush=True)
