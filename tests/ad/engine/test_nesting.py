"""Jets of jets, perturbations that must not mix, and differentiation inside the differentiated program."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import jetplane as jp
from cases import F64, assert_close, assert_quadratic, randn
from jetplane.testing.oracle import double_backward


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=F64)


def D(function, x: Tensor | float) -> Tensor:
    """The derivative of a function of one number, by jvp."""
    x = torch.as_tensor(x, dtype=F64)
    return jp.jvp(function, x, torch.ones_like(x))[1]


def D2(function, x: Tensor | float) -> Tensor:
    """The second derivative, by hyper-dual numbers."""
    x = torch.as_tensor(x, dtype=F64)
    return jp.hyperdual(function, x, torch.ones_like(x), torch.ones_like(x)).eps12


# -- higher orders ---------------------------------------------------------------------------------------------------

# (name, function, its first to fourth derivatives)
HIGHER = [
    ("sin", torch.sin, (math.cos, lambda x: -math.sin(x), lambda x: -math.cos(x), math.sin)),
    ("exp-product", lambda x: x.exp() * x, tuple(lambda x, n=n: (x + n) * math.exp(x) for n in (1, 2, 3, 4))),
    ("power", lambda x: x**5, (lambda x: 5 * x**4, lambda x: 20 * x**3, lambda x: 60 * x**2, lambda x: 120 * x)),
    (
        "reciprocal",
        lambda x: 1 / x,
        (lambda x: -1 / x**2, lambda x: 2 / x**3, lambda x: -6 / x**4, lambda x: 24 / x**5),
    ),
    ("log", torch.log, (lambda x: 1 / x, lambda x: -1 / x**2, lambda x: 2 / x**3, lambda x: -6 / x**4)),
]


@pytest.mark.parametrize(("name", "function", "exact"), HIGHER, ids=[row[0] for row in HIGHER])
def test_third_and_fourth_order(name: str, function, exact) -> None:
    x = 0.7
    first, second, third, fourth = (number(d(x)) for d in exact)
    assert_close(D(function, x), first)
    assert_close(D(lambda y: D(function, y), x), second)
    assert_close(D(lambda y: D2(function, y), x), third)
    assert_close(D2(lambda y: D(function, y), x), third)
    assert_close(D2(lambda y: D2(function, y), x), fourth)
    assert_close(D(lambda a: D(lambda b: D(lambda c: D(function, c), b), a), x), fourth)
    assert_close(jp.hessian(lambda y: jp.hessian(function, y[None]).sum(), number(x)[None]), fourth[None, None])


def test_a_jet_of_a_jet_gives_the_mixed_tensor() -> None:
    x, u, v, w = randn(3), randn(3), randn(3), randn(3)
    f = lambda x: (x.exp() * x.roll(1).sin()).sum()  # noqa: E731
    third = torch.autograd.functional.hessian(lambda y: torch.autograd.functional.jvp(f, y, w, create_graph=True)[1], x)
    got = jp.hyperdual(lambda y: jp.jvp(f, y, w)[1], x, u, v)
    assert_close(got.eps12, u @ third @ v)


@pytest.mark.parametrize("outer", ["all", "diagonal", "star", "laplacian", "none"])
@pytest.mark.parametrize("inner", ["all", "diagonal", "star", "laplacian"])
def test_different_pair_sets_inside_each_other(outer: str, inner: str) -> None:
    x, v = randn(3), randn(2, 3)
    eye = torch.eye(3, dtype=F64)
    f = lambda x: (x.exp() * x.roll(1)).sum()  # noqa: E731
    nested = jp.jet(lambda y: jp.jet(f, y, eye, inner).second.square().sum(), x, v, outer)

    # f_ij is nonzero for i == j: e^xi x_(i-1), and for neighbours: e^xi
    def twin(y: Tensor) -> Tensor:
        h = torch.autograd.functional.hessian(f, y, create_graph=True)
        rows = {
            "all": [h[i, j] for i in range(3) for j in range(i, 3)],
            "diagonal": [h[i, i] for i in range(3)],
            "star": [h[0, 1], h[0, 2]],
            "laplacian": [h.trace()],
        }[inner]
        return torch.stack(rows).square().sum()

    leaf = x.clone().requires_grad_()
    q = double_backward(lambda: twin(leaf), [leaf], [v])
    assert_close(nested.tangent, q.slope)
    c = q.curvature
    second = {
        "all": [c[0, 0], c[0, 1], c[1, 1]],
        "diagonal": [c[0, 0], c[1, 1]],
        "star": [c[0, 1]],
        "laplacian": [c.trace()],
        "none": [],
    }[outer]
    if second:
        assert_close(nested.second, torch.stack(second))


# -- perturbation confusion: Siskind & Pearlmutter, and ForwardDiff.jl's ConfusionTest as data -------------------------

CONFUSION = [
    ("x * d(x + y)", lambda: D(lambda x: x * D(lambda y: x + y, 1.0), 1.0), 1.0),
    ("x * d(x * y)", lambda: D(lambda x: x * D(lambda y: x * y, 2.0), 3.0), 6.0),
    ("x * d(x * y) at x", lambda: D(lambda x: x * D(lambda y: x * y, x), 3.0), 6.0),
    ("d(y * y) at x", lambda: D(lambda x: D(lambda y: y * y, x), 3.0), 2.0),
    ("d of a constant", lambda: D(lambda x: D(lambda y: x * x, 2.0), 3.0), 0.0),
    ("three deep", lambda: D(lambda x: x * D(lambda y: y * D(lambda z: x + y + z, 1.0), 1.0), 1.0), 1.0),
    ("second order outside", lambda: D2(lambda x: x * D(lambda y: x * x + y, 1.0), 2.0), 0.0),
    ("second order inside", lambda: D(lambda x: x * D2(lambda y: x * y * y, 1.0), 2.0), 8.0),
    ("both", lambda: D2(lambda x: x * D2(lambda y: x * y * y, 1.0), 2.0), 4.0),
    ("curried", lambda: D(lambda x: D(lambda y: x.sin() * y, 5.0), 0.0), 1.0),
    ("shift", lambda: D(lambda x: D(lambda y: (x + y) ** 3, x), 1.0), 24.0),
    (
        "gradient of v times d(y norm v)",
        lambda: jp.gradient(lambda v: v.sum() * D(lambda y: y * v.norm(), 1.0), torch.ones(1, dtype=F64))[0],
        2.0,
    ),
]


@pytest.mark.parametrize(("name", "program", "expected"), CONFUSION, ids=[row[0] for row in CONFUSION])
def test_perturbations_do_not_mix(name: str, program, expected: float) -> None:
    value = program()
    assert value.dtype == F64
    assert float(value) == pytest.approx(expected, rel=1e-14, abs=1e-14)


def test_jacobian_of_a_gradient_is_the_matrix() -> None:
    a, y, x = randn(10, 8), randn(10), randn(8)
    assert_close(jp.gradient(lambda x: jp.gradient(lambda y: y @ (a @ x), y), x), a)


def test_lagrangian_does_not_mix_its_arguments() -> None:
    m, g = 1.0, 9.8
    q, qdot, p = (torch.tensor(t, dtype=F64) for t in ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]))
    lagrangian = lambda q, v: m / 2 * (v @ v) - m * g * q[1]  # noqa: E731
    mixed = jp.gradient(lambda a: jp.gradient(lambda b: lagrangian(a, b), qdot), q)
    assert_close(mixed, torch.zeros(2, 2, dtype=F64))

    def hamiltonian(a: Tensor) -> Tensor:
        f = lambda v: lagrangian(a, v)  # noqa: E731
        zero = torch.zeros(2, dtype=F64)
        v = torch.cholesky_solve((p - jp.gradient(f, zero))[:, None], torch.linalg.cholesky(jp.hessian(f, zero)))[:, 0]
        return p @ v - f(v)

    assert_close(jp.gradient(hamiltonian, q), torch.tensor([0.0, g], dtype=F64))


def test_hessian_of_a_linear_function_behind_closures() -> None:
    pick = lambda z, x: x[0]  # noqa: E731
    assert_close(
        jp.hessian(lambda x: (lambda y: pick([(1, (2, 3))], y))(x), torch.ones(1, dtype=F64)),
        torch.zeros(1, 1, dtype=F64),
    )


def test_a_perturbed_tensor_captured_by_an_inner_pass() -> None:
    w, x = randn(3), randn(3)
    with jp.perturb([w], [torch.eye(3, dtype=F64)]) as outer:
        gradient = jp.gradient(lambda y: (y * w).square().sum(), x)  # 2 y w^2
    assert_close(outer.of(gradient).tangent, torch.diag(4 * x * w))
    assert_close(outer.of(gradient).second[0], torch.stack([4 * x[0], number(0), number(0)]))


def test_perturb_inside_perturb() -> None:
    a, b = number(2.0), number(3.0)
    one = torch.ones(1, dtype=F64)
    with jp.perturb([a], [one]) as outer:
        with jp.perturb([b], [one]) as inner:
            y = a**2 * b**3
        slope = inner.of(y).tangent[0]  # 3 a^2 b^2
        curvature = inner.of(y).second[0]  # 6 a^2 b
    assert float(slope) == 108 and float(curvature) == 72
    assert float(outer.of(y).tangent[0]) == 108
    assert float(outer.of(slope).tangent[0]) == 108 and float(outer.of(curvature).second[0]) == 36


def test_passes_built_before_they_are_entered() -> None:
    a, b = number(2.0), number(3.0)
    one = torch.ones(1, dtype=F64)
    inner, outer = jp.perturb([b], [one]), jp.perturb([a], [one])
    with outer:
        with inner:
            y = a**2 * b**3
        slope = inner.of(y).tangent[0]
    assert float(slope) == 108
    assert float(outer.of(y).tangent[0]) == 108
    assert float(outer.of(slope).tangent[0]) == 108


# -- differentiation inside the program: exact, or refused, never wrong --------------------------------------------------  # noqa: E501


def autograd_gradient(x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.requires_grad_()
        (g,) = torch.autograd.grad((y**3).sum() * y.sum(), y, create_graph=True)
    return (g * x).sum()


def gradient_twin(x: Tensor) -> Tensor:
    return ((3 * x**2 * x.sum() + (x**3).sum()) * x).sum()


def autograd_of_a_product(x: Tensor) -> Tensor:
    with torch.enable_grad():
        t = torch.ones(3, dtype=F64, requires_grad=True)
        (g,) = torch.autograd.grad((t * x).tanh().sum(), t, create_graph=True)
    return g.square().sum()


def backward_into_grad(x: Tensor) -> Tensor:
    with torch.enable_grad():
        t = torch.ones(3, dtype=F64, requires_grad=True)
        (t * x).sin().sum().backward(create_graph=True)
    return (t.grad * x).sum()


def double_autograd(x: Tensor) -> Tensor:
    with torch.enable_grad():
        t = torch.zeros((), dtype=F64, requires_grad=True)
        (g,) = torch.autograd.grad((x * (1 + t)).exp().sum(), t, create_graph=True)
        (h,) = torch.autograd.grad(g, t, create_graph=True)
    return h


def meta_step(x: Tensor) -> Tensor:
    """A step of gradient descent inside, as meta-learning does."""
    with torch.enable_grad():
        w = x if x.requires_grad else x.requires_grad_()
        (g,) = torch.autograd.grad((w.sin() * w).sum(), w, create_graph=True)
        return ((w - 0.1 * g) ** 2).sum()


INSIDE = [
    ("autograd.grad", autograd_gradient, gradient_twin),
    ("autograd.grad-of-another", autograd_of_a_product, lambda x: (x * (1 - x.tanh() ** 2)).square().sum()),
    ("backward", backward_into_grad, lambda x: (x * x.cos() * x).sum()),
    ("double-backward", double_autograd, lambda x: (x**2 * x.exp()).sum()),
    ("meta-step", meta_step, lambda x: ((x - 0.1 * (x.cos() * x + x.sin())) ** 2).sum()),
    ("func.grad", lambda x: (torch.func.grad(lambda y: (y**3).sum() * y.sum())(x) * x).sum(), gradient_twin),
    (
        "func.grad-of-another",
        lambda x: torch.func.grad(lambda t: (t * x).tanh().sum())(torch.ones(3, dtype=F64)).square().sum(),
        lambda x: (x * (1 - x.tanh() ** 2)).square().sum(),
    ),
    ("func.vmap", lambda x: torch.func.vmap(lambda a: a.sin() * x.sum())(x).sum(), lambda x: x.sin().sum() * x.sum()),
    (
        "func.vmap-in-dims",
        lambda x: torch.func.vmap(lambda a, b: a @ b, in_dims=(0, None))(torch.outer(x, x), x).sum(),
        lambda x: (torch.outer(x, x) @ x).sum(),
    ),
    (
        "func.vmap-captured",
        lambda x: torch.func.vmap(lambda a: (a * x).sum())(torch.eye(3, dtype=F64)).square().sum(),
        lambda x: x.square().sum(),
    ),
    (
        "func.jacrev",
        lambda x: torch.func.jacrev(lambda y: y.sin() * y.sum())(x).square().sum(),
        lambda x: (torch.diag(x.cos() * x.sum()) + x.sin()[:, None]).square().sum(),
    ),
    (
        "func.jacfwd",
        lambda x: torch.func.jacfwd(lambda y: y.sin() * y.sum())(x).square().sum(),
        lambda x: (torch.diag(x.cos() * x.sum()) + x.sin()[:, None]).square().sum(),
    ),
    (
        "func.hessian",
        lambda x: torch.func.hessian(lambda y: (y**4).sum())(x).square().sum(),
        lambda x: (144 * x**4).sum(),
    ),
    ("func.jvp", lambda x: torch.func.jvp(lambda y: y.sin(), (x,), (x,))[1].sum(), lambda x: (x * x.cos()).sum()),
    ("func.vjp", lambda x: torch.func.vjp(lambda y: y.sin() * x, x)[1](x)[0].sum(), lambda x: (x * x.cos() * x).sum()),
    (
        "func.vmap-grad",
        lambda x: torch.func.vmap(torch.func.grad(lambda a: a**3 * x.sum()))(x).sum(),
        lambda x: (3 * x**2 * x.sum()).sum(),
    ),
    (
        "func.functional_call",
        lambda x: torch.func.functional_call(nn.Linear(3, 1, bias=False).double(), {"weight": x[None]}, (x,)).sum(),
        lambda x: x @ x,
    ),
    (
        "autograd.functional.jacobian",
        lambda x: torch.autograd.functional.jacobian(lambda y: (y**3).sum(), x, create_graph=True).square().sum(),
        lambda x: (9 * x**4).sum(),
    ),
    ("forward-ad", lambda x: _forward_ad(x), lambda x: (x * x.cos()).sum()),
    (
        "checkpoint",
        lambda x: checkpoint(lambda y: (y.sin() * y).sum() ** 2, x, use_reentrant=False),
        lambda x: (x.sin() * x).sum() ** 2,
    ),
    (
        "checkpoint-reentrant",
        lambda x: checkpoint(lambda y: (y.sin() * y).sum() ** 2, x, use_reentrant=True),
        lambda x: (x.sin() * x).sum() ** 2,
    ),
    (
        "checkpoint-captured",
        lambda x: checkpoint(lambda y: (y.sin() * x).sum() ** 2, torch.ones(3, dtype=F64), use_reentrant=False),
        lambda x: (x * math.sin(1.0)).sum() ** 2,
    ),
    (
        "checkpoint-reentrant-captured",
        lambda x: checkpoint(lambda y: (y.sin() * x).sum() ** 2, torch.ones(3, dtype=F64), use_reentrant=True),
        lambda x: (x * math.sin(1.0)).sum() ** 2,
    ),
    ("checkpoint-with-backward", lambda x: _checkpointed_gradient(x), lambda x: (3 * x**2).square().sum()),
    ("saved-tensor-hooks", lambda x: _hooked(x), lambda x: (3 * x**2).square().sum()),
]


def _forward_ad(x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        return torch.autograd.forward_ad.unpack_dual(dual.sin()).tangent.sum()


def _checkpointed_gradient(x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.requires_grad_()
        out = checkpoint(lambda z: (z**3).sum(), y, use_reentrant=False)
        (g,) = torch.autograd.grad(out, y, create_graph=True)
    return g.square().sum()


def _hooked(x: Tensor) -> Tensor:
    with torch.enable_grad(), torch.autograd.graph.save_on_cpu():
        y = x.requires_grad_()
        (g,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
    return g.square().sum()


MAY_BE_REFUSED = ("autograd.functional.jacobian",)


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize(("name", "program", "twin"), INSIDE, ids=[row[0] for row in INSIDE])
def test_differentiating_inside_the_program(name: str, program, twin) -> None:
    x, v = randn(3), randn(2, 3)
    expected = jp.quadratic(twin, x, v)
    leaf = x.clone().requires_grad_()
    assert_quadratic(expected, double_backward(lambda: twin(leaf), [leaf], [v]))
    try:
        actual = jp.quadratic(program, x, v)
    except jp.JetplaneError:
        assert name in MAY_BE_REFUSED
        return
    assert_quadratic(actual, expected)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node with no underlying reference")  # torch's own
@pytest.mark.parametrize("requires", [True, False])
def test_what_torch_linearizes_is_refused(requires: bool) -> None:
    def loss(x: Tensor) -> Tensor:
        return torch.func.linearize(lambda y: y.sin(), x)[1](torch.ones_like(x)).sum() * x.sum()

    x, v = randn(3).requires_grad_(requires), randn(2, 3)
    says = r"torch.func.linearize at .*test_nesting.py:\d+ traces a graph whose numbers are not those of the pass; "
    with pytest.raises(jp.UnsupportedProgram, match=says + r"expected torch.func.jvp\."):
        jp.quadratic(loss, x, v)
    with pytest.raises(jp.UnsupportedProgram, match=says), jp.perturb([x], [v]):
        loss(x)
    plain = torch.ones(3, dtype=F64)
    assert_close(torch.func.linearize(torch.sin, plain)[1](plain), plain.cos())  # elsewhere it is torch's


def _steps(w: Tensor, keep: bool) -> Tensor:
    """Three steps of gradient descent inside, and the loss behind them: first-order MAML without ``keep``."""
    for _ in range(3):
        (slope,) = torch.autograd.grad((w.sin() * w).sum(), [w], create_graph=keep)
        w = w - 0.1 * slope
    return (w**3).sum()


def _normed(w: Tensor, keep: bool) -> Tensor:
    """The gradient penalty of a WGAN, or of a network for physics, at points that are data."""
    points = torch.linspace(-1, 1, 4, dtype=F64).requires_grad_()
    (slope,) = torch.autograd.grad((points * w).tanh().sum(), points, create_graph=keep)
    return (slope.norm() - 1) ** 2 + (slope * w).sum()


def _filled(w: Tensor, keep: bool) -> Tensor:
    """The gradient of a leaf of the program's own, written into, and a view of it."""
    t = torch.ones(4, dtype=F64, requires_grad=True)
    (t * w).sin().sum().backward(create_graph=keep)
    slope = t.grad.clone() if keep else t.grad
    slope[:2].mul_(w[:2])
    return (slope[1:] * w[1:]).sum()


