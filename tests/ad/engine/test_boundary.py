"""A pass without a boundary between model and loss."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jetplane as jp
from jetplane.ad.engine.boundary import AtOnce


def program(x: Tensor) -> Tensor:
    y = (x @ x.T).sin()
    y[0] = x.exp().sum(1)  # a write of a part
    return y.add_(x[:, :3]).square().sum()


def test_the_engine_may_ask_where_there_is_no_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, v = torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    expected = jp.quadratic(program, x, v)
    asked = []
    is_late = AtOnce.is_late
    monkeypatch.setattr(AtOnce, "begins_late", True)  # no short cuts
    monkeypatch.setattr(AtOnce, "is_late", lambda self, *given: (asked.append(given), is_late(self, *given))[1])
    found = jp.quadratic(program, x, v)
    assert asked
    for name in ("loss", "slope", "curvature"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


ROWS = torch.tensor([2, 0, 2])
MASK = torch.tensor([True, False, True, True])
START = torch.linspace(0.2, 1.8, 12, dtype=torch.float64).reshape(4, 3)


@pytest.mark.parametrize(
    "penalty",
    [
        lambda w: w[ROWS].pow(4).sum(),
        lambda w: w[[1, 3]].square().sum().sqrt(),
        lambda w: w[MASK].exp().mean(),
        lambda w: w.index_select(1, torch.tensor([0, 2])).sin().sum(),
        lambda w: w.gather(1, torch.tensor([[0], [1], [2], [0]])).pow(3).sum(),
        lambda w: torch.nn.functional.embedding(ROWS, w).cosh().sum(),
        lambda w: (w[ROWS] * w[:3]).square().sum(),
        lambda w: (w[ROWS] - torch.ones(3, 3, dtype=w.dtype)).pow(4).sum(),
        lambda w: torch.lerp(w, START, 0.3).pow(4).sum(),
        lambda w: torch.atan2(w, START).square().sum(),
        lambda w: torch.addcmul(w, START, START).square().sum(),
        lambda w: torch.clamp(w, max=START).square().sum(),
        lambda w: w.clamp(min=torch.tensor(-0.5, dtype=w.dtype)).pow(4).sum(),
        lambda w: w.masked_fill(START > 1, 0.0).exp().sum(),
        lambda w: torch.where(START > 1, w, 2.0).pow(4).sum(),
    ],
)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_penalty_on_entries_is_exact(penalty: Callable[[Tensor], Tensor], chunk_size: int | None) -> None:
    torch.manual_seed(0)
    x, w, v = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 4), (4, 3), (3, 4, 3)))
    labels = torch.tensor([0, 2, 1, 1, 0])

    def model(w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z, labels)

    found = jp.quadratic(lambda w: loss(model(w)) + penalty(w), w, v, curvature="ggn", chunk_size=chunk_size)
    jacobian = torch.func.jacrev(model)(w).reshape(15, 12)
    inner = torch.func.hessian(loss)(model(w)).reshape(15, 15)
    whole = jacobian.T @ inner @ jacobian + torch.func.hessian(penalty)(w).reshape(12, 12)
    rows = v.reshape(3, 12)
    torch.testing.assert_close(found.curvature, rows @ whole @ rows.T)
    gradient = torch.func.grad(lambda w: loss(model(w)) + penalty(w))(w)
    torch.testing.assert_close(found.slope, rows @ gradient.reshape(12))


def test_a_layer_behind_an_embedding_is_the_model() -> None:
    torch.manual_seed(0)
    table, weight = torch.randn(6, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    leaves = [table, weight]
    with jp.perturb(leaves, [torch.randn(2, *leaf.shape, dtype=leaf.dtype) for leaf in leaves], curvature="ggn"):
        z = F.embedding(ROWS, table) @ weight
        late = F.cross_entropy(z, torch.tensor([0, 1, 2]))
        with pytest.raises(jp.MissingBoundary, match="joins the loss with a tensor that the model made"):
            late + z.square().sum()
