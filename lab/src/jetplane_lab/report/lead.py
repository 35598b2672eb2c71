"""The result of a section in a sentence: the best row of forward passes alone, beside backprop with its settings."""

from __future__ import annotations

import math

from .groups import Group, Section

__all__ = ["sentence", "settings"]

_NAMES = {"backprop": "SGD", "sgd": "SGD with momentum", "adam": "Adam"}
_FOUND = ("horizon", "gauss-newton")  # methods that find the length of their steps


def sentence(section: Section) -> str:
    """What came out, what it cost, and beside what."""
    best = next((group for group in section.ranked if not group.reverse), None)
    base = section.baseline
    if best is None:
        return "" if base is None else f"{_result(base)}; there is no run of forward passes alone beside it."
    text = f"With forward passes alone {_result(best)}"
    text += (
        f"; backprop ({settings(base)}) {_percent(base)}{_after(base)}." if base else "; no run of backprop is here."
    )
    mine, theirs = best.passes_per_epoch, base.passes_per_epoch if base else math.nan
    if not math.isnan(mine):
        text += f" A step cost as much as {mine:.1f} forward passes of its batch"
        text += "." if math.isnan(theirs) else f", and one of backprop as {theirs:.1f}."
    if len(best.counted) == 1:
        text += " One seed."
    return text


def settings(group: Group) -> str:
    """What a row was trained with, for a reader who would repeat it.

    Example:
        >>> from jetplane_lab.config import Config
        >>> config = Config(model="cnn", method="backprop", lr=0.05, batch_size=75)
        >>> settings(Group("Backpropagation", config, None, ()))
        'SGD, learning rate 0.05, batches of 75, no schedule'
    """
    config = group.config
    rate = "no learning rate" if config.method in _FOUND else f"learning rate {config.lr:g}"
    schedule = "no schedule" if config.schedule == "none" else f"schedule {config.schedule}"
    name = _NAMES.get(config.method)
    return ", ".join([*([name] if name else []), rate, f"batches of {config.batch_size}", schedule])


def _result(group: Group) -> str:
    return f"{group.label} got {_percent(group)} of the validation samples right{_after(group)}"


def _percent(group: Group) -> str:
    mean, std, _ = group.final("validation_accuracy")
    return f"{mean:.2%}" if math.isnan(std) else f"{mean:.2%} ± {100 * std:.2f}"


def _after(group: Group) -> str:
    epochs = min(run.epoch for run in group.counted)
    return f" after {epochs} epoch{'s' * (epochs > 1)}"
