"""HorizonAdam: how its rate follows the path, and the manners of torch.optim."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

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
    assert opt.calls % opt.every == 0
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
    assert opt.calls % opt.every == 0
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


def _losses_and_rates(shift: float) -> tuple[list[float], list[float]]:
    """Of 12 steps on random data, where some looks back find a better loss behind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    opt = HorizonAdam(model.parameters(), samples=2, every=2, forget=0.0)

    def losses_of_batch(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x).squeeze(1), y, reduction="none") - shift

    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(12):
        x, y = (torch.randn(shape, generator=generator, dtype=F64) for shape in [(8, 4), (8,)])
        opt.step(losses_of_batch, x, y)
        found.append((float(opt.report.loss), float(opt.report.rate)))
    losses, rates = zip(*found, strict=True)
    return [*losses], [*rates]


def test_a_constant_beside_the_losses_changes_no_step() -> None:
    """Where they cancel, as those of a policy's gradient do, any rise would be large beside the first mean loss."""
    losses, rates = _losses_and_rates(0.0)
    assert min(rates) < rates[0]  # so some looks have found the mean behind to be better
    assert _losses_and_rates(losses[0])[1] == pytest.approx(rates, rel=1e-9)


def test_a_first_loss_that_is_nan_is_not_the_measure_of_later_ones() -> None:
    opt, (x, y) = HorizonAdam((model := net()).parameters(), samples=2, every=2), data()
    for inputs in (x * math.nan, x, x):
        opt.step(losses_of(model), inputs, y)
    assert math.isfinite(opt.state_dict()["path"]["first"])


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
        ({"betas": 0.9}, "betas is 0.9; expected a pair of numbers, those of Adam."),
        ({"rate": -1.0}, "rate is -1.0; expected a finite number from 0."),
        ({"clip": 0.0}, "clip is 0.0; expected a positive norm, a function of the parameters, or None."),
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
    with FakeTensorMode():
        elsewhere = nn.Parameter(torch.empty(3, device="mps"))
    with pytest.raises(ValueError, match=r"^a parameter is on mps, which has no float64 for the path; expected"):
        HorizonAdam([elsewhere])
    with pytest.raises(
        ValueError, match=r"^a parameter is on meta, where there are no numbers; expected it on another"
    ):
        HorizonAdam([nn.Parameter(torch.empty(3, device="meta"))])
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


# -- a rate that is given ----------------------------------------------------------------------------------------------


def test_a_rate_that_is_given_is_that_of_adam() -> None:
    """Behind a single layer is only the loss, so the gradient is exact, and the steps are those of torch's Adam."""
    x = torch.randn(32, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.ones(4, dtype=F64, requires_grad=True) for _ in range(2))
    opt = HorizonAdam([ours], rate=0.01, rotate=False, betas=(0.8, 0.99))
    adam = torch.optim.Adam([theirs], lr=0.01, betas=(0.8, 0.99))
    for _ in range(30):
        opt.step(lambda x: F.mse_loss(x @ ours, 2 * x[:, 0], reduction="none"), x)
        adam.zero_grad()
        F.mse_loss(x @ theirs, 2 * x[:, 0]).backward()
        adam.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-10, atol=0)
    assert float(opt.report.rate) == 0.01


def test_one_group_may_have_a_rate_of_its_own() -> None:
    model, (x, y) = net(), data()
    groups = [{"params": model[0].parameters(), "rate": 0.0}, {"params": model[2].parameters()}]
    opt = HorizonAdam(groups, samples=2)
    before = copy.deepcopy(model.state_dict())
    for _ in range(6):
        opt.step(losses_of(model), x, y)
    after = model.state_dict()
    assert torch.equal(before["0.weight"], after["0.weight"]) and not torch.equal(before["2.weight"], after["2.weight"])
    assert float(opt.report.rate) > 0


# -- schedulers that change Adam's betas -------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 1.0, total_steps=60),
    "cyclic": lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, 0.01, 1.0, step_size_up=10),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_cycle_of_lr_and_momentum_trains_without_a_word_and_is_resumed(name: str) -> None:
    """Warnings are errors here: a schedule may begin and end low."""
    x, y = data()

    def made(seed: int) -> tuple[nn.Module, HorizonAdam, Any]:
        model = net(seed)
        opt = HorizonAdam(model.parameters(), samples=4)
        return model, opt, SCHEDULERS[name](opt)

    def train(model: nn.Module, opt: HorizonAdam, schedule: Any, count: int) -> list[tuple[float, float]]:
        found = []
        for _ in range(count):
            loss = float(opt.step(losses_of(model), x, y))
            found.append((loss, opt.param_groups[0]["betas"][0]))
            schedule.step()
        return found

    whole, part, rest = made(1), made(1), made(2)
    found = train(*whole, 59)
    assert found[-1][0] < 0.7 * found[0][0]
    assert len({beta for _, beta in found}) > 10  # the momentum went along
    first = train(*part, 30)
    for there, here in zip(part, rest, strict=True):
        here.load_state_dict(copy.deepcopy(there.state_dict()))
    assert first + train(*rest, 29) == found


