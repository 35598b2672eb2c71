"""LoRA (Hu et al. 2021): linear layers that stay, with a product of two thin matrices beside them that moves."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .encoder import Classifier, SelfAttention

__all__ = ["LowRank", "add_adapters"]

_ADAPTED = ("query", "value")  # of each attention, as in the paper


class LowRank(nn.Module):
    """W x + b + (alpha / r) B A x, with A (r, in) and B (out, r); B is zero at first, so nothing is changed.

    Example:
        >>> base, x = nn.Linear(4, 3), torch.ones(2, 4)
        >>> layer = LowRank(base, 2, 4.0)
        >>> assert torch.equal(layer(x), base(x)) and not base.weight.requires_grad
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) of (..., in)."""
        return self.base(x) + self.scale * self.up(self.down(x))


def add_adapters(model: Classifier, rank: int, alpha: float, seed: int) -> None:
    """Adapters for query and value of every layer; they and the classifier's own layer are all that moves."""
    model.encoder.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for layer in model.encoder.modules():
            if isinstance(layer, SelfAttention):
                for name in _ADAPTED:
                    setattr(layer, name, LowRank(getattr(layer, name), rank, alpha))
