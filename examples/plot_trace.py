"""Plot which experts a recorded generation used: python examples/plot_trace.py TRACE.npz PICTURE.png.

Record the trace first, and install matplotlib (pip install 'spmoe[report]'):

    spmoe trace record --max-prompts 2 --max-tokens 64 -o run.npz

A trace is an .npz of plain arrays; docs/traces.md describes them.
"""

import json
import sys

import matplotlib as mpl
import numpy as np

mpl.use("agg")  # writes files, needs no display
from matplotlib import pyplot as plt


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, picture = sys.argv[1:]
    with np.load(source) as trace:
        header = json.loads(str(trace["header"]))
        routed = trace["routed"]  # [rows, layers, top_k], -1: no expert
    rows, layers, _ = routed.shape
    experts = max(header["shape"]["experts"])
    used = np.zeros((rows, layers, experts + 1), dtype=bool)  # the last column takes the -1
    np.put_along_axis(used, routed.astype(np.int64), True, axis=2)
    used = used[:, :, :experts]
    again = (used[1:] & used[:-1]).sum(axis=(0, 2)) / used[1:].sum(axis=(0, 2))  # [layers]

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=[2, 1], layout="constrained")
    image = left.imshow(used.mean(axis=0), aspect="auto", cmap="viridis")
    figure.colorbar(image, label="share of tokens")
    left.set(title="Experts used", xlabel="expert", ylabel="layer")
    right.barh(np.arange(layers), 100 * again)
    right.invert_yaxis()
    right.set(title="Used by the token before, too", xlabel="% of the experts", ylabel="layer")
    figure.savefig(picture, dpi=120)
    print(f"{rows} rows, {layers} layers, {100 * again.mean():.0f}% of the experts used twice in a row: {picture}")


if __name__ == "__main__":
    main()
