"""One step as a function of tensors, which is traced and compiled: the twin of :mod:`.step`, in the same order.

It takes the tensors that the program reads, the memory of the directions, and three small ones of ours: whole numbers
(step, seed, bad steps in a row), the learning rates and decays of the parameters, and the state of a solver. It writes
the parameters and the memory, and gives the program's outputs and one vector with the rest of the report. Nothing in it
asks the host: a step that is not finite is masked on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic
from ..ad.run.directions import Leaf
from ..ad.run.passes import Pass
from ..compiler.capture import Graph
from ..curvature import is_late
from ..directions import Learnt, Plane, Taken
from ..solvers.traced import FLAT, NONFINITE, OK, REJECTED
from .closures import check_single
from .moving import Moving
from .reports import Packing
from .scaled import Held, Scaled
from .step_settings import StepSettings

__all__ = ["Frame", "Notes", "accept", "apply", "draw", "inputs_of", "learn", "report", "solve", "sweep", "take"]


class Frame:
    """What of a step is known before it is traced, and baked in."""

    def __init__(
        self,
        graph: Graph,
        settings: StepSettings,
        moving: Moving,
        places: Sequence[tuple[int, int]],
        scaled: bool,
    ) -> None:
        self.graph, self.settings = graph, settings
        self.places = (
            places  # of each parameter that is read: its number among the moving ones, its place in the inputs
        )
        self.labels, self.plain = moving.labels, moving.tensors
        self.scaled = scaled  # whether the learning rates may differ among the parameters
        self.decayed = any(moving.decays)
        self.slots = list(settings.family.init().slots)
        self.k = settings.family.count(self.plain)

    def key(self) -> Any:
        """All that the traced step depends on, but for its inputs; None where that cannot be said."""
        text, settings = self.graph.text, self.settings
        if text is None:
            return None
        shapes = tuple((tuple(one.shape), one.dtype) for one in self.plain)
        key = text, settings, tuple(self.places), shapes, self.scaled, self.decayed
        try:
            hash(key)
        except TypeError:  # a part of the user's that cannot be compared
            return None
        return key


@dataclass
class Notes:
    """What tracing a step finds out."""

    dtype: torch.dtype = torch.float32  # of the loss
    backward: bool = False  # the directions take a backward pass


class Inputs(NamedTuple):
    """The inputs of a step."""

    tensors: list[Tensor]  # that the program reads
    leaves: dict[int, Tensor]  # those of them that move, by number
    everything: list[Tensor]  # all that move, also those that the program does not read
    memory: dict[str, list[Tensor]]  # of the directions
    whole: Tensor  # (3,): step, seed, bad steps in a row
    rates: Tensor  # (2, parameters): lr and decay
    state: Tensor  # (), of a solver


class Drawn(NamedTuple):
    """The directions of a step."""

    plane: Scaled
    rate: Tensor  # (), the largest learning rate


class Swept(NamedTuple):
    """What the pass found."""

    outputs: list[Tensor]  # of the program
    measured: Quadratic  # of what the program returns
    model: Quadratic  # of what is minimised
    before: list[Tensor]  # the inputs, where they are needed again: a pass may write buffers


class Solved(NamedTuple):
    """The step that the solver found."""

    code: Tensor
    coefficients: Tensor  # (K,), after clipping
    deltas: dict[int, Tensor]  # by number of the parameter
    predicted: Tensor  # ()


class Accepted(NamedTuple):
    """The step after the test at its end."""

    code: Tensor
    actual: Tensor | None


def take(frame: Frame, notes: Notes, inputs: list[Tensor]) -> list[Tensor]:
    """Take one step. Returns the program's outputs, and the report as a vector."""
    given = inputs_of(frame, inputs)
    drawn = draw(frame, notes, given)
    swept = sweep(frame, given, drawn)
    solved = solve(frame, given, drawn, swept)
    accepted = accept(frame, given, swept, solved)
    code = apply(frame, given, solved, accepted)
    learn(frame, given, drawn, swept, solved, code == OK)
    given.whole[0].add_(1)
    given.whole[2].copy_(torch.where((code == OK) | (code == FLAT), 0, given.whole[2] + 1))
    return [*swept.outputs, report(notes, swept, solved, accepted, code)]


