"""HorizonAdam: how its rate follows the path, and the manners of torch.optim."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from horizons import F64, data, losses_of, net
from jetplane.optim import HorizonAdam
from jetplane.solvers import Status


def test_it_trains_under_the_guard() -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam(model.parameters())
    with jp.forward_only():
        losses = [float(opt.step(losses_of(model), x, y)) for _ in range(250)]
    assert losses[-1] < 0.5 * losses[0]
    assert opt.report.status is Status.OK and float(opt.report.rate) > 0


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_rate_finds_the_scale_of_the_parameters(scale: float) -> None:
    """The same network in other units takes the same path: no rate has to be chosen."""
    paths = []
    for factor in (1.0, scale):
        weight = torch.zeros(4, dtype=F64, requires_grad=True)
        x = torch.randn(64, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
        target = x @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=F64)
        opt = HorizonAdam([weight], samples=1, eps=0.0)

        def loss_fn(x: Tensor, y: Tensor, weight: Tensor = weight, factor: float = factor) -> Tensor:
            return F.mse_loss(x @ (weight / factor), y, reduction="none")

        paths.append(torch.stack([opt.step(loss_fn, x, target) for _ in range(40)]))
    torch.testing.assert_close(paths[0], paths[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("inputs", "targets"), [(1e4, 1.0), (1.0, 1e3)], ids=["large inputs", "large targets"])
def test_a_first_step_that_is_too_long_to_be_believed_is_not_taken(inputs: float, targets: float) -> None:
    """Of a table as it is the first batch may want a step of many times the weights."""
    model, (x, y) = net(), data()

    def losses(x: Tensor, y: Tensor) -> Tensor:
        if targets == 1:
            return F.cross_entropy(model(inputs * x), y, reduction="none")
        return F.mse_loss(model(x), targets * (y + 1.0).unsqueeze(1).expand(-1, 3), reduction="none").mean(1)

    size = float(torch.stack([p.detach().abs().mean() for p in model.parameters()]).mean())
    opt = HorizonAdam(model.parameters())
    with jp.forward_only():
        found = [float(opt.step(losses, x, y))]
        assert float(opt.report.rate) == pytest.approx(0.03 * size)
        found += [float(opt.step(losses, x, y)) for _ in range(150)]
    assert max(found) < 2 * found[0] and found[-1] < 0.5 * found[0]


def test_the_rate_grows_on_a_slope_and_shrinks_where_the_path_has_overshot() -> None:
    weight = torch.zeros(3, dtype=F64, requires_grad=True)
    ones, far = torch.ones(8, 3, dtype=F64), torch.full((8, 3), 1e3, dtype=F64)
    opt = HorizonAdam([weight], samples=1)

    def loss_fn(ones: Tensor, far: Tensor) -> Tensor:
        return F.mse_loss(ones * weight, far, reduction="none").sum(1)

    rates = []
    for _ in range(24):
        opt.step(loss_fn, ones, far)
        rates.append(float(opt.report.rate))
    assert float(opt.report.lead) > 0 and rates[-1] > 5 * rates[0]
    before = rates[-1]
    assert opt.measures
    opt.step(loss_fn, ones, -far)  # now the path leads away from the minimum
    assert float(opt.report.lead) < -0.5 and float(opt.report.rate) < before


@pytest.mark.parametrize("far", [1e3, 3e38])  # with the latter the loss is not finite
def test_parameters_that_were_thrown_out_go_back_and_the_rate_is_halved_once(far: float) -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam(model.parameters())
    for _ in range(40):
        opt.step(losses_of(model), x, y)
    before, trail = float(opt.report.rate), opt.state[model[0].weight]["trail"].clone()
    loss = float(losses_of(model)(x, y).mean().detach())
    assert opt.measures
    with torch.no_grad():
        model[0].weight.add_(far)
    opt.step(losses_of(model), x, y)
    assert float(opt.report.rate) == before / 2
    assert float((model[0].weight.detach() - trail).abs().max()) < before
    for _ in range(19):
        opt.step(losses_of(model), x, y)
    assert float(opt.report.rate) > before / 4  # halved for as long as the trailing mean is better, it would end at 0
    assert float(losses_of(model)(x, y).mean().detach()) < 1.1 * loss


def test_a_batch_that_is_bad_everywhere_throws_nothing_out() -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam(model.parameters())
    for _ in range(40):
        opt.step(losses_of(model), x, y)
    before = model[0].weight.clone()
    opt.step(losses_of(model), x * math.nan, y)
    assert opt.report.status is Status.NONFINITE and torch.equal(model[0].weight, before)


def test_the_average_is_where_the_model_is_evaluated() -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam(model.parameters(), samples=2, power=8.0)
    weight = model[0].weight
    expected = weight.detach().clone()
    for count in range(1, 6):
        opt.step(losses_of(model), x, y)
        expected += 8 / (count + 8) * (weight.detach() - expected)
    trained = weight.detach().clone()
    with opt.averaged():
        torch.testing.assert_close(weight.detach(), expected)
        opt.eval()  # again is no harm
        with pytest.raises(RuntimeError, match=r"^the averaged parameters are in the model; expected a call of train"):
            opt.step(losses_of(model), x, y)
    assert torch.equal(weight.detach(), trained)
    opt.eval()
    with opt.averaged():
        pass
    torch.testing.assert_close(weight.detach(), expected)  # as it was before
    opt.train()
    assert torch.equal(weight.detach(), trained)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam(model.parameters(), samples=2)
    for _ in range(3):
        opt.step(losses_of(model), x, y)
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    opt.step(losses_of(model), x * math.nan, y)
    assert opt.report.status is Status.NONFINITE
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    after = opt.state_dict()
    for number, parts in state["state"].items():
        assert all(torch.equal(after["state"][number][name], part) for name, part in parts.items())
    assert after["path"]["count"] == 3 and after["path"]["rate"] == state["path"]["rate"]
    opt.step(losses_of(model), x, y)
    assert opt.report.status is Status.OK


def test_a_run_that_is_resumed_is_the_run_that_was_not() -> None:
    x, y = data()
    whole, part, rest = net(1), net(1), net(2)
    opt = HorizonAdam(whole.parameters(), samples=2, every=3, weight_decay=0.1)
    for _ in range(12):
        opt.step(losses_of(whole), x, y)
    first = HorizonAdam(part.parameters(), samples=2, every=3, weight_decay=0.1)
    for _ in range(5):
        first.step(losses_of(part), x, y)
    rest.load_state_dict(part.state_dict())
    second = HorizonAdam(rest.parameters(), samples=2, every=3, weight_decay=0.1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(7):
        second.step(losses_of(rest), x, y)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))
    assert float(second.report.rate) == float(opt.report.rate)
    assert second.state_dict()["path"] == opt.state_dict()["path"]  # also the slopes, by which weights are forgotten


def test_groups_and_schedulers() -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam([{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}], samples=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 1.0)
    before = copy.deepcopy(model.state_dict())
    opt.step(losses_of(model), x, y)
    schedule.step()
    after = model.state_dict()
    assert torch.equal(before["0.weight"], after["0.weight"]) and not torch.equal(before["2.weight"], after["2.weight"])
    with pytest.raises(RuntimeError, match=r"^the parameters of HorizonAdam are fixed; expected all groups in the"):
        opt.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})


def test_parameters_that_do_not_move_stay() -> None:
    model, (x, y) = net(), data()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    opt = HorizonAdam(model.parameters(), samples=2)
    loss, aux = opt.step(lambda x, y: (losses_of(model)(x, y), "seen"), x, y, has_aux=True), opt.report.aux
    assert torch.equal(model[0].weight, before) and aux == "seen" and loss.ndim == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0; expected a finite number from 0."),
        ({"lr": math.nan}, "lr is nan; expected a finite number from 0."),
        ({"betas": (1.0, 0.9)}, "betas[0] is 1.0; expected a number from 0, below 1."),
        ({"betas": (0.9, -0.1)}, "betas[1] is -0.1; expected a number from 0, below 1."),
        ({"every": 0}, "every is 0; expected a positive whole number of steps."),
        ({"every": 1.5}, "every is 1.5; expected a positive whole number of steps."),
        ({"forget": -1.0}, "forget is -1.0; expected a finite number from 0."),
        ({"power": -1.0}, "power is -1.0; expected a finite number from 0."),
        ({"samples": 0}, "samples is 0; expected a positive whole number."),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        HorizonAdam(net().parameters(), **options)


def test_bad_calls() -> None:
    opt = HorizonAdam(net().parameters())
    with pytest.raises(RuntimeError, match=r"^there is no report before the first step; expected a call of step\."):
        _ = opt.report
    with pytest.raises(TypeError, match=r"^step got NoneType; expected a function that returns the losses"):
        opt.step()
    with pytest.raises(ValueError, match=r"^the state has no 'path'; expected one that HorizonAdam\.state_dict gave\."):
        opt.load_state_dict({"state": {}, "param_groups": []})
    for name in ("lead", "slopes"):
        state = opt.state_dict()
        del state["path"][name]
        message = rf"^the state's path has no '{name}'; expected one that HorizonAdam\.state_dict gave\."
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(state)
    with pytest.raises(ValueError, match=r"^no parameter requires grad; expected at least one that can move\."):
        HorizonAdam([torch.zeros(1)])


# -- forgetting -----------------------------------------------------------------------------------------------------


# -- copies ---------------------------------------------------------------------------------------------------------


def _saved(pair: tuple[nn.Module, HorizonAdam]) -> tuple[nn.Module, HorizonAdam]:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), _saved])
def test_a_copy_goes_on_as_the_original_does(copied: Callable[[Any], Any]) -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam(model.parameters(), 2)
    for _ in range(6):
        opt.step(losses_of(model), x, y)
    other, twin = copied((model, opt))
    assert twin.estimate.step == 6 and twin._leaves[0] is other[0].weight and twin.estimate is not opt.estimate
    with pytest.raises(RuntimeError, match="no report before the first step"):
        _ = twin.report
    found = [[float(one.step(losses_of(m), x, y)) for _ in range(6)] for m, one in ((model, opt), (other, twin))]
    assert found[0] == found[1]
    with twin.averaged(), opt.averaged():
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
