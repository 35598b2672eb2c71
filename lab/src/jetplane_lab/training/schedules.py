"""Schedules of lr. Each is stepped once after an epoch with the running train NLL, and its state is plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, ReduceLROnPlateau, StepLR

from ..config import Config

__all__ = ["MakeScheduler", "Rise", "Schedule", "make"]

MakeScheduler = Callable[[Optimizer], LRScheduler]


class Schedule(Protocol):
    """Sets the lr of the next epoch."""

    def step(self, train_nll: float) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Constant:
    """lr stays."""

    def step(self, train_nll: float) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Rise:
    """lr times ``gamma`` when the running train NLL begins to rise.

    It rises when its mean over the last ``patience`` epochs is above its mean over the ``patience`` epochs before. Then
    lr is reduced and the comparison begins anew, so that lr stays for at least 2 * ``patience`` epochs and every
    reduction is judged by epochs that it governed. With ``patience`` 1 that is: above the epoch before. Means over
    windows, because the NLL of a method with random directions goes up and down by chance from epoch to epoch.

    Example:
        >>> import torch
        >>> opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> rise = Rise(opt, gamma=0.1, patience=2)
        >>> for nll in (5.0, 4.0, 4.5, 3.5, 4.0):  # means of two: 4.5 4.25 4.0 3.75
        ...     rise.step(nll)
        >>> opt.param_groups[0]["lr"]
        1.0
        >>> rise.step(4.25)  # 4.125 above 4.0
        >>> opt.param_groups[0]["lr"]
        0.1
    """

    def __init__(self, optimizer: Optimizer, gamma: float, patience: int) -> None:
        self._optimizer, self._gamma, self._patience = optimizer, gamma, patience
        self._recent: list[float] = []  # since the last reduction, at most 2 * patience

    def step(self, train_nll: float) -> None:
        """Take in an epoch's NLL, and reduce lr if it rises."""
        self._recent = [*self._recent, train_nll][-2 * self._patience :]
        if len(self._recent) < 2 * self._patience:
            return
        if sum(self._recent[self._patience :]) > sum(self._recent[: self._patience]):
            for group in self._optimizer.param_groups:
                group["lr"] *= self._gamma
            self._recent = []

    def state_dict(self) -> dict[str, Any]:
        """The NLL of the epochs that are compared; lr itself is the optimizer's."""
        return {"recent": self._recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._recent = list(state["recent"])


class Torch:
    """Any of torch's schedulers."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler

    def step(self, train_nll: float) -> None:
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(train_nll)
        else:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self._scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(state)


def make(config: Config, optimizer: Optimizer, custom: MakeScheduler | None = None) -> Schedule:
    """The schedule of ``config``; ``custom`` makes the scheduler of the schedule "custom"."""
    if (config.schedule == "custom") != (custom is not None):
        given = "a scheduler" if custom is not None else "no scheduler"
        raise ValueError(
            f"schedule is {config.schedule!r} and {given} was given; expected 'custom' together with a function "
            "that makes a torch scheduler for an optimizer."
        )
    if custom is not None:
        return Torch(custom(optimizer))
    gamma, period = config.gamma, config.period
    makers: dict[str, Callable[[], Schedule]] = {
        "none": Constant,
        "rise": lambda: Rise(optimizer, gamma, config.patience),
        "step": lambda: Torch(StepLR(optimizer, period, gamma)),
        # what the authors' MultiStepLR(milestones=[1000, 1000, 1000]) did: three times at once
        "milestone3": lambda: Torch(MultiStepLR(optimizer, [period] * 3, gamma)),
        "cosine": lambda: Torch(CosineAnnealingLR(optimizer, config.epochs)),
    }
    return makers[config.schedule]()
