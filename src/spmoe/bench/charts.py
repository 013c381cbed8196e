"""Charts as SVG text, drawn by matplotlib (installed by the extra `report`).

`bar_chart` and `line_chart` return an `<svg>` element to embed in a page. Its colours are CSS variables of that page
(`--ink`, `--line`, `--track`, `--c0` to `--c7`; see `css_colours`), so that one drawing serves light and dark mode.
`svg_document` returns a file of its own, with literal colours, a white background and legends.

A colour is an index into the palette; an index beyond it starts again at 0.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from spmoe.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LIGHT = {
    "ink": "#1c2126", "line": "#dde2e7", "track": "#eef1f4", "c0": "#0b6bcb", "c1": "#e0731d", "c2": "#1b8a5a",
    "c3": "#a4508b", "c4": "#8a6d00", "c5": "#c43d4b", "c6": "#4f6d8f", "c7": "#7a7f87",
}  # fmt: skip
_DARK = {
    "ink": "#e6e9ec", "line": "#333b44", "track": "#262d34", "c0": "#5aa9ff", "c1": "#ff9a4d", "c2": "#4fcf95",
    "c3": "#d58fc2", "c4": "#d9bc4a", "c5": "#ff7b86", "c6": "#9db8d6", "c7": "#a3a8b0",
}  # fmt: skip
NUM_COLOURS = 8
_VARIABLE = {colour: name for name, colour in _LIGHT.items()}
_SETTINGS: Any = {
    "svg.hashsalt": "spmoe",  # equal charts are equal text
    "svg.fonttype": "none",  # text stays text: small, selectable and read aloud
    "text.parse_math": False,  # a "$" in a label is a dollar sign
    "font.family": "sans-serif",
    "font.size": 12,
    "figure.dpi": 72,  # one unit of the SVG is one point
    "text.color": _LIGHT["ink"],
    "axes.labelcolor": _LIGHT["ink"],
    "xtick.labelcolor": _LIGHT["ink"],
    "ytick.labelcolor": _LIGHT["ink"],
}
_WIDTH = 440  # points; about that of a phone, so that text stays readable there
_ROW, _BAR = 40, 12  # heights of one bar with its label, and of the bar
_LINES_HEIGHT = 270
_LABEL_CHARACTERS = 58  # label and value of a bar that fit beside each other at full size


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled horizontal bar of one or several parts."""

    label: str
    parts: tuple[tuple[float, int], ...]  # length and colour of each, from the left
    value: str  # text at the right end
    spread: tuple[float, float] | None = None  # ends of a thin line over the bar
    mark: float | None = None  # position of a line across the bar

    @property
    def end(self) -> float:
        """Largest value that the bar, its spread or its mark reaches."""
        return max(sum(length for length, _ in self.parts), *(self.spread or ()), self.mark or 0.0)


