"""Questions that are asked by tangents that are NaN."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jetplane.gradients.plan.questions import Question, ask, half
from jetplane.gradients.program.layout import Layout, guess

CPU = torch.device("cpu")


def by_rows() -> Layout:
    layout = guess(torch.Size([4, 3]), 4)
    assert layout is not None
    return layout


@pytest.mark.parametrize("width", [1, 2, 5])
def test_each_question_gets_its_answer_whatever_is_carried_together(width: int) -> None:
    """The program is y_b = x_b + x_(b+1): a sample reaches itself and the one before."""
    chosen = torch.eye(4, dtype=torch.bool)
    questions = [Question({0: by_rows()}, one) for one in chosen] + [Question({0: None}, chosen[0])]
    carried: list[int] = []

    def carry(rows: Any, k: int) -> Tensor:
        carried.append(k)
        at_site = rows(SimpleNamespace(number=0), torch.ones(4, 3))
        assert at_site.shape == (k, 4, 3) and rows(SimpleNamespace(number=1), torch.ones(4, 3)) is None
        return at_site + at_site.roll(-1, 1)

    answers = list(ask(questions, carry, width))
    assert [question for question, _ in answers] == questions and sum(carried) == 5 and max(carried) <= width
    for (_, lost), one in zip(answers, chosen, strict=False):
        assert torch.equal(lost, one | one.roll(-1))
    assert bool(answers[-1][1].all())  # all entries of the site were chosen


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_a_half_is_always_the_same_one_and_the_larger(count: int) -> None:
    state = torch.get_rng_state()
    one = half(count, CPU)
    assert int(one.sum()) == (count + 1) // 2 and torch.equal(one, half(count, CPU))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_last_entry_of_each_sample_alone() -> None:
    for layout, shape, kept in ((Layout(0, 1), (4, 3, 2), [[2, 1]]), (Layout(1, 2), (3, 4), [])):
        samples = 4 if shape[0] == 4 else 2
        question = Question({0: layout}, torch.ones(samples, dtype=torch.bool), last=True)
        seen: list[Tensor] = []

        def carry(rows: Any, k: int, shape: Any = shape, seen: list[Tensor] = seen) -> Tensor:
            seen.append(rows(SimpleNamespace(number=0), torch.ones(shape))[0].isnan())
            return torch.zeros(k, 1, 1)

        list(ask([question], carry, 1))
        assert int(seen[0].sum()) == samples
        expected = [[b, *kept[0]] for b in range(4)] if kept else [[2, 1], [2, 3]]
        assert seen[0].nonzero().tolist() == expected
