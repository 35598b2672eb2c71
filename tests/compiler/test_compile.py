"""Compiled transforms."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import jetplane as jp
from compilation import F64, Captures, assert_close, batches, built, either, fallen_back, flat, leaf, mlp
from jetplane.testing.oracle import double_backward

pytestmark = pytest.mark.usefixtures("nothing_shared")


@pytest.mark.usefixtures("traced")
def test_a_compiled_quadratic_is_the_eager_one(captures: Captures) -> None:
    fast, model = jp.compile(jp.quadratic), built(mlp)
    x, y = batches("mlp")
    values = {name: p.detach() for name, p in model.named_parameters()}
    for one, target in zip(x, y, strict=True):  # primals, directions and what the function captures are inputs

        def loss(values: dict[str, Tensor], one: Tensor = one, target: Tensor = target) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, values, (one,)), target)

        values = {name: p + 0.1 for name, p in values.items()}
        directions = {name: torch.randn(3, *p.shape, dtype=F64) for name, p in values.items()}
        before = copy.deepcopy(model.state_dict())
        expected = jp.quadratic(loss, values, directions)
        once = copy.deepcopy(model.state_dict())
        model.load_state_dict(before)
        assert_close(flat(fast(loss, values, directions)), flat(expected))
        assert_close(model.state_dict(), once)  # the statistics were written
    assert captures.count == 1
    wider = {name: torch.cat([rows, rows]) for name, rows in directions.items()}
    assert fast(loss, values, wider).slope.shape == (6,)
    assert captures.count == 2
    model.eval()
    assert_close(flat(fast(loss, values, directions)), flat(jp.quadratic(loss, values, directions)))
    assert captures.count == 3


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("pairs", ["all", "diagonal", "star", "laplacian", "none", jp.PairSet(3, ((0, 2),))], ids=str)
def test_a_compiled_jet_is_the_eager_one(pairs: Any) -> None:
    a, b, c = (torch.randn(2, 3, dtype=F64) for _ in range(3))
    directions = tuple(torch.randn(3, 2, 3, dtype=F64) for _ in range(2))

    def func(x: Tensor, y: Tensor) -> Any:
        both = (x * y).sin() * c
        return {"both": both, "more": [both @ both.T, x, (torch.ones(2), both > 0)]}, both.sum()

    expected = jp.jet(func, (a, b), directions, pairs)
    found = jp.compile(jp.jet)(func, (a, b), directions, pairs)
    for part in ("primal", "tangent", "second"):
        assert_close(getattr(found, part), getattr(expected, part))


V1, V2, V12 = (torch.randn(2, 3, dtype=F64, generator=torch.Generator().manual_seed(n)) for n in range(3))
TRANSFORMS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "jvp": (jp.jvp, (V1,), {}),
    "hyperdual": (jp.hyperdual, (V1, V2), {}),
    "hyperdual, curved": (jp.hyperdual, (V1, V2, V12), {}),
    "gradient": (jp.gradient, (), {}),
    "gradient of samples": (jp.gradient, (), {"batch_ndim": 1}),
    "hvp": (jp.hvp, (V1,), {}),
    "hessian": (jp.hessian, (), {}),
    "hessian of samples": (jp.hessian, (), {"batch_ndim": 1}),
    "laplacian of samples": (jp.laplacian, (), {"batch_ndim": 1}),
    "laplacian along directions": (jp.laplacian, (), {"directions": torch.stack([V1, V2])}),
}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_is_the_eager_one(name: str, captures: Captures) -> None:
    transform, args, options = TRANSFORMS[name]
    fast, a = jp.compile(transform), torch.randn(4, 3, dtype=F64)

    def func(x: Tensor) -> Any:
        return {"u": (x @ a.T).tanh().prod(-1), "v": [x.exp().sum(-1)]}, x.sin()

    for x in torch.randn(2, 2, 3, dtype=F64):
        *found, aux = fast(func, x, *args, has_aux=True, **options)
        *expected, _ = transform(func, x, *args, has_aux=True, **options)
        assert_close(found, expected)
        assert_close(aux, x.sin())
    assert captures.count == 1


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("transform", [jp.gradient, jp.hessian], ids=["gradient", "hessian"])
def test_several_primals_of_compiled_transforms(transform: Any) -> None:
    x, y = torch.randn(2, 4, 3, dtype=F64)
    primals = ({"x": x}, y[:, 0])
    func = lambda named, y: named["x"].sin().sum(-1) * y.exp()  # noqa: E731
    for batch_ndim in (0, 1):
        assert_close(
            jp.compile(transform)(func, primals, batch_ndim=batch_ndim), transform(func, primals, batch_ndim=batch_ndim)
        )


@pytest.mark.usefixtures("traced")
def test_samples_and_one_long_sample_of_the_same_shape_are_told_apart() -> None:
    fast, x = jp.compile(jp.gradient), torch.randn(1, 3, dtype=F64)
    func = lambda x: x.square().sum(-1)  # noqa: E731
    assert fast(func, x).shape == (1, 1, 3) and fast(func, x, batch_ndim=1).shape == (1, 3)
    with pytest.raises(ValueError, match=r"batch_ndim is 1 and func returned shape \(\); expected one result"):
        fast(torch.sum, x, batch_ndim=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hessian of samples", "laplacian of samples", "hvp"])
def test_transforms_through_the_compiler(name: str) -> None:
    transform, args, options = TRANSFORMS[name]
    net = (
        torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        .double()
        .requires_grad_(False)
    )
    x = torch.randn(2, 3, dtype=F64)
    u = lambda x: net(x).squeeze(-1)  # noqa: E731
    assert_close(jp.compile(transform)(u, x, *args, **options), transform(u, x, *args, **options))


@pytest.mark.usefixtures("traced")
def test_aux_lazy_directions_and_primals_that_are_captured_too() -> None:
    x = torch.tensor([1.0, 2.0], dtype=F64)

    class Half:
        k = 2

        def rows(self, position: int, like: Tensor, start: int, stop: int) -> Tensor:
            return torch.eye(2, dtype=like.dtype)[start:stop] / 2

    def func(y: Tensor) -> Any:
        y.mul_(2)  # the caller's tensor stays
        return (y**2 * x).sum(), {"x": x, "y": y, "name": "a"}

    for transform in (jp.quadratic, jp.jet):
        expected, aux = transform(func, x, Half(), has_aux=True)
        found, more = jp.compile(transform)(func, x, Half(), has_aux=True)
        assert_close(flat(found), flat(expected))
        assert_close([more["x"], more["y"]], [aux["x"], aux["y"]])
        assert more["name"] == "a"
    assert torch.equal(x, torch.tensor([1.0, 2.0], dtype=F64))


@pytest.mark.usefixtures("traced")
def test_a_program_that_cannot_be_captured_is_run_as_it_is_with_one_warning() -> None:
    x, rows = torch.tensor([1.0, 2.0], dtype=F64), torch.eye(2, dtype=F64)

    def func(x: Tensor) -> Tensor:
        return (x**3).sum() if float(x.sum()) > 0 else x.sum()

    fast = jp.compile(jp.quadratic)
    fallen_back(lambda: fast(func, x, rows), "func cannot be compiled and is run as it is: ")
    for directions in (rows, rows[:1]):  # another signature, but the same word
        assert_close(flat(fast(func, x, directions)), flat(jp.quadratic(func, x, directions)))


@pytest.mark.usefixtures("traced")
def test_what_is_to_be_differentiated_is_not_compiled() -> None:
    x, w = torch.tensor([1.0, 2.0], dtype=F64), leaf(3.0, 4.0)
    rows = torch.eye(2, dtype=F64)
    for func, primal in ((lambda x: (w * x**3).sum(), x), (lambda w: (w**3).sum(), w)):
        w.grad, fast = None, jp.compile(jp.quadratic)

        def differentiated(fast: Any = fast, func: Any = func, primal: Tensor = primal) -> None:
            fast(func, primal, rows).curvature.sum().backward()

        fallen_back(differentiated, "constant to autograd; expected torch")
        assert w.grad is not None
        with torch.no_grad():
            assert_close(fast(func, primal, rows).curvature, jp.quadratic(func, primal, rows).curvature)
            assert not fast(func, primal, rows).curvature.requires_grad


@pytest.mark.usefixtures("traced")
def test_what_a_compiled_transform_refuses() -> None:
    x, rows = torch.ones(2), torch.eye(2)
    fast, jets = jp.compile(jp.quadratic), jp.compile(jp.jet)
    with pytest.raises(ValueError, match=r"verify cannot be compiled; expected one of jetplane.gradient, .*quadratic."):
        jp.compile(jp.verify)
    with pytest.raises(ValueError, match="int cannot be compiled"):
        jp.compile(3)  # type: ignore[arg-type]
    for one in (fast, jets):
        with pytest.raises(ValueError, match="chunk_size is 1, which needs several passes; expected None"):
            one(torch.sum, x, rows, chunk_size=1)
        with pytest.raises(ValueError, match=r"directions for the primal \(2,\) have shape \(2, 3\)"):
            one(torch.sum, x, torch.ones(2, 3))
        with pytest.raises(ValueError, match="the structure of directions is"):
            one(torch.sum, x, (rows, rows))
        with pytest.raises(TypeError, match="directions for the primal are float"):
            one(torch.sum, x, 1.0)
        with pytest.raises(TypeError, match="func is int"):
            one(3, x, rows)
        for _ in range(2):
            with pytest.raises(ValueError, match="hold values that are not finite"):
                one(torch.sum, x, rows / 0)
            one(torch.sum, x, rows)
    with pytest.raises(TypeError, match=r"the program returned float 3.0; expected a tensor"):
        jets(lambda x: (x.sum(), 3.0), x, rows)
    with (
        pytest.warns(UserWarning, match="is run as it is"),
        pytest.raises(ValueError, match=r"the loss has shape \(2,"),
    ):
        fast(lambda x: x * 2, x, rows)


@pytest.mark.usefixtures("traced")
def test_the_number_of_signatures_that_are_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, captures: Captures) -> None:
    monkeypatch.setattr("jetplane.compiler.compile._KEPT", 2)
    fast = jp.compile(jp.jet)
    x = torch.ones(2)
    for k, count in ((1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (2, 4)):
        fast(torch.sin, x, torch.ones(k, 2))
        assert captures.count == count


@pytest.mark.slow
def test_a_plane_through_the_compiler() -> None:
    fast, w = jp.compile(jp.quadratic), torch.randn(4, dtype=F64)

    def func(x: Tensor) -> Tensor:
        return (w * x.tanh()).sum().exp()

    for _ in range(2):
        x, rows = torch.randn(4, dtype=F64), torch.randn(3, 4, dtype=F64)
        assert_close(flat(fast(func, x, rows)), flat(jp.quadratic(func, x, rows)))


@either
def test_a_late_plane_of_many_directions(compiler: bool, request: pytest.FixtureRequest) -> None:
    if not compiler:
        request.getfixturevalue("traced")
    model, x = torch.nn.Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)
    params = {name: value.detach() for name, value in model.named_parameters()}
    directions = {name: torch.randn(9, *value.shape, dtype=torch.float64) for name, value in params.items()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (x,)), torch.arange(5) % 3)

    found = jp.compile(jp.quadratic)(loss, params, directions, curvature="ggn")
    expected = jp.quadratic(loss, params, directions)  # the model is linear
    torch.testing.assert_close(found.curvature, expected.curvature)


# -- where the program switches autograd off ------------------------------------------------------------------------


@torch.no_grad()
def _decorated(x: Tensor) -> Tensor:
    return x * x


def _stops(x: Tensor) -> Tensor:
    with torch.no_grad():
        c, part = x.sin(), x[:1]
        with torch.enable_grad():
            d = x.exp()
    return (_decorated(x) * x + c * d * part).sum()


@either
def test_tangents_stop_where_the_program_switches_autograd_off(compiler: bool, request: pytest.FixtureRequest) -> None:
    if not compiler:
        request.getfixturevalue("traced")
    x, rows = torch.tensor([1.0, 2.0], dtype=F64), torch.tensor([[1.0, 0.5], [-1.0, 2.0]], dtype=F64)
    w = x.clone().requires_grad_()
    expected = double_backward(lambda: _stops(w), [w], [rows])
    for kind in ("exact", "ggn"):
        fast = jp.compile(jp.quadratic)
        loss = lambda x: jp.mark_output(_stops(x))  # noqa: E731
        found = fast(loss, x, rows, curvature=kind)
        assert_close(found.slope, expected.slope)
        assert_close(found.curvature, expected.curvature if kind == "exact" else torch.zeros(2, 2, dtype=F64))
    assert_close(jp.compile(jp.jet)(_stops, x, rows).tangent, expected.slope)
    followed = jp.compile(jp.quadratic)(_stops, x, rows, no_grad="follow")
    assert_close(flat(followed), flat(jp.quadratic(_stops, x, rows, no_grad="follow")))
    assert not torch.allclose(followed.slope, expected.slope)


@pytest.mark.usefixtures("traced")
def test_operations_are_not_put_together_across_a_switch() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 1, 6, 6, dtype=F64), torch.randn(2, 1, 3, 3, dtype=F64)
    rows = torch.randn(2, *weight.shape, dtype=F64)

    def program(weight: Tensor) -> Tensor:
        z = F.conv2d(x, weight)
        with torch.no_grad():
            z = z.relu()
        return (F.max_pool2d(z, 2) * weight.sum()).sum()

    leaf = weight.clone().requires_grad_()
    expected = double_backward(lambda: program(leaf), [leaf], [rows])
    assert_close(flat(jp.compile(jp.quadratic)(program, weight, rows)), flat(expected))