def inputs_of(frame: Frame, inputs: list[Tensor]) -> Inputs:
    """The tensors of the program, those of the directions' memory, and ours."""
    *given, whole, rates, state = inputs
    each = len(frame.plain)
    start = len(given) - each * len(frame.slots)
    parts = (given[start + n * each : start + (n + 1) * each] for n in range(len(frame.slots)))
    tensors, memory = given[:start], dict(zip(frame.slots, parts, strict=True))
    leaves = {number: tensors[place] for number, place in frame.places}
    everything = [leaves.get(number, like) for number, like in enumerate(frame.plain)]
    return Inputs(tensors, leaves, everything, memory, whole, rates, state)


def draw(frame: Frame, notes: Notes, given: Inputs) -> Drawn:
    """The directions of the plane, stretched by the groups' learning rates relative to the largest."""
    lrs, _ = given.rates
    rate = lrs.max()
    gradient = partial(_gradient, frame, notes, given.tensors)
    plane = Plane(given.whole[1], given.whole[0], 0, given.everything, gradient)
    rows = Held(frame.settings.family.draw(plane, Learnt(given.memory)))
    scales: list[Any] = [1.0] * len(given.everything)
    if frame.scaled:
        scales = [torch.where(rate > 0, lr / rate, 1.0) for lr in lrs]
    return Drawn(Scaled(rows, scales, frame.labels), rate)


def sweep(frame: Frame, given: Inputs, drawn: Drawn) -> Swept:
    """The quadratic model in the plane."""
    settings, graph = frame.settings, frame.graph
    before = [tensor.clone() for tensor in given.tensors] if settings.evaluates else []
    pairs = settings.curvature.pairs(frame.k)
    one = Pass.of(pairs, is_late(settings.curvature))
    for number, leaf in given.leaves.items():
        one.perturb(Leaf(leaf, number, drawn.plane, tuple(range(frame.k))), frame.labels[number])
    with torch.no_grad(), one.running():
        outputs = graph.for_jets(given.tensors)
    one.check_followed([outputs[graph.loss]])
    check_single(outputs[graph.loss], settings.samples_apart)
    measured = settings.curvature.model(one.jet(outputs[graph.loss]), pairs)
    return Swept(outputs, measured, measured * settings.sign, before)


def solve(frame: Frame, given: Inputs, drawn: Drawn, swept: Swept) -> Solved:
    """The solver's step, and the update that it makes."""
    solver: Any = frame.settings.solver  # which has it: see refuse
    step = solver.traced(swept.model, given.state)
    shares = step.coefficients * drawn.rate
    deltas = {n: drawn.plane.combine(shares.to(leaf.dtype), n, leaf, frame.k) for n, leaf in given.leaves.items()}
    code = torch.where((step.code == OK) & ~_finite(deltas.values()), NONFINITE, step.code)
    coefficients, clip = step.coefficients, frame.settings.clip
    if clip is not None:
        lengths = [torch.linalg.vector_norm(delta, dtype=torch.float64) for delta in deltas.values()]
        length = torch.linalg.vector_norm(torch.stack(lengths))
        factor = torch.where(length > clip, clip / length, 1.0)
        deltas = {n: (delta * factor).to(delta.dtype) for n, delta in deltas.items()}
        coefficients = coefficients * factor
    return Solved(code, coefficients, deltas, _predicted(swept.model, coefficients, drawn.rate))


def accept(frame: Frame, given: Inputs, swept: Swept, solved: Solved) -> Accepted:
    """The test at the end of the step, where there is one; a solver with a state follows it."""
    settings, code = frame.settings, solved.code
    if not settings.evaluates:
        return Accepted(code, None)
    ends = {number: leaf + solved.deltas[number] for number, leaf in given.leaves.items()}
    actual = swept.model.loss - settings.sign * _loss(frame, swept.before, ends)
    if settings.solver.init() is not None:
        solver: Any = settings.solver
        after = solver.traced_update(given.state, solved.predicted, actual)
        given.state.copy_(torch.where(code == OK, after, given.state))
    holds = torch.isfinite(actual)
    if settings.accept is not None:
        holds = holds & (actual >= settings.accept.fraction * solved.predicted.clamp_min(0.0))
    return Accepted(torch.where((code == OK) & ~holds, REJECTED, code), actual)


