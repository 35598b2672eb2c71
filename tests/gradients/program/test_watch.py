"""The engine, watched: which values depend on parameters, and what may not be done to those."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from classifiers import X

PARAMETER = nn.Parameter(torch.ones(4, 3))
OTHER = nn.Parameter(torch.ones(3))


def written(x: Tensor) -> Tensor:
    PARAMETER.mul_(x.sum(1)[:4, None].abs().sum() * OTHER)
    return (x @ PARAMETER).sum(1)


def test_writing_into_a_parameter_is_refused() -> None:
    with pytest.raises(jp.UnsupportedProgram, match="writes into a parameter"):
        jp.forward_gradient(written, {"weight": PARAMETER, "other": OTHER}, X)
