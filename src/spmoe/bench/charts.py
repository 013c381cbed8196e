"""Charts as SVG text, drawn by matplotlib (installed by the extra `report`).

`bar_chart`, `line_chart` and `timeline_chart` return an `<svg>` element to embed in a page. Its colours are CSS
variables of that page (see `css_colours`), so that one drawing serves light and dark mode; its values are `<title>`
elements, which browsers show where the pointer is. `svg_document` returns a file of its own, with literal colours, a
white background and legends.

A colour is a name in the palette. `c0` to `c5` stand for configurations or series, the others for parts of a step and
for references; no colour is in both sets. All are chosen to stay distinct for colour-blind readers.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from importlib.util import find_spec
from math import log2
from typing import TYPE_CHECKING, Any, NamedTuple

from spmoe.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_LIGHT = {
    "ink": "#1c2126", "line": "#dde2e7", "track": "#eef1f4", "rule": "#55606b", "absent": "#aeb6be",
    "c0": "#0072b2", "c1": "#e69f00", "c2": "#009e73", "c3": "#c24a00", "c4": "#56b4e9", "c5": "#6b7076",
    "draft": "#4a3aa7", "verify": "#a99be0", "stall": "#c2185b", "other": "#cfd4d9",
    "demand": "#6b4423", "prefetch": "#b0479b", "late": "#e3a5d3",
}  # fmt: skip
_DARK = {
    "ink": "#e6e9ec", "line": "#333b44", "track": "#262d34", "rule": "#a9b3bd", "absent": "#68727c",
    "c0": "#3d8fe0", "c1": "#f0b030", "c2": "#1fb58a", "c3": "#e8703a", "c4": "#8fd0f5", "c5": "#7d838b",
    "draft": "#7c6ae0", "verify": "#c9c0f5", "stall": "#f0508c", "other": "#4a5158",
    "demand": "#a9743f", "prefetch": "#d873c4", "late": "#f3cdea",
}  # fmt: skip
SERIES = ("c0", "c1", "c2", "c3", "c4", "c5")  # the last one is neutral
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
_AXIS = 22  # height of the labels below bars
_LINES_HEIGHT = 270
_LEAST_REACH = log2(1.25)  # of an axis of ratios to each side of 1, so that small differences look small
_LABEL_CHARACTERS = 58  # label and value of a bar that fit beside each other at full size
_LANE, _BLOCK = 15, 11  # heights of one lane of a timeline, and of its blocks
_GUTTER = 76  # width of the names of lanes
_MAX_LANES = 6  # that overlapping blocks of one track are spread over


class Fill(Enum):
    """How an area is filled; distinguishes parts that share the colour of their configuration."""

    SOLID = "solid"
    PALE = "pale"
    HATCHED = "hatched"  # absence: misses, waste


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar."""

    length: float  # negative: to the left
    colour: str
    fill: Fill = Fill.SOLID
    tip: str = ""  # shown where the pointer is


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled horizontal bar of one or several parts, which begins at zero."""

    label: str
    parts: tuple[Part, ...]
    value: str  # text at the right end
    spread: tuple[float, float] | None = None  # ends of an error bar
    mark: float | None = None  # position of a line across the bar
    tip: str = ""  # of the whole row, its error bar and its mark

    @property
    def end(self) -> float:
        """Largest value that the bar, its spread or its mark reaches."""
        return max(sum(part.length for part in self.parts), *(self.spread or ()), self.mark or 0.0)

    @property
    def start(self) -> float:
        """Smallest value that the bar or its spread reaches; at most 0."""
        return min(0.0, sum(part.length for part in self.parts), *(self.spread or ()))


@dataclass(frozen=True, slots=True)
class Line:
    """Named points in order of x."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int | str = 0  # a number is that of a series; one beyond the last starts again
    dashed_at: tuple[float, ...] = ()  # values of x at which a dashed vertical line is drawn
    spreads: tuple[tuple[float, float], ...] = ()  # ends of an error bar for each point
    tips: tuple[str, ...] = ()  # for each point, shown where the pointer is
    dashed: bool = False
    marker: str = "o"
    dashed_colour: str | None = None  # of the vertical lines; default: that of the line


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over a common x axis."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    y_min: float | None = None  # default: a little below the least value
    y_max: float | None = None
    label_ends: bool = False  # write the name of each line at its last point


class Block(NamedTuple):
    """A span of time in a track."""

    start: float
    end: float
    colour: str
    tip: str


@dataclass(frozen=True, slots=True)
class Track:
    """Named blocks of a timeline. Blocks that overlap are drawn in lanes below each other unless they are `stacked`."""

    name: str
    blocks: tuple[Block, ...]
    stacked: bool = False  # later blocks are drawn over earlier ones


