"""A whole step as one compiled graph: directions, jets, solution of the plane, and update.

The graph takes the tensors that the program reads, the memory of the directions, and three small ones of ours: whole
numbers (step, seed), the learning rates and decays of the groups, and the state of an adaptive solver. It writes the
parameters and the memory, and gives the program's outputs and one vector with the rest of the report. Nothing in it
asks the host, so that on CUDA it is replayed without waiting: a step that is not finite is masked on the device, and
its status read when somebody asks.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.capture import Captured, Compiled, Graph, Run, compiled, identity, single, single_with_aux
from ..ad.directions import Directions, Leaf
from ..ad.jet import Quadratic
from ..ad.passes import Pass
from ..curvature import is_late
from ..directions import Memory, Plane, Remembering, Taken
from ..directions.counter import signed
from ..directions.mixed import resizable
from ..errors import CaptureFailed
from ..solvers import Traceable, TraceableAdaptive, adaptive
from ..solvers.traced import NONFINITE, OK, REJECTED, TracedStep
from . import memory as memories
from .graphs import Replayed, repeated
from .report import Packing, Reports
from .scaled import Held, Scaled

if TYPE_CHECKING:
    from .hyperplane import HyperplaneSearch, Moving

__all__ = ["CompiledStep", "refuse"]


def refuse(optimizer: HyperplaneSearch) -> None:
    """Raise for settings that a compiled step does not have."""
    if optimizer.chunk_size is not None:
        size = optimizer.chunk_size
        raise ValueError(f"chunk_size is {size!r}, which needs several passes; expected None with compile=True.")
    if optimizer.memory is not None:
        memory = optimizer.memory
        raise ValueError(f"memory is {memory!r}, which may need several passes; expected None with compile=True.")
    if optimizer.accept is not None and optimizer.accept.backtracks:
        backtracks = optimizer.accept.backtracks
        raise ValueError(f"the acceptance has {backtracks} backtracks; expected 0 with compile=True.")
    if optimizer.samples != 1:
        raise ValueError(f"samples is {optimizer.samples}; expected 1 with compile=True.")
    if resizable(optimizer.directions) is not None:
        raise ValueError("the directions change their number between steps; expected a fixed K with compile=True.")
    kind = TraceableAdaptive if adaptive(optimizer.solver) else Traceable
    if not isinstance(optimizer.solver, kind):
        name = type(optimizer.solver).__name__
        raise ValueError(f"the solver {name} asks the host; expected one with a method traced with compile=True.")


_TOO_MANY = (
    "is compiled for as many kinds of inputs as torch allows, and is run as it is for any other, which is slow: its "
    "shapes, modes or numbers of Python keep changing. Keep to a few shapes (drop the last batch where it is smaller, "
    "or pad), hand over numbers that change as tensors, or raise torch._dynamo.config.recompile_limit before the first "
    "step."
)


class CompiledStep:
    """The steps of one optimizer as graphs, one for each program and signature."""

    def __init__(self, optimizer: HyperplaneSearch) -> None:
        self._optimizer = optimizer
        self._programs: OrderedDict[Any, Captured | None] = OrderedDict()  # None: one that cannot be captured
        self._full: set[Any] = set()  # those that no further signature is compiled for
        self._settings: list[Any] = []  # all of the optimizer that its steps have baked in
        self._control: Control | None = None
        # What a call hands to the graph, and the graph to the call, past the program between them:
        self._moving: list[Moving] = []
        self._memory: list[Tensor] = []  # all of one name after all of another
        self._batches: tuple[tuple[Any, ...], tuple[Any, ...], int] = (), (), 1
        self._made: tuple[Tensor, Packing]
        self._stacked: dict[int, Tensor] = {}

    def __call__(
        self,
        func: Callable[..., Any],
        batches: tuple[Any, ...],
        count: int,
        moving: list[Moving],
        memory: Memory,
        has_aux: bool,
    ) -> Reports | None:
        """Take a step with each entry of the batches, and return their reports.

        None where the program has to be run as it is, and no step was taken.
        """
        self._renew(moving)
        key = identity(func), has_aux
        if key not in self._programs:
            self._programs[key] = Captured(self._build, single_with_aux if has_aux else single)
            if len(self._programs) > _KEPT:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        program = self._programs[key]
        if program is None:
            return None
        self._moving = moving
        self._memory = [tensor for tensors in memory.values() for tensor in tensors]
        self._refresh(moving)
        assert self._control is not None
        first = tuple(batch[0] if isinstance(batch, Tensor) else batch for batch in batches)
        self._batches = first, batches, count
        try:
            returned = program(func, first)
        except CaptureFailed as error:
            self._tell(key, getattr(func, "__qualname__", type(func).__name__), error)
            return None
        finally:
            self._batches = (), (), 1
        self._control.advance(count)
        return Reports(*self._made, self._aux(returned[1]) if has_aux else None)

    def _tell(self, key: Any, name: str, error: CaptureFailed) -> None:
        """Warn of a program that is run as it is, once."""
        if type(error.__cause__).__name__ == "FailOnRecompileLimitHit":  # what is compiled already stays in use
            if key not in self._full:
                self._full.add(key)
                warnings.warn(f"{name} {_TOO_MANY}", stacklevel=6)
            return
        self._programs[key] = None
        warnings.warn(f"{name} cannot be compiled and is run as it is: {error}.", stacklevel=6)

    def _aux(self, aux: Any) -> Any:
        """The aux of all steps, with that of the first one given."""
        stacked = self._stacked  # by identity of the first step's outputs

        def every(value: Any) -> Any:
            return stacked[id(value)] if isinstance(value, Tensor) and id(value) in stacked else value

        return _torch.pytree.tree_map(every, aux)

    @property
    def bad(self) -> int:
        """How many steps in a row, up to the last, did not move the parameters. Waits for the device."""
        return 0 if self._control is None else self._control.bad

    def fetch(self) -> None:
        """Write what the device has counted into the groups. Waits for the device."""
        if self._control is not None:
            numbers = {"bad": self._control.bad, "solver_state": self._control.state}
            for group in self._optimizer.param_groups:
                group.update(numbers)

    def reload(self) -> None:
        """Begin with the numbers of the groups, whatever the device has."""
        self._control = None

    def _renew(self, moving: list[Moving]) -> None:
        """Forget the steps that were compiled where the optimizer is no longer what it was then."""
        one = self._optimizer
        parts = one.directions, one.curvature, one.solver, one.accept, one.clip, one.maximize
        more = one.samples, one.chunk_size, one.memory, _scaled(one), _decayed(moving)
        settings = [*parts, *more, *(leaf.tensor for leaf in moving)]
        if len(settings) != len(self._settings) or not all(map(_same, settings, self._settings)):
            refuse(one)
            self.fetch()
            self._programs.clear()
            self._full.clear()
            self._settings, self._control = settings, None

    def _refresh(self, moving: list[Moving]) -> None:
        group = self._optimizer.param_groups[0]
        numbers = [one.lr for one in moving], [one.decay for one in moving]
        if self._control is None or self._control.device != moving[0].tensor.device:
            self.fetch()
            self._control = Control(moving[0].tensor.device, len(moving))
        self._control.set(group["step"], group["seed"], group["bad"], *numbers, group["solver_state"])

    # -- one graph --------------------------------------------------------------------------------------------------

    def _build(self, graph: Graph, inputs: Sequence[Tensor]) -> Run:
        """The step over one graph of the program, compiled."""
        moving, control, optimizer = self._moving, self._control, self._optimizer
        assert control is not None
        if graph.asking is not None:  # a CUDA graph cannot
            raise CaptureFailed(f"it asks for the value of a tensor, and waits for it ({graph.asking})")
        places = {id(tensor): place for place, tensor in enumerate(inputs)}
        leaves = [(number, places[id(one.tensor)]) for number, one in enumerate(moving) if id(one.tensor) in places]
        if not leaves:
            raise ValueError("the closure uses none of the parameters; expected a loss that depends on them.")
        run, packing = _compiled(_Body(graph, optimizer, moving, leaves), [*inputs, *self._memory, *control.tensors])
        many = Replayed(run, run.written) if control.device.type == "cuda" else partial(repeated, run)
        expected = [(place, moving[number].tensor) for number, place in leaves]

        def step(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            for place, leaf in expected:
                if inputs[place] is not leaf:
                    raise RuntimeError(
                        "the program reads other parameters than those it was compiled with; expected the optimizer's."
                    )
            assert self._control is not None
            first, batches, count = self._batches
            given = {id(one): batch for one, batch in zip(first, batches, strict=True) if isinstance(one, Tensor)}
            fed = {place: given[id(tensor)] for place, tensor in enumerate(inputs) if id(tensor) in given}
            *outputs, packed = many([*inputs, *self._memory, *self._control.tensors], fed, count)
            self._made = packed, packing
            once = [output[0] for output in outputs]
            self._stacked = {id(one): output for one, output in zip(once, outputs, strict=True)}
            return once

        return step


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, int | float | str) and one == other)


def _scaled(optimizer: HyperplaneSearch) -> bool:
    """Whether the learning rates may differ among the parameters."""
    return len(optimizer.param_groups) > 1


def _decayed(moving: list[Moving]) -> bool:
    return any(one.decay for one in moving)


_SHARED: OrderedDict[Any, tuple[Compiled, Packing]] = OrderedDict()  # steps that are alike but for their tensors
_KEPT = 16


def _compiled(body: _Body, inputs: list[Tensor]) -> tuple[Compiled, Packing]:
    """The compiled step: that of another optimizer where all but the tensors is the same, as for several seeds."""
    key = body.key(inputs)
    if key is not None and key in _SHARED:
        _SHARED.move_to_end(key)
        return _SHARED[key]
    run = compiled(body, inputs, None if body.graph.random else body)
    if body.backward and body.graph.random:
        raise CaptureFailed("its random numbers would not be the same in the backward pass and in the forward one")
    if body.evaluates and body.graph.random:
        raise CaptureFailed(
            "its random numbers would not be the same where the loss is evaluated at the end of the step"
        )
    made = run, body.packing
    if key is not None:
        _SHARED[key] = made
        if len(_SHARED) > _KEPT:
            _SHARED.popitem(last=False)
    return made


class Control:
    """What a step needs beside the program's tensors, on the device: written only when the host changes it."""

    def __init__(self, device: torch.device, leaves: int) -> None:
        self.device = device
        with torch.inference_mode(False):  # they are written outside of it, too
            self._whole = torch.zeros(3, dtype=torch.int64, device=device)  # step, seed, bad steps in a row
            self._rates = torch.zeros((2, leaves), dtype=torch.float64, device=device)  # lr and decay of each leaf
            self._state = torch.zeros((), dtype=torch.float64, device=device)  # of an adaptive solver
        self._numbers: tuple[Any, ...] = ()
        self._known: float | None = None  # the state that the host knows of: the device goes on by itself
        self._steps = (-1, -1, -1)  # those that the host knows of: the device counts on by itself

    @property
    def tensors(self) -> list[Tensor]:
        return [self._whole, self._rates, self._state]

    @property
    def bad(self) -> int:
        bad = int(self._whole[2])
        self._steps = *self._steps[:2], bad
        return bad

    @property
    def state(self) -> float | None:
        """The state of the solver, None where it has none."""
        self._known = None if self._known is None else float(self._state)
        return self._known

    def set(self, step: int, seed: int, bad: int, lrs: list[float], decays: list[float], state: float | None) -> None:
        """Bring the device up to date."""
        if state is not None and state != self._known:
            self._state.fill_(state)
            self._known = state
        if (step, seed, bad) != self._steps:
            self._whole.copy_(torch.tensor([step, signed(seed), bad], device="cpu"))
            self._steps = step, seed, bad
        if (lrs, decays) != self._numbers:
            self._rates.copy_(torch.tensor([lrs, decays], dtype=torch.float64, device="cpu"))
            self._numbers = lrs, decays

    def advance(self, count: int) -> None:
        """The graph has counted these steps."""
        step, seed, bad = self._steps
        self._steps = step + count, seed, bad


