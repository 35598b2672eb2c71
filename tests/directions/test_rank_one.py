"""Directions of one layer each, of rank one: what they are, that planes are exact along them, and what they cost."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import jetplane as jp
from cases import F64, assert_close, gauss_newton_by_jacobian, oracle, randn
from jetplane.ad.algebra.sparse import Factors
from jetplane.ad.run.directions import Joined, Leaf, blocks_of
from jetplane.directions import Fixed, Gaussian, Mixed, Momentum, Plane, RankOne
from jetplane.optim import GaussNewtonSearch, HyperplaneSearch
from jetplane.solvers import JitteredInverse, LevenbergMarquardt, Status

LAYERS = [torch.zeros(6, 5), torch.zeros(6), torch.zeros(4, 2, 3, 3), torch.zeros(4), torch.zeros(1, 7), torch.zeros(1)]


def drawn(k: int, leaves: Sequence[Tensor] = LAYERS, step: int = 0) -> Any:
    return RankOne(k).draw(Plane(3, step, 0, leaves, list))


# -- the directions -------------------------------------------------------------------------------------------------


def test_each_direction_moves_one_layer_by_an_outer_product() -> None:
    rows = [drawn(12).rows(n, leaf, 0, 12) for n, leaf in enumerate(LAYERS)]
    moved = torch.stack([part.flatten(1).any(1) for part in rows])
    assert torch.equal(moved[0], moved[1]) and torch.equal(moved[2], moved[3]) and torch.equal(moved[4], moved[5])
    assert torch.equal(moved[::2].sum(0), torch.ones(12, dtype=torch.int64))
    assert moved.any(1).all()
    for part in (rows[0], rows[2].flatten(2)):
        assert set(torch.linalg.matrix_rank(part).tolist()) == {0, 1}


def test_entries_are_uncorrelated_and_of_unit_variance() -> None:
    leaves = [torch.zeros(3, 4, dtype=F64), torch.zeros(3, dtype=F64)]
    steps = [drawn(100, leaves, step) for step in range(40)]
    rows = torch.cat([torch.cat([d.rows(n, one, 0, 100).flatten(1) for n, one in enumerate(leaves)], 1) for d in steps])
    moments = rows.T @ rows / len(rows)
    assert float((moments - torch.eye(15)).abs().max()) < 0.12  # 4000 products of two normal numbers, squared


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_are_the_rows(dtype: torch.dtype) -> None:
    leaves = [leaf.to(dtype) for leaf in LAYERS]
    joined = Joined(Gaussian(2).draw(Plane(3, 0, 0, leaves, list)), drawn(12, leaves))
    for number, leaf in enumerate(leaves):
        dense = torch.zeros(14, *leaf.shape, dtype=dtype)
        for block in blocks_of(joined, number, leaf):
            dense[block.start : block.stop] += block.dense()
        assert torch.equal(dense, joined.rows(number, leaf, 0, 14))
        for chosen in ((0,), (3, 4, 5), (1, 2, 7, 12), tuple(range(14))):
            part = torch.zeros(len(chosen), *leaf.shape, dtype=dtype)
            for block in Leaf(leaf, number, joined, chosen).blocks():
                part[block.start : block.stop] += block.dense()
            assert torch.equal(part, dense[list(chosen)])


def test_vectors_are_written_out_and_matrices_are_not() -> None:
    kinds = [isinstance(blocks_of(drawn(12), n, leaf)[0].rows, Factors) for n, leaf in enumerate(LAYERS)]
    assert kinds == [True, False, True, False, False, False]  # a matrix of one row is a vector


def test_too_few_for_the_layers() -> None:
    message = "k is 2 and there are 3 layers; expected at least one direction for each."
    with pytest.raises(ValueError, match=re.escape(message)):
        drawn(2)


# -- sums of rows of some directions ----------------------------------------------------------------------------------


# -- planes -----------------------------------------------------------------------------------------------------------


class Recorded:
    def __call__(self, model: jp.Quadratic) -> Any:
        self.model = model
        return JitteredInverse()(model)


def plane(closure: Any, leaves: Sequence[Tensor], family: Any, curvature: str = "ggn", **options: Any) -> jp.Quadratic:
    solver = Recorded()
    parts = 0.0, family, curvature, solver
    HyperplaneSearch(leaves, *parts, seed=3, patience=None, **options).step(closure)
    return solver.model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x)[0][:, -1])


class Words(nn.Module):
    """Tied embeddings, attention, norms, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.embedding(x))
        return (h @ self.embedding.weight.T).mean(1)


