"""Options from a TOML file (`--config`) and from the environment (`SPMOE_<OPTION>`).

The command line wins over the environment, the environment over the file, and the file over defaults.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import typer

from spmoe.cli import output
from spmoe.errors import UsageError
from spmoe.files import decode_toml

_PREFIX = "SPMOE_"
_NOT_OPTIONS = ("SPMOE_HOME", "SPMOE_DEBUG")  # the cache directory, and debug messages
_NOT_SETTINGS = {"help", "config", "version", "install_completion", "show_completion", "everything", "all", "yes"}
_SECRETS = {"api-key"}  # options whose values are never printed
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Setting(NamedTuple):
    """Value of an option that the command line did not give."""

    option: str  # such as expert-memory
    value: Any
    source: str  # the file, or the variable


_settings: list[Setting] = []  # of the running command, for messages
_unknown: list[str] = []  # variables that look like misspelt ones


def reset_settings() -> None:
    """Forget the settings of an earlier command line."""
    _settings.clear()
    _unknown.clear()


def read_settings(context: typer.Context, file: Path | None) -> None:
    """Make the settings of a file and of the environment the defaults of the running command; a typer callback."""
    if context.resilient_parsing:  # a shell asks for completions
        return
    root, path = context.find_root().command, _command_path(context)
    known, switches, found = _options(context.command), _switches(root), dict[str, Setting]()
    for key, value, source in _read_file(file, root, path) if file is not None else ():
        # `json = true` for all commands is not meant for one whose --json is a file
        if key in known and not (key in switches and not _is_switch(known[key]) and source == str(file)):
            setting = Setting(_dashed(key), value, source)
            found[key] = setting._replace(value=_from_file(known[key], setting))
    for key, parameter in known.items():
        name = _PREFIX + key.upper()
        is_argument = parameter.param_type_name == "argument" and key != "model"
        if os.environ.get(name) and not is_argument and (_is_switch(parameter) or key not in switches):
            found[key] = Setting(_dashed(key), _from_environment(parameter, name), name)
    context.default_map = {known[key].name: one.value for key, one in found.items()}
    _settings[:] = found.values()
    _unknown[:] = _misspelt_variables(root)


def announce() -> None:
    """Print a note about misspelt variables and, with -v, every setting in use."""
    for text in _unknown:
        output.note(text)
    if output.is_verbose():
        for one in _settings:
            shown = "(hidden)" if one.option in _SECRETS else one.value
            output.note(f"{one.option} = {shown} ({one.source})")


def name_source(message: str) -> str:
    """Add to an error about an option's value where the value comes from, if not from the command line."""
    for one in _settings:
        key = one.option.replace("-", "_")
        named = f"--{one.option}" in message or message.startswith(f"{key} ")
        if named or (isinstance(one.value, str) and repr(one.value) in message):
            return f"{message} ({one.option} is set by {one.source})"
    return message


# ---- options of commands


def _options(command: Any) -> dict[str, Any]:
    """Return a command's options and arguments by key: the long name, with underscores."""
    found = {}
    for parameter in command.params:
        names = [name.removeprefix("--") for name in parameter.opts if name.startswith("--")] or [parameter.name]
        found[names[0].replace("-", "_")] = parameter
    return {key: parameter for key, parameter in found.items() if key not in _NOT_SETTINGS}


def _all_options(command: Any) -> set[str]:
    """Return the keys of a command, or of all commands of a group."""
    commands = getattr(command, "commands", None)
    if commands is None:
        return set(_options(command))
    return {key for one in commands.values() for key in _all_options(one)}


def _switches(command: Any) -> set[str]:
    """Return the keys that are true or false for at least one command of a group."""
    commands = getattr(command, "commands", None)
    if commands is None:
        return {key for key, parameter in _options(command).items() if _is_switch(parameter)}
    return {key for one in commands.values() for key in _switches(one)}


