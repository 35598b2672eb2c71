"""What a trial does: train the preset with its parameters, and score it on the examples held out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from jetplane_lab.data import Dataset
from jetplane_lab.training import Config, Trainer

from .settings import Settings
from .study import Objective, Outcome, Parameters, Report

__all__ = ["configure", "training_objective"]


def configure(config: Config, settings: Settings, parameters: Parameters) -> Config:
    """The config of a trial. It holds all that the trial's numbers depend on."""
    return config.replace(
        lr=parameters.lr,
        batch_size=parameters.batch_size,
        epochs=settings.epochs,
        seed=settings.seed,
        hold_out=settings.hold_out,
    )


def training_objective(config: Config, settings: Settings, dataset: Dataset) -> Objective:
    """The lowest validation NLL of an epoch.

    A run that diverges is scored as infinitely bad whatever it reached before: its learning rate would not hold in a
    longer run. What a trial would stumble over, such as too little memory for the largest batch, is raised here.
    """
    largest = configure(config, settings, Parameters(settings.lr_bounds[0], max(settings.batch_sizes)))
    data = Trainer(largest, dataset).data  # put on the device once for all trials
    data = dataclasses.replace(data, test=None)  # a study never looks at the test split

    def objective(parameters: Parameters, report: Report) -> Outcome:
        run = Trainer(configure(config, settings, parameters), data)
        best = math.inf
        facts: dict[str, Any] = {"device": _device(run.device)}
        for metrics in run.epochs():
            facts |= {"epochs": metrics.epoch, "forward_equivalents": round(metrics.forward_equivalents, 3)}
            if math.isfinite(metrics.validation_nll):
                best = min(best, metrics.validation_nll)
            if report(metrics.epoch, metrics.validation_nll):
                break
        if run.summary is not None and run.summary.reason == "diverged":
            facts["ended"], best = run.summary.message, math.inf
        return Outcome(best, facts)

    return objective


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