@dataclass(frozen=True, slots=True)
class TimelineGroup:
    """Tracks of one configuration."""

    name: str
    end: float  # ms
    tracks: tuple[Track, ...]


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
    drawing = _Drawing()
    svg = _draw([lambda axes: drawing.bars(axes, bars, 0.0, end, height)], height, _Margins(0, 0, 0, 0))
    return _embedded(svg, title, "bars", chart_id, drawing.tips)


def ratio_chart(
    title: str, bars: Sequence[Bar], chart_id: str = "chart", scale: tuple[float, float] = (0.0, 0.0)
) -> str:
    """Draw bars of base-2 logarithms of ratios to both sides of a line at 1, above an axis of ratios.

    `scale` is the least and greatest logarithm that the axis must reach.
    """
    low = -max(_LEAST_REACH, -scale[0], *(-bar.start for bar in bars))
    high = max(_LEAST_REACH, scale[1], *(bar.end for bar in bars))
    reach = max(high, -low)
    height = _ROW * len(bars) + _AXIS
    drawing = _Drawing()

    def draw(axes: Axes) -> None:
        for ratio in _ratio_ticks(low, high, reach):
            x = log2(ratio)
            width, colour = (1.5, "rule") if ratio == 1 else (1, "line")
            xs, ys = _dashes(x, [(top + 17, top + 35) for top in range(0, height - _AXIS, _ROW)])  # not through labels
            axes.plot(xs, ys, color=_LIGHT[colour], linewidth=width, clip_on=False, zorder=0.5)
            side = "left" if x - low < 0.08 * (high - low) else "right" if high - x < 0.08 * (high - low) else "center"
            axes.text(x, height - 6, f"{ratio:g}x", size=10, ha=side)
        drawing.bars(axes, bars, low, high, height, tracks=False)

    svg = _draw([draw], height, _Margins(0, 0, 0, 0))
    return _embedded(svg, title, "bars", chart_id, drawing.tips)


