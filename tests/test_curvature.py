"""Losses of single samples: their mean, the noise of its slope, and the empirical Fisher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from cases import F64, assert_close, randn
from jetplane import curvature as curvatures
from jetplane.curvature import EmpiricalFisher, ExactHessian, GaussNewton, NoCurvature
from jetplane.directions import Gaussian, Gradient, Plane
from jetplane.solvers import NegativeSlope, Step, TrustRegion

BATCH, CLASSES = 7, 3
LABELS = torch.tensor([0, 1, 2, 1, 0, 2, 2])
CURVATURES = [NoCurvature(), ExactHessian(), GaussNewton(), EmpiricalFisher()]


class Recorded:
    """A solver that keeps what it is given."""

    noise = True  # it may be given the losses of single samples

    def __init__(self) -> None:
        self.models: list[jp.Quadratic] = []

    def __call__(self, model: jp.Quadratic) -> Step:
        self.models.append(model)
        return NegativeSlope()(model)


def plane(closure: Any, params: Sequence[Tensor], k: int, curvature: Any, **options: Any) -> jp.Quadratic:
    """The model that an optimizer finds in K Gaussian directions."""
    solver = Recorded()
    jp.optim.HyperplaneSearch(params, 0.0, Gaussian(k), curvature, solver, patience=None, **options).step(closure)
    return solver.models[0]


def problem() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(F64), randn(BATCH, 4)


def slopes(model: nn.Module, x: Tensor, k: int) -> Tensor:
    """(K, B) by one backward pass for each sample, along the directions of :func:`plane`."""
    leaves = list(model.parameters())
    drawn = Gaussian(k).draw(Plane(0, 0, 0, leaves, lambda: []))
    rows = [drawn.rows(position, leaf.detach(), 0, k) for position, leaf in enumerate(leaves)]
    columns = []
    for loss in F.cross_entropy(model(x), LABELS, reduction="none"):
        parts = torch.autograd.grad(loss, leaves, retain_graph=True)
        columns.append(sum((d * g).flatten(1).sum(1) for g, d in zip(parts, rows, strict=True)))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
@pytest.mark.parametrize("curvature", CURVATURES, ids=[type(one).__name__ for one in CURVATURES])
def test_losses_of_samples_count_as_their_mean_and_say_its_noise(curvature: Any, chunk_size: int | None) -> None:
    model, x = problem()
    params, k = list(model.parameters()), 4
    found = plane(
        lambda: F.cross_entropy(model(x), LABELS, reduction="none"), params, k, curvature, chunk_size=chunk_size
    )
    each = slopes(model, x, k)
    assert_close(found.slope, each.mean(1))
    assert found.noise is not None
    assert_close(found.noise, torch.cov(each) / BATCH)
    if isinstance(curvature, EmpiricalFisher):
        assert_close(found.curvature, each @ each.T / BATCH)
    else:
        mean = plane(lambda: F.cross_entropy(model(x), LABELS), params, k, curvature)
        assert mean.noise is None
        assert_close(found.loss, mean.loss)
        assert_close(found.curvature, mean.curvature)


def test_the_fisher_is_positive_semi_definite_and_costs_first_order() -> None:
    model, x = problem()
    each = lambda: F.cross_entropy(model(x), LABELS, reduction="none")  # noqa: E731
    found = plane(each, list(model.parameters()), 12, EmpiricalFisher()).curvature
    values = torch.linalg.eigvalsh(found)
    assert float(values[0]) >= -1e-12 * float(values[-1])
    assert int((values > 1e-9 * values[-1]).sum()) <= BATCH  # one for each sample
    assert EmpiricalFisher().pairs(5).rows == 0


def test_the_fisher_needs_single_samples() -> None:
    model, x = problem()
    message = (
        r"^the loss has shape \(\); the empirical Fisher is made of the slopes of single samples, expected one loss "
        r"for each of them \(B,\), as with reduction='none'\.$"
    )
    with pytest.raises(ValueError, match=message):
        plane(lambda: F.cross_entropy(model(x), LABELS), list(model.parameters()), 2, EmpiricalFisher())


def test_a_batch_of_one_has_a_fisher_and_no_noise() -> None:
    model, x = problem()
    found = plane(
        lambda: F.cross_entropy(model(x[:1]), LABELS[:1], reduction="none"),
        *(list(model.parameters()), 2, EmpiricalFisher()),
    )
    assert found.noise is None
    assert_close(found.curvature, found.slope[:, None] * found.slope)


def test_several_closures() -> None:
    model, x = problem()
    params, k = list(model.parameters()), 3

    def part(start: int, stop: int) -> Any:
        return lambda: F.cross_entropy(model(x[start:stop]), LABELS[start:stop], reduction="none")

    each = slopes(model, x, k)
    found = plane([part(0, 3), part(3, 7)], params, k, EmpiricalFisher(), chunk_size=2)
    fishers = [one @ one.T / one.shape[1] for one in (each[:, :3], each[:, 3:])]
    noises = [torch.cov(one) / one.shape[1] for one in (each[:, :3], each[:, 3:])]
    assert_close(found.curvature, (fishers[0] + fishers[1]) / 2)
    assert found.noise is not None
    assert_close(found.noise, (noises[0] + noises[1]) / 4)
    mixed = plane([part(0, 3), lambda: part(3, 7)().mean()], params, k, ExactHessian())
    assert mixed.noise is None  # that of the second closure is not known


def test_noise_adds_up_and_scales_with_the_square() -> None:
    one = jp.Quadratic(torch.tensor(1.0), torch.ones(1), torch.ones(1, 1), torch.tensor([[3.0]]))
    plain = jp.Quadratic(torch.tensor(1.0), torch.ones(1), torch.ones(1, 1))
    assert (one + one).noise == torch.tensor([[6.0]])
    assert (one * -2.0).noise == torch.tensor([[12.0]])
    assert ((one + one) / 2).noise == torch.tensor([[1.5]])
    assert (one + plain).noise is None and (plain + one).noise is None and (plain * 2).noise is None
    assert sum([one, one]).noise == torch.tensor([[6.0]])


@pytest.mark.parametrize("shape", [(2, 3), (1, 2)])
def test_losses_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    w = randn(1)
    text = str(shape).replace("(", r"\(").replace(")", r"\)")
    message = (
        rf"^the closure returned a tensor of shape {text}; expected a scalar loss, or one for each sample \(B,\)\.$"
    )
    with pytest.raises(ValueError, match=message):
        plane(lambda: w * torch.ones(shape, dtype=F64), [w.requires_grad_()], 1, ExactHessian())


@pytest.mark.parametrize("shape", [(2, 3), (0,), (1, 2)])
def test_jets_of_losses_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    jet = jp.Jet(torch.ones(shape), torch.ones(1, *shape), torch.ones(1, *shape))
    text = str(shape).replace("(", r"\(").replace(")", r"\)")
    message = rf"^the loss has shape {text}; expected a single number, or one for each sample \(B,\)\.$"
    with pytest.raises(ValueError, match=message):
        ExactHessian().model(jet, jp.PairSet.all(1))


def test_gradients_and_trials_use_the_mean() -> None:
    reports = []
    for reduction in ("none", "mean"):
        torch.manual_seed(5)
        model, x = problem()

        def closure(model: nn.Module = model, x: Tensor = x, reduction: str = reduction) -> Tensor:
            return F.cross_entropy(model(x), LABELS, reduction=reduction)

        search = jp.optim.HyperplaneSearch(model.parameters(), 1.0, Gradient(), GaussNewton(), TrustRegion(0.1))
        search.step(closure)
        reports.append(search.report)
    for name in ("loss", "slope", "curvature", "predicted", "actual"):
        assert_close(getattr(reports[0], name), getattr(reports[1], name))


# -- by name, without an optimizer ------------------------------------------------------------------------------------


def by_name(curvature: str, how: str) -> tuple[jp.Quadratic, Tensor]:
    """The model of 7 losses of a small network along 3 directions, and the slopes (3, 7) by backprop."""
    torch.manual_seed(0)
    x, w, v = randn(BATCH, 4), randn(4, CLASSES), randn(3, 4, CLASSES)

    def losses(w: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(x @ w), LABELS, reduction="none")

    def loss(w: Tensor) -> Tensor:
        return losses(w) if curvature == "fisher" else losses(w).mean()

    if how == "perturb":
        with jp.perturb([w], [v], curvature=curvature) as jets:
            out = loss(w)
        assert jets.of(out).second.shape[0] == 0
        model = jets.quadratic(out)
    else:
        quadratic = jp.compile(jp.quadratic) if how == "compiled" else jp.quadratic
        options = {"chunk_size": 2} if how == "chunks" else {}
        model = quadratic(loss, w, v, curvature=curvature, **options)
    slopes = torch.stack([(torch.func.jacrev(losses)(w) * one).sum((1, 2)) for one in v])
    return model, slopes


@pytest.mark.parametrize("how", ["once", "chunks", "perturb", "compiled"])
def test_quadratic_takes_the_fisher_by_name(how: str) -> None:
    model, slopes = by_name("fisher", how)
    assert_close(model.slope, slopes.mean(1))
    assert_close(model.curvature, slopes @ slopes.T / BATCH)
    assert model.noise is not None
    assert_close(model.noise, torch.cov(slopes) / BATCH)


@pytest.mark.parametrize("how", ["once", "chunks", "perturb", "compiled"])
def test_quadratic_without_a_curvature(how: str) -> None:
    model, slopes = by_name("none", how)
    assert_close(model.slope, slopes.mean(1))
    assert_close(model.curvature, torch.zeros(3, 3, dtype=F64))


def test_the_fisher_of_one_number_is_refused() -> None:
    message = r"^the loss has shape \(\); the empirical Fisher is made of the slopes of single samples, expected one"
    with pytest.raises(ValueError, match=message):
        jp.quadratic(torch.sum, torch.ones(3), torch.ones(1, 3), curvature="fisher")
    with pytest.raises(ValueError, match=r"^the loss has shape \(3,\); expected a scalar\.$"):
        jp.quadratic(torch.sin, torch.ones(3), torch.ones(1, 3), curvature="none")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("exact", ExactHessian), ("ggn", GaussNewton), ("fisher", EmpiricalFisher), ("none", NoCurvature)],
)
def test_curvatures_are_found_by_name(name: str, kind: Any) -> None:
    assert curvatures.find(name) == kind()
    assert curvatures.find(kind()) == kind()
    assert curvatures.is_late(kind()) is (name == "ggn")
