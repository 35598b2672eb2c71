"""Training on forward gradients: torch's optimizers and HorizonAdam behind the same call as the other methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetplane import ForwardGradient
from jetplane.optim import HorizonAdam, HorizonReport
from jetplane.solvers import Status

__all__ = ["ForwardReport", "Horizon", "OnForwardGradients"]

_OK, _NONFINITE = map(tuple(Status).index, (Status.OK, Status.NONFINITE))


class ForwardReport(NamedTuple):
    """The last step; of several, stacked, each number (n,)."""

    loss: Tensor  # (), before the step
    aux: Any  # what the function returned beside the losses
    code: Tensor  # (): the place of its status in tuple(Status)


class OnForwardGradients:
    """``step(loss_fn, *batch)`` around a torch optimizer, with two forward passes in place of a backward one.

    ``loss_fn`` returns one loss for each sample.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> opt = OnForwardGradients(torch.optim.SGD([x], lr=0.5), ForwardGradient([x]))
        >>> loss = opt.step(lambda a: (a @ x).square(), torch.eye(2))
        >>> float(loss), x.tolist()  # behind this layer is only the loss, so the gradient is exact
        (12.5, [1.5, 2.0])
    """

    def __init__(self, optimizer: torch.optim.Optimizer, estimate: ForwardGradient) -> None:
        self.optimizer, self.estimate = optimizer, estimate
        self._report: ForwardReport | None = None

    @property
    def report(self) -> ForwardReport:
        """What the last step found."""
        return _known(self._report)

    def step(self, loss_fn: Callable[..., Any], *batch: Any, has_aux: bool = False) -> Tensor:
        """Take one step, and return the mean loss before it."""
        self.optimizer.zero_grad(set_to_none=False)  # a graph goes on with the same tensors
        out = self.estimate(loss_fn, *batch, has_aux=has_aux)
        loss, aux = out if has_aux else (out, None)
        self.optimizer.step()
        self._report = ForwardReport(loss, aux, torch.full_like(loss, _OK, dtype=torch.int64))  # it moves always
        return self._report.loss

    def steps(self, loss_fn: Callable[..., Any], *batches: Tensor, has_aux: bool = False) -> ForwardReport:
        """Take a step with each entry of the batches' first axis."""
        taken = []
        for batch in zip(*batches, strict=True):
            self.step(loss_fn, *batch, has_aux=has_aux)
            taken.append(self.report)
        losses, aux, codes = zip(*taken, strict=True)
        return ForwardReport(torch.stack(losses), torch.stack(aux) if has_aux else None, torch.stack(codes))

    def state_dict(self) -> dict[str, Any]:
        """torch's, and that of the estimate."""
        return {"optimizer": self.optimizer.state_dict(), "estimate": self.estimate.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.estimate.load_state_dict(state["estimate"])


class Horizon:
    """HorizonAdam, with the codes of its steps."""

    def __init__(self, optimizer: HorizonAdam) -> None:
        self.optimizer = optimizer
        self._report: ForwardReport | None = None

    @property
    def report(self) -> ForwardReport:
        """What the last step found."""
        return _known(self._report)

    def step(self, loss_fn: Callable[..., Any], *batch: Any, has_aux: bool = False) -> Tensor:
        """Take one step, and return the mean loss before it."""
        loss = self.optimizer.step(loss_fn, *batch, has_aux=has_aux)
        self._report = _coded(self.optimizer.report)
        return loss

    def steps(self, loss_fn: Callable[..., Any], *batches: Tensor, has_aux: bool = False) -> ForwardReport:
        """Take a step with each entry of the batches' first axis."""
        reports = self.optimizer.steps(loss_fn, *batches, has_aux=has_aux)
        self._report = _coded(self.optimizer.report)
        return _coded(reports)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """The averaged parameters in the model, inside."""
        return self.optimizer.averaged()

    def state_dict(self) -> dict[str, Any]:
        """HorizonAdam's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.optimizer.load_state_dict(state)


def _known(report: ForwardReport | None) -> ForwardReport:
    if report is None:
        raise RuntimeError("there is no report before the first step; expected a call of step.")
    return report


def _coded(found: HorizonReport) -> ForwardReport:
    return ForwardReport(found.loss, found.aux, torch.where(found.taken, _OK, _NONFINITE))