def _handed_through(w: Tensor, keep: bool) -> Tensor:
    """What comes of a backward pass is what it was given, and that goes on as it was."""
    t = torch.ones(4, dtype=F64, requires_grad=True)
    given = w * w
    (slope,) = torch.autograd.grad(t.view(2, 2), t, given.view(2, 2), create_graph=keep)
    return (slope * w + given.exp()).sum()


def _recomputed(w: Tensor, keep: bool) -> Tensor:
    t = torch.ones(4, dtype=F64, requires_grad=True)
    checkpoint(lambda t, w: (t * w).exp().sum(), t, w, use_reentrant=not keep).backward(create_graph=keep)
    return (t.grad * w).sum()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
@pytest.mark.parametrize("keep", [False, True], ids=["constant", "followed"])
@pytest.mark.parametrize("program", [_steps, _normed, _filled, _handed_through, _recomputed])
def test_a_backward_pass_that_makes_no_graph_is_a_constant_as_in_backprop(program, keep: bool) -> None:
    leaf, v = randn(4).requires_grad_(), randn(3, 4)
    on = torch.enable_grad()(lambda w: program(w, keep))
    expected = double_backward(lambda: on(leaf), [leaf], [v])
    with jp.perturb([leaf], [v]) as jets:
        loss = on(leaf)
    assert_quadratic(jets.quadratic(loss), expected)
    with jp.perturb([leaf], [v], no_grad="follow") as jets:
        loss = on(leaf)
    if program is not _recomputed:  # which is another one with a graph
        followed = double_backward(lambda: torch.enable_grad()(program)(leaf, True), [leaf], [v])
        assert_quadratic(jets.quadratic(loss), followed)


