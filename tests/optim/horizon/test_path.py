"""The path of the last steps, measured by one pass."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from horizons import F64, data, losses_of
from jetplane.ad.run.replay import Replay
from jetplane.optim import HorizonAdam
from jetplane.optim.horizon import adam_step
from jetplane.optim.horizon.path import Path


def test_the_path_is_measured_exactly_and_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x, y = data()
    x, leaves = x.double(), list(model.parameters())
    direction = [torch.randn_like(leaf) for leaf in leaves]
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    random = torch.get_rng_state()
    places = [(leaf - part).detach() for leaf, part in zip(leaves, direction, strict=True)]
    found = Path(leaves).since(places, [lambda: losses_of(model)(x, y)], Replay())
    for place, leaf, part in zip(places, leaves, direction, strict=True):
        assert torch.equal(place, (leaf - part).detach())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())

    torch.manual_seed(3)
    loss = losses_of(model)(x, y).mean()
    grads = torch.autograd.grad(loss, leaves)
    slope = sum((g * d).sum() for g, d in zip(grads, direction, strict=True))
    with torch.no_grad():
        for leaf, part in zip(leaves, direction, strict=True):
            leaf -= part
    torch.manual_seed(3)
    other = losses_of(model)(x, y).mean().detach()
    torch.testing.assert_close(found.slope, slope)
    torch.testing.assert_close(found.back, (2 * (other - loss.detach() + slope)).clamp_min(0))
    torch.testing.assert_close(found.best, -slope / torch.maximum(found.curvature, found.back))


def test_a_loss_of_ones_own_takes_the_exact_curvature() -> None:
    weight = torch.tensor([1.0, 2.0], dtype=F64, requires_grad=True)
    x = torch.eye(2, dtype=F64)
    path = Path([weight])
    with pytest.warns(UserWarning, match="The exact curvature is taken instead"):
        found = path.along([lambda: (x @ weight) ** 4], [torch.ones(2, dtype=F64)], Replay())
    torch.testing.assert_close(found.slope, (4 * weight**3).mean().detach())
    torch.testing.assert_close(found.curvature, (12 * weight**2).mean().detach())


def test_a_batch_in_parts_is_measured_as_the_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = data()
    x, leaves = x.double(), list(model.parameters())
    places = [(leaf + 0.1 * torch.randn_like(leaf)).detach() for leaf in leaves]
    whole = Path(leaves).since(places, [lambda: losses_of(model)(x, y)], Replay())
    split = [lambda a=a, b=b: losses_of(model)(x[a:b], y[a:b]) for a, b in ((0, 5), (5, 6), (6, len(x)))]
    torch.testing.assert_close(Path(leaves).since(places, split, Replay()), whole, rtol=1e-12, atol=1e-12)


def test_what_is_forgotten_is_no_part_of_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    # or the lead would be that of the pull, and a pull uphill would take the rate to zero
    model = torch.nn.Linear(3, 2, bias=False)
    opt = HorizonAdam(model.parameters())
    leaf = model.weight
    monkeypatch.setattr(adam_step, "_shares", lambda *_: {0: torch.tensor(0.25, dtype=torch.float64)})
    before = leaf.detach().clone()
    for _ in range(3):
        with torch.no_grad():
            some = [([0], [torch.zeros_like(leaf)])]
            adam_step._move(opt._rules, opt._held(), some, torch.tensor(1.0), torch.tensor(True))
    torch.testing.assert_close(leaf.detach(), before * 0.75**3)
    torch.testing.assert_close(opt.state[leaf]["trail"], leaf.detach())
