"""What calls of :func:`jetplane.forward_gradient` leave to later ones, for as long as their parameters live."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .noise.control_variate import ControlVariate
from .passes.divisions import Divisions
from .passes.kept_plans import KeptPlans

__all__ = ["KeptByParameters", "Known"]


@dataclass(eq=False)
class Known:
    """What is known from earlier calls with the same parameters. Keeps none of them alive."""

    plans: KeptPlans
    control: ControlVariate | None  # None: nothing is learned
    step: int | Tensor  # the number of the next call; an int64 tensor () where a graph is to advance it
    divisions: Divisions = field(default_factory=Divisions)


class KeptByParameters:
    """By the identities of some parameters: what is known with them, until one of them is gone."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], tuple[list[weakref.ref[Tensor]], Known]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, tensors: list[Tensor]) -> Known:
        """What is kept for these parameters: nothing at first."""
        key = tuple(map(id, tensors))
        references, known = self._kept.get(key, ([], None))
        # an identity may be that of another tensor by now
        if known is None or any(ref() is not tensor for ref, tensor in zip(references, tensors, strict=True)):
            known = Known(KeptPlans(), ControlVariate(tensors), 0)

            def gone(_: Any) -> None:
                self._kept.pop(key, None)

            self._kept[key] = [weakref.ref(tensor, gone) for tensor in tensors], known
        return known
