"""What an optimizer says about its last step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.algebra.jet import Quadratic
from ..solvers import Status
from ..solvers.traced import CODES


class Report(NamedTuple):
    """The last step: theta += lr * sum_k c_k v_k in the plane of the directions v_k.

    Loss, slope and curvature are those of what the closure returns, also where it is maximised; ``predicted`` and
    ``actual`` count in the wanted direction. With ``samples`` > 1 slope, curvature and coefficients have a leading axis
    of that length, and ``predicted`` is the mean over the planes.

    Example:
        >>> from jetplane.optim import FoMoHKD
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> opt = FoMoHKD([x], lr=1.0, k=2)
        >>> loss = opt.step(lambda: x.square().sum())
        >>> opt.report.status.name, opt.report.slope.shape, opt.report.curvature.shape
        ('OK', torch.Size([2]), torch.Size([2, 2]))
        >>> torch.testing.assert_close(opt.report.predicted, loss)  # all of it: a quadratic function in its plane
    """

    loss: Tensor  # (), before the step
    slope: Tensor  # (K,): V g
    curvature: Tensor  # (K, K): V H V^T
    coefficients: Tensor  # (K,): c, after clipping and backtracking
    predicted: Tensor  # (): decrease by the quadratic model, for the step that lr and c make
    actual: Tensor | None  # (): decrease of the loss by that step, where it was evaluated; without weight decay
    status: Status  # OK, or why the parameters were not moved
    evaluations: int  # calls of closures
    aux: Any = None  # what the closure returned beside the loss, with has_aux=True

    @staticmethod
    def still(loss: Tensor, evaluations: int, aux: Any) -> Report:
        """Where no parameter requires grad: nothing moves and nothing is wrong, as with torch's optimizers."""
        slope, nothing = loss.new_zeros(0), loss.new_zeros(())
        return Report(loss, slope, loss.new_zeros(0, 0), slope, nothing, None, Status.FLAT, evaluations, aux)


class Packing(NamedTuple):
    """The report of a compiled step as one vector, so that one copy takes it off the device's buffers."""

    k: int
    dtype: torch.dtype  # of the loss
    evaluated: bool = False  # whether the loss was evaluated at the end of the step

    @staticmethod
    def pack(
        model: Quadratic, coefficients: Tensor, predicted: Tensor, code: Tensor, actual: Tensor | None = None
    ) -> Tensor:
        """(3 + 2 K + K^2,) in float64: loss, predicted, status, slope, coefficients, curvature; actual where known."""
        parts = [model.loss.reshape(1), predicted.reshape(1), code.reshape(1), model.slope, coefficients]
        parts += [model.curvature.reshape(-1), *([] if actual is None else [actual.reshape(1)])]
        return torch.cat([part.to(torch.float64) for part in parts])


class Reports:
    """The reports of several steps, their numbers stacked along a first axis.

    They may still be under way on the device; only what is turned into numbers of Python waits for them.
    """

    def __init__(self, packed: Tensor, packing: Packing, aux: Any) -> None:
        self._packed = packed  # (n, 3 + 2 K + K^2), and one more where the loss was evaluated
        self._packing = packing
        self._k, self._dtype = packing.k, packing.dtype
        self.aux = aux  # what the closure returned beside the loss, each tensor (n, ...)

    @staticmethod
    def of(reports: Sequence[Report | LateReport], aux: Any) -> Reports:
        """The reports of steps that were taken one by one."""
        evaluated = any(one.actual is not None for one in reports)
        unknown = torch.full_like(reports[0].loss, math.nan)
        packed = [
            Packing.pack(
                Quadratic(one.loss, one.slope, one.curvature),
                one.coefficients,
                one.predicted,
                torch.tensor(CODES.index(one.status), device=one.loss.device),
                (unknown if one.actual is None else one.actual) if evaluated else None,
            )
            for one in reports
        ]
        packing = Packing(reports[0].slope.shape[-1], reports[0].loss.dtype, evaluated)
        return Reports(torch.stack(packed), packing, aux)

    def __len__(self) -> int:
        return self._packed.shape[0]

    def __getitem__(self, number: int) -> LateReport:
        """The report of one step."""
        aux = self.aux
        if aux is not None:
            aux = _torch.pytree.tree_map_only(Tensor, lambda tensor: tensor[number], aux)
        return LateReport(self._packed[number], self._packing, aux)

    @property
    def loss(self) -> Tensor:  # (n,)
        return self._packed[:, 0].to(self._dtype)

    @property
    def predicted(self) -> Tensor:  # (n,)
        return self._packed[:, 1].to(self._dtype)

    @property
    def actual(self) -> Tensor | None:  # (n,): not a number for a step that could not be evaluated
        return self._packed[:, -1].to(self._dtype) if self._packing.evaluated else None

    @property
    def code(self) -> Tensor:  # (n,): places of the statuses in tuple(Status)
        return self._packed[:, 2].to(torch.int64)

    @property
    def status(self) -> list[Status]:
        return [CODES[code] for code in self.code.tolist()]

    @property
    def slope(self) -> Tensor:  # (n, K)
        return self._packed[:, 3 : 3 + self._k].to(self._dtype)

    @property
    def coefficients(self) -> Tensor:  # (n, K)
        return self._packed[:, 3 + self._k : 3 + 2 * self._k].to(self._dtype)

    @property
    def curvature(self) -> Tensor:  # (n, K, K)
        start = 3 + 2 * self._k
        return self._packed[:, start : start + self._k**2].reshape(-1, self._k, self._k).to(self._dtype)


class LateReport:
    """The report of one step whose numbers may still be under way: only asking for the status waits for them."""

    def __init__(self, packed: Tensor, packing: Packing, aux: Any) -> None:
        self._packed, self._packing = packed, packing
        self.aux = aux
        self.evaluations = 2 if packing.evaluated else 1

    @cached_property
    def _one(self) -> Reports:
        return Reports(self._packed.unsqueeze(0), self._packing, None)

    @property
    def loss(self) -> Tensor:
        return self._one.loss[0]

    @property
    def predicted(self) -> Tensor:
        return self._one.predicted[0]

    @property
    def actual(self) -> Tensor | None:
        actual = self._one.actual
        return None if actual is None else actual[0]

    @property
    def status(self) -> Status:
        return self._one.status[0]

    @property
    def slope(self) -> Tensor:
        return self._one.slope[0]

    @property
    def coefficients(self) -> Tensor:
        return self._one.coefficients[0]

    @property
    def curvature(self) -> Tensor:
        return self._one.curvature[0]
