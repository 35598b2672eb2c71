"""The average of the parameters over a run, in which late steps weigh most: it does what a decaying rate would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Average"]


class Average:
    """Follows a torch optimizer: after step t the mean moves by p / (t + p) of the way to the parameters.

    The weight of step s in it grows like s^(p - 1), so that a run needs no word of its length; with p = 8 the last
    quarter has nine tenths of the weight. All of it is on the device: a CUDA graph of a step takes it along.

    Example:
        >>> x = torch.zeros(1, requires_grad=True)
        >>> sgd = torch.optim.SGD([x], lr=1.0)
        >>> average = Average(sgd, power=1.0)  # a plain mean, with the start
        >>> for slope in (-2.0, -2.0):
        ...     x.grad = torch.tensor([slope])
        ...     sgd.step()
        >>> with average.averaged():
        ...     x.tolist()  # of 0, 2 and 4
        [2.0]
        >>> x.tolist()
        [4.0]
    """

    def __init__(self, optimizer: torch.optim.Optimizer, power: float) -> None:
        self._power = power
        self._parameters: list[Tensor] = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        self._means = [leaf.detach().clone() for leaf in self._parameters]
        self._count = torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)
        optimizer.register_step_post_hook(self._follow)

    @torch.no_grad()
    def _follow(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._count += 1
        weight = self._power / (self._count + self._power)
        for mean, leaf in zip(self._means, self._parameters, strict=True):
            mean.lerp_(leaf, weight.to(mean))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The average in the parameters' place, inside."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for mean, leaf in zip(self._means, self._parameters, strict=True):
            kept = leaf.clone()
            leaf.copy_(mean)
            mean.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """The count of steps, and the means."""
        return {"count": self._count.clone(), "means": [mean.clone() for mean in self._means]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave. In place: a captured graph goes on with it."""
        self._count.copy_(state["count"])
        for mean, given in zip(self._means, state["means"], strict=True):
            mean.copy_(given)
