"""`spmoe chat`: hold a conversation, at a terminal or with messages from a pipe."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spmoe import __version__
from spmoe.cli.conversation import Conversation, Message
from spmoe.cli.options import (
    Json,
    ctrl_c_stops,
    load,
    read_text_file,
    readable_stdin,
    require_writable,
    sampling_params,
    stderr,
    stream_text,
    takes_shared_options,
)
from spmoe.cli.output import Console, is_verbose
from spmoe.config import SamplingParams, format_bytes, home
from spmoe.errors import PromptError, SpmoeError, UsageError, printable, reason
from spmoe.models.chat_template import render_chat, require_chat_template, require_template_syntax

if TYPE_CHECKING:
    from spmoe.engine.llm import LLM, Generation
    from spmoe.engine.stats import Stats

COMMANDS = {  # with the text of /help
    "/help": "list the commands",
    "/reset": "start a new conversation; the system message stays",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/retry": "answer the last message again",
    "/stats": "show statistics after each answer, or no longer",
    "/save FILE": "write the conversation to a JSON file, which `spmoe chat --load` reads",
    "/exit": "leave, as Ctrl-D does",
}
_USAGE = {usage.split()[0]: usage for usage in COMMANDS}  # by name
_KEYS = "Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer. A space before / makes it a message."
_INCLUDED_PAIR = "the included pair"
_RESERVED_SHARE = 4  # one part in so many of the context is kept for the answer, if --max-tokens allows as much


@takes_shared_options
def chat(
    engine: dict[str, Any],
    params: dict[str, Any],
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the conversation.")] = None,
    load_file: Annotated[
        Path | None, typer.Option("--load", metavar="FILE", help="Continue the conversation saved in this file.")
    ] = None,
    save_file: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Save the conversation to this file at each answer.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Jinja chat template to use instead of the model's own.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; Ctrl-D ends the conversation; /help lists commands.

    When the context is full, the model no longer reads the oldest turns. Without a terminal, each line of standard
    input is a message. With --json, print one object per answer.
    """
    if sys.stdin is None:
        raise PromptError("standard input is closed, but chat reads messages from it; open it")
    conversation = Conversation() if load_file is None else Conversation.load(load_file)
    if system is not None:
        conversation.set_system(system)
    own = {path.resolve() for path in (load_file,) if path is not None}
    if save_file is not None:
        require_writable(save_file)
        _require_new(save_file, own, f"add --load {save_file} to continue the conversation in it, or choose")
    template = _check_template(engine["model"], chat_template)
    interactive = sys.stdin.isatty() and (sys.stdout.isatty() or (sys.stderr is not None and sys.stderr.isatty()))
    with load({**engine, "enable_prefix_caching": True}, progress=not as_json) as llm:
        if template is not None and llm.engine.parts.tokenizer is not None:
            llm.engine.parts.tokenizer.chat_template = template
        model = engine["model"] or _INCLUDED_PAIR
        sampling = sampling_params(llm, params)
        session = Session(llm, sampling, conversation, model, save_file, own, is_verbose(), as_json, interactive)
        if interactive:
            from spmoe.cli.terminal import TerminalReader

            session.print_banner()
            session.run(TerminalReader(home() / "chat-history", list(_USAGE)).read)
        else:
            session.run(_read_line)
    if session.exit_code:
        raise typer.Exit(session.exit_code)


def _check_template(model: str | None, path: Path | None) -> str | None:
    """Return the template that the user gave; raise UsageError if it is unusable, or the model has none of its own."""
    if path is not None:
        template = read_text_file(path)
        require_template_syntax(template, str(path))
        return template
    if model is not None:
        require_chat_template(model)
    return None


def _require_new(path: Path, own: set[Path], advice: str) -> None:
    """Raise UsageError if a file exists that this conversation has neither been loaded from nor saved to."""
    if path.exists() and path.resolve() not in own:
        raise UsageError(f"{path} exists; {advice} another file")


def _read_line() -> str | None:
    """Return the next line of standard input; None at its end."""
    with readable_stdin():
        return sys.stdin.readline() or None


