"""PyTorch's operation database with one argument perturbed at a time: second order, and every lift over rows.

An operation whose arguments are all perturbed hides a lift that is wrong where one of them alone has rows. Each lift by
torch's batching rules is therefore compared with the loop over rows, and each result with double backward.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jetplane.ad.algebra import row_lifts
from jetplane.testing import opdb
from jetplane.testing.opdb import EXACT, WRONG, Outcome

SHARDS = 16


class CheckedLift:
    """``row_lifts.vmapped`` that compares itself with the loop."""

    def __init__(self) -> None:
        self.count = 0
        self.wrong: list[str] = []
        self._vmapped = row_lifts.vmapped

    def __call__(self, function: Callable[..., Any], *rows: Tensor) -> Any:
        self.count += 1
        batched, looped = self._vmapped(function, *rows), row_lifts.looped(function, *rows)
        pairs = [(batched, looped)] if isinstance(batched, Tensor) else zip(batched, looped, strict=True)
        for ours, theirs in pairs:
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12, equal_nan=True):
                self.wrong.append(f"{ours.shape} for {[tuple(row.shape) for row in rows]}")
        return batched


@functools.cache
def sweep(shard: int, k: int, limit: int | None, small: bool) -> tuple[list[Outcome], int, dict[str, list[str]]]:
    """Outcomes of every SHARDS-th entry, the number of lifts by vmap, and which of them differ from the loop."""
    outcomes, lifts, wrong = [], 0, {}
    for op in opdb.entries()[shard::SHARDS]:
        checked = CheckedLift()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_lifts, "vmapped", checked)
            try:
                outcomes.append(opdb.check(op, limit=limit, k=k, alone=True, small=small))
            except Exception as error:
                outcomes.append(Outcome(opdb.name_of(op), WRONG, note=f"{type(error).__name__}: {error}"[:200]))
        lifts += checked.count
        if checked.wrong:
            wrong[opdb.name_of(op)] = checked.wrong
    return outcomes, lifts, wrong


def wrong(outcomes: list[Outcome]) -> list[str]:
    return [f"{o.name}: error {o.worst:.1e} {o.note}" for o in outcomes if o.status == WRONG]


QUICK = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, SHARDS))]


@pytest.mark.parametrize("shard", QUICK)
def test_one_argument_at_a_time(shard: int) -> None:
    outcomes, lifts, apart = sweep(shard, 3, 1, False)
    assert wrong(outcomes) == []
    assert apart == {}
    assert Counter(o.status for o in outcomes)[EXACT] >= 0.85 * len(outcomes)
    assert lifts > 0


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_one_argument_at_a_time_in_every_sample(shard: int, k: int) -> None:
    outcomes, _, apart = sweep(shard, k, None, True)
    assert wrong(outcomes) == []
    assert apart == {}


def test_the_sweep_would_find_a_wrong_lift(monkeypatch: pytest.MonkeyPatch) -> None:
    right = row_lifts.vmapped
    monkeypatch.setattr(row_lifts, "vmapped", lambda function, *rows: torch.roll(right(function, *rows), 1, 0))
    (op,) = [op for op in opdb.entries() if opdb.name_of(op) == "triu"]
    assert opdb.check(op, limit=2, k=3, alone=True).status == WRONG
