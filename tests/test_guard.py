"""Inside forward_only every way to a backward pass or a graph raises, what is not one works, and nothing is left behind."""  # noqa: E501

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import jetplane as jp
from jetplane import guard
from jetplane.ad import _torch
from jetplane.curvature import ExactHessian
from jetplane.directions import Orthonormal
from jetplane.optim import FGD, FoMoH, FoMoHBP, FoMoHKD, HyperplaneSearch, Newton
from jetplane.solvers import JitteredInverse

BUILDS = "builds an autograd graph inside jetplane.forward_only"
STARTS = "starts a backward pass inside jetplane.forward_only"


def weight() -> nn.Parameter:
    return nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def everything() -> tuple[Any, ...]:
    """What the guard may change."""
    return (
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.set_anomaly_enabled,
        traceback.format_stack,
        torch.autograd.Variable._execution_engine,
        threading.Thread.__init__,
        list(guard._ACTIVE),
        list(guard._HERE.guards),
        guard._HERE.allowed,
    )


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = everything()
    yield
    assert everything() == before


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


# -- backward passes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("torch.Tensor.backward", lambda w, loss: loss.backward()),
        ("torch.autograd.backward", lambda w, loss: torch.autograd.backward(loss)),
        ("torch.autograd.grad", lambda w, loss: torch.autograd.grad(loss, w)),
        ("torch.autograd.grad", lambda w, loss: torch.autograd.grad(loss, w, is_grads_batched=False)),
        ("torch.autograd.grad", lambda w, loss: torch.autograd.grad(loss, w, torch.ones(2), is_grads_batched=True)),
    ],
)
def test_a_backward_pass_over_a_graph_from_before_raises(name: str, start: Callable[..., Any]) -> None:
    w = weight()
    loss = w.square().sum()
    with jp.forward_only(), pytest.raises(jp.BackwardPass, match=rf"^{name} at .*test_guard.py:\d+ {STARTS}\(\); "):
        start(w, loss)
    assert w.grad is None
    loss.backward()  # as before
    assert w.grad is not None


def test_a_backward_pass_without_a_graph_raises_too() -> None:
    w = weight()
    with jp.forward_only(), pytest.raises(jp.BackwardPass, match=STARTS):
        w.square().sum().backward()


def test_a_checkpointed_graph_is_not_run_backwards() -> None:
    w = weight()
    losses = [checkpoint(lambda w: w.square().sum(), w, use_reentrant=reentrant) for reentrant in (False, True)]
    for loss in losses:
        with jp.forward_only(), pytest.raises(jp.BackwardPass, match=STARTS):
            loss.backward()


def test_a_compiled_graph_is_not_run_backwards() -> None:
    w = weight()
    loss = torch.compile(lambda w: w.square().sum(), backend="aot_eager")(w)
    with jp.forward_only(), pytest.raises(jp.BackwardPass, match=STARTS):
        loss.backward()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.func.vjp(f, x),
        lambda f, x: torch.func.jacrev(f)(x),
        lambda f, x: torch.func.hessian(f)(x),
        lambda f, x: torch.autograd.functional.jacobian(f, x),
        lambda f, x: torch.func.vmap(torch.func.grad(f))(torch.stack([x, x])),
    ],
)
def test_transforms_that_need_backprop_raise(transform: Callable[..., Any]) -> None:
    with jp.forward_only(), pytest.raises(jp.BackwardPass, match=r"`x\.sin\(\)` at .*" + BUILDS):
        transform(lambda x: x.sin().sum(), torch.ones(3))


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        (r"`w \+ 1`", lambda w: w + 1),  # which saves nothing
        (r"`w\.view\(-1\)`", lambda w: w.view(-1)),
        (r"`torch\.zeros\(2, 2\)\.add_\(w\)`", lambda w: torch.zeros(2, 2).add_(w)),
        (r"`F\.softmax\(w, 0\)`|`input\.softmax\(dim\)`", lambda w: F.softmax(w, 0)),
        (r"`w\.clone\(\)`", lambda w: w.clone()),
        (r"`w\[0\]`", lambda w: w[0]),
        (r"torch\.autograd\.Function Double", Double.apply),
        (
            r"`torch\.nn\.functional\.scaled_dot_product_attention\(w\[None\]\.\.\.`|`w\[None\]`",
            lambda w: torch.nn.functional.scaled_dot_product_attention(w[None], w[None], w[None]),
        ),
        (r"`w\.double\(\)`", lambda w: w.double()),
        (
            r"`torch\.stack\( \[ w, torch\.ones\(2, 2\)[^`]{20,}\.\.\.`",  # cut
            lambda w: torch.stack(
                [
                    w,
                    torch.ones(2, 2),
                    torch.ones(2, 2),
                    torch.ones(2, 2),
                ]
            ),
        ),
    ],
)
def test_a_graph_raises_with_the_operation_and_the_line(text: str, operation: Callable[..., Any]) -> None:
    w = weight()
    with jp.forward_only():
        operation(w)  # autograd is off
        with torch.enable_grad(), pytest.raises(jp.BackwardPass, match=rf"^({text}) at .*test_guard.py:\d+ {BUILDS}"):
            operation(w)


