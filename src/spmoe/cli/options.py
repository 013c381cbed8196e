"""The options that several verbs take, declared once, and how they become an engine."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from spmoe.config import DRAFTS, EngineConfig, SamplingParams
from spmoe.errors import PromptError, UsageError
from spmoe.files import model_directory
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES

if TYPE_CHECKING:
    from spmoe.engine.llm import LLM, Generation

_PREFETCH = f"{', '.join(PREFETCH_POLICIES.names())}, or several joined by +"
_EVICTION = f"auto (the one that suits the prefetch policy), {', '.join(EVICTION_POLICIES.names())}"


def _engine(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Directory or hub id of an MoE model; default: the pair that ships."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft: a model with the same tokenizer, 'ngram', 'self:int8', 'self:int4' or 'none'."),
    ] = None,
    num_speculative_tokens: Annotated[
        str,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="Tokens drafted per step: a number (0: plain decoding), or auto, as many as turn out to pay.",
        ),
    ] = "4",
    prefetch: Annotated[
        str, typer.Option(help=f"Prefetch policy: {_PREFETCH}; see docs/policies.md.")
    ] = "draft-gate",
    cutoff: Annotated[
        str, typer.Option(help="Layers to prefetch for: auto (from a profile), just-in-time, none (all) or a number.")
    ] = "auto",
    projection: Annotated[
        bool,
        typer.Option("--projection/--no-projection", help="Predict through maps that `spmoe fit-predictor` fitted."),
    ] = True,
    eviction: Annotated[
        str, typer.Option(help=f"Eviction policy: {_EVICTION}.")
    ] = "auto",
    expert_memory: Annotated[
        str, typer.Option(help="Memory for experts: a size (6GiB) or a share of all experts (25%).")
    ] = "25%",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto (as the checkpoint is).")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest context, prompt and output together; default: the model's.")
    ] = None,
    link_gbps: Annotated[
        float | None, typer.Option(help="Emulate a slower link to the experts, in gigabytes per second.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu (experts on disk), cuda (in host memory) or auto.")] = "auto",
    device_memory: Annotated[
        str | None,
        typer.Option(help="CUDA: one limit for weights, KV, workspace and experts: a size, or auto (what is free)."),
    ] = None,
    pin_memory: Annotated[
        bool, typer.Option("--pin-memory/--no-pin-memory", help="CUDA: pin the experts' host memory.")
    ] = False,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="CUDA: no recorded graphs, for debugging.")
    ] = False,
    batching: Annotated[
        bool, typer.Option("--batching/--no-batching", help="For measuring: no batching is one copy per submission.")
    ] = True,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="Overlap copies with compute; off for measuring.")
    ] = False,
) -> dict[str, Any]:
    options = dict(locals())
    config = EngineConfig.make(**{**options, "model": model or ""})  # before anything heavy is imported
    for name in (config.model, config.draft):
        if name and name not in DRAFTS:
            model_directory(name)
    return options


def _sampling(
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this much mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the most likely one.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Make sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
) -> SamplingParams:
    return SamplingParams(max_tokens, temperature, top_k, top_p, min_p, seed, tuple(stop or ()), ignore_eos)


Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, and nothing else there.")]

_GROUPS: dict[str, Callable[..., Any]] = {"engine": _engine, "params": _sampling}


def takes_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Spread a command's `engine` and `params` arguments into the options they are made from.

    An option that the command declares itself, under the same name, is the command's own business.
    """
    return _spread(command, ())


def takes_shared_options_but(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same without those that mean nothing to the command: what is listed is heeded."""
    return partial(_spread, without=names)


def _spread(command: Callable[..., None], without: Sequence[str]) -> Callable[..., None]:
    own = inspect.signature(command, eval_str=True).parameters
    groups = {
        name: {p.name: p for p in inspect.signature(_GROUPS[name], eval_str=True).parameters.values()}
        for name in own
        if name in _GROUPS
    }
    for name in without:
        if not any(group.pop(name, None) for group in groups.values()):
            raise ValueError(f"no shared option is called {name}")
    groups = {name: {p: one for p, one in group.items() if p not in own} for name, group in groups.items()}
    spread = [p for group in groups.values() for p in group.values()]
    spread += [p for p in own.values() if p.name not in groups]

    @wraps(command)
    def wrapper(**values: Any) -> None:
        made = {name: _GROUPS[name](**{p: values.pop(p) for p in group}) for name, group in groups.items()}
        command(**made, **values)

    signature = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in spread])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in spread}
    return wrapper


def stderr() -> Console:
    """Where everything goes that is not the answer."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


@contextmanager
def load(engine: dict[str, Any], *, progress: bool) -> Iterator[LLM]:
    """Build the engine, and close it in the end; says what it is and where it does less than was asked."""
    with ExitStack() as held:
        try:
            from spmoe.engine.llm import LLM
            from spmoe.engine.threads import threads_for

            held.enter_context(threads_for(engine["model"]))
            llm = held.enter_context(LLM(**engine, progress=progress and sys.stderr.isatty()))
        except KeyboardInterrupt:
            stderr().print("interrupted while loading")
            raise
        notes = list(llm.notices)
        if (link := llm.engine.config.link_gbps) is not None:
            notes.insert(0, f"emulated link of {link:g} GB/s; times are not this machine's own")
        for note in notes:
            stderr().print(f"note: {note}", soft_wrap=True)
        yield llm


def read_text(prompt: str) -> str:
    """The prompt itself, or standard input for `-`."""
    if prompt == "-":
        prompt = _read_stdin()
    if not prompt:
        raise PromptError("the prompt is empty; give one with --prompt TEXT, or on standard input")
    return prompt


def read_text_file(path: Path) -> str:
    """A text file's contents."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text; convert it to UTF-8") from error
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); check the path") from error


def _read_stdin() -> str:
    if sys.stdin is None:
        raise PromptError("standard input is closed; give the prompt with --prompt")
    if sys.stdin.isatty():
        stderr().print("reading the prompt from standard input; end it with Ctrl-D")
    with readable_stdin():
        return sys.stdin.read()


@contextmanager
def readable_stdin() -> Iterator[None]:
    """Tell bytes that are no text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise PromptError("standard input is not UTF-8 text; convert it to UTF-8") from error


@contextmanager
def ctrl_c_stops(generation: Generation) -> Iterator[None]:
    """Ctrl-C ends the generation after the step under way; a second one, at once, as KeyboardInterrupt."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # somebody else's business
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


def show(generation: Generation, *, silent: bool) -> None:
    """Run a generation, printing its text as it comes; an error or Ctrl-C leaves all text there is and a whole line."""
    shown = 0
    try:
        for piece in generation:
            if not silent:
                sys.stdout.write(piece)
                sys.stdout.flush()
                shown += len(piece)
    finally:
        text = generation.completion.text
        if text and not silent:
            print(text[shown:], flush=True)
