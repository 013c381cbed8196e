"""`spmoe cache`: list, verify and delete converted experts, quantized drafts, profiles and projections."""

from __future__ import annotations

import difflib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spmoe.cli.options import Json, stderr
from spmoe.cli.output import Console, is_quiet
from spmoe.config import format_bytes, home
from spmoe.errors import SpmoeError, UsageError
from spmoe.system.cache import PRUNABLE, CacheEntry, Kind, delete, linked_folders, list_cache

cache = typer.Typer(
    name="cache", help="List, verify and delete converted experts, quantized drafts, profiles and projections."
)

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_EXPERT_KINDS = (Kind.EXPERTS, Kind.QUANTIZED_DRAFT)
_HOUR = 3600
_UNITS = {"h": _HOUR, "d": 24 * _HOUR, "w": 7 * 24 * _HOUR}


@cache.callback(invoke_without_command=True)
def options(context: typer.Context) -> None:
    """List, verify and delete converted experts, quantized drafts, profiles and projections."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@cache.command("ls", short_help="List cached files, with what they belong to.")
def list_files(as_json: Json = False) -> None:
    """List cached files with size, last use, state and the model that they belong to.

    Files that are stale, damaged or left by a killed process, or whose model is gone, can be pruned.
    """
    entries = _entries()
    prunable = [entry for entry in entries if entry.state in PRUNABLE]
    if as_json:
        print(
            json.dumps(
                {
                    "home": str(home()),
                    "bytes": _total(entries),
                    "prunable_bytes": _total(prunable),
                    "entries": [entry.to_dict() for entry in entries],
                }
            )
        )
        return
    console = _console()
    if entries:
        console.print(_table(entries))
    console.print(f"{_count(entries)} in {home()}", soft_wrap=True)
    if prunable:
        console.print(f"{_count(prunable)} can be deleted with `spmoe cache prune`", soft_wrap=True)


@cache.command("rm", short_help="Delete cached files.")
def remove(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Names as `spmoe cache ls` shows them, or models (all their files)."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete every cached file.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete cached files; they are made again when they are needed. Files that a running process uses are kept.

    The exit code is 1 if a file was kept.
    """
    if bool(names) == everything:
        raise UsageError("give the names of cached files, or --all for every one; `spmoe cache ls` lists them")
    entries = _entries()
    chosen = entries if everything else _select(entries, names or [])
    _confirm(chosen, yes, lambda entry: str(entry.kind))
    if _delete(chosen, as_json):
        raise typer.Exit(1)


