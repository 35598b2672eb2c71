"""One step, in the order draw, sweep, solve, accept, apply, learn, report. :mod:`.step_traced` is its twin.

Every part is a function of values to values; only ``apply`` writes the parameters, and ``learn`` what directions
remember.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic
from ..ad.finite import finite
from ..ad.run.directions import Joined
from ..ad.run.parts import own, whole_like
from ..directions import Learnt, Memory, Plane, Size, Taken
from ..solvers import Status, Step
from ..solvers.base import HEALTHY
from .acceptance import Acceptance, Finite
from .closures import Closures
from .moving import Moving
from .reports import Report
from .scaled import Held, Scaled, clipped, shortened, update
from .sizes import advantage
from .step_settings import Numbers, StepSettings
from .watching import NOBODY, Moved, Watcher

__all__ = ["accept", "apply", "draw", "learn", "moves", "report", "solve", "sweep", "take"]

_FEW = 1 << 14  # entries of all directions up to which they are kept for the update: to make them anew takes longer
_FEW_DIRECTIONS = 4  # up to which Python's own arithmetic is faster than tensors


class Drawn(NamedTuple):
    """The directions of a step."""

    planes: list[Scaled]  # one for each sample
    rate: float  # the largest learning rate


class Swept(NamedTuple):
    """What the passes found."""

    measured: list[Quadratic]  # of what the closures return, one for each plane
    models: list[Quadratic]  # of what is minimised
    size: int | None  # how many directions travel together; None: all


class Solved(NamedTuple):
    """The step that the solver found."""

    status: Status
    coefficients: list[Tensor]  # (K,) for each plane
    deltas: list[Tensor]  # the update, one tensor for each parameter; empty unless the status is OK
    factor: float = 1.0  # on coefficients and deltas, by clipping


class Accepted(NamedTuple):
    """The step after the test at its end."""

    status: Status
    factor: float
    actual: Tensor | None  # the decrease there, where the loss was evaluated
    solver_state: float | None  # the next one


def take(
    settings: StepSettings,
    now: Numbers,
    closures: Closures,
    moving: Moving,
    memory: Memory,
    watcher: Watcher = NOBODY,
) -> tuple[Report, Numbers]:
    """Take one step. Returns its report, and the numbers after it."""
    drawn = draw(settings, now, closures, moving, memory)
    swept = sweep(settings, closures, drawn)
    solved = solve(settings, now, closures, moving, drawn, swept)
    accepted = accept(settings, now, closures, drawn, swept, solved)
    status = apply(accepted, solved, closures, moving, keep=bool(memory))
    size = now.size
    if status is Status.OK:
        size = learn(settings, now, closures, memory, drawn, swept, solved, accepted)
    bad = 0 if status in HEALTHY else now.bad + 1
    after = Numbers(now.seed, now.step + 1, bad, accepted.solver_state, size)
    slopes, loss = [model.slope for model in swept.measured], swept.measured[0].loss
    made = solved.coefficients, accepted.factor, slopes, closures.used, swept.size, closures.averages.absent
    watcher.after(Moved(now, after, moving, status, loss, *made))
    return report(closures, drawn, swept, solved, accepted, status), after


def draw(settings: StepSettings, now: Numbers, closures: Closures, moving: Moving, memory: Memory) -> Drawn:
    """The directions of each plane, stretched by the groups' learning rates relative to the largest."""
    leaves, rate = list(map(whole_like, moving.tensors)), max(moving.lrs)
    scales: list[float | Tensor] = [lr / rate if rate else 1.0 for lr in moving.lrs]
    learnt, entries = Learnt(memory, now.size), moving.entries
    planes = []
    for sample in range(settings.samples):
        plane = Plane(now.seed, now.step, sample, leaves, closures.gradient)
        rows = settings.family.draw(plane, learnt)
        if not settings.chunked and rows.k * entries <= _FEW:
            rows = Held(rows, leaves)
        planes.append(Scaled(rows, scales, moving.labels))
    return Drawn(planes, rate)


def sweep(settings: StepSettings, closures: Closures, drawn: Drawn) -> Swept:
    """The quadratic model in each plane."""
    curvature, size, fitting = settings.curvature, settings.chunk_size, settings.fitting
    if fitting is not None:
        plane = drawn.planes[0]
        size = fitting.size(closures.kind(plane, curvature), partial(closures.chunk_size, plane, curvature))
    measured = [closures.quadratic(plane, curvature, size) for plane in drawn.planes]
    return Swept(measured, [model * -1.0 for model in measured] if settings.maximize else measured, size)


