"""Programs of one operation each, all arguments perturbed and each of them alone, along one to three directions.

The operation database leaves these out, or perturbs all arguments together. The value has to be the operation's own,
too: a program in the place of an operation may be another one. Differences decide where torch's double backward fails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import jetplane as jp
from cases import F64, assert_close, assert_quadratic, randn, vec
from jetplane.testing.oracle import double_backward

Program = Callable[..., Any]
Primals = tuple[Any, ...]  # tensors, or sizes of random ones
SLOTS, PAIRS = torch.tensor([0, 2, 2]), torch.tensor([[0, 1, 1], [2, 0, 0]])
MASK, SEGMENTS = torch.tensor([True, False, True]), torch.tensor([2, 0, 3])
SIZES = torch.tensor([4, 2])


def _written(x: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    """A copy of ``x`` that was written to."""
    y = x * 1
    write(y)
    return y


def _packed(cell: Callable[..., Any], x: Tensor) -> Any:
    torch.manual_seed(1)  # of dropout between the layers
    out, state = cell(pack_padded_sequence(x, SIZES.flip(0), batch_first=True, enforce_sorted=False))
    return pad_packed_sequence(out, batch_first=True)[0], state


def _ctc_slope(grad: Tensor, x: Tensor) -> Tensor:
    """torch's own backward pass of the loss, whose result is that of no function of the log-probabilities."""
    given = (x.log_softmax(2), torch.tensor([[1, 2], [1, 1]]), [4, 3], [2, 1])
    return torch.ops.aten._ctc_loss_backward(grad, *given, *torch.ops.aten._ctc_loss(*given), 0)


def _cell(kind: type[nn.Module], **options: Any) -> Callable[..., Any]:
    torch.manual_seed(0)
    return kind(3, 2, batch_first=True, **options).double().requires_grad_(False)


def _by_hand(data: Tensor, reduce: str, start: float | None) -> Tensor:
    """Reductions of segments; of one without entries only where there is something to start with."""
    names = {"sum": Tensor.sum, "mean": Tensor.sum, "prod": Tensor.prod, "max": Tensor.amax, "min": Tensor.amin}
    begins = [] if start is None else [data.new_full((1, *data.shape[1:]), start)]
    parts = [part for part in data.split(SEGMENTS.tolist()) if begins or len(part)]
    counts = [max(1, len(part)) if reduce == "mean" else 1 for part in parts]  # what a mean starts with is not counted
    found = [names[reduce](torch.cat([*begins, part]), 0) for part in parts]
    return torch.stack([one / count for one, count in zip(found, counts, strict=True)])


