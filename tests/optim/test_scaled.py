"""Groups stretch the directions; clipping bounds the update."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cases import F64, assert_close
from jetplane.ad.run.directions import Directions
from jetplane.curvature import ExactHessian
from jetplane.directions import Gaussian, Plane
from jetplane.optim import Acceptance, FoMoHKD, HyperplaneSearch
from jetplane.solvers import (
    SaddleFree,
)
from stepping import derivatives, drawn, fit, leaf, network, params


def test_groups_stretch_the_directions_before_they_are_measured() -> None:
    model = network()
    first, last = list(model[0].parameters()), list(model[2].parameters())
    leaves, before = first + last, params(model)
    gradient, hessian = derivatives(fit(model), leaves)
    stretch = torch.cat([torch.ones(16, dtype=F64), torch.full((5,), 0.25, dtype=F64)])
    v = drawn(Gaussian(2), leaves) * stretch
    kappa = -torch.linalg.solve(v @ hessian @ v.T, v @ gradient)
    opt = FoMoHKD([{"params": first, "lr": 0.8}, {"params": last}], lr=0.2, k=2)
    opt.step(fit(model))
    assert_close(params(model), before + 0.8 * kappa @ v, 1e-9)


def test_the_predicted_decrease_is_true_for_groups() -> None:
    a, b = leaf(1.0, 2.0), leaf(3.0)
    opt = FoMoHKD([{"params": [a]}, {"params": [b], "lr": 0.1}], lr=0.6, k=2, accept=Acceptance())
    opt.step(lambda: (a - b).square().sum() + a.square().sum() + 3 * b.square().sum())
    assert opt.report.actual is not None
    assert_close(opt.report.predicted, opt.report.actual, 1e-12)


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_chunks_give_the_same_step(chunk_size: int) -> None:
    whole, split = network(), network()
    a, b = FoMoHKD(whole.parameters(), k=5), FoMoHKD(split.parameters(), k=5, chunk_size=chunk_size)
    for _ in range(2):
        a.step(fit(whole))
        b.step(fit(split))
    assert_close(params(split), params(whole), 1e-8)


class Counted:
    """Gaussian directions that note how many rows they are asked for at once."""

    def __init__(self, k: int) -> None:
        self.k, self.most = k, 0

    def count(self, leaves: Sequence[Tensor]) -> int:
        return self.k

    def draw(self, plane: Plane) -> Directions:
        rows, outer = Gaussian(self.k).draw(plane), self

        class Lazy:
            k = outer.k

            def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
                outer.most = max(outer.most, stop - start)
                return rows.rows(position, like, start, stop)

        return Lazy()


def test_directions_are_never_all_there_at_once() -> None:
    model, family = network(), Counted(9)
    HyperplaneSearch(model.parameters(), 1.0, family, ExactHessian(), SaddleFree(), chunk_size=2).step(fit(model))
    assert family.most == 4  # a chunk of pairs touches two blocks of directions


def test_clip_bounds_the_update() -> None:
    model, free = network(), network()
    before = params(model)
    opt = FoMoHKD(model.parameters(), k=3, clip=1e-3, accept=Acceptance(backtracks=0))
    opt.step(fit(model))
    other = FoMoHKD(free.parameters(), k=3)
    other.step(fit(free))
    update, full = params(model) - before, params(free) - before
    assert_close(update.norm(), torch.tensor(1e-3, dtype=F64), 1e-12)
    assert_close(update / update.norm(), full / full.norm(), 1e-9)
    assert opt.report.actual is not None
    torch.testing.assert_close(opt.report.predicted, opt.report.actual, rtol=1e-2, atol=0.0)
    loose = network()
    FoMoHKD(loose.parameters(), k=3, clip=1e6).step(fit(loose))
    assert torch.equal(params(loose), params(free))