def solve(
    settings: StepSettings, now: Numbers, closures: Closures, moving: Moving, drawn: Drawn, swept: Swept
) -> Solved:
    """The solver's step, and the update that it makes."""
    models, averages = swept.models, closures.averages
    steps = averages.steps(lambda: [settings.solver.solve(model, now.solver_state) for model in models], models)
    if not any(closures.used):
        raise ValueError("the closure uses none of the parameters; expected a loss that depends on them.")
    coefficients, status = [step.coefficients for step in steps], _status(steps, swept.models)
    if status is not Status.OK:
        return Solved(status, coefficients, [])
    lengths: list[Tensor] | None = [] if moving.shared_out else None  # a process knows its part of the update alone
    deltas = moves(drawn, coefficients, moving, closures.used, swept.size, lengths)
    if not finite(deltas if lengths is None else lengths):
        return Solved(Status.NONFINITE, coefficients, deltas)
    if settings.clip is None:
        return Solved(status, coefficients, deltas)
    (factor,) = averages.agreed(partial(_clipped, deltas, lengths, settings.clip), 1)
    return Solved(status, coefficients, deltas, factor)


def moves(
    drawn: Drawn,
    coefficients: Sequence[Tensor],
    moving: Moving,
    used: Sequence[bool],
    block: int | None,
    lengths: list[Tensor] | None = None,
) -> list[Tensor]:
    """The update, one tensor for each parameter: the mean over planes of lr * sum_k c_k v_k."""
    rate = drawn.rate / len(coefficients)
    shares = [(plane, c * rate) for plane, c in zip(drawn.planes, coefficients, strict=True)]
    return update(shares, moving.tensors, used, block, lengths)


def accept(
    settings: StepSettings, now: Numbers, closures: Closures, drawn: Drawn, swept: Swept, solved: Solved
) -> Accepted:
    """The factor with which the step passes the test, where there is one; the solver's state follows the first try."""
    status, coefficients, deltas, factor = solved
    if status is not Status.OK or not settings.evaluates:
        return Accepted(status, factor, None, now.solver_state)
    test, state = settings.accept or Finite(), now.solver_state
    with closures.trials() as loss_at:
        for attempt in range(test.backtracks + 1):
            factor = factor / 2 if attempt else factor
            actual = swept.models[0].loss - settings.sign * loss_at(deltas, factor)
            predicted = _predicted(swept.models, coefficients, drawn.rate * factor)
            if not attempt:
                state = _followed(settings, closures, state, predicted, actual)
            if any(closures.averages.agreed(partial(_held, test, predicted, actual), 1)):
                return Accepted(Status.OK, factor, actual, state)
    return Accepted(Status.REJECTED, factor, actual, state)


def apply(
    accepted: Accepted, solved: Solved, closures: Closures, moving: Moving, *, keep: bool, known: bool = False
) -> Status:
    """Move the parameters, or none of them where one would not be finite; ``known`` says that none would.

    Multiplies the update by its factor; and overwrites it, unless it is to be kept.
    """
    if accepted.factor != 1.0:
        for delta in solved.deltas:
            delta.mul_(accepted.factor)
    if accepted.status is not Status.OK:
        return accepted.status
    ends = _ends(solved.deltas, closures.used, moving, keep)
    healthy = known or finite([end for _, end in ends])
    if not (closures.averages.everywhere(healthy) if moving.shared_out else healthy):
        return Status.NONFINITE
    for leaf, end in ends:
        leaf.copy_(end)
    return Status.OK


def _ends(deltas: Sequence[Tensor], used: Sequence[bool], moving: Moving, keep: bool) -> list[tuple[Tensor, Tensor]]:
    """The parameters that move, and where to; overwrites the update, unless it is to be kept."""
    kept = [1.0 - lr * decay for lr, decay in zip(moving.lrs, moving.decays, strict=True)]
    leaves = map(own, moving.tensors) if moving.shared_out else moving.tensors
    chosen = compress(zip(leaves, deltas, kept, strict=True), used)
    return [(leaf, torch.add(delta, leaf, alpha=part, out=None if keep else delta)) for leaf, delta, part in chosen]


