"""Families made of families: each draws and remembers for itself, and split directions add up."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetplane.directions import (
    Gaussian,
    Mixed,
    Momentum,
    PerLayer,
    Plane,
    Rademacher,
)
from searches import F64, batch, loss_of, network, search


def test_families_of_a_mix_draw_each_for_itself() -> None:
    x = torch.zeros(50)
    plane = Plane(7, 3, 0, [x], list)
    drawn = Mixed([Gaussian(2), Gaussian(2), Rademacher(1)]).draw(plane)
    rows = drawn.rows(0, x, 0, 5)
    assert torch.equal(rows[:2], Gaussian(2).draw(plane).rows(0, x, 0, 2))
    assert not torch.isclose(rows[:2], rows[2:4]).any()
    assert torch.equal(torch.cat([drawn.rows(0, x, n, n + 1) for n in range(5)]), rows)
    assert Mixed([Gaussian(2), Gaussian(2)]) == Mixed((Gaussian(2), Gaussian(2)))
    assert len({Mixed([Gaussian(2)]), Mixed([Gaussian(2)]), Mixed([Gaussian(3)])}) == 2


def test_a_mix_of_two_that_remember_keeps_two_memories() -> None:
    model, (x, y) = network(), batch()
    optimizer = search(model, [Momentum(0.0), Mixed([Momentum(0.9), Gaussian(2)])])
    for _ in range(3):
        optimizer.step(loss_of(model), x, y)
    kept = optimizer.state[model[0].weight]
    assert set(kept) == {"0.momentum", "1.0.momentum"}
    assert not torch.equal(kept["0.momentum"], kept["1.0.momentum"])


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    shapes=st.lists(st.sampled_from([(), (2,), (3, 2), (1, 2, 2)]), min_size=1, max_size=5),
    k=st.integers(1, 3),
    by=st.sampled_from(["layer", "parameter"]),
    cut=st.tuples(st.integers(0, 14), st.integers(0, 14)),
)
def test_a_split_direction_adds_up_to_the_direction(
    shapes: list[tuple[int, ...]], k: int, by: str, cut: tuple[int, int]
) -> None:
    leaves = [torch.zeros(shape, dtype=F64) for shape in shapes]
    plane = Plane(1, 2, 0, leaves, list)
    whole, split = Gaussian(k).draw(plane), PerLayer(Gaussian(k), by=by).draw(plane)
    starts = [n for n, shape in enumerate(shapes) if by == "parameter" or n == 0 or len(shape) > 1]
    layers = len(starts)
    assert split.k == PerLayer(Gaussian(k), by=by).count(leaves) == k * layers
    for position, leaf in enumerate(leaves):
        rows = split.rows(position, leaf, 0, split.k)
        assert torch.equal(rows.unflatten(0, (k, layers)).sum(1), whole.rows(position, leaf, 0, k))
        layer = sum(start <= position for start in starts) - 1
        others = rows.unflatten(0, (k, layers))[:, [n for n in range(layers) if n != layer]]
        assert not others.any()
        first, last = sorted(min(one, split.k) for one in cut)
        if first < last:
            assert torch.equal(split.rows(position, leaf, first, last), rows[first:last])
