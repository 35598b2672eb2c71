"""Tangents stop where the program itself switches autograd off, as backprop's gradients do."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import jetplane as jp
from cases import F64, along, assert_close, assert_quadratic, randn
from jetplane.testing.oracle import double_backward

# -- every way to switch, in programs of one tensor --------------------------------------------------------------------


def _square(x: Tensor) -> Tensor:
    return x * x


@torch.no_grad()
def decorated(x: Tensor) -> Tensor:
    return x * x


@torch.set_grad_enabled(False)
def decorated_by_set(x: Tensor) -> Tensor:
    return x * x


@torch.no_grad()
def generated(x: Tensor) -> Any:
    yield x * x
    yield x.sin()


@torch.inference_mode()
def inferred(x: Tensor) -> Tensor:
    return x * x


def context(x: Tensor) -> Tensor:
    with torch.no_grad():
        c = x * x
    return c * x


def by_set(x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        c = x * x
    return c * x


def by_set_on(x: Tensor) -> Tensor:
    with torch.set_grad_enabled(True):
        c = x * x
    return c * x


def by_call(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    c = x * x
    torch.set_grad_enabled(True)
    return c * x


def nested(x: Tensor) -> Tensor:
    with torch.no_grad():
        a = x * x
        with torch.no_grad():
            b = x.sin()
        c = x.cos()
    return (a + b + c) * x


def nested_on(x: Tensor) -> Tensor:
    with torch.no_grad():
        a = x * x
        with torch.enable_grad():
            b = x.sin()
        c = x.cos()
    return (a + b + c) * x


def left_by_exception(x: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            raise KeyError
    except KeyError:
        return x * x * x


def explicit(x: Tensor) -> Tensor:
    region = torch.no_grad()
    region.__enter__()
    c = x * x
    region.__exit__(None, None, None)
    return c * x


def view(x: Tensor) -> Tensor:
    y = x.sin()
    with torch.no_grad():
        head, rest = y[:2], y.view(-1, 1).split(2)[1]
    return head.sum() * y + rest[0, :1].squeeze() * x


def parameters_view(x: Tensor) -> Tensor:
    with torch.no_grad():
        v = x.view(1, -1)
    return v[0] * x


def written(x: Tensor) -> Tensor:
    y = x.clone()
    with torch.no_grad():
        y.mul_(3)  # backprop goes through y as if nothing had happened
    return y * y.sin()


def written_in_part(x: Tensor) -> Tensor:
    y = x.sin()
    with torch.no_grad():
        y[1:3] = x[:2] * 5
        torch.mul(x[:1], x[:1], out=y[:1])
    return (y * x).exp()


def written_constant(x: Tensor) -> Tensor:
    y = torch.zeros(4, dtype=F64)
    y[0] = x[1].sin()
    with torch.no_grad():
        y[2] = x[1]
        y.add_(x)
    return y * x


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        c = x * x
        with torch.inference_mode(False):
            d = x.sin()
    return c.clone() * x + d  # a clone, which backprop needs


def loss_inside(x: Tensor) -> Tensor:
    with torch.no_grad():
        c = F.mse_loss(x, x.sin())
    return c * x


def mapped(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: context(row) + parameters_view(row).sum())(x.view(2, 2)).flatten()


def mapped_inside(x: Tensor) -> Tensor:
    with torch.no_grad():
        c = torch.vmap(lambda row: row * row)(x.view(2, 2)).flatten()
    return c * x


class Cube(torch.autograd.Function):
    """Has no rule, which where autograd is off nobody needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


def function_inside(x: Tensor) -> Tensor:
    with torch.no_grad():
        c = Cube.apply(x)
    return c * x


