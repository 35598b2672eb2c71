"""PyTorch's operation database, forward over forward, against double backward: the quick part of the sweep.

The whole sweep (`make coverage`, or `-m slow` here) runs every sample of every entry.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from jetplane import Quadratic
from jetplane.testing import opdb
from jetplane.testing.opdb import EXACT, MISSING, REFUSED, UNTESTED, WRONG, Outcome

SHARDS = 16

# Entries that are not exact in float64, each with its reason. Nothing else may fail.
SPARSE = "a sparse layout, which has no rows"
NOT_EXACT = {
    "sparse.sampled_addmm": SPARSE,
    "to_sparse": SPARSE,
}

# Entries that say nothing about us: torch itself has no second derivative, or the first samples have no leaf.
NO_ORACLE = {
    "chalf": "torch adds up no complex numbers of 16 bits, so there is no loss",
    "nn.functional.ctc_loss": "torch has no double backward",
}
NO_ORACLE_IN_THE_FIRST_SAMPLES = {
    "__rpow__": "no leaf that requires grad",
    "_batch_norm_with_update": "torch's backward refuses the running statistics that changed",
    "normal.number_mean": "no leaf that requires grad",
}


def reason(outcome: Outcome, quick: bool = True) -> str:
    """The reason that the tables give for an entry that is not exact; "" for none."""
    if outcome.status == UNTESTED:
        return (NO_ORACLE | NO_ORACLE_IN_THE_FIRST_SAMPLES if quick else NO_ORACLE).get(outcome.name, "")
    return NOT_EXACT.get(outcome.name, "") if outcome.status in (MISSING, REFUSED) else ""


def sweep(shard: int, dtype: torch.dtype, limit: int | None) -> list[Outcome]:
    """The outcomes of every SHARDS-th entry; an exception that is not ours is a crash, told as a wrong entry."""
    outcomes = []
    for op in opdb.entries(dtype)[shard::SHARDS]:
        try:
            outcomes.append(opdb.check(op, dtype, limit=limit))
        except Exception as error:
            outcomes.append(Outcome(opdb.name_of(op), WRONG, note=f"crashed: {type(error).__name__}: {error}"[:200]))
    return outcomes


@functools.cache
def quick(shard: int) -> list[Outcome]:
    return sweep(shard, torch.float64, 2)


def failures(outcomes: list[Outcome]) -> list[str]:
    return [f"{o.name}: {o.status}, error {o.worst:.1e} {o.note}" for o in outcomes if o.status == WRONG]


def unexplained(outcomes: list[Outcome], quick: bool = True) -> list[str]:
    return [f"{o.name}: {o.status} {o.note}" for o in outcomes if o.status != EXACT and not reason(o, quick)]


shards = pytest.mark.parametrize("shard", range(SHARDS))


@shards
def test_no_entry_is_wrong(shard: int) -> None:
    assert failures(quick(shard)) == []


@shards
def test_every_entry_that_is_not_exact_has_a_reason(shard: int) -> None:
    assert unexplained(quick(shard)) == []


def test_at_least_95_percent_are_exact() -> None:
    outcomes = [outcome for shard in range(SHARDS) for outcome in quick(shard)]
    strided = [o for o in outcomes if o.status in (EXACT, WRONG, MISSING, REFUSED)]
    exact = [o for o in strided if o.status == EXACT]
    assert len(strided) >= 515, "the database has about 520 strided entries; expected most of them here."
    assert len(exact) >= 0.95 * len(strided), f"{len(exact)} of {len(strided)} entries are exact."


def test_reasons_are_up_to_date() -> None:
    exact = {o.name for shard in range(SHARDS) for o in quick(shard) if o.status == EXACT}
    assert sorted(exact & NOT_EXACT.keys()) == []


@pytest.mark.parametrize("shard", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, SHARDS, 4))])
def test_no_entry_is_wrong_in_float32(shard: int) -> None:
    assert failures(sweep(shard, torch.float32, 1)) == []


@pytest.mark.slow
@shards
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_whole_sweep(shard: int, dtype: torch.dtype) -> None:
    outcomes = sweep(shard, dtype, None)
    assert failures(outcomes) == []
    assert unexplained(outcomes, quick=False) == []


def test_a_crash_counts_as_a_failure(monkeypatch: Any) -> None:
    def crash(*args: Any, **kwargs: Any) -> Outcome:
        raise IndexError("boom")

    monkeypatch.setattr(opdb, "check", crash)
    outcomes = sweep(0, torch.float64, 1)
    assert outcomes
    assert len(failures(outcomes)) == len(outcomes)
    assert "IndexError: boom" in failures(outcomes)[0]


class Scaled(opdb.perturb):
    """The engine with its slope or its curvature off by a factor."""

    part, factor = "curvature", 1.0
    sizes: list[float]

    def quadratic(self, loss: torch.Tensor) -> Quadratic:
        model = super().quadratic(loss)
        wrong = self.factor * getattr(model, self.part)
        self.sizes.append(float(getattr(model, self.part).abs().max()))
        return replace(model, **{self.part: wrong})


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float64, id="float64"),
        pytest.param(torch.float32, id="float32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("part", ["slope", "curvature"])
def test_the_sweep_notices_an_error_of_five_percent(part: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    # a sweep that finds nothing must be one that would have found something
    monkeypatch.setattr(opdb, "perturb", Scaled)
    monkeypatch.setattr(Scaled, "part", part)
    asked, unnoticed = 0, []
    for op in opdb.entries(dtype)[5::SHARDS]:
        Scaled.sizes = []
        monkeypatch.setattr(Scaled, "factor", 1.0)
        right = opdb.check(op, dtype, limit=2)
        if right.status != EXACT or max(Scaled.sizes) < 1e-2:
            continue
        monkeypatch.setattr(Scaled, "factor", 1.05)
        asked += 1
        if opdb.check(op, dtype, limit=2).status != WRONG:
            unnoticed.append(right.name)
    assert asked >= 5
    assert unnoticed == []
