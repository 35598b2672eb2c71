"""The tables of the report as data: the page and the Markdown write the same cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ..presets import PRESETS, Preset
from .groups import METRICS, TEST, Group, Section, paper_sample
from .intervals import Difference, Sample, difference
from .lead import settings
from .runs import LEVELS, RunRecord

__all__ = [
    "Cell",
    "Column",
    "Table",
    "all_of",
    "beyond",
    "cost",
    "differences",
    "hyperparameters",
    "reach",
    "results",
    "status",
]

FLAG_STDS = 3
_NONE = "\u2013"


class Cell(NamedTuple):
    """What is shown, what it is sorted by, and how it is marked: 'flag', 'soft' or nothing."""

    text: str
    value: float | None = None
    mark: str = ""


class Column(NamedTuple):
    """The head of a column, with the wider head above it where there is one."""

    title: str
    above: str = ""
    number: bool = True


class Table(NamedTuple):
    """A table; ``rows`` hold a cell for each column."""

    title: str
    note: str
    columns: list[Column]
    rows: list[list[Cell]]


class _Row(NamedTuple):
    """A line of a table beside the paper: our runs, the paper's row, or both."""

    label: str
    group: Group | None
    preset: Preset | None


def _rows(section: Section) -> list[_Row]:
    """All rows of the paper's table where this section repeats it, and our further ones after each."""
    if not section.papers:
        return [_Row(group.label, group, None) for group in section.groups]
    rows = []
    for preset in PRESETS.values():
        if preset.config.model == section.model and preset.paper is not None:
            mine = [group for group in section.groups if group.preset is preset]
            rows += [_Row(group.label, group, preset) for group in mine] or [_Row(preset.label, None, preset)]
    return rows + [_Row(group.label, group, None) for group in section.groups if group.preset is None]


def all_of(section: Section) -> list[Table]:
    """All tables of a section, in the page's order."""
    beside = [differences(section)] if section.papers else []
    further = beyond(section)
    head = [results(section)] if further is None else [results(section), further]
    return [*head, *beside, cost(section), *reach(section), hyperparameters(section)]


# -- results ------------------------------------------------------------------------------------------------------


def results(section: Section) -> Table:
    """The paper's result table, ours beside theirs."""
    columns = [Column("approach", number=False), Column("seeds")]
    for name in METRICS.values():
        columns += [Column("ours", name), Column("paper", name)] if section.papers else [Column(name)]
    rows = []
    for row in _rows(section):
        cells = [Cell(row.label), _seeds(row.group)]
        for metric in METRICS:
            cells.append(_mean(row.group.final(metric) if row.group else None))
            if section.papers:
                cells.append(_mean(paper_sample(row.preset, metric) if row.preset else None))
        rows.append([*cells, Cell(row.group.remark if row.group else "", mark="soft")])
    note = (
        "Mean ± standard deviation over seeds at the last epoch. Training values are running averages over the epoch."
    )
    if not any(row[-1].text for row in rows):
        return Table("Results", note, columns, [row[:-1] for row in rows])
    return Table("Results", note, [*columns, Column("remark", number=False)], rows)


def beyond(section: Section) -> Table | None:
    """Rows beyond the paper by the test split, the paper's printed ones below them; None where there are none."""
    if not section.tested:
        return None
    columns = [Column("approach", number=False), Column("whose", number=False), Column("seeds"), Column("epochs")]
    columns += [Column("forward-equivalents"), *(Column(name) for name in TEST.values())]
    rows = []
    for group in section.groups:
        spent = group.final("forward_equivalents").mean
        cells = [Cell(group.label), Cell("ours, backprop" if group.reverse else "ours, forward-only"), _seeds(group)]
        cells += [_plain(group.config.epochs), _known(spent, f"{spent:,.0f}")]
        rows.append([*cells, *(_mean(group.final(metric)) for metric in TEST)])
    for preset in PRESETS.values():
        if preset.paper is None or (preset.config.model, preset.config.dataset) != (section.model, section.dataset):
            continue
        kind = "the paper's, backprop" if preset.reverse_mode else "the paper's, forward-only"
        cells = [Cell(preset.label), Cell(kind), _plain(len(preset.seeds)), _plain(preset.config.epochs)]
        printed = (paper_sample(preset, metric) for metric in ("validation_nll", "validation_accuracy"))
        rows.append([*cells, Cell(_NONE, None, "soft"), *map(_mean, printed)])
    note = (
        "Values of the test split at the last epoch, mean ± standard deviation over seeds. Ours were trained without "
        "the samples that are held out; forward-equivalents are passes over what they were trained on."
    )
    if len(rows) > len(section.groups):
        note += " The paper's are those that it prints for its validation, which is the test split."
    return Table("Beyond the paper", note, columns, rows)


def _seeds(group: Group | None) -> Cell:
    return Cell(str(len(group.counted)), len(group.counted)) if group else Cell(_NONE, 0, "soft")


