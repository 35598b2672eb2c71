"""``jetplane train``: one run, or the same run with several seeds."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from jetplane_lab import models, presets
from jetplane_lab.config import ADAPTIVE, DTYPES, METHODS, SCHEDULES, SOLVERS
from jetplane_lab.devices import AUTO, HELP, device
from jetplane_lab.presets import Preset
from jetplane_lab.training import Callback, Config, Summary, Trainer, train_together
from jetplane_lab.training.batches import Resident, place
from jetplane_lab.training.folder import Folder, holds_run
from jetplane_lab.training.progress import progress
from jetplane_lab.training.stopping import EXIT
from jetplane_lab.training.workers import ALONE, Workers

_COLUMNS = (
    ("train_nll", "train NLL"),
    ("train_accuracy", "train acc."),
    ("validation_nll", "valid. NLL"),
    ("validation_accuracy", "valid. acc."),
)
_TEST = (("test_nll", "test NLL"), ("test_accuracy", "test acc."))


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    names = list(presets.PRESETS)
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        help="train a model forward-only, with one of the paper's rows, or with any method",
        description="Train a model, and record the run in a folder: config, metrics of every epoch, checkpoints.\n"
        "\n"
        "PRESET names a row of the paper's tables with its hyper-parameters; every option overrides it:\n"
        f"  {' '.join(names[:9])}\n  {' '.join(names[9:18])}\n  {names[18]}\n"
        "lr- is logistic regression, cnn- the convolutional network, -sch the row with a schedule of the learning\n"
        "rate. Beyond the paper, with 5,000 samples held out and the test split looked at once, at the end:\n"
        f"  {' '.join(names[19:24])}\n  {' '.join(names[24:])}\n"
        "forward- is Adam on forward gradients, horizon- the same without a learning rate, cifar- that on CIFAR-10\n"
        "(-augmented: with flips and crops), search- the Gauss-Newton search in a plane, and adam- backprop beside\n"
        "them. Without a preset say at least --method.\n"
        "\n"
        "A run that was stopped, also by kill -9, goes on with --resume, bit for bit as if never stopped.\n"
        "\n"
        "Under torchrun all processes train one run, each on its part of every batch, and the first one writes.",
        epilog="examples:\n"
        "  jetplane train quick                                    forward-only, in seconds, on 6,000 digits\n"
        "  jetplane train forward-cnn --device cuda --compile      forward gradients with Adam, at MNIST\n"
        "  jetplane train cnn-fomoh-3d-sch --seeds 0 1 3 --device cuda --together\n"
        "  jetplane train lr-fomoh-2d --epochs 50 --lr 0.1         a row of the paper, changed\n"
        "  jetplane train --method adam --lr 0.001 --dataset digits --epochs 5\n"
        "  jetplane train quick --resume                           go on with a run that was stopped\n"
        "  torchrun --nproc-per-node 2 -m jetplane train quick     the same run by two processes",
    )
    parser.add_argument("name", nargs="?", metavar="PRESET", help="a row of the paper, one beyond it, or quick")
    add = parser.add_argument_group("what to train").add_argument
    add("--preset", metavar="PRESET", help="the same")
    add("--model", metavar="NAME", help=f"{' or '.join(models.MODELS)}")
    add("--method", metavar="NAME", help=f"{', '.join(METHODS)} (backprop is plain SGD)")
    add("--k", type=int, metavar="K", help="directions, of fgd, fomoh-kd, mezo (1), fzoo (8), gauss-newton (64)")
    add(
        "--samples",
        type=int,
        metavar="J",
        help="tangents of each activation, of forward-adam, forward-sgd, horizon (8 to 32, by program and batch)",
    )
    add(
        "--average",
        type=float,
        metavar="P",
        help="judge by the mean of the parameters, weighted by step^(P-1); 8 replaces a schedule (0: by the last)",
    )
    add("--lr", type=float, metavar="X", help="learning rate; of horizon and gauss-newton a factor (1)")
    add("--batch-size", type=int, metavar="N")
    add("--epochs", type=int, metavar="N")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, metavar="N", help="of initial values, order and directions (default: 0)")
    seeds.add_argument("--seeds", type=int, nargs="+", metavar="N", help="several runs, each in a folder of its own")
    add("--together", action="store_true", help="train the seeds at the same time, on CUDA each on a stream")
    add = parser.add_argument_group("how to train").add_argument
    add("--schedule", metavar="NAME", help=f"of lr: {', '.join(name for name in SCHEDULES if name != 'custom')}")
    add("--gamma", type=float, metavar="X", help="what the schedule multiplies lr with")
    add("--period", type=int, metavar="N", help="epochs, of the schedules step and milestone3")
    add("--patience", type=int, metavar="N", help="epochs in the windows that the schedule rise compares")
    add("--solver", metavar="NAME", help=f"of fomoh, fomoh-bp and fomoh-kd: {', '.join(SOLVERS)}")
    add("--start", type=float, metavar="X", help=f"damping, radius or sigma at the start, of {', '.join(ADAPTIVE)}")
    add("--divergence", type=_limit, metavar="X", help="end above X times the first loss, for 3 epochs; or none")
    add("--eps", type=float, metavar="X", help="added to the curvature (fomoh, fomoh-bp), Adam's, or mezo's and fzoo's")
    add("--clip", type=float, metavar="X", help="largest length of an update")
    add("--weight-decay", type=float, metavar="X", help="share of a parameter that a step of length lr = 1 takes away")
    add("--penalty", type=float, metavar="X", help="X / 2 times the squared length of the weights, in the loss")
    add("--momentum", type=float, metavar="X", help="of sgd and forward-sgd")
    add = parser.add_argument_group("data and device").add_argument
    add("--dataset", metavar="NAME", help="mnist, fashion-mnist, cifar-10, or digits: a subset of MNIST in the package")
    add("--data-dir", metavar="DIR", help="where the files of the data set lie (default: JETPLANE_DATA, or the cache)")
    add("--augment", action=argparse.BooleanOptionalAction, help="flips and crops of the training images, of cifar-10")
    add("--hold-out", type=int, metavar="N", help="validate on N samples of the training split, not on the test split")
    add("--evaluate-train", type=int, metavar="N", help="evaluate the training split after every N epochs, too")
    add("--device", metavar="NAME", type=device, default=AUTO, help=HELP)
    add("--dtype", metavar="NAME", help=" or ".join(DTYPES))
    add("--tf32", action=argparse.BooleanOptionalAction, help="on CUDA: faster products with 10 bits of mantissa")
    add("--compile", action=argparse.BooleanOptionalAction, help="the step as one graph")
    add = parser.add_argument_group("the run's folder").add_argument
    add("--out", type=Path, metavar="DIR", help="(default: runs/NAME/seed-N; with --seeds always seed-N in it)")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    again.add_argument("--fresh", action="store_true", help="remove the run in the folder, and begin anew")
    add("--checkpoint-seconds", type=_seconds, default=30.0, metavar="X", help="between checkpoints (default: 30)")
    add("--journal", action="store_true", help="write down each step, so that any step's parameters can be rebuilt")
    add("--tracker", action="append", default=[], metavar="NAME", help="tensorboard, wandb or mlflow; may be repeated")
    add("--quiet", action="store_true", help="no progress, and no table at the end")
    return parser


_FIELDS = (
    *("model", "method", "k", "lr", "batch_size", "epochs", "schedule", "gamma", "period", "patience", "solver"),
    *("eps", "clip", "weight_decay", "momentum", "dataset", "hold_out", "evaluate_train", "device", "dtype"),
    *("tf32", "compile", "start", "divergence", "samples", "average", "penalty", "augment"),
)


def run(arguments: argparse.Namespace) -> int:
    """Train."""
    preset, config = _asked(arguments)
    seeds = arguments.seeds or [config.seed if arguments.seed is None else arguments.seed]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds are {' '.join(map(str, seeds))}; expected each seed once")
    jobs = [(config.replace(seed=seed), _folder(arguments, preset, config, seed)) for seed in seeds]
    workers = Workers.launched()
    if workers.size > 1:
        _check_workers(arguments)

    def prepare() -> None:
        for job, folder in jobs:
            _prepare(folder, job, arguments)

    workers.led(prepare, "the look into the run's folder")
    summaries = _train(jobs, preset, config, arguments, workers)
    workers.leave()
    if workers.writes:
        _tell([folder for _, folder in jobs], summaries, preset, arguments.quiet)
    return _status(summaries)


def _train(
    jobs: list[tuple[Config, Path]],
    preset: Preset | None,
    config: Config,
    arguments: argparse.Namespace,
    workers: Workers,
) -> list[Summary]:
    """The runs' summaries, up to the first that was interrupted."""
    data = place(None, config, arguments.data_dir)  # once on the device for all seeds
    name = preset.name if preset else config.method
    if arguments.together and len(jobs) > 1:
        return train_together(
            [_trainer(job, folder, data, name, arguments, row) for row, (job, folder) in enumerate(jobs)]
        )
    summaries: list[Summary] = []
    for job, folder in jobs:
        summaries.append(_trainer(job, folder, data, name, arguments, workers=workers).fit())
        if summaries[-1].reason == "interrupted":
            break
    return summaries


