"""What compiled steps need to know of a captured program before they are made of it, and at each call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..compiler.capture import Graph
from ..errors import CaptureFailed
from .moving import Moving
from .step_settings import StepSettings

__all__ = ["Reads", "check_runs_once", "same"]


class Reads:
    """Which of an optimizer's parameters a program reads, and as which of its inputs."""

    def __init__(self, graph: Graph, inputs: Sequence[Tensor], moving: Moving) -> None:
        if graph.asking is not None:  # a CUDA graph cannot
            raise CaptureFailed(f"it asks for the value of a tensor, and waits for it ({graph.asking})")
        places = {tensor: place for place, tensor in enumerate(inputs)}
        self.found = [(number, places[leaf]) for number, leaf in enumerate(moving.tensors) if leaf in places]
        if not self.found:
            raise ValueError("the closure uses none of the parameters; expected a loss that depends on them.")
        self.used = [leaf in places for leaf in moving.tensors]
        self._expected = [(place, moving.tensors[number]) for number, place in self.found]

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raise where the program is called with other parameters than these."""
        if any(inputs[place] is not leaf for place, leaf in self._expected):
            raise RuntimeError(
                "the program reads other parameters than those it was compiled with; expected the optimizer's."
            )


def check_runs_once(backward: bool, settings: StepSettings) -> None:
    """Raise where a program that draws random numbers would be run twice in a step, with others."""
    if backward:
        raise CaptureFailed("its random numbers would not be the same in the backward pass and in the forward one")
    if settings.evaluates:
        raise CaptureFailed(
            "its random numbers would not be the same where the loss is evaluated at the end of the step"
        )


def same(baked: Sequence[object], now: Sequence[object]) -> bool:
    """Whether what was compiled into a program is what it would be now: the same objects, and equal numbers."""
    return len(baked) == len(now) and all(
        one is other or (isinstance(one, int | float | str) and one == other)
        for one, other in zip(baked, now, strict=True)
    )
