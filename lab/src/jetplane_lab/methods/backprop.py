"""torch's optimizers behind the same call as the forward-only ones: reverse mode, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetplane.compiler.replayed import Replayed, repeated
from jetplane.solvers import Status

__all__ = ["Backprop", "BackpropReport", "BackpropReports"]


class BackpropReport(NamedTuple):
    """The last step of a torch optimizer."""

    loss: Tensor  # (), before the step
    aux: Any  # what the function returned beside the loss
    status: Status = Status.OK  # a torch optimizer moves always


class BackpropReports(NamedTuple):
    """Several steps, stacked."""

    loss: Tensor  # (n,)
    aux: Tensor | None  # (n, ...)


class Backprop:
    """``step(loss_fn, *batch, has_aux=True)`` around a torch optimizer, with one backward pass.

    With ``compile`` the forward and the backward pass of ``steps`` are compiled, so that a comparison with compiled
    forward-only steps is one of methods.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> opt = Backprop(torch.optim.SGD([x], lr=0.5))
        >>> loss = opt.step(lambda: (x.square().sum(), "seen"), has_aux=True)
        >>> float(loss), x.tolist(), opt.report.aux
        (25.0, [0.0, 0.0], 'seen')
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, compile: bool = False) -> None:
        self.optimizer = optimizer  # what a scheduler is given
        self._compile = compile
        self._compiled: tuple[Any, Callable[..., Any]] | None = None  # the function, and what became of it
        self._report: BackpropReport | None = None
        self._replayed: tuple[Any, Replayed] | None = None

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

    def steps(self, loss_fn: Callable[..., Any], *batches: Tensor, has_aux: bool = False) -> BackpropReports:
        """Take a step with each entry of the batches' first axis. On CUDA they are replayed as a graph, as ours are."""
        if self._compile:
            if self._compiled is None or self._compiled[0] != loss_fn:
                self._compiled = loss_fn, torch.compile(loss_fn)
            loss_fn = self._compiled[1]
        count = len(batches[0])
        fed = dict(enumerate(batches))
        if not batches[0].is_cuda:
            outputs = repeated(partial(self._launch, loss_fn, has_aux), batches, fed, count)
        else:
            rates = tuple(float(group["lr"]) for group in self.optimizer.param_groups)  # the graph has them as numbers
            if self._replayed is None or self._replayed[0] != (rates, has_aux):
                self._replayed = (rates, has_aux), Replayed(partial(self._launch, loss_fn, has_aux))
            outputs = self._replayed[1]([batch[0] for batch in batches], fed, count)
        self._report = BackpropReport(outputs[0][-1], outputs[1][-1] if has_aux else None)
        return BackpropReports(outputs[0], outputs[1] if has_aux else None)

    def _launch(self, loss_fn: Callable[..., Any], has_aux: bool, batch: Sequence[Tensor]) -> list[Tensor]:
        self.step(loss_fn, *batch, has_aux=has_aux)
        return [self.report.loss, self.report.aux] if has_aux else [self.report.loss]

    def state_dict(self) -> dict[str, Any]:
        """torch's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.optimizer.load_state_dict(state)
