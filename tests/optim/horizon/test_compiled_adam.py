"""Compiled steps of HorizonAdam are the uncompiled ones, whatever the groups do meanwhile."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import jetplane as jp
from jetplane.optim import HorizonAdam

pytestmark = pytest.mark.usefixtures("traced")

F64 = torch.float64
STEPS = 10


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()


def data(count: int = STEPS) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, 4, dtype=F64, generator=made), torch.randint(3, (count, 6), generator=made)


def losses_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none")


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": model[0].parameters(), "rate": 1e-3, "weight_decay": 0.1},
        {"params": model[1].parameters(), "lr": 0.5, "betas": (0.8, 0.99)},
        {"params": model[3].parameters()},
    ]


OPTIMIZERS: dict[str, Callable[..., HorizonAdam]] = {
    "as it is": lambda model, **more: HorizonAdam(model.parameters(), samples=2, **more),
    "groups": lambda model, **more: HorizonAdam(groups(model), samples=2, **more),
    "rate and clip": lambda model, **more: HorizonAdam(model.parameters(), samples=2, rate=1e-2, clip=0.1, **more),
    "no axes": lambda model, **more: HorizonAdam(model.parameters(), samples=2, rotate=False, forget=0.0, **more),
    "tangents in chunks": lambda model, **more: HorizonAdam(model.parameters(), samples=4, chunk_size=3, **more),
}


def same(model: nn.Module, twin: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, twin.get_parameter(name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_uncompiled(name: str) -> None:
    model, (xs, ys) = network(), data()
    twin = copy.deepcopy(model)
    fast, slow = OPTIMIZERS[name](model, compile=True), OPTIMIZERS[name](twin)
    with jp.forward_only():
        found = fast.steps(losses_of(model), xs[:7], ys[:7])
        for number in range(7, STEPS):
            fast.step(losses_of(model), xs[number], ys[number])
    expected = [slow.step(losses_of(twin), x, y) for x, y in zip(xs, ys, strict=True)]
    torch.testing.assert_close(found.loss, torch.stack(expected[:7]))
    assert found.taken.all() and fast.calls == slow.calls == STEPS
    torch.testing.assert_close((fast.report.rate, fast.report.lead), (slow.report.rate, slow.report.lead))
    assert all(parameter.grad is None for parameter in model.parameters())
    same(model, twin)
    with fast.averaged(), slow.averaged():
        same(model, twin)


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=2)
def test_sequences_of_many_lengths_are_compiled_steps(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 9)).double()
    twin = copy.deepcopy(model)

    def losses(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda words: F.cross_entropy(model(words).transpose(1, 2), words, reduction="none").mean(1)

    fast, slow = HorizonAdam(model.parameters(), samples=2, compile=True), HorizonAdam(twin.parameters(), samples=2)
    for length in (2, 3, 4, 5, 6, 3, 6, 2):
        words = torch.arange(4 * length).reshape(4, length) * 7 % 9
        torch.testing.assert_close(fast.step(losses(model), words), slow.step(losses(twin), words))
    same(model, twin)
    assert not [one for one in recwarn if "run as it is" in str(one.message)]


def test_a_cycle_of_rates_and_momentum_compiles_once() -> None:
    model, (xs, ys) = network(), data()
    twin = copy.deepcopy(model)
    pairs = [
        (model, HorizonAdam(model.parameters(), samples=2, compile=True)),
        (twin, HorizonAdam(twin.parameters(), samples=2)),
    ]
    for one, opt in pairs:
        schedule = OneCycleLR(opt, max_lr=1.0, total_steps=STEPS)
        for x, y in zip(xs, ys, strict=True):
            opt.step(losses_of(one), x, y)
            schedule.step()
    same(model, twin)


def test_a_state_goes_on_compiled_or_not() -> None:
    model, (xs, ys) = network(), data()
    first = HorizonAdam(model.parameters(), samples=2, compile=True)
    first.steps(losses_of(model), xs[:6], ys[:6])
    ends = []
    for compile in (True, False):
        twin = copy.deepcopy(model)
        opt = HorizonAdam(twin.parameters(), samples=2, compile=compile)
        opt.load_state_dict(copy.deepcopy(first.state_dict()))
        opt.steps(losses_of(twin), xs[6:], ys[6:])
        ends.append(twin)
    same(*ends)
    first.steps(losses_of(model), xs[6:], ys[6:])
    same(model, ends[0])


def test_late_parameters_and_parts_of_a_batch_run_as_they_are() -> None:
    model, (xs, ys) = network(), data()
    twin = copy.deepcopy(model)
    for one, compile in ((model, True), (twin, False)):
        one[0].weight.requires_grad_(False)
        # a control variate knows the captured program by another name than the program itself, and learns each apart
        opt = HorizonAdam(one.parameters(), samples=2, compile=compile, control=False)
        losses = losses_of(one)
        for number in range(STEPS):
            if number == 5:
                one[0].weight.requires_grad_(True)
            x, y = xs[number], ys[number]
            if number == 7:
                opt.step([partial(losses, x[:3], y[:3]), partial(losses, x[3:], y[3:])])
            else:
                opt.step(losses, x, y)
    same(model, twin)


def test_parameters_that_the_program_does_not_read_decay() -> None:
    model, (xs, ys) = network(), data()
    spare = torch.ones(3, 2, dtype=F64, requires_grad=True)
    ends = []
    for compile in (True, False):
        twin, unread = copy.deepcopy(model), spare.detach().clone().requires_grad_()
        opt = HorizonAdam(
            [*twin.parameters(), unread], samples=2, weight_decay=0.1, rate=0.01, allow_unused=True, compile=compile
        )
        opt.steps(losses_of(twin), xs, ys)
        ends.append((twin, unread))
    same(ends[0][0], ends[1][0])
    torch.testing.assert_close(ends[0][1], ends[1][1])
    assert float(ends[0][1].detach().max()) < 1


def test_a_loss_that_is_not_finite_moves_nothing() -> None:
    model, (xs, ys) = network(), data()
    opt = HorizonAdam(model.parameters(), samples=2, compile=True)
    opt.steps(losses_of(model), xs[:2], ys[:2])
    before = copy.deepcopy(model.state_dict())
    opt.step(losses_of(model), torch.full_like(xs[2], torch.nan), ys[2])
    assert not bool(opt.report.taken) and opt.report.status.name == "NONFINITE"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_dropout_is_the_same_in_both_passes() -> None:
    """Behind one layer is only the loss, so the gradient is exact, for the mask that was drawn."""
    layer, x = nn.Linear(5, 1, bias=False).double(), torch.ones(4, 5, dtype=F64)
    opt = HorizonAdam(layer.parameters(), samples=1, rate=1.0, rotate=False, forget=0.0, betas=(0.0, 0.0), compile=True)
    before = layer.weight.detach().clone()
    opt.step(lambda x: layer(F.dropout(x, 0.5)).sum(1), x)
    moved = (layer.weight.detach() - before).flatten()
    assert set(moved.sign().tolist()) <= {-1.0, 0.0}  # each entry is moved by whether it was kept in any sample


def test_a_clip_that_is_a_function_is_refused() -> None:
    message = "expected a number or None with compile=True."
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        HorizonAdam(network().parameters(), clip=lambda leaves: None, compile=True)
