"""``jetplane tune``: search the learning rate and the batch size of a preset."""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from jetplane_lab import presets, tuning
from jetplane_lab.data import DATASETS, Dataset, load
from jetplane_lab.devices import AUTO, HELP, device
from jetplane_lab.training import Config
from jetplane_lab.training.stopping import EXIT, Ended, ending_signals

_ASKED = ("sampler", "trials", "epochs", "lr_bounds", "batch_sizes", "seed", "hold_out")  # as in Settings
_FIELDS = ("device", "dataset", "tf32", "compile")  # as in Config


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="search the learning rate and the batch size of a preset with Optuna",
        description="Train a preset many times, with other learning rates and batch sizes, on all but 5,000 of the\n"
        "training digits, and score each trial by its lowest validation NLL on those 5,000. Trials that are worse\n"
        "than the median after the first fifth of their epochs are pruned. One that diverges gets the worst score.\n"
        "\n"
        "  bayes   learns from the trials so far where good ones lie (TPE)\n"
        "  random  independent draws\n"
        "  grid    as many points as trials: learning rates at equal ratios times the batch sizes\n"
        "\n"
        "DIR holds study.json (the settings), study.db (the trials, SQLite: Optuna's own tools read it too) and\n"
        "summary.json. A study may be stopped at any moment, by Ctrl-C or kill -9, and --resume goes on with it; what\n"
        "was cut off is tried again. Processes that are given the same DIR share the work. --trials is the total.",
        epilog="examples:\n"
        "  jetplane tune lr-fomoh-2d --trials 30 --epochs 20 --jobs 2\n"
        "  jetplane tune lr-fomoh-2d --resume                      go on, or join in from another process\n"
        "  jetplane tune lr-fomoh-2d --resume --trials 60          and try 30 more\n"
        "  jetplane tune cnn-fgd --device cuda --sampler grid --batch-sizes 512 2048 --lr-bounds 1e-5 1e-3\n"
        "  jetplane tune quick --trials 5 --epochs 2               a look, on the digits inside the package",
    )
    add = parser.add_argument
    add("preset", metavar="PRESET", help="what to tune, such as lr-fgd, cnn-fomoh-3d, forward-cnn or quick")
    add("--trials", type=_positive, metavar="N", help="in all, over all processes (default: 100)")
    add("--epochs", type=_positive, metavar="N", help="of every trial (default: 50)")
    add("--sampler", choices=tuning.SAMPLERS, help="how parameters are chosen (default: bayes)")
    add("--lr-bounds", type=_rate, nargs=2, metavar=("LO", "HI"), help="of the learning rate (default: the paper's)")
    sizes = "to choose from (default: 128 512 1024 2048 for logistic regression, 2048 for the CNN)"
    add("--batch-sizes", type=_positive, nargs="+", metavar="N", help=sizes)
    add("--hold-out", type=_positive, metavar="N", help="training digits to score on (default: one in twelve, 5,000)")
    add("--no-prune", action="store_true", help="train every trial to its last epoch")
    add("--seed", type=_whole, metavar="N", help="of the sampler and of the training (default: 0)")
    add("--device", metavar="NAME", type=device, help=HELP)
    add("--tf32", action=argparse.BooleanOptionalAction, help="on CUDA: faster products with 10 bits of mantissa")
    add("--compile", action=argparse.BooleanOptionalAction, help="on CUDA: a step captured as one graph")
    add("--dataset", choices=DATASETS, help="to train on (default: the preset's)")
    add("--data-dir", type=Path, metavar="DIR", help="folder with the dataset's files")
    add("--out", type=Path, metavar="DIR", help="folder of the study (default: runs/tune-PRESET)")
    add("--jobs", type=_positive, default=1, metavar="N", help="processes that share the work (default: %(default)s)")
    add("--resume", action="store_true", help="go on with the study in DIR; what is not given is taken from there")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the study, or go on with it."""
    preset = presets.find(arguments.preset)
    arguments.out = arguments.out or Path("runs") / f"tune-{preset.name}"
    stored = _stored(arguments)
    config = _config(arguments, preset.config, stored)
    dataset = load(config.dataset, arguments.data_dir)
    settings = _settings(arguments, dataclasses.replace(preset, config=config), dataset, stored)
    objective = tuning.training_objective(config, settings, dataset)  # before the study: it raises what cannot work
    _quiet()
    with tuning.Study(arguments.out, settings) as study:
        try:
            with ending_signals():
                if arguments.jobs == 1:
                    _work(study, objective)
                else:
                    _share(arguments, settings, config)
        except KeyboardInterrupt as error:
            again = shlex.join(["jetplane", "tune", preset.name, "--out", str(arguments.out), "--resume"])
            print(f"\nThe study is kept: {again} goes on with it.", file=sys.stderr)
            if isinstance(error, Ended):
                return EXIT[str(error)]
            raise
        found = tuning.summary(study)
        study.save("summary.json", found)
    print(tuning.markdown(found), end="")
    if found["best"] is None:
        print("\nNo trial gave a finite score.")
    else:
        print(f"\nbest: --lr {found['best']['lr']:.6g} --batch-size {found['best']['batch_size']}")
    print(f"summary: {arguments.out / 'summary.json'}")
    return 0


# -- what is asked for ----------------------------------------------------------------------------------------------


def _stored(arguments: argparse.Namespace) -> tuning.Settings | None:
    path = arguments.out / "study.json"
    if not path.exists():
        return None
    if not arguments.resume:
        raise ValueError(f"{arguments.out} holds a study already; go on with it by --resume, or choose another --out")
    return tuning.Settings.read(path)


def _config(arguments: argparse.Namespace, config: Config, stored: tuning.Settings | None) -> Config:
    before = stored.config if stored else {}
    changes = {name: before[name] for name in _FIELDS if name in before}
    changes |= {name: getattr(arguments, name) for name in _FIELDS if getattr(arguments, name) is not None}
    changes.setdefault("device", device(AUTO))
    return config.replace(**changes)


def _settings(
    arguments: argparse.Namespace, preset: presets.Preset, dataset: Dataset, stored: tuning.Settings | None
) -> tuning.Settings:
    asked = {name: getattr(arguments, name) for name in _ASKED}
    if stored:
        asked = {name: getattr(stored, name) if value is None else value for name, value in asked.items()}
        asked["warmup"] = stored.warmup
    settings = tuning.Settings.of(preset, dataset, **asked)
    return dataclasses.replace(settings, warmup=settings.epochs) if arguments.no_prune else settings


# -- work -----------------------------------------------------------------------------------------------------------


def _work(study: tuning.Study, train: tuning.Objective, alone: bool = True) -> None:
    progress = _Progress(study, alone)

    def objective(parameters: tuning.Parameters, report: tuning.Report) -> tuning.Outcome:
        def watched(epoch: int, value: float) -> bool:
            progress.epoch(epoch, value)
            return report(epoch, value)

        return train(parameters, watched)

    parent = multiprocessing.parent_process()
    tuning.run_study(
        *(study, objective),
        began=progress.began,
        ended=progress.ended,
        stop=lambda: not alone and parent is not None and not parent.is_alive(),
    )


def _share(arguments: argparse.Namespace, settings: tuning.Settings, config: Config) -> None:
    """Let processes do the work. One that dies is made up for by the others."""
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    given = (arguments.out, settings, config, arguments.data_dir, arguments.jobs)
    workers = [context.Process(target=_worker, args=given) for _ in range(arguments.jobs)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except KeyboardInterrupt:
        _interrupt(workers)
        raise
    failed = sum(worker.exitcode != 0 for worker in workers)
    if failed:
        with tuning.Study(arguments.out, settings) as study:
            done = study.finished()
        if not done:
            raise RuntimeError(f"{failed} of {len(workers)} processes failed; --resume goes on with the study")
        print(f"{failed} of {len(workers)} processes failed; the others did their work.", file=sys.stderr)


def _interrupt(workers: list[Any]) -> None:
    deadline = time.monotonic() + 2  # Ctrl-C in a terminal reaches them too
    for number in (None, signal.SIGINT, signal.SIGKILL):
        for worker in workers:
            if number is not None and worker.is_alive():
                os.kill(worker.pid, number)
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + 10


def _worker(out: Path, settings: tuning.Settings, config: Config, data_dir: Path | None, jobs: int) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    _quiet()
    try:
        objective = tuning.training_objective(config, settings, load(config.dataset, data_dir))
        with tuning.Study(out, settings) as study:
            _work(study, objective, alone=False)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        print(f"jetplane: {' '.join(str(error).split()).rstrip('.')}.", file=sys.stderr)
        sys.exit(1)


def _quiet() -> None:
    try:
        import optuna
    except ImportError:
        return  # the study says so
    optuna.logging.set_verbosity(optuna.logging.WARNING)


class _Progress:
    """A line for every trial that ended, on the standard error; in a terminal one more that follows the epochs."""

    def __init__(self, study: tuning.Study, alone: bool) -> None:
        self.study = study
        self._follow = alone and sys.stderr.isatty()
        self._trial = ""

    def began(self, entry: tuning.Entry) -> None:
        """A trial begins."""
        lr, batch_size = entry.parameters or (math.nan, 0)
        self._trial = f"trial {entry.number:<3} lr {lr:<9.4g} batch {batch_size:<5}"
        self._show(self._trial)

    def epoch(self, epoch: int, value: float) -> None:
        """So many epochs of it are done."""
        self._show(f"{self._trial} epoch {epoch}/{self.study.settings.epochs}  NLL {value:.4f}")

    def ended(self, entry: tuning.Entry) -> None:
        """It ended."""
        entries = self.study.entries
        done = sum(other.state in ("complete", "pruned", "failed") for other in entries)
        best = self.study.best
        found = f"best {best.value:.4f}, trial {best.number}" if best else "no score yet"
        self._show("")
        print(
            f"{self._trial} {_verdict(entry)}  [{done}/{self.study.settings.trials} done, {found}]",
            file=sys.stderr,
            flush=True,
        )

    def _show(self, line: str) -> None:
        if self._follow:
            print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)


def _verdict(entry: tuning.Entry) -> str:
    if entry.state == "pruned":
        return f"pruned after epoch {entry.facts.get('epochs')} at {entry.value:.4f}"
    if entry.state == "complete" and entry.value is not None and math.isfinite(entry.value):
        return f"NLL {entry.value:.4f}"
    return f"{entry.state}, no score: {entry.facts.get('ended', 'the validation NLL was never finite')}"


# -- arguments ------------------------------------------------------------------------------------------------------


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a whole number")
    return int(text)


def _positive(text: str) -> int:
    if _whole(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a positive whole number")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a positive number")
    return value