# -- clipping ----------------------------------------------------------------------------------------------------------


def test_the_gradient_is_clipped_as_torch_does() -> None:
    x, norms = torch.eye(4, dtype=F64), []
    weight, same = (torch.full((4,), 3.0, dtype=F64, requires_grad=True) for _ in range(2))

    def watched(leaves: list[Tensor]) -> None:
        norms.append(float(torch.nn.utils.clip_grad_norm_(leaves, 0.5)))

    opts = [HorizonAdam([weight], rotate=False, clip=0.5), HorizonAdam([same], rotate=False, clip=watched)]
    for one, opt in zip((weight, same), opts, strict=True):
        opt.step(lambda x, one=one: F.mse_loss(x @ one, 0 * x[0], reduction="none"), x)
    assert norms == [pytest.approx(3.0)]  # of x_i = 3, each 2 * 3 / 4
    grad = opts[0].state[weight]["exp_avg"] / 0.1
    torch.testing.assert_close(
        grad, torch.full((4,), 0.25, dtype=F64), rtol=1e-5, atol=0
    )  # torch divides by norm + 1e-6
    assert torch.equal(weight, same)


# -- the parts of a batch ----------------------------------------------------------------------------------------------


def test_closures_for_the_parts_of_a_batch_are_a_step_with_all_of_it() -> None:
    """The gradient of one layer is exact, so the path is the same but for rounding."""
    x = torch.randn(24, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    paths = []
    for parts in (1, 3):
        weight = torch.ones(4, dtype=F64, requires_grad=True)
        opt = HorizonAdam([weight])

        def loss_fn(x: Tensor, weight: Tensor = weight) -> tuple[Tensor, int]:
            return F.mse_loss(x @ weight, 2 * x[:, 0], reduction="none"), len(x)

        for _ in range(12):
            if parts == 1:
                opt.step(loss_fn, x, has_aux=True)
            else:
                opt.step([lambda some=some: loss_fn(some) for some in x.chunk(parts)], has_aux=True)
        paths.append(torch.cat([weight.detach(), opt.report.loss.view(1), opt.report.rate.view(1)]))
        assert opt.report.aux == (24 if parts == 1 else [8, 8, 8])
    torch.testing.assert_close(paths[0], paths[1], rtol=1e-9, atol=0)


# -- parameters that come later ----------------------------------------------------------------------------------------


def test_a_group_that_comes_later_moves_from_then_on_as_from_the_start() -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam(model[2].parameters(), samples=4, allow_unused=True)
    before = model[0].weight.detach().clone()
    for _ in range(30):
        opt.step(losses_of(model), x, y)
    assert torch.equal(before, model[0].weight) and opt.estimate.step == 30
    opt.add_param_group({"params": model[0].parameters(), "weight_decay": 0.1})
    opt.step(losses_of(model), x, y)
    # Adam's first step, without the mean's bias to zero: each entry along the axes moves by one rate
    state, kept = opt.state[model[0].weight], 1 - float(opt.report.rate) * 0.1
    turned = (model[0].weight.detach() - kept * before) @ state["basis"]
    torch.testing.assert_close(turned.abs(), torch.full_like(turned, float(opt.report.rate)), rtol=0.05, atol=0)
    losses = [float(opt.step(losses_of(model), x, y)) for _ in range(120)]
    assert losses[-1] < 0.3 * losses[0]
    rest = net(3)
    rest.load_state_dict(model.state_dict())
    other = HorizonAdam([{"params": rest[2].parameters()}, {"params": rest[0].parameters()}], samples=4)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    found = [[float(one.step(losses_of(m), x, y)) for _ in range(5)] for m, one in ((model, opt), (rest, other))]
    assert found[0] == found[1] and other.param_groups[1]["weight_decay"] == 0.1


def test_parameters_are_thawed_and_frozen_where_they_are() -> None:
    model, (x, y) = net(), data()
    model[0].requires_grad_(False)
    opt = HorizonAdam(model.parameters(), samples=4)
    weight, head = model[0].weight, model[2].weight
    seen = []
    for thawed in (False, True, False):
        model[0].requires_grad_(thawed)
        model[2].requires_grad_(not thawed)
        before = weight.clone(), head.clone()
        for _ in range(5):
            opt.step(losses_of(model), x, y)
        seen.append((not torch.equal(weight, before[0]), not torch.equal(head, before[1])))
    assert seen == [(False, True), (True, False), (False, True)]


@pytest.mark.parametrize("compiled", [False, True])
def test_where_no_parameter_requires_grad_nothing_moves(compiled: bool) -> None:
    """As torch.optim.Adam; and what is frozen goes on later where it was."""
    (model, twin), (x, y) = (net(), net()), data()
    twin.load_state_dict(model.state_dict())
    model.requires_grad_(False)
    opt, other = (HorizonAdam(one.parameters(), samples=4, compile=compiled) for one in (model, twin))
    before, loss = opt.state_dict(), losses_of(model)
    assert torch.equal(opt.step(loss, x, y), loss(x, y).mean())
    assert opt.report.status is Status.FLAT and not opt.report.taken and opt.calls == 0
    assert torch.equal(opt.step([lambda: loss(x, y), lambda: 3 * loss(x, y)]), 2 * loss(x, y).mean())
    assert opt.steps(loss, torch.stack([x, x]), torch.stack([y, y])).loss.tolist() == [float(loss(x, y).mean())] * 2
    opt.step(lambda x, y: (loss(x, y), x), x, y, has_aux=True)
    assert opt.report.aux is x
    with opt.averaged():
        opt.load_state_dict(copy.deepcopy(before))
    opt.train()
    for frozen in (False, True, False):
        model.requires_grad_(not frozen)
        for _ in range(0 if compiled else 2):  # one capture more says no more
            opt.step(losses_of(model), x, y)
            if not frozen:
                other.step(losses_of(twin), x, y)
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert all(map(torch.equal, model.parameters(), net().parameters())) == compiled


@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0, torch.tensor(math.nan)])
def test_an_lr_that_a_scheduler_has_spoilt_moves_nothing(lr: Any) -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam(model.parameters(), samples=2)
    opt.step(losses_of(model), x, y)
    before = [param.detach().clone() for param in model.parameters()]
    opt.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=r"^lr is .*; expected a finite number from 0\."):
        opt.step(losses_of(model), x, y)
    assert all(map(torch.equal, model.parameters(), before))


