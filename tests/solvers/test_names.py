"""Solvers by name."""

from __future__ import annotations

import pytest

from jetplane import solvers


def test_every_solver_has_its_name() -> None:
    kinds = [getattr(solvers, name) for name in solvers.__all__]
    ours = {one for one in kinds if isinstance(one, type) and hasattr(one, "descends") and "Step" not in one.__name__}
    named = {type(solvers.find(name)) for name in solvers.names.NAMES}
    assert {one.__name__ for one in ours if one.__module__.split(".")[-1] not in ("base", "adopted")} == {
        one.__name__ for one in named
    }


@pytest.mark.parametrize("name", ["trust-region", "trust_region", "Trust-Region"])
def test_spellings(name: str) -> None:
    assert solvers.find(name) == solvers.TrustRegion()


def test_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match="solver is 'lbfgs'; expected a solver or one of 'negative-slope'"):
        solvers.find("lbfgs")
