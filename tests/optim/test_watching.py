"""Who watches an optimizer is asked before anything moves, and told all that a step was made of."""

from __future__ import annotations

import pytest
import torch

from jetplane.directions import Plane
from jetplane.optim import FoMoHKD
from jetplane.optim.step_settings import Numbers
from jetplane.optim.watching import NOBODY, Moved
from jetplane.solvers import SaddleFree, Status

F64 = torch.float64


class Seen:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Numbers | Moved] = []
        self.refuses = False

    def before(self, now: Numbers) -> None:
        if self.refuses:
            raise RuntimeError("not now")
        self.told.append(now)

    def after(self, moved: Moved) -> None:
        self.told.append(moved)


def watched() -> tuple[torch.Tensor, torch.Tensor, FoMoHKD, Seen]:
    x, idle = (
        torch.tensor([3.0, -2.0, 1.0], dtype=F64, requires_grad=True),
        torch.ones(2, dtype=F64, requires_grad=True),
    )
    opt = FoMoHKD([x, idle], lr=0.5, k=2, solver=SaddleFree(), clip=0.1, weight_decay=0.25)
    seen = opt._watcher = Seen()
    return x, idle, opt, seen


def test_the_update_is_made_of_what_a_watcher_is_told() -> None:
    x, idle, opt, seen = watched()
    start = x.detach().clone()
    opt.step(lambda: (x**4).sum())
    now, moved = seen.told
    assert isinstance(now, Numbers) and isinstance(moved, Moved)
    assert (now.step, moved.now, moved.after.step, moved.status) == (0, now, 1, Status.OK)
    assert moved.used == [True, False] and moved.block is None and moved.factor < 1
    rows = opt.directions.draw(Plane(now.seed, now.step, 0, [x, idle], list)).rows(0, x, 0, 2)
    expected = start * (1 - 0.5 * 0.25) + moved.factor * 0.5 * (moved.coefficients[0] @ rows)
    torch.testing.assert_close(x.detach(), expected, rtol=1e-15, atol=0)
    torch.testing.assert_close(moved.slopes[0], rows @ (4 * start**3), rtol=1e-14, atol=0)
    assert float(moved.loss) == float((start**4).sum())


def test_a_watcher_that_refuses_stops_the_step_before_it() -> None:
    x, _, opt, seen = watched()
    seen.refuses = True
    for call in (lambda: opt.step(lambda: x.sum()), lambda: opt.steps(lambda y: (x * y).sum(), torch.ones(2, 3))):
        with pytest.raises(RuntimeError, match="not now"):
            call()
    assert x.tolist() == [3.0, -2.0, 1.0] and opt.param_groups[0]["step"] == 0


def test_steps_one_by_one_are_told_of_each() -> None:
    x, _, opt, seen = watched()
    opt.steps(lambda y: (x * y).square().sum(), torch.ones(3, 3, dtype=F64))
    assert [type(one) for one in seen.told] == [Numbers, Moved] * 3


def test_nobody_watches_at_first() -> None:
    x = torch.ones(2, requires_grad=True)
    assert FoMoHKD([x])._watcher is NOBODY
