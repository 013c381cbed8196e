"""`spmoe info`: what a model is, what would be resident, and how deep prefetching would go."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from spmoe.cli.options import Json, load, stderr, takes_shared_options
from spmoe.config import EngineConfig, format_bytes

if TYPE_CHECKING:
    from spmoe.engine.plan import Plan


@takes_shared_options
def info(
    engine: dict[str, Any],
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the pair and measure the profile, if it was not yet.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a model is, the division of the memory, the profile and the cutoff. Loads no weights."""
    from spmoe.engine.llm import with_default_pair
    from spmoe.engine.plan import make_plan
    from spmoe.engine.threads import threads_for

    engine = with_default_pair(engine)
    if measure:
        with load(engine, progress=not as_json):
            pass
    with threads_for(engine["model"]):  # which a profile depends on
        plan = make_plan(EngineConfig.make(**engine))
    if as_json:
        print(json.dumps(plan.to_dict()))
        return
    if plan.emulated_link_gbps is not None:
        note = f"note: emulated link of {plan.emulated_link_gbps:g} GB/s; times are not this machine's own"
        stderr().print(note, soft_wrap=True)
    Console(highlight=False, markup=False, emoji=False).print(_table(plan))


def _table(plan: Plan) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")  # paths are there to be copied
    millions = plan.parameters / 1e6
    size = f"{millions:.1f} M" if millions < 1000 else f"{millions / 1000:.1f} B"
    table.add_row("model", f"{plan.model} ({plan.architecture}, {size} parameters, {plan.dtype})")
    experts = f"{plan.experts_per_layer} experts, {plan.top_k} per token"
    table.add_row("layers", f"{plan.decoder_layers}, {plan.moe_layers} of them with {experts}")
    table.add_row("context", f"{plan.context} tokens, {format_bytes(plan.kv_bytes_per_token)} of KV cache each")
    share = plan.slots_bytes / plan.all_experts_bytes
    table.add_row("experts", f"{format_bytes(plan.all_experts_bytes)}, {format_bytes(plan.expert_bytes)} each")
    if plan.device == "cpu":
        table.add_row("expert file", f"{plan.expert_file} ({'built' if plan.expert_file_built else 'not built yet'})")
    else:
        table.add_row("expert store", "pinned host memory, filled when the model is loaded")
    table.add_row("", "")
    table.add_row("device", plan.device)
    table.add_row("resident", f"{format_bytes(plan.resident_bytes)} target without experts")
    if plan.draft is not None:
        table.add_row("", f"{format_bytes(plan.draft_bytes)} draft {plan.draft} ({plan.draft_architecture})")
    table.add_row(
        "", f"{format_bytes(plan.slots_bytes)} expert slots ({plan.slots} slots, {100 * share:.0f}% of experts)"
    )
    table.add_row("", f"{format_bytes(plan.kv_bytes)} KV caches for {plan.planned_context} tokens")
    if plan.workspace_bytes:
        table.add_row("", f"{format_bytes(plan.workspace_bytes)} workspace")
    total = plan.resident_bytes + plan.draft_bytes + plan.slots_bytes + plan.kv_bytes + plan.workspace_bytes
    limit = "" if plan.device_memory_limit is None else f" of {format_bytes(plan.device_memory_limit)} allowed"
    table.add_row("", f"{format_bytes(total)} in all{limit}")
    table.add_row("", "")
    table.add_row("draft tokens", str(plan.num_speculative_tokens))
    table.add_row("prefetch", plan.prefetch)
    if plan.predictor is not None:
        table.add_row("predictor", f"fitted maps in {plan.predictor}")
    if plan.emulated_link_gbps is not None:
        table.add_row("link", f"emulated link, {plan.emulated_link_gbps:g} GB/s")
    if plan.profile is not None:
        link = "emulated link" if plan.emulated_link_gbps is not None else "store to slot"
        learnt = plan.profile.missing_per_layer
        missing = "" if learnt is None else f", {learnt:.1f} experts missing per layer"
        table.add_row(
            "profile",
            f"draft {1e3 * plan.profile.draft_seconds_per_layer:.3f} ms per layer, "
            f"verify {1e3 * plan.profile.verify_seconds_per_layer:.3f} ms per layer, "
            f"{1e3 * plan.profile.seconds_per_expert:.3f} ms per expert ({link}), {plan.profile.free_slots} free slots"
            f"{missing}",
        )
    if plan.prefetch == "draft-gate":
        known = f"{plan.cutoff_layers} of {plan.moe_layers} layers" if plan.cutoff_layers is not None else "not known"
        hint = "" if plan.cutoff_layers is not None else "; run the model once, or add --measure"
        table.add_row("cutoff", f"{plan.cutoff}: {known}{hint}")
    return table
