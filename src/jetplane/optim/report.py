"""What an optimizer says about its last step."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..solvers import Status


class Report(NamedTuple):
    """The last step: theta += lr * sum_k c_k v_k in the plane of the directions v_k.

    Loss, slope and curvature are those of what the closure returns, also where it is maximised; ``predicted`` and
    ``actual`` count in the wanted direction. With ``samples`` > 1 slope, curvature and coefficients have a leading axis
    of that length, and ``predicted`` is the mean over the planes.
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