PLACES: list[tuple[str, Program, Primals]] = [
    *(
        (
            f"scatter_reduce-{how}-{kept}",
            lambda x, s, how=how, kept=kept: x.scatter_reduce(0, PAIRS, s, how, include_self=kept),
            ((3, 3), (2, 3)),
        )
        for how, kept in itertools.product(("sum", "prod", "mean", "amax", "amin"), (True, False))
    ),
    *(
        (
            f"index_reduce_-{how}-{kept}",
            lambda x, s, how=how, kept=kept: (x * 1).index_reduce_(0, SLOTS, s, how, include_self=kept),
            ((4, 2), (3, 2)),
        )
        for how, kept in itertools.product(("prod", "mean", "amax", "amin"), (True, False))
    ),
    ("scatter-add", lambda x, s: x.scatter(0, SLOTS, s, reduce="add"), ((3,), (3,))),
    ("scatter-multiply-by", lambda x: x.scatter(0, SLOTS, 2.0, reduce="multiply"), ((3,),)),
    ("index_add-scaled", lambda x, s: x.index_add(1, SLOTS, s, alpha=2.5), ((2, 4), (2, 3))),
    ("index_add-of-a-number", lambda x, s: x.index_add(0, torch.tensor(0), s), ((), ())),
    ("index_copy-of-a-number", lambda x, s: x.index_copy(0, torch.tensor(1), s), ((3,), ())),
    ("index_fill", lambda x, s: x.index_fill(1, SLOTS[:2], s), ((3, 3), ())),
    ("masked_scatter", lambda x, s: x.masked_scatter(MASK, s), ((2, 3), (5,))),
    ("masked_fill_", lambda x, s: (x * 1).masked_fill_(MASK, s), ((3, 3), ())),
    ("put_-accumulating", lambda x, s: (x * 1).put_(torch.tensor([0, 3, 3]), s, accumulate=True), ((2, 3), (3,))),
    ("take_along_dim", lambda x: torch.take_along_dim(x, torch.tensor([0, 4, 4])), ((2, 3),)),
    (
        "select-and-slice-scatter",
        lambda x, s: x.select_scatter(s[0], 0, -1).slice_scatter(s, 0, 0, 4, 2),
        ((4, 2), (2, 2)),
    ),
    ("assigned", lambda x, s: _written(x, lambda y: y.__setitem__((..., [0, -1]), s)), ((2, 3), (2,))),
    ("swapped", lambda x: _written(x, lambda y: y.copy_(y.flip(0).clone() * y)), ((3, 2),)),
    ("out-of-a-view", lambda x: _written(torch.zeros(2, 3, dtype=F64), lambda y: torch.mul(x, x, out=y[1])), ((3,),)),
    ("overlapping-windows", lambda x: x.as_strided((3, 3), (1, 1)), ((6,),)),
    ("unfold_copy", lambda x: torch.unfold_copy(x, 1, 3, 2), ((2, 8),)),
    ("resize_", lambda x: (x * 1).resize_(6), ((2, 3),)),
    (
        "embedding_bag-weighted",
        lambda w, p: F.embedding_bag(
            torch.tensor([0, 2, 2, 1]), w, torch.tensor([0, 2]), mode="sum", per_sample_weights=p
        ),
        ((3, 4), (4,)),
    ),
    ("padded-sequences", lambda a, b: pad_packed_sequence(pack_sequence([a, b]))[0], ((3, 2), (2, 2))),
]

