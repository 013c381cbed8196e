"""Line plots as SVG, written by hand: a few lines over layers need no plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#bf8700", "#8250df", "#57606a")


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
