"""Whole optimization steps: directions, pass, solve and update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jetplane.directions import Gaussian, Plane
from jetplane.optim import FoMoHKD
from jetplane.solvers import JitteredInverse
from jetplane.testing.oracle import double_backward

from .problem import Problem
from .systems import Prepared, Setting, System, authors, compiled
from .systems.system import as_plane, torch_wait

__all__ = ["STEPS", "step_error"]

# small, so that a timing of many steps stays in one regime; the work of a step does not depend on it
_LR = 1e-3
_IN_A_ROW = 100  # steps of one call, where a call takes several: about an epoch of MNIST in batches of 512


def _optimizer(problem: Problem, options: dict[str, Any], count: int | None = None) -> Callable[[], Any]:
    """A call that takes a step; or, with ``count``, as many of them by ``steps``."""
    # patience=None: a step that is not taken is measured as well, and must not end the measurement
    search = FoMoHKD(problem.params.values(), lr=_LR, k=problem.k, patience=None, **options)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return problem.loss_on(x, y)

    if count is None:
        return lambda: search.step(loss, problem.x, problem.y)
    batches = [batch.expand(count, *batch.shape) for batch in (problem.x, problem.y)]
    return lambda: search.steps(loss, *batches)


def _ours(options: Callable[[], dict[str, Any]], count: int | None = None) -> Callable[[Problem, Setting], Prepared]:
    def prepare(problem: Problem, setting: Setting) -> Prepared:
        call = _optimizer(problem, options(), count)
        return Prepared(call, as_plane, torch_wait(setting.device), steps=count or 1)

    return prepare


def _authors(problem: Problem, setting: Setting) -> Prepared:
    step = authors.load(setting.fomoh, "opt").optimizer_step_plane_Nd
    model, loss = authors.model_of(problem, setting.fomoh)

    def call() -> Any:
        with torch.no_grad():
            return step(model, loss, 1, problem.x, problem.y, N=problem.k, device=setting.device, lr=_LR)

    return Prepared(call, as_plane, torch_wait(setting.device))


def _backprop(problem: Problem, setting: Setting) -> Prepared:
    search = torch.optim.SGD(problem.params.values(), lr=_LR)

    def call() -> Tensor:
        search.zero_grad()
        loss = problem.loss()
        loss.backward()
        search.step()
        return loss

    return Prepared(call, as_plane, torch_wait(setting.device))


STEPS: dict[str, System] = {
    system.name: system
    for system in (
        System("backprop", "a step of SGD with a backward pass, for scale", "scale", _backprop),
        System("jetplane", "a step of FoMoH-KD, eager", "ours", _ours(dict)),
        System(
            *("jetplane-compiled", "the same, compiled", "ours", _ours(compiled.step_options)),
            compiled=True,
        ),
        System(
            "jetplane-compiled-steps",
            f"the same, {_IN_A_ROW} steps a call; the time is that of one",
            "ours",
            _ours(compiled.step_options, _IN_A_ROW),
            compiled=True,
        ),
        System("fomoh", "the authors' step of FoMoH-KD", "peer", _authors, authors.SYSTEMS[0].missing),
    )
}


def step_error(system: str, k: int, model: str, depth: int, batch: int, device: str) -> float:
    """How far one step of ours in float64 is from Newton's step in the same plane by double backward, relatively."""
    options = compiled.step_options() if STEPS[system].compiled else {}
    problem = Problem(model, k, batch, depth, torch.float64, device)
    leaves = list(problem.params.values())
    before = [leaf.detach().clone() for leaf in leaves]

    def no_gradient() -> list[Tensor]:
        raise AssertionError("Gaussian directions need no gradient")

    drawn = Gaussian(k).draw(Plane(0, 0, 0, leaves, no_gradient))
    rows = [drawn.rows(position, leaf.detach(), 0, k) for position, leaf in enumerate(leaves)]
    expected = double_backward(problem.loss, leaves, rows)
    coefficients = JitteredInverse()(expected).coefficients.to(rows[0])
    _optimizer(problem, options, 1 if system.endswith("-steps") else None)()
    worst = 0.0
    for leaf, start, row in zip(leaves, before, rows, strict=True):
        move = _LR * torch.tensordot(coefficients, row, 1)
        worst = max(worst, float((leaf.detach() - start - move).abs().max() / move.abs().max()))
    return worst
