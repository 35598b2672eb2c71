"""Gauss-Newton planes against J^T H J, by the Jacobian of the model and the Hessian of the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import jetplane as jp
from cases import F64, along, assert_close, gauss_newton_by_jacobian, oracle, randn
from jetplane import curvature as curvatures
from jetplane.ad import _torch
from jetplane.curvature import EmpiricalFisher, ExactHessian, GaussNewton
from jetplane.directions import Gaussian
from jetplane.errors import MissingBoundary, UnsupportedProgram
from jetplane.solvers import JitteredInverse, Step
from tracing import trace_only

BATCH, CLASSES = 6, 4


def gauss_newton(program: Callable[[], Tensor], leaves: Sequence[Tensor], directions: Sequence[Tensor]) -> jp.Quadratic:
    with jp.perturb(leaves, directions, curvature="ggn") as jets:
        loss = program()
    return jets.quadratic(loss)


class Recorded:
    """A solver that stays where it is, and keeps what it is given."""

    def __init__(self) -> None:
        self.models: list[jp.Quadratic] = []

    def __call__(self, model: jp.Quadratic) -> Step:
        self.models.append(model)
        return JitteredInverse()(model)


def plane(
    closure: Any, params: Sequence[Tensor], k: int, curvature: Any, chunk_size: int | None = None, **options: Any
) -> jp.Quadratic:
    """The model that an optimizer finds in K Gaussian directions."""
    solver = Recorded()
    search = jp.optim.HyperplaneSearch(
        params, 0.0, Gaussian(k), curvature, solver, chunk_size=chunk_size, patience=None, **options
    )
    search.step(closure)
    return solver.models[0]


def cnn() -> nn.Module:
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(5, CLASSES)).to(F64)


def mlp() -> nn.Module:
    layers = nn.Flatten(), nn.Linear(36, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 7), nn.Softplus()
    return nn.Sequential(*layers, nn.Linear(7, CLASSES)).to(F64)


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(F64)


LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
SOFT = torch.rand(BATCH, CLASSES, dtype=F64, generator=torch.Generator().manual_seed(1)).softmax(1)
REAL = torch.randn(BATCH, CLASSES, dtype=F64, generator=torch.Generator().manual_seed(2))
SIGNS = REAL.sign()
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=F64)
SOME = torch.tensor([0, 1, -100, 3, 1, -100])
LENGTHS = torch.full((1,), BATCH), torch.full((1,), 2)

LOSSES: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("cross-entropy", lambda z: F.cross_entropy(z, LABELS)),
    ("cross-entropy-sum", lambda z: F.cross_entropy(z, LABELS, reduction="sum")),
    ("cross-entropy-none", lambda z: F.cross_entropy(z, LABELS, reduction="none").square().sum()),
    ("cross-entropy-weight", lambda z: F.cross_entropy(z, LABELS, weight=WEIGHT)),
    ("cross-entropy-smoothed", lambda z: F.cross_entropy(z, LABELS, label_smoothing=0.1)),
    ("cross-entropy-ignored", lambda z: F.cross_entropy(z, SOME)),
    ("cross-entropy-soft", lambda z: F.cross_entropy(z, SOFT, weight=WEIGHT)),
    ("cross-entropy-module", lambda z: nn.CrossEntropyLoss(reduction="sum")(z, LABELS)),
    ("nll", lambda z: F.nll_loss(F.log_softmax(z, 1), LABELS)),
    ("nll-ignored", lambda z: F.nll_loss(F.log_softmax(z, 1), SOME, weight=WEIGHT, reduction="sum")),
    ("nll-module", lambda z: nn.NLLLoss()(nn.LogSoftmax(dim=1)(z), LABELS)),
    ("nll-of-a-view", lambda z: F.nll_loss(z.reshape(2, 3, CLASSES).log_softmax(-1).view(-1, CLASSES), LABELS)),
    ("nll-transposed", lambda z: F.nll_loss(z.reshape(2, 3, CLASSES).log_softmax(-1).mT, LABELS.reshape(2, 3))),
    ("nll-copied", lambda z: F.nll_loss(z.T.log_softmax(0).T.contiguous(), LABELS)),
    ("nll-cast", lambda z: F.nll_loss(z.log_softmax(1).to(torch.float64, copy=True), LABELS)),
    ("nll-rows", lambda z: F.nll_loss(z.log_softmax(1)[SOME >= 0], LABELS[SOME >= 0])),
    ("nll-selected", lambda z: F.nll_loss(z.log_softmax(1).index_select(0, LABELS), LABELS)),
    ("nll-log-of-softmax", lambda z: F.nll_loss(z.softmax(1).log(), LABELS)),
    ("nll-logsigmoid", lambda z: F.nll_loss(F.logsigmoid(z), LABELS)),
    ("mse", lambda z: F.mse_loss(z, REAL)),
    ("mse-none", lambda z: F.mse_loss(z, REAL, reduction="none").mean(1).logsumexp(0)),
    ("smooth-l1", lambda z: F.smooth_l1_loss(z, REAL, beta=2.0)),
    ("huber", lambda z: F.huber_loss(z, REAL, delta=1.5)),
    ("bce", lambda z: F.binary_cross_entropy(torch.sigmoid(z), SOFT)),
    ("bce-of-rows", lambda z: F.binary_cross_entropy(torch.sigmoid(z).flatten()[3:].clone(), SOFT.flatten()[3:])),
    ("bce-of-softmax", lambda z: F.binary_cross_entropy(z.softmax(-1), SOFT)),
    ("bce-logits", lambda z: F.binary_cross_entropy_with_logits(z, SOFT, pos_weight=WEIGHT)),
    ("kl", lambda z: F.kl_div(z.log_softmax(1), SOFT, reduction="batchmean")),
    ("kl-log-of-sigmoid", lambda z: F.kl_div(z.sigmoid().log(), SOFT.log(), reduction="sum", log_target=True)),
    ("kl-both-ways", lambda z: F.kl_div(SOFT.log(), z.softmax(1), reduction="sum")),
    ("poisson", lambda z: F.poisson_nll_loss(z, SOFT)),
    ("gaussian", lambda z: F.gaussian_nll_loss(z, REAL, SOFT)),
    ("soft-margin", lambda z: F.soft_margin_loss(z, SIGNS)),
    ("multilabel", lambda z: F.multilabel_soft_margin_loss(z, SOFT.round())),
    ("multi-margin", lambda z: F.multi_margin_loss(z, LABELS, p=2)),
    ("cosine-embedding", lambda z: F.cosine_embedding_loss(z, REAL, SIGNS[:, 0])),
    ("triplet", lambda z: F.triplet_margin_loss(z, REAL, SOFT, margin=9.0)),
    ("triplet-distance", lambda z: F.triplet_margin_with_distance_loss(z, REAL, SOFT, margin=9.0)),
    ("ctc", lambda z: F.ctc_loss(z.unsqueeze(1).log_softmax(-1), torch.tensor([[1, 2]]), *LENGTHS)),
    ("l1", lambda z: F.l1_loss(z, REAL)),
    ("hinge", lambda z: F.hinge_embedding_loss(z, SIGNS)),
    ("ranking", lambda z: F.margin_ranking_loss(z[:, 0], z[:, 1], SIGNS[:, 0])),
    ("multilabel-margin", lambda z: F.multilabel_margin_loss(z, LABELS[:, None].expand(BATCH, CLASSES))),
    ("marked", lambda z: (jp.mark_output(z).logsumexp(1) - z[:, 0].detach()).mean()),
    ("marked-logarithms", lambda z: -jp.mark_output(z.log_softmax(1)).gather(1, LABELS[:, None]).mean()),
]


# torch clamps the logarithms of binary_cross_entropy in its own double backward; the others are differences
TOLERANCES = {"bce": 1e-9, "bce-of-rows": 1e-9, "bce-of-softmax": 1e-9}
TOLERANCES |= dict.fromkeys(("multi-margin", "multilabel-margin", "ctc"), 1e-7)


@pytest.mark.parametrize("make", [cnn, mlp])
@pytest.mark.parametrize(("name", "loss"), LOSSES, ids=[name for name, _ in LOSSES])
def test_every_loss_equals_the_reference(make: Callable[[], nn.Module], name: str, loss: Any) -> None:
    model, x = make(), randn(BATCH, 1, 6, 6)
    leaves = list(model.parameters())
    directions = along(leaves, 3)
    found = gauss_newton(lambda: loss(model(x)), leaves, directions)
    assert_close(
        found.curvature,
        gauss_newton_by_jacobian(lambda: model(x), loss, leaves, directions),
        TOLERANCES.get(name, 1e-11),
    )
    value = loss(model(x))
    slopes = zip(torch.autograd.grad(value, leaves), directions, strict=True)
    assert_close(found.loss, value)
    assert_close(found.slope, sum((d * g).flatten(1).sum(1) for g, d in slopes))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_chunks_and_numbers_of_directions(k: int, chunk_size: int | None) -> None:
    model, x = small(), randn(BATCH, 1, 6, 6)
    leaves = list(model.parameters())

    def closure() -> Tensor:
        return F.nll_loss(F.log_softmax(model(x), 1), LABELS) + 0.1 * sum(p.square().sum() for p in leaves)

    whole = plane(closure, leaves, k, GaussNewton())
    parts = plane(closure, leaves, k, GaussNewton(), chunk_size)
    assert_close(parts.loss, whole.loss)
    assert_close(parts.slope, whole.slope)
    assert_close(parts.curvature, whole.curvature)
    directions = [plane_rows(leaves, k)[n] for n in range(len(leaves))]
    expected = gauss_newton_by_jacobian(lambda: model(x), lambda z: F.cross_entropy(z, LABELS), leaves, directions)
    flat = torch.cat([d.flatten(1) for d in directions], 1)
    assert_close(whole.curvature, expected + 0.2 * flat @ flat.T)


def plane_rows(leaves: Sequence[Tensor], k: int) -> list[Tensor]:
    """The directions that :func:`plane` draws."""
    from jetplane.directions import Plane

    drawn = Gaussian(k).draw(Plane(0, 0, 0, list(leaves), lambda: []))
    return [drawn.rows(position, leaf.detach(), 0, k) for position, leaf in enumerate(leaves)]


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_functions_of_their_parameters(chunk_size: int | None) -> None:
    x, w, v = randn(BATCH, 3), randn(3, 3), randn(3, CLASSES)
    leaves = [w.requires_grad_(), v.requires_grad_()]
    directions = along(leaves, 3)

    def model(w: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(x @ w) @ v

    found = jp.quadratic(
        lambda w, v: F.cross_entropy(model(w, v), LABELS),
        *((w.detach(), v.detach()), tuple(directions)),
        curvature="ggn",
        chunk_size=chunk_size,
    )
    expected = gauss_newton_by_jacobian(lambda: model(w, v), lambda z: F.cross_entropy(z, LABELS), leaves, directions)
    assert_close(found.curvature, expected)


def test_chunks_run_the_model_once_each() -> None:
    model, x = small(), randn(BATCH, 1, 6, 6)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    plane(lambda: F.cross_entropy(model(x), LABELS), list(model.parameters()), 6, GaussNewton(), 2)
    assert len(calls) == 3  # ExactHessian needs 6: one for each pair of blocks


def test_a_linear_model_has_its_exact_hessian() -> None:
    model, x = nn.Linear(5, CLASSES).to(F64), randn(BATCH, 5)
    leaves = list(model.parameters())
    directions = along(leaves, 4)

    def closure() -> Tensor:
        return F.cross_entropy(model(x), LABELS, label_smoothing=0.2)

    found, exact = gauss_newton(closure, leaves, directions), oracle(closure, leaves, directions)
    assert_close(found.curvature, exact.curvature)


CONVEX: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda z, t: F.cross_entropy(z, t.softmax(1)),
    lambda z, t: F.nll_loss(z.log_softmax(1), t.argmax(1)),
    lambda z, t: F.mse_loss(z, t),
    lambda z, t: F.huber_loss(z, t),
    lambda z, t: F.binary_cross_entropy_with_logits(z, t.sigmoid()),
    lambda z, t: F.binary_cross_entropy(z.sigmoid(), t.sigmoid()),
    lambda z, t: F.kl_div(z.log_softmax(1), t.softmax(1), reduction="batchmean"),
    lambda z, t: F.poisson_nll_loss(z, t.exp()),
    lambda z, t: jp.mark_output(z).exp().logsumexp(1).sum(),
]


@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from(CONVEX),
    k=st.integers(1, 5),
    batch=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    depth=st.integers(1, 3),
)
def test_positive_semi_definite_where_the_loss_is_convex(loss: Any, k: int, batch: int, seed: int, depth: int) -> None:
    torch.manual_seed(seed)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(3, 3), nn.Tanh())]
    model, x, t = nn.Sequential(*layers, nn.Linear(3, 3)).to(F64), randn(batch, 3), randn(batch, 3)
    leaves = list(model.parameters())
    found = gauss_newton(lambda: loss(model(x), t), leaves, along(leaves, k)).curvature
    values = torch.linalg.eigvalsh(found)
    assert float(values[0]) >= -1e-12 * max(1.0, float(values[-1]))


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_linear_layer_costs_one_and_two_products_a_direction(k: int) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    x, target = torch.randn(4, 16), torch.randn(4, 16)
    leaves = list(model.parameters())
    with FlopCounterMode(display=False) as once, torch.no_grad():
        F.mse_loss(model(x), target)
    with FlopCounterMode(display=False) as counted:
        gauss_newton(lambda: F.mse_loss(model(x), target), leaves, along(leaves, k))
    layer = once.get_total_flops() // 3
    assert counted.get_total_flops() == layer * ((1 + k) + 2 * (1 + 2 * k))


# -- where the loss begins ----------------------------------------------------------------------------------------


def test_without_a_boundary_the_error_names_the_remedy() -> None:
    model, x = small(), randn(BATCH, 1, 6, 6)
    leaves = list(model.parameters())
    message = re.escape(
        "no boundary between model and loss was found before this tensor, and that is where a Gauss-Newton curvature "
        "begins; expected a loss of torch.nn.functional, or jetplane.mark_output(z) on the model's output z."
    )
    with pytest.raises(MissingBoundary, match=f"^{message}$"):
        gauss_newton(lambda: model(x).square().mean(), leaves, along(leaves, 2))
    with pytest.raises(MissingBoundary, match=f"^{message}$"):
        plane(lambda: model(x).square().mean(), leaves, 2, GaussNewton())
    with pytest.raises(MissingBoundary, match="no boundary"):  # parameters alone are no model
        gauss_newton(lambda: leaves[0].square().sum(), leaves[:1], along(leaves[:1], 2))


@pytest.mark.parametrize(
    "joined",
    [
        lambda loss, b: loss + b.square().mean(),
        lambda loss, b: loss * b.exp().mean(),
        lambda loss, b: torch.stack([loss, b.sum()]).sum(),
        lambda loss, b: loss.clone().add_(b.mean()),
    ],
)
def test_what_bypasses_the_boundary_is_refused(joined: Any) -> None:
    model, x = small(), randn(BATCH, 1, 6, 6)
    leaves = list(model.parameters())
    with pytest.raises(
        MissingBoundary, match=r"joins the loss with a tensor that the model made .* for this tensor too"
    ):
        gauss_newton(lambda: joined(F.cross_entropy(model(x), LABELS), model(x)), leaves, along(leaves, 2))


def test_the_loss_written_beside_something_that_bypasses_it_is_refused() -> None:
    w = randn(4)

    def program() -> Tensor:
        parts = w.square()
        parts[0] = F.mse_loss(w, torch.zeros_like(w))
        return parts.sum()

    with pytest.raises(MissingBoundary, match="writes the loss into memory that holds something"):
        gauss_newton(program, [w], along([w], 2))


@pytest.mark.parametrize("loss", [F.nll_loss, lambda z, t: F.kl_div(input=z, target=z.detach().softmax(1))])
def test_logarithms_from_elsewhere_are_refused(loss: Any) -> None:
    model, x = small(), randn(BATCH, 1, 6, 6)
    leaves = list(model.parameters())
    message = r"is given logarithms of probabilities that are not the output of a log_softmax or logsigmoid"
    for made in (lambda z: z, lambda z: z - z.logsumexp(1, keepdim=True), lambda z: z.log_softmax(1) * 0.5):
        with pytest.raises(MissingBoundary, match=message):
            gauss_newton(lambda made=made: loss(made(model(x)), LABELS), leaves, along(leaves, 2))


def test_classes_that_are_no_axis_any_more_are_refused() -> None:
    model, x = small(), randn(BATCH, 1, 6, 6)
    leaves = list(model.parameters())
    with pytest.raises(MissingBoundary, match="is given logarithms"):
        gauss_newton(
            lambda: F.nll_loss(model(x).log_softmax(1).flatten()[2:].clone().reshape(-1, 2), LABELS[:1].expand(11)),
            *(leaves, along(leaves, 2)),
        )


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="since torch 2.13")
def test_the_last_layer_inside_the_loss_belongs_to_the_model() -> None:
    hidden, head, x = nn.Linear(3, 5).to(F64), nn.Linear(5, CLASSES).to(F64), randn(BATCH, 3)
    leaves = [*hidden.parameters(), *head.parameters()]
    directions = along(leaves, 3)

    options: dict[str, Any] = {"label_smoothing": 0.1, "ignore_index": 3, "reduction": "sum"}

    def loss() -> Tensor:
        return F.linear_cross_entropy(torch.tanh(hidden(x)), head.weight, LABELS, linear_bias=head.bias, **options)

    def outer(z: Tensor) -> Tensor:
        return F.cross_entropy(z, LABELS, **options)

    found = gauss_newton(loss, leaves, directions)
    assert_close(found.loss, loss())
    assert_close(
        found.curvature, gauss_newton_by_jacobian(lambda: head(torch.tanh(hidden(x))), outer, leaves, directions)
    )


def test_mark_output_is_the_identity_elsewhere() -> None:
    z = randn(3).requires_grad_()
    assert jp.mark_output(z) is z
    with pytest.raises(TypeError, match=r"^mark_output got list; expected a tensor, the model's output\.$"):
        jp.mark_output([z])  # type: ignore[arg-type]
    exact = jp.hessian(lambda x: jp.mark_output(x.exp()).square().sum(), z.detach())
    assert_close(exact.diagonal(), 4 * (2 * z.detach()).exp())
    each = torch.vmap(lambda row: torch.ops.jetplane.output(row) * 2)(z.detach())
    assert_close(each, 2 * z.detach())
    (slope,) = torch.autograd.grad(torch.ops.jetplane.output(z).square().sum(), z)
    assert_close(slope, 2 * z.detach())


def test_mark_output_in_a_compiled_program() -> None:
    torch.compiler.reset()
    z = randn(3).requires_grad_()
    captured = torch.compile(lambda z: jp.mark_output(z).square().sum(), backend="aot_eager", fullgraph=True)
    captured(z).backward()
    assert_close(z.grad, 2 * z.detach())


def test_several_heads_in_any_order() -> None:
    trunk, one, two = nn.Linear(5, 5).to(F64), nn.Linear(5, 3).to(F64), nn.Linear(5, 2).to(F64)
    x, target = randn(4, 5), randn(4, 2)
    leaves = [*trunk.parameters(), *one.parameters(), *two.parameters()]
    directions = along(leaves, 3)

    def hidden() -> Tensor:
        return torch.tanh(trunk(x))

    def interleaved() -> Tensor:
        loss = F.cross_entropy(torch.tanh(one(hidden())), LABELS[:4].clamp(max=2))
        return loss + F.mse_loss(torch.tanh(two(hidden())), target)  # this head runs after the first loss

    def marked() -> Tensor:
        a, b = jp.mark_output(torch.tanh(one(hidden()))), jp.mark_output(torch.tanh(two(hidden())))
        return F.cross_entropy(a, LABELS[:4].clamp(max=2)) + (b - target).square().mean()

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z[:, :3], LABELS[:4].clamp(max=2)) + F.mse_loss(z[:, 3:], target)

    def both() -> Tensor:
        return torch.cat([torch.tanh(one(hidden())), torch.tanh(two(hidden()))], 1)

    expected = gauss_newton_by_jacobian(both, loss, leaves, directions)
    assert_close(gauss_newton(interleaved, leaves, directions).curvature, expected)
    assert_close(gauss_newton(marked, leaves, directions).curvature, expected)


def test_losses_inside_a_recurrence() -> None:
    cell, head = nn.GRUCell(3, 4).to(F64), nn.Linear(4, CLASSES).to(F64)
    x, labels = randn(3, 2, 3), torch.tensor([[0, 1], [2, 3], [1, 1]])
    leaves = [*cell.parameters(), *head.parameters()]
    directions = along(leaves, 2)

    def outputs() -> list[Tensor]:
        h, found = torch.zeros(2, 4, dtype=F64), []
        for entry in x:
            h = cell(entry, h)
            found.append(head(h))
        return found

    def program() -> Tensor:
        h, loss = torch.zeros(2, 4, dtype=F64), torch.zeros((), dtype=F64)
        for entry, label in zip(x, labels, strict=True):
            h = cell(entry, h)
            loss += F.cross_entropy(head(h), label)
        return loss

    def total(z: Tensor) -> Tensor:
        return sum(F.cross_entropy(one, label) for one, label in zip(z, labels, strict=True))

    expected = gauss_newton_by_jacobian(lambda: torch.stack(outputs()), total, leaves, directions)
    assert_close(gauss_newton(program, leaves, directions).curvature, expected)


def penalty_before(leaves: Sequence[Tensor], loss: Callable[[], Tensor]) -> Tensor:
    total = torch.zeros((), dtype=F64)
    for leaf in leaves:
        total += leaf.pow(2).sum()
    return 0.5 * total + loss()


def penalty_written(leaves: Sequence[Tensor], loss: Callable[[], Tensor]) -> Tensor:
    parts = torch.zeros(1 + len(leaves), dtype=F64)
    parts[0] = loss()
    for number, leaf in enumerate(leaves):
        parts[1 + number] = 0.5 * leaf.pow(2).sum()
    return parts.sum()


PENALTIES: list[tuple[str, Callable[[Sequence[Tensor], Callable[[], Tensor]], Tensor]]] = [
    ("after", lambda leaves, loss: loss() + 0.5 * sum(leaf.square().sum() for leaf in leaves)),
    ("before", penalty_before),
    ("written", penalty_written),
    ("vector", lambda leaves, loss: 0.5 * torch.cat([p.flatten() for p in leaves]).square().sum() + loss()),
    ("diamond", lambda leaves, loss: sum((p.abs() * p.abs()).mul(0.5).sum() for p in leaves) + loss()),
    ("marked", lambda leaves, loss: loss() + 0.5 * sum(jp.mark_output(p).square().sum() for p in leaves)),
    ("anchored", lambda leaves, loss: sum(torch.sub(p, torch.ones_like(p)).pow(2).sum() for p in leaves) / 2 + loss()),
]


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("penalty", [one for _, one in PENALTIES], ids=[name for name, _ in PENALTIES])
def test_terms_in_the_parameters_alone_are_exact(penalty: Any, chunk_size: int | None) -> None:
    model, x = small(), randn(BATCH, 1, 6, 6)
    leaves = list(model.parameters())

    def loss() -> Tensor:
        return F.cross_entropy(model(x), LABELS)

    flat = torch.cat([d.flatten(1) for d in plane_rows(leaves, 3)], 1)
    with_penalty = plane(lambda: penalty(leaves, loss), leaves, 3, GaussNewton(), chunk_size)
    assert_close(with_penalty.curvature, plane(loss, leaves, 3, GaussNewton()).curvature + flat @ flat.T)


def test_a_long_sum_over_parameters() -> None:
    leaves = [randn(1) for _ in range(400)]
    directions = along(leaves, 2)

    def program() -> Tensor:
        total = 0.0
        for leaf in leaves:
            total = total + leaf.square().sum() / 2
        return total + F.mse_loss(leaves[0], torch.zeros(1, dtype=F64))

    flat = torch.cat(directions, 1)
    expected = flat @ flat.T + 2 * directions[0] @ directions[0].T
    assert_close(gauss_newton(program, leaves, directions).curvature, expected)


def test_a_temperature_in_the_loss_is_exact() -> None:
    model, x, heat = nn.Linear(3, CLASSES).to(F64), randn(BATCH, 3), randn(1)
    leaves = [*model.parameters(), heat]
    directions = along(leaves, 3)

    def program() -> Tensor:
        return F.cross_entropy(jp.mark_output(model(x)) * heat.exp(), LABELS) + heat.sum()

    for leaf in leaves:
        leaf.requires_grad_()
    expected = oracle(program, leaves, directions)  # the model is linear, so all of the Hessian
    assert_close(gauss_newton(program, leaves, directions).curvature, expected.curvature)


def test_a_function_of_parameters_that_was_written_since_is_refused() -> None:
    w = randn(3)

    def program() -> Tensor:
        square = w.square()
        norm = square.sum()
        square.zero_()
        return F.mse_loss(w, torch.zeros_like(w)) + norm

    with pytest.raises(MissingBoundary, match="a function of parameters that the loss uses was written in place since"):
        gauss_newton(program, [w], along([w], 2))


@pytest.mark.parametrize("value", [lambda w: w[0], lambda w: 0.0, lambda w: torch.ones((), dtype=F64)])
def test_a_function_of_parameters_that_was_written_in_part_is_refused(value: Any) -> None:
    w = randn(3)

    def program() -> Tensor:
        square = w.square()
        square[0] = value(w)
        return F.mse_loss(w, torch.zeros_like(w)) + square.sum()

    with pytest.raises(MissingBoundary, match="joins the loss with a tensor that the model made"):
        gauss_newton(program, [w], along([w], 2))


def test_memory_of_the_loss_may_be_used_again() -> None:
    w, buffer = randn(3), torch.zeros(3, dtype=F64)
    directions = along([w], 2)

    def program() -> Tensor:
        buffer.copy_(F.mse_loss(w.exp(), torch.zeros_like(w), reduction="none"))
        first = buffer.sum()
        buffer.copy_(w)
        buffer[1:] = 0.0
        return first + buffer.square().sum()

    (rows,) = directions
    expected = 2 * rows * (2 * w).exp() @ rows.T + 2 * rows[:, :1] @ rows[:, :1].T
    assert_close(gauss_newton(program, [w], directions).curvature, expected)


def test_memory_of_a_function_of_parameters_may_be_used_again() -> None:
    w, v = randn(3), randn(3)
    directions = along([w, v], 2)

    def program() -> Tensor:
        buffer = w.square()
        buffer.zero_()
        buffer.copy_(v)
        return F.mse_loss(w, torch.zeros_like(w), reduction="sum") + buffer.square().sum()

    expected = 2 * directions[0] @ directions[0].T + 2 * directions[1] @ directions[1].T
    assert_close(gauss_newton(program, [w, v], directions).curvature, expected)


SAME: list[Callable[[Tensor], Tensor]] = [
    lambda p: p.contiguous(),
    lambda p: F.dropout(p, training=False),
    lambda p: p.to(F64),
    lambda p: p.expand(1, 3).squeeze(0),
    lambda p: torch.atleast_1d(p).real,
    lambda p: p.flip(0).unsqueeze(0).mT,
    lambda p: torch.stack([p, p])[1],
    lambda p: p.requires_grad_(False).view(3, 1).clone(),
    lambda p: torch.ops.aten.lift_fresh(p),
]


@pytest.mark.parametrize("same", SAME)
def test_other_names_of_a_parameter(same: Any) -> None:
    w = randn(3)
    (rows,) = along([w], 2)

    def program() -> Tensor:
        penalty = same(w).exp().sum() + same(w).square().sum()
        return penalty + F.mse_loss(w.tanh(), torch.zeros_like(w), reduction="sum")

    slope = 1 - w.tanh().square()
    assert_close(gauss_newton(program, [w], [rows]).curvature, rows * (w.exp() + 2 + 2 * slope.square()) @ rows.T)


def test_parametrised_weights_belong_to_the_model() -> None:
    model, x = parametrizations.weight_norm(nn.Linear(4, CLASSES)).to(F64), randn(BATCH, 4)
    leaves = list(model.parameters())
    directions = along(leaves, 3)

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z, LABELS)

    def program() -> Tensor:
        return (loss(torch.tanh(model(x))) + loss(torch.tanh(model(x)))) / 2

    expected = gauss_newton_by_jacobian(lambda: torch.tanh(model(x)), loss, leaves, directions)
    assert_close(gauss_newton(program, leaves, directions).curvature, expected)


def test_a_program_that_takes_another_course_is_refused() -> None:
    model, x, runs = small(), randn(BATCH, 1, 6, 6), []

    def closure() -> Tensor:
        runs.append(1)
        loss = F.cross_entropy(model(x), LABELS)
        return loss + F.mse_loss(model(x), REAL) if len(runs) > 1 else loss

    with pytest.raises(UnsupportedProgram, match="took another course when it was run again for further directions"):
        plane(closure, list(model.parameters()), 4, GaussNewton(), 2)


def test_losses_under_vmap_and_autocast() -> None:
    model, x = small(), randn(BATCH, 1, 6, 6)
    leaves = list(model.parameters())
    directions = along(leaves, 2)
    expected = gauss_newton(lambda: F.cross_entropy(model(x), LABELS), leaves, directions)
    mapped = gauss_newton(
        lambda: torch.vmap(F.cross_entropy, randomness="error")(model(x), LABELS).mean(), leaves, directions
    )
    assert_close(mapped.curvature, expected.curvature)
    single = small().float()
    with torch.autocast("cpu", torch.bfloat16):
        found = gauss_newton(
            lambda: F.cross_entropy(single(x.float()), LABELS), *((p := list(single.parameters())), along(p, 2))
        )
    assert float(torch.linalg.eigvalsh(found.curvature.float())[0]) >= -1e-2


def test_several_closures_are_averaged() -> None:
    model, x = small(), randn(BATCH, 1, 6, 6)
    leaves = list(model.parameters())
    halves = [
        lambda: F.cross_entropy(model(x[:3]), LABELS[:3], reduction="none"),
        lambda: F.cross_entropy(model(x[3:]), LABELS[3:]),
    ]
    whole = plane(lambda: F.cross_entropy(model(x), LABELS), leaves, 5, GaussNewton())
    for chunk_size in (None, 2):
        assert_close(plane(halves, leaves, 5, GaussNewton(), chunk_size).curvature, whole.curvature)


# -- curvatures by name -------------------------------------------------------------------------------------------


class Elsewhere:
    """A curvature of the user's, from before there was ``late``."""

    def pairs(self, k: int) -> jp.PairSet:
        return jp.PairSet.all(k)

    def model(self, jet: jp.Jet, pairs: jp.PairSet) -> jp.Quadratic:
        return ExactHessian().model(jet, pairs)