class Session:
    """The loop of a chat: reads messages and commands, answers them, and reports errors without ending.

    `own`: files that may be overwritten. `exit_code`: of the first failure, unless a user at a terminal has seen it.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        conversation: Conversation,
        model: str,
        save_file: Path | None = None,
        own: set[Path] | None = None,
        show_stats: bool = False,
        as_json: bool = False,
        interactive: bool = False,
    ) -> None:
        self.exit_code = 0
        self._llm = llm
        self._params = params
        self._conversation = conversation
        self._model = model
        self._save_file = save_file
        self._own = {*(own or ()), *([save_file.resolve()] if save_file is not None else [])}
        self._show_stats = show_stats
        self._as_json = as_json
        self._interactive = interactive
        self._last: Stats | None = None  # of the last answer
        self._context: int = llm.engine.parts.max_model_len
        llm.stream_chat([*conversation.head, {"role": "user", "content": "hello"}], params)  # refuses a bad template

    def print_banner(self) -> None:
        """Print the model, its context and its memory budget."""
        engine = self._llm.engine
        memory, experts = engine.parts.memory, engine.spec.count
        budget = f"{format_bytes(memory.slots * memory.slot_bytes)} for {memory.slots} of {experts} experts"
        if memory.limit is not None:
            budget += f", {format_bytes(memory.limit)} in all"
        lines = [
            f"spmoe {__version__}: {self._model} on {engine.device.type}",
            f"context: {self._context} tokens; memory: {budget}",
            "/help lists commands; Ctrl-C stops an answer; Ctrl-D leaves",
        ]
        if count := len(self._conversation.messages):
            hint = "; /retry answers the last one" if self._conversation.waiting else ""
            lines.append(f"continuing a conversation of {count} messages{hint}")
        for line in lines:
            _note(line, style="dim")

    def run(self, read: Callable[[], str | None]) -> None:
        """Answer what `read` returns until it returns None, the user leaves, or Ctrl-C comes twice."""
        leaving = False
        while True:
            try:
                line = read()
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                if leaving:
                    return
                leaving = True
                _say("(press Ctrl-C again, or Ctrl-D, to leave)")
                continue
            leaving = False
            if line is None:
                return
            try:
                if not self._handle(line):
                    return
            except BrokenPipeError:  # standard output is closed
                raise
            except Exception as error:
                self._report(error)

    def _handle(self, line: str) -> bool:
        """Execute a command or answer a message; return False if the conversation is to end."""
        if line.startswith("/"):
            return self._execute(*line.split(maxsplit=1))
        if text := line.strip():
            before = list(self._conversation.messages)
            self._conversation.ask(text)
            self._answer(before)
        return True

    # ---- commands

    def _execute(self, name: str, argument: str = "") -> bool:
        argument = argument.strip()
        if name not in _USAGE:
            raise UsageError(f"unknown command {name}; /help lists them, and a space before / makes it a message")
        if argument and _USAGE[name] == name:
            raise UsageError(f"{name} takes no argument, not {argument!r}; leave it out")
        conversation = self._conversation
        if name == "/help":
            width = max(map(len, COMMANDS))
            _say("\n".join([*(f"{usage:{width}}  {purpose}" for usage, purpose in COMMANDS.items()), _KEYS]))
        elif name == "/reset":
            conversation.reset()
            self._keep_saved_file()
            _say("(new conversation)")
        elif name == "/system":
            conversation.set_system(argument or None)
            _say("(system message set)" if argument else "(no system message)")
        elif name == "/retry":
            before = list(conversation.messages)
            conversation.ask_again()
            self._answer(before)
        elif name == "/stats":
            self._show_stats = not self._show_stats
            _say(f"(statistics after each answer: {'on' if self._show_stats else 'off'})")
            if self._show_stats and self._last is not None:
                _say(stats_line(self._last))
        elif name == "/save":
            self._save(argument)
        return name != "/exit"

    def _save(self, name: str) -> None:
        if not name and self._save_file is None:
            raise UsageError("/save needs the name of a file: /save FILE")
        try:
            path = Path(name).expanduser() if name else self._save_file or Path()
            _require_new(path, self._own, "choose")
        except (OSError, RuntimeError, ValueError) as error:  # name too long, unknown user
            raise UsageError(f"cannot use the path {name} ({reason(error)}); choose another file") from error
        self._conversation.save(path, self._model)
        self._own.add(path.resolve())
        _say(f"(saved {len(self._conversation.messages)} messages to {path})")

    def _keep_saved_file(self) -> None:
        """Let --save continue in a new file, so that the conversation before /reset stays in the old one."""
        if (old := self._save_file) is None or not old.exists():
            return
        number = 2
        while (path := old.with_name(f"{old.stem}-{number}{old.suffix}")).exists():
            number += 1
        self._save_file = path
        self._own.add(path.resolve())
        _say(f"(the old conversation stays in {old}; the new one is saved to {path})")

    # ---- answers

    def _answer(self, before: list[Message]) -> None:
        """Answer the last message. Without any text of an answer, restore the messages `before`."""
        conversation = self._conversation
        try:
            reserve = min(self._params.max_tokens, self._context // _RESERVED_SHARE)
            omitted = conversation.fit(self._count_tokens, self._context, reserve)
            generation = self._llm.stream_chat(conversation.prompt, self._params)
        except Exception:
            conversation.messages = before
            raise
        if omitted:
            turns = "the oldest turn" if omitted == 1 else f"the {omitted} oldest turns"
            _note(f"note: the context of {self._context} tokens is full; the model no longer reads {turns}")
        try:
            with _ctrl_c_stops_answer(generation) if self._interactive else ctrl_c_stops(generation):
                stream_text(generation, quiet=self._as_json)
        except (KeyboardInterrupt, BrokenPipeError):  # the program ends: three Ctrl-C, or standard output is closed
            self._keep(generation, before)
            self._rescue()
            raise
        except Exception as error:
            self._report(error, ". The conversation is kept; send the message again")
        self._print_end(generation, answered=self._keep(generation, before))

    def _keep(self, generation: Generation, before: list[Message]) -> bool:
        """Add the answer so far to the conversation and save it; return False if there is no answer."""
        completion = generation.completion
        answered = bool(completion.text) or completion.finish_reason != "interrupted"
        if answered:
            self._conversation.answer(completion.text)
            self._last = completion.stats
        else:
            self._conversation.messages = before
        if self._save_file is not None:
            try:
                self._conversation.save(self._save_file, self._model)
            except UsageError as error:
                self._report(error)
        return answered

    def _print_end(self, generation: Generation, answered: bool) -> None:
        """Print how an answer ended: its JSON object, a hint, statistics."""
        completion = generation.completion
        stopped = generation.stopped and completion.finish_reason == "interrupted"
        if self._as_json and (answered or stopped):
            print(json.dumps(completion.to_dict()), flush=True)
        if stopped:
            _say("(stopped)" if answered else "(stopped before the answer; the message is left out)")
        elif self._interactive and completion.finish_reason == "length":
            at_most = completion.stats.output_tokens >= self._params.max_tokens
            limit = f"--max-tokens {self._params.max_tokens}" if at_most else f"{self._context} tokens of context"
            _note(f"(cut off at {limit})")
        elif self._interactive and answered and not completion.text:
            _note("(empty answer)")
        if self._show_stats and answered:
            _say(stats_line(completion.stats))

    def _count_tokens(self, messages: list[Message]) -> int:
        from spmoe.models.tokenizer import encode

        tokenizer = self._llm.get_tokenizer()
        return len(encode(tokenizer, render_chat(tokenizer, messages, self._model), add_special_tokens=False))

    def _rescue(self) -> None:
        """Save the conversation of a user who leaves in the middle of an answer, if it is saved nowhere."""
        if not self._interactive or self._save_file is not None or not self._conversation.messages:
            return
        path = home() / "chat-interrupted.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)
            self._conversation.save(path, self._model)
        except (OSError, UsageError):
            return
        _say(f"(the conversation is saved to {path})")

    def _report(self, error: Exception, ending: str = "") -> None:
        """Print an error as one line; raise an unexpected one again under SPMOE_DEBUG."""
        if isinstance(error, SpmoeError):
            text, code = str(error), error.exit_code
        elif os.environ.get("SPMOE_DEBUG"):
            raise error
        else:
            text, code = f"internal error ({type(error).__name__}: {reason(error)})", 1
        console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        console.print(f"error: {' '.join(text.splitlines())}{ending}", style="red")
        if not self._interactive:
            self.exit_code = self.exit_code or code


def stats_line(stats: Stats) -> str:
    """Format one answer's statistics as one line."""
    c, tpot = stats.counters, stats.tpot_seconds
    parts = [f"{stats.prompt_tokens} tokens in, {stats.output_tokens} out"]
    parts.append(f"TTFT {1e3 * stats.ttft_seconds:.0f} ms" + (f", TPOT {1e3 * tpot:.1f} ms" if tpot else ""))
    if tpot:
        parts.append(f"{1 / tpot:.1f} tokens/s")
    if c.mean_acceptance_length is not None:
        parts.append(f"{c.mean_acceptance_length:.2f} tokens per step")
    if c.hit_rate is not None:
        parts.append(f"hit rate {100 * c.hit_rate:.1f}%")
    if stats.latency_seconds:
        parts.append(f"stall {100 * c.stall_seconds / stats.latency_seconds:.1f}%")
    link = stats.emulated_link_gbps
    parts += ["random weights"] if stats.random_weights else []
    return f"({'; '.join(parts)}{f'; emulated link, {link:g} GB/s' if link is not None else ''})"


def _say(text: str) -> None:
    """Print what the user asked for, or has to know, to standard error."""
    print(printable(text), file=sys.stderr, flush=True)


def _note(text: str, style: str | None = None) -> None:
    """Print a hint to standard error."""
    stderr().print(text, style=style, soft_wrap=True)


@contextmanager
def _ctrl_c_stops_answer(generation: Generation) -> Iterator[None]:
    """Let Ctrl-C stop an answer after the current step; a third Ctrl-C raises KeyboardInterrupt at once.

    The second explains, so that nobody who is impatient leaves a conversation by mistake.
    """
    presses = 0

    def handle(signum: int, frame: object) -> None:
        nonlocal presses
        presses += 1
        generation.stop()
        if presses == 2:  # a plain write: the handler may have interrupted one to a buffered stream
            os.write(2, b"\n(stopping after this step; Ctrl-C again leaves the program)\n")
        elif presses > 2:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
