"""An lr that was meant as Adam's rate is refused or said once; a schedule may begin low, and end low."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import lr_scheduler

from horizons import data, losses_of, net
from jetplane.optim import HorizonAdam
from jetplane.optim.horizon.low_lr import LowLr

MEANING = "HorizonAdam finds its rate by itself, and lr is a factor of that, 1 by default, for schedulers"
SAID = (
    f"lr is 0.001: {MEANING}, so that below 0.05 hardly anything is learned. Expected lr=1, or rate=0.001 to fix "
    "Adam's rate instead."
)


def test_a_number_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError) as caught:
        HorizonAdam(net().parameters(), 1e-3)
    assert str(caught.value) == (
        f"0.001 stands behind the parameters without a name: {MEANING}. Expected lr=1, or rate=0.001 to fix Adam's "
        "rate instead."
    )
    with pytest.raises(
        TypeError, match=r"^8 stands behind .* rate=8 to fix Adam's rate instead, or samples=8 tangents"
    ):
        HorizonAdam(net().parameters(), 8)


def test_an_lr_that_is_given_low_warns_once_with_both_spellings() -> None:
    model, (x, y) = net(), data()
    with pytest.warns(UserWarning) as caught:
        opt = HorizonAdam(model.parameters(), lr=1e-3, samples=1)
        for _ in range(3):
            opt.step(losses_of(model), x, y)
    assert [str(one.message) for one in caught] == [SAID]
    assert caught[0].filename == __file__


def test_a_low_lr_of_a_group_warns_also_later() -> None:
    first, second = net(), net()
    with pytest.warns(UserWarning) as caught:
        HorizonAdam([{"params": first[0].parameters()}, {"params": first[2].parameters(), "lr": 1e-3}])
    assert [str(one.message) for one in caught] == [SAID]
    opt = HorizonAdam(first.parameters())
    with pytest.warns(UserWarning) as caught:
        opt.add_param_group({"params": second.parameters(), "lr": 1e-3})
    assert [str(one.message) for one in caught] == [SAID]


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"lr": 0.05}, {"lr": 1e-3, "rate": 1.0}, {"rate": 1e-3}])
def test_what_is_meant_as_it_is_warns_not(options: dict[str, Any]) -> None:
    """Nothing is to move; a factor; with a rate of 1 the lr is in Adam's units; and the rate itself."""
    model, (x, y) = net(), data()
    opt = HorizonAdam(model.parameters(), samples=1, **options)
    for _ in range(3):
        opt.step(losses_of(model), x, y)


def steps_to_a_warning(make: Callable[[HorizonAdam], Any], count: int) -> int | None:
    """After how many steps with a scheduler there is a warning: that of the scheduler, or one of the hand."""
    opt = HorizonAdam(net().parameters(), samples=1)
    step = make(opt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(count):
            if callable(step):
                step(number)
            opt._low_lr.see(opt.param_groups)  # as the step does
            if not callable(step):
                opt._opt_called = True  # type: ignore[attr-defined]  # for torch, that the step comes first
                step.step()
            if caught:
                assert "lr is a factor" in str(caught[0].message)
                return number
    return None


def by_hand(of: Callable[[int], float]) -> Callable[[HorizonAdam], Callable[[int], None]]:
    def make(opt: HorizonAdam) -> Callable[[int], None]:
        return lambda number: opt.param_groups[0].update(lr=of(number))

    return make


@pytest.mark.parametrize(
    "make",
    [
        lambda opt: lr_scheduler.OneCycleLR(opt, 1.0, total_steps=3000),  # begins with 0.04 and ends with 4e-6
        lambda opt: lr_scheduler.CyclicLR(opt, 1e-3, 1.0, step_size_up=500),
        lambda opt: lr_scheduler.CosineAnnealingLR(opt, 3000),
        lambda opt: lr_scheduler.ExponentialLR(opt, 0.99),
        lambda opt: lr_scheduler.LinearLR(opt, 1e-3, total_iters=2000),
        lambda opt: lr_scheduler.LambdaLR(opt, lambda step: min(1.0, step / 1000)),  # its first one is 0
        lambda opt: lr_scheduler.LambdaLR(opt, lambda step: (step // 15 + 1) / 40),  # by epochs of 15 steps
        by_hand(lambda step: min(1.0, (step + 1) / 1000)),
    ],
)
def test_a_schedule_that_begins_or_ends_low_is_none_of_our_business(make: Callable[[HorizonAdam], Any]) -> None:
    assert steps_to_a_warning(make, 3000) is None


@pytest.mark.parametrize(
    ("make", "after"),
    [
        (lambda opt: lr_scheduler.OneCycleLR(opt, 1e-3, total_steps=3000), 0),  # it says what its highest one is
        (lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1e-3 * 0.999**step), 1),
        (lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1e-3), 20),  # sooner it could be a warm-up by epochs
        (lambda opt: lr_scheduler.CyclicLR(opt, 1e-4, 1e-3, step_size_up=50), 51),  # at the top
        (by_hand(lambda step: 1e-3), 1),
        (by_hand(lambda step: 6e-4 * min(1.0, step / 2000)), 200),
    ],
)
def test_a_schedule_of_rates_warns_as_soon_as_it_can_be_told(make: Callable[[HorizonAdam], Any], after: int) -> None:
    assert steps_to_a_warning(make, 3000) == after


def test_a_step_looks_at_what_a_scheduler_has_set() -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam(model.parameters(), samples=1)
    lr_scheduler.OneCycleLR(opt, 1e-3, total_steps=10)
    with pytest.warns(UserWarning, match=r"^lr is 0\.001: HorizonAdam finds its rate by itself") as caught:
        opt.step(losses_of(model), x, y)
    assert caught[0].filename == __file__


def test_a_run_that_is_gone_on_with_at_the_end_of_its_schedule_warns_not() -> None:
    model, (x, y) = net(), data()
    opt = HorizonAdam(model.parameters(), samples=1)
    opt.step(losses_of(model), x, y)
    opt.param_groups[0]["lr"] = 1e-3
    other = HorizonAdam(model.parameters(), samples=1)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for one in (opt, copy.deepcopy(opt), other):
        one._low_lr.see(one.param_groups)
        one._low_lr.see(one.param_groups)


def test_groups_that_stand_still_are_no_reason() -> None:
    watch = LowLr()
    for _ in range(300):
        watch.see([{"lr": 0.0, "rate": None}])
