"""Buffers that are assigned while a program runs are seen, and no others."""

from __future__ import annotations

import torch
from torch import nn

from jetplane.ad.run.rebound import Rebound


def test_what_was_assigned_outside_stays() -> None:
    norm, rebound = nn.BatchNorm1d(2), Rebound()
    norm.running_var = torch.full((2,), 3.0)
    with rebound.watched():
        norm.running_mean = torch.full((2,), 5.0)
        norm.running_mean = torch.full((2,), 6.0)
    norm.running_var = torch.full((2,), 4.0)
    left = rebound.contents()
    rebound.restore()
    assert norm.running_mean.tolist() == [0.0, 0.0] and norm.running_var.tolist() == [4.0, 4.0]
    rebound.assign(left)
    assert norm.running_mean.tolist() == [6.0, 6.0]