def test_every_way_to_turn_autograd_on_is_seen() -> None:
    w = weight()
    with jp.forward_only():
        for on in (torch.enable_grad(), torch.set_grad_enabled(True), torch.inference_mode(False)):
            with on, pytest.raises(jp.BackwardPass, match=BUILDS):
                w + 1
        torch.set_grad_enabled(True)
        with pytest.raises(jp.BackwardPass, match=BUILDS):
            w + 1
        torch.set_grad_enabled(False)


def test_a_module_is_named() -> None:
    model = net()
    with jp.forward_only(), torch.enable_grad():
        found = r"`F\.linear\(input, self\.weight, self\.bias\)` in module 0 \(Linear\) at .*test_guard"
        with pytest.raises(jp.BackwardPass, match=found):
            model(torch.ones(1, 2))


def test_a_hook_of_a_module_is_guarded() -> None:
    model = net()

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        with torch.enable_grad():
            (model[0].weight * 2).sum()

    with model[1].register_forward_hook(hook), jp.forward_only():
        with pytest.raises(jp.BackwardPass, match=r"`model\[0\]\.weight \* 2`"):
            model(torch.ones(1, 2))
        with pytest.raises(jp.BackwardPass, match=r"`model\[0\]\.weight \* 2`"):
            FGD(model.parameters()).step(lambda: model(torch.ones(1, 2)).sum())


def test_source_that_is_not_there_is_no_hindrance() -> None:
    code = compile("w + 1", "<nowhere>", "eval")
    with jp.forward_only(), torch.enable_grad(), pytest.raises(jp.BackwardPass, match=f"^an operation at .*{BUILDS}"):
        eval(code, {"w": weight()})


def test_a_compiled_function_that_builds_a_graph_raises() -> None:
    w = weight()

    def inner(w: Tensor) -> Tensor:
        with torch.enable_grad():
            return (w * 2).sin()

    outside = torch.compile(lambda w: (w * 2).sin(), backend="aot_eager")
    inside = torch.compile(inner, backend="aot_eager")
    assert outside(w).requires_grad
    with jp.forward_only():
        assert not outside(w).requires_grad
        with torch.enable_grad(), pytest.raises(jp.BackwardPass, match=f"CompiledFunction at .*{BUILDS}"):
            outside(w)
        with pytest.raises(jp.BackwardPass, match=f"CompiledFunction at .*{BUILDS}"):
            inside(w)
    assert outside(w).requires_grad and inside(w).requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_torchscript_hides_the_reason_until_the_guard_ends() -> None:
    scripted = torch.jit.script(_twice)
    text = rf"`scripted\(weight\(\)\)` at .*{BUILDS}"
    with pytest.raises(jp.BackwardPass, match=text), jp.forward_only(), torch.enable_grad():
        scripted(weight())
    with jp.forward_only(), torch.enable_grad(), pytest.raises(RuntimeError, match="return w \\* 2"):
        scripted(weight())


def _twice(w: Tensor) -> Tensor:
    return w * 2


def test_anomaly_mode_cannot_turn_it_off() -> None:
    w = weight()
    with jp.forward_only(), torch.enable_grad():
        with torch.autograd.set_detect_anomaly(False), pytest.raises(jp.BackwardPass, match=BUILDS):
            w + 1
        with pytest.raises(jp.BackwardPass, match=BUILDS):
            w + 1


# -- what is allowed ---------------------------------------------------------------------------------------------------


def test_what_is_no_graph_is_allowed() -> None:
    with jp.forward_only(), torch.enable_grad():
        x = torch.ones(3)
        assert not (x + 1).requires_grad and not Double.apply(x).requires_grad  # nothing requires grad
        w = nn.Parameter(x)
        w.grad = torch.ones(3)
        assert w.requires_grad and w.is_leaf
        with torch.no_grad():
            assert not Double.apply(w).requires_grad
            assert not checkpoint(torch.sin, w, use_reentrant=True).requires_grad
        copy.deepcopy(net()).load_state_dict(net().state_dict())


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "LBFGS"])
def test_optimizers_of_torch_take_steps(name: str) -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> float:  # torch calls it with autograd on
        with torch.no_grad():
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.5)
        return 1.0

    with jp.forward_only():
        getattr(torch.optim, name)(model.parameters(), lr=0.1).step(closure)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_forward_mode_is_allowed() -> None:
    x = torch.linspace(0, 1, 3)
    with jp.forward_only():
        value, tangent = torch.func.jvp(torch.sin, (x,), (torch.ones(3),))
        assert torch.equal(value, x.sin()) and torch.allclose(tangent, x.cos())
        assert torch.allclose(torch.func.jacfwd(torch.sin)(x), x.cos().diag())
        assert torch.allclose(jp.hessian(lambda x: x.sin().sum(), x), (-x.sin()).diag())
        w = weight()
        with jp.perturb([w], [torch.ones(1, 2, 2)]) as jets:
            loss = w.square().sum()
        assert float(jets.quadratic(loss).curvature) == 8.0


