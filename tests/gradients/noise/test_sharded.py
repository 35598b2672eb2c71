"""The noise of a part of a batch is a part of the noise of the batch, wherever the samples lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jetplane.gradients.noise.sharded import Sharded
from jetplane.gradients.noise.signs import Signs
from jetplane.gradients.program.layout import Layout


def planned(layout: Layout | None, samples: int) -> Any:
    """As much of a plan as is looked at."""
    return SimpleNamespace(sites=[SimpleNamespace(layout=layout)], samples=samples)


class Plain:
    """A noise without parts."""

    def rows(self, site: int, start: int, stop: int, like: Tensor) -> Tensor:
        return Signs(3, 4).rows(site, start, stop, like)


@pytest.mark.parametrize("noise", [Signs(3, 4), Plain()])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((7, 50), Layout(0, 1)),
        ((7 * 3, 50), Layout(0, 3)),
        ((3 * 7, 50), Layout(0, 1)),
        ((5, 7, 40), Layout(1, 1)),
        ((5, 7 * 2, 40), Layout(1, 2)),
    ],
)
def test_parts_are_those_of_the_whole(noise: Any, shape: tuple[int, ...], layout: Layout) -> None:
    axis, rest = layout.axis, shape[layout.axis] // 7
    whole = torch.zeros(shape)
    rows = noise.rows(0, 1, 4, whole)
    owner = torch.arange(shape[axis]) // layout.inner % 7
    for start, stop in ((0, 2), (2, 3), (3, 7)):
        own = ((owner >= start) & (owner < stop)).nonzero().flatten()
        like = whole.index_select(axis, own)
        assert like.shape[axis] == rest * (stop - start)
        part = Sharded(noise, planned(layout, stop - start), start, 7)
        assert torch.equal(part.rows(0, 1, 4, like), rows.index_select(axis + 1, own))
        traced = Sharded(noise, planned(layout, stop - start), torch.tensor(start), 7)  # as in a compiled call
        assert torch.equal(traced.rows(0, 1, 4, like), rows.index_select(axis + 1, own))


def test_coupled_samples_have_noise_of_their_own() -> None:
    like = torch.zeros(2, 3)
    first, second = (Sharded(Signs(0, 0), planned(None, 2), start, 4).rows(0, 0, 9, like) for start in (0, 2))
    assert torch.equal(torch.cat([first.flatten(1), second.flatten(1)], 1), Signs(0, 0).rows(0, 0, 9, torch.zeros(12)))
