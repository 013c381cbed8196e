"""Help texts: panels that group options and commands, metavars, and completion of values by the shell."""

from __future__ import annotations

import copy
import inspect
import re
import typing
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo, OptionInfo

from spmoe.cli import output, settings
from spmoe.config import (
    DEVICES,
    DTYPES,
    LOAD_FORMATS,
    RESIDENCY_CHECKS,
    VERIFY_EXPERTS,
    draft_names,
    expert_formats,
)
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES
from spmoe.serve.config import TOOL_CALL_PARSERS

PANELS = (
    "Model",
    "Memory",
    "Speculation",
    "Prefetching",
    "Sampling",
    "Server",
    "Files",
    "Output",
    "Measurement",
)  # in this order

_BY_PANEL = {
    "Model": "dtype expert_format load_format device max_model_len shape generation_config chat_template system",
    "Memory": "expert_memory device_memory host_memory pin_memory verify_experts cpu_experts residency_check",
    "Speculation": "draft num_speculative_tokens acceptance",
    "Prefetching": "prefetch cutoff projection eviction",
    "Sampling": """
        prompt prompt_token_ids max_tokens min_tokens temperature top_k top_p min_p presence_penalty frequency_penalty
        repetition_penalty seed stop stop_token_ids ignore_eos json_schema""",
    "Server": """
        host port api_key served_model_name allowed_origins max_num_seqs max_num_batched_tokens enable_prefix_caching
        max_queued_requests max_body_size shutdown_timeout ray_replicas
        tool_call_parser""",
    "Output": """
        as_json json_file output report markdown plot chrome wide load_file save_file everything older_than dry_run yes
        against_model config verbose quiet""",
    "Measurement": """
        scenario prompts max_prompts output_len repeat warmup ablation resident_step_ms resume text windows window span
        measure check stored every reference cost quick compute_scale expert_size draft_pass_ms verify_layer_ms transfer
        formats workers profile device_gbps host_gbps link_gbps cpu_gbps enforce_eager batching overlap""",
}
PANEL_OF = {name: panel for panel, names in _BY_PANEL.items() for name in names.split()}

_METAVARS = {  # by option; the others by type
    **dict.fromkeys(("expert_memory", "device_memory", "host_memory", "expert_size", "max_body_size"), "SIZE"),
    **dict.fromkeys(("prefetch", "eviction", "dtype", "device", "shape", "transfer", "scenario", "draft"), "NAME"),
    **dict.fromkeys(("generation_config", "load_format", "reference", "verify_experts", "expert_format"), "NAME"),
    "residency_check": "NAME",
    "tool_call_parser": "NAME",
    **dict.fromkeys(("num_speculative_tokens", "cutoff", "link_gbps", "cpu_gbps", "cpu_experts"), "N"),
    **dict.fromkeys(("prompts", "json_file"), "PATH"),
}
_METAVARS_BY_TYPE = {str: "TEXT", int: "N", float: "N", Path: "PATH"}


_COMPLETIONS: dict[str, Callable[[], Iterable[str]]] = {
    "prefetch": PREFETCH_POLICIES.names,
    "eviction": lambda: ("auto", *EVICTION_POLICIES.names()),
    "draft": draft_names,
    "dtype": lambda: DTYPES,
    "device": lambda: DEVICES,
    "cutoff": lambda: ("auto", "all", "just-in-time"),
    "num_speculative_tokens": lambda: ("auto",),
    "transfer": lambda: ("recorded", "cuda"),
    "generation_config": lambda: ("auto", "none"),
    "verify_experts": lambda: VERIFY_EXPERTS,
    "cpu_experts": lambda: ("off", "auto"),
    "residency_check": lambda: RESIDENCY_CHECKS,
    "load_format": lambda: LOAD_FORMATS,
    "expert_format": expert_formats,
    "tool_call_parser": lambda: TOOL_CALL_PARSERS,
}


