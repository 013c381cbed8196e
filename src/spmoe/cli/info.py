"""`spmoe info`: show a model, how the memory is divided and how far prefetching goes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from spmoe.cli.interrupts import import_engine
from spmoe.cli.options import EMULATED_LINK_NOTE, Json, load, stderr, takes_shared_options
from spmoe.cli.output import Console
from spmoe.config import EngineConfig, format_bytes

if TYPE_CHECKING:
    from spmoe.engine.plan import Plan


@takes_shared_options
def info(
    engine: dict[str, Any],
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the models and measure the profile, if it is not measured yet.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a model, the division of memory, the profile and the cutoff. Loads no weights without --measure."""
    import_engine()
    from spmoe.engine.llm import with_default_pair
    from spmoe.engine.plan import make_plan

    engine = with_default_pair(engine)
    if measure:
        with load(engine, progress=not as_json):
            pass
    plan = make_plan(EngineConfig.make(**engine))
    if as_json:
        print(json.dumps(plan.to_dict()))
        return
    notes = list(plan.prefetch.notices) if not measure else []  # `load` has printed them
    if plan.emulated_link_gbps is not None:
        notes.insert(0, EMULATED_LINK_NOTE.format(plan.emulated_link_gbps))
    for note in notes:
        stderr().print(f"note: {note}", soft_wrap=True)
    console = Console(highlight=False, markup=False, emoji=False)
    (console.print if console.is_terminal else console.print_whole)(_table(plan))  # a pipe gets whole paths


def _table(plan: Plan) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")  # paths are wrapped, not cut, so that they can be copied
    target, draft, memory = plan.target, plan.draft, plan.memory
    millions = target.parameters / 1e6
    size = f"{millions:.1f} M" if millions < 1000 else f"{millions / 1000:.1f} B"
    table.add_row("model", f"{target.name} ({target.architecture}, {size} parameters, {target.dtype})")
    if target.weights == "random":
        table.add_row("weights", "random (--load-format dummy); routing is nearly uniform")
    if target.download_bytes:
        table.add_row("download", f"{target.download_bytes / 1e9:.1f} GB at the first run; nothing was downloaded now")
    experts = f"{target.experts_per_layer} experts, {target.top_k} per token"
    table.add_row("layers", f"{target.decoder_layers}, {target.moe_layers} of them with {experts}")
    kv = f"{format_bytes(target.kv_bytes_per_token)} of KV cache per token"
    table.add_row("context", f"{target.max_length} tokens, {kv}")
    sizes = f"{format_bytes(target.all_experts_bytes)}, {format_bytes(target.expert_bytes)} each"
    table.add_row("experts", f"{sizes}, {target.expert_format}{'' if target.lossless else ' (lossless: no)'}")
    if plan.device == "cpu" and target.weights == "random":
        table.add_row("expert store", "host memory, filled when the model is loaded")
    elif target.experts_in_place:
        table.add_row("expert store", "the checkpoint's own files; nothing is written")
    elif plan.device == "cpu":
        state = "exists" if target.expert_file_exists else "written at the first run"
        table.add_row("expert file", f"{target.expert_file} ({state})")
    else:
        table.add_row("expert store", "pinned host memory, filled when the model is loaded")
    table.add_row("", "")
    table.add_row("device", plan.device)
    table.add_row("memory", f"{format_bytes(target.resident_bytes)} target without experts")
    if draft is not None:
        table.add_row("", f"{format_bytes(draft.resident_bytes)} draft {draft.name} ({draft.architecture})")
    slots_bytes = memory.slots * memory.slot_bytes
    share = slots_bytes / target.all_experts_bytes
    slots = f"{format_bytes(slots_bytes)} expert slots ({memory.slots} slots, {100 * share:.0f}% of experts)"
    table.add_row("", slots)
    table.add_row("", f"{format_bytes(memory.kv)} KV caches for {memory.kv_positions} tokens")
    if memory.workspace:
        table.add_row("", f"{format_bytes(memory.workspace)} workspace")
    limit = "" if memory.limit is None else f", limit {format_bytes(memory.limit)}"
    table.add_row("", f"{format_bytes(memory.resident + slots_bytes + memory.kv + memory.workspace)} total{limit}")
    if memory.cpu_copies:
        table.add_row("", f"up to {format_bytes(memory.cpu_copies)} of host memory for copies of experts on the CPU")
    table.add_row("", "")
    table.add_row("draft tokens", "0" if draft is None else f"{draft.num_speculative_tokens} per step")
    table.add_row("prefetch", plan.prefetch.policy)
    if draft is not None and draft.projection_file is not None:
        table.add_row("projection", f"fitted, {draft.projection_file}")
    link = "store to slot"
    if plan.emulated_link_gbps is not None:
        link = "emulated link"
        table.add_row("link", f"emulated link, {plan.emulated_link_gbps:g} GB/s")
    if (profile := plan.prefetch.profile) is not None:
        missing = profile.missing_per_layer
        table.add_row(
            "profile",
            f"draft {1e3 * profile.draft_seconds_per_layer:.3f} ms per layer, "
            f"verify {1e3 * profile.verify_seconds_per_layer:.3f} ms per layer, "
            f"{1e3 * profile.seconds_per_expert:.3f} ms per expert ({link}), {profile.free_slots} free slots"
            + ("" if missing is None else f", {missing:.1f} experts missing per layer"),
        )
    if plan.prefetch.cutoff is not None:
        layers = plan.prefetch.cutoff_layers
        known = f"{layers} of {target.moe_layers} layers" if layers is not None else "not measured yet"
        hint = "" if layers is not None else "; run the model once, or add --measure"
        table.add_row("cutoff", f"{plan.prefetch.cutoff}: {known}{hint}")
    return table
