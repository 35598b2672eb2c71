"""A whole step as one compiled graph: directions, jets, solution of the plane, and update.

The graph takes the tensors that the program reads, and two small ones of ours: whole numbers (step, seed) and the
learning rates and decays of the groups. It writes the parameters, and gives the program's outputs and one vector with
the rest of the report. Nothing in it asks the host, so that on CUDA it is replayed without waiting: a step that is not
finite is masked on the device, and its status read when somebody asks.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.capture import Captured, Compiled, Graph, Run, compiled, identity, single, single_with_aux
from ..ad.directions import Directions, Leaf
from ..ad.jet import Quadratic
from ..ad.passes import Pass
from ..directions import Plane
from ..directions.counter import signed
from ..errors import CaptureFailed
from ..solvers import Traceable
from ..solvers.traced import NONFINITE, OK, TracedStep
from .graphs import Replayed, repeated
from .report import Packing, Reports
from .scaled import Scaled

if TYPE_CHECKING:
    from .hyperplane import HyperplaneSearch, Moving

__all__ = ["CompiledStep", "refuse"]


def refuse(optimizer: HyperplaneSearch) -> None:
    """Raise for settings that a compiled step does not have."""
    several = {"accept": optimizer.accept, "chunk_size": optimizer.chunk_size}
    for name, value in several.items():
        if value is not None:
            raise ValueError(f"{name} is {value!r}, which needs several passes; expected None with compile=True.")
    if optimizer.samples != 1:
        raise ValueError(f"samples is {optimizer.samples}; expected 1 with compile=True.")
    if not isinstance(optimizer.solver, Traceable):
        name = type(optimizer.solver).__name__
        raise ValueError(f"the solver {name} asks the host; expected one with a method traced with compile=True.")


class CompiledStep:
    """The steps of one optimizer as graphs, one for each program and signature."""

    def __init__(self, optimizer: HyperplaneSearch) -> None:
        self._optimizer = optimizer
        self._programs: OrderedDict[Any, Captured | None] = OrderedDict()  # None: one that cannot be captured
        self._settings: list[Any] = []  # all of the optimizer that its steps have baked in
        self._control: Control | None = None
        # What a call hands to the graph, and the graph to the call, past the program between them:
        self._moving: list[Moving] = []
        self._batches: tuple[tuple[Any, ...], tuple[Any, ...], int] = (), (), 1
        self._made: tuple[Tensor, Packing]
        self._stacked: dict[int, Tensor] = {}

    def __call__(
        self,
        func: Callable[..., Any],
        batches: tuple[Any, ...],
        count: int,
        moving: list[Moving],
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
        self._refresh(moving)
        assert self._control is not None
        first = tuple(batch[0] if isinstance(batch, Tensor) else batch for batch in batches)
        self._batches = first, batches, count
        try:
            returned = program(func, first)
        except CaptureFailed as error:
            self._programs[key] = None
            name = getattr(func, "__qualname__", type(func).__name__)
            warnings.warn(f"{name} cannot be compiled and is run as it is: {error}.", stacklevel=5)
            return None
        finally:
            self._batches = (), (), 1
        self._control.advance(count)
        return Reports(*self._made, self._aux(returned[1]) if has_aux else None)

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

    def _renew(self, moving: list[Moving]) -> None:
        """Forget the steps that were compiled where the optimizer is no longer what it was then."""
        one = self._optimizer
        parts = one.directions, one.curvature, one.solver, one.accept, one.clip, one.maximize
        more = one.samples, one.chunk_size, _scaled(one), _decayed(moving)
        settings = [*parts, *more, *(leaf.tensor for leaf in moving)]
        if len(settings) != len(self._settings) or not all(map(_same, settings, self._settings)):
            refuse(one)
            self._programs.clear()
            self._settings, self._control = settings, None

    def _refresh(self, moving: list[Moving]) -> None:
        group = self._optimizer.param_groups[0]
        numbers = [one.lr for one in moving], [one.decay for one in moving]
        if self._control is None or self._control.device != moving[0].tensor.device:
            self._control = Control(moving[0].tensor.device, len(moving))
        self._control.set(group["step"], group["seed"], group["bad"], *numbers)

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
        run, packing = _compiled(_Body(graph, optimizer, moving, leaves), [*inputs, *control.tensors])
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
            *outputs, packed = many([*inputs, *self._control.tensors], fed, count)
            self._made = packed, packing
            once = [output[0] for output in outputs]
            self._stacked = {id(one): output for one, output in zip(once, outputs, strict=True)}
            return once

        return step


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, int | float) and one == other)


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
    run = compiled(body, inputs, check=not body.graph.random)
    if body.backward and body.graph.random:
        raise CaptureFailed("its random numbers would not be the same in the backward pass and in the forward one")
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
        self._numbers: tuple[Any, ...] = ()
        self._steps = (-1, -1, -1)  # those that the host knows of: the device counts on by itself

    @property
    def tensors(self) -> list[Tensor]:
        return [self._whole, self._rates]

    @property
    def bad(self) -> int:
        bad = int(self._whole[2])
        self._steps = *self._steps[:2], bad
        return bad

    def set(self, step: int, seed: int, bad: int, lrs: list[float], decays: list[float]) -> None:
        """Bring the device up to date."""
        if (step, seed, bad) != self._steps:
            self._whole.copy_(torch.tensor([step, signed(seed), bad]))
            self._steps = step, seed, bad
        if (lrs, decays) != self._numbers:
            self._rates.copy_(torch.tensor([lrs, decays], dtype=torch.float64))
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
        self.k = optimizer.directions.count(self._plain)
        self.packing = Packing(self.k, torch.float32)
        self.backward = False

    def key(self, inputs: list[Tensor]) -> Any:
        """All that the compiled step depends on but the values of its inputs; None where that cannot be said."""
        text = self.graph.text
        if text is None:
            return None
        optimizer = self._optimizer
        parts = optimizer.directions, optimizer.curvature, optimizer.solver, optimizer.clip, optimizer.maximize
        shapes = tuple((tuple(one.shape), one.dtype) for one in self._plain)
        tensors = tuple((tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad) for t in inputs)
        try:
            key = text, parts, tuple(self._leaves), shapes, self._scaled, self._decayed, tensors, _ambient(inputs)
            hash(key)
        except TypeError:  # a part of the user's that cannot be compared
            return None
        return key

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        *tensors, whole, rates = inputs
        optimizer = self._optimizer
        lrs, decays = rates
        largest = lrs.max()
        leaves = {number: tensors[place] for number, place in self._leaves}
        everything = [leaves.get(number, like) for number, like in enumerate(self._plain)]
        plane = Plane(whole[1], whole[0], 0, everything, lambda: self._gradient(tensors))
        rows = Held(optimizer.directions.draw(plane))
        scales: list[Any] = [1.0] * len(everything)
        if self._scaled:
            scales = [torch.where(largest > 0, lr / largest, 1.0) for lr in lrs]
        drawn = Scaled(rows, scales, self._labels)

        outputs, model = self._pass(tensors, leaves, drawn)
        sign = -1.0 if optimizer.maximize else 1.0
        solver = optimizer.solver
        assert isinstance(solver, Traceable)
        step = solver.traced(model * sign)
        coefficients, moved, code, factor = self._move(step, drawn, leaves, largest, lrs, decays)
        taken = code == OK
        for number, leaf in leaves.items():
            leaf.copy_(torch.where(taken, moved[number], leaf))
        whole.copy_(torch.stack([whole[0] + 1, whole[1], torch.where(taken, 0, whole[2] + 1)]))
        return [*outputs, self._pack(model, sign, coefficients * factor, largest, code)]

    def _pass(
        self, tensors: list[Tensor], leaves: dict[int, Tensor], drawn: Directions
    ) -> tuple[list[Tensor], Quadratic]:
        pairs = self._optimizer.curvature.pairs(self.k)
        one = Pass(pairs)
        for number, leaf in leaves.items():
            one.perturb(Leaf(leaf, number, drawn, tuple(range(self.k))), self._labels[number])
        with torch.no_grad(), one.running():
            outputs = self.graph(tensors)
        model = self._optimizer.curvature.model(one.jet(outputs[self.graph.loss]), pairs)
        self.packing = Packing(self.k, model.loss.dtype)
        return outputs, model

    def _gradient(self, tensors: list[Tensor]) -> list[Tensor]:
        """The gradient by a backward pass, which leaves everything as it was."""
        self.backward = True
        places = [place for _, place in self._leaves]
        copies = [tensor.detach().clone() for tensor in tensors]
        wanted = [copies[place].requires_grad_() for place in places]
        with torch.enable_grad():
            loss = self.graph(copies)[self.graph.loss]
            parts = torch.autograd.grad(loss.reshape(()), wanted, allow_unused=True, materialize_grads=True)
        found = {number: part for (number, _), part in zip(self._leaves, parts, strict=True)}
        return [found[n] if n in found else _zeros(like) for n, like in enumerate(self._plain)]

    def _move(
        self,
        step: TracedStep,
        drawn: Scaled,
        leaves: dict[int, Tensor],
        largest: Tensor,
        lrs: Tensor,
        decays: Tensor,
    ) -> tuple[Tensor, dict[int, Tensor], Tensor, Tensor]:
        """Where the parameters go, and what becomes of the status by that."""
        shares = step.coefficients * largest
        deltas = {n: drawn.combine(shares.to(leaf.dtype), n, leaf, self.k) for n, leaf in leaves.items()}
        factor = torch.ones((), dtype=torch.float64, device=largest.device)
        if self._optimizer.clip is not None:
            lengths = [torch.linalg.vector_norm(delta, dtype=torch.float64) for delta in deltas.values()]
            length = torch.linalg.vector_norm(torch.stack(lengths))
            factor = torch.where(length > self._optimizer.clip, self._optimizer.clip / length, factor)
            deltas = {n: delta * factor for n, delta in deltas.items()}
        moved = {}
        for number, leaf in leaves.items():
            kept = leaf * (1.0 - lrs[number] * decays[number]) if self._decayed else leaf
            moved[number] = (deltas[number] + kept).to(leaf.dtype)
        finite = torch.stack([torch.isfinite(one).all() for one in moved.values()]).all()
        code = torch.where((step.code == OK) & ~finite, NONFINITE, step.code)
        return step.coefficients, moved, code, factor

    def _pack(self, model: Quadratic, sign: float, coefficients: Tensor, rate: Tensor, code: Tensor) -> Tensor:
        c = coefficients.to(torch.float64) * rate
        slope, curvature = (part.to(torch.float64) * sign for part in (model.slope, model.curvature))
        predicted = -((slope * c).sum() + ((curvature @ c) * c).sum() / 2)
        return Packing.pack(model, coefficients, predicted, code)


def _ambient(inputs: list[Tensor]) -> Any:
    """What of torch's global state changes what a program is traced to."""
    kind = inputs[0].device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return cast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


class Held:
    """Lazy directions that are made once for each tensor: a step uses them twice, in the pass and in the update."""

    def __init__(self, directions: Directions) -> None:
        self._directions = directions
        self._made: dict[int, Tensor] = {}

    @property
    def k(self) -> int:
        return self._directions.k

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        if position not in self._made:
            self._made[position] = self._directions.rows(position, like, 0, self.k)
        return self._made[position][start:stop]