def test_a_result_of_a_backward_pass_without_a_graph_is_refused_and_not_zero() -> None:
    def slope(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            return torch.autograd.grad((leaf**3).sum(), leaf)[0]

    x = randn(3)
    match = r"or by a backward pass without create_graph=True.*and with a graph, or a pass with no_grad='follow'"
    with pytest.raises(ValueError, match=match):
        jp.jvp(slope, (x,), (x,))
    assert_close(jp.jvp(slope, (x,), (x,), no_grad="follow")[1], 6 * x * x)


def test_gradients_inside_perturb_on_a_module() -> None:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), randn(5, 3)
    leaves = list(net.parameters())
    v = [torch.randn(2, *p.shape, dtype=F64) for p in leaves]

    def penalty() -> Tensor:
        with torch.enable_grad():
            points = x.clone().requires_grad_()
            (g,) = torch.autograd.grad(net(points).sum(), points, create_graph=True)
        return g.square().sum()

    with jp.perturb(leaves, v, allow_unused=True) as jets:
        loss = penalty()
    assert_quadratic(jets.quadratic(loss), double_backward(penalty, leaves, v))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "program",
    [
        lambda f, x: torch.func.vmap(lambda row: jp.gradient(f, row))(x),
        lambda f, x: torch.func.grad(lambda y: jp.laplacian(f, y))(x),
        lambda f, x: torch.func.jvp(lambda y: jp.laplacian(f, y), (x,), (x,)),
        lambda f, x: torch.func.vmap(lambda row: jp.quadratic(f, row, row[None]).curvature)(x),
    ],
)
def test_a_pass_inside_a_transform_is_refused(program) -> None:
    with pytest.raises(jp.UnsupportedProgram, match=r"inside a torch.func transform"):
        program(lambda y: (y**3).sum(), randn(2, 3))


