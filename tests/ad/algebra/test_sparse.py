"""Tangents of some directions alone, and outer products."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import F64
from jetplane.ad.algebra.sparse import Block, Factors, Support, Term, gathered, padded

RUNS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda ends: (min(ends), max(ends) + 1)), max_size=4
)


@given(st.lists(RUNS, min_size=1, max_size=4), st.integers(0, 2**31))
@settings(deadline=None)
def test_gathered_and_padded_are_sums_over_all_directions(runs: list[list[tuple[int, int]]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    terms, expected = [], torch.zeros(10, 2, dtype=F64)
    for one in runs:
        support = Support.of(10, one)
        rows = torch.randn(support.count, 2, dtype=F64, generator=generator)
        places = [n for start, stop in support.runs for n in range(start, stop)]
        expected[places] += rows
        assert torch.equal(padded(Term(support, rows), Support.all(10))[places], rows)
        terms.append(Term(support, rows))
    total = gathered([term for term in terms if term.support.count])
    if total is None:
        assert not expected.any()
    else:
        torch.testing.assert_close(padded(total, Support.all(10)), expected)
        assert total.support == Support.of(10, (run for term in terms for run in term.support.runs))


def test_blocks_know_their_ends() -> None:
    factors = Factors(torch.ones(3, 2), torch.ones(3, 4))
    assert Block(5, factors).stop == Block(5, factors.dense()).stop == 8
    combined = factors.combined(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(combined, torch.full((2, 4), 6.0))
