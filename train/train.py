"""Train the models: `python train/train.py base target fine draft`. Seeded; every stage can be resumed.

The targets start from the dense base: each expert is a noisy copy of its feed-forward layer (of a part of it in the
fine-grained target). They are trained with a load-balancing loss. The draft is the base, distilled from both targets:
it learns their next-token distributions, and to keep its hidden states close to theirs. Checkpoints are saved in
`--runs`; a stage resumes from its own checkpoint, and a complete stage is skipped.

`python train/train.py diverse` needs none of these stages. It starts from parts of the shipped draft, which was not
distilled from it, keeps its hidden states near the draft's, and trains consecutive tokens to use different experts.
`--from` names another checkpoint to start from.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from convert import from_transformers
from muon import optimizers
from network import Decoder, Output, Shape
from torch import Tensor
from torch.nn import functional as F

DENSE = Shape()
EIGHT = replace(DENSE, experts=8, top_k=2)
# 8 routed experts of 64 and the shared one have, together, the intermediate size of the draft
FINE = replace(DENSE, experts=64, top_k=8, ffn=12, shared=64, attention_bias=True)
# the largest experts with which the checkpoint stays under 8 MB, with its tokenizer
DIVERSE = replace(DENSE, experts=16, top_k=2, ffn=16)
SHIPPED_DRAFT = Path(__file__).parents[1] / "src" / "spmoe" / "pair" / "draft"


@dataclass(frozen=True)
class Stage:
    """Settings of one training stage."""

    shape: Shape
    steps: int
    matrix_lr: float
    other_lr: float
    parent: str | None = None  # a stage, or the directory of an exported checkpoint
    teachers: tuple[str, ...] = ()
    noise: float = 0.4  # added to the copied weights of an expert, in standard deviations of these weights
    balance: float = 0.16  # weight of the load-balancing loss, a mean over 16 layers: 0.01 per layer
    overlap: float = 0.0  # weight of the overlap loss, a mean over layers too
    align: float = 0.0  # weight of the distance of the hidden states from the parent's


STAGES = {
    "base": Stage(DENSE, 4500, 0.02, 4e-3),
    "target": Stage(EIGHT, 4500, 0.006, 1e-3, parent="base"),
    "fine": Stage(FINE, 3500, 0.006, 1e-3, parent="base"),
    "draft": Stage(DENSE, 1800, 0.006, 1e-3, parent="base", teachers=("target", "fine")),
    "diverse": Stage(DIVERSE, 1600, 0.01, 2e-3, parent=str(SHIPPED_DRAFT), overlap=0.32, align=0.25),
}
BATCH, WINDOW = 64, 1024
ALIGN = 1.0  # weight of the distance between hidden states in distillation


def read_tokens(path: Path, device: str) -> Tensor:
    """Read a split of the corpus."""  # [tokens] int32
    return torch.from_numpy(np.frombuffer(lzma.decompress(path.read_bytes()), np.uint16).astype(np.int32)).to(device)


def batch(tokens: Tensor, generator: torch.Generator, size: int, window: int) -> tuple[Tensor, Tensor]:
    """Return random windows of tokens, and their next tokens."""  # 2 x [size, window]
    starts = torch.randint(len(tokens) - window - 1, (size, 1), generator=generator, device=tokens.device)
    rows = tokens[starts + torch.arange(window + 1, device=tokens.device)].long()
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def upcycle(draft: Decoder, shape: Shape, noise: float) -> Decoder:
    """Return a sparse model whose experts are noisy copies of the dense model's feed-forward layers, or of parts."""
    model = Decoder(shape).to(draft.embed.weight.device)
    known = draft.state_dict()
    model.load_state_dict({k: v for k, v in known.items() if ".ffn." not in k}, strict=False)
    for ours, theirs in zip(model.layers, draft.layers, strict=True):
        torch.nn.init.normal_(ours.ffn.router, std=0.02)
        if shape.shared:
            torch.nn.init.zeros_(ours.ffn.shared_weight)
        for name in ("gate", "up", "down"):
            weight = getattr(theirs.ffn, name).data[0]  # [ffn, hidden]
            if shape.shared:
                # the gate of the shared expert starts at one half, and the routing weights sum to one
                scale = 2.0 if name == "down" else 1.0
                getattr(ours.ffn, f"shared_{name}").data[0] = scale * weight[: shape.shared]
                weight = weight[shape.shared :]
            if name == "down" and shape.ffn < len(weight):  # parts add up; the routing weights take their mean
                weight = weight * shape.top_k
            columns = torch.arange(shape.experts * shape.ffn, device=weight.device) % len(weight)
            copies = weight[columns].unflatten(0, (-1, shape.ffn))
            getattr(ours.ffn, name).data = copies + noise * weight.std() * torch.randn_like(copies)
    return model


def load(name: str, runs: Path, device: str) -> Decoder:
    """Load the model of a complete stage; any other name is the directory of an exported checkpoint."""
    if name not in STAGES:
        return from_transformers(Path(name)).to(device)
    if not (runs / f"{name}.pt").exists():
        raise SystemExit(f"stage '{name}' is not in {runs}; run it first")
    saved = torch.load(runs / f"{name}.pt", map_location=device, weights_only=True)
    if saved["step"] != saved["steps"]:
        raise SystemExit(f"stage '{name}' is not complete; run it first")
    model = Decoder(Shape(**saved["shape"])).to(device)
    model.load_state_dict(saved["model"])
    return model


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, tokens: Tensor, device: str, windows: int = 256) -> float:
    """Return the mean cross-entropy of windows spaced evenly over the held-out split."""
    starts = torch.linspace(0, len(tokens) - WINDOW - 2, windows).long()
    losses = []
    for part in starts.split(BATCH):
        rows = torch.stack([tokens[s : s + WINDOW + 1] for s in part.tolist()]).long()
        with torch.autocast(device, torch.bfloat16):
            logits = model(rows[:, :-1]).logits
        losses.append(F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()))
    return float(torch.stack(losses).mean())


