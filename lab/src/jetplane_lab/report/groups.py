"""Runs gathered into rows: those that differ in nothing but their seed, and the row of the paper they repeat.

A section of the report is one model on one dataset with one kind of validation; its groups are in the paper's order.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from ..config import FORWARD_GRADIENT, REVERSE, Config
from ..presets import BEYOND, CIFAR, PRESETS, Preset
from .intervals import Sample, sample
from .runs import RunRecord

__all__ = [
    "AXES",
    "METRICS",
    "TEST",
    "Axis",
    "Curve",
    "Group",
    "Section",
    "method_label",
    "paper_sample",
    "sections",
    "slug",
]

METRICS = {  # of the paper's tables, in their order
    "train_nll": "training NLL",
    "validation_nll": "validation NLL",
    "train_accuracy": "training accuracy",
    "validation_accuracy": "validation accuracy",
}
_DATASETS = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "digits": "the embedded digits",
    "cifar-10": "CIFAR-10",
}
MODEL_NAMES = {
    "logistic-regression": "Logistic regression",
    "cnn": "CNN",
    "colour-cnn": "CNN",
    "resnet-20": "ResNet-20",
}
_METHODS = {
    **{"fgd": "FGD", "fomoh": "FoMoH", "fomoh-bp": "FoMoH-BP", "backprop": "Backpropagation"},
    **{"sgd": "SGD", "adam": "Adam"},
    **{"forward-adam": "Forward gradients, Adam", "forward-sgd": "Forward gradients, SGD"},
    **{"horizon": "HorizonAdam", "gauss-newton": "Gauss-Newton search"},
    **{"mezo": "MeZO", "fzoo": "FZOO"},
}
TEST = {"test_nll": "test NLL", "test_accuracy": "test accuracy"}  # of runs with samples held out
_BEYOND = (
    "mezo",
    "fzoo",
    "gauss-newton",
    "forward-sgd",
    "forward-adam",
    "horizon",
)  # forward-only methods that are not the paper's
_WHERE = frozenset({"seed", "device", "evaluate_train", "divergence"})  # runs of one row may differ in these
_SPEED = _WHERE | {"epochs", "tf32", "compile"}  # and a run may differ from the paper's row in these


class Axis(NamedTuple):
    """What a curve is drawn against: its label, and its value at an epoch of a run (nan where it was not recorded)."""

    label: str
    at: Callable[[RunRecord, int], float]


def _recorded(name: str) -> Callable[[RunRecord, int], float]:
    return lambda run, row: run.columns[name][row] if name in run.columns else math.nan


def _steps(run: RunRecord, row: int) -> float:
    """Steps up to an epoch: each has as many."""
    return run.columns["epoch"][row] * run.columns["steps"][row] if "steps" in run.columns else math.nan


AXES = {
    "steps": Axis("steps (mini-batches)", _steps),
    "passes": Axis("forward passes over the training data", _recorded("forward_equivalents")),
    "seconds": Axis("seconds of training", _recorded("seconds")),
}


class Curve(NamedTuple):
    """Mean and standard deviation (nan for one run) over the seeds at each epoch, and the axes' values there."""

    epochs: list[int]
    mean: list[float]
    std: list[float]
    along: dict[str, list[float]]  # by axis; empty where it was not recorded