class _Body:
    """The step as a function of tensors: what is traced."""

    def __init__(
        self, graph: Graph, optimizer: HyperplaneSearch, moving: list[Moving], leaves: list[tuple[int, int]]
    ) -> None:
        self.graph = graph
        self._optimizer = optimizer
        self._leaves = leaves  # number among the moving parameters, place among the inputs
        self._labels = [one.label for one in moving]
        self._plain = [one.tensor for one in moving]
        self._scaled = _scaled(optimizer)
        self._decayed = _decayed(moving)
        self._slots = list(memories.slots(optimizer.directions))
        self.k = optimizer.directions.count(self._plain)
        self.evaluates = optimizer.accept is not None or adaptive(optimizer.solver)
        self.packing = Packing(self.k, torch.float32)
        self.backward = False

    def key(self, inputs: list[Tensor]) -> Any:
        """All that the compiled step depends on but the values of its inputs; None where that cannot be said."""
        text = self.graph.text
        if text is None:
            return None
        optimizer = self._optimizer
        parts = optimizer.directions, optimizer.curvature, optimizer.solver
        settings = optimizer.accept, optimizer.clip, optimizer.maximize
        shapes = tuple((tuple(one.shape), one.dtype) for one in self._plain)
        tensors = tuple((tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad) for t in inputs)
        try:
            key = (
                text,
                parts,
                settings,
                tuple(self._leaves),
                shapes,
                self._scaled,
                self._decayed,
                tensors,
                _ambient(inputs),
            )
            hash(key)
        except TypeError:  # a part of the user's that cannot be compared
            return None
        return key

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        *given, whole, rates, state = inputs
        tensors, memory = self._split(given)
        optimizer = self._optimizer
        lrs, decays = rates
        largest = lrs.max()
        leaves = {number: tensors[place] for number, place in self._leaves}
        everything = [leaves.get(number, like) for number, like in enumerate(self._plain)]
        plane = Plane(whole[1], whole[0], 0, everything, lambda: self._gradient(tensors), memory)
        rows = Held(optimizer.directions.draw(plane))
        scales: list[Any] = [1.0] * len(everything)
        if self._scaled:
            scales = [torch.where(largest > 0, lr / largest, 1.0) for lr in lrs]
        drawn = Scaled(rows, scales, self._labels)

        before = [tensor.clone() for tensor in tensors] if self.evaluates else []  # a pass may write buffers
        outputs, model = self._pass(tensors, leaves, drawn)
        sign = -1.0 if optimizer.maximize else 1.0
        step = self._solved(model * sign, state)
        deltas, coefficients, code = self._update(step, drawn, leaves, largest)
        predicted = _predicted(model * sign, coefficients, largest)
        actual = None
        if self.evaluates:
            moved = {n: leaf + deltas[n] for n, leaf in leaves.items()}
            actual = model.loss * sign - sign * self._loss(before, moved)
            code = self._judged(code, predicted, actual, state)
        code = self._move(deltas, code, leaves, lrs, decays)
        taken = code == OK
        gains = -coefficients * model.slope * sign
        self._remember(memory, deltas, everything, scales, Taken(rows, coefficients, gains), taken)
        whole[0].add_(1)
        whole[2].copy_(torch.where(taken, 0, whole[2] + 1))
        self.packing = Packing(self.k, model.loss.dtype, self.evaluates)
        return [*outputs, Packing.pack(model, coefficients, predicted, code, actual)]

    def _split(self, given: list[Tensor]) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """The tensors of the program, and those of the directions' memory."""
        each = len(self._plain)
        start = len(given) - each * len(self._slots)
        parts = (given[start + n * each : start + (n + 1) * each] for n in range(len(self._slots)))
        return given[:start], dict(zip(self._slots, parts, strict=True))

    def _pass(
        self, tensors: list[Tensor], leaves: dict[int, Tensor], drawn: Directions
    ) -> tuple[list[Tensor], Quadratic]:
        curvature = self._optimizer.curvature
        pairs = curvature.pairs(self.k)
        one = Pass.of(pairs, is_late(curvature))
        for number, leaf in leaves.items():
            one.perturb(Leaf(leaf, number, drawn, tuple(range(self.k))), self._labels[number])
        with torch.no_grad(), one.running():
            outputs = self.graph.for_jets(tensors)
        model = curvature.model(one.jet(outputs[self.graph.loss]), pairs)
        return outputs, model

    def _gradient(self, tensors: list[Tensor]) -> list[Tensor]:
        """The gradient by a backward pass, which leaves everything as it was."""
        self.backward = True
        places = [place for _, place in self._leaves]
        copies = [tensor.detach().clone() for tensor in tensors]
        wanted = [copies[place].requires_grad_() for place in places]
        with torch.enable_grad():
            loss = self.graph(copies)[self.graph.loss]
            parts = torch.autograd.grad(loss.mean(), wanted, allow_unused=True, materialize_grads=True)
        found = {number: part for (number, _), part in zip(self._leaves, parts, strict=True)}
        return [found[n] if n in found else _zeros(like) for n, like in enumerate(self._plain)]

    def _solved(self, model: Quadratic, state: Tensor) -> TracedStep:
        solver = self._optimizer.solver
        if adaptive(solver) and isinstance(solver, TraceableAdaptive):
            return solver.traced(model, state)
        assert isinstance(solver, Traceable)
        return solver.traced(model)

    def _update(
        self, step: TracedStep, drawn: Scaled, leaves: dict[int, Tensor], largest: Tensor
    ) -> tuple[dict[int, Tensor], Tensor, Tensor]:
        """The update of each leaf, its coefficients after clipping, and what becomes of the status by that."""
        shares = step.coefficients * largest
        deltas = {n: drawn.combine(shares.to(leaf.dtype), n, leaf, self.k) for n, leaf in leaves.items()}
        code = torch.where((step.code == OK) & ~_finite(deltas.values()), NONFINITE, step.code)
        if self._optimizer.clip is None:
            return deltas, step.coefficients, code
        lengths = [torch.linalg.vector_norm(delta, dtype=torch.float64) for delta in deltas.values()]
        length = torch.linalg.vector_norm(torch.stack(lengths))
        factor = torch.where(length > self._optimizer.clip, self._optimizer.clip / length, 1.0)
        return {n: (delta * factor).to(delta.dtype) for n, delta in deltas.items()}, step.coefficients * factor, code

    def _loss(self, before: list[Tensor], moved: dict[int, Tensor]) -> Tensor:
        """The loss with the parameters ``moved``, and all else as it was ``before`` the step."""
        for number, place in self._leaves:
            before[place] = moved[number].to(before[place].dtype)
        return self.graph(before)[self.graph.loss].mean()  # a mean, also where there is one loss for each sample

    def _judged(self, code: Tensor, predicted: Tensor, actual: Tensor, state: Tensor) -> Tensor:
        """The status after the loss is known; an adaptive solver follows it."""
        solver, accept = self._optimizer.solver, self._optimizer.accept
        if adaptive(solver) and isinstance(solver, TraceableAdaptive):
            state.copy_(torch.where(code == OK, solver.traced_update(state, predicted, actual), state))
        holds = torch.isfinite(actual)
        if accept is not None:
            holds = holds & (actual >= accept.fraction * predicted.clamp_min(0.0))
        return torch.where((code == OK) & ~holds, REJECTED, code)

    def _move(
        self, deltas: dict[int, Tensor], code: Tensor, leaves: dict[int, Tensor], lrs: Tensor, decays: Tensor
    ) -> Tensor:
        """Move the parameters where the status is OK, and return what becomes of it by that."""
        ends = {}
        for number, leaf in leaves.items():
            kept = leaf * (1.0 - lrs[number] * decays[number]) if self._decayed else leaf
            ends[number] = (deltas[number] + kept).to(leaf.dtype)
        code = torch.where((code == OK) & ~_finite(ends.values()), NONFINITE, code)
        for number, leaf in leaves.items():
            leaf.copy_(torch.where(code == OK, ends[number], leaf))
        return code

    def _remember(
        self,
        memory: dict[str, list[Tensor]],
        deltas: dict[int, Tensor],
        everything: list[Tensor],
        scales: list[Any],
        taken: Taken,
        moved: Tensor,
    ) -> None:
        """Tell directions that remember of the step, and forget it again where it was not taken."""
        family = self._optimizer.directions
        if not isinstance(family, Remembering) or not memory:
            return
        steps = [deltas[n] if n in deltas else _zeros(like) for n, like in enumerate(everything)]
        if self._scaled:  # a group whose rate is zero has not moved
            units = [torch.where(scale > 0, scale, 1.0) for scale in scales]
            steps = [(step / unit).to(step.dtype) for step, unit in zip(steps, units, strict=True)]
        new = {name: [tensor.clone() for tensor in tensors] for name, tensors in memory.items()}
        family.remember(new, steps, taken)
        for name, tensors in memory.items():
            for tensor, after in zip(tensors, new[name], strict=True):
                tensor.copy_(torch.where(moved, after, tensor))


def _predicted(model: Quadratic, coefficients: Tensor, rate: Tensor) -> Tensor:
    """-(slope . c + c . H c / 2) in float64, for the step that the rate and the coefficients make."""
    c = coefficients.to(torch.float64) * rate
    slope, curvature = (part.to(torch.float64) for part in (model.slope, model.curvature))
    return -((slope * c).sum() + ((curvature * c).sum(-1) * c).sum() / 2)  # a product would be a call of a library


def _finite(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()


def _ambient(inputs: list[Tensor]) -> Any:
    """What of torch's global state changes what a program is traced to."""
    kind = inputs[0].device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return cast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
