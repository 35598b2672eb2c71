"""What a search asks of parameters of which each process has a part: a group, and directions that remember nothing."""

from __future__ import annotations

from typing import Any

from ..ad.run.parts import is_shared_out
from ..directions import Gradient, Learning, Mixed
from ..parallel.crew import Crew
from .moving import Moving

__all__ = ["check_shared_out"]


def check_shared_out(moving: Moving, family: Learning, crew: Crew) -> None:
    """Raise unless a step can move parameters some of which processes share out."""
    what = next(label for tensor, label in zip(moving.tensors, moving.labels, strict=True) if is_shared_out(tensor))
    what = f"{what} is a sharded parameter, as FSDP's fully_shard and tensor parallelism make them"
    if crew.processes is None:
        raise ValueError(
            f"{what}, and there is no process_group: each process would move its part by coefficients of its own. "
            "Expected process_group= of all processes that share it out."
        )
    if crew.shares_directions:
        raise ValueError(
            f"{what}, and process_group is a DeviceMesh whose processes share the directions: they would not run the "
            "same passes. Expected a ProcessGroup."
        )
    if any(isinstance(one, Gradient) for one in _families(family)):
        raise ValueError(
            f"{what}, and Gradient needs a backward pass through it; expected directions that are drawn, as "
            "Gaussian(k)."
        )
    if family.init().slots:
        raise ValueError(
            f"{what}, and directions that remember have no memory of parts yet; expected ones that are drawn, as "
            "Gaussian(k)."
        )


def _families(family: Any) -> list[Any]:
    return [one for part in family.families for one in _families(part)] if isinstance(family, Mixed) else [family]
