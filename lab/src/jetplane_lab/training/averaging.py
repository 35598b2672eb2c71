"""The average of the parameters over a run, in which late steps weigh most: it does what a decaying rate would."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Average"]


class Average:
    """After step t the mean moves by p / (t + p) of the way to the parameters.

    The weight of step s in it grows like s^(p - 1), so that a run needs no word of its length; with p = 8 the last
    quarter has nine tenths of the weight.

    Example:
        >>> x = torch.zeros(1)
        >>> average = Average([x], power=1.0)  # a plain mean, with the start
        >>> for _ in range(2):
        ...     average.follow(x.add_(2.0).numel())
        >>> with average.averaged():
        ...     x.tolist()  # of 0, 2 and 4
        [2.0]
        >>> x.tolist()
        [4.0]
    """

    def __init__(self, parameters: Iterable[Tensor], power: float) -> None:
        self._power = power
        self._parameters = list(parameters)
        self._means = [leaf.detach().clone() for leaf in self._parameters]
        self._steps = 0

    @torch.no_grad()
    def follow(self, steps: int = 1) -> None:
        """Take the parameters in, for as many steps as there were since the last time."""
        kept = math.prod(t / (t + self._power) for t in range(self._steps + 1, self._steps + steps + 1))
        self._steps += steps
        for mean, leaf in zip(self._means, self._parameters, strict=True):
            mean.lerp_(leaf, 1 - kept)

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
        return {"steps": self._steps, "means": [mean.clone() for mean in self._means]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._steps = state["steps"]
        for mean, given in zip(self._means, state["means"], strict=True):
            mean.copy_(given)
