"""`spmoe predictability`: whether a draft suits a target, before trusting it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from spmoe.cli.options import Json, load, read_text_file, require_writable, takes_shared_options_except
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
    "cosine: of the draft's and the target's hidden states; top-1: the first choice is the target's; recall: of the k "
    "experts used, those among the k (or k+1) predicted; union: the same over several tokens together, and how much of "
    "what was predicted was used; next gate: predicted from the target's own previous layer, which the first has not; "
    "previous token: used by it too; largest load: tokens that use the busiest expert"
)


@takes_shared_options_except("prefetch", "cutoff", "overlap")  # nothing is fetched ahead
def predictability(
    engine: dict[str, Any],
    text: Annotated[
        Path | None, typer.Option(help="Text to measure on; default: some of this package's own source.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to run.")] = 16,
    window: Annotated[int, typer.Option(min=16, help="Tokens per window.")] = 256,
    span: Annotated[int, typer.Option(min=1, help="Tokens taken together for the union figures, K+1 as a rule.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Write the figures by layer as an SVG plot to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure, layer by layer, how well a draft's hidden states predict the target's experts.

    Runs through the offloading engine, so it also works on a model that does not fit.
    """
    if plot is not None and plot.suffix.lower() != ".svg":
        raise UsageError(f"the plot is written as SVG; name the file {plot.with_suffix('.svg')}")
    require_writable(plot)
    from spmoe.bench.predictability import measure_predictability
    from spmoe.models.shipped import sample_text
    from spmoe.observe.progress import progress_bar

    words = read_text_file(text) if text is not None else sample_text()
    # prefetching would only get in the way of measuring: the draft's guesses are compared, not acted upon
    with (
        load({**engine, "prefetch": "on-demand"}, progress=not as_json) as llm,
        progress_bar("Comparing", not as_json and sys.stderr.isatty()) as report,
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
        )
        console.print(_LEGEND, style="dim", soft_wrap=True)


def _table(result: Predictability) -> Table:
    title = f"{result.top_k} of {result.experts} experts; union over {result.span} tokens; %"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True)
    for heading in ("layer", *_COLUMNS.values()):
        table.add_column(heading, justify="right", width=max(5, *map(len, heading.split())))
    rows = [(str(layer), figures) for layer, figures in enumerate(result.layers)]
    for name, figures in [*rows, ("mean", result.mean())]:
        table.add_row(name, *(f"{100 * getattr(figures, column):.1f}" for column in _COLUMNS))
    return table


def _write_plot(path: Path, result: Predictability) -> None:
    from spmoe.bench.plot import line_plot

    shown = ("top1", "recall", "recall_plus_one", "union_recall", "next_gate_recall", "previous_token")
    lines = {_COLUMNS[name]: [getattr(one, name) for one in result.layers] for name in shown}
    write_text(path, line_plot("Prediction of the target's experts", "MoE layer", lines))
