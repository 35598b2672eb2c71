"""The optimizer: directions, a curvature and a solver, with the interface of torch.optim. :mod:`.step` has the step."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.engine.locate import users_level
from ..ad.run.casting import casts_around, uncast
from ..ad.run.parts import shared_facts
from ..ad.run.passes import check_leaf
from ..compiler.several import alone, entries, stacked
from ..curvature import Curvature, find
from ..directions import Family, Memory, Mixed
from ..directions.earlier import adopted as adopted_family
from ..errors import OptimizationStalled
from ..parallel.averages import Averages, Together
from ..parallel.crew import Crew
from ..parallel.processes import named
from ..solvers import Solver, Status
from ..solvers.adopted import adopted as adopted_solver
from .acceptance import Acceptance, Choice, chosen
from .closures import Closures, Measured, as_closures
from .fitting import Fitting
from .moving import Moving, check_distinct, check_group, check_together, check_whole, labels, listed, moving_of
from .reentry import outermost
from .reports import LateReport, Report, Reports
from .shared_out import check_shared_out
from .slots import recall
from .stalling import explain
from .step import take
from .step_settings import Numbers, StepSettings
from .watching import NOBODY, Watcher

if TYPE_CHECKING:
    from .compiled_step import CompiledStep
    from .compiled_sweep import CompiledSweep

__all__ = ["HyperplaneSearch"]

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
    taken; without one (None) a solver whose theory needs it (`TrustRegion`, `Cubic`, `Damped`) has steps that would
    raise the loss rejected, and False takes them all. A step that is not finite, or not accepted, or has nowhere to go
    (a slope of zero, as at a minimum) leaves the parameters as they are and its reason in ``report.status``.
    ``patience`` steps in a row that are not finite, or singular, raise :class:`jetplane.errors.OptimizationStalled`
    (None: never), and as many that are rejected warn, once; to have converged is no error. ``chunk_size`` bounds how
    many directions travel together; ``memory``, a number of bytes or a text such as "4GiB", chooses it so that a pass
    holds no more, which the first step with batches of new shapes measures in a few passes. An adaptive solver has the
    loss evaluated at the end of each step, so that it can follow how well its model predicts.

    With a ``process_group`` all its processes take each step together, every one with its own part of the batch: only
    the numbers of the model go over the wire. In a `DeviceMesh` ("data", "directions") the processes of one part of the
    batch share its directions. Their parameters are compared after every ``check_every`` steps.

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

    _warned = False  # that steps are rejected
    _watcher: Watcher = NOBODY  # of the steps; a copy has none

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
        accept: Choice = None,
        patience: int | None = 10,
        chunk_size: int | None = None,
        memory: int | str | None = None,
        compile: bool = False,
        process_group: Any = None,
        check_every: int | None = 100,
    ) -> None:
        family = Mixed(directions) if isinstance(directions, list | tuple) else directions
        _check_parts(family, solver, accept)
        _check_options(seed, samples, clip, patience, chunk_size, memory)
        assert isinstance(family, Family)  # a sequence of another kind is refused above
        self.directions, self.curvature, self.solver = family, find(curvature), solver
        self.samples, self.clip, self.maximize = samples, clip, maximize
        self.accept, self.patience = accept, patience
        self.chunk_size, self.compile = chunk_size, compile
        self._crew = Crew(process_group, check_every, type(self).__name__, planes=True)
        if compile and self._crew.shares_directions:
            raise ValueError(
                "compile is True and process_group is a DeviceMesh, whose processes run several passes of a plane; "
                "expected compile=False, or a ProcessGroup."
            )
        self._fitting = None if memory is None else Fitting(memory)
        self._given: tuple[Any, ...] = ()  # what the settings were made of
        self._made: StepSettings | None = None
        self._compiled: CompiledStep | None = None
        self._swept: CompiledSweep | None = None  # where a step stops at the numbers of its model
        self._report: Report | LateReport | None = None
        self._ready = False  # all groups of the constructor are there
        defaults = {"lr": lr, "weight_decay": weight_decay, "seed": seed, "step": 0, "bad": 0, **self._beginning()}
        check_group(defaults)
        params = listed(params)
        if not params:
            raise ValueError("the parameter list is empty; expected at least one tensor to optimize.")
        super().__init__(params, defaults)
        self._check(moving_of(self.param_groups))
        self._ready = True
        if compile:
            from .compiled_step import refuse  # they import torch's compiler
            from .compiled_sweep import refuse_split

            (refuse if self._crew.processes is None else refuse_split)(self._settings)

    # -- the surface of torch.optim ---------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with options of its own (lr, weight_decay)."""
        groups = getattr(self, "param_groups", [])
        if isinstance(param_group, dict) and not isinstance(param_group.get("params"), Tensor | set | None):
            param_group = {**param_group, "params": list(param_group["params"])}
            check_distinct(param_group["params"], groups)
        before = len(groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            for leaf, label in zip(group["params"], labels(group, "the new group's "), strict=True):
                check_leaf(leaf, label, parts=True)
            self._fetch()
            for name in Numbers._fields:
                group[name] = self.param_groups[0][name]
            if self._ready:
                self._check(moving_of(self.param_groups))
                self._crew.again()
        except Exception:
            del self.param_groups[before:]
            raise

    def __getstate__(self) -> dict[str, Any]:
        # torch's keeps no attributes, so a copy would have no directions
        parts = ("directions", "curvature", "solver", "samples", "clip", "maximize", "accept", "patience")
        names = (*parts, "chunk_size", "_fitting", "compile", "_crew", "_report", "_warned", "_ready")
        kept = {name: getattr(self, name) for name in names}
        self._fetch()
        return {**super().__getstate__(), **kept, "_compiled": None, "_swept": None, "_given": (), "_made": None}

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's optimizers have it. Waits for compiled steps that are under way."""
        self._fetch()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in self._beginning().items():
                group.setdefault(name, value)
        if self._compiled is not None:
            self._compiled.reload()
        self._crew.again()

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

    @_torch.apart_from_graphs
    @outermost
    def step(  # type: ignore[override]
        self, closure: Any = None, *batch: Any, has_aux: bool = False, weight: Any = None
    ) -> Tensor:
        """Take one step, and return the loss before it.

        ``closure`` returns the loss as a scalar tensor and never calls backward; where curvature or solver can use them
        (`GaussNewton`, `EmpiricalFisher`, `LevenbergMarquardt`), also the losses of single samples (B,), which count as
        their mean. Or: a function of ``batch`` that returns it; or a list of closures, one for each part of a batch,
        whose losses are averaged (their sum divided by their number). Wherever a closure runs more than once it sees
        the same random numbers and buffers, and the buffers are updated once. With ``has_aux`` a closure returns a pair
        (loss, aux), and the aux of its first run is in ``report.aux`` (a list of them where there is a list of
        closures). Where no parameter requires grad, nothing moves. Autocast around a step is for the closure alone.

        ``weight`` is what a closure's mean counts beside the others': a number of samples, or one for each closure of a
        list. In a process group, where all processes call step, it is the first axis of the batch's first tensor by
        default; ``report.aux`` is that of this process.
        """
        closures = as_closures(closure, batch)
        moving = self._checked()
        averages = self._averages(moving, weight, len(closures), batch)
        if not moving.tensors:
            return self._stay(closures, has_aux, averages)
        self._watcher.before(self._numbers)
        one = closure if callable(closure) else closure[0]
        compiled = None
        if self.compile and len(closures) == 1 and self._split:
            compiled = partial(self._compiled_passes, one, batch, moving, has_aux)
            self._fetch()
        elif self.compile and len(closures) == 1 and averages.weights is None:
            reports = self._compiled_steps(one, alone(batch), 1, moving, has_aux)
            if reports is not None:
                return reports.loss[0]
            self._fetch()
        settings, casts = self._settings, casts_around(moving.device)
        closures = [casts.around(one) for one in closures]
        options = settings.repeats, has_aux, settings.samples_apart, averages, compiled
        program = Closures(closures, moving.tensors, moving.labels, *options)
        with torch.no_grad(), uncast(casts):
            memory = self._memory(moving)
            self._report, after = take(settings, self._numbers, program, moving, memory, self._watcher)
        self._note(after, averages)
        self._crew.check(after.step, moving.everywhere[0])
        return self._report.loss

    def _averages(self, moving: Moving, weight: Any, count: int, batch: Sequence[Any]) -> Averages:
        """The mean over closures, here and in the other processes."""
        if weight is None and self._crew.quiet:
            return Averages()
        settings, now = self._settings, self._numbers
        self._crew.begin(partial(self._facts, moving), now.step, *moving.everywhere)
        signs = {"the seed": now.seed, "the step": now.step, "lr": moving.lrs, "weight_decay": moving.decays}
        what = f"step {now.step}"
        return self._crew.averages(weight, count, batch, settings.uses_noise and settings.samples_apart, signs, what)

    def _facts(self, moving: Moving) -> dict[str, Any]:
        """What processes that step together must have in common."""
        settings, now = self._settings, self._numbers
        parts = {"directions": settings.family, "curvature": settings.curvature, "solver": settings.solver}
        numbers = {"samples": self.samples, "clip": self.clip, "maximize": self.maximize, "accept": settings.accept}
        state = {"the solver's state": now.solver_state, "the size": now.size}
        k = settings.family.count(moving.tensors) if moving.tensors else 0
        kind = type(self).__name__
        found = {"the optimizer": kind, "the seed": now.seed, "K": k, **parts, **numbers, **state}
        return found | shared_facts(moving.tensors, moving.labels)

    @_torch.apart_from_graphs
    def steps(self, closure: Any, *batches: Tensor, has_aux: bool = False) -> Reports:
        """Take a step with each entry of the batches' first axis, and return their reports.

        The same as as many calls of :meth:`step`. With ``compile`` on CUDA the host only launches them, and waits for
        nothing.
        """
        count = entries(closure, batches)
        moving = self._checked()
        if self.compile and moving.tensors and not self._split:
            reports = self._compiled_steps(closure, batches, count, moving, has_aux)
            if reports is not None:
                self._opt_called = True  # torch's schedulers look whether there was a step before theirs
                return reports
        taken = []
        for number in range(count):
            self.step(closure, *(batch[number] for batch in batches), has_aux=has_aux)
            taken.append(self.report)
        aux = _torch.pytree.tree_map(stacked, *(one.aux for one in taken)) if has_aux else None
        return Reports.of(taken, aux)

    def _stay(self, closures: list[Callable[[], Any]], has_aux: bool, averages: Averages) -> Tensor:
        """The step where no parameter requires grad: the loss alone."""
        program = Closures(closures, [], [], False, has_aux, self._settings.samples_apart, averages)
        self._report = Report.still(program.loss(), program.evaluations, program.aux)
        return self._report.loss

    def _compiled_steps(
        self, closure: Any, batches: tuple[Any, ...], count: int, moving: Moving, has_aux: bool
    ) -> Reports | None:
        """Take the steps as a compiled graph, or return None where the closure cannot be one."""
        if self._compiled is None:
            from .compiled_step import CompiledStep

            self._compiled = CompiledStep()
        compiled, settings, memory = self._compiled, self._settings, self._memory(moving)
        if not compiled.knows(settings, moving, len(self.param_groups)):
            self._fetch()
            compiled.renew(settings, moving, len(self.param_groups))
        casts = casts_around(moving.device)
        with uncast(casts):
            reports = compiled(closure, casts, batches, count, moving, memory, self._numbers, has_aux)
        if reports is None:
            return None
        self._report = reports[-1]
        before = self._numbers
        after = before._replace(step=before.step + count)
        at_once = moving.device.type == "cpu"
        if self.patience is not None and (at_once or before.step // _LOOK_EVERY < after.step // _LOOK_EVERY):
            after = after._replace(bad=compiled.bad)
        self._note(after)
        return reports

    @property
    def _split(self) -> bool:
        """Whether a compiled step stops at the numbers of its model: they are exchanged, or the update is replayed."""
        return self._crew.processes is not None or self._watcher is not NOBODY

    def _compiled_passes(self, closure: Any, batch: tuple[Any, ...], moving: Moving, has_aux: bool) -> Measured | None:
        """The passes of a step as a compiled graph; None where the closure cannot be one."""
        settings, memory, groups = self._settings, self._memory(moving), len(self.param_groups)
        if self._swept is None or not self._swept.knows(settings, moving, groups):
            from .compiled_sweep import CompiledSweep

            self._swept = CompiledSweep(settings, moving, groups)
        casts = casts_around(moving.device)
        return self._swept(closure, casts, batch, moving, memory, self._numbers, has_aux)

    # -- the parts, and the numbers that steps change ---------------------------------------------------------------

    @property
    def _settings(self) -> StepSettings:
        parts = self.directions, self.curvature, self.solver
        given = (*parts, self.samples, self.clip, self.maximize, self.accept, self.chunk_size, self._fitting)
        if self._made is None or any(map(operator.is_not, given, self._given)):
            family, solver = adopted_family(self.directions), adopted_solver(self.solver)
            accept = chosen(self.accept, self.solver)
            numbers = self.samples, self.clip, self.maximize, accept, self.chunk_size
            self._given, self._made = given, StepSettings(family, self.curvature, solver, *numbers, self._fitting)
        return self._made

    def _beginning(self) -> dict[str, Any]:
        """The numbers that a new optimizer's parts begin with."""
        return {"solver_state": self._settings.solver.init(), "size": self._settings.family.init().size}

    @property
    def _numbers(self) -> Numbers:
        group, settings = self.param_groups[0], self._settings
        state = settings.solver.init()
        if state is not None and group["solver_state"] is not None:
            state = group["solver_state"]
        return Numbers(group["seed"], group["step"], group["bad"], state, group["size"])

    def _note(self, after: Numbers, averages: Averages | None = None) -> None:
        """Keep the numbers, and say if too many steps in a row could not move the parameters."""
        stalled = self.patience is not None and after.bad >= self.patience
        noted = after._replace(bad=0) if stalled else after
        for group in self.param_groups:
            group.update(noted._asdict())
        if stalled:
            blamed = averages.blamed if isinstance(averages, Together) else []
            where = f" The numbers of {named(blamed)} were not finite." if blamed else ""
            self._say_stalled(after.bad, self.report.status, where)

    def _say_stalled(self, count: int, status: Status, where: str = "") -> None:
        """Raise where the numbers are broken; warn, once, where steps are only not good enough."""
        if status is not Status.REJECTED:
            raise OptimizationStalled(f"{explain(count, status)}{where} With patience=None nothing is raised.")
        # a solver with a state is on its way to one whose steps are good enough
        if not self._warned and self._settings.solver.init() is None:
            self._warned = True
            warnings.warn(explain(count, status), stacklevel=users_level())

    def _memory(self, moving: Moving) -> Memory:
        """What directions remember."""
        return recall(self.state, self._settings.family, moving.tensors, moving.labels)

    def _fetch(self) -> None:
        """Bring the numbers of the groups up to date with compiled steps."""
        compiled = getattr(self, "_compiled", None)
        if compiled is not None:
            for group in self.param_groups:
                group.update(compiled.counted)

    # -- parameters -------------------------------------------------------------------------------------------------

    def _checked(self) -> Moving:
        moving = moving_of(self.param_groups)
        self._check(moving)
        return moving

    def _check(self, moving: Moving) -> None:
        """Raise unless these parameters can be moved together."""
        if moving.tensors:
            check_together(moving, self._settings.family.fresh(moving.tensors))
        if moving.shared_out:
            check_shared_out(moving, self._settings.family, self._crew)


# -- checks of what the user gives --------------------------------------------------------------------------------


def _check_parts(directions: object, solver: object, accept: object) -> None:
    if not isinstance(directions, Family):
        name = type(directions).__name__
        raise TypeError(f"directions are {name}; expected a family of directions such as Gaussian(k).")
    if not callable(solver):
        raise TypeError(f"solver is {type(solver).__name__}; expected a solver such as JitteredInverse().")
    if accept is not None and accept is not False and not isinstance(accept, Acceptance):
        raise TypeError(f"accept is {type(accept).__name__}; expected an Acceptance, None or False.")


def _check_options(
    seed: object, samples: object, clip: float | None, patience: object, chunk_size: object, memory: object
) -> None:
    check_whole("seed", seed, 0, 2**64 - 1)
    check_whole("samples", samples, 1, 2**16)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip!r}; expected a positive length or None.")
    if patience is not None:
        check_whole("patience", patience, 1)
    if chunk_size is not None:
        check_whole("chunk_size", chunk_size, 1)
        if memory is not None:
            raise ValueError(f"chunk_size is {chunk_size} and memory is {memory!r}; expected one of them.")
