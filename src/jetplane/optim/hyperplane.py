"""The optimizer: directions x curvature x solver, with the manners of torch.optim."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.directions import Joined
from ..ad.finite import finite
from ..ad.jet import Quadratic
from ..ad.passes import check_leaf
from ..curvature import Curvature, find
from ..directions import Family, Memory, Mixed, Plane, Remembering, Size, Taken
from ..directions.mixed import resizable
from ..errors import OptimizationStalled
from ..solvers import Solver, Status, adaptive
from . import memory as memories
from .acceptance import Acceptance, Finite
from .fitting import Fitting
from .program import Program, as_closures
from .report import LateReport, Report, Reports
from .scaled import Held, Scaled, clipped, update
from .sizes import advantage

if TYPE_CHECKING:
    from .compiled import CompiledStep

__all__ = ["HyperplaneSearch"]

_FEW = 1 << 14  # entries of all directions up to which they are kept for the update: to make them anew takes longer
_FEW_DIRECTIONS = 4  # up to which Python's own arithmetic is faster than tensors
_LOOK_EVERY = 100  # steps of a compiled optimizer on CUDA between looks at how they went, each of which waits


class HyperplaneSearch(torch.optim.Optimizer):
    r"""Search the plane of K directions for the minimum of the loss's quadratic model there.

    With directions v_k, slope g_k = v_k . grad f and curvature H_kl = v_k^T (Hess f) v_l, all from one forward pass,
    the solver chooses coefficients c, and

        theta += lr * sum_k c_k v_k.

    Groups with lr_g move along s_g v_k, where s_g = lr_g / lr and lr is the largest of the lr_g: the directions are
    stretched before slope and curvature are measured, so the predicted decrease is that of the step which is taken.
    (Where the directions span the whole space, as Newton's, a solver that finds the minimum of the plane finds the same
    one however they are stretched: only the largest lr counts.)

    ``samples`` planes are drawn and their updates averaged. ``weight_decay`` is decoupled: theta *= 1 - lr_g *
    weight_decay. ``clip`` bounds the length of the update over all parameters. ``accept`` tests a step before it is
    taken. A step that is not finite, or not accepted, leaves the parameters as they are and its reason in
    ``report.status``; ``patience`` such steps in a row raise :class:`jetplane.errors.OptimizationStalled` (None:
    never). ``chunk_size`` bounds how many directions travel together; ``memory``, a number of bytes or a text such as
    "4GiB", chooses it so that a pass holds no more, which the first step with batches of new shapes measures in a few
    passes. An adaptive solver has the loss evaluated at the
    end of each step, so that it can follow how well its model predicts.

    ``directions`` is a family, or a list of families whose directions are put together; ``curvature`` a part, or its
    name. Random directions are a function of (``seed``, step, sample, parameter, row); torch's generators play no part.
    Seed, step, the state of an adaptive solver and the size of a family that grows are plain numbers in
    ``param_groups``, and what directions remember is in ``state``, so ``state_dict`` resumes bit by bit.

    Example:
        >>> from jetplane.curvature import ExactHessian
        >>> from jetplane.directions import Orthonormal
        >>> from jetplane.solvers import SaddleFree
        >>> x = torch.tensor([3.0, -2.0], dtype=torch.float64, requires_grad=True)
        >>> opt = HyperplaneSearch([x], 1.0, Orthonormal(2), ExactHessian(), SaddleFree())
        >>> loss = opt.step(lambda: (x - 1).square().sum())
        >>> float(loss), opt.report.status.name
        (13.0, 'OK')
        >>> torch.testing.assert_close(x.detach(), torch.ones(2, dtype=torch.float64))
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        directions: Family | Sequence[Family],
        curvature: Curvature | str,
        solver: Solver,
        *,
        seed: int = 0,
        samples: int = 1,
        weight_decay: float = 0.0,
        clip: float | None = None,
        maximize: bool = False,
        accept: Acceptance | None = None,
        patience: int | None = 10,
        chunk_size: int | None = None,
        memory: int | str | None = None,
        compile: bool = False,
    ) -> None:
        family = Mixed(directions) if isinstance(directions, list | tuple) else directions
        _check_parts(family, solver, accept)
        _check_whole("seed", seed, 0, 2**64 - 1)
        _check_whole("samples", samples, 1, 2**16)
        if clip is not None and not clip > 0:
            raise ValueError(f"clip is {clip!r}; expected a positive length or None.")
        if patience is not None:
            _check_whole("patience", patience, 1)
        if chunk_size is not None:
            _check_whole("chunk_size", chunk_size, 1)
            if memory is not None:
                raise ValueError(f"chunk_size is {chunk_size} and memory is {memory!r}; expected one of them.")
        assert isinstance(family, Family)  # a sequence of another kind is refused above
        self.directions, self.curvature, self.solver = family, find(curvature), solver
        self.samples, self.clip, self.maximize = samples, clip, maximize
        self.accept, self.patience = accept, patience
        self.chunk_size, self.compile = chunk_size, compile
        self._fitting = None if memory is None else Fitting(memory)
        self._compiled: CompiledStep | None = None
        self._report: Report | LateReport | None = None
        self._ready = False  # all groups of the constructor are there
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "seed": seed,
            "step": 0,
            "bad": 0,
            **_beginning(family, solver),
        }
        _check_group(defaults)
        if not isinstance(params, Tensor):
            params = list(params)
            if not params:
                raise ValueError("the parameter list is empty; expected at least one tensor to optimize.")
        super().__init__(params, defaults)
        self._check(self._moving())
        self._ready = True
        if compile:
            _refuse_to_compile(self)

    # -- the surface of torch.optim ---------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with options of its own (lr, weight_decay)."""
        groups = getattr(self, "param_groups", [])
        if isinstance(param_group, dict) and not isinstance(param_group.get("params"), Tensor | set | None):
            param_group = {**param_group, "params": list(param_group["params"])}
            _check_distinct(param_group["params"], groups)
        before = len(groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
            for leaf, label in zip(group["params"], _labels(group, "the new group's "), strict=True):
                check_leaf(leaf, label)
            self._fetch()
            for name in _SHARED:
                group[name] = self.param_groups[0][name]
            if self._ready:
                self._check(self._moving())
        except Exception:
            del self.param_groups[before:]
            raise

    def __getstate__(self) -> dict[str, Any]:
        # torch's keeps no attributes, so a copy would have no directions
        parts = ("directions", "curvature", "solver", "samples", "clip", "maximize", "accept", "patience")
        names = (*parts, "chunk_size", "_fitting", "compile", "_report", "_ready")
        kept = {name: getattr(self, name) for name in names}
        self._fetch()
        return {**super().__getstate__(), **kept, "_compiled": None}

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's optimizers have it. Waits for compiled steps that are under way."""
        self._fetch()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in _beginning(self.directions, self.solver).items():
                group.setdefault(name, value)
        if self._compiled is not None:
            self._compiled.reload()

    @property
    def memory(self) -> int | str | None:
        """The budget of bytes, as it was given."""
        return None if self._fitting is None else self._fitting.memory

    @property
    def report(self) -> Report | LateReport:
        """What the last step found and did."""
        if self._report is None:
            raise RuntimeError("there is no report before the first step; expected a call of step.")
        return self._report

    def step(self, closure: Any = None, *batch: Any, has_aux: bool = False) -> Tensor:  # type: ignore[override]
        """Take one step, and return the loss before it.

        ``closure`` returns the loss as a scalar tensor and never calls backward. Or: a function of ``batch`` that
        returns it; or a list of closures, one for each part of a batch, whose losses are averaged (their sum divided by
        their number). Wherever a closure runs more than once it sees the same random numbers and buffers, and the
        buffers are updated once. With ``has_aux`` a closure returns a pair (loss, aux), and the aux of its first run is
        in ``report.aux`` (a list of them where there is a list of closures).
        """
        closures = as_closures(closure, batch)
        moving = self._checked()
        if self.compile and len(closures) == 1:
            one = closure if callable(closure) else closure[0]
            stacked = tuple(b.unsqueeze(0) if isinstance(b, Tensor) else b for b in batch)
            reports = self._compiled_steps(one, stacked, 1, moving, has_aux)
            if reports is not None:
                return reports.loss[0]
            self._fetch()
        evaluates = self.accept is not None or adaptive(self.solver)
        leaves = [one.tensor for one in moving]
        repeats = evaluates or self.samples > 1 or self._chunked
        program = Program(closures, leaves, [one.label for one in moving], repeats, has_aux)
        with torch.no_grad():
            memory = self._memory(moving)
            found = self._search(program, moving, memory, evaluates)
            report = found.report
            if report.status is Status.OK and not self._apply(moving, found.deltas, program.used, keep=bool(memory)):
                report = report._replace(status=Status.NONFINITE)
            if report.status is Status.OK:
                self._remember(found, memory)
                self._resize(found.models[0], leaves)
        self._finish(report)
        return report.loss

    def steps(self, closure: Any, *batches: Tensor, has_aux: bool = False) -> Reports:
        """Take a step with each entry of the batches' first axis, and return their reports.

        The same as as many calls of :meth:`step`. With ``compile`` on CUDA the host only launches them, and waits for
        nothing.
        """
        if not callable(closure):
            raise TypeError(
                f"steps got {type(closure).__name__}; expected a function of a batch that returns the loss."
            )
        counts = {batch.shape[0] for batch in batches if isinstance(batch, Tensor) and batch.ndim}
        if len(counts) != 1 or not all(isinstance(batch, Tensor) and batch.ndim for batch in batches):
            shapes = [tuple(b.shape) if isinstance(b, Tensor) else type(b).__name__ for b in batches]
            raise ValueError(f"the batches are {shapes}; expected tensors with a first axis of one length, the steps.")
        (count,) = counts
        if not count:
            raise ValueError("the batches have no entries; expected at least one step.")
        if self.compile:
            reports = self._compiled_steps(closure, batches, count, self._checked(), has_aux)
            if reports is not None:
                self._opt_called = True  # torch's schedulers look whether there was a step before theirs
                return reports
        taken = []
        for number in range(count):
            self.step(closure, *(batch[number] for batch in batches), has_aux=has_aux)
            taken.append(self.report)
        aux = _torch.pytree.tree_map(_stacked, *(one.aux for one in taken)) if has_aux else None
        return Reports.of(taken, aux)

    def _compiled_steps(
        self, closure: Any, batches: tuple[Any, ...], count: int, moving: list[Moving], has_aux: bool
    ) -> Reports | None:
        """Take the steps as a compiled graph, or return None where the closure cannot be one."""
        if self._compiled is None:
            from .compiled import CompiledStep  # it imports torch's compiler

            self._compiled = CompiledStep(self)
        reports = self._compiled(closure, batches, count, moving, self._memory(moving), has_aux)
        if reports is None:
            return None
        self._report = reports[-1]
        before = self.param_groups[0]["step"]
        for group in self.param_groups:
            group["step"] = before + count
        at_once = moving[0].tensor.device.type == "cpu"
        if self.patience is not None and (at_once or before // _LOOK_EVERY < (before + count) // _LOOK_EVERY):
            self._count_bad(self._compiled.bad)
        return reports

    def _checked(self) -> list[Moving]:
        moving = self._moving()
        self._check(moving)
        if not moving:
            raise ValueError("no parameter requires grad; expected at least one that can move.")
        return moving

    # -- one step ---------------------------------------------------------------------------------------------------

    def _search(self, program: Program, moving: list[Moving], memory: Memory, evaluates: bool) -> _Found:
        """What the step is to be, before anything has changed."""
        lr = max(one.lr for one in moving)
        leaves = [one.tensor for one in moving]
        drawn = [self._draw(program, moving, memory, sample) for sample in range(self.samples)]
        size = self._chunk_size(program, drawn[0])
        measured = [program.quadratic(plane, self.curvature, size) for plane in drawn]
        models = [model * -1.0 for model in measured] if self.maximize else measured
        solver = self._current()
        steps = [solver(model) for model in models]
        if not any(program.used):
            raise ValueError("the closure uses none of the parameters; expected a loss that depends on them.")
        status = next((step.status for step in steps if step.status is not Status.OK), Status.OK)
        coefficients = [step.coefficients for step in steps]
        numbers = [models[0].loss, *coefficients, *(model.slope for model in models)]
        if not finite(numbers):
            status = Status.NONFINITE
        factor, actual, deltas = 1.0, None, []
        if status is Status.OK:
            shares = [c * (lr / self.samples) for c in coefficients]
            deltas = update(list(zip(drawn, shares, strict=True)), leaves, program.used, size)
            if not finite(deltas):
                status = Status.NONFINITE
            elif self.clip is not None:
                factor = clipped(deltas, self.clip)
        if status is Status.OK and evaluates:
            factor, actual, status = self._try(program, models, coefficients, lr, deltas, factor)
        if factor != 1.0:
            deltas = [delta.mul_(factor) for delta in deltas]
        report = Report(
            loss=measured[0].loss,
            slope=_together([model.slope for model in measured]),
            curvature=_together([model.curvature for model in measured]),
            coefficients=_together(coefficients if factor == 1.0 else [c * factor for c in coefficients]),
            predicted=_predicted(models, coefficients, lr * factor),
            actual=actual,
            status=status,
            evaluations=program.evaluations,
            aux=program.aux,
        )
        return _Found(report, deltas, drawn, models)

    def _draw(self, program: Program, moving: list[Moving], memory: Memory, sample: int) -> Scaled:
        """The directions of one plane, stretched by the groups' learning rates relative to the largest."""
        leaves, largest = [one.tensor for one in moving], max(one.lr for one in moving)
        group = self.param_groups[0]
        plane = Plane(group["seed"], group["step"], sample, leaves, program.gradient, memory)
        rows = self._family().draw(plane)
        if not self._chunked and rows.k * sum(leaf.numel() for leaf in leaves) <= _FEW:
            rows = Held(rows, leaves)
        scales = [one.lr / largest if largest else 1.0 for one in moving]
        return Scaled(rows, scales, [one.label for one in moving])

    @property
    def _chunked(self) -> bool:
        """Whether a plane may take several passes."""
        return self.chunk_size is not None or self._fitting is not None

    def _chunk_size(self, program: Program, plane: Scaled) -> int | None:
        """How many directions travel together: all of them where it is None."""
        if self._fitting is None:
            return self.chunk_size
        kind = program.kind(plane, self.curvature)
        return self._fitting.size(kind, partial(program.chunk_size, plane, self.curvature))

    def _try(
        self,
        program: Program,
        models: list[Quadratic],
        coefficients: list[Tensor],
        lr: float,
        deltas: list[Tensor],
        factor: float,
    ) -> tuple[float, Tensor, Status]:
        """The factor with which the step passes the test, the decrease there, and OK or REJECTED."""
        test = self.accept or Finite()
        sign = -1.0 if self.maximize else 1.0
        with program.trials() as loss_at:
            for attempt in range(test.backtracks + 1):
                factor = factor / 2 if attempt else factor
                actual = models[0].loss - sign * loss_at(deltas, factor)
                predicted = _predicted(models, coefficients, lr * factor)
                if not attempt:
                    self._adapt(predicted, actual)
                if test.holds(float(predicted), float(actual)):
                    return factor, actual, Status.OK
        return factor, actual, Status.REJECTED

    def _apply(self, moving: list[Moving], deltas: list[Tensor], used: list[bool], keep: bool) -> bool:
        """Move the parameters, or none of them where one would not be finite. Overwrites ``deltas`` unless ``keep``."""
        chosen = [(one, delta) for one, delta, read in zip(moving, deltas, used, strict=True) if read]
        ends = []
        for one, delta in chosen:
            ends.append(torch.add(delta, one.tensor, alpha=1.0 - one.lr * one.decay, out=None if keep else delta))
        if not finite(ends):
            return False
        for (one, _), end in zip(chosen, ends, strict=True):
            one.tensor.copy_(end)
        return True

    def _finish(self, report: Report) -> None:
        self._report = report
        for group in self.param_groups:
            group["step"] += 1
        self._count_bad(0 if report.status is Status.OK else self.param_groups[0]["bad"] + 1)

    def _count_bad(self, bad: int) -> None:
        """Note how many steps in a row did not move the parameters, and raise if they are too many."""
        stalled = self.patience is not None and bad >= self.patience
        for group in self.param_groups:
            group["bad"] = 0 if stalled else bad
        if stalled:
            raise OptimizationStalled(
                f"{bad} steps in a row did not move the parameters, the last with status {self.report.status.name}; "
                "expected fewer, or a larger patience."
            )

    # -- directions that remember, or grow ----------------------------------------------------------------------------

    def _memory(self, moving: list[Moving]) -> Memory:
        return memories.recall(
            self.state, self.directions, [one.tensor for one in moving], [one.label for one in moving]
        )

    def _remember(self, found: _Found, memory: Memory) -> None:
        """Tell directions that remember of a step that was taken."""
        if not memory:
            return
        assert isinstance(self.directions, Remembering)
        sign = -1.0 if self.maximize else 1.0
        coefficients = found.report.coefficients.flatten()
        gains = -sign * coefficients * found.report.slope.flatten()
        rows = reduce(Joined, [plane.directions for plane in found.drawn])
        deltas = memories.unstretched(found.deltas, found.drawn[0].scales)
        self.directions.remember(memory, deltas, Taken(rows, coefficients, gains))

    def _family(self) -> Family:
        """The directions with the size that they have reached."""
        size, growing = self.param_groups[0]["size"], resizable(self.directions)
        return self.directions if growing is None else growing.at(size)

    def _resize(self, model: Quadratic, leaves: list[Tensor]) -> None:
        """Let a family that grows follow what its directions gained."""
        growing = resizable(self.directions)
        if growing is None:
            return
        size: Size = self.param_groups[0]["size"]
        gained = advantage(model, self._current(), self.curvature, growing.half(size).count(leaves))
        for group in self.param_groups:
            group["size"] = growing.resized(size, gained)

    # -- adaptive solvers -------------------------------------------------------------------------------------------

    def _current(self) -> Solver:
        """The solver with the state that it has reached."""
        if adaptive(self.solver) and self.param_groups[0]["solver_state"] is not None:
            return self.solver.at(self.param_groups[0]["solver_state"])
        return self.solver

    def _fetch(self) -> None:
        """Bring the numbers of the groups up to date with compiled steps."""
        compiled = getattr(self, "_compiled", None)
        if compiled is not None:
            compiled.fetch()

    def _adapt(self, predicted: Tensor, actual: Tensor) -> None:
        solver = self._current()
        if adaptive(solver):
            state = float(solver.update(solver.state, predicted, actual))
            for group in self.param_groups:
                group["solver_state"] = state

    # -- parameters -------------------------------------------------------------------------------------------------

    def _moving(self) -> list[Moving]:
        """The parameters that require grad, with the numbers of their groups."""
        moving = []
        for number, group in enumerate(self.param_groups):
            _check_group(group)
            labels = _labels(group, f"group {number}'s " if len(self.param_groups) > 1 else "")
            for leaf, label in zip(group["params"], labels, strict=True):
                if leaf.requires_grad:
                    moving.append(Moving(leaf, label, float(group["lr"]), float(group["weight_decay"])))
        return moving

    def _check(self, moving: list[Moving]) -> None:
        """Raise unless these parameters can be moved together."""
        for one in moving:
            if one.tensor.device != moving[0].tensor.device:
                raise ValueError(
                    f"{one.label} is on {one.tensor.device} and {moving[0].label} on {moving[0].tensor.device}; "
                    "expected all parameters on one device."
                )
        if not moving:
            return
        leaves = [one.tensor for one in moving]
        growing = resizable(self.directions)
        family = self.directions if growing is None else growing.largest
        count, size = memories.fresh(family, leaves), sum(leaf.numel() for leaf in leaves)
        if count > size:
            raise ValueError(f"k is {count}, but the parameters have {size} entries; expected at most as many.")


@dataclass(frozen=True)
class Moving:
    """A parameter that moves."""

    tensor: Tensor
    label: str
    lr: float
    decay: float


@dataclass(frozen=True)
class _Found:
    """What a step is to be."""

    report: Report
    deltas: list[Tensor]  # the update, one tensor for each parameter; empty unless the status is OK
    drawn: list[Scaled]  # one for each plane
    models: list[Quadratic]  # of what is minimised


# numbers that all groups have in common
_SHARED = ("seed", "step", "bad", "solver_state", "size")


def _beginning(directions: Family, solver: Solver) -> dict[str, Any]:
    """The numbers that a new optimizer's parts begin with."""
    growing = resizable(directions)
    return {
        "solver_state": float(solver.state) if adaptive(solver) else None,
        "size": None if growing is None else growing.size,
    }


def _together(planes: list[Tensor]) -> Tensor:
    """The numbers of all planes, stacked where there are several."""
    return planes[0] if len(planes) == 1 else torch.stack(planes)


def _predicted(models: list[Quadratic], coefficients: list[Tensor], rate: float) -> Tensor:
    """The mean over planes of -(slope . c + c . H c / 2), for the step c = rate * coefficients."""
    if len(models) == 1 and models[0].k <= _FEW_DIRECTIONS and coefficients[0].is_cpu:
        return _predicted_by_numbers(models[0], coefficients[0], rate)
    steps = [c * rate for c in coefficients]
    parts = [-(m.slope @ c + c @ m.curvature @ c / 2) for m, c in zip(models, steps, strict=True)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).mean()


def _predicted_by_numbers(model: Quadratic, coefficients: Tensor, rate: float) -> Tensor:
    """The same in Python's own arithmetic, which for a few numbers takes less time than tensors do."""
    c, slope = [rate * number for number in coefficients.tolist()], model.slope.tolist()
    curved = [sum(map(operator.mul, row, c)) for row in model.curvature.tolist()]
    predicted = -(sum(map(operator.mul, slope, c)) + sum(map(operator.mul, curved, c)) / 2)
    return torch.tensor(predicted, dtype=coefficients.dtype, device="cpu")


# -- checks of what the user gives --------------------------------------------------------------------------------


def _check_parts(directions: object, solver: object, accept: object) -> None:
    if not isinstance(directions, Family):
        name = type(directions).__name__
        raise TypeError(f"directions are {name}; expected a family of directions such as Gaussian(k).")
    if not callable(solver):
        raise TypeError(f"solver is {type(solver).__name__}; expected a solver such as JitteredInverse().")
    if accept is not None and not isinstance(accept, Acceptance):
        raise TypeError(f"accept is {type(accept).__name__}; expected an Acceptance or None.")


def _stacked(*values: Any) -> Any:
    return torch.stack(values) if isinstance(values[0], Tensor) else list(values)


def _refuse_to_compile(optimizer: HyperplaneSearch) -> None:
    from .compiled import refuse

    refuse(optimizer)


def _check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected a whole number.")
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f" to {most}"
        raise ValueError(f"{name} is {value}; expected a whole number from {least}{upper}.")


def _check_group(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay"):
        try:
            value = float(group[name])
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} is {group[name]!r}; expected a number.") from error
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}; expected a finite number that is not negative.")


def _check_distinct(params: list[Any], groups: list[dict[str, Any]]) -> None:
    seen = {id(leaf): "another group" for group in groups for leaf in group["params"]}
    for position, entry in enumerate(params):
        name, leaf = entry if isinstance(entry, tuple) else (f"parameter {position}", entry)
        if id(leaf) in seen:
            raise ValueError(f"{name} is in {seen[id(leaf)]} already; expected each parameter once.")
        seen[id(leaf)] = "the parameter list"


def _labels(group: dict[str, Any], prefix: str) -> list[str]:
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
    return [prefix + name for name in names]