def _mean(values: Sample | None) -> Cell:
    if values is None or math.isnan(values.mean):
        return Cell(_NONE, None, "soft")
    form = ".4f" if values.mean < 1000 else ".3g"
    spread = "" if math.isnan(values.std) else f" ± {values.std:{form}}"
    return Cell(f"{values.mean:{form}}{spread}", values.mean)


def differences(section: Section) -> Table:
    """Ours minus theirs with 95% intervals."""
    rows = []
    for row in _rows(section):
        if row.group is None or row.preset is None:
            continue
        cells = [Cell(row.label), _seeds(row.group)]
        for metric in METRICS:
            theirs, ours = paper_sample(row.preset, metric), row.group.final(metric)
            cells.append(_difference(difference(ours, theirs), row.group.comparable) if theirs else Cell(_NONE))
        rows.append(cells)
    columns = [Column("approach", number=False), Column("seeds"), *(Column(name) for name in METRICS.values())]
    note = (
        "The interval is Welch's at 95%; with one seed of ours it is a prediction interval with the paper's spread. "
        f"▲ marks a difference above {FLAG_STDS} of the paper's standard deviations (a printed 0.0000 counts as "
        "0.00005); it is given for complete runs of the paper's number of epochs only."
    )
    return Table("Ours minus theirs", note, columns, rows)


def _difference(d: Difference, judged: bool) -> Cell:
    if math.isnan(d.value):
        return Cell(_NONE, None, "soft")
    flagged = judged and abs(d.stds) > FLAG_STDS
    interval = "" if math.isnan(d.low) else f" [{_signed(d.low)}, {_signed(d.high)}]"
    text = f"{_signed(d.value)}{' ▲' if flagged else ''}{interval}"
    return Cell(text, d.value, "flag" if flagged else "" if judged else "soft")


def _signed(value: float) -> str:
    return f"{value:{'+.4f' if abs(value) < 1000 else '+.3g'}}".replace("-", "\u2212")


def hyperparameters(section: Section) -> Table:
    """The paper's table of hyper-parameters, ours beside theirs."""
    beside = section.papers
    columns = [Column("approach", number=False)]
    columns += (
        [Column("ours", "learning rate"), Column("paper", "learning rate")] if beside else [Column("learning rate")]
    )
    columns += [Column("searched in (paper)", number=False)] if beside else []
    columns += [Column("ours", "batch size"), Column("paper", "batch size")] if beside else [Column("batch size")]
    rows = []
    for row in _rows(section):
        ours = row.group.config if row.group else None
        theirs = row.preset.config if row.preset else None
        bounds = row.preset.paper.lr_bounds if row.preset and row.preset.paper else None
        cells = [Cell(row.label), _plain(ours.lr if ours else None)]
        if beside:
            cells.append(_plain(theirs.lr if theirs else None))
            cells.append(Cell(f"[{bounds[0]:g}, {bounds[1]:g}]") if bounds else Cell(_NONE, mark="soft"))
        cells.append(_plain(ours.batch_size if ours else None))
        if beside:
            cells.append(_plain(theirs.batch_size if theirs else None))
        schedule = _schedule(row.group) if row.group else Cell(_NONE, mark="soft")
        rows.append([*cells, schedule, _plain(ours.epochs if ours else None)])
    columns += [Column("schedule (ours)", number=False), Column("epochs (ours)")]
    return Table("Hyper-parameters", "", columns, rows)


def _plain(value: float | None) -> Cell:
    return Cell(_NONE, None, "soft") if value is None else Cell(f"{value:.4g}", float(value))


def _schedule(group: Group) -> Cell:
    config = group.config
    if config.schedule in ("none", "cosine"):
        return Cell(config.schedule)
    period = f", {config.period} epochs" if config.schedule in ("step", "milestone3") else ""
    return Cell(f"{config.schedule} (\u00d7 {config.gamma:g}{period})")


# -- cost ---------------------------------------------------------------------------------------------------------


class _Cost(NamedTuple):
    seconds: float
    memory: float
    equivalents: float