NUMBERS: list[tuple[str, Program, Primals]] = [
    *(
        (f"{name}-{p}", make(p), ((3, 4), (2, 4)) if name == "cdist" else ((4, 3),))
        for p in (0.5, 1.0, 1.5, 2.0, 3.0, math.inf)
        for name, make in (
            ("cdist", lambda p: lambda a, b: torch.cdist(a, b, p=p)),
            ("pdist", lambda p: lambda a: F.pdist(a, p=p)),
            ("norm", lambda p: lambda a: torch.linalg.vector_norm(a, p, 1)),
            ("renorm", lambda p: lambda a: a.renorm(p, 0, 0.5) if p < math.inf else a.renorm(3, 1, 0.5)),
        )
    ),
    ("cumprod-of-zeros", lambda a: a.cumprod(0), (vec(1, 0, 2, 0, 3),)),
    ("prod-of-zeros", lambda a: a.prod(1), (vec(1, 0, 0, 0, 2, 3).reshape(2, 3),)),
    ("logcumsumexp", lambda a: a.logcumsumexp(1), ((2, 4),)),
    ("quantile", lambda a, q: a.quantile(q.sigmoid()), ((5,), (2,))),
    ("nanquantile", lambda a: a.nanquantile(0.3, interpolation="midpoint"), ((3, 5),)),
    ("corrcoef", lambda a: torch.corrcoef(a), ((3, 5),)),
    ("cov-weighted", lambda a, w: torch.cov(a, aweights=w.exp()), ((3, 5), (5,))),
    ("gradient-at-points", lambda a, c: torch.gradient(a, spacing=(c.exp().cumsum(0),)), ((5,), (5,))),
    ("float_power", lambda a, b: torch.float_power(a.exp(), b), ((3,), (3,))),
    ("addmm-beta", lambda m, a, b: (m * 1).addmm_(a, b, beta=0.3, alpha=2), ((2, 4), (2, 3), (3, 4))),
    ("addbmm", lambda m, a, b: torch.addbmm(m, a, b, beta=0.5, alpha=2), ((2, 4), (3, 2, 3), (3, 3, 4))),
    ("conv_tbc", lambda x, w, b: torch.conv_tbc(x, w, b, 1), ((5, 2, 3), (3, 3, 2), (2,))),
    ("lstsq", lambda a, b: torch.linalg.lstsq(a, b).solution, ((4, 3), (4, 2))),
    ("lu_solve", lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b, adjoint=True), ((3, 3), (3, 2))),
    ("ormqr", lambda a, t, c: torch.ormqr(a, t, c), ((4, 3), (3,), (4, 2))),
    ("householder", lambda a, t: torch.linalg.householder_product(a, t), ((4, 3), (3,))),
    (
        "triangular",
        lambda a, b: torch.linalg.solve_triangular(
            a + 3 * torch.eye(3, dtype=F64), b, upper=False, left=False, unitriangular=True
        ),
        ((3, 3), (2, 3)),
    ),
    ("matrix_exp-of-zeros", lambda a: torch.linalg.matrix_exp(a), (torch.zeros(3, 3, dtype=F64),)),
    ("det-of-rank-two", lambda a: torch.linalg.det(a), (vec(1, 2, 3, 2, 4, 6, 1, 0, 1).reshape(3, 3),)),
    ("nuclear", lambda a: torch.linalg.matrix_norm(a, "nuc"), ((3, 4),)),
    (
        "grid-bicubic",
        lambda a, g: F.grid_sample(a, g.tanh(), "bicubic", "reflection", False),
        ((1, 2, 4, 4), (1, 3, 2, 2)),
    ),
    (
        "grid-of-an-affine-map",
        lambda t, a: F.grid_sample(a, F.affine_grid(t / 3, (1, 2, 3, 3), False), align_corners=False),
        ((1, 2, 3), (1, 2, 3, 3)),
    ),
    ("slope-of-ctc", _ctc_slope, ((2,), (4, 2, 3))),
    ("gaussian_nll", lambda a, b, v: F.gaussian_nll_loss(a, b, v.exp(), full=True), ((4,), (4,), (4,))),
    ("triplet", lambda a, p, n: F.triplet_margin_loss(a, p, n, p=3, swap=True), ((3, 4), (3, 4), (3, 4))),
    (
        "attention-mask",
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k * k, attn_mask=m),
        ((2, 2, 3, 4), (2, 2, 3, 4), (1, 1, 3, 3)),
    ),
    (
        "attention-grouped",
        lambda q, k: F.scaled_dot_product_attention(q, k, k * k, is_causal=True, enable_gqa=True),
        ((1, 4, 3, 4), (1, 2, 3, 4)),
    ),
    *(
        (
            f"packed-{kind.__name__}",
            lambda x, kind=kind: _packed(_cell(kind, num_layers=2, dropout=0.2), x),
            ((2, 4, 3),),
        )
        for kind in (nn.RNN, nn.LSTM, nn.GRU)
    ),
    (
        "slope-inside",
        lambda w, x: torch.func.vmap(torch.func.grad(lambda row: (row * w).sin().sum()))(x),
        ((3,), (2, 3)),
    ),
]

# torch has no derivative of these in all arguments: a program of others says what is right
TWINS: list[tuple[str, Program, Program, Primals]] = [
    *(
        (
            f"addmm-then-{name}",
            lambda m, a, b, gelu=gelu: torch._addmm_activation(m, a, b, use_gelu=gelu),
            lambda m, a, b, then=then: then(torch.addmm(m, a, b)),
            ((4,), (2, 3), (3, 4)),
        )
        for name, gelu, then in (("relu", False, torch.relu), ("gelu", True, F.gelu))
    ),
    *(
        (
            f"segment_reduce-{how}-{start}",
            lambda x, how=how, start=start: torch.segment_reduce(x, how, lengths=SEGMENTS, initial=start, unsafe=True)[
                :: 1 if start else 2
            ],
            lambda x, how=how, start=start: _by_hand(x, how, start),
            ((5, 2),),
        )
        for how, start in itertools.product(("sum", "mean", "prod", "max", "min"), (None, 0.3))
    ),
    (
        "scatter-multiply",
        lambda x, s: x.scatter(0, SLOTS, s, reduce="multiply"),
        lambda x, s: x.scatter_reduce(0, SLOTS, s, "prod"),
        ((3,), (3,)),
    ),
]