def distillation_loss(student: Output, teacher: Output) -> Tensor:
    """Return the distance of the student's next-token distribution and hidden states from the teacher's."""
    ours = F.log_softmax(student.logits.float(), dim=-1)
    theirs = F.log_softmax(teacher.logits.float(), dim=-1)
    divergence = F.kl_div(ours.flatten(0, 1), theirs.flatten(0, 1), reduction="batchmean", log_target=True)
    return divergence + ALIGN * distance(student, teacher)


def distance(ours: Output, theirs: Output) -> Tensor:
    """Return 1 minus the cosine similarity of the hidden states, a mean over tokens and layers."""
    apart = [1 - F.cosine_similarity(a, b, dim=-1).mean() for a, b in zip(ours.taps, theirs.taps, strict=True)]
    return torch.stack(apart).mean()


def first_model(stage: Stage, runs: Path, device: str) -> Decoder:
    """Return the initial model of a stage."""
    if stage.parent is None:
        return Decoder(stage.shape).to(device)
    parent = load(stage.parent, runs, device)
    return upcycle(parent, stage.shape, stage.noise) if stage.shape != parent.shape else parent


def train(name: str, stage: Stage, data: Path, runs: Path, device: str, save_every: int) -> None:
    """Run a stage to its end; resume it if it has a checkpoint."""
    path = runs / f"{name}.pt"
    runs.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = first_model(stage, runs, device)
    frozen = {
        name: load(name, runs, device).eval().requires_grad_(False)
        for name in (*stage.teachers, *([stage.parent] if stage.parent and stage.align else []))
    }
    steppers = optimizers(model, stage.matrix_lr, stage.other_lr)
    rates = [[group["lr"] for group in stepper.param_groups] for stepper in steppers]
    done = 0
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        done = saved["step"]
        if done >= stage.steps:
            print(f"{name}: complete at step {done}")
            return
        model.load_state_dict(saved["model"])
        for stepper, state in zip(steppers, saved["optimizers"], strict=True):
            stepper.load_state_dict(state)
    training, held_out = (read_tokens(data / f"{split}.u16.xz", device) for split in ("train", "heldout"))
    count = sum(p.numel() for p in model.parameters())
    print(f"{name}: {count / 1e6:.2f} M parameters, {len(training) / 1e6:.1f} M tokens, step {done} of {stage.steps}")
    compiled = torch.compile(model) if device == "cuda" else model
    others = {name: torch.compile(other) if device == "cuda" else other for name, other in frozen.items()}
    started, first = time.perf_counter(), done
    for step in range(done, stage.steps):
        # the schedule and the batch depend on the step only, so that a resumed run repeats them
        warm, rest = min(1.0, (step + 1) / 100), 1 - step / stage.steps
        factor = min(warm, min(1.0, rest / 0.5))
        for stepper, own in zip(steppers, rates, strict=True):
            for group, rate in zip(stepper.param_groups, own, strict=True):
                group["lr"] = rate * factor
        generator = torch.Generator(device).manual_seed(step)
        inputs, targets = batch(training, generator, BATCH, WINDOW)
        with torch.autocast(device, torch.bfloat16):
            output = compiled(inputs)
            loss = F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())
            objective = loss + stage.balance * output.balance + stage.overlap * output.overlap
            with torch.no_grad():
                answers = {name: other(inputs) for name, other in others.items()}
            if stage.teachers:
                objective = torch.stack([distillation_loss(output, answers[name]) for name in stage.teachers]).mean()
            if stage.align and stage.parent:
                objective = objective + stage.align * distance(output, answers[stage.parent])
        objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        last = step + 1 == stage.steps
        if step % 200 == 0 or last:
            speed = (step + 1 - first) * BATCH * WINDOW / (time.perf_counter() - started)
            print(
                f"{name} {step:6d}  loss {loss.item():.4f}  objective {objective.item():.4f}  "
                f"balance {output.balance.item():.3f}  overlap {output.overlap.item():.3f}  "
                f"{speed / 1e6:.2f} M tokens/s  {time.perf_counter() - started:.0f} s",
                flush=True,
            )
        if last or (step + 1) % save_every == 0:
            record = {
                "step": step + 1,
                "steps": stage.steps,
                "shape": asdict(stage.shape),
                "model": model.state_dict(),
                "optimizers": [stepper.state_dict() for stepper in steppers],
            }
            torch.save(record, path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)
    if not math.isfinite(value := held_out_loss(compiled, held_out, device)):
        raise SystemExit(f"{name}: the held-out loss is {value}")
    print(f"{name}: held-out loss {value:.4f} nats per token")
    (runs / f"{name}.json").write_text(json.dumps({"steps": stage.steps, "held_out_loss": value}))


def main() -> None:
    """Parse arguments and train one stage, or several in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--runs", type=Path, default=Path(__file__).parent / "runs")
    parser.add_argument("--from", dest="parent", help="start from this stage, or from the checkpoint in this directory")
    parser.add_argument("--steps", type=int, help="train for this many steps instead of the stage's own number")
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    for name in args.stages:
        torch.compiler.reset()  # compilations of earlier stages must not count towards this stage's limit
        given = {"steps": args.steps, "parent": args.parent}
        stage = replace(STAGES[name], **{field: value for field, value in given.items() if value is not None})
        train(name, stage, args.data, args.runs, args.device, args.save_every)


if __name__ == "__main__":
    main()
