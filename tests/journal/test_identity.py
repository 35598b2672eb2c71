"""What a journal knows a run by."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import jetplane as jp
from jetplane.errors import JournalRefused
from jetplane.journal.identity import compare, identity, machine, tracked
from jetplane.optim import FoMoHBP, FoMoHKD, HorizonAdam
from jetplane.solvers import SaddleFree

Change = Callable[[nn.Module], tuple[nn.Module, dict[str, Any]]]


def of(model: nn.Module, **options: Any) -> dict[str, Any]:
    opt = FoMoHKD(model.parameters(), **{"lr": 0.1, "k": 2} | options)
    return json.loads(json.dumps(identity(opt, tracked(opt, model))))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_equal_runs_have_one_identity_and_lr_is_no_part_of_it() -> None:
    compare(of(model()), of(model(), lr=0.5, weight_decay=0.1, patience=None, chunk_size=1), "here")


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"k": 3},
            "directions is {'Gaussian': {'k': 2}} there and {'Gaussian': {'k': 3}} here; K is 2 there and 3 here",
        ),
        ({"seed": 4}, "seed is 0 there and 4 here"),
        ({"samples": 2}, "samples is 1 there and 2 here"),
        ({"clip": 1.0}, "clip is None there and 1.0 here"),
        ({"maximize": True}, "maximize is False there and True here"),
        ({"solver": SaddleFree()}, "solver is 'JitteredInverse(.*)' there and 'SaddleFree(.*)' here"),
        ({"curvature": "ggn"}, "curvature is 'ExactHessian()' there and 'GaussNewton()' here"),
    ],
)
def test_other_settings_are_named(options: dict[str, Any], message: str) -> None:
    pattern = "the journal somewhere is that of another run: " + re.escape(message).replace(re.escape(".*"), ".*")
    with pytest.raises(JournalRefused, match=pattern + r"\.$"):
        compare(of(model()), of(model(), **options), "somewhere")


@pytest.mark.parametrize(
    "other, message",
    [
        (
            lambda: model().double(),
            "number 0 of the parameters is 0.weight (2, 3) float32 with strides (3, 1) in group 0",
        ),
        (lambda: nn.Linear(3, 2), "it has 4 parameters there and 2 here; it has 3 buffers there and 0 here"),
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), "there and 0.weight (2, 4) float32"),
        (lambda: model().append(nn.Identity()).requires_grad_(True), None),
    ],
)
def test_another_model_is_named(other: Callable[[], nn.Module], message: str | None) -> None:
    if message is None:
        compare(of(model()), of(other()), "here")
    else:
        with pytest.raises(JournalRefused, match=re.escape(message)):
            compare(of(model()), of(other()), "here")


def test_other_buffers_are_named() -> None:
    other = model()
    other[1].running_mean = other[1].running_mean.double()
    with pytest.raises(
        JournalRefused, match=r"number 0 of the buffers is 1.running_mean \(2,\) float32 there and 1.run"
    ):
        compare(of(model()), of(other), "here")


def test_other_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(model())
    monkeypatch.setattr(jp, "__version__", "9.9")
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(
        JournalRefused, match=r"jetplane is '.*' there and '9\.9' here; torch is '.*' there and '1\.0' here"
    ):
        compare(before, of(model()), "here")


def test_a_header_without_an_entry_differs() -> None:
    there = copy.deepcopy(of(model()))
    del there["buffers"]
    with pytest.raises(JournalRefused, match="buffers is None there and"):
        compare(there, of(model()), "here")


def test_optimizers_of_another_kind_are_refused() -> None:
    one = model()
    opt = HorizonAdam(one.parameters())
    with pytest.raises(
        JournalRefused, match="the optimizer is HorizonAdam, whose update is no sum of directions with a"
    ):
        identity(opt, tracked(opt, one))


def test_a_gradient_is_refused() -> None:
    opt = FoMoHBP(model().parameters())
    with pytest.raises(JournalRefused, match="the directions are Gradient, and a gradient is a function of the batch"):
        identity(opt, tracked(opt, None))


def test_names_are_those_of_the_model_or_of_the_optimizer() -> None:
    one = model()
    assert tracked(FoMoHKD(one.parameters()), one).names[0] == "0.weight"
    assert tracked(FoMoHKD(one.named_parameters()), None).names[0] == "0.weight"
    plain = tracked(FoMoHKD(one.parameters()), None)
    assert plain.names == ["parameter 0", "parameter 1", "parameter 2", "parameter 3"]
    assert (plain.groups, plain.buffers, plain.kept, plain.aliases) == ([0, 0, 0, 0], {}, set(), {})
    first, *others = one.parameters()
    assert tracked(FoMoHKD([{"params": [first]}, {"params": others}]), None).names[1] == "group 1's parameter 0"


def test_names_that_a_model_has_twice_and_buffers_that_it_does_not_save() -> None:
    one = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one[1].weight = one[0].weight
    one.register_buffer("scratch", torch.zeros(1), persistent=False)
    one.register_buffer("saved", torch.zeros(1))
    found = tracked(FoMoHKD(one.parameters()), one)
    assert found.names == ["0.weight", "0.bias", "1.bias"] and found.aliases == {"1.weight": 0}
    assert set(found.buffers) == {"scratch", "saved"} and found.kept == {"saved"}


def test_a_parameter_of_another_model() -> None:
    opt = FoMoHKD(model().parameters())
    message = "parameter 0 of the optimizer is no parameter of the model Sequential; expected the model that it trains"
    with pytest.raises(JournalRefused, match=message):
        tracked(opt, model())


def test_the_machine_is_noted() -> None:
    assert machine(torch.device("cpu")) == {
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
