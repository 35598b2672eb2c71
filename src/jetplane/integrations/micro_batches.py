"""A step with a batch that a trainer hands over in parts: what the modules for each trainer have in common.

A trainer computes a loss, calls backward, and calls the optimizer at the end of a batch. Here it hands over the program
of each part, and at the last one the step is taken with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ..ad import _torch
from ..ad.run.replay import Replay
from ..gradients import ForwardGradient
from ..optim import HorizonAdam, HyperplaneSearch, Report, ZerothOrder
from ..optim.reports import LateReport
from ..solvers import Status
from .sample_losses import loss_in, losses_of_samples

__all__ = ["MicroBatch", "MicroBatches", "report_numbers"]

Found = tuple[Tensor, Any]  # the loss, and what the program returned


class MicroBatch(NamedTuple):
    """A part of a batch."""

    program: Callable[[], Any]  # returns the loss, or a pair or mapping that holds it
    samples: int | None  # how many there are in it, where that is known
    scale: float = 1.0  # of the loss, for a mean over the parts to be the loss of the batch


class MicroBatches:
    """Steps of an optimizer of jetplane, or of any other one with forward gradients, with batches in parts.

    ``estimate`` makes the gradients of an optimizer that needs them, by default one of the parameters that it moves,
    with all processes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, estimate: ForwardGradient | None = None) -> None:
        own = isinstance(optimizer, HyperplaneSearch | HorizonAdam | ZerothOrder)
        name = type(optimizer).__name__
        if own and estimate is not None:
            raise ValueError(f"there is an estimate, and {name} makes its own steps; expected estimate=None.")
        if getattr(optimizer, "compile", False) or getattr(estimate, "compile", False):
            raise ValueError(
                f"compile is True for {name}, and a trainer makes a new program of each batch; expected compile=False."
            )
        group = distributed.group.WORLD if distributed.is_available() and distributed.is_initialized() else None
        if not own and estimate is None:
            leaves = [p for one in optimizer.param_groups for p in one["params"] if p.requires_grad]
            estimate = ForwardGradient(leaves, process_group=group)
        crew = getattr(optimizer, "_crew", None) if estimate is None else estimate.crew
        if group is not None and group.size() > 1 and (crew is None or crew.processes is None):
            raise ValueError(
                f"there are {group.size()} processes, and {name if estimate is None else 'the estimate'} has no "
                "process_group; expected process_group=torch.distributed.group.WORLD, for no gradient is averaged."
            )
        self.optimizer, self.estimate = optimizer, estimate
        self._held: list[MicroBatch] = []

    @property
    def gradients(self) -> bool:
        """Whether the optimizer steps along ``.grad``, which is to be found first."""
        return self.estimate is not None

    @property
    def _together(self) -> bool:
        """Whether the optimizer's planes are those of several processes."""
        return isinstance(self.optimizer, HyperplaneSearch) and self.optimizer._crew.processes is not None

    def hold(self, part: MicroBatch) -> None:
        """Keep a part of a batch for the step."""
        self._held.append(part)

    def look(self, part: MicroBatch) -> Found:
        """What a part's program returns. It leaves no trace in buffers or random numbers."""
        replay = Replay([leaf.device for group in self.optimizer.param_groups for leaf in group["params"]])
        with torch.no_grad():
            returned = _torch.pytree.tree_map_only(Tensor, _copied, replay.run(part.program))
        replay.rewind()
        return loss_in(returned).mean(), returned

    def step(self, last: MicroBatch, has_aux: bool = False) -> Found:
        """Take the step with all parts; the loss of the batch, and what the last part's program returned."""
        parts, self._held = [*self._held, last], []
        apart = isinstance(self.optimizer, HorizonAdam)
        closures = [_closure(part, apart, has_aux) for part in parts]
        optimizer: Any = self.optimizer
        # a trainer averages parts and processes evenly, whatever samples they have
        even = {"weight": [1.0] * len(parts)} if self._together else {}
        loss: Tensor = optimizer.step(closures[0] if len(closures) == 1 else closures, has_aux=has_aux, **even)
        aux = optimizer.report.aux if has_aux else None
        return loss.detach(), aux if len(parts) == 1 else aux and aux[-1]

    def differentiate(self, part: MicroBatch, has_aux: bool = False) -> Found:
        """Add the forward gradient of a part's loss to ``.grad``; the loss, and what the program returned."""
        assert self.estimate is not None
        found = self.estimate(_closure(part, True, has_aux), has_aux=has_aux)
        loss, aux = found if has_aux else (found, None)
        return loss.detach(), aux

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged parameters of an optimizer that has them, to be evaluated."""
        inside = self.optimizer.averaged() if isinstance(self.optimizer, HorizonAdam) else nullcontext()
        with inside:
            yield

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, with that of the estimate."""
        state = self.optimizer.state_dict()
        return state if self.estimate is None else {**state, "forward_gradient": self.estimate.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; from an optimizer's own state with new noise."""
        state = dict(state)
        kept = state.pop("forward_gradient", None)
        self.optimizer.load_state_dict(state)
        if self.estimate is not None and kept is not None:
            self.estimate.load_state_dict(kept)


def report_numbers(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """What an optimizer's last report says, as numbers for a log; nothing before the first step.

    Example:
        >>> from jetplane.optim import FoMoH
        >>> x = torch.tensor([3.0], requires_grad=True)
        >>> opt = FoMoH([x])
        >>> report_numbers(opt)
        {}
        >>> loss = opt.step(lambda: x.square().sum())
        >>> sorted(report_numbers(opt))
        ['coefficients', 'curvature', 'moved', 'predicted', 'slope']
    """
    try:
        report = optimizer.report  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return {}
    if isinstance(report, Report | LateReport):
        numbers = {
            "slope": report.slope.norm(),
            "curvature": report.curvature.norm(),
            "coefficients": report.coefficients.norm(),
            "predicted": report.predicted,
            "moved": torch.tensor(float(report.status is Status.OK)),
        }
        if report.actual is not None:
            numbers["actual"] = report.actual
    else:
        numbers = {"rate": report.rate, "lead": report.lead, "moved": report.taken}
    return {name: float(number) for name, number in numbers.items()}


def _closure(part: MicroBatch, apart: bool, has_aux: bool) -> Callable[[], Any]:
    """The program as an optimizer takes it: the loss, or the losses of its samples."""

    def closure() -> Any:
        if apart:
            loss, returned = losses_of_samples(part.program, part.samples)
        else:
            returned = part.program()
            loss = loss_in(returned)
        loss = loss if part.scale == 1.0 else loss * part.scale
        return (loss, returned) if has_aux else loss

    return closure


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
