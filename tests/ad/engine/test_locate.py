"""Where in the program something happened."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from own_operations import cube


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return cube(x)  # the line that the message names


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), Inner())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_missing_rule_names_op_module_line_and_remedy() -> None:
    net = Outer()
    leaves = list(net.parameters())
    line = Inner.forward.__code__.co_firstlineno + 1
    with pytest.raises(jp.MissingRule) as caught, jp.perturb(leaves, [torch.ones(1, *p.shape) for p in leaves]):
        net(torch.ones(2, 3))
    message = str(caught.value)
    assert "jptest.cube.default has no rule" in message
    assert "layers.1 (Inner)" in message
    assert f"test_locate.py:{line}" in message
    assert "jetplane.register" in message
    assert caught.value.op == "jptest.cube.default"
    assert isinstance(caught.value, NotImplementedError) and isinstance(caught.value, jp.JetplaneError)


def test_a_warning_names_the_first_line_outside_of_libraries() -> None:
    model = nn.Linear(2, 1)
    opt = jp.optim.HorizonAdam(model.parameters(), compile=True)
    scheduler = torch.optim.lr_scheduler.ConstantLR(opt)  # which wraps a step once more

    def losses(x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x[:, :1], reduction="none").sum(1) * (2 if x.sum() > 0 else 1)

    with pytest.warns(UserWarning, match="cannot be compiled and is run as it is") as said:
        opt.step(losses, torch.ones(3, 2))
    assert [one.filename for one in said] == [__file__] and scheduler is not None