def _dashes(x: float, spans: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return points of a vertical line at `x` that is drawn within spans of y only."""
    xs, ys = list[float](), list[float]()
    for low, high in spans:
        xs += [x, x, float("nan")]
        ys += [low, high, float("nan")]
    return xs, ys


def _ratio_ticks(low: float, high: float, reach: float) -> list[float]:
    """Return ratios to label: powers of two, or finer ones if the axis is short."""
    fine = (0.8, 1.0, 1.25) if reach <= log2(1.4) else (0.5, 0.75, 1.0, 1.5, 2.0)
    ratios = fine if reach <= log2(2.5) else tuple(2.0**power for power in range(-20, 21))
    found = [ratio for ratio in ratios if low - 1e-9 <= log2(ratio) <= high + 1e-9]
    step = -(-len(found) // 7)  # at most about seven labels, with 1 among them
    middle = found.index(1.0)
    return found[middle % step :: step]


def line_chart(chart: LineChart, chart_id: str = "chart") -> str:
    """Draw lines over a common x axis, without a legend.

    `chart_id` prefixes all ids of the SVG and must be unique within a page.
    """
    drawing = _Drawing()
    drawn = _draw([lambda axes: drawing.lines(axes, chart)], _LINES_HEIGHT, _Margins(56, 46, 10, 12))
    return _embedded(drawn, chart.title, "lines", chart_id, drawing.tips)


def timeline_chart(title: str, groups: Sequence[TimelineGroup], chart_id: str = "chart") -> str:
    """Draw tracks of blocks over one axis of milliseconds, group by group."""
    drawing = _Drawing()
    end = max(group.end for group in groups)
    lanes = [[_spread_over_lanes(track) for track in group.tracks] for group in groups]
    height = sum(24 + _LANE * sum(1 + max(found, default=0) for found in group) for group in lanes) + _AXIS

    def draw(axes: Axes) -> None:
        axes.set_axis_off()
        axes.set_xlim(0, end)
        axes.set_ylim(height, 0)
        for tick in _time_ticks(end):
            axes.plot([tick, tick], [0, height - _AXIS], color=_LIGHT["line"], linewidth=1, clip_on=False, zorder=0.5)
            side = "right" if tick > 0.95 * end else "center" if tick else "left"
            axes.text(tick, height - 6, f"{tick:g} ms", size=10, ha=side)
        y = 0.0
        for group, found in zip(groups, lanes, strict=True):
            size = 11 * min(1.0, _LABEL_CHARACTERS / max(1, len(group.name)))
            axes.text(-end * _GUTTER / (_WIDTH - _GUTTER), y + 14, group.name, weight="bold", size=size)
            y += 22
            top = y
            for track, numbers in zip(group.tracks, found, strict=True):
                axes.text(-end * _GUTTER / (_WIDTH - _GUTTER), y + 10, track.name, size=10)
                for block, number in zip(track.blocks, numbers, strict=True):
                    middle = y + _LANE * number + _LANE / 2
                    width = max(block.end - block.start, 0.0015 * end)  # visible, however short
                    part = Part(width, block.colour, tip=block.tip)
                    drawing.area(axes, part, block.start, middle, end / (_WIDTH - _GUTTER), _BLOCK)
                y += _LANE * (1 + max(numbers, default=0))
            axes.plot([group.end] * 2, [top, y], color=_LIGHT["rule"], linewidth=1.5, clip_on=False)
            y += 2

    svg = _draw([draw], height, _Margins(_GUTTER, 0, 0, 0))
    return _embedded(svg, title, "timeline", chart_id, drawing.tips)


def _spread_over_lanes(track: Track) -> list[int]:
    """Return the lane of each block: the first one that is free, if there are no more than `_MAX_LANES`."""
    ends: list[float] = []
    found = []
    for block in track.blocks:
        free = next((number for number, end in enumerate(ends) if end <= block.start + 1e-9), None)
        if track.stacked:
            free = 0
        elif free is None and len(ends) == _MAX_LANES:
            free = min(range(_MAX_LANES), key=lambda number: ends[number])
        if free is None or free == len(ends):
            free = len(ends)
            ends.append(block.end)
        else:
            ends[free] = max(ends[free], block.end)
        found.append(free)
    return found


def _time_ticks(end: float) -> list[float]:
    """Return about five round values from 0 to `end`."""
    from matplotlib.ticker import MaxNLocator

    return [float(value) for value in MaxNLocator(5).tick_values(0, end) if 0 <= value <= end]


def svg_document(charts: Sequence[LineChart]) -> str:
    """Draw charts below each other, with titles and legends, as an SVG document."""
    legend_rows = max((len(chart.lines) + 1) // 2 for chart in charts)
    header = 34 + 18 * legend_rows  # points above the plot area

    def drawing(chart: LineChart) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            _Drawing().lines(axes, chart)
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


class _Drawing:
    """Draws areas, bars and lines, and collects the texts that appear under the pointer."""

    def __init__(self) -> None:
        self.tips: list[str] = []  # the artist of number n has the id "tip-n"

    def _add_tip(self, artist: Artist, tip: str) -> None:
        if tip:
            artist.set_gid(f"tip-{len(self.tips)}")
            self.tips.append(tip)

    def bars(
        self, axes: Axes, bars: Sequence[Bar], low: float, high: float, height: float, tracks: bool = True
    ) -> None:
        """Draw bars from zero between `low` and `high`; with `tracks`, on a background as wide as the chart."""
        axes.set_axis_off()
        axes.set_xlim(low, high)
        axes.set_ylim(height, 0)
        point = (high - low) / _WIDTH
        for number, bar in enumerate(bars):
            text_y, bar_y = _ROW * number + 14, _ROW * number + 26
            size = 12 * min(1.0, _LABEL_CHARACTERS / max(1, len(bar.label) + len(bar.value)))
            axes.text(low, text_y, bar.label, size=size)
            axes.text(high, text_y, bar.value, size=size, ha="right", weight="bold")
            if tracks:
                self.area(axes, Part(high - low, "track", tip=bar.tip), low, bar_y, point, _BAR)
            start = 0.0
            for part in bar.parts:
                self.area(axes, part, start, bar_y, point, _BAR)
                start += part.length
            if bar.spread is not None:
                self._error_bar(axes, bar.spread, bar_y, bar.tip)
            if bar.mark is not None:
                (mark,) = axes.plot(
                    [bar.mark] * 2, [bar_y - 9, bar_y + 9], color=_LIGHT["ink"], linewidth=2.5, clip_on=False
                )
                self._add_tip(mark, bar.tip)

    def area(self, axes: Axes, part: Part, start: float, y: float, point: float, height: float) -> None:
        """Draw a rectangle that is `part.length` long; `point` is the length of one point."""
        from matplotlib.patches import Rectangle

        if not part.length:
            return
        hatched, alpha = part.fill is Fill.HATCHED, 0.42 if part.fill is Fill.PALE else 1.0
        colour = _LIGHT["track" if hatched else part.colour]
        shape = Rectangle(
            (start, y - height / 2), part.length, height, color=colour, alpha=alpha, linewidth=0, clip_on=False
        )
        axes.add_patch(shape)
        self._add_tip(shape, part.tip)
        if not hatched:
            return
        left, right = sorted((start, start + part.length))
        bottom, slant, gap = y + height / 2, height * point, 5 * point
        xs: list[float] = []
        ys: list[float] = []
        for number in range(int((right - left + slant) / gap) + 1):  # diagonals, cut off at both ends of the area
            foot = left - slant + number * gap
            low, high = max(0.0, (left - foot) / slant), min(1.0, (right - foot) / slant)
            if low < high:
                xs += [foot + low * slant, foot + high * slant, float("nan")]
                ys += [bottom - low * height, bottom - high * height, float("nan")]
        outline_x, outline_y = [left, left, right, right, left], [y + sign * height / 2 for sign in (-1, 1, 1, -1, -1)]
        (lines,) = axes.plot(
            [*outline_x, float("nan"), *xs], [*outline_y, float("nan"), *ys],
            color=_LIGHT[part.colour], linewidth=1, clip_on=False,
        )  # fmt: skip
        self._add_tip(lines, part.tip)

    def _error_bar(self, axes: Axes, spread: tuple[float, float], y: float, tip: str) -> None:
        low, high = spread
        nan = float("nan")
        xs, ys = [low, high, nan, low, low, nan, high, high], [y, y, nan, y - 4, y + 4, nan, y - 4, y + 4]
        (drawn,) = axes.plot(xs, ys, color=_LIGHT["ink"], linewidth=1.5, clip_on=False)
        self._add_tip(drawn, tip)

    def lines(self, axes: Axes, chart: LineChart) -> None:
        """Draw lines, their points and error bars over a grid."""
        from matplotlib.ticker import MaxNLocator

        for line in chart.lines:
            xs, ys = zip(*line.points, strict=True)
            colour = _colour(line.colour)
            axes.plot(
                xs, ys, color=colour, linewidth=2.5, marker=line.marker, markersize=6, label=line.name, clip_on=False,
                linestyle=(0, (2, 1.5)) if line.dashed else "-",
            )  # fmt: skip
            for x, (low, high) in zip(xs, line.spreads, strict=False):
                axes.errorbar(
                    x, (low + high) / 2, (high - low) / 2, color=_LIGHT["ink"], linewidth=1.5, capsize=4,
                    fmt="none", clip_on=False,
                )  # fmt: skip
            for x, y, tip in zip(xs, ys, line.tips, strict=False):
                (point,) = axes.plot([x], [y], color=colour, marker=line.marker, markersize=9, clip_on=False)
                self._add_tip(point, tip)
            if chart.label_ends:
                axes.annotate(line.name, (xs[-1], ys[-1]), (0, 9), textcoords="offset points", ha="center", size=11)
            for x in line.dashed_at:
                axes.axvline(
                    x,
                    color=_colour(line.dashed_colour or line.colour),
                    linewidth=2,
                    linestyle=(0, (5, 4)),
                    clip_on=False,
                )
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


_NOISE = re.compile(r"<!--.*?-->|<defs>\s*<style.*?</defs>", re.DOTALL)
_NOISE_IN_TAGS = re.compile(
    r' font-family: [^;]*;| transform="rotate\(-0[^"]*"'
    r'| id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|LineCollection)_\d+"'
)


def _embedded(svg: str, title: str, kind: str, chart_id: str, tips: Sequence[str]) -> str:
    """Make an SVG part of a page: unique ids, the page's colours, values under the pointer, no fixed size."""
    view = re.search(r'viewBox="[^"]*"', svg)
    name = escape(title)
    opening = f'<svg class="{kind}" {view[0] if view else ""} role="img" aria-label="{name}"><title>{name}</title>'

    def change_tag(match: re.Match[str]) -> str:  # labels between tags stay as they are
        tag = _NOISE_IN_TAGS.sub("", match[0].replace("xlink:href", "href"))
        if tip := re.fullmatch(r'<g id="tip-(\d+)">', tag):
            return f"<g><title>{escape(tips[int(tip[1])])}</title>"
        tag = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{chart_id}-", tag)
        return re.sub(r"(?<=fill: |roke: )#[0-9a-f]{6}", lambda found: _as_variable(found[0]), tag)

    body = re.sub(r"<[^>]*>", change_tag, _NOISE.sub("", svg[svg.index(">") + 1 :]))
    return opening + re.sub(r"\s*\n\s*", "\n", body)


def _as_variable(colour: str) -> str:
    return f"var(--{_VARIABLE[colour]})" if colour in _VARIABLE else colour


def _colour(colour: int | str) -> str:
    return _LIGHT[colour if isinstance(colour, str) else SERIES[colour % len(SERIES)]]