def test_a_transform_around_a_captured_pass_is_refused() -> None:
    x = randn(3)
    with pytest.raises((jp.UnsupportedProgram, TypeError), match=r"torch\.func transform"):
        torch.func.vmap(lambda a: jp.gradient(lambda y: (y * a).sum(), x))(randn(4))


class _Scaled(torch.autograd.Function):
    """Its own backward pass takes a factor for a constant."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.exp() * x.detach()


def _stopped(x: Tensor) -> Tensor:
    y = x.sin()
    with torch.no_grad():
        scale = y.square().sum()
    return y * scale * y.detach().mean()


@pytest.mark.parametrize(
    "part",
    [
        _stopped,
        lambda x: checkpoint(_stopped, x, use_reentrant=False),
        lambda x: _Scaled.apply(x.sin()),
    ],
    ids=["plain", "checkpoint", "function"],
)
def test_stops_hold_in_what_a_backward_pass_inside_runs(part) -> None:
    """A checkpoint runs the program once more there, and a Function its own backward."""

    def loss(w: Tensor) -> Tensor:
        with torch.enable_grad():
            x = torch.linspace(-1, 1, 4, dtype=F64).requires_grad_()
            (slope,) = torch.autograd.grad(part(w * x).sum(), x, create_graph=True)
            return slope.square().sum()

    jp.register.transparent(_Scaled)
    try:
        leaf, v = randn(4).requires_grad_(), randn(2, 4)
        expected = double_backward(lambda: loss(leaf), [leaf], [v])
        with jp.perturb([leaf], [v]) as jets:
            result = loss(leaf)
    finally:
        jp.register.remove(_Scaled)
    assert_quadratic(jets.quadratic(result), expected)


def test_a_derivative_inside_a_pass_without_a_graph_says_what_to_do() -> None:
    def loss() -> Tensor:
        x = torch.ones(3, dtype=F64).requires_grad_()
        (slope,) = torch.autograd.grad((x * w).sin().sum(), x, create_graph=True)
        return slope.square().sum()

    w = randn(3)
    says = (
        r"differentiates what has no graph, for a pass runs with autograd off .*; expected torch.enable_grad\(\) around"
    )
    with pytest.raises(jp.UnsupportedProgram, match=says), jp.perturb([w], [randn(1, 3)]):
        loss()
    with pytest.raises(jp.UnsupportedProgram, match=says + r".*itself, and no backward of a loss, which is only to be"):
        jp.forward_gradient(lambda: ((x := w * 2).square().sum().backward(), x)[1], [w.requires_grad_()])
    for survey in (jp.coverage, jp.verify):
        with pytest.raises(jp.UnsupportedProgram, match=says):
            survey(loss, [w])
        survey(torch.enable_grad()(loss), [w])


def test_a_derivative_by_what_does_not_require_grad_says_what_to_do() -> None:
    says = (
        r"differentiates what has no graph, for the perturbed tensors do not require grad \(.*\); expected primals "
        r"that do, as of requires_grad_\(\), or torch.func.grad inside the program."
    )

    def slope(w: Tensor) -> Tensor:
        return torch.autograd.grad((w**3).sum(), w, create_graph=True)[0].sum()

    w = randn(3)
    with pytest.raises(jp.UnsupportedProgram, match=says):
        jp.gradient(slope, w)
    torch.testing.assert_close(jp.gradient(slope, w.clone().requires_grad_()), 6 * w)
    with pytest.raises(RuntimeError, match=r"^element 0 of tensors does not require grad"):  # the program's own affair
        jp.gradient(lambda w: slope(torch.ones(3)) * w.sum(), w)


def _dual(w: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(_bent(forward_ad.make_dual(w * 1, torch.ones_like(w)))).tangent


def _bent(w: Tensor) -> Tensor:
    return F.softmax(w, -1) * (w @ w.T).sin()


FUNCTIONAL = {
    "vjp": lambda w: torch.func.vjp(_bent, w)[1](torch.ones_like(w))[0],
    "jvp": lambda w: torch.func.jvp(_bent, (w,), (torch.ones_like(w),))[1],
    "jacrev": torch.func.jacrev(_bent),
    "jacfwd": torch.func.jacfwd(_bent),
    "hessian": torch.func.hessian(lambda w: _bent(w).sum()),
    "rows": torch.func.vmap(torch.func.hessian(lambda w: _bent(w[None]).sum())),
    "dual numbers": _dual,
}


@pytest.mark.parametrize("requires", [True, False])
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_derivatives_of_torch_func_are_followed_where_autograd_is_off(name: str, requires: bool) -> None:
    def loss(w: Tensor) -> Tensor:  # beside another term: what is not followed would be no error
        return FUNCTIONAL[name](w).square().sum() + w.sin().sum()

    # written out: torch's own double backward of its forward mode is not always right
    w, v = randn(2, 2).requires_grad_(requires), torch.eye(4, dtype=F64).reshape(4, 2, 2)
    with jp.perturb([w], [v]) as jets:
        result = loss(w)
    slope, curvature = differences(loss, w.detach())
    found = jets.quadratic(result)
    torch.testing.assert_close(found.slope, slope, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.curvature, curvature, rtol=1e-5, atol=1e-5)
    plain = jp.quadratic(loss, w, v)
    torch.testing.assert_close((plain.slope, plain.curvature), (found.slope, found.curvature), rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        assert_close(jp.gradient(loss, w), found.slope.reshape(2, 2))


def differences(loss: Callable[[Tensor], Tensor], w: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and curvature along every entry, by central differences of values."""
    size = 1e-4
    steps = size * torch.eye(w.numel(), dtype=F64).reshape(-1, *w.shape)

    def at(*moves: Tensor) -> Tensor:
        return loss(w + sum(moves)).detach()

    # of fourth order: errors of 1e-12 and 1e-8
    slope = torch.stack([(8 * (at(s) - at(-s)) - at(2 * s) + at(-2 * s)) / (12 * size) for s in steps])
    rows = [[(at(s, r) - at(s, -r) - at(-s, r) + at(-s, -r)) / (4 * size**2) for r in steps] for s in steps]
    return slope, torch.stack([torch.stack(row) for row in rows])


def test_a_derivative_of_torch_func_under_the_programs_own_no_grad_is_a_constant() -> None:
    def loss(w: Tensor) -> Tensor:
        with torch.no_grad():
            slopes = torch.func.jacrev(_bent)(w).square().sum()
        return slopes * w.sum()

    w, v = randn(2, 2).requires_grad_(), randn(1, 2, 2)
    with jp.perturb([w], [v]) as jets:
        result = loss(w)
    expected = v.sum() * torch.func.jacrev(_bent)(w).square().sum().detach()
    assert_close(jets.of(result).tangent, expected.reshape(1))
