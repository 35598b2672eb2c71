"""Adam on forward gradients whose step length follows the curvature along the path it has taken."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ad import _torch
from ...ad.run.auxiliary import split_aux
from ...ad.run.casting import casts_around, uncast
from ...ad.run.parts import is_shared_out, own, whole_like
from ...ad.run.passes import Gathered
from ...ad.run.replay import Replay
from ...compiler.several import alone, entries, stacked
from ...gradients import ForwardGradient
from ...parallel.crew import Crew
from ...solvers import Status
from ..moving import listed, number_of
from ..reentry import outermost
from . import eigenbasis
from .adam_step import PATH, Course, LookBack, MovingLeaf, Rules, clipped, fresh, look_back, take
from .calls import LossCall, calls_of, cast, losses_of, mean_of
from .compiled_adam import CompiledAdam, Steps
from .forgetting import Forgetting
from .held_parts import ALL_HERE, AllHere, held_parts
from .low_lr import LowLr, refuse_positional
from .path import Along, Path

__all__ = ["HorizonAdam", "HorizonReport"]

_OWN = (
    *("every", "power", "clip", "compile", "eps", "forget", "rotate", "estimate"),
    *("_leaves", "_path", "_forgetting", "_calls", "_numbers", "_evaluating", "_crew"),
    *("_options", "_begun", "_new", "_low_lr", "_parts"),
)


class HorizonReport(NamedTuple):
    """The last step. Its numbers may still be under way on the device."""

    loss: Tensor  # (), before the step
    rate: Tensor  # (): the length of a step, in units of Adam's direction
    lead: Tensor  # (): best step along the path from its trailing mean to here, in units of it; below 0: overshot
    taken: Tensor  # (): whether the parameters were moved; loss and gradient must be finite
    aux: Any = None  # what the function returned beside the losses

    @property
    def status(self) -> Status:
        """OK, or why the parameters were not moved. Of one step, and not of several, stacked."""
        return Status.OK if bool(self.taken) else Status.NONFINITE


class _StillReport(HorizonReport):
    """The step where no parameter requires grad: nothing moves and nothing is wrong, as with torch's optimizers."""

    @property
    def status(self) -> Status:
        return Status.FLAT


