"""How the first epoch of FoMoH-3D on the paper's CNN ends, seed by seed, and that with solvers that descend.

    python benchmarks/first_epoch.py --device cuda --out benchmarks/results/first_epoch_h200.json
    python benchmarks/first_epoch.py --device cuda --systems fomoh --peer-fomoh PATH --out ...   # the authors' own code
    python benchmarks/first_epoch.py --draw docs/figures/first-epoch.svg --out benchmarks/results/first_epoch_cpu.json

The setting is that of the paper's row with a schedule: K = 3, lr 0.3032, batches of 2048, 30 steps. All of ours have
the same initial values, batches and directions with the same seed; what differs is the solver, and whether a step is
halved until the loss does not rise. The file is written after each run, and what it holds is not run again. The
authors' code is run with its own model, its own draws and its own step, on batches in a random order.

On a CPU an epoch of MNIST takes minutes a seed; the digits inside the package, with batches of a tenth, 30 steps too,
take seconds: --dataset digits --batch 200.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import jetplane as jp
from jetplane import solvers
from jetplane.optim import Acceptance, FoMoHKD
from jetplane_lab import data, models
from jetplane_lab.bench.machine import environment
from jetplane_lab.bench.systems import authors
from jetplane_lab.data import files
from jetplane_lab.training.batches import order


class Composed(NamedTuple):
    """FoMoH-KD with another solver, and with or without a test of the step on the loss at its end."""

    label: str
    solver: Callable[[], solvers.Solver | solvers.Following]
    accept: Acceptance | None = None


_HALVED = Acceptance(backtracks=20)  # until the loss does not rise
OURS = {
    "fomoh-3d": Composed("FoMoH-3D, the paper's solver", solvers.JitteredInverse),
    "saddle-free": Composed("SaddleFree", solvers.SaddleFree),
    "levenberg-marquardt": Composed("LevenbergMarquardt", solvers.LevenbergMarquardt),
    "saddle-free-halved": Composed("SaddleFree, halved where the loss rises", solvers.SaddleFree, _HALVED),
    "levenberg-marquardt-halved": Composed(
        "LevenbergMarquardt, halved where it rises", solvers.LevenbergMarquardt, _HALVED
    ),
    "trust-region": Composed("TrustRegion", solvers.TrustRegion),
}
LABELS = {name: one.label for name, one in OURS.items()} | {"fomoh": "FoMoH-3D, the authors' code"}
HIGH = 5.0  # a training NLL above it is called uphill: chance has 2.3
_SETTING = ("dataset", "samples", "k", "lr", "batch")
_SAME = ("torch", "device", "threads", "fomoh")  # of an environment: measurements of two are not mixed

Run = dict[str, Any]


# -- one epoch --------------------------------------------------------------------------------------------------------


def ours(system: str, seed: int, split: data.Split, setting: Run, device: str) -> Iterator[Run]:
    """The steps of an epoch: the loss before each, and whether the plane's curvature was indefinite."""
    model = models.build("cnn", seed).to(device)
    images, labels = data.scaled(split.images, torch.device(device)), split.labels.to(device)
    # patience: None, for a step that is not taken is counted, and ends nothing
    search = FoMoHKD(
        *(model.parameters(), setting["lr"], setting["k"]),
        solver=OURS[system].solver(),
        accept=OURS[system].accept,
        seed=seed,
        patience=None,
    )

    def loss(index: Tensor) -> Tensor:
        return functional.cross_entropy(model(images[index]), labels[index])

    for index in order(len(labels), seed, 0, torch.device(device)).split(setting["batch"]):
        with jp.forward_only():
            value = float(search.step(loss, index))
        found = search.report
        curvature = found.curvature.double().cpu()
        indefinite = bool(curvature.isfinite().all()) and float(torch.linalg.eigvalsh(curvature)[0]) < 0
        uphill = float(found.slope.double() @ found.coefficients.to(found.slope).double()) > 0
        yield {"loss": value, "size": len(index), "indefinite": indefinite, "uphill": uphill}


