"""Facts about the machine and workload of results, as text; facts that older files lack are left out or "-"."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from spmoe.bench.comparison import milliseconds
from spmoe.bench.labels import Row, expert_format, model_name
from spmoe.config import format_bytes


def measured(machines: Sequence[Row]) -> str:
    """Return when, on what and with what the results were measured, as far as they say it."""
    dates = sorted({format_date(machine["date"]) for machine in machines if machine.get("date")})
    first = machines[0]
    when = f"{dates[0]} to {dates[-1]}, " if len(dates) > 1 else f"{dates[0]}, " if dates else ""
    cores, memory = format_cores(first), format_host_memory(first)
    parts = [f"{when}{first['processor']}", *([cores] if cores else []), *([memory] if memory else [])]
    versions = f"spmoe {first['spmoe']}, torch {first['torch']}, transformers {first['transformers']}"
    commit = f", commit {str(first['commit'])[:12]}" if first["commit"] else ""
    return f"{', '.join(parts)}; {versions}{commit}."


def describe_machine(machine: Row) -> dict[str, str]:
    """Return the facts of a machine record by name, in display order."""
    memory = machine["device_memory_bytes"]
    versions = f"spmoe {machine['spmoe']}, torch {machine['torch']}, transformers {machine['transformers']}"
    cores, threads = format_cores(machine), machine.get("threads")
    return {
        "date": format_date(machine["date"]) if machine.get("date") else "-",
        "device": str(machine["device"]) + (f", {format_bytes(memory)}" if memory else ""),
        "driver": str(machine["driver"] or "-"),
        "processor": str(machine["processor"]),
        "cores": (cores or "-") + (f", {threads} thread{'s' * (threads != 1)} per operation" if threads else ""),
        "host memory": format_host_memory(machine) or "-",
        "system": str(machine["platform"]),
        "versions": f"{versions}, Python {machine['python']}",
        "commit": str(machine["commit"] or "-"),
        "model": model_name(machine),
        "weights": str(machine.get("weights_note") or "those of the checkpoint"),
        "experts": f"{machine['experts']} in {machine['layers']} layers, top {machine['top_k']}, "
        f"{format_bytes(machine['expert_bytes'])} each, {expert_format(machine) or machine['dtype']}",
        "link bandwidth": f"{machine['link_bytes_per_second'] / 1e9:.3g} GB/s ({machine['link_source']})",
        "memory bandwidth": f"{machine['memory_bytes_per_second'] / 1e9:.3g} GB/s",
        "reading the weights of one row": milliseconds(machine["active_read_seconds"]),
        "reading the draft's weights": milliseconds(machine["draft_read_seconds"]),
        "prompts": f"{machine['prompts']} ({machine.get('prompt_set')}, {machine.get('prompt_format')}), "
        f"{machine['repeat']} repeats after {machine['warmup']} warm-up runs, {machine['output_len']} output tokens",
    }


def describe_link(machine: Row) -> str:
    """Return the link with its rate; an emulated one is called so."""
    rate = f"{machine['link_bytes_per_second'] / 1e9:.3g} GB/s"
    return f"emulated link of {rate}" if machine["link_source"] == "emulated" else f"link of {rate}"


def format_date(text: str) -> str:
    """Return an ISO date as "2026-11-16 10:34 UTC"; any other text as it is."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError):
        return text


def format_cores(machine: Row) -> str:
    """Return the number of cores of a machine record; empty if it is not recorded."""
    cores, usable = machine.get("cores"), machine.get("usable_cores")
    if not cores:
        return ""
    return f"{cores} cores" if usable in (None, cores) else f"{usable} of {cores} cores"


def format_host_memory(machine: Row) -> str:
    """Return the host memory of a machine record; empty if it is not recorded."""
    return f"{format_bytes(machine['memory_bytes'])} RAM" if machine.get("memory_bytes") else ""