class HorizonAdam(torch.optim.Optimizer):
    r"""Adam on forward gradients, without a learning rate or a schedule to choose.

    ``step(loss_fn, *batch)``, where ``loss_fn`` returns one loss for each sample (B,). The gradient is estimated by
    ``samples`` activation tangents of each sample (:class:`jetplane.ForwardGradient`; by default 8 to 32, the more the
    smaller the batch is beside a sample's activations; with ``resample`` of samples drawn by the slopes of their
    losses), and shaped as Adam's along the axes in which the entries of a weight's gradient are not correlated: d
    (:mod:`~jetplane.optim.horizon.eigenbasis`; ``rotate=False`` keeps the entries' own axes). How far to go is
    measured: with theta_H the mean of the parameters over a trailing horizon of H steps, and m = theta - theta_H,

        lead = -(m . grad f) / (m^T G m),

    the best step along m from here in units of m, by the Gauss-Newton curvature G of the batch at hand, or by the loss
    at theta_H where that is more curved. While it is positive the path has not gone far enough, and the rate grows by
    exp(2 lead / H) a step; below -1/2 the trailing mean is a better place than theta, which has overshot or is mostly
    noise, and the rate shrinks alike. A single step cannot tell that: its own best length is that of a greedy step
    along a noisy direction. H grows with the number of steps, so the rate can change fast early and settles late. Where
    theta is worse than theta_H by more than a tenth of the first losses' size, as after a step that broke a good fit,
    the parameters go back to theta_H, without momentum, and the rate is halved.

    ``eval()`` puts the average of the parameters, in which late steps weigh most, into the model, and ``train()`` the
    parameters back: the average does what a decaying rate would. :meth:`averaged` is the same as a context. Batch norms
    need statistics of the averaged parameters there, by ``torch.optim.swa_utils.update_bn``: forward passes, no more.

    Noise makes weights longer, and the longer those in front of a norm are, the less a step turns them. So weights are
    pulled to zero as far as the path is noise (lead -1/2), the loss has not fallen yet and does not want them longer:
    :class:`~jetplane.optim.horizon.forgetting.Forgetting`. ``forget`` multiplies that pull; 0 turns it off.

    ``lr`` multiplies the rate and the pull, and is there for schedulers: it is no rate, so one below 0.05 warns, once.
    ``rate=1e-3`` fixes the rate in place of finding it, also of a single group. ``clip`` bounds the norm of the
    gradient, as ``torch.nn.utils.clip_grad_norm_`` does, or is a function that changes the ``.grad`` of the parameters
    that it is given. ``every`` is the number of steps between two measurements, and ``weight_decay`` is decoupled. A
    step whose loss or gradient is not finite leaves everything as it is, and so does one where no parameter requires
    grad.

    With ``compile`` the steps of a program are compiled graphs, on CUDA replayed (docs/compiled.md), and :meth:`steps`
    takes several with one call; a program that cannot be captured is run as it is, with one warning.

    With a ``process_group`` all its processes take each step together, each with its own samples of one batch, and
    their parameters are compared after every ``check_every`` steps.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        >>> y = x.prod(1, keepdim=True).tanh()
        >>> opt = HorizonAdam(model.parameters())
        >>> loss_fn = lambda x, y: torch.nn.functional.mse_loss(model(x), y, reduction="none").mean(1)
        >>> losses = [float(opt.step(loss_fn, x, y)) for _ in range(200)]
        >>> assert losses[-1] < 0.8 * losses[0]
        >>> with opt.averaged():
        ...     loss = loss_fn(x, y).mean()
    """

    estimate: ForwardGradient  # these are made where there are parameters that move, and anew where others come later
    _path: Path
    _forgetting: Forgetting
    _parts: AllHere = ALL_HERE
    _compiled: CompiledAdam | None

    def __init__(
        self,
        params: Iterable[Any],
        *misplaced: Any,
        samples: int | None = None,
        lr: float = 1.0,
        rate: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip: float | Callable[[list[Tensor]], Any] | None = None,
        every: int = 4,
        power: float = 8.0,
        forget: float = 2.0,
        rotate: bool = True,
        seed: int = 0,
        resample: bool = False,
        compile: bool = False,
        process_group: Any = None,
        check_every: int | None = 100,
        **options: Any,
    ) -> None:
        refuse_positional(misplaced)
        for name, value in (("eps", eps), ("power", power), ("forget", forget)):
            _check(name, value)
        if not (clip is None or callable(clip) or number_of("clip", clip) > 0):
            raise ValueError(f"clip is {clip!r}; expected a positive norm, a function of the parameters, or None.")
        if compile and callable(clip):
            raise ValueError(f"clip is {clip!r}; expected a number or None with compile=True.")
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every is {every!r}; expected a positive whole number of steps.")
        self.every, self.power, self.clip, self.eps = every, power, clip, eps
        self.forget, self.rotate = forget, rotate
        # betas lie in the groups, where torch's schedulers look for them
        super().__init__(listed(params), {"lr": lr, "rate": rate, "betas": betas, "weight_decay": weight_decay})
        for group in self.param_groups:
            _check_group(group)
        self._low_lr = LowLr()
        self._low_lr.given(self.param_groups)
        self._crew = Crew(process_group, check_every, type(self).__name__)
        if compile and self._crew.shares_directions:
            raise ValueError(
                "compile is True and process_group is a DeviceMesh whose processes share tangents; expected "
                "compile=False, or a ProcessGroup."
            )
        self._calls = 0
        self._report: HorizonReport | None = None
        self._evaluating = False
        self.compile, self._compiled = compile, None
        self._options = {"samples": samples, "seed": seed, "resample": resample, **options}
        self._leaves: list[Tensor] = []
        self._begun: list[int] = []  # for each leaf, the number of steps that were taken without it
        self._new: list[Tensor] = []  # leaves that the next step is the first for
        self._numbers = torch.zeros(len(PATH), dtype=torch.float64, device="cpu")
        self._forgetting = Forgetting([])
        self._adopt()

    # -- the surface ------------------------------------------------------------------------------------------------

    @property
    def report(self) -> HorizonReport:
        """What the last step found and did."""
        if self._report is None:
            raise RuntimeError("there is no report before the first step; expected a call of step.")
        return self._report

    @property
    def calls(self) -> int:
        """How many steps there were; every ``every`` of them the next one measures its path."""
        return self._calls

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with options of its own (lr, rate, betas, weight_decay): its parameters move from now on.

        The control variate learns anew, for it is one of all parameters.
        """
        before = len(self.param_groups)
        super().add_param_group(param_group)
        if not hasattr(self, "_new"):
            return  # the constructor looks at all of them
        group = self.param_groups[-1]
        try:
            _check_group(group)
        except Exception:
            del self.param_groups[before:]
            raise
        self._low_lr.given([group])
        self._adopt()
        self._crew.again()

    def _adopt(self) -> bool:
        """Take up the parameters that require grad by now, and leave alone those that no longer do.

        Where none does, all stays as it is; whether one does.
        """
        leaves = [leaf for group in self.param_groups for leaf in group["params"] if leaf.requires_grad]
        if not leaves or (len(leaves) == len(self._leaves) and all(map(operator.is_, leaves, self._leaves))):
            return bool(leaves)
        if not self._leaves:
            self._numbers = torch.zeros(len(PATH), dtype=torch.float64, device=leaves[0].device)
        forgetting, taken = Forgetting(leaves), int(self._numbers[PATH.index("count")])
        if self._leaves:
            forgetting.take_over(self._forgetting, self._leaves, leaves)
        begun = self._forget_frozen()
        turned = eigenbasis.affordable([whole_like(leaf.detach()) for leaf in leaves]) if self.rotate else set[int]()
        self._crew.check_shared_out(leaves, _labels(leaves), type(self).__name__)
        self._parts = held_parts(leaves, turned, self._crew.processes)
        self._begin_late(leaves, turned)
        step = self.estimate.step if self._leaves else self._options.get("step", 0)
        shared = {"step": step, "process_group": self._crew.given, "check_every": None}
        self.estimate = ForwardGradient(leaves, **self._options | shared)
        self.estimate.crew.trust()  # this one looks
        if self.compile:
            self.estimate.for_graphs()
        self._begun = [begun.get(id(leaf), taken) for leaf in leaves]
        self._leaves, self._path, self._forgetting = leaves, Path(leaves, self._crew), forgetting
        return True

    def _forget_frozen(self) -> dict[int, int]:
        """Drop the state of parameters that no longer move. Of the others, by id: the steps taken without them."""
        begun = {id(leaf): number for leaf, number in zip(self._leaves, self._begun, strict=True)}
        for leaf in self._leaves:
            if not leaf.requires_grad:  # should it move again, it begins anew
                del self.state[leaf], begun[id(leaf)]
        return begun

    def _begin_late(self, leaves: list[Tensor], turned: set[int]) -> None:
        """Make a state for parameters that have none: their next step is their first."""
        for place, leaf in enumerate(leaves):
            if leaf not in self.state:
                self.state[leaf] = fresh(leaf, place in turned)
                self._new.append(leaf)

    @_torch.apart_from_graphs
    @outermost
    @torch.no_grad()
    def step(self, closure: Any = None, *batch: Any, has_aux: bool = False) -> Tensor:  # type: ignore[override]
        """Take one step, and return the mean loss before it.

        ``closure`` is a function of ``batch`` that returns the losses of its samples (B,), or a list of closures, one
        for each part of a batch, whose mean losses are averaged. With ``has_aux`` each returns a pair (losses, aux),
        and ``report.aux`` is what came with the losses; a list of it where there is a list of closures.
        """
        calls = calls_of(closure, batch)
        if len(calls) > 1 and self._crew.processes is not None:
            raise ValueError(
                f"step got {len(calls)} closures and there is a process_group; expected one function, for each process "
                "has its part of the batch."
            )
        if not self._prepare():
            return self._stay(calls, has_aux)
        if self.compile and len(calls) == 1:
            ((function, given),) = calls
            reports = self._compiled_steps(function, alone(given), 1, has_aux)
            if reports is not None:
                self._crew.check(self._calls, self._leaves)
                return reports.loss[0]
        self.zero_grad(set_to_none=False)
        casts = casts_around(self._numbers.device)
        with uncast(casts):
            loss = self._step(cast(calls, casts), has_aux)
        self._crew.check(self._calls, [leaf for leaf in self._leaves if not is_shared_out(leaf)])
        return loss

    @_torch.apart_from_graphs
    @torch.no_grad()
    def steps(self, closure: Callable[..., Any], *batches: Tensor, has_aux: bool = False) -> HorizonReport:
        """Take a step with each entry of the batches' first axis, and return their reports, stacked (n,).

        The same as as many calls of :meth:`step`. With ``compile`` on CUDA the host only launches them.
        """
        count = entries(closure, batches)
        if self.compile and self._crew.processes is None and self._prepare():
            reports = self._compiled_steps(closure, batches, count, has_aux)
            if reports is not None:
                self._opt_called = True  # torch's schedulers look whether there was a step before theirs
                return reports
        taken = []
        for number in range(count):
            self.step(closure, *(batch[number] for batch in batches), has_aux=has_aux)
            taken.append(self.report)
        *numbers, aux = zip(*taken, strict=True)
        return _report_of([*map(torch.stack, numbers)], _torch.pytree.tree_map(stacked, *aux) if has_aux else None)

    def _step(self, calls: list[LossCall], has_aux: bool) -> Tensor:
        held, rules = self._held(), self._rules
        seen = None
        if self._calls and self._calls % self.every == 0:
            self._refresh(self._calls)
            with self._gathered():
                seen = LookBack(look_back(held, self._losses(calls, has_aux), self._replay()))
        with self._gathered():  # anew: a look back may have moved them
            loss, aux = self._estimated(calls, has_aux)
            self._clip()
            first = None if self._calls else partial(self._along, calls, has_aux)
            self._report = HorizonReport(loss, *take(rules, held, loss, self._grads(), seen, first), aux)
        self._new.clear()
        self._calls += 1
        return loss

    def _stay(self, calls: list[LossCall], has_aux: bool) -> Tensor:
        """The step where no parameter requires grad: the loss alone."""
        found = [split_aux(call.function(*call.batch), has_aux, "the closure", "loss") for call in calls]
        loss = torch.stack([mean_of(losses) for losses, _ in found]).mean()
        aux = [aux for _, aux in found] if has_aux else None
        still = torch.zeros_like(loss), torch.full_like(loss, math.nan), torch.zeros_like(loss, dtype=torch.bool)
        self._report = _StillReport(loss, *still, aux[0] if aux and len(aux) == 1 else aux)
        return loss

    def _compiled_steps(
        self, closure: Any, batches: tuple[Any, ...], count: int, has_aux: bool
    ) -> HorizonReport | None:
        """Take the steps as compiled graphs; None where the closure cannot be one, and no step was taken."""
        if self._new and self._calls:
            return None  # the first step of a late parameter is like no other
        clip = self.clip
        if callable(clip):
            return None
        if self._compiled is None or not self._compiled.is_of(self.estimate, self._rules, clip):
            self._compiled = CompiledAdam(self.estimate, self._rules, clip)
        casts = casts_around(self._numbers.device)
        with uncast(casts):
            steps = Steps(batches, count, self._calls, self._held(), self._refresh)
            found = self._compiled(closure, casts, steps, has_aux)
        if found is None:
            return None
        reports = _report_of(*found)
        self.zero_grad(set_to_none=True)  # the gradient is nowhere
        self._new.clear()
        self._calls += count
        self._report = _report_of(*_torch.pytree.tree_map_only(Tensor, _last, found))
        return reports

    # -- what a step reads and writes -------------------------------------------------------------------------------

    @property
    def _rules(self) -> Rules:
        fixed = all(group["rate"] is not None for group in self.param_groups)
        return Rules(self.every, self.power, self.eps, self.forget, fixed)

    def _held(self) -> Course:
        for group in self.param_groups:
            _check_lr(group["lr"])
        groups = {leaf: group for group in self.param_groups for leaf in group["params"]}
        leaves, whole = [], self._parts is ALL_HERE
        for leaf, begun in zip(self._leaves, self._begun, strict=True):
            group, new = groups[leaf], bool(self._new) and any(leaf is one for one in self._new)
            numbers = group["lr"], group["weight_decay"], group["rate"], tuple(group["betas"])
            state = self.state[leaf] if whole else {name: own(tensor) for name, tensor in self.state[leaf].items()}
            leaves.append(MovingLeaf(leaf if whole else own(leaf), state, *numbers, begun, new))
        return Course(leaves, self._numbers, self._forgetting, self._path, self._parts)

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """Inside, every process has the parameters whole that they share out, as the parts are now."""
        if self._parts is ALL_HERE:
            yield
            return
        wholes = self.estimate.wholes
        with wholes.gathered():
            self._path.at(wholes.tensors)
            yield

    def _refresh(self, calls: int) -> None:
        """Find the axes of Adam's scales anew, if that is due at the step that measures after so many."""
        if eigenbasis.is_due(calls // self.every):
            states = ({name: own(one) for name, one in self.state[leaf].items()} for leaf in self._leaves)
            eigenbasis.refresh(states)

    def _along(self, calls: list[LossCall], has_aux: bool, directions: Sequence[Tensor]) -> Along:
        return self._path.along(self._losses(calls, has_aux), self._parts.wholes(directions), self._replay())

    def _losses(self, calls: list[LossCall], has_aux: bool) -> list[Callable[[], Tensor]]:
        """The losses of a step, in the parts that the estimate takes its batch in."""
        parts = [calls]
        if len(calls) == 1:
            ((function, batch),) = calls
            parts = [[LossCall(function, part)] for part in self.estimate.parts(function, *batch)]
        return [partial(losses_of, part, has_aux) for part in parts]

    def _replay(self) -> Replay:
        return Replay([leaf.device for leaf in self._leaves])

    @torch.no_grad()
    def eval(self) -> None:
        """Put the averaged parameters into the model."""
        if not self._evaluating:
            self._swap()

    @torch.no_grad()
    def train(self) -> None:
        """Put the parameters that are trained back."""
        if self._evaluating:
            self._swap()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged parameters in the model, inside."""
        before = self._evaluating
        self.eval()
        try:
            yield
        finally:
            if not before:
                self.train()

    def state_dict(self) -> dict[str, Any]:
        """torch's, with the numbers of the path and the state of the estimate."""
        numbers = dict(zip(PATH, self._numbers.tolist(), strict=True))
        slopes = self._forgetting.slopes.tolist()
        path = {"calls": self._calls, "evaluating": self._evaluating, "slopes": slopes, "begun": self._begun, **numbers}
        estimate = self.estimate.state_dict() if self._leaves else {}
        return {**super().state_dict(), "path": path, "estimate": estimate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        _require(state_dict, "the state", ("path", "estimate"))
        path = state_dict["path"]
        _require(path, "the state's path", ("calls", "evaluating", "slopes", *PATH))
        self._check_axes(state_dict)
        begun = list(path.get("begun", [0] * len(self._leaves)))  # of states from before there were late ones
        if len(begun) != len(self._leaves):
            raise ValueError(
                f"the state is of {len(begun)} parameters that move, and here are {len(self._leaves)}; expected as "
                "many."
            )
        defaults = [{**group} for group in self.param_groups]
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        for group, default in zip(self.param_groups, defaults, strict=True):
            for name in ("rate", "betas"):  # an earlier state has none of them in its groups
                group.setdefault(name, default[name])
        self._begun, self._new = begun, []
        if path["calls"]:
            self._low_lr.settle()
        self._calls, self._evaluating = path["calls"], path["evaluating"]
        self._crew.again()
        self._numbers.copy_(torch.tensor([path[name] for name in PATH], dtype=torch.float64, device="cpu"))
        self._forgetting.slopes.copy_(torch.tensor(path["slopes"], dtype=torch.float64, device="cpu"))
        if self._leaves:
            self.estimate.load_state_dict(state_dict["estimate"])

    def _check_axes(self, state_dict: dict[str, Any]) -> None:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        leaves = [leaf for group in self.param_groups for leaf in group["params"]]
        for number, leaf in zip(numbers, leaves, strict=False):  # torch says what is wrong if there are more of one
            saved, own = state_dict["state"].get(number, {}), self.state.get(leaf, {})
            if ("basis" in saved) != ("basis" in own):
                has = "axes" if "basis" in saved else "no axes"
                raise ValueError(
                    f"the state has {has} for parameter {number} of shape {tuple(leaf.shape)}; expected one that "
                    f"HorizonAdam.state_dict gave, with rotate={self.rotate}."
                )

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle, which have to take the model along: torch's, and all that this optimizer adds."""
        own = {name: value for name, value in self.__dict__.items() if name in _OWN}
        return {**super().__getstate__(), **own, "_report": None, "_compiled": None}

    def _prepare(self) -> bool:
        """Before a step, compiled or not; whether a parameter requires grad."""
        if self._evaluating:
            raise RuntimeError("the averaged parameters are in the model; expected a call of train() before a step.")
        if not self._adopt():
            return False
        self._low_lr.see(self.param_groups)
        if not self._crew.quiet:
            whole = [one for one in zip(self._leaves, _labels(self._leaves), strict=True) if not is_shared_out(one[0])]
            self._crew.begin(self._facts, self._calls, [leaf for leaf, _ in whole], [label for _, label in whole])
        return True

    def _facts(self) -> dict[str, Any]:
        """What processes that step together must have in common."""
        settings = {name: getattr(self, name) for name in ("every", "power", "clip", "eps", "forget", "rotate")}
        names = "lr", "weight_decay", "rate", "betas"
        groups = [[_plain(group[name]) for name in names] for group in self.param_groups]
        kind = type(self).__name__
        return {"the optimizer": kind, "lr, weight_decay, rate and betas": groups, **settings, **self.estimate.facts()}

    # -- one step ---------------------------------------------------------------------------------------------------

    def _estimated(self, calls: list[LossCall], has_aux: bool) -> tuple[Tensor, Any]:
        """The mean loss and what came with it, with the gradient's estimate in ``.grad``."""
        found = [split_aux(self.estimate(function, *batch, has_aux=has_aux), has_aux) for function, batch in calls]
        if len(found) == 1:
            return found[0]
        for leaf in self._leaves:
            if leaf.grad is not None:
                leaf.grad.div_(len(found))
        losses, aux = zip(*found, strict=True)
        return torch.stack(losses).mean(), list(aux) if has_aux else None

    def _clip(self) -> None:
        """The gradient's length, in ``.grad``."""
        if callable(self.clip):
            self.clip(self._leaves)
        elif self.clip is not None and self._parts is ALL_HERE:
            torch.nn.utils.clip_grad_norm_(self._leaves, self.clip)
        elif self.clip is not None:
            grads = self._grads()
            for grad, short in zip(grads, clipped(grads, self.clip, self._parts), strict=True):
                grad.copy_(short)

    def _grads(self) -> list[Tensor]:
        """What the estimate left, zero for what the losses do not depend on."""
        if self._parts is ALL_HERE:
            return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves]
        return [torch.zeros_like(own(leaf)) if leaf.grad is None else own(leaf.grad) for leaf in self._leaves]

    def _swap(self) -> None:
        with Gathered.of(self._leaves):  # what FSDP has gathered is of the parts before
            for leaf in self._leaves:
                here, average = own(leaf), own(self.state[leaf]["average"])
                kept = here.clone()
                here.copy_(average)
                average.copy_(kept)
        self._evaluating = not self._evaluating


def _check(name: str, value: Any, *, below: float = math.inf) -> None:
    if not 0.0 <= number_of(name, value) < below:
        expected = f"a number from 0, below {below:g}" if math.isfinite(below) else "a finite number from 0"
        raise ValueError(f"{name} is {value!r}; expected {expected}.")


def _check_lr(lr: Any) -> None:
    """That of a step, which a scheduler may have set; a number on a device is not waited for."""
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        _check("lr", lr)


def _check_group(group: dict[str, Any]) -> None:
    _check("lr", group["lr"])
    _check("weight_decay", group["weight_decay"])
    if group["rate"] is not None:
        _check("rate", group["rate"])
    betas = group["betas"]
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ValueError(f"betas is {betas!r}; expected a pair of numbers, those of Adam.")
    for number, beta in enumerate(betas):
        _check(f"betas[{number}]", beta, below=1.0)
    for leaf in group["params"]:
        if leaf.device.type == "meta":
            raise ValueError("a parameter is on meta, where there are no numbers; expected it on another device.")
        if leaf.device.type == "mps":
            raise ValueError("a parameter is on mps, which has no float64 for the path; expected the CPU or CUDA.")


def _labels(leaves: Sequence[Tensor]) -> list[str]:
    return [f"parameter {number}" for number in range(len(leaves))]


def _plain(value: Any) -> Any:
    """A setting of a group in numbers: a scheduler may have left a tensor."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if value is None else float(value)


def _require(state: dict[str, Any], what: str, names: Iterable[str]) -> None:
    for name in names:
        if name not in state:
            raise ValueError(f"{what} has no {name!r}; expected one that HorizonAdam.state_dict gave.")


def _report_of(numbers: Sequence[Tensor], aux: Any) -> HorizonReport:
    loss, rate, lead, taken = numbers
    return HorizonReport(loss, rate, lead, taken, aux)


def _last(stacked: Tensor) -> Tensor:
    return stacked[-1]
