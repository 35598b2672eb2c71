"""``jetplane demo``: a network trained without backprop, exact curvature, the Rosenbrock function, and a report."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import jetplane as jp
from jetplane.testing.oracle import double_backward
from jetplane_lab import data, functions, inlined, plots, report, rosenbrock
from jetplane_lab.devices import AUTO, HELP, device
from jetplane_lab.records import Row
from jetplane_lab.training import Config, Trainer
from jetplane_lab.training.batches import place
from jetplane_lab.training.folder import Folder
from jetplane_lab.training.progress import progress

from . import report as report_command

# HorizonAdam and not Adam on forward gradients: it does as well in so few steps, with no learning rate to choose. The
# learning rates of the others were chosen by trying a few: the paper's are for 3000 epochs with batches of 2048. The
# bound on the length of an update keeps a line or plane with hardly any curvature from throwing a short run far away.
_CLIP = 5.0
_RUNS = (
    Config(model="cnn", method="horizon", samples=4),
    Config(model="cnn", method="gauss-newton", k=64),
    Config(model="cnn", method="fgd", lr=1e-3, clip=_CLIP),
    Config(model="cnn", method="fomoh", lr=0.5, clip=_CLIP),
    Config(model="cnn", method="fomoh-kd", k=3, lr=0.5, clip=_CLIP),
    Config(model="cnn", method="backprop", lr=0.05),
)
_EPOCHS, _BATCH = 2, 75
_BACKPROP = "backprop"
_SEEDS, _STEPS, _MARKS = 3, 300, (0, 3, 10, 30, 100, 300)  # of the Rosenbrock comparison


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="forward-only training, curvature and the Rosenbrock function, in two minutes",
        description="Train a CNN on 6,000 digits with forward passes alone, by HorizonAdam, by Gauss-Newton search and "
        "by the paper's FGD, FoMoH and FoMoH-3D, and with backprop beside them; compare the curvature of "
        "small unmodified networks with double backward; minimise the Rosenbrock function with every method; and "
        "write a report. Needs no network, and takes about two minutes on two idle cores. What an earlier demo left "
        "in the folder is "
        "written anew.",
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder of the runs (default: %(default)s)")
    add("--epochs", type=_positive, default=_EPOCHS, metavar="N", help="of each method (default: %(default)s)")
    add("--device", type=device, default=AUTO, metavar="NAME", help=HELP)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """All parts, then the page."""
    start = time.monotonic()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps are small: more threads gain little, and wait for each other on a busy machine
    try:
        accuracies = train(arguments.out, arguments.epochs, arguments.device)
        print()
        checked = networks()
        print()
        compared = minimise()
        print()
    finally:
        torch.set_num_threads(threads)
    records = report.read([arguments.out], report_command.warn)
    report_command.write_page(records, arguments.out / "report.html", after=[checked, compared])
    print(f"{time.monotonic() - start:.0f} s\n")
    print(what_to_look_at(accuracies, arguments.out))
    return 0


def what_to_look_at(accuracies: list[tuple[str, float]], out: Path) -> str:
    """What a newcomer should look at, with the figures of this very demo."""
    backward = dict(accuracies)[_BACKPROP]
    forward = max(accuracy for label, accuracy in accuracies if label != _BACKPROP)
    return (
        "What to look at:\n"
        f"- Unseen digits recognised after training with forward passes alone: {forward:.1%};\n"
        f"  with backprop: {backward:.1%}. The column `passes` is what a step costs.\n"
        "- The largest errors of slope and curvature are those of rounding.\n"
        f"- {out / 'report.html'} begins with the result, and has all\n"
        "  curves against steps, passes and seconds; open it in a browser.\n"
        "Where to go on:\n"
        "- jetplane train quick          a forward-only run of your own, in seconds\n"
        "- jetplane rosenbrock --quick   the paper's test function\n"
        "- docs/forward-only.md          how to train your own model\n"
        "- docs/choosing.md              which method for what"
    )


# -- training -----------------------------------------------------------------------------------------------------


def train(out: Path, epochs: int, device: str) -> list[tuple[str, float]]:
    """Train the CNN on the digits of the package with every method, print how each did, and return their accuracies."""
    configs = [one.replace(epochs=epochs, batch_size=_BATCH, dataset="digits", device=device) for one in _RUNS]
    digits = place(data.load("digits"), configs[0])
    print("A CNN with 431,080 parameters on 6,000 digits, with each method in")
    print(f"{epochs} epoch{'s' * (epochs > 1)} of {6000 // _BATCH} steps.")
    print("Only the last has a backward pass: in the others one would raise. HorizonAdam")
    print("(forward gradients) and the search (in planes of weights) find the length of")
    print("their steps by themselves; the other learning rates are for this short run,")
    print("with updates no longer than 5.", flush=True)
    lines, accuracies = [], []
    for config in configs:
        label = report.method_label(config)
        folder = out / report.slug(config)
        _clear(folder, config)
        # its bar is wiped away at its end: the table below says the same
        summary = Trainer(config, digits, folder, [progress(label, keep=False)]).fit()
        if summary.reason == "interrupted":
            raise KeyboardInterrupt
        final = summary.final
        assert final is not None  # a run that ended has an epoch
        rate = "none" if config.method in ("horizon", "gauss-newton") else f"{config.lr:g}"
        figures = f"{rate:>6}{final.train_nll:>10.3f}{final.train_accuracy:>8.1%}{final.validation_accuracy:>11.1%}"
        lines.append((label, f"{figures}{summary.seconds:>9.1f}{summary.forward_equivalents_per_step:>8.1f}"))
        accuracies.append((_BACKPROP if config.method == "backprop" else label, final.validation_accuracy))
    width = max(len(label) for label, _ in lines)
    print(f"\n{'method':<{width}}{'lr':>6}{'train NLL':>10}{'train':>8}{'validation':>11}{'seconds':>9}{'passes':>8}")
    for label, figures in lines:
        print(f"{label:<{width}}{figures}")
    print("\n`train` and `validation` are accuracies. `passes` is the cost of a step in plain")
    print("forward passes of the same batch, by counted operations. One seed and a few")
    print("hundred steps: the order of neighbours, such as FGD and FoMoH, changes with")
    print("batch size and seed.")
    return accuracies


def _clear(folder: Path, config: Config) -> None:
    """Remove the run of an earlier demo."""
    earlier = Folder(folder, config, report_command.warn)
    try:
        earlier.clear()
    finally:
        earlier.release()


# -- curvature of networks ----------------------------------------------------------------------------------------


def networks(k: int = 3) -> report.Chapter:
    """One forward pass against double backward, on ordinary modules: printed, and as a chapter of the page."""
    found: list[tuple[str, list[report.Cell], _Line]] = []
    print(f"Loss, slope (K) and curvature (K x K) along K = {k} random directions, from one")
    rows = 1 + k + k * (k + 1) // 2
    print(f"forward pass. Each value carries 1 + K + K(K+1)/2 = {rows} rows: itself, its slopes,")
    print("its curvatures.\n")
    print(f"{'network':<25}{'parameters':>11}{'loss':>9}{'curvature of v1':>17}{'largest error':>15}")
    for name, model, x in _models():
        generator = torch.Generator().manual_seed(1)
        y = torch.randint(10, (len(x),), generator=generator)
        params = dict(model.named_parameters())
        directions = {n: torch.randn((k, *p.shape), dtype=p.dtype, generator=generator) for n, p in params.items()}

        def loss(model: nn.Module = model, x: Tensor = x, y: Tensor = y) -> Tensor:
            return functional.cross_entropy(model(x), y)

        with jp.perturb(params, directions) as jets:
            value = loss()
        ours = jets.quadratic(value)
        theirs = double_backward(loss, list(params.values()), list(directions.values()))
        error = max(_error(ours.slope, theirs.slope), _error(ours.curvature, theirs.curvature))
        size = sum(p.numel() for p in params.values())
        print(f"{name:<25}{size:>11,}{float(ours.loss):>9.4f}{float(ours.curvature[0, 0]):>17.4f}{error:>15.1e}")
        numbers = (float(ours.loss), float(ours.slope[0]), float(ours.curvature[0, 0]))
        cells = [report.Cell(name), report.Cell(f"{size:,}", size)]
        cells += [report.Cell(f"{number:.4f}", number) for number in numbers] + [report.Cell(f"{error:.1e}", error)]
        found.append((name, cells, _along(loss, params, directions, numbers)))
    print("\nThe error is relative to the largest entry, against double backward in float64.")
    return _networks_chapter(found, k)


class _Line(NamedTuple):
    """The loss at places along a direction, and the parabola of one forward pass there."""

    places: list[float]
    losses: list[float]
    parabola: list[float]


def _along(
    loss: Callable[[], Tensor], params: dict[str, nn.Parameter], directions: dict[str, Tensor], at: tuple[float, ...]
) -> _Line:
    value, slope, curvature = at
    places = [0.2 * (step / 20 - 1) for step in range(41)]
    losses = []
    with torch.no_grad():
        kept = {name: param.clone() for name, param in params.items()}
        for place in places:
            for name, param in params.items():
                param.copy_(kept[name] + place * directions[name][0])
            losses.append(float(loss()))
        for name, param in params.items():
            param.copy_(kept[name])
    return _Line(places, losses, [value + slope * t + curvature * t * t / 2 for t in places])


def _networks_chapter(found: list[tuple[str, list[report.Cell], _Line]], k: int) -> report.Chapter:
    heads = ["network", "parameters", "loss (nats)", "slope along v1", "curvature along v1", "largest relative error"]
    columns = [report.Column(head, number=place > 0) for place, head in enumerate(heads)]
    worst = max(cells[-1].value or 0.0 for _, cells, _ in found)
    text = (
        f"Slope and curvature along K = {k} random directions, from one forward pass of unmodified networks, agree "
        f"with double backward in float64: the largest error is {worst:.1e} of the largest entry."
    )
    caption = (
        "The loss along the first direction, computed place by place, and the parabola of one forward pass at 0: "
        "value, slope and curvature."
    )
    table = report.Table("Curvature", "", columns, [cells for _, cells, _ in found])
    figures = [(f"{name}. {caption}", _parabola(line)) for name, _, line in found]
    return report.Chapter("Exact curvature", text, figures, [table])


def _parabola(line: _Line) -> inlined.Drawn:
    from matplotlib.figure import Figure

    with inlined.settings():
        figure = Figure(figsize=(460 / 72, 300 / 72), dpi=72, layout="constrained")
        axes = figure.subplots()
        axes.plot(line.places, line.losses, color=inlined.COLOURS[1], linewidth=4, alpha=0.5, label="loss")
        axes.plot(line.places, line.parabola, color=inlined.COLOURS[3], linestyle="--", label="parabola at 0")
        axes.plot([0], [line.losses[len(line.losses) // 2]], "o", color=inlined.INK)
        axes.set(xlabel="t, the distance along v1", ylabel="loss (nats)")
        axes.legend(frameon=False)
    return inlined.drawn(figure)


def _models() -> Iterator[tuple[str, nn.Module, Tensor]]:
    with torch.random.fork_rng(devices=[]):  # layers draw their weights from the global state
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 10))
        cnn = nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(8 * 3 * 3, 10)),
        )
        yield "MLP (LayerNorm, GELU)", mlp.double(), torch.randn(32, 64, dtype=torch.float64)
        yield "CNN (BatchNorm, max-pool)", cnn.double(), torch.randn(32, 1, 8, 8, dtype=torch.float64)


def _error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


# -- the Rosenbrock function --------------------------------------------------------------------------------------


def minimise() -> report.Chapter:
    """The Rosenbrock function in 2D with every method from common starts, as a table that is printed and a chapter."""
    part = rosenbrock.comparison(functions.find("rosenbrock"), _SEEDS, _STEPS)
    rows: list[Row] = []
    for row in part.rows(()):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"\r\033[KRosenbrock {len(rows)}/{len(part.keys)} {row['key']}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    curves = rosenbrock.medians(rows, _STEPS)
    print(f"The Rosenbrock function in 2D: the median value over {_SEEDS} common starts, after so")
    print("many steps.\n")
    print(f"{'method':<18}" + "".join(f"{mark:>10}" for mark in _MARKS))
    for label, curve in curves.items():
        print(f"{label:<18}" + "".join(f"{curve[mark]:>10.1e}" for mark in _MARKS))
    return _rosenbrock_chapter(rows, curves)


def _rosenbrock_chapter(rows: list[Row], curves: dict[str, list[float]]) -> report.Chapter:
    entry = functions.find("rosenbrock")
    single = list(rosenbrock.single_step(entry, 3000).rows(()))
    columns = [report.Column("method", number=False), *(report.Column(f"step {mark}") for mark in _MARKS)]
    body = [
        [report.Cell(label), *(report.Cell(f"{curve[mark]:.1e}", curve[mark]) for mark in _MARKS)]
        for label, curve in curves.items()
    ]
    last = {label: f"{curve[-1]:.1e}" if curve[-1] else "0" for label, curve in curves.items()}
    text = (
        f"After {_STEPS} steps FoMoH-2D, which uses forward passes alone, is at {last['FoMoH-2D']}; Adam with backprop "
        f"(learning rate {rosenbrock.ADAM_LR}) is at {last['Adam']}, and Newton, with the whole Hessian, at "
        f"{last['Newton']}."
    )
    note = f"Median value over {_SEEDS} common starts. FoMoH-2D, FoMoH and FGD use forward passes only."
    figures = [
        (
            f"Value against steps: the thick line is the median of {_SEEDS} common starts, the thin ones are the runs. "
            f"FGD at learning rate {rosenbrock.LR:g} and twice that, SGD at {2 * rosenbrock.LR:g}, the others at 1.",
            plots.inlined(lambda dark: plots.comparison(entry, rows, _STEPS, 2, dark)),
        ),
        (
            "One step of each method from one point, many times: lines lead to the mean. FoMoH-2D steps where Newton "
            "does, for two directions span the whole plane.",
            plots.inlined(lambda dark: plots.single_step(entry, single, dark)),
        ),
    ]
    return report.Chapter(
        "The Rosenbrock function in 2D", text, figures, [report.Table("Rosenbrock", note, columns, body)]
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a positive whole number")
    return int(text)
