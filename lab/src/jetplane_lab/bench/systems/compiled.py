"""The one place that knows how jetplane's compiled paths are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import jetplane

from ..problem import Params, Problem

__all__ = ["call", "step_options"]


def call(problem: Problem) -> Callable[[], Any]:
    """The compiled plane of a problem: parameters, directions and batch are inputs."""
    fast = jetplane.compile(jetplane.quadratic)
    params, directions = problem.constants, problem.directions

    def loss(params: Params) -> Tensor:
        return problem.loss_of(params, problem.x, problem.y)

    return lambda: fast(loss, params, directions)


def step_options() -> dict[str, Any]:
    """What makes an optimizer compile its step."""
    return {"compile": True}
