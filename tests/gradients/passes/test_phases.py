"""The passes at the nodes: noise in, derivatives out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from classifiers import X

PARAMETER = nn.Parameter(torch.ones(4, 3))
OTHER = nn.Parameter(torch.ones(3))


def overwritten(x: Tensor) -> Tensor:
    h = x * OTHER[:1]
    y = F.linear(h, PARAMETER.T)
    h.add_(1)
    return y.relu() @ torch.ones(3, 2) @ torch.ones(2)


def test_what_was_overwritten_before_its_derivative_is_refused() -> None:
    with pytest.raises(jp.UnsupportedProgram, match=r"the \(8, 4\) that aten.mm.default read or made was overwritten"):
        jp.forward_gradient(overwritten, {"weight": PARAMETER, "other": OTHER}, X)