def apply(frame: Frame, given: Inputs, solved: Solved, accepted: Accepted) -> Tensor:
    """Move the parameters where the status is OK, and return what becomes of it by that."""
    lrs, decays = given.rates
    ends = {}
    for number, leaf in given.leaves.items():
        kept = leaf * (1.0 - lrs[number] * decays[number]) if frame.decayed else leaf
        ends[number] = (solved.deltas[number] + kept).to(leaf.dtype)
    code = torch.where((accepted.code == OK) & ~_finite(ends.values()), NONFINITE, accepted.code)
    for number, leaf in given.leaves.items():
        leaf.copy_(torch.where(code == OK, ends[number], leaf))
    return code


def learn(frame: Frame, given: Inputs, drawn: Drawn, swept: Swept, solved: Solved, taken: Tensor) -> None:
    """Tell directions that learn of the step, and forget it again where it was not taken."""
    if not given.memory:
        return
    gains = -solved.coefficients * swept.measured.slope * frame.settings.sign
    deltas = _unstretched(frame, given, drawn, solved)
    after = {name: [tensor.clone() for tensor in tensors] for name, tensors in given.memory.items()}
    step = Taken(drawn.plane.directions, solved.coefficients, gains, deltas)
    frame.settings.family.update(Learnt(after), step)
    for name, tensors in given.memory.items():
        for tensor, new in zip(tensors, after[name], strict=True):
            tensor.copy_(torch.where(taken, new, tensor))


def report(notes: Notes, swept: Swept, solved: Solved, accepted: Accepted, code: Tensor) -> Tensor:
    """What the step found and did."""
    notes.dtype = swept.measured.loss.dtype
    return Packing.pack(swept.measured, solved.coefficients, solved.predicted, code, accepted.actual)


def _gradient(frame: Frame, notes: Notes, tensors: list[Tensor]) -> list[Tensor]:
    """The gradient by a backward pass, which leaves everything as it was."""
    notes.backward = True
    copies = [tensor.detach().clone() for tensor in tensors]
    wanted = [copies[place].requires_grad_() for _, place in frame.places]
    with torch.enable_grad():
        loss = frame.graph(copies)[frame.graph.loss]
        parts = torch.autograd.grad(loss.mean(), wanted, allow_unused=True, materialize_grads=True)
    found = {number: part for (number, _), part in zip(frame.places, parts, strict=True)}
    return [found[n] if n in found else _zeros(like) for n, like in enumerate(frame.plain)]


def _loss(frame: Frame, before: Sequence[Tensor], ends: dict[int, Tensor]) -> Tensor:
    """The loss with the parameters at the ``ends`` of the step, and all else as it was ``before`` it."""
    inputs = list(before)
    for number, place in frame.places:
        inputs[place] = ends[number].to(before[place].dtype)
    return frame.graph(inputs)[frame.graph.loss].mean()  # a mean, also where there is one loss for each sample


def _unstretched(frame: Frame, given: Inputs, drawn: Drawn, solved: Solved) -> list[Tensor]:
    """The update in the units of the directions, before the groups' relative learning rates stretch them."""
    deltas = [solved.deltas[n] if n in solved.deltas else _zeros(like) for n, like in enumerate(given.everything)]
    if not frame.scaled:
        return deltas
    # a group whose rate is zero has not moved
    units = [torch.where(torch.as_tensor(scale) > 0, scale, 1.0) for scale in drawn.plane.scales]
    return [(delta / unit).to(delta.dtype) for delta, unit in zip(deltas, units, strict=True)]


def _predicted(model: Quadratic, coefficients: Tensor, rate: Tensor) -> Tensor:
    """The model's decrease in float64, for the step that the rate and the coefficients make."""
    loss, slope, curvature = (part.to(torch.float64) for part in (model.loss, model.slope, model.curvature))
    return Quadratic(loss, slope, curvature).decrease(coefficients.to(torch.float64) * rate, fused=True)


def _finite(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