class Awkward(nn.Module):
    """Weights on the left, parts of weights, a weight twice, outer products with a parameter, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5, 5))
        self.c, self.d = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        h = (self.a @ x.T).T
        h = torch.tanh(h @ self.b) @ self.b.T + h
        h[:, :2] = h[:, 2:4].clone() * self.d[:2]
        h = torch.cat([h, x], 1)
        h[:, 4:] += (self.c[1:4, :] @ self.c[2, :, None]).sum()
        weights = self.c.T[None, :, :3].expand(len(x), -1, -1)
        return h[:, :3] * self.a.exp().sum() + torch.baddbmm(h[:, None, :3], h[:, None, :5], weights)[:, 0]


def convolutions() -> nn.Module:
    first = nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 3, 2), nn.Tanh()
    return nn.Sequential(
        *first, nn.Conv2d(3, 5, 2, padding=1, stride=2), nn.BatchNorm2d(5), nn.Flatten(), nn.LazyLinear(3)
    )


def lines() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.GELU(), nn.Conv1d(4, 3, 2, bias=False), nn.Flatten(), nn.LazyLinear(3))


def perceptron() -> nn.Module:
    norm = parametrizations.weight_norm(nn.Linear(6, 6))
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), norm, nn.Softplus(), nn.Linear(6, 3, bias=False))


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "convolutions": (convolutions, lambda: randn(3, 2, 8, 8)),
    "lines": (lines, lambda: randn(3, 2, 9)),
    "perceptron": (perceptron, lambda: randn(3, 4)),
    "recurrent": (Recurrent, lambda: randn(3, 5, 3)),
    "words": (Words, lambda: torch.randint(7, (3, 5))),
    "awkward": (Awkward, lambda: randn(3, 4)),
}


def program(name: str) -> tuple[Callable[[], Tensor], list[Tensor]]:
    torch.manual_seed(7)
    make, inputs = PROGRAMS[name]
    model, x = make().to(F64), inputs()
    model(x)  # lazy layers
    return lambda: model(x), [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("name", PROGRAMS)
def test_planes_equal_the_jacobians_of_the_model(name: str, chunk_size: int | None) -> None:
    model, leaves = program(name)
    family = Mixed([Gaussian(2), RankOne(20)])
    rows = family.draw(Plane(3, 0, 0, leaves, list))
    along = [rows.rows(n, leaf.detach(), 0, 22) for n, leaf in enumerate(leaves)]
    target = torch.tensor([0, 1, 2])
    found = plane(lambda: F.cross_entropy(model(), target), leaves, family, chunk_size=chunk_size)
    expected = gauss_newton_by_jacobian(model, lambda z: F.cross_entropy(z, target), leaves, along)
    first = oracle(lambda: F.cross_entropy(model(), target), leaves, along)
    assert_close(found.loss, first.loss)
    assert_close(found.slope, first.slope)
    assert_close(found.curvature, expected)


def test_exact_curvature_along_them() -> None:
    model, leaves = program("lines")
    rows = drawn(9, leaves)
    along = [rows.rows(n, leaf.detach(), 0, 9) for n, leaf in enumerate(leaves)]
    found = plane(lambda: model().square().sum(), leaves, RankOne(9), "exact")
    assert_close(found.curvature, oracle(lambda: model().square().sum(), leaves, along).curvature)


def test_a_penalty_on_the_weights_is_exact() -> None:
    weight = randn(4, 3).requires_grad_()
    x, y = randn(5, 3), torch.tensor([0, 1, 2, 3, 0])
    rows = drawn(8, [weight]).rows(0, weight.detach(), 0, 8).flatten(1)
    plain, more = (
        plane(lambda p=p: F.cross_entropy(x @ weight.T, y) + p * weight.square().sum() / 2, [weight], RankOne(8))
        for p in (0.0, 0.7)
    )
    assert_close(more.curvature - plain.curvature, 0.7 * rows @ rows.T)
    assert_close(more.slope - plain.slope, 0.7 * rows @ weight.detach().flatten())


def _end_of_a_step(written_out: bool) -> Tensor:
    torch.manual_seed(1)
    first, last = nn.Linear(5, 6).to(F64), nn.Linear(6, 3).to(F64)
    x, y = randn(8, 5), torch.randint(3, (8,))
    leaves = [*first.parameters(), *last.parameters()]
    groups = [{"params": list(first.parameters()), "lr": 0.25}, {"params": list(last.parameters())}]
    family: Any = RankOne(10)
    if written_out:
        family = Fixed([drawn(10, leaves).rows(n, leaf.detach(), 0, 10) for n, leaf in enumerate(leaves)])
    solver = LevenbergMarquardt(shrink=False)
    search = HyperplaneSearch(groups, 0.5, family, "ggn", solver, seed=3, clip=0.1, weight_decay=0.01)
    search.step(lambda: F.cross_entropy(last(torch.tanh(first(x))), y))
    assert search.report.status is Status.OK
    return torch.cat([leaf.detach().flatten() for leaf in leaves])


def test_steps_equal_those_along_the_same_rows_written_out() -> None:
    assert_close(_end_of_a_step(written_out=False), _end_of_a_step(written_out=True))


# -- what they cost ---------------------------------------------------------------------------------------------------


def test_a_direction_costs_what_follows_its_layer() -> None:
    batch, sizes, k = 16, (30, 20, 10, 5), 12
    layers = [nn.Linear(m, n) for m, n in itertools.pairwise(sizes)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    x, y = torch.randn(batch, sizes[0]), torch.randint(5, (batch,))
    leaves = list(model.parameters())
    counts = [blocks_of(drawn(k, leaves), n, leaves[n])[0] for n in (0, 2, 4)]
    with FlopCounterMode(display=False) as counter:
        plane(lambda: F.cross_entropy(model(x), y), leaves, RankOne(k))
    products = 0
    before = 0
    for (m, n), block in zip(itertools.pairwise(sizes), counts, strict=True):
        own = block.stop - block.start
        # the value, rows from before through the weight, own rows by the right factor; the left one is no product
        products += m * n + before * m * n + own * m
        before += own
    found = counter.get_flop_counts()
    assert sum(found["Sequential"].values()) == 2 * batch * products
    assert found["Global"][torch.ops.aten.bmm] == 2 * batch * k * k * sizes[-1]  # all pairs of the logits' tangents


def test_the_search_takes_them_where_there_are_enough() -> None:
    deep, narrow = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 3)), nn.Linear(3, 2)
    vector = nn.ParameterList([torch.zeros(500)])
    kinds = [
        [type(family) for family in GaussNewtonSearch(one.parameters(), k=k).directions.families]  # type: ignore[attr-defined]
        for one, k in ((deep, 32), (deep, 6), (narrow, 6), (vector, 32))
    ]
    assert kinds == [[Momentum, RankOne], *[[Momentum, Gaussian]] * 3]


def test_groups_that_are_iterators_and_names_count_too() -> None:
    model = nn.Linear(40, 30)
    for params in ([{"params": model.parameters()}], list(model.named_parameters()), [{"params": model.weight}]):
        search = GaussNewtonSearch(params, k=32)
        assert isinstance(search.directions, Mixed) and isinstance(search.directions.families[1], RankOne)


# -- very short steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_memory_of_a_step_that_nearly_vanished(dtype: torch.dtype) -> None:
    x = torch.zeros(4, dtype=dtype)
    tiny = torch.finfo(dtype).smallest_normal / 4  # a number of that dtype still, without a reciprocal
    for length, found in ((tiny, dtype is torch.float16), (1e-3, True), (0.0, False)):
        memory = {"momentum": [torch.full((1, 4), length, dtype=dtype)]}
        rows = Momentum([0.0]).draw(Plane(0, 1, 0, [x], list, memory)).rows(0, x, 0, 1)
        torch.testing.assert_close(rows, torch.full((1, 4), float(found), dtype=dtype))


def test_damping_does_not_grow_for_ever_where_rounding_hides_the_decrease() -> None:
    solver = LevenbergMarquardt()
    state, tensor = solver.state, torch.tensor(solver.state, dtype=F64)
    for _ in range(600):
        state = solver.update(state, 1e-12, -1e-9)
        tensor = solver.traced_update(tensor, torch.tensor(1e-12), torch.tensor(-1e-9))
    assert state == float(tensor) == 1e12
    model = jp.Quadratic(torch.tensor(1.0), torch.tensor([1.0, 2.0]), torch.eye(2))
    step = solver.at(state)(model)
    assert step.status is Status.OK and bool(torch.isfinite(step.coefficients).all())
