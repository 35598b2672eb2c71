"""Where the samples and tokens of an activation may lie."""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional as F

from jetplane.gradients.program.layout import Grid, Layout, candidates, within


def test_layouts_of_a_shape() -> None:
    assert candidates((6, 4), 3) == [Layout(0, 2), Layout(0, 1)]
    assert candidates((5, 12, 3), 3)[0] == Layout(2, 1)
    assert Layout(1, 4) in candidates((5, 12, 3), 3) and Layout(1, 2) in candidates((5, 12, 3), 3)
    assert candidates((5, 7), 3) == []


def test_layouts_that_go_together() -> None:
    assert within((2, 3, 4), Layout(0, 1), 2, 3) == [Layout(1, 1)]
    assert within((6, 4), Layout(0, 3), 2, 3) == [Layout(0, 1)]  # tokens of a sample follow each other
    assert within((6, 4), Layout(0, 1), 2, 3) == [Layout(0, 2)]
    assert within((2, 4), Layout(0, 1), 2, 3) == []


def test_grids_split_by_sample_and_token() -> None:
    for samples, tokens, shape in (
        (Layout(0, 1), None, (3, 4)),
        (Layout(1, 1), None, (2, 3, 5)),
        (Layout(0, 2), None, (12, 2)),
        (Layout(1, 2), None, (2, 6)),
        (Layout(0, 1), Layout(1, 1), (3, 2, 5)),
        (Layout(1, 1), Layout(0, 1), (2, 3, 5)),
        (Layout(0, 2), Layout(0, 1), (6, 4)),
        (Layout(0, 1), Layout(0, 3), (6, 4)),
        (Layout(0, 4), Layout(2, 2), (12, 2, 4)),
    ):
        count = 1 if tokens is None else 2
        grid, rows, numbers = Grid(samples, tokens), torch.randn(2, *shape), torch.randn(2, 3, count)
        parts = grid.split(rows, 3, count)
        assert parts.shape == (2, 3, count, rows[0].numel() // 3 // count)
        assert torch.equal(grid.join(parts[0], shape), rows[0])
        weighted = grid.split(grid.weighted(rows, numbers).unsqueeze(0), 3, count)[0]
        torch.testing.assert_close(weighted, (parts * numbers.unsqueeze(3)).sum(0))
        for sample, token in itertools.product(range(3), range(count)):
            own = samples.spread(F.one_hot(torch.tensor(sample), 3), shape).expand(shape).bool()
            if tokens is not None:
                own = own & tokens.spread(F.one_hot(torch.tensor(token), 2), shape).bool()
            assert torch.equal(parts[1, sample, token], rows[1][own])
