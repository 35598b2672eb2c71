"""Adam on forward gradients whose step length follows the curvature along the path it has taken."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ad import _torch
from ...ad.run.auxiliary import split_aux
from ...gradients import ForwardGradient
from ...parallel.crew import Crew
from ...solvers import Status
from ..casting import casts_around, uncast
from ..moving import listed, number_of
from . import eigenbasis
from .forgetting import Forgetting
from .path import Along, Path

__all__ = ["HorizonAdam", "HorizonReport"]

_GAIN = 2.0  # e-foldings of the rate within a horizon, at most
_SHORTEST = 20.0  # steps: horizon at the start
_SHARE = 0.25  # of all steps: horizon later on
_CAUTIOUS = 1e-2  # of the step that is best on the first batch, which is far too long for a noisy direction
_BELIEVED, _MODERATE = 0.3, 0.03  # of the parameters' mean size: a first step longer than the one is the other
_THROWN = 0.1  # of the first loss: so much above the loss at the trailing mean is no noise
_COUNT, _RATE, _LEAD, _FIRST, _TREND = range(5)
_PATH = ("count", "rate", "lead", "first", "trend")
_OWN = (
    *("every", "power", "betas", "eps", "forget", "rotate", "estimate"),
    *("_leaves", "_path", "_forgetting", "_calls", "_numbers", "_evaluating", "_crew"),
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
        """OK, or why the parameters were not moved."""
        return Status.OK if bool(self.taken) else Status.NONFINITE


class HorizonAdam(torch.optim.Optimizer):
    r"""Adam on forward gradients, without a learning rate or a schedule to choose.

    ``step(loss_fn, *batch)``, where ``loss_fn`` returns one loss for each sample (B,). The gradient is estimated by
    ``samples`` activation tangents of each sample (:class:`jetplane.ForwardGradient`; by default 8 to 32, the more the
    smaller the batch is beside a sample's activations), and shaped as Adam's along the axes in which the entries of a
    weight's gradient are not correlated: d (:mod:`~jetplane.optim.horizon.eigenbasis`; ``rotate=False`` keeps the
    entries' own axes). How far to go is measured: with theta_H the mean of the parameters over a trailing horizon of H
    steps, and m = theta - theta_H,

        lead = -(m . grad f) / (m^T G m),

    the best step along m from here in units of m, by the Gauss-Newton curvature G of the batch at hand, or by the loss
    at theta_H where that is more curved. While it is positive the path has not gone far enough, and the rate grows by
    exp(2 lead / H) a step; below -1/2 the trailing mean is a better place than theta, which has overshot or is mostly
    noise, and the rate shrinks alike. A single step cannot tell that: its own best length is that of a greedy step
    along a noisy direction. H grows with the number of steps, so the rate can change fast early and settles late. Where
    theta is worse than theta_H by more than a tenth of the first loss, as after a step that broke a good fit, the
    parameters go back to theta_H, without momentum, and the rate is halved.

    ``eval()`` puts the average of the parameters, in which late steps weigh most, into the model, and ``train()`` the
    parameters back: the average does what a decaying rate would. :meth:`averaged` is the same as a context. Batch norms
    need statistics of the averaged parameters there, by ``torch.optim.swa_utils.update_bn``: forward passes, no more.

    Noise makes weights longer, and the longer those in front of a norm are, the less a step turns them. So weights are
    pulled to zero as far as the path is noise (lead -1/2), the loss has not fallen yet and does not want them longer:
    :class:`~jetplane.optim.horizon.forgetting.Forgetting`. ``forget`` multiplies that pull; 0 turns it off.

    ``lr`` multiplies the rate and the pull (for schedulers), ``every`` is the number of steps between two measurements,
    and ``weight_decay`` is decoupled. A step whose loss or gradient is not finite leaves everything as it is.

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

    def __init__(
        self,
        params: Iterable[Any],
        samples: int | None = None,
        *,
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        every: int = 4,
        power: float = 8.0,
        forget: float = 2.0,
        rotate: bool = True,
        seed: int = 0,
        capturable: bool = False,
        process_group: Any = None,
        check_every: int | None = 100,
        **options: Any,
    ) -> None:
        _check("lr", lr)
        _check("betas[0]", betas[0], below=1.0)
        _check("betas[1]", betas[1], below=1.0)
        for name, value in (("eps", eps), ("weight_decay", weight_decay), ("power", power), ("forget", forget)):
            _check(name, value)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every is {every!r}; expected a positive whole number of steps.")
        self.every, self.power, self.betas, self.eps = every, power, betas, eps
        self.forget, self.rotate = forget, rotate
        super().__init__(listed(params), {"lr": lr, "weight_decay": weight_decay})
        for group in self.param_groups:
            _check("lr", group["lr"])
            _check("weight_decay", group["weight_decay"])
        self._leaves = [leaf for group in self.param_groups for leaf in group["params"] if leaf.requires_grad]
        if not self._leaves:
            raise ValueError("no parameter requires grad; expected at least one that can move.")
        options |= {"seed": seed, "capturable": capturable, "process_group": process_group, "check_every": None}
        self.estimate = ForwardGradient(self._leaves, samples, **options)
        self.estimate.crew.trust()  # this one looks
        self._crew = Crew(process_group, check_every, type(self).__name__)
        self._path = Path(self._leaves, self._crew)
        self._forgetting = Forgetting(self._leaves)
        self._calls = 0
        self._numbers = torch.zeros(len(_PATH), dtype=torch.float64, device=self._leaves[0].device)
        self._report: HorizonReport | None = None
        self._evaluating = False
        for leaf in self._leaves:
            self.state[leaf] = _fresh(leaf, rotate)

    # -- the surface ------------------------------------------------------------------------------------------------

    @property
    def report(self) -> HorizonReport:
        """What the last step found and did."""
        if self._report is None:
            raise RuntimeError("there is no report before the first step; expected a call of step.")
        return self._report

    @property
    def calls(self) -> int:
        """How many steps there were. Those of a replayed CUDA graph are not seen: who replays one sets it."""
        return self._calls

    @calls.setter
    def calls(self, value: int) -> None:
        self._calls = value

    @property
    def measures(self) -> bool:
        """Whether the next step measures the curvature along the path."""
        return self._calls % self.every == 0 and self._calls > 0

    def refresh(self) -> None:
        """Find the axes of Adam's scales anew, if the next step is one at which that is due.

        `step` does it. In a CUDA graph it cannot be done: who replays one calls this before each step that measures.
        """
        if self.measures and eigenbasis.is_due(self._calls // self.every):
            for leaf in self._leaves:
                eigenbasis.refresh(self.state[leaf])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are given to the constructor: the average and the path are those of all parameters."""
        if hasattr(self, "estimate"):
            raise RuntimeError("the parameters of HorizonAdam are fixed; expected all groups in the constructor.")
        super().add_param_group(param_group)

    @_torch.apart_from_graphs
    @torch.no_grad()
    def step(self, closure: Any = None, *batch: Any, has_aux: bool = False) -> Tensor:  # type: ignore[override]
        """Take one step, and return the mean loss before it."""
        self._check_ready(closure)
        if not self._crew.quiet:
            labels = [f"parameter {number}" for number in range(len(self._leaves))]
            self._crew.begin(self._facts, self._calls, self._leaves, labels)
        self.zero_grad(set_to_none=False)
        casts = casts_around(self._numbers.device)
        with uncast(casts):
            loss = self._step(casts.around(closure), batch, has_aux)
        self._crew.check(self._calls, self._leaves)
        return loss

    def _facts(self) -> dict[str, Any]:
        """What processes that step together must have in common."""
        settings = {name: getattr(self, name) for name in ("every", "power", "betas", "eps", "forget", "rotate")}
        groups = [(float(group["lr"]), float(group["weight_decay"])) for group in self.param_groups]
        return {
            "the optimizer": type(self).__name__,
            "lr and weight_decay": groups,
            **settings,
            **self.estimate.facts(),
        }

    def _step(self, closure: Callable[..., Any], batch: tuple[Any, ...], has_aux: bool) -> Tensor:
        capturing = self._numbers.is_cuda and torch.cuda.is_current_stream_capturing()
        losses = partial(_losses, closure, batch, has_aux)
        if not capturing:
            self.refresh()
        seen = self._look_back(losses, capturing) if self.measures else None
        if seen is not None:
            self._retreat(seen)
        loss, aux = split_aux(self.estimate(closure, *batch, has_aux=has_aux), has_aux)
        grads = self._grads()
        taken = torch.isfinite(loss) & torch.stack([torch.isfinite(grad).all() for grad in grads]).all()
        self._numbers[_COUNT] += taken
        if self.forget:
            self._forgetting.see(self._leaves, grads, self._horizon(), taken)
        directions = self._directions(grads, taken)
        if self._calls == 0:
            self._numbers[_RATE] = self._first_rate(losses, directions, capturing)
            self._numbers[_FIRST] = loss
        elif seen is not None:
            self._follow(seen)
        self._move(directions, loss, taken)
        self._calls += 1
        _, rate, led, *_ = self._numbers.unbind()
        self._report = HorizonReport(loss, rate.clone(), led.clone(), taken, aux)
        return loss

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
        numbers = dict(zip(_PATH, self._numbers.tolist(), strict=True))
        slopes = self._forgetting.slopes.tolist()
        path = {"calls": self._calls, "evaluating": self._evaluating, "slopes": slopes, **numbers}
        return {**super().state_dict(), "path": path, "estimate": self.estimate.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        _require(state_dict, "the state", ("path", "estimate"))
        path = state_dict["path"]
        _require(path, "the state's path", ("calls", "evaluating", "slopes", *_PATH))
        self._check_axes(state_dict)
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        self._calls, self._evaluating = path["calls"], path["evaluating"]
        self._crew.again()
        self._numbers.copy_(torch.tensor([path[name] for name in _PATH], dtype=torch.float64, device="cpu"))
        self._forgetting.slopes.copy_(torch.tensor(path["slopes"], dtype=torch.float64, device="cpu"))
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
        return {**super().__getstate__(), **own, "_report": None}

    def _check_ready(self, closure: Any) -> None:
        if not callable(closure):
            name = type(closure).__name__
            raise TypeError(f"step got {name}; expected a function that returns the losses of a batch's samples.")
        if self._evaluating:
            raise RuntimeError("the averaged parameters are in the model; expected a call of train() before a step.")

    # -- one step ---------------------------------------------------------------------------------------------------

    def _grads(self) -> list[Tensor]:
        """What the estimate left, zero for what the losses do not depend on."""
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves]

    def _directions(self, grads: list[Tensor], taken: Tensor) -> list[Tensor]:
        """Adam's directions, downhill."""
        first, second = self.betas
        count = self._numbers[_COUNT]
        scales = 1 - first**count, (1 - second**count).sqrt()
        directions, share = [], 1 / self._horizon()
        for leaf, grad in zip(self._leaves, grads, strict=True):
            state = self.state[leaf]
            eigenbasis.see(state, grad, share, taken)
            if self._calls == 0:
                eigenbasis.refresh(state)
            mean, square, turned = state["exp_avg"], state["exp_avg_sq"], eigenbasis.away(state, grad)
            mean.copy_(torch.where(taken, torch.lerp(mean, turned, 1 - first), mean))
            square.copy_(torch.where(taken, torch.lerp(square, turned * turned, 1 - second), square))
            size = square.sqrt() / scales[1].to(square) + self.eps
            directions.append(eigenbasis.back(state, -(mean / scales[0].to(mean)) / size))
        return directions

    def _look_back(self, losses: Callable[[], Tensor], capturing: bool) -> Along:
        path = [leaf - self.state[leaf]["trail"] for leaf in self._leaves]
        return self._path.along(losses, path, back=True, capturing=capturing)

    def _thrown(self, seen: Along) -> Tensor:
        return seen.rise > _THROWN * self._numbers[_FIRST].abs()

    def _retreat(self, seen: Along) -> None:
        """Where the parameters were thrown out of a good place, put them back to their trailing mean.

        To halve the rate alone would not do: they would stay where they are, and the rate be halved again and again.
        """
        thrown = self._thrown(seen)
        for leaf in self._leaves:
            state = self.state[leaf]
            leaf.copy_(torch.where(thrown, state["trail"], leaf))
            state["exp_avg"].copy_(torch.where(thrown, 0.0, state["exp_avg"]))

    def _follow(self, seen: Along) -> None:
        lead = seen.best
        horizon = torch.clamp_min(_SHARE * self._numbers[_COUNT], _SHORTEST)
        urge = torch.where(lead > 0, lead.clamp_max(1), (lead + 0.5).clamp(-1, 0))
        urge = torch.where(torch.isfinite(lead), urge, -1.0)
        self._numbers[_RATE] *= torch.where(self._thrown(seen), 0.5, torch.exp(_GAIN * self.every / horizon * urge))
        self._numbers[_LEAD] = lead
        # of one batch it is noisy, so weights are forgotten by its mean over the horizon, in which no batch weighs much
        step = (self.every / horizon).clamp_max(1) * (lead.clamp(-0.5, 0.5) - self._numbers[_TREND])
        self._numbers[_TREND] += torch.where(torch.isfinite(lead), step, 0.0)

    def _first_rate(self, losses: Callable[[], Tensor], directions: list[Tensor], capturing: bool) -> Tensor:
        best = self._path.along(losses, directions, capturing=capturing).best
        size = torch.stack([leaf.abs().mean(dtype=torch.float64) for leaf in self._leaves]).mean()
        # where the batch has no best step along this direction: one that changes the parameters by little
        rate = torch.where(torch.isfinite(best) & (best > 0), _CAUTIOUS * best, 1e-4 * size + 1e-8)
        # a model of the loss that holds for so small parameters alone says nothing of so long a step: of inputs or
        # targets in the thousands, or of probabilities that are 0 and 1 at first
        return torch.where((size > 0) & (rate > _BELIEVED * size), _MODERATE * size, rate)

    def _horizon(self) -> Tensor:
        """In steps; there are not more than were taken, and the start."""
        count = self._numbers[_COUNT]
        return torch.minimum(torch.clamp_min(_SHARE * count, _SHORTEST), count + 1)

    def _shares(self, loss: Tensor) -> dict[Tensor, Tensor]:
        """By weight, the share of it that is forgotten in this step."""
        if not self.forget:
            return {}
        *_, first, trend = self._numbers
        left = torch.where(first > 0, loss / first, 0.0)
        shares = self._forgetting.shares(trend, left, self._horizon())
        return {self._leaves[position]: self.forget * share for position, share in shares.items()}

    def _move(self, directions: list[Tensor], loss: Tensor, taken: Tensor) -> None:
        count, rate, *_ = self._numbers
        horizon, shares = self._horizon(), self._shares(loss)
        weight = self.power / (count + self.power) if self.power else torch.ones_like(count)
        moves = dict(zip(self._leaves, directions, strict=True))
        for group in self.param_groups:
            length = group["lr"] * rate
            for leaf in group["params"]:
                if leaf not in moves:
                    continue
                state = self.state[leaf]
                kept = 1 - length * group["weight_decay"]
                if leaf in shares:
                    kept = kept * (1 - group["lr"] * shares[leaf]).clamp_min(0)
                moved = leaf * kept.to(leaf) + length.to(leaf) * moves[leaf]
                leaf.copy_(torch.where(taken, moved, leaf))
                # what is pulled to zero is no part of the path: its lead would be that of the pull
                trail = state["trail"]
                trail.copy_(torch.where(taken, trail * kept.to(trail), trail))
                for name, share in (("trail", 1 / horizon), ("average", weight)):
                    mean = state[name]
                    mean.copy_(torch.where(taken, mean + share.to(mean) * (leaf - mean), mean))

    def _swap(self) -> None:
        for leaf in self._leaves:
            average = self.state[leaf]["average"]
            kept = leaf.clone()
            leaf.copy_(average)
            average.copy_(kept)
        self._evaluating = not self._evaluating


def _check(name: str, value: Any, *, below: float = math.inf) -> None:
    if not 0.0 <= number_of(name, value) < below:
        expected = f"a number from 0, below {below:g}" if math.isfinite(below) else "a finite number from 0"
        raise ValueError(f"{name} is {value!r}; expected {expected}.")


def _require(state: dict[str, Any], what: str, names: Iterable[str]) -> None:
    for name in names:
        if name not in state:
            raise ValueError(f"{what} has no {name!r}; expected one that HorizonAdam.state_dict gave.")


def _fresh(leaf: Tensor, rotate: bool) -> dict[str, Tensor]:
    """What is kept for a parameter, before the first step."""
    start = leaf.detach()
    zeros = torch.zeros_like(start)
    axes = eigenbasis.fresh(leaf) if rotate else {}
    return {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "trail": start.clone(), "average": start.clone(), **axes}


def _losses(closure: Callable[..., Any], batch: tuple[Any, ...], has_aux: bool) -> Tensor:
    losses: Tensor = split_aux(closure(*batch), has_aux, "the closure", "loss")[0]
    return losses if losses.ndim == 1 else losses.flatten(1).sum(1)
