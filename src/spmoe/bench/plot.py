"""Plots as SVG, written by hand: a few lines and bars need no plotting library.

`line_plot` is a document of its own. The others are pieces of a page, which says what their colours are: they take the
page's text colour and its variables --c0, --c1, ... Bars are placed in percents and their words are not scaled, so that
they can be read on any screen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#bf8700", "#8250df", "#57606a")
COLOURS = 8  # that a page has


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled value, in parts where it has several."""

    label: str
    parts: tuple[tuple[float, int], ...]  # lengths, and the number of each one's colour
    shown: str  # the value, for people
    spread: tuple[float, float] | None = None
    mark: float | None = None  # a line across: what could have been

    @property
    def length(self) -> float:
        """All parts together."""
        return sum(value for value, _ in self.parts)

    @property
    def end(self) -> float:
        """How far it reaches, with all that belongs to it."""
        return max(self.length, *(self.spread or ()), self.mark or 0.0)


@dataclass(frozen=True, slots=True)
class Line:
    """Points in order of x, under a name."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int
    marked: tuple[float, ...] = ()  # values of x to point at


def bar_chart(title: str, bars: Sequence[Bar], most: float | None = None) -> str:
    """Horizontal bars from zero, each under its label; the longest possible is `most`."""
    row, bar = 40, 12
    most = max(1e-12, *(one.end for one in bars)) if most is None else max(1e-12, most)

    def at(value: float) -> str:
        return f"{100 * value / most:.2f}%"

    parts = [_opening(title, f'width="100%" height="{row * len(bars) + 2}"', "bars")]
    for number, one in enumerate(bars):
        y = row * number
        parts.append(f'<text x="0" y="{y + 14}">{escape(one.label)}</text>')
        parts.append(f'<text class="value" x="100%" y="{y + 14}" text-anchor="end">{escape(one.shown)}</text>')
        parts.append(f'<rect class="track" x="0" y="{y + 20}" width="100%" height="{bar}"/>')
        start = 0.0
        for value, colour in one.parts:
            place = f'x="{at(start)}" y="{y + 20}" width="{at(value)}" height="{bar}"'
            parts.append(f'<rect {place} fill="var(--c{colour % COLOURS})"/>')
            start += value
        if one.spread is not None:
            low, high = one.spread
            parts.append(f'<line class="spread" x1="{at(low)}" x2="{at(high)}" y1="{y + 26}" y2="{y + 26}"/>')
        if one.mark is not None:
            parts.append(f'<line class="mark" x1="{at(one.mark)}" x2="{at(one.mark)}" y1="{y + 17}" y2="{y + 35}"/>')
    return "".join([*parts, "</svg>"])


def line_chart(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], floor: float | None = None, top: float | None = None
) -> str:
    """Lines over a common x, from `floor` (by default a little below the least) to `top`."""
    width, height, left, right, above, below = 480, 290, 52, 12, 14, 46
    inner_w, inner_h = width - left - right, height - above - below
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    first, last = min(xs), max(max(xs), min(xs) + 1e-9)
    low, step = _scale(min(ys) if floor is None else floor, max(ys) if top is None else top)
    high = max(ys) if top is None else top
    high = low + step * max(1, math.ceil((high - low) / step - 1e-9))

    def place(x: float, y: float) -> tuple[float, float]:
        return left + inner_w * (x - first) / (last - first), above + inner_h * (1 - (y - low) / (high - low))

    parts = [_opening(title, f'viewBox="0 0 {width} {height}"', "lines")]
    for tick in range(round((high - low) / step) + 1):
        _, y = place(first, low + tick * step)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{low + tick * step:.4g}</text>')
    every = sorted(set(xs))
    for x in every[:: max(1, math.ceil(len(every) / 9))]:
        parts.append(f'<text x="{place(x, low)[0]:.1f}" y="{height - below + 18}" text-anchor="middle">{x:g}</text>')
    middle = left + inner_w / 2
    parts.append(f'<text x="{middle}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>')
    turned = f'transform="apply_rotary(-90)" x="{-(above + inner_h / 2):.1f}" y="13" text-anchor="middle"'
    parts.append(f"<text {turned}>{escape(y_label)}</text>")
    for line in lines:
        colour = f"var(--c{line.colour % COLOURS})"
        for x in line.marked:
            at = place(x, low)[0]
            parts.append(
                f'<line class="marked" x1="{at:.1f}" x2="{at:.1f}" y1="{above}" y2="{above + inner_h}" '
                f'stroke="{colour}"/>'
            )
        points = [place(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
    return "".join([*parts, "</svg>"])


def _opening(title: str, size: str, kind: str) -> str:
    return f'<svg class="{kind}" {size} role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'


def _scale(low: float, high: float) -> tuple[float, float]:
    """Return the start of a scale, at or below `low`, and its step: 1, 2, 2.5 or 5 times a power of ten."""
    rough = max(high - low, 1e-12) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    return math.floor(low / step + 1e-9) * step, step


def line_plot(title: str, x_label: str, lines: Mapping[str, Sequence[float]], floor: float = 0.0) -> str:
    """A plot of shares (from `floor` to 1) against 0, 1, 2, ... as an SVG document."""
    width, height, left, top, right, bottom = 720, 400, 56, 40, 170, 48
    inner_w, inner_h = width - left - right, height - top - bottom
    count = max(len(values) for values in lines.values())

    def at(index: float, value: float) -> tuple[float, float]:
        x = left + inner_w * index / max(1, count - 1)
        return x, top + inner_h * (1 - (max(floor, min(1.0, value)) - floor) / (1 - floor))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{left + inner_w / 2}" y="{height - 10}" text-anchor="middle">{escape(x_label)}</text>',
    ]
    for step in range(6):
        value = floor + (1 - floor) * step / 5
        _, y = at(0, value)
        parts.append(f'<line x1="{left}" x2="{left + inner_w}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{100 * value:.0f}%</text>')
    for index in range(0, count, max(1, count // 16)):
        x, _ = at(index, floor)
        parts.append(f'<text x="{x:.1f}" y="{top + inner_h + 18}" text-anchor="middle">{index}</text>')
    for number, (name, values) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(i, v) for i, v in enumerate(values)))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = top + 14 + 20 * number
        parts.append(f'<rect x="{left + inner_w + 14}" y="{y - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + inner_w + 34}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines with all that is said about them."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    floor: float | None = None


def standalone(charts: Sequence[Chart]) -> str:
    """Charts below each other, with their legends, as an SVG document."""
    width, height, head = 480, 290, 46
    colours = "; ".join(f"--c{number}: {colour}" for number, colour in enumerate(_COLOURS))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{(height + head) * len(charts)}" '
        'font-family="sans-serif" font-size="12">',
        f"<style>svg {{ {colours} }} .grid {{ stroke: #d0d7de }} .marked {{ stroke-dasharray: 4 3 }}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, chart in enumerate(charts):
        top = (height + head) * number
        parts.append(f'<text x="8" y="{top + 18}" font-weight="bold">{escape(chart.title)}</text>')
        for place, line in enumerate(chart.lines):
            x, colour = 8 + 225 * place, _COLOURS[line.colour % len(_COLOURS)]
            parts.append(f'<rect x="{x}" y="{top + 29}" width="14" height="4" fill="{colour}"/>')
            parts.append(f'<text x="{x + 20}" y="{top + 36}">{escape(line.name)}</text>')
        drawn = line_chart(chart.title, chart.x_label, chart.y_label, chart.lines, chart.floor)
        parts.append(drawn.replace("<svg ", f'<svg y="{top + head}" width="{width}" height="{height}" ', 1))
    return "\n".join([*parts, "</svg>", ""])
