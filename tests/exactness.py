"""Programs whose forward gradient is exact once noise takes every coordinate in turn, and the check of that."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import jetplane as jp
from jetplane.gradients.plan.noise_plan import Site

B = 4

LABELS = torch.arange(B) % 3


class Coordinates:
    """Every coordinate of every site in turn."""

    def __init__(self, sites: list[Site]) -> None:
        self._sizes = [site.shape.numel() for site in sites]
        self.count = sum(self._sizes)

    def rows(self, site: int, start: int, stop: int, like: Tensor) -> Tensor:
        index = torch.arange(start, stop, device=like.device) - sum(self._sizes[:site])
        hot = index[:, None] == torch.arange(self._sizes[site], device=like.device)[None, :]
        return (hot.to(like.dtype) * math.sqrt(self.count)).reshape(stop - start, *like.shape)


def check_exact(
    module: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    every_site: bool = True,
    close: float = 1e-10,
    **options: Any,
) -> list[Site]:
    """The estimate equals backprop for each parameter; buffers and random state are as after one run.

    Without a control variate, and with one whose Jacobians and lengths of noise are any numbers. Batch norms have their
    unbiased form unless ``options`` say otherwise.
    """
    options = {"batch_norm": "exact"} | options
    named = dict(module.named_parameters())
    module.zero_grad()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    start = torch.get_rng_state()
    losses = loss_fn(*batch)
    (losses.sum() / losses.shape[0]).backward()
    wanted = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    after = {name: buffer.clone() for name, buffer in module.named_buffers()}
    end = torch.get_rng_state()

    def again() -> None:
        module.zero_grad()
        torch.set_rng_state(start)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(before[name])

    def compare(estimate: jp.ForwardGradient) -> None:
        again()
        with jp.forward_only():
            loss = estimate(loss_fn, *batch)
        assert loss.grad_fn is None and all(p.grad is None or p.grad.grad_fn is None for p in named.values())
        torch.testing.assert_close(loss, losses.detach().sum() / losses.shape[0])
        for name, gradient in wanted.items():
            torch.testing.assert_close(
                named[name].grad, gradient, rtol=0, atol=close, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert torch.equal(torch.get_rng_state(), end)
        for name, buffer in module.named_buffers():
            torch.testing.assert_close(buffer, after[name])

    again()
    with jp.forward_only():
        learned = jp.ForwardGradient(named, **options)
        sites = learned.sites(loss_fn, *batch)
        assert torch.equal(torch.get_rng_state(), start)
        learned(loss_fn, *batch)
    noise = Coordinates(sites)
    options = {"samples": max(1, noise.count), "chunk_size": 256, "noise": lambda seed, step: noise} | options
    compare(jp.ForwardGradient(named, control=False, **options))
    state = learned.state_dict()
    jacobians = [key for key in state["control"] if ".jacobian." in key]
    assert len(jacobians) == sum(site.layout is not None for site in sites) or not every_site
    if jacobians:
        for key in jacobians:
            state["control"][key] = torch.randn_like(state["control"][key])
            for power in (key.replace(".jacobian.", f".{what}.") for what in ("unexplained", "explained")):
                state["control"][power] = torch.rand_like(state["control"][power])
            state["control"][key.partition(".")[0] + ".calls"].fill_(100)  # by now noise is of different lengths
        controlled = jp.ForwardGradient(named, **options)
        controlled.load_state_dict(state)
        compare(controlled)
    return sites


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        h = (h + self.b(h)).relu()
        return self.d(h + self.c(h).tanh())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.cells, self.out, self.axis = kind(3, 2, batch_first=batch_first), nn.Linear(2, 3), int(batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0].select(self.axis, -1))


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.out = nn.LSTMCell(3, 4), nn.GRUCell(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 4)
        k = x.new_zeros(len(x), 3)
        for t in range(2):
            h, c = self.lstm(x[:, t], (h, c))
            k = self.gru(h, k)
        return self.out(k)


class Vision(nn.Module):
    """A class token, learned places, and a pooled token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 4, 4))
        self.block = nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.patch(x)], 1) + self.places
        return self.head(self.block(h)[:, 0])


