"""The functions shaped like torch.func: against torch's reverse mode and closed forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hessian as reverse_hessian
from torch.autograd.functional import hvp as reverse_hvp
from torch.autograd.functional import jacobian as reverse_jacobian

import jetplane as jp
from cases import F64, assert_close, assert_quadratic, randn
from rows_of_functions import A, exact_rows, scalar, vector

PAIRS = ["all", "diagonal", "star", "laplacian", "none"]


def tree(p: dict) -> dict:
    """A function of and to a nested tree."""
    a, (b, c) = p["a"], p["b"]
    return {"u": (a * b).sin(), "v": [a.sum() * c.exp(), (b @ b).sqrt()]}


def primals() -> dict:
    return {"a": randn(3), "b": (randn(3), torch.randn((), dtype=F64))}


def like(tree: object, *lead: int) -> object:
    """Random numbers in the structure of ``tree``, with leading axes."""
    return torch.utils._pytree.tree_map(lambda t: torch.randn((*lead, *t.shape), dtype=t.dtype), tree)


def flat(tree: object) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(tree)


def select(curvature: Tensor, pairs: str) -> Tensor:
    """The second rows of a pair set out of the (K, K, *out) array."""
    k = curvature.shape[0]
    chosen = {
        "all": [(i, j) for i in range(k) for j in range(i, k)],
        "diagonal": [(i, i) for i in range(k)],
        "laplacian": [(i, i) for i in range(k)],
        "star": [(0, j) for j in range(1, k)],
        "none": [],
    }[pairs]
    if not chosen:
        return curvature.new_zeros((0, *curvature.shape[2:]))
    rows = torch.stack([curvature[i, j] for i, j in chosen])
    return rows.sum(0, keepdim=True) if pairs == "laplacian" else rows


# -- each function --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [scalar, vector])
def test_jvp(function) -> None:
    x, v = randn(3), randn(3)
    y, slope, _ = exact_rows(function, x, v[None])
    actual = jp.jvp(function, (x,), (v,))
    assert_close(actual[0], y)
    assert_close(actual[1], slope[0])


@pytest.mark.parametrize("function", [scalar, vector])
def test_hyperdual(function) -> None:
    x, v1, v2, v12 = randn(3), randn(3), randn(3), randn(3)
    y, slope, curvature = exact_rows(function, x, torch.stack([v1, v2, v12]))
    plain, full = jp.hyperdual(function, x, v1, v2), jp.hyperdual(function, x, v1, v2, v12)
    for number in (plain, full):
        assert_close(number.real, y)
        assert_close(number.eps1, slope[0])
        assert_close(number.eps2, slope[1])
    assert_close(plain.eps12, curvature[0, 1])
    assert_close(full.eps12, slope[2] + curvature[0, 1])


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3])
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("function", [scalar, vector])
def test_jet_with_each_pair_set(function, pairs: str, chunk_size: int | None) -> None:
    x, v = randn(3), randn(4, 3)
    y, slope, curvature = exact_rows(function, x, v)
    jet = jp.jet(function, x, v, pairs, chunk_size=chunk_size)
    assert_close(jet.primal, y)
    assert_close(jet.tangent, slope)
    assert_close(jet.second, select(curvature, pairs))


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_quadratic(chunk_size: int | None) -> None:
    x, v = randn(3), randn(3, 3)
    y, slope, curvature = exact_rows(scalar, x, v)
    assert_quadratic(jp.quadratic(scalar, x, v, chunk_size=chunk_size), jp.Quadratic(y, slope, curvature))


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("function", [scalar, vector])
def test_gradient_hvp_hessian(function, chunk_size: int | None) -> None:
    x, v = randn(3), randn(3)
    _, gradient, hessian = exact_rows(function, x, torch.eye(3, dtype=F64))
    hessian = hessian.movedim((0, 1), (-2, -1))
    assert_close(jp.gradient(function, x, chunk_size=chunk_size), gradient.movedim(0, -1))
    assert_close(jp.hvp(function, x, v, chunk_size=chunk_size), hessian @ v)
    assert_close(jp.hessian(function, x, chunk_size=chunk_size), hessian)
    assert_close(jp.laplacian(function, x, chunk_size=chunk_size), hessian.diagonal(dim1=-2, dim2=-1).sum(-1))


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_laplacian_of_samples(chunk_size: int | None) -> None:
    x = randn(5, 3)
    each = torch.stack([reverse_hessian(scalar, row).trace() for row in x])
    u = lambda x: ((x @ A.T).tanh() * x.exp()).sum(-1) ** 2  # noqa: E731
    assert_close(jp.laplacian(u, x, batch_ndim=1, chunk_size=chunk_size), each)
    assert_close(jp.laplacian(lambda x: u(x).sum(), x, chunk_size=chunk_size), each.sum())


def _potential(a: Tensor, b: Tensor) -> Tensor:
    """Of samples: a (*batch), b (*batch, 2, 3)."""
    return (b.square().sum((-2, -1)) + a).sin() * b[..., 0, 1] + a.exp() * b[..., 1, 2] ** 3


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_derivatives_of_samples_are_those_of_each(batch: tuple[int, ...], chunk_size: int | None) -> None:
    primals, v = ((torch.randn(batch, dtype=F64), randn(*batch, 2, 3)) for _ in range(2))
    options = {"batch_ndim": len(batch), "chunk_size": chunk_size}
    slopes = jp.gradient(_potential, primals, **options)
    products = jp.hvp(_potential, primals, v, **options)
    blocks = jp.hessian(_potential, primals, **options)
    trace = jp.laplacian(_potential, primals, **options)
    for place in itertools.product(*map(range, batch)):
        each, along = (tuple(part[place] for part in parts) for parts in (primals, v))
        expected = reverse_hessian(_potential, each)
        for row in range(2):
            assert_close(slopes[row][place], reverse_jacobian(_potential, each)[row])
            assert_close(products[row][place], reverse_hvp(_potential, each, along)[1][row])
            for column in range(2):
                assert_close(blocks[row][column][place], expected[row][column])
        assert_close(trace[place], expected[0][0] + expected[1][1].reshape(6, 6).trace())


def test_samples_that_are_summed_are_refused() -> None:
    x = randn(4, 2)
    for transform in (jp.gradient, jp.hessian, jp.laplacian, lambda f, x, **options: jp.hvp(f, x, x, **options)):
        with pytest.raises(
            ValueError, match=r"func returned shape \(\); expected one result for each .*\(4,\) in front"
        ):
            transform(lambda x: x.square().sum(), x, batch_ndim=1)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_laplacian_along_directions(chunk_size: int | None) -> None:
    x, v = randn(3), randn(5, 3)
    expected = (v @ reverse_hessian(scalar, x) @ v.T).trace()
    assert_close(jp.laplacian(scalar, x, directions=v, chunk_size=chunk_size), expected)


@pytest.mark.parametrize("widths", [(50, 40), (10, 10, 10)])
def test_trace_of_the_projected_hessian_is_the_laplacian(widths: tuple[int, ...]) -> None:
    layers, size = [], 5
    for width in widths:
        layers += [nn.Linear(size, width), nn.Tanh()]
        size = width
    net = nn.Sequential(*layers, nn.Linear(size, 1)).double()
    x = randn(5)
    u = lambda x: net(x).sum()  # noqa: E731
    assert_close(jp.laplacian(u, x), jp.quadratic(u, x, torch.eye(5, dtype=F64)).curvature.trace())


# -- structures -----------------------------------------------------------------------------------------------------


def test_trees_in_and_out() -> None:
    p = primals()
    v = like(p)
    leaves, structure = torch.utils._pytree.tree_flatten(p)

    def at(step: Tensor) -> Tensor:
        moved = [leaf + step * d for leaf, d in zip(leaves, flat(v), strict=True)]
        return torch.cat([o.reshape(-1) for o in flat(tree(torch.utils._pytree.tree_unflatten(moved, structure)))])

    y, slope, curvature = exact_rows(lambda s: at(s[0]), torch.zeros(1, dtype=F64), torch.ones(1, 1, dtype=F64))
    out, tangent = jp.jvp(tree, p, v)
    number = jp.hyperdual(tree, p, v, v)
    join = lambda t: torch.cat([o.reshape(-1) for o in flat(t)])  # noqa: E731
    assert_close(join(out), y)
    assert_close(join(tangent), slope[0])
    assert_close(join(number.eps12), curvature[0, 0])
    assert set(out) == {"u", "v"} and out["v"][0].shape == ()


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_gradient_and_hessian_have_the_primals_structure(chunk_size: int | None) -> None:
    p = primals()
    f = lambda p: tree(p)["u"].sum() * tree(p)["v"][0]  # noqa: E731
    gradient = jp.gradient(f, p, chunk_size=chunk_size)
    hessian = jp.hessian(f, p, chunk_size=chunk_size)
    product = jp.hvp(f, p, p, chunk_size=chunk_size)
    leaves, structure = torch.utils._pytree.tree_flatten(p)
    function = lambda *z: f(torch.utils._pytree.tree_unflatten(list(z), structure))  # noqa: E731
    for actual, expected in zip(flat(gradient), reverse_jacobian(function, tuple(leaves)), strict=True):
        assert_close(actual, expected)
    blocks = reverse_hessian(function, tuple(leaves))
    for actual, expected in zip(flat(hessian), [b for row in blocks for b in row], strict=True):
        assert_close(actual, expected)
    assert set(gradient) == {"a", "b"} and hessian["b"][1]["a"].shape == (3,) and hessian["a"]["b"][0].shape == (3, 3)
    for row, actual in zip(blocks, flat(product), strict=True):
        expected = sum(
            (b.flatten(b.ndim - z.ndim) @ z.reshape(-1)) if z.ndim else b * z for b, z in zip(row, leaves, strict=True)
        )
        assert_close(actual, expected)


def test_directions_by_name_may_be_in_another_order() -> None:
    product, primals = lambda p: (p["a"] * p["b"].exp()).sum(), {"a": randn(2), "b": randn(2)}
    v = {name: randn(2) for name in primals}
    there, back = (jp.hvp(product, primals, {name: v[name] for name in names}) for names in ("ab", "ba"))
    assert list(there) == list(back) == ["a", "b"]
    assert all(torch.equal(there[name], back[name]) for name in "ab")
    assert_close(there["a"], primals["b"].exp() * v["b"])


def test_a_bare_primal_and_a_tuple_of_one() -> None:
    x = randn(3)
    assert jp.gradient(scalar, x).shape == (3,)
    (gradient,) = jp.gradient(scalar, (x,))
    assert_close(gradient, jp.gradient(scalar, x))
    ((hessian,),) = jp.hessian(scalar, (x,))
    assert_close(hessian, jp.hessian(scalar, x))
    assert_close(jp.quadratic(lambda a, b: (a * b).sum(), (x, x), (A, A)).curvature, 2 * A @ A.T)
    number = jp.hyperdual(lambda a, b: a @ b, (x, 2 * x), (A[0], A[1]), (A[1], A[2]))
    assert_close(number.eps12, A[0] @ A[2] + A[1] @ A[1])


def test_scalar_primals() -> None:
    x = torch.tensor(2.0, dtype=F64)
    one = torch.ones_like(x)
    cube = lambda x: x**3  # noqa: E731
    assert [float(t) for t in jp.jvp(cube, x, one)] == [8.0, 12.0]
    assert [float(t) for t in jp.hyperdual(cube, x, one, one, one)] == [8.0, 12.0, 12.0, 24.0]
    for value, expected in (
        (jp.gradient(cube, x), 12),
        (jp.hvp(cube, x, one), 12),
        (jp.hessian(cube, x), 12),
        (jp.laplacian(cube, x), 12),
    ):
        assert value.shape == () and float(value) == expected
    assert jp.jet(cube, x, torch.ones(2, dtype=F64)).second.shape == (3,)
    pair = jp.hessian(lambda x, y: x * y * y, (x, x))
    assert float(pair[0][1]) == 4.0 and float(pair[1][1]) == 4.0 and pair[0][0].shape == ()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (1,), (2, 1, 2)])
def test_unusual_shapes(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    f = lambda x: (x.sin() * x.sum()).sum()  # noqa: E731
    hessian = jp.hessian(f, x)
    assert hessian.shape == shape + shape and jp.gradient(f, x).shape == shape
    assert float(jp.laplacian(f, x)) == pytest.approx(float(hessian.view(x.numel(), x.numel()).trace()))
    if x.numel():  # torch's own hessian cannot
        assert_close(hessian, reverse_hessian(f, x))


def test_auxiliary_output() -> None:
    x, v = randn(3), randn(3)
    f = lambda x: (scalar(x), {"norm": x.norm(), "note": "hello"})  # noqa: E731
    for result in (
        jp.jvp(f, x, v, has_aux=True),
        jp.hyperdual(f, x, v, v, has_aux=True),
        jp.jet(f, x, v[None], has_aux=True),
        jp.quadratic(f, x, v[None], has_aux=True),
        jp.gradient(f, x, has_aux=True, chunk_size=2),
        jp.hvp(f, x, v, has_aux=True),
        jp.hessian(f, x, has_aux=True),
        jp.laplacian(f, x, has_aux=True),
    ):
        assert result[-1]["note"] == "hello"
        assert_close(result[-1]["norm"], x.norm())
    assert_close(jp.gradient(f, x, has_aux=True)[0], jp.gradient(scalar, x))


def test_outputs_that_do_not_vary_have_zero_rows() -> None:
    x = randn(3)
    jet = jp.jet(lambda x: (x * 2, A, torch.arange(3)), x, torch.eye(3, dtype=F64))
    assert not jet.second[0].any() and jet.second[0].shape == (6, 3)
    assert not jet.tangent[1].any() and jet.tangent[1].shape == (3, 3, 3)
    assert not jet.tangent[2].any()


def test_a_primal_that_is_returned_as_it_is() -> None:
    x, v = randn(3), randn(2, 3)
    jet = jp.jet(lambda x: x, x, v)
    assert_close(jet.tangent, v)
    assert not jet.second.any()


def test_captured_tensors_are_constants() -> None:
    x = randn(3)
    assert_close(jp.gradient(lambda y: (y * x).sum(), x), x)
    assert_close(jp.hessian(lambda y: (y * x).sum() ** 2, x), 2 * torch.outer(x, x))
    w = nn.Parameter(randn(3))
    assert_close(jp.gradient(lambda y: (y * w).sum(), w), w)


def test_the_primals_are_not_changed() -> None:
    x = randn(3)
    before = x.clone()
    assert_close(jp.gradient(lambda x: x.mul_(2).sum(), x), torch.full((3,), 2.0, dtype=F64))
    assert torch.equal(x, before)


# -- chunks: as if the program had run once --------------------------------------------------------------------------


def test_random_ops_draw_once_for_all_rows() -> None:
    x = randn(4)
    torch.manual_seed(3)
    noise = torch.rand_like(x)
    torch.manual_seed(3)
    assert_close(jp.gradient(lambda x: (x * torch.rand_like(x)).sum(), x, chunk_size=1), noise)


# -- quadratics add up -----------------------------------------------------------------------------------------------


def test_micro_batches_add_up() -> None:
    w, data, v = randn(3, 2), randn(8, 2), randn(2, 3, 2)
    loss = lambda part: lambda w: (part @ w.T).tanh().square().sum()  # noqa: E731
    whole = jp.quadratic(loss(data), w, v)
    parts = [jp.quadratic(loss(part), w, v) for part in data.split(3)]
    assert_quadratic(sum(parts), whole)
    assert_quadratic(parts[0] + parts[1] + parts[2], whole)
    assert_quadratic((0.5 * whole + whole / 2), whole)
    assert whole.k == 2


# -- lazy directions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seeded:
    """Directions as a function of (seed, position, row), made whenever they are asked for."""

    k: int
    seed: int = 0

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
        made = []
        for row in range(start, stop):
            generator = torch.Generator().manual_seed(hash((self.seed, position, row)) % 2**31)
            made.append(torch.randn(like.shape, dtype=like.dtype, generator=generator))
        return torch.stack(made)


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_lazy_directions_equal_their_tensors(chunk_size: int | None) -> None:
    lazy = Seeded(3)
    assert isinstance(lazy, jp.Directions)
    x, w = randn(3), randn(2, 3)
    f = lambda x, w: (w @ x.tanh()).square().sum()  # noqa: E731
    v = (lazy.rows(0, x, 0, 3), lazy.rows(1, w, 0, 3))
    assert_quadratic(jp.quadratic(f, (x, w), lazy, chunk_size=chunk_size), jp.quadratic(f, (x, w), v))
    assert_close(jp.laplacian(f, (x, w), directions=lazy, chunk_size=chunk_size), jp.laplacian(f, (x, w), directions=v))
    with jp.perturb([x, w], lazy) as jets:
        loss = f(x, w)
    assert_quadratic(jets.quadratic(loss), jp.quadratic(f, (x, w), v))


# -- backprop through jets ------------------------------------------------------------------------------------------


def net_and_points() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1)).double()
    return net, randn(5, 2)


def laplacian_by_reverse(net: nn.Module, x: Tensor) -> Tensor:
    x = x if x.requires_grad else x.clone().requires_grad_()
    (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return sum(torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1]))


def assert_same_gradients(actual: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    assert_close(actual, expected)
    ours = torch.autograd.grad(actual, leaves, allow_unused=True, retain_graph=True)
    theirs = torch.autograd.grad(expected, leaves, allow_unused=True, retain_graph=True)
    assert any(t is not None and t.abs().max() > 1e-6 for t in theirs)
    for a, b, leaf in zip(ours, theirs, leaves, strict=True):
        assert_close(torch.zeros_like(leaf) if a is None else a, torch.zeros_like(leaf) if b is None else b)


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_backprop_through_the_laplacian(chunk_size: int | None) -> None:
    net, x = net_and_points()
    actual = jp.laplacian(lambda x: net(x)[:, 0], x, batch_ndim=1, chunk_size=chunk_size).square().mean()
    assert_same_gradients(actual, laplacian_by_reverse(net, x).square().mean(), list(net.parameters()))


def test_backprop_through_the_laplacian_to_the_points() -> None:
    net, x = net_and_points()
    x.requires_grad_()
    actual = jp.laplacian(lambda x: net(x)[:, 0], x, batch_ndim=1).square().mean()
    assert_same_gradients(actual, laplacian_by_reverse(net, x).square().mean(), [x, *net.parameters()])


def test_backward_fills_the_gradients_of_parameters() -> None:
    net, x = net_and_points()
    jp.laplacian(lambda x: net(x)[:, 0], x, batch_ndim=1).mean().backward()
    assert net[0].weight.grad is not None and net[0].weight.grad.abs().max() > 1e-6
    assert torch._C._len_torch_dispatch_stack() == 0


def test_backprop_through_jvp() -> None:
    net, x = net_and_points()
    v = randn(5, 2).requires_grad_()
    actual = jp.jvp(net, x, v)[1].square().sum()
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(net(leaf).sum(), leaf, create_graph=True)
    assert_same_gradients(actual, (g * v).sum(1).square().sum(), [v, *net.parameters()])


def test_backprop_through_hessian_and_quadratic() -> None:
    w = randn(3).requires_grad_()
    x, v = randn(3), randn(2, 3)
    f = lambda x: ((A @ x).tanh() * (w * x).exp()).sum()  # noqa: E731
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    exact = torch.stack([torch.autograd.grad(g[i], leaf, create_graph=True)[0] for i in range(3)])
    assert_same_gradients(jp.hessian(f, x).square().sum(), exact.square().sum(), [w])
    q = jp.quadratic(f, x, v)
    assert_same_gradients(
        q.curvature.square().sum() + q.slope.sum() + q.loss,
        (v @ exact @ v.T).square().sum() + (v @ g).sum() + f(leaf),
        [w],
    )


LABELS = torch.arange(5) % 3


def into_a_buffer(h: Tensor) -> Tensor:
    b = torch.zeros(5, 4, dtype=F64)
    b[1:] = h[1:].tanh()
    return b.square()


# what the program does with h = linear(x): the rows must carry autograd's graph through all of it
BACKPROP = [
    ("tanh", lambda h: h.tanh().square()),
    ("product", lambda h: h.sin() * h.exp()),
    ("power", lambda h: h.abs() ** h),
    ("view", lambda h: h.tanh()[:, 0].square()),
    ("transposed", lambda h: h.t()[1:].exp().prod(0)),
    ("index", lambda h: h[LABELS].sin()),
    ("gather", lambda h: h.gather(1, LABELS[:, None]).sin()),
    ("cat", lambda h: torch.cat([h, h.sin()], 1).square()),
    ("buffer", into_a_buffer),
    ("in-place", lambda h: h.sin().mul_(2).square()),
    ("in-place-product", lambda h: (h * 1).mul_(h.exp()).cos()),
    ("cumprod", lambda h: h.cumprod(1).sin()),
    ("max", lambda h: h.max(1).values.sin()),
    ("sort", lambda h: (h.sort(1).values * torch.arange(4)).sin()),
    ("norm", lambda h: h.norm(dim=1).sin()),
    ("std", lambda h: h.std(1).sin()),
    ("var_mean", lambda h: torch.stack(torch.var_mean(h, 1)).sin()),
    ("logsumexp", lambda h: h.logsumexp(1).square()),
    ("softmax", lambda h: h.softmax(-1)[:, 0].square()),
    ("cross-entropy", lambda h: F.cross_entropy(h, LABELS)),
    ("bce-logits", lambda h: F.binary_cross_entropy_with_logits(h, torch.ones_like(h))),
    ("mse", lambda h: F.mse_loss(h.sin(), h.exp())),
    ("batch_norm", lambda h: F.batch_norm(h, None, None, training=True).tanh()),
    ("layer_norm", lambda h: F.layer_norm(h, (4,)).tanh()),
    ("group_norm", lambda h: F.group_norm(h.T[None], 2).tanh()),
    ("instance_norm", lambda h: F.instance_norm(h[None]).tanh()),
    ("rms_norm", lambda h: F.rms_norm(h, (4,)).tanh()),
    ("attention", lambda h: F.scaled_dot_product_attention(h[None], h[None].sin(), h[None]).square()),
    ("conv", lambda h: F.conv1d(h[None], torch.ones(2, 5, 2, dtype=F64)).tanh()),
    ("max-pool", lambda h: F.max_pool1d(h[None], 2).tanh()),
    ("avg-pool", lambda h: F.avg_pool1d(h[None], 2).tanh()),
    ("upsample", lambda h: F.interpolate(h[None], scale_factor=2, mode="linear").sin()),
    ("det", lambda h: torch.det(h.T @ h + torch.eye(4, dtype=F64))),
    ("inverse", lambda h: torch.linalg.inv(h.T @ h + torch.eye(4, dtype=F64)).sin()),
    ("cholesky", lambda h: torch.linalg.cholesky(h.T @ h + torch.eye(4, dtype=F64)).sin()),
    ("eigvalsh", lambda h: torch.linalg.eigvalsh(h.T @ h + torch.diag(torch.arange(4.0, dtype=F64))).sin()),
    ("detach", lambda h: (h * h.detach()).sin()),
]


def normalised(h: Tensor, dim: int) -> Tensor:
    return (h - h.mean(dim, keepdim=True)) * (h.var(dim, unbiased=False, keepdim=True) + 1e-5).rsqrt()


# torch 2.13's own triple backward of these is wrong, for it takes the saved mean and deviation for constants
NORMS = {
    "batch_norm": lambda h: normalised(h, 0).tanh(),
    "layer_norm": lambda h: normalised(h, 1).tanh(),
    "instance_norm": lambda h: normalised(h, 1).tanh(),
}


def check_backprop(f, x: Tensor, leaves: list[Tensor], twin=None) -> None:
    """The gradient of v^T H v by ``leaves``, against triple backward of f, or of ``twin``."""
    v = torch.randn(1, *x.shape, dtype=F64)
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad((twin or f)(leaf), leaf, create_graph=True)
    (h,) = torch.autograd.grad((g * v[0]).sum(), leaf, create_graph=True)
    assert_same_gradients(jp.quadratic(f, x, v).curvature.sum(), (h * v[0]).sum(), leaves)


@pytest.mark.parametrize(("name", "program"), BACKPROP, ids=[row[0] for row in BACKPROP])
def test_backprop_reaches_parameters_through(name: str, program) -> None:
    linear = nn.Linear(2, 4).double()
    with torch.no_grad():
        linear.weight.mul_(2)
    twin = NORMS.get(name, program)
    check_backprop(
        lambda x: program(linear(x)).sum(), randn(5, 2), list(linear.parameters()), lambda x: twin(linear(x)).sum()
    )


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_backprop_through_recurrent_layers(kind) -> None:
    net = kind(2, 3).double()
    check_backprop(lambda x: net(x)[0].square().sum(), randn(4, 1, 2), list(net.parameters()))


def test_backprop_through_a_net_with_batch_norm_and_labels() -> None:
    first, norm, last = nn.Linear(2, 4).double(), nn.BatchNorm1d(4).double(), nn.Linear(4, 3).double()
    leaves = [p for layer in (first, norm, last) for p in layer.parameters()]
    check_backprop(
        lambda x: F.cross_entropy(last(norm(first(x)).tanh()), LABELS),
        randn(5, 2),
        leaves,
        lambda x: F.cross_entropy(last((normalised(first(x), 0) * norm.weight + norm.bias).tanh()), LABELS),
    )


def test_backprop_through_rows_that_change_their_dtype() -> None:
    x = torch.tensor([1.0, 2.0])
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)  # 0-dim: the product stays float32
    curvature = jp.laplacian(lambda x: ((x * scale) ** 3).sum(), x)
    assert curvature.dtype == torch.float32
    (slope,) = torch.autograd.grad(curvature, scale)
    assert float(slope) == pytest.approx(18 * 3.0**2 * 3.0, rel=1e-6)  # d/ds of 6 s^3 (x0 + x1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.log_softmax(1) * x.detach().cos()).sum(),
        lambda x: (x.softmax(0) * x.detach().cos()).sum(),
        lambda x: x.logsumexp(2).sin().sum(),
        lambda x: x.logsumexp((0, 2)).sin().sum(),
    ],
    ids=["log_softmax", "softmax", "logsumexp", "logsumexp over two axes"],
)
@pytest.mark.parametrize("k", [7, 9])  # fewer and more than what a batched product is made of
def test_softmax_along_many_directions(function: Callable[[Tensor], Tensor], k: int) -> None:
    x, directions = randn(2, 4, 3), randn(k, 2, 4, 3)
    plane = jp.quadratic(function, x, directions)
    hessian = reverse_hessian(function, x).reshape(24, 24)
    rows = directions.reshape(k, 24)
    torch.testing.assert_close(plane.curvature, rows @ hessian @ rows.T)
