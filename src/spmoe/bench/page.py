"""The page that a report is: its looks, and the pieces that it is put together from. No script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_LIGHT = ("#0b6bcb", "#e0731d", "#1b8a5a", "#a4508b", "#8a6d00", "#c43d4b", "#4f6d8f", "#7a7f87")
_DARK = ("#5aa9ff", "#ff9a4d", "#4fcf95", "#d58fc2", "#d9bc4a", "#ff7b86", "#9db8d6", "#a3a8b0")

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --dim: #5c6670; --line: #dde2e7; --page: #fff; --card: #f6f8fa;
  --track: #eef1f4; --good: #1b8a5a; LIGHT }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --dim: #9aa4ae; --line: #333b44; --page: #14181c;
  --card: #1c2228; --track: #262d34; --good: #4fcf95; DARK } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem }
h2 { font-size: 1.25rem; margin: 3rem 0 .3rem; padding-top: 1rem; border-top: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem }
p { margin: .4rem 0 .8rem; max-width: 46rem }
.dim, figcaption, .note { color: var(--dim); font-size: .9rem }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.2rem 0 }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem }
.card b { display: block; font-size: 1.5rem; line-height: 1.25; font-variant-numeric: tabular-nums }
.card span { color: var(--dim); font-size: .85rem; line-height: 1.35; display: block }
nav { font-size: .9rem; margin: 1rem 0 } nav a { margin-right: .9rem; display: inline-block }
a { color: var(--c0) }
figure { margin: .6rem 0 1.4rem } figcaption { margin-bottom: .5rem }
svg { display: block; max-width: 100%; overflow: visible } svg text { fill: var(--ink); font-size: 13px }
svg.lines { width: 100%; max-width: 38rem; height: auto } svg.lines text { font-size: 14px }
svg .value { font-variant-numeric: tabular-nums; font-weight: 600 } svg .track { fill: var(--track) }
svg .grid { stroke: var(--line) } svg .spread { stroke: var(--ink); stroke-width: 1.5; opacity: .75 }
svg .mark { stroke: var(--ink); stroke-width: 2.5 } svg .marked { stroke-width: 2; stroke-dasharray: 5 4 }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; padding: 0; margin: .3rem 0 .7rem;
  font-size: .88rem } .legend i { display: inline-block; width: .8em; height: .8em; border-radius: .2em;
  margin-right: .45em } .legend i.mark { width: 3px; height: 1.05em; border-radius: 0; vertical-align: -.15em;
  background: var(--ink) } .legend i.spread { height: 2px; width: 1.2em; border-radius: 0; vertical-align: .25em;
  background: var(--ink) }
.scroll { overflow-x: auto; margin: .5rem 0 1rem } table { border-collapse: collapse; font-size: .9rem }
th, td { padding: .32rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums } th:first-child, td:first-child { text-align: left }
.facts th, .facts td { text-align: left; white-space: normal; vertical-align: top }
.facts tbody th { color: var(--dim); white-space: nowrap } .facts thead:not(:has(th:not(:empty))) { display: none }
tbody th, thead th:first-child { position: sticky; left: 0; background: var(--page) }
thead th { vertical-align: bottom; color: var(--dim); font-weight: 600 }
tbody th { font-weight: 500 } tr.ours th, tr.ours td { font-weight: 700; background: var(--card) }
td .best { color: var(--good); font-weight: 700 } td small { color: var(--dim); display: block; font-weight: 400 }
.case > summary { font-weight: 600; color: var(--ink); font-size: 1rem; margin: .5rem 0 }
details { margin: .4rem 0 1rem } summary { cursor: pointer; color: var(--dim); font-size: .9rem }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem;
  overflow-x: auto; font-size: .85rem } code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .92em }
.missing { border-left: 3px solid var(--line); padding: .2rem 0 .2rem .9rem; color: var(--dim) }
@media print { details { display: none } h2 { break-after: avoid } figure { break-inside: avoid } }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole document."""
    light, dark = (" ".join(f"--c{n}: {colour};" for n, colour in enumerate(colours)) for colours in (_LIGHT, _DARK))
    style = _STYLE.replace("LIGHT", light).replace("DARK", dark)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def section(key: str, title: str, *parts: str) -> str:
    """A part of the page that can be linked to."""
    return f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(title)}</h2>' + "".join(
        [*parts, "</section>"]
    )


def paragraph(text: str) -> str:
    """Words."""
    return f"<p>{escape(text)}</p>"


def missing(what: str, command: str) -> str:
    """What to run for figures that are not there."""
    return f'<div class="missing"><p>{escape(what)}</p><pre><code>{escape(command)}</code></pre></div>'


def figure(chart: str, caption: str, legend: str = "", data: str = "") -> str:
    """A plot with its words, and its numbers to unfold."""
    more = f"<details><summary>These figures as a table</summary>{data}</details>" if data else ""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{legend}{chart}{more}</figure>"


def folded(name: str, content: str, pinned: bool) -> str:
    """Content under a name, to unfold; as it is where there is no name."""
    if not name:
        return content
    return f"<details{' open' * pinned} class='case'><summary>{escape(name)}</summary>{content}</details>"


def legend(entries: Sequence[tuple[str, int | str]]) -> str:
    """What colours, or marks by their name, stand for."""
    items = "".join(
        f"<li><i {_swatch(colour)}></i>{escape(name)}</li>" for name, colour in entries
    )  # fmt: skip
    return f'<ul class="legend">{items}</ul>'


def _swatch(colour: int | str) -> str:
    return f'class="{colour}"' if isinstance(colour, str) else f'style="background:var(--c{colour})"'


def facts(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of words."""
    return table(head, rows).replace("<table>", '<table class="facts">', 1)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], ours: str | None = None, raw: bool = False) -> str:
    """Rows under a head; that of `ours` stands out. Cells are text, or with `raw` HTML."""

    def cell(text: str) -> str:
        return text if raw else escape(text)

    heads = "".join(f'<th scope="col">{escape(word)}</th>' for word in head)
    body = "".join(
        f"<tr{_ours(row[0] == ours)}>"
        + f'<th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{cell(text)}</td>" for text in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _ours(is_it: bool) -> str:
    return ' class="ours"' if is_it else ""


def cards(entries: Iterable[tuple[str, str]]) -> str:
    """A few figures that say the most."""
    items = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in entries
    )
    return f'<div class="cards">{items}</div>'
