"""Functions of parameters alone: in which order they are made again."""

from __future__ import annotations

from jetplane.ad.engine.parameter_functions import Recipe, in_order


def made_of(*parents: Recipe) -> Recipe:
    return Recipe(None, (), {}, list(parents), [])


def test_parents_come_first_and_each_once() -> None:
    a = made_of()
    b, c = made_of(a, a), made_of(a)
    d = made_of(b, c)
    assert [[a, b, c, d].index(one) for one in in_order(d)] == [0, 1, 2, 3]


def test_a_chain_may_be_longer_than_python_recurses() -> None:
    one = made_of()
    for _ in range(5000):
        one = made_of(one)
    order = in_order(one)
    assert len(order) == 5001 and order[-1] is one and not order[0].parents