def learn(
    settings: StepSettings,
    now: Numbers,
    closures: Closures,
    memory: Memory,
    drawn: Drawn,
    swept: Swept,
    solved: Solved,
    accepted: Accepted,
) -> Size | None:
    """Tell directions that learn of a step that was taken. Returns their next size."""
    if not memory and now.size is None:
        return None
    coefficients = _together(_taken(solved, accepted)).flatten()
    gains = -settings.sign * coefficients * _together([model.slope for model in swept.measured]).flatten()
    rows = reduce(Joined, [plane.directions for plane in drawn.planes])
    solver = partial(settings.solver.solve, state=accepted.solver_state)
    gained = partial(advantage, swept.models[0], solver, settings.curvature)
    taken = Taken(rows, coefficients, gains, _unstretched(solved.deltas, drawn.planes[0].scales), gained)
    size = settings.family.update(Learnt(memory, now.size), taken).size
    if size is None:
        return None
    k, evidence = closures.averages.agreed(lambda: [*size], 2)
    return int(k), evidence


def report(
    closures: Closures, drawn: Drawn, swept: Swept, solved: Solved, accepted: Accepted, status: Status
) -> Report:
    """What the step found and did."""
    return Report(
        loss=swept.measured[0].loss,
        slope=_together([model.slope for model in swept.measured]),
        curvature=_together([model.curvature for model in swept.measured]),
        coefficients=_together(_taken(solved, accepted)),
        predicted=_predicted(swept.models, solved.coefficients, drawn.rate * accepted.factor),
        actual=accepted.actual,
        status=status,
        evaluations=closures.evaluations,
        aux=closures.aux,
    )


def _clipped(deltas: list[Tensor], lengths: list[Tensor] | None, limit: float) -> list[float]:
    return [clipped(deltas, limit) if lengths is None else shortened(lengths, limit)]


def _held(test: Acceptance | Finite, predicted: Tensor, actual: Tensor) -> list[float]:
    return [test.holds(float(predicted), float(actual))]


def _followed(
    settings: StepSettings, closures: Closures, state: float | None, predicted: Tensor, actual: Tensor
) -> float | None:
    """The solver's state after the first try."""
    if state is None:
        return settings.solver.update(state, predicted, actual)
    (after,) = closures.averages.agreed(lambda: [settings.solver.update(state, predicted, actual)], 1)
    return after


def _status(steps: list[Step], models: list[Quadratic]) -> Status:
    """OK, or why there is no step."""
    coefficients, slopes = [step.coefficients for step in steps], [model.slope for model in models]
    if not finite([models[0].loss, *coefficients, *slopes]):
        return Status.NONFINITE
    return next((step.status for step in steps if step.status is not Status.OK), Status.OK)


def _taken(solved: Solved, accepted: Accepted) -> list[Tensor]:
    """The coefficients after clipping and backtracking."""
    return solved.coefficients if accepted.factor == 1.0 else [c * accepted.factor for c in solved.coefficients]


def _together(planes: list[Tensor]) -> Tensor:
    """The numbers of all planes, stacked where there are several."""
    return planes[0] if len(planes) == 1 else torch.stack(planes)


def _unstretched(deltas: Sequence[Tensor], scales: Sequence[float | Tensor]) -> list[Tensor]:
    """The update in the units of the directions, before the groups' relative learning rates stretch them."""
    return [delta if scale in (0.0, 1.0) else delta / scale for delta, scale in zip(deltas, scales, strict=True)]


def _finite_decrease(model: Quadratic, c: Tensor) -> Tensor:
    """The model's decrease, in float64 where a product is too large for the model's dtype."""
    decrease = model.decrease(c)
    if finite([decrease]) or not finite([c]):
        return decrease
    wide = Quadratic(model.loss, model.slope.double(), model.curvature.double())
    return wide.decrease(c.double()).to(decrease.dtype)


def _predicted(models: list[Quadratic], coefficients: list[Tensor], rate: float) -> Tensor:
    """The mean over planes of the models' decrease, for the step c = rate * coefficients."""
    if len(models) == 1 and models[0].k <= _FEW_DIRECTIONS and coefficients[0].is_cpu:
        (model,), (few,) = models, coefficients
        numbers = [rate * number for number in few.tolist()]
        decrease = Quadratic.decrease_of(model.slope.tolist(), model.curvature.tolist(), numbers)
        return torch.tensor(decrease, dtype=few.dtype, device="cpu")
    parts = [_finite_decrease(model, c * rate) for model, c in zip(models, coefficients, strict=True)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).mean()