def _loss(out: Any) -> Tensor:
    """A number with a gradient that differs from entry to entry, and a curvature."""
    if isinstance(out, tuple | list):
        return sum((_loss(one) for one in out), torch.zeros((), dtype=F64))
    weights = torch.arange(out.numel(), dtype=F64).cos().reshape(out.shape)
    return (weights * out).sum() + 0.3 * (out * out).sum()


def _each_alone(program: Program, primals: Primals, twin: Program) -> None:
    primals = tuple(one if isinstance(one, Tensor) else torch.randn(one, dtype=F64) for one in primals)
    alone = [[place] for place in range(len(primals))] if len(primals) > 1 else []
    for places, k in itertools.product([list(range(len(primals))), *alone], (1, 2, 3)):
        given = [primals[place] for place in places]
        v = [torch.randn(k, *one.shape, dtype=F64) for one in given]

        def at(function: Program, some: Any, places: list[int] = places) -> Tensor:
            full = list(primals)
            for place, one in zip(places, some, strict=True):
                full[place] = one
            return _loss(function(*full))

        leaves = [one.clone().requires_grad_() for one in given]
        found = jp.quadratic(lambda *some, at=at: at(program, some), tuple(given), tuple(v))
        assert_close(found.loss.detach(), at(program, given).detach())  # of the operation itself
        try:
            right = double_backward(lambda at=at, leaves=leaves: at(twin, leaves), leaves, v)
            assert_quadratic(found, right, tolerance=1e-9)
        except (RuntimeError, AssertionError):  # torch has none, or another one: of a determinant of rank two
            slope, curvature = _differences(lambda some, at=at: at(twin, some), given, v)
            assert_close(found.slope.detach(), slope, tolerance=1e-7)
            assert_close(found.curvature.detach(), curvature, tolerance=1e-4)


def _differences(loss: Program, given: list[Tensor], v: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Slope and curvature from values around a point."""
    k = v[0].shape[0]

    def at(h: float, *signs: tuple[int, int]) -> Tensor:
        return loss([one + sum(sign * h * d[i] for i, sign in signs) for one, d in zip(given, v, strict=True)])

    slope = torch.stack([(at(1e-5, (i, 1)) - at(1e-5, (i, -1))) / 2e-5 for i in range(k)])
    corners = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    curvature = [sum(p * q * at(1e-4, (i, p), (j, q)) for p, q in corners) / 4e-8 for i in range(k) for j in range(k)]
    return slope, torch.stack(curvature).reshape(k, k)


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter", "ignore:index_reduce")
@pytest.mark.parametrize(("program", "primals"), [row[1:] for row in PLACES], ids=[row[0] for row in PLACES])
def test_places(program: Program, primals: Primals) -> None:
    _each_alone(program, primals, program)


@pytest.mark.parametrize(("program", "primals"), [row[1:] for row in NUMBERS], ids=[row[0] for row in NUMBERS])
def test_numbers(program: Program, primals: Primals) -> None:
    _each_alone(program, primals, program)


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize(("program", "twin", "primals"), [row[1:] for row in TWINS], ids=[row[0] for row in TWINS])
def test_operations_without_a_double_backward(program: Program, twin: Program, primals: Primals) -> None:
    _each_alone(program, primals, twin)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.fft.rfft(x).abs(),
        lambda x: torch.view_as_complex(x.view(2, 2)).abs(),
        lambda x: torch.complex(x, torch.ones_like(x)).abs(),
        lambda x: torch.complex(torch.ones_like(x), x).abs(),
        lambda x: torch.polar(torch.ones_like(x), x).real,
        lambda x: (x * 1j).exp().imag,
        lambda x: torch.linalg.eigvals(x.view(2, 2)).real,
    ],
    ids=["rfft", "view", "real-part", "imaginary-part", "polar", "times-i", "eigenvalues"],
)
def test_complex_numbers_on_the_way(program: Program) -> None:
    _each_alone(lambda x: program(x), [randn(4)], lambda x: program(x))
