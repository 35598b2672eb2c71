r"""Zeroth order: slopes from losses alone, by finite differences. What forward-only training is to be compared with.

The parts are those of the other optimizers, but for the pass: directions v_k from the counter, K losses or pairs of
losses where a pass would carry tangents, and coefficients from them,

    theta += lr * sum_k c_k v_k.

The parameters are moved to each point and back in place, with rows made anew each time, so that nothing is held but one
parameter's row, as the papers have it. They come back but for rounding. Every evaluation sees the same random numbers
and buffers.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.finite import finite
from ..ad.run.casting import casts_around, uncast
from ..ad.run.directions import Directions
from ..ad.run.passes import check_leaf
from ..compiler.several import entries, stacked
from ..directions import Family, Gaussian, Plane, Rademacher
from ..solvers import Status
from .closures import Closures, as_closures
from .moving import (
    Moving,
    check_distinct,
    check_group,
    check_together,
    check_whole,
    labels,
    listed,
    moving_of,
    number_of,
)
from .reentry import outermost
from .reports import Report, Reports

__all__ = ["FZOO", "MeZO", "ZerothOrder"]


class Differences(NamedTuple):
    """What the losses around theta say."""

    loss: Tensor  # () at theta, or the mean of those on both sides
    slope: Tensor  # (K,), v_k . grad f, but for an error of the order of eps or eps^2
    coefficients: Tensor  # (K,)


class ZerothOrder(torch.optim.Optimizer, ABC):
    """A step along K directions by losses alone; what it evaluates, and how far it goes, is :meth:`measure`'s.

    ``step`` takes a closure that returns the loss, a function and its batch, or a list of closures whose losses are
    averaged; losses of single samples (B,) count as their mean. ``report.evaluations`` counts the calls. Seed and
    number of the step lie in ``param_groups``, so ``state_dict`` resumes. ``weight_decay`` is decoupled. A step that is
    not finite moves nothing but by rounding, and its reason is in ``report.status``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        directions: Family,
        eps: float,
        *,
        seed: int = 0,
        weight_decay: float = 0.0,
    ) -> None:
        if not (math.isfinite(number_of("eps", eps)) and eps > 0):
            raise ValueError(f"eps is {eps!r}; expected a finite positive number, the length of a perturbation.")
        check_whole("seed", seed, 0, 2**64 - 1)
        self.directions, self.eps = directions, eps
        self._report: Report | None = None
        super().__init__(listed(params), {"lr": lr, "weight_decay": weight_decay, "seed": seed, "step": 0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with options of its own (lr, weight_decay)."""
        before = len(getattr(self, "param_groups", []))
        if isinstance(param_group, dict) and not isinstance(param_group.get("params"), Tensor | set | None):
            param_group = {**param_group, "params": list(param_group["params"])}
            check_distinct(param_group["params"], getattr(self, "param_groups", []))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            for leaf, label in zip(group["params"], labels(group, "the new group's "), strict=True):
                check_leaf(leaf, label)
        except Exception:
            del self.param_groups[before:]
            raise

    @abstractmethod
    def measure(self, losses: _Around, k: int) -> Differences:
        """Evaluate the loss around theta, along K directions."""

    @property
    def report(self) -> Report:
        """What the last step found and did."""
        if self._report is None:
            raise RuntimeError("there is no report before the first step; expected a call of step.")
        return self._report

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: torch's keeps no attributes."""
        return {**super().__getstate__(), "directions": self.directions, "eps": self.eps, "_report": None}

    @_torch.apart_from_graphs
    @outermost
    @torch.no_grad()
    def step(self, closure: Any = None, *batch: Any, has_aux: bool = False) -> Tensor:  # type: ignore[override]
        """Take one step, and return the loss before it, or what stands for it."""
        closures, moving = as_closures(closure, batch), moving_of(self.param_groups)
        if not moving.tensors:
            program = Closures(closures, [], [], repeats=False, has_aux=has_aux)
            self._report = Report.still(program.loss(), program.evaluations, program.aux)
            return self._report.loss
        check_together(moving, 0)
        casts = casts_around(moving.device)
        program = Closures([casts.around(one) for one in closures], *moving[:2], repeats=True, has_aux=has_aux)
        group = self.param_groups[0]
        rows = self.directions.draw(Plane(group["seed"], group["step"], 0, moving.tensors, program.gradient))
        with uncast(casts):
            found = self.measure(_Around(program, moving.tensors, rows, self.eps), rows.k)
            self._report = self._moved(found, moving, rows, program)
        done = group["step"] + 1
        for each in self.param_groups:
            each["step"] = done
        return self._report.loss

    def steps(self, closure: Any, *batches: Tensor, has_aux: bool = False) -> Reports:
        """Take a step with each entry of the batches' first axis, and return their reports."""
        taken = []
        for number in range(entries(closure, batches)):
            self.step(closure, *(batch[number] for batch in batches), has_aux=has_aux)
            taken.append(self.report)
        aux = _torch.pytree.tree_map(stacked, *(one.aux for one in taken)) if has_aux else None
        return Reports.of(taken, aux)

    def _moved(self, found: Differences, moving: Moving, rows: Directions, program: Closures) -> Report:
        """Move the parameters, where all is finite; the report."""
        loss, slope, coefficients = found
        status = Status.OK if finite([loss, slope, coefficients]) else Status.NONFINITE
        if status is Status.OK and not bool(coefficients.any()):
            status = Status.FLAT
        if status is Status.OK:
            each = zip(moving.tensors, moving.lrs, moving.decays, strict=True)
            for position, (leaf, lr, decay) in enumerate(each):
                leaf.mul_(1 - lr * decay)
                for k in range(rows.k):
                    leaf.add_(rows.rows(position, leaf, k, k + 1)[0] * (lr * coefficients[k]).to(leaf))
        else:
            coefficients = torch.zeros_like(coefficients)
        flat = slope.new_zeros(rows.k, rows.k)
        predicted = -(coefficients @ slope) * max(moving.lrs)
        return Report(loss, slope, flat, coefficients, predicted, None, status, program.evaluations, program.aux)


class _Around:
    """The loss at theta, and on either side of it."""

    def __init__(self, program: Closures, leaves: list[Tensor], rows: Directions, eps: float) -> None:
        self._program, self._leaves, self._rows, self._eps = program, leaves, rows, eps

    def here(self) -> Tensor:
        """(), at theta."""
        return self._program.loss().to(torch.float64)

    def beyond(self, k: int) -> Tensor:
        """(), at theta + eps v_k."""
        with self._moving(k) as move:
            move(self._eps)
            return self.here()

    def both(self, k: int) -> tuple[Tensor, Tensor]:
        """(), at theta + eps v_k and at theta - eps v_k, by three moves in place."""
        with self._moving(k) as move:
            move(self._eps)
            plus = self.here()
            move(-2 * self._eps)
            return plus, self.here()

    @contextlib.contextmanager
    def _moving(self, k: int) -> Iterator[Callable[[float], None]]:
        """A function that moves the parameters along v_k by a factor; afterwards they are moved back."""
        moved = [0.0]

        def move(by: float) -> None:
            moved.append(by)
            self._shift(k, by)

        try:
            yield move
        finally:
            self._shift(k, -sum(moved))

    def _shift(self, k: int, by: float) -> None:
        for position, leaf in enumerate(self._leaves):
            leaf.add_(self._rows.rows(position, leaf, k, k + 1)[0], alpha=by)
        torch.clear_autocast_cache()  # it would hold casts of the parameters before they moved


class MeZO(ZerothOrder):
    r"""MeZO [1]_: SPSA with Gaussian directions, from both sides, in place.

        g_k = (f(theta + eps v_k) - f(theta - eps v_k)) / (2 eps),    theta -= lr * mean_k g_k v_k.

    2 K evaluations a step. ``report.loss`` is the mean over all of them, for f(theta) itself is not evaluated, and aux
    is that of the first.

    .. [1] Malladi et al., Fine-tuning language models with just forward passes, 2023.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> opt = MeZO([x], lr=0.1)
        >>> losses = [float(opt.step(lambda: x.square().sum())) for _ in range(100)]
        >>> assert losses[-1] < 1e-2 * losses[0] and opt.report.evaluations == 2
    """

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-6, k: int = 1, *, eps: float = 1e-3, **options: Any
    ) -> None:
        super().__init__(params, lr, Gaussian(k), eps, **options)

    def measure(self, losses: _Around, k: int) -> Differences:
        """Both sides of each direction; the mean of g_k v_k."""
        pairs = torch.stack([torch.stack(losses.both(number)) for number in range(k)])
        slope = (pairs[:, 0] - pairs[:, 1]) / (2 * self.eps)
        return Differences(pairs.mean(), slope, -slope / k)


class FZOO(ZerothOrder):
    r"""FZOO [1]_: K directions of signs, from one side, with steps in units of the losses' standard deviation.

        l_k = f(theta + eps u_k),    g = mean_k (l_k - f(theta)) u_k / eps,    theta -= lr * g / std(l),

    with K - 1 in the denominator of the variance. As std(l) is about eps |grad f|, an ``lr`` that moves a parameter by
    about d a step is eps d sqrt(K). K + 1 evaluations a step.

    .. [1] Dang et al., FZOO: fast zeroth-order optimizer for fine-tuning large language models towards Adam-scale
       speed, 2025.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> opt = FZOO([x], lr=1e-4)
        >>> losses = [float(opt.step(lambda: x.square().sum())) for _ in range(100)]
        >>> assert losses[-1] < 0.1 * losses[0] and opt.report.evaluations == 9
    """

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-6, k: int = 8, *, eps: float = 1e-3, **options: Any
    ) -> None:
        directions = Rademacher(k)  # checks k
        if k < 2:
            raise ValueError(f"k is {k}; expected at least two directions, whose losses have a deviation.")
        super().__init__(params, lr, directions, eps, **options)

    def measure(self, losses: _Around, k: int) -> Differences:
        """One side of each direction; a loss without deviation has nowhere to go."""
        here = losses.here()
        beyond = torch.stack([losses.beyond(number) for number in range(k)])
        slope, deviation = (beyond - here) / self.eps, beyond.std(correction=1)
        step = -slope / (k * deviation)
        return Differences(here, slope, torch.where(deviation == 0, torch.zeros_like(step), step))