def _tell(folders: list[Path], summaries: list[Summary], preset: Preset | None, quiet: bool) -> None:
    for folder, summary in zip(folders, summaries, strict=False):
        finished = summary.reason == "finished"
        if not (quiet and finished):
            print(f"{folder}: {_sentence(summary)}", file=sys.stdout if finished else sys.stderr)
    if not quiet:
        _print_table(summaries, preset)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a number of seconds from 0, or inf for never")
    return value


def _limit(text: str) -> float:
    return math.inf if text == "none" else float(text)


# -- what was asked for -------------------------------------------------------------------------------------------


def _asked(arguments: argparse.Namespace) -> tuple[Preset | None, Config]:
    """The preset, if one was named, and the config with the options on top of it."""
    if arguments.name and arguments.preset and arguments.name != arguments.preset:
        raise ValueError(f"two presets are given, {arguments.name} and {arguments.preset}; expected one")
    name = arguments.name or arguments.preset
    if name is None and arguments.method is None:
        raise ValueError("nothing to train; expected a preset such as quick, or --method")
    preset = presets.find(name) if name else None
    changes = {field: getattr(arguments, field) for field in _FIELDS if getattr(arguments, field) is not None}
    if changes.get("divergence") == math.inf:
        changes["divergence"] = None
    if arguments.schedule == "custom":
        raise ValueError("schedule is 'custom', which needs a function; expected a Trainer in Python for that")
    if preset is None:
        return None, Config(**changes)
    base = preset.config
    if changes.get("method", base.method) != base.method:  # what belongs to the preset's method goes with it
        kept = {name: getattr(base, name) for name in ("model", "dataset", "epochs", "batch_size", "hold_out")}
        return preset, Config(**kept | changes)
    return preset, base.replace(**changes)


