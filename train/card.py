"""Fill in the figures of a target's model card: `python train/card.py extras/diverse --evaluation FILE`.

FILE is what `evaluate.py` wrote: figures on held-out packages. The script measures the same with the engine, in float32
on `sample.txt` of the shipped pair, writes `figures.json`, and replaces the table that has the columns of `HEADER` in
the target's README.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from network import SPAN

from spmoe import LLM
from spmoe.bench.predictability import Predictability, measure_predictability
from spmoe.models.shipped import sample_text, shipped_pair

HEADER = ["| figure | held-out packages | `sample.txt` |", "| --- | --- | --- |"]
MEANS = ("cosine", "top1", "recall", "recall_plus_one", "union_recall", "union_precision", "previous_token")


def sample_figures(measured: Predictability) -> dict[str, float]:
    """Return the figures of `sample.txt`, rounded as on the card."""
    mean = measured.mean()
    found = {
        "greedy_agreement": measured.greedy_agreement,
        "sampling_acceptance": measured.sampling_acceptance,
        **{name: getattr(mean, name) for name in MEANS},
        "largest_load": max(layer.largest_load for layer in measured.layers),
    }
    return {name: round(value, 3) for name, value in found.items()}


def table(held_out: dict[str, Any], sample: dict[str, float], top_k: int, experts: int) -> list[str]:
    """Return the lines of the table; figures per layer are averaged, and of the loads the largest is shown."""
    held = {name: sum(value) / len(value) if isinstance(value, list) else value for name, value in held_out.items()}
    held["largest_load"] = max(held_out["largest_load"])
    rows = [
        (f"loss, nats per token (draft: {held['draft_loss']:.3f})", "target_loss", None),
        ("greedy agreement", "agreement", "greedy_agreement"),
        ("sampling acceptance", "acceptance", "sampling_acceptance"),
        ("cosine similarity of hidden states", "cosine", "cosine"),
        ("top-1 prediction", "top1", "top1"),
        (f"recall@{top_k}", "recall", "recall"),
        (f"recall with {top_k + 1} fetched", "recall_wide", "recall_plus_one"),
        (f"union recall over {SPAN} tokens", "union_recall", "union_recall"),
        ("union precision", "union_precision", "union_precision"),
        (f"largest load of an expert (even: {top_k / experts:.3f})", "largest_load", "largest_load"),
        (
            f"experts that the token before used too (at random: {held['previous_token_random']:.3f})",
            "previous_token",
            "previous_token",
        ),
        (f"different experts of {SPAN} tokens (at random: {held['distinct_random']:.3f})", "distinct", None),
    ]
    cells = [(label, f"{held[a]:.3f}", "" if b is None else f"{sample[b]:.3f}") for label, a, b in rows]
    return HEADER + [f"| {label} | {first} | {second} |".replace("|  |", "| |") for label, first, second in cells]


def fill_in(text: str, lines: list[str]) -> str:
    """Return a card with its table of figures replaced."""
    before, header, after = text.partition(HEADER[0] + "\n")
    if not header:
        raise SystemExit(f"the card has no table that starts with {HEADER[0]}")
    rest = after.split("\n")
    end = next((number for number, line in enumerate(rest) if not line.startswith("|")), len(rest))
    return before + "\n".join(lines + rest[end:])


def main() -> None:
    """Measure, and write the card's figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="directory of the exported target and its README.md")
    parser.add_argument("--evaluation", type=Path, required=True, help="file that evaluate.py wrote")
    args = parser.parse_args()
    held_out = json.loads(args.evaluation.read_text())
    with LLM(str(args.target), draft=shipped_pair()[1], dtype="float32", cutoff="all") as llm:
        measured = measure_predictability(llm.engine, sample_text(), window=256, windows=8, span=SPAN)
    figures = sample_figures(measured)
    card = args.target / "README.md"
    card.write_text(fill_in(card.read_text(), table(held_out, figures, measured.top_k, measured.experts)))
    (args.target / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
