"""The one place that knows how jetplane's compiled paths are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jetplane
from jetplane.optim import HyperplaneSearch

from ..problem import Problem

__all__ = ["call", "no_compile", "no_compiled_step", "step_options"]


def no_compile() -> str | None:
    """Why the compiled plane cannot run, or None."""
    return None if hasattr(jetplane, "compile") else "this jetplane has no jetplane.compile"


def no_compiled_step() -> str | None:
    """Why the compiled step cannot run, or None."""
    has = "compile" in inspect.signature(HyperplaneSearch.__init__).parameters
    return None if has else "the optimizers of this jetplane have no option compile"


def call(problem: Problem) -> Callable[[], Any]:
    """The compiled plane of a problem: parameters, directions and batch are inputs."""
    build: Any = getattr(jetplane, "compile")  # noqa: B009 - typed checkers run without it too
    fast = build(problem.loss_of, k=problem.k)
    params, directions, x, y = problem.constants, problem.directions, problem.x, problem.y
    return lambda: fast(params, directions, x, y)


def step_options() -> dict[str, Any]:
    """What makes an optimizer compile its step."""
    return {"compile": True}
