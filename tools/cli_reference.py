"""Write docs/cli.md, the reference of the command line, from the typer application itself.

    python tools/cli_reference.py            # write the page
    python tools/cli_reference.py --check    # exit with 1 if the page is not up to date

Options that several commands declare alike are described once, at the top of the page.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer.main

from spmoe.cli.main import app
from spmoe.cli.panels import PANELS

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
COMMON_FROM = 3  # an option that so many commands declare alike is a common option

INTRODUCTION = """\
# Command line

`spmoe COMMAND --help` prints the same text as this page. `tools/cli_reference.py` generates the
page from the code; do not edit it.

Results go to standard output, progress and notices to standard error. Exit codes: 0 success,
1 failure, 2 wrong usage. Ctrl-C stops a generation after the current step and keeps its text.

Options may also come [from a file or the environment](configuration.md).
`spmoe --install-completion` installs completion for the current shell.

| environment variable | meaning |
| --- | --- |
| `SPMOE_<OPTION>` | an option of any command, such as `SPMOE_EXPERT_MEMORY=8GiB` |
| `SPMOE_CONFIG` | a TOML file with options |
| `SPMOE_HOME` | cache of expert files, profiles and projections; default `~/.cache/spmoe` |
| `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` | as in every Hugging Face tool |
| `OMP_NUM_THREADS` | PyTorch's threads on a CPU; default: the fastest number, measured once per model |
| `SPMOE_DEBUG` | set to 1 for debug messages and tracebacks |
"""


class Option(NamedTuple):
    """One option or argument, as a table row."""

    names: str
    default: str
    help: str
    panel: str = ""

    def row(self) -> str:
        """Return the Markdown row."""
        return f"| {self.names} | {self.default} | {self.help} |"


def option_of(parameter: Any) -> Option:
    """Read one parameter of a command."""
    help_text = " ".join((parameter.help or "").split()).replace("\\[", "[").replace("|", "\\|")
    default = parameter.default() if callable(parameter.default) else parameter.default
    if parameter.param_type_name == "argument":
        shown = "required" if parameter.required else ""
        return Option(f"`{parameter.metavar or parameter.name.upper()}`", shown, help_text)
    names = sorted(parameter.opts, key=len) + list(parameter.secondary_opts)
    if parameter.required:
        shown = "required"
    elif isinstance(default, bool):
        shown = ("on" if default else "off") if parameter.secondary_opts else ""
    else:
        shown = "" if default is None or default == () or default == [] else f"`{default}`"
    return Option(", ".join(f"`{name}`" for name in names), shown, help_text, parameter.rich_help_panel)


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name, subcommands included."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", one) for inner, one in command.commands.items())
        else:
            yield name, command


def options_of(command: Any) -> list[Option]:
    """Return a command's arguments and options, without --help."""
    return [option_of(parameter) for parameter in command.params if "--help" not in parameter.opts]


def table(options: list[Option]) -> str:
    """Return the Markdown table of some options."""
    return "\n".join(["| option | default | meaning |", "| --- | --- | --- |", *(option.row() for option in options)])


def render() -> str:
    """Return the whole page."""
    found = dict(commands())
    counts = Counter(option for command in found.values() for option in options_of(command))
    common = [option for option in counts if counts[option] >= COMMON_FROM]
    parts = [INTRODUCTION, "## Common options\n", "Each command lists which of them it takes.\n"]
    for panel in ("", *PANELS):
        if inside := [option for option in common if option.panel == panel]:
            parts += [f"### {panel}\n"] * bool(panel) + [table(inside) + "\n"]
    for name, command in found.items():
        options = options_of(command)
        own = [option for option in options if option not in common]
        shared = [option.names.split(", ")[0] for option in options if option in common]
        parts.append(f"## spmoe {name}\n")
        text = (command.help or "").replace("\\[", "[")  # brackets are escaped in help texts
        parts += [textwrap.fill(paragraph, 100) + "\n" for paragraph in paragraphs(text)]
        if own:
            parts.append(table(own) + "\n")
        if shared:
            parts.append(textwrap.fill(f"Common options: {', '.join(shared)}.", 100, break_on_hyphens=False) + "\n")
    return "\n".join(parts).rstrip() + "\n"


def paragraphs(text: str) -> list[str]:
    """Split a docstring into paragraphs without line breaks."""
    return [" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n") if paragraph.strip()]


def main() -> None:
    """Write the page, or check it."""
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text() != render():
            sys.exit("docs/cli.md is not up to date; run python tools/cli_reference.py")
    else:
        PAGE.write_text(render())


if __name__ == "__main__":
    main()