def test_a_group_that_is_refused_leaves_no_trace() -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam(model.parameters(), samples=2)
    with pytest.raises(ValueError, match=r"^lr is -1\.0; expected a finite number from 0\."):
        opt.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": -1.0})
    assert len(opt.param_groups) == 1
    opt.step(losses_of(model), x, y)
    state = opt.state_dict()
    state["path"]["begun"] = [0]
    with pytest.raises(
        ValueError, match=r"^the state is of 1 parameters that move, and here are 4; expected as many\."
    ):
        opt.load_state_dict(state)


# -- copies ------------------------------------------------------------------------------------------------------------


def _saved(pair: tuple[nn.Module, HorizonAdam]) -> tuple[nn.Module, HorizonAdam]:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), _saved])
def test_a_copy_goes_on_as_the_original_does(copied: Callable[[Any], Any]) -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam(model.parameters(), samples=2, clip=1.0, rate=0.01)
    model[0].bias.requires_grad_(False)
    for step in range(6):
        opt.step(losses_of(model), x, y)
        model[0].bias.requires_grad_(step > 2)  # one that comes later
    other, twin = copied((model, opt))
    assert twin.estimate.step == 6 and twin._leaves[0] is other[0].weight and twin.estimate is not opt.estimate
    with pytest.raises(RuntimeError, match="no report before the first step"):
        _ = twin.report
    found = [[float(one.step(losses_of(m), x, y)) for _ in range(6)] for m, one in ((model, opt), (other, twin))]
    assert found[0] == found[1]
    with twin.averaged(), opt.averaged():
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_code_of_the_documents_runs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "forward-only.md").read_text()
    block = text.partition("### Habits")[2].partition("```python\n")[2].partition("```")[0]
    assert "OneCycleLR" in block
    exec(compile(block, "<document>", "exec"), {})


def test_float16_has_no_gradients_whose_square_is_zero() -> None:
    """eps is zero there, too, and so dead units made parameters of infinity."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)).half()
    x, y = torch.randn(4, 3).half(), torch.arange(4) % 3
    opt = HorizonAdam(model.parameters())
    losses = [opt.step(lambda x: F.cross_entropy(model(x).float(), y, reduction="none"), x) for _ in range(8)]
    assert torch.stack(losses).isfinite().all() and losses[-1] < losses[0]
    assert all(leaf.isfinite().all() for leaf in model.parameters())