@cache.command("prune", short_help="Delete cached files that are of no use any more.")
def prune(
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Also delete files that were not used for so long, such as 12h, 30d or 2w."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete leftovers of killed processes, damaged files, files of older formats, and files whose model is gone
    or has changed. Files that a running process uses are kept.
    """
    before = None if older_than is None else time.time() - _parse_age(older_than)

    def reason(entry: CacheEntry) -> str:
        return str(entry.state) if entry.state in PRUNABLE else f"not used for {_age(entry.last_used)}"

    chosen = [
        entry for entry in _entries() if entry.state in PRUNABLE or (before is not None and entry.last_used < before)
    ]
    if dry_run:
        if as_json:
            print(json.dumps({"deleted": [], "kept": [], "would_delete": [entry.to_dict() for entry in chosen]}))
        else:
            _show(chosen, reason, _console())
            _console().print(f"{_count(chosen)} would be deleted", soft_wrap=True)
        return
    _confirm(chosen, yes, reason)
    _delete(chosen, as_json)


@cache.command("verify", short_help="Read cached experts whole, and compare them with their checksums.")
def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Names as `spmoe cache ls` shows them, or models; default: all."),
    ] = None,
    against_model: Annotated[
        bool,
        typer.Option("--against-model", help="Also convert every expert of the model again, and compare the results."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Read cached experts whole, and compare every one with its checksum. Nothing is changed.

    A run compares an expert when it first reads it, and notices changed models by samples of their weights;
    --against-model compares all weights. The exit code is 1 if a file is damaged or differs from its model.
    """
    entries = _entries()
    chosen = [one for one in (_select(entries, names) if names else entries) if one.kind in _EXPERT_KINDS]
    if names and not chosen:
        raise UsageError(f"{names[0]} has no cached experts; `spmoe cache ls` lists all files and their kinds")
    results = [_verify(entry, against_model) for entry in chosen]
    sound = not any(one["problem"] for one in results)
    if as_json:
        print(json.dumps({"sound": sound, "entries": results}))
    else:
        for one in results:
            compared = "" if one["differing"] is None else ", and equal to its model"
            _console().print(f"{one['name']}  {one['problem'] or f'sound{compared}'}", soft_wrap=True)
        _console().print(f"{_count(chosen)} verified", soft_wrap=True)
        if not sound:
            _console().print("delete files with a problem with `spmoe cache rm NAME`; the next run writes them again")
    if not sound:
        raise typer.Exit(1)


def _verify(entry: CacheEntry, against_model: bool) -> dict[str, Any]:
    """Verify one expert file; `problem` of the result is None if it is sound."""
    from spmoe.experts.store import ExpertFile, damaged_experts  # torch takes seconds to import
    from spmoe.models.loaded import compare_with_checkpoint
    from spmoe.observe.progress import progress_bar

    damaged: list[Any] = []
    differing: list[Any] | None = None
    problem = None
    try:
        file = ExpertFile.open(entry.path)
        try:
            with progress_bar(f"Reading {entry.name}", not is_quiet()) as report:
                damaged = damaged_experts(file, report)
            if against_model and entry.kind is Kind.EXPERTS:
                with progress_bar(f"Converting {entry.belongs_to} again", not is_quiet()) as report:
                    differing = compare_with_checkpoint(file, report)
        finally:
            file.close()
    except SpmoeError as error:
        problem = str(error)
    for found, what in ((differing, "differs from its model"), (damaged, "is damaged")):
        if found:
            layer, expert = found[0]
            problem = f"{what}: expert {expert} of layer {layer}"
            problem += f" and {len(found) - 1} more" if len(found) > 1 else ""
    return {**entry.to_dict(), "problem": problem, "damaged": damaged, "differing": differing}


# ---- selection


def _entries() -> list[CacheEntry]:
    try:
        for folder in linked_folders():
            stderr().print(f"note: {folder} is a symbolic link and is not followed", soft_wrap=True)
        return list_cache()
    except OSError as error:
        raise UsageError(
            f"cannot read {error.filename or home()} ({error.strerror}); check SPMOE_HOME and its permissions"
        ) from error


def _select(entries: Sequence[CacheEntry], names: Sequence[str]) -> list[CacheEntry]:
    """Return the entries of these names, file names or models; raise UsageError for a name that has none."""
    chosen: dict[Path, CacheEntry] = {}
    for name in names:
        found = [entry for entry in entries if name in (entry.name, entry.path.name, str(entry.path))]
        found = found or [entry for entry in entries if _is_model(entry, name)]
        if not found:
            known = {entry.name for entry in entries} | {one.name for entry in entries for one in entry.origins}
            close = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"did you mean {close[0]}?" if close else "`spmoe cache ls` lists all names"
            raise UsageError(f"the cache has no file and no model called {name!r}; {hint}")
        chosen |= {entry.path: entry for entry in found}
    return list(chosen.values())


def _is_model(entry: CacheEntry, name: str) -> bool:
    """Return whether a cached file was made from a model, given by hub id or directory."""
    if not name or not entry.origins:
        return False
    path = Path(name).expanduser()
    resolved = str(path.resolve()) if path.is_dir() else name.rstrip("/")
    return any(one.name in (name, resolved) for one in entry.origins)


def _parse_age(text: str) -> float:
    """Read `12h`, `30d` or `2w` as seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text.strip().lower())
    if match is None:
        raise UsageError(f"--older-than must be an age such as 12h, 30d or 2w, not {text!r}")
    return float(match[1]) * _UNITS[match[2]]


# ---- output


def _confirm(entries: Sequence[CacheEntry], yes: bool, reason: Callable[[CacheEntry], str]) -> None:
    """Show what will be deleted and ask, unless `yes`; leave with exit code 1 if the answer is no."""
    if yes or not entries:
        return
    if not _asks():
        raise UsageError(f"deleting {_count(entries)} needs a confirmation; pass --yes")
    _show(entries, reason, stderr())
    try:
        if typer.confirm(f"Delete {_count(entries)}?", err=True):
            return
    except typer.Abort:  # Ctrl-C or Ctrl-D
        stderr().print()
    stderr().print("nothing was deleted")
    raise typer.Exit(1)


def _asks() -> bool:
    """Return whether there is a terminal to ask at."""
    return sys.stdin is not None and sys.stdin.isatty()


def _delete(entries: Sequence[CacheEntry], as_json: bool) -> int:
    """Delete files and report it, also after Ctrl-C; return the number of files that were kept."""
    deleted: list[CacheEntry] = []
    kept: list[tuple[CacheEntry, str]] = []
    try:
        for entry in entries:
            if (reason := delete(entry)) is None:
                deleted.append(entry)
            else:
                kept.append((entry, reason))
                stderr().print(f"kept {entry.name}: {reason}", soft_wrap=True)
    finally:
        if as_json:
            kept_dicts: list[dict[str, Any]] = [{**entry.to_dict(), "reason": reason} for entry, reason in kept]
            result = {"deleted": [entry.to_dict() for entry in deleted], "kept": kept_dicts}
            print(json.dumps({**result, "deleted_bytes": _total(deleted)}))
        else:
            _console().print(f"deleted {_count(deleted)}", soft_wrap=True)
    return len(kept)


def _show(entries: Sequence[CacheEntry], reason: Callable[[CacheEntry], str], console: Console) -> None:
    for entry in entries:
        console.print(f"{entry.name}  {format_bytes(entry.nbytes)}  {reason(entry)}", soft_wrap=True)


def _table(entries: Sequence[CacheEntry]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "kind", "size", "last used", "state", "belongs to"):
        wide = heading in ("name", "belongs to")  # wrapped, not cut, so that they can be copied
        table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold", no_wrap=not wide)
    for entry in entries:
        used = time.strftime("%Y-%m-%d", time.localtime(entry.last_used))
        size = format_bytes(entry.nbytes)
        table.add_row(entry.name, str(entry.kind), size, used, str(entry.state), entry.belongs_to)
    return table


def _console() -> Console:
    """Return a console on standard output; without a terminal, lines are not wrapped."""
    width = None if sys.stdout.isatty() else 10_000
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _count(entries: Sequence[CacheEntry]) -> str:
    return f"{len(entries)} file{'' if len(entries) == 1 else 's'} ({format_bytes(_total(entries))})"


def _total(entries: Iterable[CacheEntry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _age(then: float) -> str:
    hours = (time.time() - then) / _HOUR
    return f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:.0f} days"