class Attention(nn.Module):
    """Padding, dropped attention weights and a learned bias on the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.bias = nn.Embedding(7, 4, padding_idx=0), nn.Parameter(torch.randn(3, 3))
        self.attention, self.out = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True), nn.Linear(4, 3)

    def forward(self, t: Tensor) -> Tensor:
        h = self.tokens(t)
        return self.out(self.attention(h, h, h, attn_mask=self.bias, need_weights=False)[0].mean(1))


class Latents(nn.Module):
    """Learned queries and a learned bias, for a fused kernel of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values, self.out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(8, 3)
        self.queries, self.bias = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.expand(len(x), 1, 2, 4)
        keys, values = self.keys(x).unsqueeze(1), self.values(x).unsqueeze(1)
        attended = F.scaled_dot_product_attention(queries, keys, values)
        biased = F.scaled_dot_product_attention(keys[:, :, :2], keys, values, attn_mask=self.bias)
        return self.out((attended + biased).flatten(1))


class Adapter(nn.Module):
    """A weight with a low-rank part and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.left, self.right = (nn.Parameter(torch.randn(*s)) for s in ((5, 3), (5, 1), (1, 3)))
        self.out = nn.Linear(5, 3)
        self.register_buffer("mask", (torch.rand(5, 3) > 0.3).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, (self.w + self.left @ self.right) * self.mask).relu())


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        with torch.no_grad():
            target, turned = self.c(self.a(x)), self.b.weight.t()
        gate = self.b(h.detach()).sigmoid()
        return self.c(h * gate + h.detach() * F.linear(h, self.b.weight.detach()) + h @ turned) + target


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[:, :2] *= 2
        h[:, 2:].add_(self.scale[2:])
        joined = x.new_zeros(len(x), 8)
        joined[:, :4] = h.tanh()
        joined[:, 4:] = self.b(h)
        k = joined.clone()
        k.mul_(self.scale.repeat(2))
        k += 1
        return self.c(F.silu(k, inplace=True))


class Zeroed(nn.Module):
    """What a layer made is overwritten by a constant, in part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[:, 1:].zero_()
        return self.b(h.tanh())


class Experts(nn.Module):
    """Samples are routed by their own values, so shapes depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.router, self.out = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        gates = self.router(h).softmax(1)
        out = torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            chosen = (gates.argmax(1) == k).nonzero().squeeze(1)
            out = out.index_add(0, chosen, expert(h[chosen]) * gates[chosen, k : k + 1])
        return self.out(out)


class Mixed(nn.Module):
    """Samples 0 and 1, and 2 and 3, are coupled, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.b(0.7 * h + 0.3 * h[torch.tensor([1, 0, 3, 2])])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.a, x, use_reentrant=False).tanh()
        return self.c(checkpoint(self.b, h, use_reentrant=True).tanh())


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Bilinear(3, 2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x[:, :3], x[:, 3:]).tanh())


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.out = nn.EmbeddingBag(6, 4, mode="mean"), nn.Linear(4, 3)

    def forward(self, t: Tensor) -> Tensor:
        return self.out(self.bags(t).tanh())


@dataclass(frozen=True)
class Case:
    """A classifier and its input."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Tensor]
    coupled: bool = False


class Branches(nn.Module):
    """A block of a residual network: batch norms that noise at one place is behind, and one behind them all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 1), nn.Conv2d(2, 3, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(3) for _ in range(4)])
        self.d, self.out = nn.Conv2d(3, 2, 3), nn.Linear(8, 3)
        self.last = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](self.a(x)).relu()
        h = (self.norms[1](self.b(h)) + self.norms[2](self.c(x))).relu()
        return self.out(self.last(self.d(self.norms[3](h))).relu().flatten(1))