def theirs(seed: int, split: data.Split, setting: Run, device: str, path: Path) -> Iterator[Run]:
    """The same of the authors' model and step; what their planes are is not known outside of them."""
    nn, opt = authors.load(path, "nn"), authors.load(path, "opt")
    hyper = authors.load(path, "hyperdual").HyperTensor
    torch.manual_seed(seed)  # their code draws from torch's generators
    model = nn.CNNModel()
    model.nn_module_to_htorch_model(models.CNN().layers, verbose=False)
    model.to(device)
    images, labels = data.scaled(split.images, torch.device(device)), split.labels.to(device)

    def loss(prediction: Any, target: Any) -> Any:
        return nn.nll_loss(prediction.logsoftmax(-1), target)

    for index in torch.randperm(len(labels)).split(setting["batch"]):
        batch = images[index], labels[index]
        with torch.no_grad():
            value = loss(model(hyper(batch[0]), None), hyper(batch[1])).real
            opt.optimizer_step_plane_Nd(model, loss, 1, *batch, N=setting["k"], device=device, lr=setting["lr"])
        yield {"loss": float(value), "size": len(index)}


def summed(system: str, seed: int, steps: list[Run]) -> Run:
    """A run's record. Numbers that are not finite are null."""
    total = sum(step["loss"] * step["size"] for step in steps) / sum(step["size"] for step in steps)
    found: Run = {"system": system, "seed": seed, "nll": finite(total)}
    for name in ("indefinite", "uphill"):
        if name in steps[0]:
            found[name] = sum(step[name] for step in steps)
    return {**found, "losses": [finite(step["loss"]) for step in steps]}


def finite(value: float) -> float | None:
    """JSON has no word for what is not."""
    return value if math.isfinite(value) else None


# -- the file ---------------------------------------------------------------------------------------------------------


def opened(path: Path, where: Run, setting: Run) -> Run:
    """What a file holds, which must be of this setting and machine, or a new one."""
    if not path.exists():
        return {"environment": where, "setting": setting, "results": []}
    found: Run = json.loads(path.read_text(encoding="utf-8"))
    pairs = [(name, found["setting"].get(name), setting[name]) for name in _SETTING]
    pairs += [(name, found["environment"].get(name), where.get(name)) for name in _SAME if name in where]
    for name, before, now in pairs:
        if before != now and not (name == "fomoh" and before is None):
            raise ValueError(f"{path} was measured with {name} {before}, and this is {now}; expected another --out.")
    found["environment"] |= {name: where[name] for name in _SAME if name in where}
    return found


