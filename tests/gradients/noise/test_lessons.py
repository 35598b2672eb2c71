"""What parts of a batch say of a control variate before it learns."""

from __future__ import annotations

import torch

from jetplane.gradients.noise.lessons import Lessons


def made(finite: bool) -> Lessons:
    lessons = Lessons()
    lessons.begin(torch.tensor(finite))
    lessons.add(3, torch.ones(2, 2), torch.ones(2))
    lessons.add(3, torch.ones(2, 2), None)
    lessons.add(1, torch.ones(1), None)
    lessons.weigh(3, torch.tensor([2.0, 4.0]))
    return lessons


def test_chunks_add_up_and_sites_come_back_in_their_order() -> None:
    lessons = made(True)
    found = list(lessons.summed(lessons.parts()))
    assert [site for site, *_ in found] == [3, 1]
    _, update, now, seen = found[0]
    assert torch.equal(update, torch.full((2, 2), 2.0)) and now is not None and seen is not None
    assert torch.equal(now, torch.ones(2)) and seen.tolist() == [2.0, 4.0]
    assert found[1][2] is None and found[1][3] is None


def test_parts_in_turn_are_added_up() -> None:
    lessons = made(True)
    lessons.begin(torch.tensor(True))
    lessons.add(3, torch.ones(2, 2), torch.ones(2))
    lessons.weigh(3, torch.tensor([1.0, 0.5]))
    _, update, now, seen = next(iter(lessons.summed(lessons.parts())))
    assert now is not None and seen is not None
    assert torch.equal(update, torch.full((2, 2), 3.0)) and torch.equal(now, torch.full((2,), 2.0))
    assert seen.tolist() == [3.0, 4.5]


def test_where_one_part_saw_what_is_not_finite_nothing_is_learned() -> None:
    lessons = made(False)
    lessons.begin(torch.tensor(True))  # as one after the other
    assert all(not update.any() for _, update, *_ in lessons.summed(lessons.parts()))
    parts = [one + other for one, other in zip(made(True).parts(), made(False).parts(), strict=True)]
    assert all(not update.any() for _, update, *_ in made(True).summed(parts))
