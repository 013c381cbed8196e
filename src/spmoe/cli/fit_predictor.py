"""`spmoe fit-predictor`: fit a projection of a draft's hidden states to the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from spmoe.cli.interrupts import import_engine
from spmoe.cli.options import Json, load, read_text_file, require_draft_model, takes_shared_options_except
from spmoe.cli.output import Console, is_quiet

if TYPE_CHECKING:
    from spmoe.bench.fit_predictor import Fit


@takes_shared_options_except(  # nothing is fetched ahead, or sampled
    "prefetch", "cutoff", "overlap", "projection", "generation_config", "load_format"
)
def fit_predictor(
    engine: dict[str, Any],
    text: Annotated[Path, typer.Option(help="Text file to fit on, similar to the text that the model will generate.")],
    windows: Annotated[int, typer.Option(min=2, help="Number of windows of the text; every fifth is held out.")] = 64,
    window: Annotated[int, typer.Option(min=16, help="Tokens per window.")] = 256,
    as_json: Json = False,
) -> None:
    """Fit a projection of a draft's hidden states, so that the target's gates can predict experts from them.

    It is stored for this pair. Every command then uses it, unless --no-projection is given.
    """
    words = read_text_file(text)
    require_draft_model(engine)
    import_engine()
    from spmoe.bench.fit_predictor import fit_predictor as fit
    from spmoe.models.predictors import write_predictor
    from spmoe.observe.progress import progress_bar

    with (
        load({**engine, "prefetch": "on-demand", "projection": False}) as llm,
        progress_bar("Fitting", not is_quiet()) as report,
    ):
        result = fit(llm.engine, words, window, windows, report)
        draft = llm.engine.parts.draft_checkpoint
        assert draft is not None  # else `fit` raised UsageError
        facts = {"model": llm.engine.config.model, "draft": draft.name, "text": str(text), **result.to_dict()}
        path = write_predictor(llm.engine.parts.models.checkpoint, draft, result.projection, facts)
    if as_json:
        print(json.dumps({"file": str(path), **result.to_dict()}))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_table(result))
    console.print(f"fitted on {result.tokens} tokens; written to {path}", soft_wrap=True)


def _table(fit: Fit) -> Table:
    title = f"recall of used experts on {fit.held_out} held-out tokens, in %"
    table = Table("layer", "before", "after", "ridge", title=title, title_justify="left", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    before = [layer.before for layer in fit.layers if layer.before is not None]
    for number, layer in enumerate(fit.layers):
        ridge = "unchanged" if layer.ridge is None else f"{layer.ridge:g}"
        table.add_row(str(number), _percent(layer.before), _percent(layer.after), ridge)
    after = sum(layer.after for layer in fit.layers) / len(fit.layers)
    table.add_row("mean", _percent(sum(before) / len(before) if before else None), _percent(after), "")
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