@dataclass(frozen=True, slots=True)
class Line:
    """Named points in order of x."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int = 0
    dashed_at: tuple[float, ...] = ()  # values of x at which a dashed vertical line is drawn


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over a common x axis."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    y_min: float | None = None  # default: a little below the least value
    y_max: float | None = None


def require_report_extra() -> None:
    """Raise UsageError unless the libraries that draw charts and render pages are installed."""
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"charts and HTML reports need {' and '.join(missing)}, not installed here; run "
            "`pip install 'spmoe[report]'` (Markdown reports work without it)"
        )


def css_colours() -> tuple[str, str]:
    """Return declarations of the CSS variables that embedded charts use, for light and for dark mode."""
    light, dark = ("; ".join(f"--{name}: {value}" for name, value in colours.items()) for colours in (_LIGHT, _DARK))
    return light, dark


def bar_chart(title: str, bars: Sequence[Bar], x_max: float | None = None, chart_id: str = "chart") -> str:
    """Draw bars from zero, one below the other, each under its label; `x_max` is the full width.

    `chart_id` prefixes all ids of the SVG and must be unique within a page.
    """
    height = _ROW * len(bars)
    end = max(1e-12, *(bar.end for bar in bars)) if x_max is None else max(1e-12, x_max)

    def draw(axes: Axes) -> None:
        axes.set_axis_off()
        axes.set_xlim(0, end)
        axes.set_ylim(height, 0)
        for number, bar in enumerate(bars):
            text_y, bar_y = _ROW * number + 14, _ROW * number + 26
            size = 12 * min(1.0, _LABEL_CHARACTERS / max(1, len(bar.label) + len(bar.value)))
            axes.text(0, text_y, bar.label, size=size)
            axes.text(end, text_y, bar.value, size=size, ha="right", weight="bold")
            axes.barh(bar_y, end, _BAR, color=_LIGHT["track"], clip_on=False)
            start = 0.0
            for length, colour in bar.parts:
                axes.barh(bar_y, length, _BAR, left=start, color=_colour(colour), clip_on=False)
                start += length
            if bar.spread is not None:
                axes.plot(bar.spread, [bar_y] * 2, color=_LIGHT["ink"], linewidth=1.5, alpha=0.75, clip_on=False)
            if bar.mark is not None:
                axes.plot([bar.mark] * 2, [bar_y - 9, bar_y + 9], color=_LIGHT["ink"], linewidth=2.5, clip_on=False)

    return _embedded(_draw([draw], height, _Margins(0, 0, 0, 0)), title, "bars", chart_id)


def line_chart(chart: LineChart, chart_id: str = "chart") -> str:
    """Draw lines over a common x axis, without a legend.

    `chart_id` prefixes all ids of the SVG and must be unique within a page.
    """
    drawn = _draw([lambda axes: _draw_lines(axes, chart)], _LINES_HEIGHT, _Margins(56, 46, 10, 12))
    return _embedded(drawn, chart.title, "lines", chart_id)


def svg_document(charts: Sequence[LineChart]) -> str:
    """Draw charts below each other, with titles and legends, as an SVG document."""
    legend_rows = max((len(chart.lines) + 1) // 2 for chart in charts)
    header = 34 + 18 * legend_rows  # points above the plot area

    def drawing(chart: LineChart) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            _draw_lines(axes, chart)
            axes.set_title(chart.title, loc="left", weight="bold", size=12, pad=header - 20)
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0, fontsize=10)

        return draw

    margins = _Margins(56, 46, 14, header)
    drawn = _draw([drawing(chart) for chart in charts], _LINES_HEIGHT + header, margins, "white")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + drawn


class _Margins(NamedTuple):
    """Points between the edge of a plot and its axes."""

    left: float
    bottom: float
    right: float
    top: float


def _draw_lines(axes: Axes, chart: LineChart) -> None:
    from matplotlib.ticker import MaxNLocator

    for line in chart.lines:
        xs, ys = zip(*line.points, strict=True)
        axes.plot(
            xs, ys, color=_colour(line.colour), linewidth=2.5, marker="o", markersize=6, label=line.name, clip_on=False
        )  # fmt: skip
        for x in line.dashed_at:
            axes.axvline(x, color=_colour(line.colour), linewidth=2, linestyle=(0, (5, 4)), clip_on=False)
    if chart.y_min is not None:
        axes.set_ylim(bottom=chart.y_min)
    if chart.y_max is not None:
        axes.set_ylim(top=chart.y_max)
    values = sorted({x for line in chart.lines for x, _ in line.points})
    if len(values) <= 9:
        axes.set_xticks(values, [f"{x:g}" for x in values])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(axis="y", color=_LIGHT["line"], linewidth=1, clip_on=False)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw(
    drawings: Sequence[Callable[[Axes], None]], height: float, margins: _Margins, background: str = "none"
) -> str:
    """Return an `<svg>` element with one plot per drawing, below each other, each `height` points high."""
    require_report_extra()
    import matplotlib
    from matplotlib.figure import Figure

    total = height * len(drawings)
    width = (_WIDTH - margins.left - margins.right) / _WIDTH
    text = io.StringIO()
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH / 72, total / 72), facecolor=background)
        for number, draw in enumerate(drawings):
            bottom = total - height * (number + 1) + margins.bottom
            box = (margins.left / _WIDTH, bottom / total, width, (height - margins.bottom - margins.top) / total)
            draw(figure.add_axes(box, facecolor="none"))
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return text.getvalue()[text.getvalue().index("<svg") :]


def _embedded(svg: str, title: str, kind: str, chart_id: str) -> str:
    """Make an SVG part of a page: unique ids, the page's colours, a title for screen readers, no fixed size."""
    view = re.search(r'viewBox="[^"]*"', svg)
    name = escape(title)
    opening = f'<svg class="{kind}" {view[0] if view else ""} role="img" aria-label="{name}"><title>{name}</title>'
    body = svg[svg.index(">") + 1 :].replace("xlink:href", "href")
    noise = (r"<!--.*?-->", r"<defs>\s*<style.*?</defs>", r" font-family: [^;]*;", r' transform="rotate\(-0[^"]*"')
    body = re.sub("|".join(noise), "", body, flags=re.DOTALL)
    body = re.sub(r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick)_\d+"', "", body)
    body = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{chart_id}-", body)
    body = re.sub(r"(?<=fill: |roke: )#[0-9a-f]{6}", lambda match: _as_variable(match[0]), body)
    return opening + re.sub(r"\s*\n\s*", "\n", body)


def _as_variable(colour: str) -> str:
    return f"var(--{_VARIABLE[colour]})" if colour in _VARIABLE else colour


def _colour(number: int) -> str:
    return _LIGHT[f"c{number % NUM_COLOURS}"]