class Passing(TorchFunctionMode):
    """A function mode of the program, which stands between a switch and the pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_mode(x: Tensor) -> Tensor:
    with Passing(), Passing():
        return context(x)


def sampled(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    drawn = torch.distributions.Normal(x, 1.0).sample()
    return torch.distributions.Normal(x, 1.0).log_prob(drawn) * x


SWITCHES: list[Callable[[Tensor], Tensor]] = [
    context,
    by_set,
    by_set_on,
    by_call,
    nested,
    nested_on,
    left_by_exception,
    explicit,
    view,
    parameters_view,
    written,
    written_in_part,
    written_constant,
    inference,
    loss_inside,
    mapped,
    mapped_inside,
    function_inside,
    under_a_mode,
    sampled,
    lambda x: decorated(x) * x,
    lambda x: decorated_by_set(x) * x,
    lambda x: sum(generated(x)) * x,
    lambda x: inferred(x).clone() * x,
    lambda x: checkpoint(context, x, use_reentrant=False) * x,
]
NAMES = [f"{number}-{one.__name__.strip('<>')}" for number, one in enumerate(SWITCHES)]


@pytest.mark.parametrize("curvature", ["exact", "ggn"])
@pytest.mark.parametrize("program", SWITCHES, ids=NAMES)
def test_slope_and_curvature_are_those_of_backprop(program: Callable[[Tensor], Tensor], curvature: str) -> None:
    x, v = randn(4), randn(3, 4)
    leaf = x.clone().requires_grad_()
    loss = lambda x: jp.mark_output(program(x)).sum()  # noqa: E731
    expected = double_backward(lambda: program(leaf).sum(), [leaf], [v])
    if curvature == "ggn":  # linear behind the model's output
        expected = jp.Quadratic(expected.loss, expected.slope, torch.zeros_like(expected.curvature))
    for chunk_size in (None, 1, 2):
        assert_quadratic(jp.quadratic(loss, x, v, curvature=curvature, chunk_size=chunk_size), expected)
    for requires_grad in (False, True):
        leaf = x.clone().requires_grad_(requires_grad)
        with jp.perturb([leaf], [v], curvature=curvature) as jets:
            result = loss(leaf)
            assert (
                not torch._C.is_grad_enabled() and torch.is_grad_enabled()
            )  # what it is, and what the program has done
        assert_quadratic(jets.quadratic(result), expected)
    with torch.no_grad(), jp.forward_only():  # around a pass it stops nothing
        assert_quadratic(jp.quadratic(loss, x, v, curvature=curvature), expected)


@pytest.mark.parametrize("body", [_square, context, nested_on])
def test_the_no_grad_of_a_reentrant_checkpoint_is_not_the_programs(body: Callable[[Tensor], Tensor]) -> None:
    x, v = randn(4).requires_grad_(), randn(2, 4)
    expected = double_backward(lambda: (body(x) * x).sum(), [x], [v])
    assert_quadratic(jp.quadratic(lambda x: (checkpoint(body, x, use_reentrant=True) * x).sum(), x, v), expected)


def test_follow_is_the_meaning_of_torch_func_jvp() -> None:
    x, one = torch.tensor([2.0], dtype=F64), torch.ones(1, dtype=F64)
    loss = lambda x: context(x).sum()  # noqa: E731
    assert torch.func.jvp(loss, (x,), (one,))[1] == 12
    assert torch.func.grad(loss)(x) == 4
    assert jp.jvp(loss, (x,), (one,))[1] == 4
    assert jp.jvp(loss, (x,), (one,), no_grad="follow")[1] == 12
    for inside in (loss, lambda x: (inferred(x) * x).sum()):
        assert jp.gradient(inside, x) == 4
        assert jp.gradient(inside, x, no_grad="follow") == 12
        assert jp.quadratic(inside, x, one.view(1, 1), no_grad="follow").curvature == 12
        assert jp.hvp(inside, x, one, no_grad="follow") == jp.hessian(inside, x, no_grad="follow")[0] == 12
        assert jp.laplacian(inside, x, no_grad="follow") == 12
        assert jp.jet(inside, x, one.view(1, 1), no_grad="follow").tangent[0] == 12
        assert jp.hyperdual(inside, x, one, one, no_grad="follow").eps12 == 12
    with jp.perturb([x], [one.view(1, 1)], no_grad="follow") as jets:
        result = loss(x)
    assert jets.quadratic(result).slope == 12
    assert jp.verify(loss, x).ok  # finite differences see through no_grad


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no_grad is 'ignore'; expected 'stop' or 'follow'\."):
        jp.gradient(lambda x: x.sum(), randn(2), no_grad="ignore")


def test_rows_keep_their_graph_behind_a_stop() -> None:
    x = randn(3).requires_grad_()
    jp.laplacian(lambda x: (context(x) * x.sin()).sum(), x).backward()
    # context(x) is c x with c constant, so the Laplacian's summand is c (2 cos x - x sin x)
    with torch.no_grad():
        expected = x**2 * (-3 * x.sin() - x * x.cos())
    assert_close(x.grad, expected + 0 * expected)


def test_nested_passes_stop_both() -> None:
    x, v = randn(3), randn(2, 3)

    def inner(x: Tensor) -> Tensor:
        return jp.gradient(lambda y: (context(y) * x).sum(), x.detach()).sum() + context(x).sum()

    # the inner gradient is c x with c = y^2 constant, at y a constant
    expected = jp.quadratic(lambda x: (x.detach() ** 2 * x).sum() * 2, x, v)
    assert_quadratic(jp.quadratic(inner, x, v), expected)


def test_a_pass_inside_a_pass_is_no_stop_of_the_outer_one() -> None:
    x, v = randn(3), randn(2, 3)

    def program(x: Tensor) -> Tensor:
        w = torch.ones(1, dtype=F64)
        with jp.perturb([w], [torch.ones(1, 1, dtype=F64)]) as jets:
            inner = (w * x * x).sum()
        jets.quadratic(inner)
        return inner * x.sum()

    assert_quadratic(jp.quadratic(program, x, v), jp.quadratic(lambda x: (x * x).sum() * x.sum(), x, v))


def test_derivatives_inside_the_loss_under_enable_grad() -> None:
    x, v = randn(3), randn(2, 3)

    def program(x: Tensor) -> Tensor:
        with torch.no_grad():
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad((y**3).sum(), y)
            c = slope * x
        return (c * x).sum()

    with jp.perturb([x], [v]) as jets:
        loss = program(x)
    assert_quadratic(jets.quadratic(loss), jp.quadratic(lambda z: (3 * x**3 * z).sum(), x, v))


def test_another_thread_switches_nothing() -> None:
    x, v, ready, done = randn(3), randn(2, 3), threading.Event(), threading.Event()

    def other() -> None:
        with torch.no_grad():
            ready.set()
            done.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait(10)
    try:
        actual = jp.quadratic(lambda x: (x * x * x).sum(), x, v)
    finally:
        done.set()
        thread.join()
    assert_close(actual.slope, v @ (3 * x * x))


# -- what cannot be meant ----------------------------------------------------------------------------------------------


def test_a_result_under_no_grad_is_refused_and_not_zero() -> None:
    x = randn(3)
    match = r"computes its result under its own torch\.no_grad\(\) or inference_mode.*expected it outside.*'follow'"
    off = torch.no_grad()(lambda x: x.sum())
    for inside in (lambda x: decorated(x).sum(), lambda x: inferred(x).sum().clone(), off):
        with pytest.raises(ValueError, match=match):
            jp.gradient(inside, x)
        with jp.perturb([x], [randn(2, 3)], allow_unused=True) as jets:
            loss = inside(x)
        with pytest.raises(ValueError, match=match):
            jets.quadratic(loss)
        parameter = nn.Parameter(x)
        with pytest.raises(ValueError, match=match):
            jp.optim.FoMoH([parameter], lr=0.1).step(lambda inside=inside, parameter=parameter: inside(parameter))
    assert jp.jet(lambda x: (x, decorated(x)), x, torch.eye(3, dtype=F64)).tangent[1].abs().max() == 0


def test_a_parameter_that_is_used_under_no_grad_alone_is_named() -> None:
    x, w = randn(3), randn(3)
    match = r"never used parameter 1 outside of its own torch\.no_grad\(\); expected each"
    with pytest.raises(ValueError, match=match), jp.perturb([x, w], [randn(2, 3)] * 2):
        (decorated(w) * x).sum()


def _restored_by_hand(x: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    c = x * x
    torch.set_grad_enabled(before)
    return (c * x).sum()


def _restored_unseen(x: Tensor, ask: Any = torch.is_grad_enabled) -> Tensor:
    before = ask()
    torch.set_grad_enabled(False)
    c = x * x
    torch.set_grad_enabled(before)
    return (c * x).sum()


def _as_it_is(x: Tensor) -> Tensor:
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        c = x * x
    return (c * x).sum()


def _kept_elsewhere(x: Tensor) -> Tensor:
    class Kernel:
        def __init__(self) -> None:
            self.enabled = torch.is_grad_enabled()

    kernel = Kernel()
    with torch.set_grad_enabled(kernel.enabled):
        c = x * x
    return (c * x).sum()


@pytest.mark.parametrize("program", [_restored_by_hand, _as_it_is, _kept_elsewhere])
def test_the_program_is_told_its_own_state(program: Callable[[Tensor], Tensor]) -> None:
    x, v = randn(3), randn(2, 3)
    leaf = x.clone().requires_grad_()
    expected = double_backward(lambda: program(leaf), [leaf], [v])
    with torch.no_grad():
        assert_quadratic(jp.quadratic(program, x, v), expected)
    with jp.forward_only(), jp.perturb([leaf], [v]) as jets:  # and autograd stays off
        loss = program(leaf)
        assert loss.grad_fn is None
    assert_quadratic(jets.quadratic(loss), expected)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("program", [_restored_unseen])
def test_a_state_that_the_program_asked_for_unseen_is_refused(program: Callable[[Tensor], Tensor]) -> None:
    x, v = randn(3), randn(2, 3)
    leaf = x.clone().requires_grad_()
    expected = double_backward(lambda: program(leaf), [leaf], [v])
    with torch.enable_grad():
        assert_quadratic(jp.quadratic(program, x, v), expected)
    match = r"set_grad_enabled\(False\).* may mean the state from before it was switched off.*'with torch\.no_grad"
    with pytest.raises(jp.UnsupportedProgram, match=match), jp.perturb([x], [v]):
        program(x)
    with torch.no_grad(), jp.perturb([x], [v], no_grad="follow") as jets:
        loss = program(x)
    assert_quadratic(jets.quadratic(loss), jp.quadratic(lambda x: (x**3).sum(), x, v))
    assert torch.is_grad_enabled()
    assert torch.is_grad_enabled is torch._C.is_grad_enabled


def test_another_shape_for_a_perturbed_tensor_is_refused() -> None:
    def program(x: Tensor) -> Tensor:
        y = x[:0].sin()
        with torch.no_grad():
            torch.cat([x, x], out=y)
        return y.sum()

    match = r"changes the shape of a perturbed tensor from \(0,\) to \(6,\) where autograd is off; expected"
    with pytest.raises(jp.UnsupportedProgram, match=match):
        jp.jet(program, randn(3), randn(2, 3))


# -- programs of other people ------------------------------------------------------------------------------------------


def _dqn() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    net, x, after, reward = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        randn(6, 4),
        randn(6, 4),
        randn(6),
    )

    def loss(net: nn.Module) -> Tensor:
        with torch.no_grad():
            target = reward + 0.9 * net(after).max(1).values
        return F.smooth_l1_loss(net(x).gather(1, (torch.arange(6) % 3)[:, None])[:, 0], target)

    return net, loss


def _fixmatch() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    net, weak, strong = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), randn(6, 4), randn(6, 4)

    def loss(net: nn.Module) -> Tensor:
        with torch.no_grad():
            probabilities = net(weak).softmax(-1)
            confidence, labels = probabilities.max(-1)
        return (confidence * F.cross_entropy(net(strong), labels, reduction="none")).mean()

    return net, loss


def _ciou() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    net, x, goal = nn.Linear(4, 4), randn(5, 4), randn(5, 4).exp()

    def loss(net: nn.Module) -> Tensor:
        box = net(x).exp()
        overlap = torch.minimum(box, goal).prod(-1) / torch.maximum(box, goal).prod(-1)
        v = (torch.atan(goal[:, 0] / goal[:, 1]) - torch.atan(box[:, 0] / box[:, 1])) ** 2
        with torch.no_grad():
            alpha = v / (1 - overlap + v + 1e-7)
        return (1 - overlap + alpha * v).mean()

    return net, loss


def _normalised() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    net, x = nn.Linear(4, 3), randn(6, 4)

    def loss(net: nn.Module) -> Tensor:
        z = net(x)
        with torch.no_grad():
            scale = z.std() + z.abs().amax()
        return (z / scale).square().mean()

    return net, loss


class Average(nn.Module):
    """Keeps a moving average of what passes through it, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(z.mean(0), alpha=0.1)
            self.average[0].lerp_(z[0, 0], 0.5)
        return z - self.average