def test_a_curvature_that_does_not_say_when_it_begins_begins_at_once() -> None:
    model, x = small(), randn(BATCH, 1, 6, 6)
    leaves = list(model.parameters())
    assert not curvatures.is_late(Elsewhere())

    def closure() -> Tensor:
        return model(x).square().mean()

    assert_close(plane(closure, leaves, 2, Elsewhere()).curvature, plane(closure, leaves, 2, ExactHessian()).curvature)


# -- compiled -----------------------------------------------------------------------------------------------------


def marked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (jp.mark_output(model(x)).logsumexp(1) - model(x)[:, 0].detach()).mean()


def each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def logarithms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(model(x), 1), y, reduction="none")


def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return logarithms(model, x, y) + 0.1 * sum(p.square().sum() for p in model.parameters())


COMPILED: dict[str, tuple[Any, Any]] = {
    "per-sample": (GaussNewton(), logarithms),
    "fisher": (EmpiricalFisher(), each),
    "penalised": (GaussNewton(), penalised),
    "marked": (GaussNewton(), marked),
    "exact": (ExactHessian(), lambda model, x, y: each(model, x, y).mean()),
}


# every case traced, and by the compiler: there slow but for one
TRACED = [pytest.param(name, False, id=f"{name}-traced") for name in COMPILED]
BY_COMPILER = [pytest.param(n, True, id=n, marks=() if n == "fisher" else pytest.mark.slow) for n in COMPILED]


