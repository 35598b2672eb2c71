"""What came of the tangents that a process has carried, and of those that others have: all get all of it."""

from __future__ import annotations

from torch import Tensor

from ...parallel.tangents import Tangents
from ..noise.prediction import NoPrediction, Prediction
from ..noise.statistics import Statistics

__all__ = ["together"]


def together(
    sharing: Tangents,
    count: int,
    scalars: Tensor,
    prediction: Prediction | NoPrediction,
    statistics: Statistics | None,
) -> Tensor:
    """The scalars (J, B, T) of all ``count`` tangents, of which ``scalars`` are this process's.

    What a prediction and the norms' statistics have seen of them becomes that of all as well.
    """
    seen = [one for one in (prediction, statistics) if one is not None]
    parts = [one.seen() for one in seen]
    found, *others = sharing.gathered([scalars, *(part for some in parts for part in some)], count)
    for one, some in zip(seen, parts, strict=True):
        one.see(others[: len(some)])
        others = others[len(some) :]
    return found
