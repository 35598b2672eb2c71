"""Training on forward gradients: torch's optimizers and HorizonAdam behind the same call as the other methods."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetplane import ForwardGradient
from jetplane.optim import HorizonAdam
from jetplane.compiler.replayed import Replayed, repeated
from jetplane.solvers import Status

__all__ = ["ForwardReport", "Horizon", "OnForwardGradients"]

_OK, _NONFINITE = map(tuple(Status).index, (Status.OK, Status.NONFINITE))


class ForwardReport(NamedTuple):
    """The last step; of several, stacked, each number (n,)."""

    loss: Tensor  # (), before the step
    aux: Any  # what the function returned beside the losses
    code: Tensor  # (): the place of its status in tuple(Status)


class _Replaying(abc.ABC):
    """Takes several steps in a row, on CUDA as graphs. Steps of one kind launch the same operations."""

    def __init__(self) -> None:
        self._report: ForwardReport | None = None
        # by kind, the rates first: what it was captured of, and the graph
        self._replayed: dict[tuple[Any, ...], tuple[Any, Replayed]] = {}

    @property
    def report(self) -> ForwardReport:
        """What the last step found."""
        if self._report is None:
            raise RuntimeError("there is no report before the first step; expected a call of step.")
        return self._report

    @abc.abstractmethod
    def step(self, loss_fn: Callable[..., Any], *batch: Any, has_aux: bool = False) -> Tensor:
        """Take one step, and return the mean loss before it."""

    def steps(self, loss_fn: Callable[..., Any], *batches: Tensor, has_aux: bool = False) -> ForwardReport:
        """Take a step with each entry of the batches' first axis."""
        outputs = self._several(loss_fn, batches, has_aux)
        losses, codes, *aux = outputs
        self._report = ForwardReport(losses[-1], aux[0][-1] if aux else None, codes[-1])
        return ForwardReport(losses, aux[0] if aux else None, codes)

    @abc.abstractmethod
    def _several(self, loss_fn: Callable[..., Any], batches: Sequence[Tensor], has_aux: bool) -> list[Tensor]:
        """Losses and codes, and aux if there is one, of several steps."""

    def _alike(
        self, kind: tuple[Any, ...], loss_fn: Callable[..., Any], batches: Sequence[Tensor], has_aux: bool
    ) -> list[Tensor]:
        """Steps of one kind."""
        fed, launch = dict(enumerate(batches)), partial(self._launch, loss_fn, has_aux)
        if not batches[0].is_cuda:
            return repeated(launch, batches, fed, len(batches[0]))
        held = self._replayed.get(kind)
        if held is None or held[0] != (loss_fn, has_aux):
            held = self._replayed[kind] = (loss_fn, has_aux), Replayed(launch)
        return held[1]([batch[0] for batch in batches], fed, len(batches[0]))

    def _forget(self, rates: tuple[float, ...]) -> None:
        """Drop the graphs of other rates: a graph has them as numbers."""
        self._replayed = {kind: graph for kind, graph in self._replayed.items() if kind[0] == rates}

    def _launch(self, loss_fn: Callable[..., Any], has_aux: bool, batch: Sequence[Tensor]) -> list[Tensor]:
        self.step(loss_fn, *batch, has_aux=has_aux)
        report = self.report
        return [report.loss, report.code, *([report.aux] if has_aux else [])]


