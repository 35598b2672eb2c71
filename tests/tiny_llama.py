"""A small decoder as Llama is built: RMS norms, rotary positions, grouped queries, gated linear units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, SHARED, LENGTH = 24, 16, 4, 2, 6


class Attention(nn.Module):
    """With a query for each head, and keys and values that heads share. Knows heads by what it is given of them."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * size, bias=False) for n in (HEADS, SHARED, SHARED))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        size = WIDTH // HEADS
        q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        q, k = turned(q), turned(k)
        k, v = (part.repeat_interleave(HEADS // SHARED, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(-2))
        return out


def turned(x: Tensor) -> Tensor:
    """(B, H, L, size) with each position turned by its own angles."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * rates
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


class GatedUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 20, bias=False), nn.Linear(WIDTH, 20, bias=False)
        self.down = nn.Linear(20, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.attention, self.unit = Attention(), GatedUnit()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        out: Tensor = x + self.unit(self.second(x))
        return out


class TinyLlama(nn.Module):
    """Logits (B, L, vocabulary) of tokens (B, L)."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


def tokens(rows: int = 4) -> Tensor:
    return (torch.arange(rows * LENGTH) * 7 % 23 + torch.arange(rows * LENGTH) // 11).reshape(rows, LENGTH) % VOCABULARY


def loss(model: nn.Module, x: Tensor, reduction: str = "mean") -> Tensor:
    """Of the next token; with "none" the mean of each row."""
    found = F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    found = found.unflatten(0, (x.shape[0], -1)).mean(1)
    return found if reduction == "none" else found.mean()


def parallelised(model: Any, mesh: Any) -> Any:
    """Columns and rows of its products on the processes of a mesh of one dimension."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(len(model.layers)):
        for name in ("attention.q", "attention.k", "attention.v", "unit.gate", "unit.up"):
            plan[f"layers.{number}.{name}"] = ColwiseParallel()
        for name in ("attention.o", "unit.down"):
            plan[f"layers.{number}.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def sharded(model: Any, **options: Any) -> Any:
    """Each layer, and the rest, by FSDP."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)