class Recurrent(nn.Module):
    """Warms its state up without gradients, and goes one more step with them."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = self.start.expand(x.shape[0], -1)
        with torch.no_grad():
            for _ in range(3):
                state = torch.tanh(self.layer(torch.cat([state, x], -1)))
        return self.layer(torch.cat([state, x], -1)) + self.start


def _module(make: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]:
    def built() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        net, x = make(), randn(6, 4)
        return net, lambda net: net(x).square().mean()

    return built


PROGRAMS = {
    "dqn": _dqn,
    "fixmatch": _fixmatch,
    "ciou": _ciou,
    "normalised": _normalised,
    "average": _module(Average),
    "recurrent": _module(Recurrent),
    "spectral norm": _module(lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh())),
    "old spectral norm": _module(lambda: nn.Sequential(old_spectral_norm(nn.Linear(4, 5)), nn.Tanh())),
    "batch norm": _module(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh())),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_other_peoples_programs(name: str) -> None:
    torch.manual_seed(5)
    net, loss = PROGRAMS[name]()
    net = net.double()
    again = copy.deepcopy(net)
    leaves, v = list(net.parameters()), along(list(net.parameters()), 3)
    expected = double_backward(lambda: loss(again), list(again.parameters()), v)
    (once := copy.deepcopy(net)).load_state_dict(net.state_dict())
    loss(once)
    with jp.perturb(leaves, v, allow_unused=True) as jets:
        result = loss(net)
    assert_quadratic(jets.quadratic(result), expected)
    for mine, theirs in zip(net.buffers(), once.buffers(), strict=True):
        assert_close(mine, theirs)
