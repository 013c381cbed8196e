"""`spmoe plan`: say what fits where and how fast a model will be, before anything is downloaded."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spmoe.cli.interrupts import import_engine
from spmoe.cli.options import Json, takes_shared_options_except
from spmoe.config import ONE_BY_ONE, EngineConfig, Size, drafter_name, format_bytes, parse_num_speculative_tokens
from spmoe.errors import UsageError, printable
from spmoe.files import config_directory, model_directory

if TYPE_CHECKING:
    from spmoe.engine.estimate import Case, Estimate
    from spmoe.engine.hardware import Hardware

_ROUTING_LABELS = {"even": "even routing", "recorded": "as recorded", "measured": "profile"}


@takes_shared_options_except(
    "prefetch",
    "cutoff",
    "projection",
    "eviction",
    "expert_memory",
    "pin_memory",
    "verify_experts",
    "cpu_experts",
    "residency_check",
    "enforce_eager",
    "batching",
    "overlap",
)
def plan(
    engine: dict[str, Any],
    draft: Annotated[
        str | None,
        typer.Option(
            help="Draft: a model with the same tokenizer (directory or hub id), 'ngram', 'self:int8', 'self:int4' or "
            "'none'; default: those that need no other model are compared."
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option("--num-speculative-tokens", "-k", help="Draft tokens per step; default: the best is chosen."),
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(help="Chance that a draft token is accepted, from 0 to 1; default: assumed by the kind of draft."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device: cuda (experts in host memory) or cpu (experts on disk).")
    ] = "cuda",
    device_memory: Annotated[
        str | None, typer.Option(help="Free memory of the device, such as 24GiB; default: that of the device here.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Free memory of the host, such as 64GiB; default: that of this machine.")
    ] = None,
    link_gbps: Annotated[
        float | None,
        typer.Option(help="Link speed from host to device (from the disk with --device cpu), in gigabytes per second."),
    ] = None,
    device_gbps: Annotated[
        float | None, typer.Option(help="Bandwidth of the device's memory, in gigabytes per second.")
    ] = None,
    host_gbps: Annotated[
        float | None,
        typer.Option(
            help="Bandwidth of the host's memory, which the link and experts on the CPU share, in gigabytes per second."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what fits where, the predicted time per token, its floor, what limits it, and the command to run.

    MODEL may be a hub id: only configuration files and safetensors headers are fetched. Hardware that is not given is
    measured; without a GPU a common desktop is assumed, and the output says so.
    """
    k = None if num_speculative_tokens is None else parse_num_speculative_tokens(num_speculative_tokens)
    k = None if k == "auto" else k
    if device not in ("cuda", "cpu"):
        raise UsageError(f"device must be cuda or cpu, not {device!r}")
    if device == "cpu" and device_memory is not None:
        raise UsageError("--device-memory is the memory of a CUDA device; with --device cpu give --host-memory")
    if acceptance is not None and not 0 <= acceptance <= 1:
        raise UsageError(f"--acceptance must be from 0 to 1, not {acceptance:g}")
    hardware = {
        "device_memory": _bytes("--device-memory", device_memory),
        "host_memory": _bytes("--host-memory", host_memory),
        "link_gbps": _speed("--link-gbps", link_gbps),
        "device_gbps": _speed("--device-gbps", device_gbps),
        "host_gbps": _speed("--host-gbps", host_gbps),
    }
    draft = None if draft in (None, "auto") else draft
    options = {name: engine[name] for name in ("dtype", "expert_format", "max_model_len", "load_format")}
    EngineConfig.make(model=engine["model"] or "", draft=draft, **options)  # checks the draft
    if draft is not None and drafter_name(draft)[0] == "model":
        (config_directory if engine["load_format"] == "dummy" else model_directory)(draft)

    import_engine()
    from spmoe.engine.estimate import make_estimate
    from spmoe.models.shipped import shipped_pair

    target, own_draft = shipped_pair()
    if engine["model"] is None and draft is None:
        draft = own_draft
    config = EngineConfig.make(model=engine["model"] or target, **options, **ONE_BY_ONE)  # as the command it recommends
    estimate = make_estimate(config, draft, k, acceptance, device=device, **hardware)  # type: ignore[arg-type]
    if as_json:
        print(json.dumps(estimate.to_dict()))
    else:
        for line in _lines(estimate):
            print(printable(line))


