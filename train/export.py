"""Write trained stages as Hugging Face checkpoints: `python train/export.py STAGE --out DIR`."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from convert import to_transformers
from train import load


def main() -> None:
    """Export complete stages, with the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+")
    parser.add_argument("--runs", type=Path, default=Path(__file__).parent / "runs")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parent / "data" / "tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    files = sorted(args.tokenizer.glob("tokenizer*.json"))
    if not files:
        raise SystemExit(f"no tokenizer in {args.tokenizer}; --tokenizer names its directory")
    for name in args.stages:
        to_transformers(load(name, args.runs, "cpu")).save_pretrained(args.out / name)
        for file in files:
            shutil.copy(file, args.out / name)


if __name__ == "__main__":
    main()
