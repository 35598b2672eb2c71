"""Small programs as researchers write them, against double backward: functions of some tensors that give one number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import jetplane as jp
from cases import F64, assert_quadratic
from jetplane.testing.oracle import double_backward

grad, vmap = torch.func.grad, torch.func.vmap
GENERATOR = torch.Generator().manual_seed(0)
POINTS, SAMPLES = (torch.randn(size, 2 * size - 6, dtype=F64, generator=GENERATOR) for size in (4, 5))
SEQUENCES = torch.randn(4, 5, 3, dtype=F64, generator=GENERATOR)
TARGETS, LABELS = torch.randn(5, dtype=F64, generator=GENERATOR), torch.tensor([0, 2, 1, 2, 0])


# -- derivatives inside ----------------------------------------------------------------------------------------------


def poisson(w: Tensor, b: Tensor, out: Tensor) -> Tensor:
    x = POINTS.clone().requires_grad_()
    slopes = torch.autograd.grad((torch.tanh(x @ w.T + b) @ out.T).sum(), x, create_graph=True)[0]
    rows = [torch.autograd.grad(slopes[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
    return ((rows[0] + rows[1] - 1) ** 2).mean()


def poisson_by_transforms(w: Tensor, b: Tensor, out: Tensor) -> Tensor:
    hessians = vmap(torch.func.hessian(lambda x: (torch.tanh(w @ x + b) @ out.T).sum()))(POINTS)
    return ((hessians.diagonal(dim1=1, dim2=2).sum(1) - 1) ** 2).mean()


def transport(w: Tensor, b: Tensor, out: Tensor) -> Tensor:
    def value(x: Tensor) -> Tensor:
        return torch.sin(x @ w.T + b) @ out.T

    return (torch.func.jvp(value, (POINTS,), (torch.ones_like(POINTS),))[1] - value(POINTS)).square().sum()


def gradient_penalty(w: Tensor, b: Tensor, out: Tensor) -> Tensor:
    slopes = vmap(grad(lambda x: (F.softplus(w @ x + b) @ out.T).sum()))(POINTS)
    return 10 * (slopes.norm(dim=1) - 1).square().mean()


def jacobian_penalty(w: Tensor, b: Tensor, out: Tensor) -> Tensor:
    jacobian = torch.func.jacrev(lambda x: torch.tanh(x @ w.T + b))(POINTS[0])
    return jacobian.square().sum() + (out @ b).sin().sum()


def forces(w: Tensor, b: Tensor, out: Tensor) -> Tensor:
    places = torch.cat([w, out.expand(2, 4).T], 1)
    first, second = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])

    def energy(places: Tensor) -> Tensor:
        far = (places[first] - places[second]).norm(dim=1)
        return places.new_zeros(4).index_add(0, first, torch.exp(-far) * b[first]).square().sum()

    return energy(places) + grad(energy)(places).square().sum()


# -- densities, kernels, determinants --------------------------------------------------------------------------------


def coupling(w: Tensor, v: Tensor) -> Tensor:
    z, spread, first = SAMPLES, torch.zeros((), dtype=F64), torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=F64)
    for weight, kept in ((w, first), (v, 1 - first)):
        h = torch.tanh((z * kept) @ weight.T) * (1 - kept)
        z, spread = z * torch.exp(h) + 0.5 * h, spread + h.sum(1)
    return (0.5 * z.square().sum(1) - spread).mean()


def turned(w: Tensor, v: Tensor) -> Tensor:
    weight = (w.tril(-1) + torch.eye(4, dtype=F64)) @ (v.triu(1) + torch.diag(v.diagonal().abs() + 0.1))
    return (SAMPLES @ weight.T).square().mean() - torch.linalg.slogdet(weight)[1]


def slater(w: Tensor, v: Tensor) -> Tensor:
    orbitals = torch.einsum("bk,ik,kj->bij", torch.tanh(SAMPLES @ w.T), v, w)
    sign, size = torch.linalg.slogdet(orbitals + torch.eye(4, dtype=F64))
    return (size.max() + (sign * torch.exp(size - size.max())).sum().abs().log()).sin()


def process(length: Tensor, noise: Tensor) -> Tensor:
    x = SAMPLES[:, :2] / (0.5 + length.square())
    kernel = torch.exp(-0.5 * (x[:, None] - x).square().sum(-1)) + (0.1 + noise.square()) * torch.eye(5, dtype=F64)
    lower = torch.linalg.cholesky(kernel)
    white = torch.linalg.solve_triangular(lower, TARGETS[:, None], upper=False)
    return white.square().sum() + 2 * lower.diagonal().log().sum() - torch.linalg.solve(kernel, TARGETS) @ TARGETS


def distances(length: Tensor, noise: Tensor) -> Tensor:
    x = SAMPLES[:, :2] / (0.5 + length.square())
    far = (x[:, None] - x).square().sum(-1).add(1e-6).sqrt()
    kernel = (1 + math.sqrt(3) * far) * torch.exp(-math.sqrt(3) * far) + (1 + noise.square()) * torch.eye(5, dtype=F64)
    return -torch.distributions.MultivariateNormal(torch.zeros(5, dtype=F64), kernel).log_prob(TARGETS)


def sinkhorn(a: Tensor, b: Tensor) -> Tensor:
    cost, f, g = (a[:, None] - b).square(), torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(5):
        f = -0.5 * torch.logsumexp((g - cost) / 0.5, 1)
        g = -0.5 * torch.logsumexp((f[:, None] - cost) / 0.5, 0)
    return (torch.exp((f[:, None] + g - cost) / 0.5) * cost).sum()


def sorted_apart(a: Tensor, b: Tensor) -> Tensor:
    top, places = b.topk(3)
    soft = torch.softmax(-(a - a.sort(descending=True)[0][:, None]).abs() / 0.3, -1)
    return (a.sort()[0] - b.sort()[0][:5]).square().sum() + soft.square().sum() + (top * b.gather(0, places)).sum()


def running(a: Tensor, b: Tensor) -> Tensor:
    found = a.cumsum(0).cummax(0)[0].square().sum() + b.cumprod(0).sum() + b.logcumsumexp(0).sin().sum()
    return found + a.kthvalue(2)[0] ** 2 + b.median() ** 3 + b.quantile(0.3).sin() + a.cummin(0)[0].tanh().sum()


# -- networks --------------------------------------------------------------------------------------------------------


def experts(w: Tensor, v: Tensor) -> Tensor:
    chances = (SAMPLES @ w[:, :3]).softmax(-1)
    share, chosen = chances.topk(2)
    found = torch.zeros_like(SAMPLES)
    for expert in range(3):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        found.index_add_(0, rows, torch.tanh(SAMPLES[rows] @ v.roll(expert, 0)) * share[rows, place, None])
    return found.square().sum() + (chances.mean(0) * F.one_hot(chosen, 3).double().mean((0, 1))).sum()


def rotary(w: Tensor, v: Tensor) -> Tensor:
    q, k = ((SAMPLES @ weight).reshape(5, 2, 2) for weight in (w, v))
    angles = torch.arange(5.0, dtype=F64)[:, None]
    cos, sin = angles.cos(), angles.sin()
    q, k = (torch.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 0] * sin + x[..., 1] * cos], -1) for x in (q, k))
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), k).square().sum()


def grouped_queries(w: Tensor, v: Tensor) -> Tensor:
    heads = (SAMPLES @ w).reshape(1, 5, 4, 1).transpose(1, 2)
    keys = (SAMPLES @ v)[:, :2].reshape(1, 5, 2, 1).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, keys, keys.sin(), is_causal=True, enable_gqa=True).square().sum()


def straight_through(w: Tensor, v: Tensor) -> Tensor:
    h = SAMPLES @ w
    rounded = h + ((h * 4).round() / 4 - h).detach()
    weight = v + (v.sign() * v.abs().mean() - v).detach()
    return F.cross_entropy(rounded.tanh() @ weight, LABELS)


def soft_codes(w: Tensor, v: Tensor) -> Tensor:
    h = SAMPLES @ w
    nearest = v[torch.cdist(h, v).argmin(1)]
    quantised = h + (nearest - h).detach()
    return quantised.square().sum() + F.mse_loss(nearest, h.detach()) + 0.25 * F.mse_loss(h, nearest.detach())


def tied(w: Tensor, v: Tensor) -> Tensor:
    tokens = torch.tensor([0, 3, 1])
    return F.cross_entropy(torch.tanh(F.embedding(tokens, w) @ v) @ w.T, tokens.roll(1))


def ensemble(w: Tensor, v: Tensor) -> Tensor:
    layer = nn.Linear(4, 4, bias=False, dtype=F64)
    weights = torch.stack([w, v, w @ v])
    found = vmap(lambda weight: torch.func.functional_call(layer, {"weight": weight}, (SAMPLES,)))(weights)
    return found.tanh().var(0).sum()


def recurrent(kind: type[nn.RNNBase], **options: Any) -> tuple[Callable[..., Tensor], list[tuple[int, ...]]]:
    torch.manual_seed(0)
    cell = kind(3, 2, batch_first=True, dtype=F64, **options)
    names, params = zip(*cell.named_parameters(), strict=True)

    def run(*values: Tensor) -> Tensor:
        packed = pack_padded_sequence(SEQUENCES, torch.tensor([5, 2, 3, 1]), batch_first=True, enforce_sorted=False)
        out, _ = torch.func.functional_call(cell, dict(zip(names, values, strict=True)), (packed,))
        return pad_packed_sequence(out, batch_first=True)[0].square().sum()

    return run, [tuple(param.shape) for param in params]


# -- memory ----------------------------------------------------------------------------------------------------------


def views(w: Tensor, v: Tensor) -> Tensor:
    y = w * 1
    part = y.view(-1)[3:9]
    part.mul_(2)
    y[1:, 2].add_(v[1:, 0])
    y.t()[0].mul_(3)
    y[[0, 2]] = v[:2] * y[1].detach().clone()
    y[:, 1:3] += v[0, :2]
    return y.square().sum() + part.sum() ** 2 + y.as_strided((3, 2), (2, 3), 1).exp().sum()


def swapped(w: Tensor, v: Tensor) -> Tensor:
    y = w.clone()
    first, second = y[0], y[1]
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    y[2:].swapaxes(0, 1)[1].zero_()
    wide = v[:1].expand(4, 4)
    return (y * torch.arange(4.0, dtype=F64)).square().sum() + (wide * y).sum() ** 2 + w.unfold(1, 3, 1).prod(2).sum()


def masked(w: Tensor, v: Tensor) -> Tensor:
    x = torch.tensor([1.0, math.nan, 2.0, 0.0], dtype=F64)
    there = ~x.isnan()
    found = torch.where(there, (x.nan_to_num() * w).sin(), 0.0).sum()
    safe = torch.where(v > 0, torch.where(v > 0, v, 1.0).sqrt(), 0.0).sum()
    return found + safe + w[w > 0].square().sum() + torch.nanmean(torch.where(there, v * v, math.nan))


def scattered(w: Tensor, v: Tensor) -> Tensor:
    places = torch.tensor([0, 1, 1, 2])
    found = torch.zeros((), dtype=F64)
    for reduce in ("sum", "mean", "prod", "amax", "amin"):
        start, index = torch.ones(3, 4, dtype=F64), places[:, None].expand(4, 4)
        found = found + start.scatter_reduce(0, index, w, reduce, include_self=reduce == "prod").sin().sum()
    return found + torch.zeros(3, 4, dtype=F64).index_add(0, places, v).prod(0).sum()


# (name, program, shapes of its arguments)
PLAIN, SQUARE, LINES = [(4, 2), (4,), (1, 4)], [(4, 4), (4, 4)], [(5,), (6,)]
PROGRAMS: list[tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = [
    *((f, PLAIN) for f in (poisson, poisson_by_transforms, transport, gradient_penalty, jacobian_penalty, forces)),
    *((f, SQUARE) for f in (coupling, turned, slater, experts, rotary, grouped_queries, straight_through, soft_codes)),
    *((f, SQUARE) for f in (tied, ensemble, views, swapped, masked, scattered)),
    *((f, [(2,), ()]) for f in (process, distances)),
    *((f, LINES) for f in (sinkhorn, sorted_apart, running)),
]
CELLS = {
    "lstm": recurrent(nn.LSTM),
    "gru": recurrent(nn.GRU, bidirectional=True),
    "rnn": recurrent(nn.RNN, num_layers=2),
}
ALL = {**{program.__name__: (program, shapes) for program, shapes in PROGRAMS}, **CELLS}


@pytest.mark.parametrize("name", ALL)
def test_a_program_of_research_is_exact(name: str) -> None:
    program, shapes = ALL[name]
    torch.manual_seed(0)
    leaves = [torch.randn(shape, dtype=F64).requires_grad_() for shape in shapes]
    directions = [torch.randn((3, *shape), dtype=F64) for shape in shapes]
    with sdpa_kernel(SDPBackend.MATH):  # the others have no double backward
        expected = double_backward(lambda: program(*leaves), leaves, directions)
    assert_quadratic(jp.quadratic(lambda *given: program(*given), tuple(leaves), tuple(directions)), expected)
    with jp.perturb(leaves, directions) as jets, torch.enable_grad():
        loss = program(*leaves)
    assert_quadratic(jets.quadratic(loss), expected)
    opt = jp.optim.FoMoHKD(leaves, k=2, seed=1)
    opt.step(torch.enable_grad()(lambda: program(*leaves)))
    assert opt.report.curvature is not None and bool(torch.isfinite(opt.report.curvature).all())
