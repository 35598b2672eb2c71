"""Tuning with Optuna: a study over the learning rate and the batch size of a preset.

A study lies in a folder: ``study.json`` (what was asked for; the study's identity), ``study.db`` (the trials, SQLite)
and ``summary.json`` (what is committed). It can be stopped at any moment, resumed, and shared by processes::

    settings = Settings.of(presets.find("lr-fomoh"), dataset, trials=30, epochs=20)
    with Study(folder, settings) as study:
        run_study(study, training_objective(preset.config, settings, dataset))
        print(markdown(summary(study)))
"""

from __future__ import annotations

from .objective import configure, training_objective
from .settings import SAMPLERS, Settings
from .study import Entry, Objective, Outcome, Parameters, Report, Study, run_study
from .summary import markdown, summary

__all__ = [
    "SAMPLERS",
    "Entry",
    "Objective",
    "Outcome",
    "Parameters",
    "Report",
    "Settings",
    "Study",
    "configure",
    "markdown",
    "run_study",
    "summary",
    "training_objective",
]
