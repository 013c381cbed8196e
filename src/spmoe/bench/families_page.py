"""The table of families as a page, with what was checked and why not."""

from __future__ import annotations

from collections.abc import Sequence

from spmoe.backends.devices import choose_device, device_facts
from spmoe.bench.families import CHECKS, COUNT, CUDA_CHECKS, IN_PART, OK, K, VerifyResult


def checks_on(device: str) -> tuple[str, ...]:
    """What is checked there."""
    return CHECKS if device == "cpu" else CUDA_CHECKS


def short(answer: str) -> str:
    """An answer in one or two words."""
    return answer if answer == OK else IN_PART if answer.startswith(IN_PART) else "no"


def markdown(verdicts: Sequence[VerifyResult], version: str, device: str = "cpu") -> str:
    """The table as a page."""
    checks = checks_on(device)
    counts = ", ".join(f"{sum(getattr(v, check) == OK for v in verdicts)} {check}" for check in checks)
    on, file = "the CPU", "docs/families.md"
    if device != "cpu":
        on, file = f"a CUDA device ({device_facts(choose_device(device)).name})", f"docs/families-{device}.md"
    option = "" if device == "cpu" else f" --device {device}"
    lines = [
        "# Families" if device == "cpu" else "# Families on CUDA",
        "",
        f"Made by `spmoe families{option} --markdown {file}` with transformers {version}. Of {len(verdicts)} MoE",
        f"families with a causal language model: {counts}.",
        "",
        f"Each was built as a tiny random checkpoint and really run, in float32 on {on}:",
        "",
        "- **loads**: the engine takes the checkpoint, experts into the expert file;",
        f"- **plain**: greedy decoding writes the {COUNT} tokens that transformers' own `generate` writes, with the",
        "  least expert memory there may be, half of it and all;",
        f"- **speculation**: so it does with {K} draft tokens per step, from a draft that is mostly wrong and one that",
        "  is mostly right, prefetching by draft-gate and on demand, with the same three memories;",
        "- **prediction**: every MoE layer's norm and router were found and, asked alone about the hidden states of a",
        "  forward, name exactly the experts that it used; in part, where that holds for some layers only: experts of",
        "  the others are loaded on demand.",
    ]
    if "recorded" in checks:
        lines[-1] = lines[-1].replace("demand.", "demand;")
        lines.append("- **recorded**: forwards of few rows are recorded as CUDA graphs, and replayed.")
    lines += [
        "",
        "[Adding a model](adding-a-model.md) says what to do about a family that fails.",
        "",
        f"| family | {' | '.join(checks)} |",
        f"| --- |{' --- |' * len(checks)}",
    ]
    for result in verdicts:
        cells = [short(getattr(result, check)) for check in checks]
        lines.append(f"| {result.family} | {' | '.join(cells)} |")
    failures = [(v.family, c, getattr(v, c)) for v in verdicts for c in checks if getattr(v, c) != OK]
    if failures:
        lines += ["", "Why not:", ""]
        lines += [f"- {family}, {check}: {why}" for family, check, why in failures]
    return "\n".join(lines) + "\n"
