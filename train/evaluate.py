"""Evaluate a target and draft pair on held-out text: loss, agreement, acceptance, and expert prediction per layer.

`spmoe predictability` measures this for any pair with the engine; this script is a quick check of a training run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from network import SPAN, Decoder, route
from torch import Tensor
from torch.nn import functional as F
from train import BATCH, WINDOW, load, read_tokens


def evaluate(draft: Decoder, target: Decoder, tokens: Tensor, windows: int) -> dict[str, Any]:
    """Return means over evenly spaced windows; figures per layer are lists."""
    shape = target.shape
    sums: dict[str, list[Tensor]] = {}

    def add(name: str, value: Tensor) -> None:
        sums.setdefault(name, []).append(value.double().cpu())

    starts = torch.linspace(0, len(tokens) - WINDOW - 2, windows).long()
    for part in starts.split(BATCH // 4):
        rows = torch.stack([tokens[s : s + WINDOW + 1] for s in part.tolist()]).long()
        seen: dict[str, list[Tensor]] = {}
        logits: dict[str, Tensor] = {}
        with torch.no_grad(), torch.autocast(rows.device.type, torch.bfloat16):
            for name, model in (("draft", draft), ("target", target)):
                output = model(rows[:, :-1])
                logits[name], seen[name] = output.logits.float(), output.taps
                add(f"{name}_loss", F.cross_entropy(logits[name].flatten(0, 1), rows[:, 1:].flatten()))
        add("agreement", (logits["draft"].argmax(-1) == logits["target"].argmax(-1)).double().mean())
        p, q = logits["target"].softmax(-1), logits["draft"].softmax(-1)
        add("acceptance", torch.minimum(p, q).sum(-1).mean())
        figures: dict[str, list[Tensor]] = {}
        for index, layer in enumerate(target.layers):
            with torch.no_grad():
                truth = route(layer.norm2(seen["target"][index]), layer.ffn.router)
                guess = route(layer.norm2(seen["draft"][index]), layer.ffn.router)
            for name, value in _compare(truth, guess, shape.top_k).items():
                figures.setdefault(name, []).append(value)
            cosine = F.cosine_similarity(seen["draft"][index].float(), seen["target"][index].float(), dim=-1)
            figures.setdefault("cosine", []).append(cosine.mean())
        for name, values in figures.items():
            add(name, torch.stack(values))
    means = {name: torch.stack(values).mean(0) for name, values in sums.items()}
    # the same if every token used any of the experts, independently of the others
    means["previous_token_random"] = torch.tensor(shape.top_k / shape.experts)
    means["distinct_random"] = torch.tensor(shape.experts * (1 - (1 - shape.top_k / shape.experts) ** SPAN))
    return {name: value.tolist() for name, value in means.items()}


def _compare(truth: Tensor, guess: Tensor, k: int) -> dict[str, Tensor]:
    """Return the figures of one layer."""  # truth, guess: [batch, length, experts] probabilities

    def hot(probs: Tensor, n: int) -> Tensor:
        return torch.zeros_like(probs).scatter(-1, probs.topk(n, dim=-1).indices, 1.0)

    real, said, wide = hot(truth, k), hot(guess, k), hot(guess, k + 1)

    def union(x: Tensor) -> Tensor:
        return x[:, : x.shape[1] // SPAN * SPAN].unflatten(1, (-1, SPAN)).amax(2)

    both = (union(real) * union(said)).sum()
    return {
        "top1": (truth.argmax(-1) == guess.argmax(-1)).double().mean(),
        "recall": (real * said).sum(-1).mean() / k,
        "recall_wide": (real * wide).sum(-1).mean() / k,
        "union_recall": both / union(real).sum(),
        "union_precision": both / union(said).sum(),
        "previous_token": (real[:, 1:] * real[:, :-1]).sum(-1).mean() / k,
        "distinct": union(real).sum(-1).mean(),  # experts that SPAN tokens use
        "largest_load": real.mean((0, 1)).max(),
    }


def main() -> None:
    """Evaluate targets against the draft."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+", help="stages, or directories of exported checkpoints")
    parser.add_argument("--draft", default="draft", help="a stage, or the directory of an exported checkpoint")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--runs", type=Path, default=Path(__file__).parent / "runs")
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    tokens = read_tokens(args.data / "heldout.u16.xz", args.device)
    draft = load(args.draft, args.runs, args.device).eval()
    args.runs.mkdir(parents=True, exist_ok=True)
    for target in args.targets:
        name = Path(target).name
        figures = evaluate(draft, load(target, args.runs, args.device).eval(), tokens, args.windows)
        (args.runs / f"{name}.evaluation.json").write_text(json.dumps(figures))
        for figure, value in figures.items():
            if isinstance(value, list):
                spread = f"(first {value[0]:.3f}, last {value[-1]:.3f}, least {min(value):.3f}, most {max(value):.3f})"
                print(f"{name:10s} {figure:21s} {sum(value) / len(value):.4f}  {spread}")
            else:
                print(f"{name:10s} {figure:21s} {value:.4f}")


if __name__ == "__main__":
    main()