@pytest.mark.parametrize(("case", "compiler"), TRACED + BY_COMPILER)
def test_compiled_steps_equal_eager_ones(case: str, compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    curvature, loss = COMPILED[case]
    if not compiler:
        monkeypatch.setattr(_torch, "compiled", trace_only)
    torch.compiler.reset()
    x = randn(BATCH, 3)
    found = []
    for compile in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, CLASSES, bias=False)).to(F64)
        search = jp.optim.HyperplaneSearch(
            model.parameters(), 0.3, Gaussian(2), curvature, JitteredInverse(), compile=compile
        )
        losses = [search.step(lambda a, b, model=model: loss(model, a, b), x, LABELS) for _ in range(2)]
        found.append([*losses, search.report.slope, search.report.curvature, *model.parameters()])
    for eager, compiled in zip(*found, strict=True):
        assert_close(compiled, eager, 1e-9)


def test_compiled_without_a_boundary_falls_back_and_says_so() -> None:
    torch.compiler.reset()
    model, x = small(), randn(BATCH, 1, 6, 6)
    search = jp.optim.HyperplaneSearch(
        model.parameters(), 0.3, Gaussian(2), GaussNewton(), JitteredInverse(), compile=True
    )
    with pytest.warns(UserWarning, match="MissingBoundary"), pytest.raises(MissingBoundary, match="no boundary"):
        search.step(lambda a: model(a).square().mean(), x)