class Steps(nn.Module):
    """Batch norm whose rows are not the samples, although there are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.out = nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).permute(1, 2, 0)  # steps, channels, samples
        return self.out(self.norm(h).permute(2, 0, 1).tanh().mean(1))


class Scaled(nn.Module):
    """A factor that belongs to the last layer, behind another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale, self.out = nn.Linear(4, 6), nn.Parameter(torch.rand(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.a(x) * self.scale)


CASES = [
    Case(
        "cnn",
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.AvgPool2d(2)),
            *(nn.Flatten(), nn.Linear(4, 5), nn.LeakyReLU(), nn.Linear(5, 3)),
        ),
        lambda: normal(B, 1, 7, 7),
    ),
    Case("residual", Residual, lambda: normal(B, 4)),
    Case(
        "batch norm in training",
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)),
        ),
        lambda: normal(B, 1, 6, 6),
        coupled=True,
    ),
    Case("batch norms in two branches", Branches, lambda: normal(B, 2, 4, 4), coupled=True),
    Case(
        "batch norms and dropout",
        lambda: nn.Sequential(
            *(nn.BatchNorm1d(4), nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None), nn.ReLU(inplace=True)),
            *(nn.Dropout(0.3), nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False), nn.GELU()),
            *(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)),
        ),
        lambda: normal(B, 4),
        coupled=True,
    ),
    Case(
        "two batch norms in a row",
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)
        ),
        lambda: normal(B, 4),
        coupled=True,
    ),
    Case(
        "batch norm before the loss",
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.BatchNorm1d(3)),
        lambda: normal(B, 4),
        coupled=True,
    ),
    Case("batch norm over steps, as many as samples", Steps, lambda: normal(B, B, 3), coupled=True),
    Case(
        "instance norm",
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, affine=True), nn.ReLU(), nn.Conv2d(2, 3, 3), nn.Tanh()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)),
        ),
        lambda: normal(B, 1, 6, 6),
    ),
    Case("scaled before the last layer", Scaled, lambda: normal(B, 4)),
    Case(
        "batch norm in evaluation",
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).eval(),
        lambda: normal(B, 4),
    ),
    Case(
        "dropout",
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 3)
        ),
        lambda: normal(B, 4),
    ),
    Case(
        "leaky, gelu and layer norm",
        lambda: nn.Sequential(
            *(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 5), nn.LayerNorm(5), nn.LeakyReLU()),
            nn.Linear(5, 3),
        ),
        lambda: normal(B, 4),
    ),
    Case(
        "one-dimensional",
        lambda: nn.Sequential(
            *(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.PReLU(), nn.ConvTranspose1d(4, 3, 3), nn.ReLU6()),
            *(nn.MaxPool1d(2), nn.Flatten(), nn.Linear(9, 3)),
        ),
        lambda: normal(B, 2, 6),
    ),
    Case(
        "root mean square norm",
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.RMSNorm(4), nn.SiLU(), nn.Linear(4, 4, bias=False), nn.Softplus(), nn.Linear(4, 3)
        ),
        lambda: normal(B, 3),
    ),
    Case("lstm, sequence first", lambda: Recurrent(nn.LSTM, False), lambda: normal(3, B, 3)),
    Case("lstm, batch first", lambda: Recurrent(nn.LSTM, True), lambda: normal(B, 3, 3)),
    Case("gru", lambda: Recurrent(nn.GRU, True), lambda: normal(B, 3, 3)),
    Case("rnn, as long as the batch", lambda: Recurrent(nn.RNN, False), lambda: normal(B, B, 3)),
    Case("cells", Cells, lambda: normal(B, 2, 3)),
    Case(
        "weight norm",
        lambda: nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.ReLU(), weight_norm(nn.Linear(5, 3))),
        lambda: normal(B, 4),
    ),
    Case(
        "spectral norm",
        lambda: nn.Sequential(spectral_norm(nn.Linear(4, 3)), nn.ReLU(), nn.Linear(3, 3)),
        lambda: normal(B, 4),
        coupled=True,  # the weight itself is what noise is added to
    ),
    Case("adapter", Adapter, lambda: normal(B, 3)),
    Case("vision transformer", Vision, lambda: normal(B, 3, 3)),
    Case("attention", Attention, lambda: torch.randint(0, 7, (B, 3))),
    Case("learned queries", Latents, lambda: normal(B, 5, 3)),
    Case("bags", Bags, lambda: torch.randint(0, 6, (B, 3))),
    Case("bilinear", Bilinear, lambda: normal(B, 5)),
    Case("detached", Detached, lambda: normal(B, 3)),
    Case("in place", InPlace, lambda: normal(B, 3)),
    Case("zeroed", Zeroed, lambda: normal(B, 3)),
    Case("experts", Experts, lambda: normal(B, 3), coupled=True),
    Case("coupled in pairs", Mixed, lambda: normal(B, 3), coupled=True),
    Case("checkpointed", Checkpointed, lambda: normal(B, 3).requires_grad_()),
    Case(
        "as wide as the batch", lambda: nn.Sequential(nn.Linear(B, B), nn.Tanh(), nn.Linear(B, 3)), lambda: normal(B, B)
    ),
    Case("logistic regression", lambda: nn.Linear(5, 3), lambda: normal(B, 5)),
]
