"""`spmoe predictability`: measure how well a draft predicts a target's experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from spmoe.cli.interrupts import import_engine
from spmoe.cli.options import (
    Json,
    load,
    read_text_file,
    require_draft_model,
    require_writable,
    takes_shared_options_except,
)
from spmoe.cli.output import Console, is_quiet
from spmoe.errors import UsageError
from spmoe.files import write_text

if TYPE_CHECKING:
    from spmoe.bench.predictability import Predictability

_COLUMNS = {
    "cosine": "cosine",
    "top1": "top-1",
    "recall": "recall@k",
    "recall_plus_one": "recall@k+1",
    "union_recall": "union recall",
    "union_precision": "union precision",
    "next_gate_recall": "next gate",
    "previous_token": "previous token",
    "largest_load": "largest load",
}

_LEGEND = (
    "cosine: similarity of the draft's and the target's hidden states; top-1: the most likely expert is predicted; "
    "recall: share of the k used experts that are among the k (or k+1) predicted; union: recall and precision over "
    "several tokens together; next gate: recall when predicted from the target's own previous MoE layer (the first "
    "layer has none); previous token: share of used experts that the previous token used too; largest load: share of "
    "tokens that use the most used expert"
)


@takes_shared_options_except("prefetch", "cutoff", "overlap", "generation_config")  # nothing is fetched ahead
def predictability(
    engine: dict[str, Any],
    text: Annotated[
        Path | None, typer.Option(help="Text file to measure on. Default: Python source that ships with spmoe.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Number of windows of the text.")] = 16,
    window: Annotated[int, typer.Option(min=16, help="Tokens per window.")] = 256,
    span: Annotated[int, typer.Option(min=1, help="Tokens per union, usually K+1.")] = 5,
    plot: Annotated[
        Path | None, typer.Option(help="Write a chart by layer to this SVG file (needs spmoe[report]).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure, layer by layer, how well a draft's hidden states predict the target's experts.

    Uses the offloading engine, so it also works for models that do not fit in memory.
    """
    if plot is not None and plot.suffix.lower() != ".svg":
        raise UsageError(
            f"--plot writes SVG, not {plot.suffix or 'this format'}; name the file {plot.with_suffix('.svg')}"
        )
    require_writable(plot)
    require_draft_model(engine)
    if plot is not None:
        from spmoe.bench.charts import require_report_extra

        require_report_extra()
    import_engine()
    from spmoe.bench.predictability import measure_predictability
    from spmoe.models.shipped import sample_text
    from spmoe.observe.progress import progress_bar

    words = read_text_file(text) if text is not None else sample_text()
    # predictions are only measured here, so prefetching would cost time for nothing
    with (
        load({**engine, "prefetch": "on-demand"}) as llm,
        progress_bar("Comparing", not is_quiet()) as report,
    ):
        result = measure_predictability(llm.engine, words, window, windows, span, report)
    if plot is not None:
        _write_plot(plot, result)
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        console = Console(highlight=False)
        console.print(_table(result))
        console.print(
            f"greedy agreement {100 * result.greedy_agreement:.1f}%, sampling acceptance "
            f"{100 * result.sampling_acceptance:.1f}%, {result.tokens} tokens"
            + ("" if result.lossless else f"; lossless: no (experts in {result.expert_format})"),
            soft_wrap=True,
        )
        console.print(_LEGEND, style="dim", soft_wrap=True)


def _table(result: Predictability) -> Table:
    title = f"top-{result.top_k} of {result.experts} experts; union over {result.span} tokens; in %"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True)
    for heading in ("layer", *_COLUMNS.values()):
        table.add_column(heading, justify="right", width=max(5, *map(len, heading.split())))
    rows = [(str(layer), metrics) for layer, metrics in enumerate(result.layers)]
    for name, metrics in [*rows, ("mean", result.mean())]:
        table.add_row(name, *(_percent(getattr(metrics, column)) for column in _COLUMNS))
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _write_plot(path: Path, result: Predictability) -> None:
    from spmoe.bench.charts import Line, LineChart, svg_document

    shown = ("top1", "recall", "recall_plus_one", "union_recall", "next_gate_recall", "previous_token")

    def points(name: str) -> tuple[tuple[float, float], ...]:
        values = ((layer, getattr(one, name)) for layer, one in enumerate(result.layers))
        return tuple((float(layer), 100 * value) for layer, value in values if value is not None)

    lines = tuple(Line(_COLUMNS[name], found, colour) for colour, name in enumerate(shown) if (found := points(name)))
    chart = LineChart("Prediction of the target's experts", "MoE layer", "%", lines, y_min=0.0, y_max=100.0)
    write_text(path, svg_document([chart]))