def test_local_derivatives_are_allowed_where_they_are_said_to_be() -> None:
    w = weight()
    with jp.forward_only(), torch.enable_grad():
        with guard.local():
            (grad,) = torch.autograd.grad(w.square().sum(), w)
            with guard.local():
                w + 1
            w + 1
        assert torch.equal(grad, 2 * w.detach())
        with pytest.raises(jp.BackwardPass, match=BUILDS):
            w + 1
        with contextlib.suppress(ZeroDivisionError), guard.local():
            _ = 1 / 0
        with pytest.raises(jp.BackwardPass, match=BUILDS):
            w + 1
    with guard.local():
        (w + 1).sum().backward()  # there is no guard


def test_local_is_of_its_thread() -> None:
    w, found = weight(), []

    def other() -> None:
        found.append(_raised(lambda: w + 1))

    with jp.forward_only(), guard.local():
        _in_a_thread(other)
    assert found == [True]


# -- jetplane's optimizers ---------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., HyperplaneSearch]] = {
    "FGD": lambda params, **options: FGD(params, lr=1e-3, k=2, **options),
    "FoMoH": lambda params, **options: FoMoH(params, lr=0.1, **options),
    "FoMoHKD": lambda params, **options: FoMoHKD(params, lr=0.1, k=2, **options),
    "Newton": lambda params, **options: Newton(params, lr=0.1, **options),
    "HyperplaneSearch": lambda params, **options: HyperplaneSearch(
        params, 0.1, Orthonormal(3), ExactHessian(), JitteredInverse(), **options
    ),
}
X, Y = torch.linspace(-1, 1, 8).reshape(4, 2), torch.linspace(0, 1, 4).reshape(4, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"samples": 2, "chunk_size": 5}])
def test_forward_only_optimizers_work(name: str, options: dict[str, Any]) -> None:
    ends = []
    for guarded in (contextlib.nullcontext(), jp.forward_only()):
        torch.manual_seed(0)
        model = net()
        opt = OPTIMIZERS[name](model.parameters(), **options)
        with guarded:
            losses = [float(opt.step(lambda: F.mse_loss(model(X), Y))) for _ in range(3)]  # noqa: B023
        ends.append((losses, [p.detach().clone() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_forward_only_optimizers_work_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_the_compiler(monkeypatch)
    _compiled_as_eagerly(name)


@pytest.mark.slow
def test_forward_only_optimizers_work_with_the_real_compiler() -> None:
    _compiled_as_eagerly("FoMoHKD")


def _compiled_as_eagerly(name: str) -> None:
    torch.manual_seed(0)
    eager, compiled = (nn.Linear(2, 1) if name == "Newton" else net() for _ in range(2))  # whose Hessian is singular
    compiled.load_state_dict(eager.state_dict())
    ends = []
    for model, compile in ((eager, False), (compiled, True)):
        opt = OPTIMIZERS[name](model.parameters(), compile=compile)
        with jp.forward_only():
            for _ in range(2):
                opt.step(lambda x, y: F.mse_loss(model(x), y), X, Y)  # noqa: B023
        ends.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("compile", [False, True])
def test_a_step_along_the_gradient_raises(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_the_compiler(monkeypatch)
    model = net()
    with jp.forward_only(), pytest.raises(jp.BackwardPass, match=BUILDS if not compile else f"{BUILDS}|{STARTS}"):
        FoMoHBP(model.parameters(), compile=compile).step(lambda x, y: F.mse_loss(model(x), y), X, Y)


def test_a_loss_with_a_gradient_inside_raises() -> None:
    w = weight()

    def loss() -> Tensor:
        with torch.enable_grad():
            x = torch.ones(2, requires_grad=True)
            return torch.autograd.grad((w @ x).square().sum(), x)[0].sum()

    with jp.forward_only(), pytest.raises(jp.BackwardPass, match=r"`w @ x`"):
        FoMoH([w]).step(loss)


def _without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be compiled is run as it is."""

    def traced(function: Callable[..., Any], inputs: Any) -> Any:
        with torch.no_grad():
            run = make_fx(lambda *t: function(list(t)), tracing_mode="fake")(*(t.detach() for t in inputs))
        return (lambda tensors: run(*(t.detach() for t in tensors))), set()

    monkeypatch.setattr(_torch, "compiled", traced)


# -- nesting, decorating, threads --------------------------------------------------------------------------------------


def test_guards_nest() -> None:
    w = weight()
    one = jp.forward_only()
    with one:
        with one, pytest.raises(jp.BackwardPass), torch.enable_grad():
            w + 1
        assert not torch.is_grad_enabled()
        with pytest.raises(jp.BackwardPass), torch.enable_grad():
            w + 1
    (w + 1).sum().backward()


def test_an_exception_leaves_nothing_behind() -> None:
    with contextlib.suppress(ZeroDivisionError), torch.no_grad(), jp.forward_only(), jp.forward_only():
        _ = 1 / 0
    assert torch.is_grad_enabled()
    with torch.no_grad():
        with jp.forward_only():
            pass
        assert not torch.is_grad_enabled()


def test_anomaly_mode_is_put_back() -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        with jp.forward_only():
            pass
        assert torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()
    with jp.forward_only(), torch.autograd.set_detect_anomaly(True):
        pass
    assert not torch.is_anomaly_enabled()


def test_it_decorates_functions() -> None:
    w = weight()

    @jp.forward_only()
    def loss(depth: int) -> Tensor:
        """The loss."""
        assert not torch.is_grad_enabled()
        return loss(depth - 1) if depth else w.square().sum()

    assert loss.__doc__ == "The loss."
    assert not loss(3).requires_grad and torch.is_grad_enabled()

    @jp.forward_only()
    def train() -> None:
        loss(0).backward()

    with pytest.raises(jp.BackwardPass, match=STARTS):
        train()


def _generator() -> Iterator[int]:
    yield 1


async def _coroutine() -> None: ...


@pytest.mark.parametrize("late", [_generator, _coroutine, nn.Linear])
def test_what_runs_later_is_not_decorated(late: Any) -> None:
    with pytest.raises(TypeError, match=rf"{late.__qualname__} does not run where it is called, so it cannot be gua"):
        jp.forward_only()(late)


def test_other_threads_are_free() -> None:
    w, started, go, found = weight(), threading.Event(), threading.Event(), []

    def other() -> None:
        started.set()
        assert go.wait(10)
        loss = w.square().sum()
        loss.backward()
        found.append(loss.requires_grad)

    thread = threading.Thread(target=other)
    thread.start()
    assert started.wait(10)
    with jp.forward_only():
        go.set()
        thread.join(10)
        assert _raised(w.square().sum().backward)
    assert found == [True] and w.grad is not None


def test_threads_made_inside_are_guarded_as_long_as_the_guard_is_there() -> None:
    w, found, seen, go = weight(), [], threading.Event(), threading.Event()

    def inside() -> None:
        found.append(_raised(lambda: w + 1))
        _in_a_thread(lambda: found.append(_raised(lambda: w + 1)))  # and one made inside that
        seen.set()
        assert go.wait(10)
        found.append(_raised(lambda: w + 1))

    with jp.forward_only():
        thread = threading.Thread(target=inside)
        thread.start()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: _raised(lambda: w + 1)).result()
        assert seen.wait(10)
    go.set()
    thread.join(10)
    assert found == [True, True, False]


def test_guards_of_two_threads_end_in_any_order() -> None:
    w, entered, leave, found = weight(), threading.Event(), threading.Event(), []

    def other() -> None:
        with jp.forward_only():
            entered.set()
            assert leave.wait(10)
            with torch.enable_grad():
                found.append(_raised(lambda: w + 1))

    thread = threading.Thread(target=other)
    with jp.forward_only():
        thread.start()
        assert entered.wait(10)
    assert not _raised(lambda: w + 1)
    leave.set()
    thread.join(10)
    assert found == [True]


def test_someone_elses_anomaly_mode_still_says_where() -> None:
    w = weight()
    with jp.forward_only(), guard.local(), torch.enable_grad(), torch.autograd.set_detect_anomaly(True):
        made = w + 1
    assert any("someone_elses_anomaly_mode" in line for line in made.grad_fn.metadata["traceback_"])
    with jp.forward_only(), guard.local(), torch.enable_grad():
        made = w + 1
    assert made.grad_fn.metadata["traceback_"] == []


def test_a_torch_that_does_not_tell_of_its_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    guard._check_once.cache_clear()
    monkeypatch.setattr(guard, "_SET_ANOMALY", lambda enabled, check_nan=True: None)
    with pytest.raises(RuntimeError, match=r"torch .* does not report the autograd nodes that it makes, so forward_o"):
        jp.forward_only().__enter__()
    monkeypatch.undo()
    with jp.forward_only():
        pass


def _raised(call: Callable[[], Any]) -> bool:
    try:
        call()
    except jp.BackwardPass:
        return True
    return False


def _in_a_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(10)
