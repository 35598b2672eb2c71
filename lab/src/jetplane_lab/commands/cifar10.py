"""``jetplane reproduce cifar10``: HorizonAdam with nothing chosen, beside backprop with the best of four rates.

HorizonAdam trains on all 50,000 images. Backprop's rate is chosen on 5,000 of them that are held out, with the first
seed, and then trained with on all, for as many epochs. The test split is evaluated after each epoch and nothing is
chosen by it: what counts is the last epoch. Beside the report there is a table of the rows, DIR/cifar10.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jetplane_lab import data, report
from jetplane_lab.config import Config, choice
from jetplane_lab.data import Dataset, Split, files
from jetplane_lab.finetuning.turns_on_device import Courteous, Turns
from jetplane_lab.presets import CIFAR
from jetplane_lab.training import Summary
from jetplane_lab.training.batches import place

from . import report as report_command
from .rows import fit, is_finished

__all__ = ["RATES", "ROWS", "run"]

RATES = (3e-4, 1e-3, 3e-3, 1e-2)  # of backprop
_HELD = 5_000  # images by which its rate is chosen
_INTERRUPTED = 130
Turn = Sequence[Courteous]


class _Row(NamedTuple):
    preset: str
    seeds: tuple[int, ...]
    rates: tuple[float, ...] = ()  # to choose from


ROWS = {
    "cnn": _Row("cifar-cnn", (0, 1, 2, 3, 4)),
    "adam-cnn": _Row("adam-cifar-cnn", (0, 1, 2, 3, 4), RATES),
    "resnet": _Row("cifar-resnet-augmented", (0, 1, 2)),
    "adam-resnet": _Row("adam-cifar-resnet-augmented", (0, 1, 2), RATES),
}
_QUICK = {"epochs": 1, "batch_size": 64}
_QUICK_IMAGES = 320, 100  # to train on, and to test with


class _Stopped(Exception):
    """A run did not come to its end: by its summary."""

    def __init__(self, summary: Summary) -> None:
        super().__init__(summary.message)
        self.interrupted = summary.reason == "interrupted"


def run(arguments: argparse.Namespace, out: Path) -> int:
    """Train the rows that are asked for, and write the report."""
    changes: dict[str, Any] = {"device": arguments.device, "tf32": arguments.tf32, "compile": arguments.compile}
    changes |= _QUICK if arguments.quick else {}
    if arguments.epochs is not None:
        changes["epochs"] = arguments.epochs
    whole = data.load("cifar-10", arguments.data_dir)
    whole = _part(whole) if arguments.quick else whole
    turns = [] if arguments.turns is None else [Courteous(Turns(arguments.turns))]
    rows = [ROWS[choice("row", name, ROWS)] for name in arguments.rows or ROWS]
    lines, status = [], 0
    for row in rows:
        seeds = tuple(dict.fromkeys(arguments.seeds or ((0,) if arguments.quick else row.seeds)))
        try:
            lines.append(_train(row, seeds, changes, whole, out, arguments.together, turns))
        except _Stopped as stopped:
            _say(f"jetplane reproduce: {row.preset} {stopped}")
            if stopped.interrupted:
                _say("The same command goes on from here.")
                return _INTERRUPTED
            status = 1
        except Exception as error:  # a row that fails must not end the others
            if arguments.debug:
                raise
            _say(f"jetplane reproduce: {row.preset} failed: {' '.join(str(error).split()) or type(error).__name__}")
            status = 1
    if lines:
        table = "".join(f"{line}\n" for line in (*_HEAD, *lines))
        files.write(out / "cifar10.md", table.encode())
        print(table)
    if any(out.rglob("metrics.jsonl")):
        report_command.write_page(report.read([out], report_command.warn), out / "report.html")
    return status


def _train(
    row: _Row, seeds: Sequence[int], changes: dict[str, Any], whole: Dataset, out: Path, together: bool, turns: Turn
) -> str:
    """Train a row; its line of the table."""
    folder = out / row.preset
    config = CIFAR[row.preset].config.replace(**changes, hold_out=0)
    tried = 0.0
    if row.rates:
        held = config.replace(seed=seeds[0], hold_out=min(_HELD, len(whole.train.labels) // 10))
        rate, tried = _chosen(row, held, whole, folder, turns)
        config = config.replace(lr=rate)
    found = _fit(row, [config.replace(seed=seed) for seed in seeds], whole, folder, together, turns)
    return _line(row, config, found, tried)


def _chosen(row: _Row, config: Config, whole: Dataset, folder: Path, turns: Turn) -> tuple[float, float]:
    """The rate with the best accuracy on the images held out, after the last epoch; and the passes that it took."""
    found: dict[float, float] = {}
    passes = 0.0
    for rate in row.rates:
        (summary,) = _fit(row, [config.replace(lr=rate)], whole, folder / f"choice-lr-{rate:g}", False, turns)
        assert summary.final is not None
        found[rate] = summary.final.validation_accuracy
        passes += summary.final.forward_equivalents
    best = max(found, key=lambda rate: found[rate])
    shown = ", ".join(f"{rate:g}: {accuracy:.2%}" for rate, accuracy in found.items())
    _say(f"{row.preset}: lr {best:g} has the best validation accuracy ({shown})")
    return best, passes


_HEAD = (
    "| row | lr | seeds | epochs | test accuracy | test NLL | passes over the images | to choose the rate |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
)


def _line(row: _Row, config: Config, summaries: Sequence[Summary], tried: float) -> str:
    """Means over seeds at the last epoch; validation is the test split here."""
    finals = [summary.final for summary in summaries if summary.final is not None]
    accuracies = [100 * final.validation_accuracy for final in finals]
    spread = f" ± {statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    nll = statistics.fmean(final.validation_nll for final in finals)
    passes = statistics.fmean(final.forward_equivalents for final in finals)
    rate = f"{config.lr:g}" if row.rates else "none"
    cells = [CIFAR[row.preset].label, rate, str(len(finals)), str(config.epochs)]
    cells += [f"{statistics.fmean(accuracies):.2f}{spread}%", f"{nll:.4f}", f"{passes:,.1f}", f"{tried:,.1f}"]
    return f"| {' | '.join([f'`{row.preset}`: {cells[0]}', *cells[1:]])} |"


def _fit(row: _Row, configs: list[Config], whole: Dataset, folder: Path, together: bool, turns: Turn) -> list[Summary]:
    """The summaries of these runs, which the folder has or are trained now."""
    preset = CIFAR[row.preset]
    places = [folder / f"seed-{config.seed}" for config in configs]
    waiting = [config for config, place in zip(configs, places, strict=True) if not is_finished(place, config)]
    if waiting:
        _say(f"{preset.name}: {len(waiting)} of {len(configs)} runs to do")
        for summary in fit(preset, waiting, folder, place(whole, configs[0]), together, turns):
            if summary.reason != "finished":
                raise _Stopped(summary)
    return [Summary.from_json((place / "summary.json").read_text(encoding="utf-8")) for place in places]


def _part(whole: Dataset) -> Dataset:
    """Few images."""
    train, test = (
        Split(split.images[:count], split.labels[:count])
        for split, count in zip((whole.train, whole.test), _QUICK_IMAGES, strict=True)
    )
    return whole._replace(train=train, test=test)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
