"""The context manager: names, unused leaves, buffers and values inside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from cases import F64, along, assert_close, assert_quadratic, randn
from jetplane.testing.oracle import double_backward


def test_perturb_by_name_and_reading_inside_and_after() -> None:
    net, x = nn.Linear(3, 2).double(), randn(4, 3)
    params = dict(net.named_parameters())
    v = dict(zip(params, along(list(params.values()), 2), strict=True))
    with jp.perturb(params, dict(reversed(v.items()))) as jets:
        hidden = net(x).tanh()
        loss = hidden.square().sum()
        inside = jets.quadratic(loss)
        assert not torch._C.is_grad_enabled() and loss.grad_fn is None
    expected = double_backward(lambda: net(x).tanh().square().sum(), list(params.values()), list(v.values()))
    assert_quadratic(inside, expected)
    assert_quadratic(jets.quadratic(loss), expected)
    assert jets.of(hidden).second.shape == (3, 4, 2)
    assert torch.is_grad_enabled()


def test_perturb_leaves_unused_alone_when_allowed() -> None:
    x, y = randn(3), randn(3)
    with jp.perturb([x, y], [randn(1, 3), randn(1, 3)], allow_unused=True) as jets:
        loss = x.sum()
    assert not jets.quadratic(loss).curvature.any()


def test_perturb_updates_batch_norm_statistics_once_and_gives_buffers_no_tangents() -> None:
    net, x = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).double(), randn(6, 4)
    twin = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).double()
    twin.load_state_dict(net.state_dict())
    twin(x)
    leaves = list(net.parameters())
    with jp.perturb(leaves, along(leaves, 2)) as jets:
        net(x).sum()
    for ours, theirs in zip(net.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert not jets.of(net[1].running_mean).tangent.any() and not jets.of(net[1].running_var).tangent.any()
    net.eval()
    assert_close(net(x), twin.eval()(x))


def test_perturbed_values_can_be_read_as_numbers() -> None:
    x = torch.tensor([2.0, -1.0], dtype=F64)

    def program(x: Tensor) -> Tensor:
        return x.square().sum() if x[0].item() > 1 and bool(x[1] < 0) and float(x[0]) == 2.0 else x.sum()

    assert_close(jp.gradient(program, x), 2 * x)


def test_blocks_that_end_out_of_order_are_refused_and_leave_nothing_behind() -> None:
    x, y = randn(3), randn(3)
    outer, inner = (jp.perturb([t], [randn(1, 3)], allow_unused=True) for t in (x, y))
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match=r"closed before one that was opened inside it; expected blocks to end in"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert torch.is_grad_enabled()


# -- inside torch.compile -------------------------------------------------------------------------------------------


def test_perturb_inside_a_compiled_function_is_refused_and_leaves_all_as_it_was() -> None:
    def program(x: Tensor) -> Tensor:
        with jp.perturb([x], [torch.eye(3, dtype=F64)]) as jets:
            loss = x.square().sum()
        return jets.quadratic(loss).slope

    torch.compiler.reset()
    x = randn(3)
    with pytest.raises(jp.UnsupportedProgram, match=r"perturb was entered inside torch.compile, which takes .* apart"):
        torch.compile(program, backend="eager")(x)
    assert torch.is_grad_enabled()
    assert_close(program(x), 2 * x)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: jp.quadratic(lambda z: z.square().sum(), x, torch.eye(3, dtype=F64)).slope,
        lambda x: jp.hessian(lambda z: z.square().sum(), x),
        lambda x: jp.gradient(lambda z: z.square().sum(), x) + x.sin(),
        lambda x: x * jp.laplacian(lambda z: z.square().sum(), x),
        lambda x: x * jp.verify(lambda z: z.square().sum(), x).ok,
        lambda x: x * jp.coverage(lambda z: z.square().sum(), x).complete,
    ],
    ids=["quadratic", "hessian", "gradient", "laplacian", "verify", "coverage"],
)
def test_transforms_inside_a_compiled_function_run_as_they_are(run) -> None:
    torch.compiler.reset()
    x = randn(3)
    assert torch.equal(torch.compile(run, backend="eager")(x), run(x))
