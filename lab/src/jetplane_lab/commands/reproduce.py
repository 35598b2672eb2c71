"""``jetplane reproduce``: all rows of the paper's tables, or some of them, those beyond the paper, and the report."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from jetplane_lab import presets, report
from jetplane_lab.config import PER_SAMPLE, choice
from jetplane_lab.devices import AUTO, HELP, device
from jetplane_lab.presets import Preset
from jetplane_lab.training import Config
from jetplane_lab.training.batches import place

from . import cifar10, minilm, rosenbrock
from . import report as report_command
from .rows import fit, is_finished

_MODELS = ("logistic-regression", "cnn")
_PREFIX = {"logistic-regression": "lr-", "cnn": "cnn-"}
_QUICK: dict[str, Any] = {"dataset": "digits", "epochs": 3}
_QUICK_HELD = 500  # of the embedded digits, where some are held out
_QUICK_BATCH = 250  # the paper's batches would leave three steps in an epoch of 6,000 digits
_INTERRUPTED = 130
_STUDIES = {"cifar10": cifar10.run, "minilm": minilm.run}  # with a way of their own
_ONLY = {  # options, and what takes them
    minilm.OPTIONS: ("minilm",),
    ("turns",): tuple(_STUDIES),
    ("rows", "together"): (*_MODELS, "all", "beyond", "cifar10"),
}


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    rows = [name.removeprefix("cnn-") for name in presets.PRESETS if name.startswith("cnn-")]
    parser: argparse.ArgumentParser = commands.add_parser(
        "reproduce",
        help="train all rows of the paper's tables, and write the report",
        description="Train every row of the paper's tables with its hyper-parameters and seeds, and write the report.\n"
        "What is finished in DIR is not trained again, and what was stopped goes on: give the same command once more.\n"
        "\n"
        f"rows: {' '.join(rows)}\n"
        f"rows of beyond, which go beyond the paper: {' '.join(presets.BEYOND)}\n"
        f"rows of cifar10: {' '.join(cifar10.ROWS)}\n"
        "\n"
        "cifar10 trains HorizonAdam with nothing chosen, beside backprop with the best of four rates, which are tried\n"
        "on images held out. minilm fine-tunes a pretrained transformer with forward passes and without, rates chosen\n"
        "on a validation split. Both write a table (DIR/cifar10.md, DIR/minilm.md), minilm a figure (DIR/minilm.svg).\n"
        "\n"
        "The whole tables take a GPU: 2000 epochs with 5 seeds for logistic regression, 3000 with 3 for the CNN.\n"
        "Rows of beyond are trained on 55,000 digits, and tested once, after the last epoch.\n"
        "A row that fails is named and the others go on; the exit status is then 1.",
        epilog="examples:\n"
        "  jetplane reproduce cnn --quick                        a look on a laptop, with 6,000 digits\n"
        "  jetplane reproduce logistic-regression --epochs 50 --seeds 0\n"
        "  jetplane reproduce cnn --rows fgd fomoh-3d backprop --device cuda --together\n"
        "  jetplane reproduce beyond --device cuda --compile --rows forward-cnn adam-cnn\n"
        "  jetplane reproduce cifar10 --device cuda --compile --tf32 --together\n"
        "  jetplane reproduce minilm --device cuda --compile --tf32 --methods horizon adamw\n"
        "  jetplane reproduce all --device cuda --out runs/paper",
    )
    kinds = (*_MODELS, "rosenbrock", "all", "beyond", *_STUDIES)
    parser.add_argument("what", choices=kinds, help="which of the paper's studies, or what goes beyond them")
    add = parser.add_argument
    add("--rows", nargs="+", metavar="ROW", help="some of the rows (default: all)")
    add("--seeds", type=int, nargs="+", metavar="N", help="(default: the paper's)")
    add("--epochs", type=int, metavar="N", help="(default: the paper's)")
    add("--device", metavar="NAME", type=device, default=AUTO, help=HELP)
    add("--together", action="store_true", help="train the seeds of a row at the same time")
    add("--tf32", action="store_true", help="on CUDA: faster products with 10 bits of mantissa")
    add("--compile", action="store_true", help="a step as one compiled graph, replayed on CUDA")
    add("--data-dir", metavar="DIR", help="where the files of the data lie (default: JETPLANE_DATA, or the cache)")
    add(
        "--turns",
        type=Path,
        metavar="DIR",
        help="several processes on one device share this folder: one alone takes times",
    )
    add("--out", type=Path, metavar="DIR", help="(default: runs/reproduce, or runs/reproduce-quick)")
    add("--quick", action="store_true", help="few samples and epochs, smaller batches, one seed: minutes on a laptop")
    minilm.add_options(parser)
    return parser


class _Job(NamedTuple):
    """The runs of one row."""

    preset: Preset
    configs: list[Config]

    @property
    def weight(self) -> int:
        """Roughly what it costs: epochs times the rows that a value carries."""
        config = self.preset.config
        k, late = config.tangents, config.method in PER_SAMPLE  # these have no second rows
        return sum(one.epochs for one in self.configs) * (3 + k if late else 1 + k + k * (k + 1) // 2)


def run(arguments: argparse.Namespace) -> int:
    """Train what is not there yet, and report."""
    out = arguments.out or Path("runs/reproduce-quick" if arguments.quick else "runs/reproduce")
    _check(arguments)
    if arguments.what in _STUDIES:
        return _STUDIES[arguments.what](arguments, out)
    jobs = [] if arguments.what == "rosenbrock" else _jobs(arguments)
    failed = interrupted = False
    if arguments.what in ("rosenbrock", "all"):
        failed = _rosenbrock(out / "rosenbrock", arguments.quick, arguments.debug)
    if jobs:
        some_failed, interrupted = _train(jobs, out, arguments)
        failed = failed or some_failed
        if any(out.rglob("metrics.jsonl")):
            report_command.write_page(report.read([out], report_command.warn), out / "report.html")
    return _INTERRUPTED if interrupted else int(failed)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that say nothing here."""
    what = arguments.what
    for names, takers in _ONLY.items():
        for name in names:
            if getattr(arguments, name) not in (None, False) and what not in takers:
                raise ValueError(f"--{name} says nothing of {what}; expected it with {', '.join(takers)}")