def _folder(arguments: argparse.Namespace, preset: Preset | None, config: Config, seed: int) -> Path:
    name = preset.name if preset else f"{config.model}-{config.method}" + (f"-{config.k}d" if config.k > 1 else "")
    if arguments.out is None:
        return Path("runs") / name / f"seed-{seed}"
    return arguments.out / f"seed-{seed}" if arguments.seeds else arguments.out


def _prepare(folder: Path, config: Config, arguments: argparse.Namespace) -> None:
    """Refuse to touch a run that is there, unless told what to do with it."""
    if not holds_run(folder):
        return
    if arguments.fresh:
        place = Folder(folder, config, print)
        try:
            place.clear()
        finally:
            place.release()
    elif not arguments.resume:
        raise ValueError(
            f"{folder} holds a run already; go on with it by --resume, begin anew with --fresh, or choose another --out"
        )


def _check_workers(arguments: argparse.Namespace) -> None:
    """Refuse what processes cannot do together."""
    for option in ("together", "compile"):
        if getattr(arguments, option):
            raise ValueError(f"--{option} is not there for several processes yet; expected a run by one process")


def _trainer(
    config: Config,
    folder: Path,
    data: Resident,
    name: str,
    arguments: argparse.Namespace,
    position: int = 0,
    workers: Workers = ALONE,
) -> Trainer:
    callbacks: list[Callback] = []
    if not workers.writes:
        return Trainer(config, data, workers=workers)
    if not arguments.quiet:
        callbacks.append(progress(f"{name} seed {config.seed}", position))
    if arguments.tracker:
        from jetplane_lab import trackers

        callbacks += [trackers.make(tracker, folder, config) for tracker in arguments.tracker]
    every, recorded = arguments.checkpoint_seconds, arguments.journal
    return Trainer(config, data, folder, callbacks, checkpoint_seconds=every, journal=recorded, workers=workers)


# -- what came out ------------------------------------------------------------------------------------------------


def _sentence(summary: Summary) -> str:
    again = " Go on with --resume." if summary.reason == "interrupted" else ""
    return (
        f"{summary.message}{again}\n{summary.seconds:.1f} s, "
        f"{summary.forward_equivalents_per_step:.3g} forward passes a step, peak memory "
        f"{summary.peak_memory / 2**20:.0f} MiB ({summary.peak_memory_kind})."
    )


def _print_table(summaries: list[Summary], preset: Preset | None) -> None:
    finals = [summary.final for summary in summaries if summary.final is not None]
    if not finals:
        return
    tested = all(final.test_nll is not None for final in finals)
    label = "last epoch" if len(finals) == 1 else f"{len(finals)} seeds"
    paper = preset.paper if preset is not None else None
    theirs = f"paper: {preset.label}" if preset is not None and paper is not None else ""
    print(f"\n{'':<12}{label:>18}" + (f"  {theirs:>18}" if theirs else ""))  # one column for each run: 80 are enough
    for name, title in (*_COLUMNS, *(_TEST if tested else ())):
        line = f"{title:<12}{_spread([getattr(final, name) for final in finals]):>18}"
        if paper is not None and (name, title) in _COLUMNS:
            line += "  " + "{:.4f} ± {:.4f}".format(*getattr(paper, name)).rjust(max(18, len(theirs)))
        print(line)


def _spread(values: list[float]) -> str:
    """The mean, with the sample standard deviation where there are several."""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def _status(summaries: list[Summary]) -> int:
    """0; 1 where a run diverged; as a shell says it where a signal stopped one."""
    stopped = [summary for summary in summaries if summary.reason == "interrupted"]
    if stopped:
        return next((code for name, code in EXIT.items() if name in stopped[0].message), 1)
    return int(any(summary.reason == "diverged" for summary in summaries))