def _is_switch(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


def _takes_many(parameter: Any) -> bool:
    return bool(getattr(parameter, "multiple", False) or parameter.nargs != 1)


def _command_path(context: typer.Context) -> list[str]:
    """Return the names of the running command, such as ["trace", "record"]."""
    names: list[str] = []
    at: Any = context
    while at.parent is not None:
        names.insert(0, at.command.name)
        at = at.parent
    return names


def _dashed(key: str) -> str:
    return key.replace("_", "-")


# ---- files


def _read_file(file: Path, root: Any, path: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and source: first top-level keys, then those of the command's table, which win."""
    try:
        data = decode_toml(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text; convert it to UTF-8") from error
    except OSError as error:
        raise UsageError(f"cannot read {file} ({error.strerror}); check --config or SPMOE_CONFIG") from error
    except ValueError as error:
        raise UsageError(f"{file} is not TOML: {error}") from error
    yield from _read_table(data, str(file), root, path)


def _read_table(
    table: Mapping[str, Any], place: str, command: Any, path: Sequence[str] | None
) -> Iterator[tuple[str, Any, str]]:
    """Check every key of a table and yield those that apply; `path` None: a table of another command, only checked."""
    known, commands = _all_options(command), getattr(command, "commands", {})
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    for written in (one for one in table if one not in tables):
        key = written.replace("-", "_")
        if key not in known:
            close = get_close_matches(key, sorted(known), 1)
            hint = f"did you mean {_dashed(close[0])}?" if close else "keys are the long names of options, see --help"
            raise UsageError(f"{place}: unknown key {written}; {hint}")
        if path is not None:
            yield key, table[written], place
    for written, inner in tables.items():
        name = _dashed(written)
        if name not in commands:
            close = get_close_matches(name, sorted(commands), 1)
            hint = f"did you mean [{close[0]}]?" if close else f"tables are commands: {', '.join(commands) or 'none'}"
            raise UsageError(f"{place}: unknown table [{written}]; {hint}")
        inner_path = path[1:] if path and path[0] == name else None
        yield from _read_table(inner, f"{place}, [{written}]", commands[name], inner_path)


def _from_file(parameter: Any, setting: Setting) -> Any:
    """Return the value as the command line would give it; a wrong value of the right kind fails later."""
    value, many = setting.value, _takes_many(parameter)
    wrong = UsageError(f"{setting.source}: {setting.option} must be {_kind(parameter)}, not {value!r}")
    if _is_switch(parameter):
        if not isinstance(value, bool):
            raise wrong
        return value
    values = value if isinstance(value, list) and many else [value]
    if not all(isinstance(one, (str, int, float)) and not isinstance(one, bool) for one in values):
        raise wrong
    return [str(one) for one in values] if many else str(values[0])


def _kind(parameter: Any) -> str:
    if _is_switch(parameter):
        return "true or false"
    if _takes_many(parameter):
        return "a text or a list of texts"
    return "a number" if parameter.metavar == "N" else "a text, with commas between several values"


# ---- environment


def _from_environment(parameter: Any, name: str) -> Any:
    value = os.environ[name]
    if _is_switch(parameter):
        if value.lower() not in (*_TRUE, *_FALSE):
            raise UsageError(f"{name} must be 1 or 0, not {value!r}")
        return value.lower() in _TRUE
    return [value] if _takes_many(parameter) else value


def _misspelt_variables(root: Any) -> Iterator[str]:
    """Yield a note for each variable that is nearly, but not quite, the name of an option."""
    known = [*sorted(_PREFIX + key.upper() for key in _all_options(root)), *_NOT_OPTIONS, "SPMOE_CONFIG"]
    for name in sorted(one for one in os.environ if one.startswith(_PREFIX) and one not in known):
        if close := get_close_matches(name, known, 1, cutoff=0.9):
            yield f"{name} is no option of any command; did you mean {close[0]}?"