@dataclass(frozen=True)
class Group:
    """The runs of one row, by seed."""

    label: str
    config: Config  # of its first run
    preset: Preset | None
    runs: tuple[RunRecord, ...]

    @property
    def counted(self) -> tuple[RunRecord, ...]:
        """Those whose numbers are averaged: the ones that ran to the end, or, where none has, those still running."""
        whole = tuple(run for run in self.runs if run.finished)
        return whole or tuple(run for run in self.runs if not run.diverged) or self.runs

    @property
    def complete(self) -> bool:
        """Whether the counted runs have reached their last epoch."""
        return all(run.finished for run in self.counted)

    @property
    def comparable(self) -> bool:
        """Whether the runs repeat a row of the paper over as many epochs."""
        return self.complete and self.preset is not None and self.preset.config.epochs == self.config.epochs

    @property
    def paper(self) -> bool:
        """Whether the paper has this row."""
        return self.preset is not None

    @property
    def reverse(self) -> bool:
        """Whether it uses backprop."""
        return self.config.method in REVERSE

    @property
    def beyond(self) -> bool:
        """Whether it is a forward-only method that the paper does not have."""
        return self.config.method in _BEYOND

    @property
    def scheduled(self) -> bool:
        """Whether its lr changes."""
        return self.config.schedule != "none"

    @property
    def remark(self) -> str:
        """What a reader of its numbers has to know."""
        parts = []
        going = [run for run in self.runs if not run.finished and not run.diverged]
        lost = [run for run in self.runs if run.diverged]
        if going and going[0] in self.counted:
            parts.append(f"in progress, epoch {min(run.epoch for run in going)} of {self.config.epochs}")
        elif going:
            parts.append(f"{len(going)} more in progress")
        if lost:
            parts.append(f"{len(lost)} of {len(self.runs)} diverged")
        if self.preset is not None and self.preset.config.epochs != self.config.epochs:
            parts.append(f"{self.config.epochs} of the paper's {self.preset.config.epochs} epochs")
        untaken = sum(run.facts.not_taken for run in self.runs)
        if untaken:
            parts.append(f"{untaken:,} steps not taken")
        return "; ".join(parts)

    def final(self, metric: str) -> Sample:
        """The last epoch's value over the counted runs; nan where one of them has none."""
        return sample([run.last(metric) for run in self.counted])

    @property
    def passes_per_epoch(self) -> float:
        """Forward passes over the training data in an epoch, which is the cost of a step in passes of its batch."""
        return sample([run.last("forward_equivalents") / run.epoch for run in self.counted]).mean

    def curve(self, metric: str, points: int) -> Curve:
        """The mean over the counted runs, at up to so many of the epochs that all of them have, at equal ratios."""
        runs = [run for run in self.counted if metric in run.columns]
        places = [{int(epoch): row for row, epoch in enumerate(run.columns["epoch"])} for run in runs]
        common = sorted(set.intersection(*(set(rows) for rows in places))) if runs else []
        curve = Curve([], [], [], {name: [] for name in AXES})
        for epoch in _spread(common, points):
            here = [(run, rows[epoch]) for run, rows in zip(runs, places, strict=True)]
            mean, std, _ = sample([run.columns[metric][row] for run, row in here])
            if not math.isnan(mean):
                curve.epochs.append(epoch)
                curve.mean.append(mean)
                curve.std.append(std)
                for name, axis in AXES.items():
                    curve.along[name].append(statistics.fmean(axis.at(run, row) for run, row in here))
        along = {name: [] if any(map(math.isnan, values)) else values for name, values in curve.along.items()}
        return curve._replace(along=along)


def _spread(epochs: Sequence[int], points: int) -> list[int]:
    """At most so many of the epochs, at equal ratios, the first and the last among them."""
    if len(epochs) <= points:
        return list(epochs)
    first, last = epochs[0], epochs[-1]
    wanted = (first * (last / first) ** (i / (points - 1)) for i in range(points))
    return sorted({epochs[min(bisect.bisect_left(epochs, epoch), len(epochs) - 1)] for epoch in wanted} | {last})


@dataclass(frozen=True)
class Section:
    """The groups of one model and dataset."""

    model: str
    dataset: str
    hold_out: int
    groups: tuple[Group, ...]

    @property
    def title(self) -> str:
        """Model and dataset."""
        held = f", {self.hold_out:,} held out" if self.hold_out else ""
        return f"{MODEL_NAMES.get(self.model, self.model)} on {_DATASETS.get(self.dataset, self.dataset)}{held}"

    @property
    def validation(self) -> str:
        """What validation is here."""
        if self.hold_out:
            once = " The test split was looked at once, after the last epoch." if self.tested else ""
            return f"Validation is {self.hold_out:,} samples held out from the training split.{once}"
        name = _DATASETS.get(self.dataset, self.dataset)
        whose = ", as in the paper" if self.dataset == "mnist" else ""
        warning = "hyper-parameters that were chosen on validation were chosen on test data"
        return f"Validation is the test split of {name}{whose}: {warning}."

    @property
    def caution(self) -> str:
        """What a reader of the answers has to know: rows that are not the paper's in full, or have no spread."""
        words = []
        if not all(group.comparable for group in self.groups if group.paper):
            words.append("Some rows are under way, or have fewer epochs than the paper's.")
        if any(len(group.counted) == 1 for group in self.groups):
            words.append("Rows with one seed have no spread: an order between them can be chance.")
        return " ".join(words)

    @property
    def ranked(self) -> tuple[Group, ...]:
        """The rows by their last validation accuracy, the best first; those without one are left out."""
        known = [(group.final("validation_accuracy").mean, group) for group in self.groups]
        known = [(accuracy, group) for accuracy, group in known if not math.isnan(accuracy)]
        return tuple(group for _, group in sorted(known, key=lambda pair: -pair[0]))

    @property
    def baseline(self) -> Group | None:
        """The best row of backprop; FoMoH-BP, which is one with a second order, is none."""
        return next((group for group in self.ranked if group.config.method in ("backprop", "sgd", "adam")), None)

    @property
    def papers(self) -> bool:
        """Whether a row of it repeats one of the paper's."""
        return any(group.paper for group in self.groups)

    @property
    def answers(self) -> bool:
        """Whether it has a row of one of the paper's methods, by which the paper's claims can be judged."""
        return any(not group.beyond and group.config.method not in ("sgd", "adam") for group in self.groups)

    @property
    def tested(self) -> bool:
        """Whether a row of it has values of a test split apart from its validation."""
        return any(not math.isnan(run.last("test_nll")) for group in self.groups for run in group.runs)

    def find(self, method: str, k: int | None = None, scheduled: bool = False) -> Group | None:
        """The row of a method: the paper's if it is there, otherwise the one with the most epochs and runs."""
        rows = [
            group
            for group in self.groups
            if group.config.method == method and group.scheduled == scheduled and k in (None, group.config.k)
        ]
        return max(rows, key=lambda g: (g.paper, g.config.epochs, len(g.counted)), default=None)