def _jobs(arguments: argparse.Namespace) -> list[_Job]:
    kinds = _MODELS if arguments.what == "all" else (arguments.what,)
    changes: dict[str, Any] = {"device": arguments.device}
    changes |= _QUICK if arguments.quick else {}
    if arguments.epochs is not None:
        changes["epochs"] = arguments.epochs
    if arguments.tf32:
        changes["tf32"] = True
    jobs = []
    for kind in kinds:
        rows = presets.BEYOND if kind == "beyond" else _paper_rows(_PREFIX[kind])
        for name in arguments.rows or rows:
            preset = rows[choice("row", name, rows)]
            config = preset.config.replace(**changes)
            if arguments.quick:
                held = min(config.hold_out, _QUICK_HELD)
                config = config.replace(batch_size=min(config.batch_size, _QUICK_BATCH), hold_out=held)
            if arguments.compile:
                config = config.replace(compile=True)
            seeds = arguments.seeds or ((0,) if arguments.quick else preset.seeds)
            jobs.append(_Job(preset, [config.replace(seed=seed) for seed in dict.fromkeys(seeds)]))
    return jobs


def _paper_rows(prefix: str) -> dict[str, Preset]:
    named = ((name, preset) for name, preset in presets.PRESETS.items() if name.startswith(prefix))
    return {name.removeprefix(prefix): preset for name, preset in named}


def _train(jobs: list[_Job], out: Path, arguments: argparse.Namespace) -> tuple[bool, bool]:
    """Train the rows in turn; whether one failed, and whether a signal stopped them."""
    data = place(None, jobs[0].configs[0], arguments.data_dir)
    start, spent, failed = time.monotonic(), 0, False
    for number, job in enumerate(jobs, 1):
        folder = out / job.preset.name
        waiting = [config for config in job.configs if not is_finished(folder / f"seed-{config.seed}", config)]
        there = len(job.configs) - len(waiting)
        found = f", {there} of {len(job.configs)} seeds already there" if there else ""
        left = _left(time.monotonic() - start, spent, sum(other.weight for other in jobs[number - 1 :]))
        _say(f"[{number}/{len(jobs)}] {job.preset.name}{found}{left}")
        try:
            summaries = fit(job.preset, waiting, folder, data, arguments.together)
        except Exception as error:  # a row that fails must not end the others
            if arguments.debug:
                raise
            _failed(job.preset.name, error)
            failed = True
            continue
        for summary in summaries:
            if summary.reason == "interrupted":
                _say(f"jetplane reproduce: {summary.message} The same command goes on from here.")
                return failed, True
            if summary.reason != "finished":
                _say(f"jetplane reproduce: {job.preset.name} {summary.message}")
                failed = True
        spent += job.weight if waiting else 0
    return failed, False


def _left(elapsed: float, spent: int, remaining: int) -> str:
    """What is left if the rest costs what its weight says."""
    if not spent:
        return ""
    seconds = elapsed / spent * remaining
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f", about {seconds / size:.0f} {unit} left"
    return f", about {seconds:.0f} s left"


def _rosenbrock(out: Path, quick: bool, debug: bool) -> bool:
    """The Rosenbrock study, by its own command; whether it failed."""
    parser = rosenbrock.add_parser(argparse.ArgumentParser().add_subparsers())
    try:
        return rosenbrock.run(parser.parse_args(["--out", str(out), *(["--quick"] if quick else [])])) != 0
    except Exception as error:
        if debug:
            raise
        _failed("rosenbrock", error)
        return True


def _failed(name: str, error: Exception) -> None:
    _say(f"jetplane reproduce: {name} failed: {' '.join(str(error).split()) or type(error).__name__}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