def measure(arguments: argparse.Namespace) -> Run:
    """All runs that the file lacks, one after the other."""
    if "fomoh" in arguments.systems and arguments.peer_fomoh is None:
        raise ValueError("the system fomoh needs the authors' code; expected --peer-fomoh PATH.")
    split = data.load(arguments.dataset, arguments.data_dir).train
    setting = {name: getattr(arguments, name) for name in _SETTING if name != "samples"}
    setting["samples"] = min(arguments.samples or len(split.labels), len(split.labels))
    split = data.Split(split.images[: setting["samples"]], split.labels[: setting["samples"]])
    whole = opened(arguments.out, environment(arguments.device, torch.get_num_threads(), arguments.peer_fomoh), setting)
    there = {(run["system"], run["seed"]) for run in whole["results"]}
    wanted = [(system, seed) for seed in arguments.seeds for system in arguments.systems]
    for number, (system, seed) in enumerate(wanted, 1):
        if (system, seed) in there:
            continue
        if system == "fomoh":
            steps = theirs(seed, split, setting, arguments.device, arguments.peer_fomoh)
        else:
            steps = ours(system, seed, split, setting, arguments.device)
        run = summed(system, seed, list(steps))
        whole["results"].append(run)
        files.write(arguments.out, (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())
        said = f"{run['nll']:.3f}" if run["nll"] is not None else "not finite"
        print(f"[{number}/{len(wanted)}] {system}, seed {seed}: {said}", file=sys.stderr, flush=True)
    return whole


# -- what is shown ----------------------------------------------------------------------------------------------------


def table(whole: Run) -> str:
    """A line for each system, in Markdown."""
    lines = ["| step | seeds | median NLL | least to largest | above 5 | not finite |", f"| --- |{' ---: |' * 5}"]
    for system, label in LABELS.items():
        runs = [run for run in whole["results"] if run["system"] == system]
        if not runs:
            continue
        values = sorted(math.inf if run["nll"] is None else run["nll"] for run in runs)
        spread = f"{values[0]:.2f} to {values[-1]:.3g}"
        high, lost = sum(value > HIGH for value in values), sum(math.isinf(value) for value in values)
        lines.append(f"| {label} | {len(runs)} | {statistics.median(values):.3g} | {spread} | {high} | {lost} |")
    return "\n".join(lines)


def draw(whole: Run, path: Path) -> None:
    """Each run as a dot: the epoch's NLL by system; those that are not finite stand at the top."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    colours = {"fomoh": "#777777", "fomoh-3d": "#c8553d", "saddle-free": "#e08e2b", "levenberg-marquardt": "#2a9d5c"}
    colours |= {"saddle-free-halved": "#e08e2b", "levenberg-marquardt-halved": "#2a9d5c", "trust-region": "#1b6ca8"}
    shown = [name for name in colours if any(run["system"] == name for run in whole["results"])]
    highest = max([run["nll"] for run in whole["results"] if run["nll"] is not None] + [10 * HIGH])
    pyplot.rcParams.update({"svg.hashsalt": "jetplane", "svg.fonttype": "none", "font.size": 10})
    figure, axes = pyplot.subplots(figsize=(7.2, 0.7 + 0.55 * len(shown)), layout="constrained")
    for height, name in enumerate(reversed(shown)):
        runs = [run for run in whole["results"] if run["system"] == name]
        for run in runs:
            lost = run["nll"] is None
            place = 3 * highest if lost else run["nll"]
            shift = ((run["seed"] * 7) % 16 - 7.5) / 40  # seeds beside each other
            axes.plot(place, height + shift, "x" if lost else "o", color=colours[name], alpha=0.8, markersize=5)
    axes.axvline(math.log(10), color="#555555", linewidth=0.8, dashes=(4, 2))
    axes.annotate("chance", (math.log(10), 1.0), xycoords=("data", "axes fraction"), xytext=(3, -10),
                  textcoords="offset points", fontsize=8, color="#555555")  # fmt: skip
    axes.set_yticks(range(len(shown)), [LABELS[name] for name in reversed(shown)])
    axes.set(xscale="log", ylim=(-0.5, len(shown) - 0.5), xlabel="training NLL of the first epoch (x: not finite)")
    axes.grid(alpha=0.25, linewidth=0.5, axis="x")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing, or draw what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--systems", nargs="+", choices=list(LABELS), default=list(OURS), help="(default: ours)")
    add("--seeds", nargs="+", type=int, default=list(range(16)), metavar="N", help="(default: 0 to 15)")
    add("--dataset", default="mnist")
    add("--data-dir", metavar="DIR", help="where the files of MNIST lie")
    add("--samples", type=int, metavar="N", help="only the first so many training digits (default: all)")
    add("--k", type=int, default=3)
    add("--lr", type=float, default=0.3032)
    add("--batch", type=int, default=2048)
    add("--device", default="cpu")
    add("--peer-fomoh", type=Path, metavar="PATH", help="checkout of the authors' code (SRI-CSL/fomoh)")
    add("--out", type=Path, required=True, metavar="FILE", help="JSON; what it holds is not run again")
    add("--draw", type=Path, metavar="SVG", help="draw what the file holds, and run nothing")
    arguments = parser.parse_args(argv)
    if arguments.draw is None:
        whole = measure(arguments)
    else:
        whole = json.loads(arguments.out.read_text(encoding="utf-8"))
        draw(whole, arguments.draw)
    print(table(whole))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
