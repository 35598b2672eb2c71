"""The paper's claims about training, answered from the runs of a section: yes, no, or not from these runs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .groups import Group, Section
from .intervals import Sample, difference, sample, t_quantile
from .runs import LEVELS, WINDOWS

__all__ = ["Claim", "claims"]

_DEGRADED = 0.01  # relative rise of the validation NLL from its lowest stretch that counts
_FACTOR = 1000  # from which a loss, or its rise, is given by its size alone


class Claim(NamedTuple):
    """A statement of the paper, whether it holds here (None: these runs cannot say), and the numbers."""

    text: str
    holds: bool | None
    numbers: str

    @property
    def answer(self) -> str:
        """The answer in words."""
        return {True: "yes", False: "no", None: "cannot be answered from these runs"}[self.holds]


class _Unknown(Exception):
    """The runs at hand do not answer; the message says why."""


def claims(section: Section) -> list[Claim]:
    """Every claim, for one model and dataset."""
    asked: list[tuple[str, Callable[[Section], tuple[bool, str]]]] = [
        ("With a fixed lr, FoMoH-KD converges in fewer epochs as K grows (FoMoH is K = 1).", _faster_with_k),
        ("With a fixed lr, FoMoH and FoMoH-KD get worse again after their best validation NLL.", _degrades),
        ("A learning-rate schedule improves the final validation NLL of FoMoH and FoMoH-KD.", _schedule_helps),
        ("FGD needs more epochs than every FoMoH variant.", _fgd_slower),
        ("Of the forward-only methods, the largest K ends with the best validation accuracy.", _largest_k_best),
        ("The methods with backprop end with a better validation accuracy than all forward-only ones.", _reverse_best),
    ]
    found = []
    for text, answer in asked:
        try:
            holds, numbers = answer(section)
        except _Unknown as missing:
            found.append(Claim(text, None, str(missing)))
        else:
            found.append(Claim(text, holds, numbers))
    return found


# -- rows ---------------------------------------------------------------------------------------------------------


def _planes(section: Section, scheduled: bool = False) -> list[Group]:
    """FoMoH and FoMoH-KD for every K there is, by K."""
    ks = sorted({group.config.k for group in section.groups if group.config.method == "fomoh-kd"})
    rows = [section.find("fomoh", scheduled=scheduled), *(section.find("fomoh-kd", k, scheduled) for k in ks)]
    return [row for row in rows if row is not None]


def _epochs(row: Group, level: float) -> float:
    """The median epoch at which the seeds reach a validation accuracy; infinite where one of them never does."""
    reached = [run.facts.reached[level][0] for run in row.counted if level in run.facts.reached]
    return statistics.median(reached) if len(reached) == len(row.counted) else math.inf


def _common(rows: Sequence[Group]) -> list[float]:
    """Up to three of the highest validation accuracies that all rows reach, and not all in the first epoch."""
    levels = [level for level in LEVELS if all(math.isfinite(_epochs(row, level)) for row in rows)]
    levels = [level for level in levels if any(_epochs(row, level) > 1 for row in rows)]
    if not levels:
        raise _Unknown("No validation accuracy of the scale is reached by all of " + _names(rows) + " after epoch 1.")
    return levels[-3:]


def _names(rows: Sequence[Group]) -> str:
    return ", ".join(row.label for row in rows)


def _steps(rows: Sequence[Group]) -> str:
    """A word of caution where an epoch is not the same number of steps for all."""
    if len({row.config.batch_size for row in rows}) == 1:
        return ""
    return " Batch sizes differ: " + ", ".join(f"{row.label} {row.config.batch_size}" for row in rows) + "."


def _table(rows: Sequence[Group], levels: Sequence[float]) -> str:
    def one(level: float) -> str:
        counts = ", ".join(f"{row.label} {_count(_epochs(row, level))}" for row in rows)
        return f"to {level:.1%}: {counts}"

    return "Epochs (median over seeds) " + "; ".join(one(level) for level in levels) + "."


def _count(epochs: float) -> str:
    return f"{epochs:g}" if math.isfinite(epochs) else "never"


# -- claims -------------------------------------------------------------------------------------------------------


def _faster_with_k(section: Section) -> tuple[bool, str]:
    rows = _planes(section)
    if len(rows) < 2:
        raise _Unknown(f"Needs FoMoH and FoMoH-KD at a fixed lr; there is {_names(rows) or 'neither'}.")
    levels = _common(rows)
    falls = all(_epochs(a, level) > _epochs(b, level) for level in levels for a, b in itertools.pairwise(rows))
    return falls, _table(rows, levels) + _steps(rows)


def _degrades(section: Section) -> tuple[bool, str]:
    rows = _planes(section)
    if not rows:
        raise _Unknown("Needs FoMoH or FoMoH-KD at a fixed lr.")
    if any(run.epoch < WINDOWS for row in rows for run in row.counted):
        raise _Unknown(f"Needs runs of at least {WINDOWS} epochs.")
    verdicts, texts = [], []
    for row in rows:
        stretches = [run.facts.windows["validation_nll"] for run in row.counted]
        rises = sample([(windows[-1] - min(windows)) / min(windows) for windows in stretches])
        low, last = (statistics.fmean(pick) for pick in ([min(w) for w in stretches], [w[-1] for w in stretches]))
        verdicts.append(rises.mean > _DEGRADED and rises.mean > _half_width(rises))
        where = statistics.median(100 * (w.index(min(w)) + 1) / len(w) for w in stretches)
        rise = f"{rises.mean:+.1%}" if rises.mean < _FACTOR else f"diverged, times {rises.mean + 1:.0e}"
        texts.append(f"{row.label} {_loss(low)} to {_loss(last)} ({rise}, lowest at {where:.0f}% of the run)")
    numbers = f"Validation NLL, lowest and last mean over {100 // WINDOWS}% of the run: {'; '.join(texts)}."
    return all(verdicts), numbers


def _loss(value: float, sign: str = "") -> str:
    """A loss; of one that diverged its size."""
    return f"{value:{sign}.4f}" if abs(value) < _FACTOR else f"{value:{sign}.3g}"


def _half_width(values: Sample) -> float:
    """Of the 95% interval of a mean over seeds; zero for a single one."""
    if values.n < 2:
        return 0.0
    return t_quantile(0.975, values.n - 1) * values.std / math.sqrt(values.n)


def _schedule_helps(section: Section) -> tuple[bool, str]:
    fixed, scheduled = _planes(section), _planes(section, scheduled=True)
    pairs = [(a, b) for a in fixed for b in scheduled if (a.config.method, a.config.k) == (b.config.method, b.config.k)]
    if not pairs:
        raise _Unknown("Needs a method both with a schedule and without.")
    verdicts, texts = [], []
    for a, b in pairs:
        d = difference(b.final("validation_nll"), a.final("validation_nll"))
        verdicts.append(d.value < 0)
        interval = "" if math.isnan(d.low) else f" [{_loss(d.low, '+')}, {_loss(d.high, '+')}]"
        texts.append(f"{a.label} {_loss(d.value, '+')}{interval}")
    return all(verdicts), f"Final validation NLL, with the schedule minus without: {'; '.join(texts)}."


def _fgd_slower(section: Section) -> tuple[bool, str]:
    fgd, rows = section.find("fgd"), _planes(section)
    if fgd is None or not rows:
        raise _Unknown("Needs FGD and at least one FoMoH variant at a fixed lr.")
    levels = _common(rows)
    slower = all(_epochs(fgd, level) > _epochs(row, level) for row in rows for level in levels)
    return slower, _table([fgd, *rows], levels) + _steps([fgd, *rows])


def _accuracy(row: Group) -> float:
    value = row.final("validation_accuracy").mean
    return -math.inf if math.isnan(value) else value


def _largest_k_best(section: Section) -> tuple[bool, str]:
    forward = [group for group in section.groups if not group.reverse]
    planes = [group for group in forward if group.config.method == "fomoh-kd"]
    others = [group for group in forward if group.config.method != "fomoh-kd"]
    if not planes or not others:
        raise _Unknown("Needs FoMoH-KD and at least one of FGD and FoMoH.")
    largest = max(group.config.k for group in planes)
    ranked = sorted(forward, key=_accuracy, reverse=True)
    order = "; ".join(f"{row.label} {_shown(row)}" for row in ranked)
    d = difference(ranked[0].final("validation_accuracy"), ranked[1].final("validation_accuracy"))
    lead = "" if math.isnan(d.low) else f" The first leads the second by {d.value:.4f} [{d.low:+.4f}, {d.high:+.4f}]."
    best = ranked[0].config
    return best.method == "fomoh-kd" and best.k == largest, f"Final validation accuracy: {order}.{lead}"


def _reverse_best(section: Section) -> tuple[bool, str]:
    reverse = [group for group in section.groups if group.reverse]
    forward = [group for group in section.groups if not group.reverse]
    if not reverse or not forward:
        raise _Unknown("Needs rows of both kinds.")
    worst, best = min(reverse, key=_accuracy), max(forward, key=_accuracy)
    numbers = (
        f"The least with backprop is {worst.label} {_shown(worst)}, the best forward-only {best.label} {_shown(best)}."
    )
    return _accuracy(worst) > _accuracy(best), numbers


def _shown(row: Group) -> str:
    final = row.final("validation_accuracy")
    return f"{final.mean:.4f}" + ("" if math.isnan(final.std) else f" ± {final.std:.4f}")