def _bytes(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    size = Size.parse(text)
    if size.bytes is None:
        raise UsageError(f"{name} must be a size such as 24GiB, not {text!r}: it is a share of nothing here")
    if size.bytes < 1024:  # the unit was forgotten
        raise UsageError(f"{name} must be a size such as 24GiB, not {text!r}, which is {format_bytes(size.bytes)}")
    return size.bytes


def _speed(name: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise UsageError(f"{name} must be a speed above 0 in gigabytes per second, not {value:g}")
    return value


def _lines(estimate: Estimate) -> list[str]:
    """Return the output for people."""
    rows: list[tuple[str, str]] = []
    size = f"{estimate.parameters / 1e9:.1f} B" if estimate.parameters >= 1e9 else f"{estimate.parameters / 1e6:.1f} M"
    rows.append(("model", f"{estimate.model} ({estimate.architecture}, {size} parameters, {estimate.dtype})"))
    each = f"{estimate.experts_per_layer} experts of {format_bytes(estimate.expert_bytes)}"
    lossy = "" if estimate.lossless else " (lossless: no)"
    in_format = "" if estimate.expert_format == estimate.dtype else f" in {estimate.expert_format}{lossy}"
    rows.append(("", f"{estimate.layers} layers of {each}{in_format}, {estimate.top_k} per token"))
    if estimate.weights == "random":
        rows.append(("", "random weights (--load-format dummy): routing is nearly uniform"))
    if estimate.download_bytes:
        rows.append(("", f"{estimate.download_bytes / 1e9:.1f} GB to download; nothing was downloaded now"))
    rows += _hardware_rows(estimate.hardware)
    if (best := estimate.best) is not None:
        rows += _memory_rows(estimate, best)
    else:
        rows += [("problem", f"does not fit: {case.problem}") for case in estimate.cases[:1]]
    lines = _wrapped(rows)
    if best is not None:
        lines += ["", *_time_table(estimate, best)]
    lines += _wrapped(_closing(estimate))
    if estimate.command is not None:
        short = estimate.host_missing or estimate.disk_missing
        lines += ["", "recommended, once it fits:" if short else "recommended:", f"  {estimate.command}"]
    return lines


def _wrapped(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return lines of at most 100 columns: a name and a text, which goes on below itself."""
    return [
        f"{'' if number else name:<12}{part}"
        for name, text in rows
        for number, part in enumerate(wrap(text, 88, break_long_words=False, break_on_hyphens=False))
    ]


def _hardware_rows(hardware: Hardware) -> list[tuple[str, str]]:
    sources = hardware.sources
    link = "disk" if hardware.device == "cpu" else "link"
    values = {
        "device_memory": f"{format_bytes(hardware.device_memory)} device memory",
        "host_memory": f"{format_bytes(hardware.host_memory)} host memory",
        "link_gbps": f"{link} {hardware.link_gbps:.4g} GB/s",
        "device_gbps": f"memory bandwidth {hardware.device_gbps:.4g} GB/s",
        "host_gbps": f"host memory bandwidth {hardware.host_gbps:.4g} GB/s",
    }
    if hardware.device == "cpu":
        del values["device_memory"], values["host_gbps"]
    here = hardware.device_name or "no CUDA device here"
    rows = [("hardware", f"{here}")]
    for source in ("given", "measured", "assumed"):
        if texts := [text for name, text in values.items() if sources[name] == source]:
            rows.append(("", f"{source}: {', '.join(texts)}"))
    if "assumed" in (sources[name] for name in values):
        flags = [f"--{name.replace('_', '-')}" for name in values if sources[name] == "assumed"]
        rows.append(("", f"(set {', '.join(flags)})"))
    return rows


def _memory_rows(estimate: Estimate, case: Case) -> list[tuple[str, str]]:
    memory, hardware = case.memory, estimate.hardware
    assert memory is not None
    draft = memory.resident - estimate.dense_bytes
    slots_bytes = memory.slots * memory.slot_bytes
    share = 100 * slots_bytes / estimate.all_experts_bytes
    total = memory.resident + memory.kv + memory.workspace + slots_bytes
    parts = [f"{format_bytes(estimate.dense_bytes)} weights without experts"]
    if draft > 0:
        parts.append(f"{format_bytes(draft)} draft {case.draft}")
    parts.append(f"{format_bytes(memory.kv)} KV caches for {memory.kv_positions} tokens")
    if memory.workspace:
        parts.append(f"{format_bytes(memory.workspace)} workspace")
    count = memory.slots * estimate.all_experts_bytes // slots_bytes if slots_bytes else 0
    parts.append(f"{format_bytes(slots_bytes)} expert slots: {memory.slots} of {count} experts ({share:.0f}%)")
    room = memory.limit if memory.limit is not None else hardware.device_memory
    rows = [("device" if hardware.device == "cuda" else "memory", f"{format_bytes(total)} of {format_bytes(room)}:")]
    rows += [("", f"  {part}") for part in parts]
    experts = format_bytes(estimate.all_experts_bytes)
    if hardware.device == "cpu":
        missing = f", {format_bytes(estimate.disk_missing)} more than is free" if estimate.disk_missing else ""
        return [*rows, ("disk", f"{experts} expert file{missing}")]
    fits = f"does not fit, {format_bytes(estimate.host_missing)} missing" if estimate.host_missing else "fits"
    rows.append(("host", f"{experts} for all experts: {fits}"))
    if memory.cpu_copies:
        rows.append(("", f"up to {format_bytes(memory.cpu_copies)} for copies with --cpu-experts"))
    return rows


def _time_table(estimate: Estimate, best: Case) -> list[str]:
    """Return the table of times per token."""
    names = list(dict.fromkeys(name for case in estimate.cases for name in case.times))
    labels = ["none" if case.draft is None else _short(case.draft) for case in estimate.cases]
    width = max(6, *map(len, labels))
    lines = ["predicted ms per token (floor) and hit rate, by assumption about routing:"]
    heads = "".join(f"{_ROUTING_LABELS[name]:<23}" for name in names)
    lines.append(f"  {'draft':<{width}}   K  tokens/step  {heads}limited by")
    for label, case in zip(labels, estimate.cases, strict=True):
        if case.memory is None:
            lines.append(f"  {label:<{width}}   -            -  does not fit on the device")
            continue
        cells = ""
        for name in names:
            text = "-"
            if (time := case.times.get(name)) is not None:
                text = f"{_ms(time.seconds)} ({_ms(time.floor_seconds)}) {100 * time.hit_rate:.0f}%"
            cells += f"{text:<23}"
        tokens = f"{case.tokens_per_step:>11.2f}"
        lines.append(f"  {label:<{width}}  {case.num_speculative_tokens:>2}  {tokens}  {cells}{case.likely.limit}")
    path = "from disk" if estimate.hardware.device == "cpu" else "over the link"
    moved, read = best.likely.link_bytes / 1e9, best.likely.device_bytes / 1e9
    label = labels[estimate.cases.index(best)]
    lines.append(f"  best: draft {label}; {moved:.3g} GB {path} and {read:.3g} GB of memory read per token")
    return lines


def _closing(estimate: Estimate) -> list[tuple[str, str]]:
    """Return notes and advice."""
    rows = []
    if any("measured" in case.times for case in estimate.cases):
        rows.append(("note", "profile: times that earlier runs of this model measured on this machine"))
    if any("even" in case.times for case in estimate.cases):
        assumed = "routing and acceptance are assumed (docs/planning.md); `spmoe bench` measures them"
        rows.append(("note", assumed))
    if estimate.hardware.device == "cpu" and not any("measured" in case.times for case in estimate.cases):
        rows.append(("note", "compute is taken at the memory's speed, which a CPU does not reach: a lower bound"))
    return rows + [("advice", text) for text in estimate.advice]


def _ms(seconds: float) -> str:
    """Format a time in milliseconds with three digits, never in scientific notation."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.1 else f"{value:.3f}"


def _short(draft: str) -> str:
    return draft if len(draft) <= 28 else f"...{draft[-25:]}"
