"""jetplane's own ways, and a plain forward pass for scale."""

from __future__ import annotations

from typing import Any

import torch

import jetplane as jp

from ..problem import Derivatives, Problem
from . import compiled
from .system import Prepared, Setting, System, as_plane, torch_wait

__all__ = ["SYSTEMS"]


def _forward(problem: Problem, setting: Setting) -> Prepared:
    def call() -> Any:
        with torch.no_grad():
            return problem.loss()

    return Prepared(call, as_plane, torch_wait(setting.device))


def _eager(problem: Problem, setting: Setting) -> Prepared:
    def call() -> Derivatives:
        with jp.perturb(problem.params, problem.directions) as jets:
            loss = problem.loss()
        model = jets.quadratic(loss)
        return Derivatives(model.loss, model.slope, model.curvature)

    return Prepared(call, as_plane, torch_wait(setting.device))


def _compiled(problem: Problem, setting: Setting) -> Prepared:
    def read(model: jp.Quadratic) -> Derivatives:
        return Derivatives(model.loss, model.slope, model.curvature)

    return Prepared(compiled.call(problem), read, torch_wait(setting.device))


SYSTEMS = (
    System("forward", "one forward pass without derivatives, for scale", "scale", _forward),
    System("jetplane", "one pass with all pairs, eager", "ours", _eager),
    System(
        *("jetplane-compiled", "the same, compiled", "ours", _compiled),
        compiled=True,
    ),
)
