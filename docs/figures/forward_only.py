"""Draws docs/figures/forward-only.svg from the runs in results/: ``python docs/figures/forward_only.py``."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results"
# what is drawn: the run, its name, its colour, its dashes
CURVES = (
    ("beyond/adam-cnn-seed-0.json", "backprop, Adam", "#555555", (4, 2)),
    ("beyond/horizon-cnn-seed-0.json", "forward-only: HorizonAdam, nothing tuned", "#1b6ca8", ()),
    ("beyond/forward-cnn-seed-0.json", "forward-only: Adam on forward gradients", "#2a9d5c", ()),
    ("mnist/cnn-fomoh-2d-sch-seed-0.json", "forward-only: FoMoH-2D with schedule, of the paper", "#c8553d", ()),
)


def curve(path: Path) -> tuple[list[float], list[float]]:
    """Passes over the training set after each epoch, and the lowest error so far on validation digits, in percent."""
    metrics = json.loads(path.read_text())["metrics"]
    lowest, errors = 100.0, []
    for accuracy in metrics["validation_accuracy"]:
        lowest = min(lowest, 100 * (1 - accuracy))
        errors.append(lowest)
    return metrics["forward_equivalents"], errors


def draw(path: Path) -> None:
    """All curves as one SVG, the same bytes each time."""
    pyplot.rcParams.update({"svg.hashsalt": "jetplane", "svg.fonttype": "none", "font.size": 10})
    figure, axes = pyplot.subplots(figsize=(7.2, 3.2), layout="constrained")
    for name, label, colour, dashes in CURVES:
        passes, errors = curve(RESULTS / name)
        axes.plot(passes, errors, color=colour, label=label, linewidth=1.6, dashes=dashes or (1, 0))
    axes.set(xscale="log", yscale="log", ylim=(0.7, 100))
    axes.set_yticks([1, 2, 5, 10, 50], ["1%", "2%", "5%", "10%", "50%"])
    axes.minorticks_off()
    axes.set_xlabel("cost: forward passes over the training set, by counted operations")
    axes.set_ylabel("error on validation digits")
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    draw(HERE / "forward-only.svg")
