"""torch's optimizers behind the same call as the forward-only ones: reverse mode, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetplane.solvers import Status

__all__ = ["Backprop", "BackpropReport"]


class BackpropReport(NamedTuple):
    """The last step of a torch optimizer."""

    loss: Tensor  # (), before the step
    aux: Any  # what the function returned beside the loss
    status: Status = Status.OK  # a torch optimizer moves always


class Backprop:
    """``step(loss_fn, *batch, has_aux=True)`` around a torch optimizer, with one backward pass.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> opt = Backprop(torch.optim.SGD([x], lr=0.5))
        >>> loss = opt.step(lambda: (x.square().sum(), "seen"), has_aux=True)
        >>> float(loss), x.tolist(), opt.report.aux
        (25.0, [0.0, 0.0], 'seen')
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer  # what a scheduler is given
        self._report: BackpropReport | None = None

    @property
    def report(self) -> BackpropReport:
        """What the last step found."""
        if self._report is None:
            raise RuntimeError("there is no report before the first step; expected a call of step.")
        return self._report

    def step(self, loss_fn: Callable[..., Any], *batch: Any, has_aux: bool = False) -> Tensor:
        """Take one step, and return the loss before it."""
        with torch.enable_grad():
            out = loss_fn(*batch)
            loss, aux = out if has_aux else (out, None)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        self.optimizer.step()
        self._report = BackpropReport(loss.detach(), aux)
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """torch's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.optimizer.load_state_dict(state)