def cost(section: Section) -> Table:
    """Time, memory and forward-equivalents, relative to backprop on the same device."""
    found: list[tuple[Group, str, _Cost]] = []
    for group in section.groups:
        devices: dict[str, list[RunRecord]] = {}
        for run in group.counted:
            devices.setdefault(_device(run), []).append(run)
        found += [(group, device, _cost(runs)) for device, runs in devices.items()]
    base = {
        device: spent for group, device, spent in reversed(found) if group.config.method in ("backprop", "sgd", "adam")
    }
    unknown = _Cost(math.nan, math.nan, math.nan)
    rows = []
    for group, device, spent in found:
        cells = [Cell(group.label), Cell(device), _plain(group.config.batch_size)]
        shown = f"{spent.seconds:.3g}", f"{spent.memory:,.0f}", f"{spent.equivalents:.2f}"
        for own, reference, text in zip(spent, base.get(device, unknown), shown, strict=True):
            cells += [_known(own, text), _known(ratio := own / (reference or math.nan), f"{ratio:.2f}")]
        rows.append(cells)
    columns = [Column("approach", number=False), Column("device", number=False), Column("batch size")]
    for unit, what in (
        ("s", "training time of an epoch"),
        ("MiB", "peak memory"),
        ("passes", "forward-equivalents of a step"),
    ):
        columns += [Column(unit, what), Column("\u00d7 backprop", what)]
    note = (
        "Means over seeds of the median epoch, evaluation apart. Peak memory is what training needs above what was "
        "held before it, and grows with the batch; on the CPU it cannot be told from the rest of the process. "
        "A forward-equivalent is the cost of one plain forward pass."
    )
    compared = {
        group.label: settings(group)
        for group, device, spent in found
        if base.get(device) is spent and group.config.method in ("backprop", "sgd", "adam")
    }
    if compared:
        note += " Backprop is " + "; ".join(f"{label} ({said})" for label, said in compared.items()) + "."
    return Table("Cost", note, columns, rows)


def _known(value: float, text: str) -> Cell:
    return Cell(_NONE, None, "soft") if math.isnan(value) else Cell(text, value)


def _device(run: RunRecord) -> str:
    """Where it ran; runs that shared a device are kept apart from those that had it alone."""
    name = str(run.environment.get("device") or run.config.device)
    together = int(max(run.columns.get("together", [1])))
    return f"{name}, {together} together" if together > 1 else name


def _cost(runs: Sequence[RunRecord]) -> _Cost:
    memory = [max(run.columns["peak_memory"]) / 2**20 for run in runs if _memory_is_the_runs(run)]
    equivalents = [run.last("forward_equivalents") / run.epoch for run in runs]
    seconds = [run.facts.seconds_per_epoch for run in runs]
    return _Cost(*(statistics.fmean(values) if values else math.nan for values in (seconds, memory, equivalents)))


def _memory_is_the_runs(run: RunRecord) -> bool:
    """Whether its peak memory is its own: a process's resident set also holds what earlier runs in it left."""
    kind = str(run.summary.get("peak_memory_kind", "")) if run.summary else run.config.device
    return "peak_memory" in run.columns and kind.startswith("cuda")


_UNITS = {
    "epochs": "Epochs",
    "forward-equivalents": "Forward passes over the training data",
    "seconds": "Seconds of training",
}


def reach(section: Section) -> list[Table]:
    """Epochs, forward-equivalents and seconds until validation accuracies are first reached."""
    levels = _levels(section)
    if not levels:
        return []
    columns = [Column("approach", number=False), Column("seeds"), *(Column(f"{level:.0%}") for level in levels)]
    tables = []
    for position, name in enumerate(_UNITS.values()):
        rows = []
        for group in section.groups:
            cells = [Cell(group.label), _seeds(group)]
            for level in levels:
                values = [run.facts.reached[level][position] for run in group.counted if level in run.facts.reached]
                cells.append(_reached(values, len(group.counted)))
            rows.append(cells)
        note = "The median over seeds of the first epoch at or above this validation accuracy." if position == 0 else ""
        tables.append(Table(f"{name} to a validation accuracy", note, columns, rows))
    return tables


def _levels(section: Section) -> list[float]:
    """Six levels up to the highest that any run has reached, and below them those that tell slower rows apart."""
    by_level = {
        level: {group.label for group in section.groups if any(level in run.facts.reached for run in group.counted)}
        for level in LEVELS
    }
    top = max((level for level, rows in by_level.items() if rows), default=0.0)
    spread = (0.9, 0.95, 0.96, 0.97, 0.98, 0.99) if top >= 0.95 else (0.8, 0.85, 0.88, 0.9, 0.91, 0.92)
    if top < 0.9:
        spread = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85)
    levels = [level for level in spread if level <= top]
    for level in reversed(LEVELS):
        if levels and level < levels[0] and by_level[level] != by_level[levels[0]]:
            levels.insert(0, level)
    return levels


def _reached(values: Sequence[float], runs: int) -> Cell:
    if not values or any(math.isnan(value) for value in values):
        return Cell("not reached" if not values else _NONE, math.inf, "soft")
    median = statistics.median(values)
    text = f"{median:,.0f}" if median >= 100 or float(median).is_integer() else f"{median:.3g}"
    return Cell(text if len(values) == runs else f"{text} ({len(values)} of {runs})", median)


def status(records: Sequence[RunRecord]) -> Table | None:
    """Runs that are going on, or that ended early."""
    open_runs = [run for run in records if not run.finished]
    if not open_runs:
        return None
    rows = [
        [
            Cell(run.path.name),
            Cell(str(run.config.seed), run.config.seed),
            Cell(str(run.epoch), run.epoch),
            Cell(run.state),
        ]
        for run in open_runs
    ]
    columns = [Column("run", number=False), Column("seed"), Column("epoch reached"), Column("state", number=False)]
    return Table("Runs that have not reached their end", "", columns, rows)
