"""An ``lr`` that was meant as Adam's rate: said once, and no word of schedules that begin or end low."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...ad.engine.locate import users_level
from ..moving import number_of

__all__ = ["LowLr", "refuse_positional"]

_LOW = 0.05  # of the rate that is found: below it next to nothing is learned
_WAITED = 200  # steps that a schedule may take to get above that; a linear warm-up of 4,000 steps does
_STAYED = 20  # steps in a row with the same lr, where a scheduler has it in hand

_MEANING = "HorizonAdam finds its rate by itself, and lr is a factor of that, 1 by default, for schedulers"


@dataclass
class LowLr:
    """Looks at the groups' lr until it was once no longer low, or until it has warned.

    A schedule may begin low, as a warm-up or `OneCycleLR` does, and what it ends with is its own affair. So an lr that
    was given is judged at once, and one that is set later when it cannot be the beginning of a schedule: when it falls
    or stays without ever having been above, when the highest one is known, or when 200 steps did not get it there.
    """

    _steps: int = 0
    _stayed: int = 0
    _before: list[float] = field(default_factory=list)  # the lr of each group, at the last step
    _settled: bool = False

    def given(self, groups: Sequence[dict[str, Any]]) -> None:
        """Judge the lr that the groups were given."""
        low = [lr for lr in _lrs(groups) if 0 < lr < _LOW]
        if low:
            self._warn(low[0])

    def see(self, groups: Sequence[dict[str, Any]]) -> None:
        """Judge the lr that the groups have at a step."""
        if self._settled:
            return
        now = _lrs(groups)
        if not now or max(now) >= _LOW:
            self._settled = True
            return
        if max(now) > 0:  # else nothing is to move
            self._judge(groups, now)
        self._before = now
        self._steps += 1

    def settle(self) -> None:
        """Judge no longer, as in the middle of a run that is gone on with."""
        self._settled = True

    def _judge(self, groups: Sequence[dict[str, Any]], now: list[float]) -> None:
        scheduled = any("initial_lr" in group for group in groups)  # which torch's schedulers leave there
        highest = [group["max_lr"] for group in groups if "max_lr" in group]  # and this one OneCycleLR
        self._stayed = self._stayed + 1 if now == self._before else 0
        if (
            (highest and max(highest) < _LOW)
            or (self._before and max(now) < max(self._before))
            or self._stayed >= (_STAYED if scheduled else 1)
            or self._steps >= _WAITED
        ):
            self._warn(max(highest, default=max(now)))

    def _warn(self, lr: float) -> None:
        if not self._settled:
            self._settled = True
            warnings.warn(
                f"lr is {lr:g}: {_MEANING}, so that below {_LOW:g} hardly anything is learned. Expected lr=1, or "
                f"rate={lr:g} to fix Adam's rate instead.",
                UserWarning,
                stacklevel=users_level(),
            )


def refuse_positional(numbers: Sequence[object]) -> None:
    """Raise for what stands behind the parameters without a name: torch's other optimizers have their rate there."""
    if not numbers:
        return
    first = numbers[0]
    tangents = f", or samples={first} tangents" if isinstance(first, int) and not isinstance(first, bool) else ""
    raise TypeError(
        f"{first!r} stands behind the parameters without a name: {_MEANING}. Expected lr=1, or rate={first!r} to fix "
        f"Adam's rate instead{tangents}."
    )


def _lrs(groups: Sequence[dict[str, Any]]) -> list[float]:
    """Those of groups whose rate is found: how a fixed one and its lr are multiplied is the user's."""
    return [number_of("lr", group["lr"]) for group in groups if group.get("rate") is None]