def completion(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion function for values that may be joined by commas or +; it completes the last one."""

    def complete(incomplete: str) -> list[str]:
        *_, last = re.split("[,+]", incomplete)
        before = incomplete.removesuffix(last)
        return sorted(before + name for name in names() if name.startswith(last))

    return complete


class Command(TyperCommand):
    """A command whose help is literal text in panels, without Python's names of types."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        paragraphs = (" ".join(one.split()) for one in (self.help or "").split("\n\n"))  # typer keeps line breaks
        self.help = escape("\n\n".join(paragraphs))  # brackets are text, not markup
        for parameter in self.params:
            parameter.help = escape(parameter.help or "")  # type: ignore[attr-defined]

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all arguments and options, with --help in the panel of output options."""
        found = [_show_plainly(parameter) for parameter in super().get_params(ctx)]
        for parameter in found:
            if parameter.name == "help":
                parameter.rich_help_panel = "Output"
        return found

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line after the command."""
        return ["[OPTIONS]", *(_usage(one) for one in self.params if one.param_type_name == "argument")]


class Group(TyperGroup):
    """`spmoe` itself, or a group of commands, with the same kind of help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all options; typer adds those of shell completion after construction."""
        return [_show_plainly(parameter) for parameter in super().get_params(ctx)]


def _show_plainly(parameter: Any) -> Any:
    """Leave out the type of an argument or flag."""
    if parameter.param_type_name == "argument" or parameter.is_flag:
        parameter.display_type_rich = lambda ctx: None
    return parameter


def _usage(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()) + ("..." if argument.nargs != 1 else "")
    return name if argument.required else f"[{name}]"


def arranged(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with options in panels, plain metavars, completion, and the options of every command."""

    own = inspect.signature(command, eval_str=True).parameters
    parameters = {**inspect.signature(_options_of_every_command, eval_str=True).parameters, **own}
    ordered = sorted(map(_arrange, parameters.values()), key=_position)

    @wraps(command)
    def wrapper(**values: Any) -> None:
        output.silence_libraries()
        settings.announce()
        command(**{name: values[name] for name in own})

    signature = inspect.Signature([one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in ordered])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {one.name: one.annotation for one in ordered}
    return wrapper


def _options_of_every_command(
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with options of this or all commands. Variables such as SPMOE_DRAFT set options too.",
            callback=settings.read_settings,
            is_eager=True,
            expose_value=False,
            envvar="SPMOE_CONFIG",
            show_envvar=False,
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Show log messages, and options that a file or the environment sets.",
            callback=lambda value: output.set_verbosity(verbose=bool(value)),
            expose_value=False,
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="Show no progress, notes or statistics on standard error; only errors.",
            callback=lambda value: output.set_verbosity(quiet=bool(value)),
            expose_value=False,
        ),
    ] = False,
) -> None:
    """Declare the options that every command takes."""


def in_panel(parameter: inspect.Parameter, panel: str) -> inspect.Parameter:
    """Put an option without an entry in the table of panels into this one."""
    if not isinstance(_info(parameter), OptionInfo):
        return parameter
    return _changed(parameter, rich_help_panel=PANEL_OF.get(parameter.name, panel))


def _position(parameter: inspect.Parameter) -> tuple[int, int]:
    """Sort key: arguments, then options by panel and by place in the table."""
    info = _info(parameter)
    if not isinstance(info, OptionInfo):
        return -1, 0
    known = [*PANEL_OF]
    place = known.index(parameter.name) if parameter.name in known else len(known)
    return PANELS.index(info.rich_help_panel or "Output"), place


def _arrange(parameter: inspect.Parameter) -> inspect.Parameter:
    """Fill in what an option or argument does not declare itself."""
    info, name = _info(parameter), parameter.name
    if info is None:  # the context
        return parameter
    metavar = info.metavar or _METAVARS.get(name) or _METAVARS_BY_TYPE.get(_value_type(parameter.annotation))
    complete = info.autocompletion or (completion(_COMPLETIONS[name]) if name in _COMPLETIONS else None)
    if isinstance(info, ArgumentInfo):
        name = (info.metavar or name.upper()).strip("[].")  # the usage line says how many, and whether required
        return _changed(parameter, metavar=name, autocompletion=complete)
    panel = info.rich_help_panel or PANEL_OF.get(name, "Output")
    return _changed(parameter, metavar=metavar, autocompletion=complete, rich_help_panel=panel)


def _info(parameter: inspect.Parameter) -> OptionInfo | ArgumentInfo | None:
    """Return the declaration of an option or argument."""
    found = get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else ()
    return next((one for one in found if isinstance(one, (OptionInfo, ArgumentInfo))), None)


def _changed(parameter: inspect.Parameter, **changes: Any) -> inspect.Parameter:
    """Return a copy of a parameter whose declaration has other attributes."""
    kind, *metadata = get_args(parameter.annotation)
    copies = [copy.copy(one) for one in metadata]
    for one in copies:
        if isinstance(one, (OptionInfo, ArgumentInfo)):
            vars(one).update(changes)
    return parameter.replace(annotation=Annotated[(kind, *copies)])


def _value_type(annotation: Any) -> Any:
    """Return the type of one value: `int` for `Annotated[list[int] | None, ...]`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated or origin is list:
        return _value_type(arguments[0])
    if origin in (typing.Union, UnionType):
        return _value_type(next(one for one in arguments if one is not type(None)))
    return annotation