def paper_sample(preset: Preset, metric: str) -> Sample | None:
    """The paper's mean and standard deviation of a row, with its number of seeds."""
    if preset.paper is None:
        return None
    mean, std = getattr(preset.paper, metric)
    return Sample(mean, std, len(preset.seeds))


def method_label(config: Config) -> str:
    """The name of a method as the paper writes it.

    >>> method_label(Config(model="cnn", method="fomoh-kd", k=3, lr=0.3))
    'FoMoH-3D'
    """
    name = f"FoMoH-{config.k}D" if config.method == "fomoh-kd" else _METHODS[config.method]
    if config.method in ("gauss-newton", "fzoo") or (config.method in ("fgd", "mezo") and config.k > 1):
        name += f" (K = {config.k})"
    if config.method in FORWARD_GRADIENT:
        name += f" (J = {config.samples or '8 to 32'})"
    name += " (LR-Sch.)" if config.schedule != "none" else ""
    return name + (", flips and crops" if config.augment else "") + (", averaged" if config.average else "")


def slug(config: Config) -> str:
    """A name for files: the preset's, of the paper or beyond it, or one made of model, method and dataset.

    >>> slug(Config(model="cnn", method="fomoh-kd", k=3, dataset="digits"))
    'cnn-fomoh-kd-3d-digits'
    """
    preset = _preset(config) or _repeated(config, (*BEYOND.values(), *CIFAR.values()))
    if preset is not None:
        return preset.name
    size = f"-{config.k}d" if config.method in ("fomoh-kd", "gauss-newton") else ""
    size += f"-j{config.samples or 'own'}" if config.method in FORWARD_GRADIENT else ""
    return f"{config.model}-{config.method}{size}-{config.dataset}" + ("-augmented" if config.augment else "")


def sections(records: Iterable[RunRecord]) -> list[Section]:
    """The records by model, dataset and validation, and within them by row."""
    rows: dict[frozenset[tuple[str, Any]], list[RunRecord]] = {}
    for record in records:
        rows.setdefault(_identity(record.config, _WHERE), []).append(record)
    kinds: dict[tuple[str, str, int], list[Group]] = {}
    for runs in rows.values():
        runs.sort(key=lambda run: run.config.seed)
        config = runs[0].config
        preset = _preset(config)
        group = Group(preset.label if preset else method_label(config), config, preset, tuple(runs))
        kinds.setdefault((config.model, config.dataset, config.hold_out), []).append(group)
    ordered = sorted(kinds.items(), key=lambda item: ([*MODEL_NAMES, item[0][0]].index(item[0][0]), item[0]))
    return [Section(*kind, groups=_distinct(sorted(groups, key=_order))) for kind, groups in ordered]


def _identity(config: Config, aside: frozenset[str]) -> frozenset[tuple[str, Any]]:
    return frozenset((name, value) for name, value in config.to_dict().items() if name not in aside)


def _preset(config: Config) -> Preset | None:
    """The row of the paper that a run repeats, if over fewer epochs or in another precision."""
    return _repeated(config, (preset for preset in PRESETS.values() if preset.paper is not None))


def _repeated(config: Config, presets: Iterable[Preset]) -> Preset | None:
    mine = _identity(config, _SPEED)
    return next((preset for preset in presets if _identity(preset.config, _SPEED) == mine), None)


def _order(group: Group) -> tuple[object, ...]:
    methods = ["fgd", "fomoh", "fomoh-kd", *_BEYOND, "fomoh-bp", "backprop", "sgd", "adam"]
    config = group.config
    size = methods.index(config.method), config.k, config.samples or 0
    return (*size, group.scheduled, not group.paper, config.lr, config.batch_size)


def _distinct(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups of the same name are told apart by the fields in which they differ."""
    named = []
    for group in groups:
        twins = [other for other in groups if other.label == group.label]
        extra = []
        for field in fields(Config):
            value = getattr(group.config, field.name)
            if field.name not in _WHERE and any(getattr(other.config, field.name) != value for other in twins):
                extra.append(f"{field.name} {value:g}" if isinstance(value, float) else f"{field.name} {value}")
        named.append(replace(group, label=", ".join([group.label, *extra])))
    return tuple(named)