class OnForwardGradients(_Replaying):
    """``step(loss_fn, *batch)`` around a torch optimizer, with two forward passes in place of a backward one.

    ``loss_fn`` returns one loss for each sample. In a CUDA graph the rates of an optimizer that is ``capturable`` are
    read from the device, so that a schedule needs no new graph.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> opt = OnForwardGradients(torch.optim.SGD([x], lr=0.5), ForwardGradient([x]))
        >>> loss = opt.step(lambda a: (a @ x).square(), torch.eye(2))
        >>> float(loss), x.tolist()  # behind this layer is only the loss, so the gradient is exact
        (12.5, [1.5, 2.0])
    """

    def __init__(self, optimizer: torch.optim.Optimizer, estimate: ForwardGradient) -> None:
        super().__init__()
        self.optimizer, self.estimate = optimizer, estimate
        capturable = [group for group in optimizer.param_groups if group.get("capturable")]
        self._rates = [torch.zeros((), device=group["params"][0].device) for group in capturable]

    def step(self, loss_fn: Callable[..., Any], *batch: Any, has_aux: bool = False) -> Tensor:
        """Take one step, and return the mean loss before it."""
        self.optimizer.zero_grad(set_to_none=False)  # a graph goes on with the same tensors
        out = self.estimate(loss_fn, *batch, has_aux=has_aux)
        loss, aux = out if has_aux else (out, None)
        with self._on_device():
            self.optimizer.step()
        self._report = ForwardReport(loss, aux, torch.full_like(loss, _OK, dtype=torch.int64))  # it moves always
        return self._report.loss

    def _several(self, loss_fn: Callable[..., Any], batches: Sequence[Tensor], has_aux: bool) -> list[Tensor]:
        rates = _rates(self.optimizer)
        if self._rates:
            for held, rate in zip(self._rates, rates, strict=True):
                held.fill_(rate)
            rates = ()  # one graph for all of them
        self._forget(rates)
        return self._alike((rates,), loss_fn, batches, has_aux)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """The rates as tensors inside, where a graph is captured of them; a scheduler sees numbers."""
        if not (self._rates and torch.cuda.is_current_stream_capturing()):
            yield
            return
        groups = self.optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """torch's, and that of the estimate."""
        return {"optimizer": self.optimizer.state_dict(), "estimate": self.estimate.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.estimate.load_state_dict(state["estimate"])
        self._replayed = {}  # a graph has the addresses of what was there before


class Horizon(_Replaying):
    """HorizonAdam. In a CUDA graph a step that measures its path is one of another kind than one that does not."""

    def __init__(self, optimizer: HorizonAdam) -> None:
        super().__init__()
        self.optimizer = optimizer

    def step(self, loss_fn: Callable[..., Any], *batch: Any, has_aux: bool = False) -> Tensor:
        """Take one step, and return the mean loss before it."""
        loss = self.optimizer.step(loss_fn, *batch, has_aux=has_aux)
        found = self.optimizer.report
        code = torch.where(found.taken, _OK, _NONFINITE)
        self._report = ForwardReport(loss, found.aux, code)
        return loss

    def _several(self, loss_fn: Callable[..., Any], batches: Sequence[Tensor], has_aux: bool) -> list[Tensor]:
        parts: list[list[Tensor]] = []
        rates = _rates(self.optimizer)
        self._forget(rates)
        done, count = 0, len(batches[0])
        while done < count:
            calls = self.optimizer.calls
            ahead = min(self._ahead(), count - done)
            part = [batch[done : done + ahead] for batch in batches]
            if part[0].is_cuda:
                self.optimizer.refresh()  # the graph does not
            if calls:
                parts.append(self._alike((rates, self.optimizer.measures), loss_fn, part, has_aux))
            else:  # the first step, which finds a rate, is like no other
                parts.append(repeated(partial(self._launch, loss_fn, has_aux), part, dict(enumerate(part)), ahead))
            self.optimizer.calls = calls + ahead  # those of a graph were not seen, and its capture was no step
            done += ahead
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    def _ahead(self) -> int:
        """How many steps of one kind come next."""
        calls, every = self.optimizer.calls, self.optimizer.every
        return 1 if calls == 0 or self.optimizer.measures else every - calls % every

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """The averaged parameters in the model, inside."""
        return self.optimizer.averaged()

    def state_dict(self) -> dict[str, Any]:
        """HorizonAdam's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.optimizer.load_state_dict(state)
        self._replayed = {}


def _rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in optimizer.param_groups)
