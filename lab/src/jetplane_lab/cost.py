"""What a step costs, in forward passes: the unit in which methods can be compared on any machine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["forward_equivalents"]


def forward_equivalents(step: Callable[[], object], model: nn.Module, batch: Tensor) -> float:
    """FLOPs of one real ``step`` over those of one ``no_grad`` forward pass of ``model`` on ``batch``.

    The counter is torch's and the same for all methods: it sees every matrix product and convolution that runs, those
    of tangent and second rows and of backward passes too, and leaves elementwise operations out. The step really
    happens: give copies of what must not change.

    Example:
        >>> model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(4, 8)
        >>> forward_equivalents(lambda: model(batch).sum().backward(), model, batch)  # the input needs no gradient
        2.5
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(batch)
    forward = counter.get_total_flops()
    if not forward:
        raise ValueError("the model's forward pass has no matrix product or convolution; expected one to compare with.")
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() / forward
