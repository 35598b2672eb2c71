"""Passes over chunks of the directions are one pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from cases import F64, assert_close, assert_quadratic, randn
from jetplane.optim import FGD, FoMoH, FoMoHKD
from jetplane.testing.oracle import double_backward


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_chunks_share_random_numbers_and_update_buffers_once(chunk_size: int) -> None:
    net, x, v = noisy(), randn(6, 4), randn(4, 6, 4)
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    loss = lambda x: net(x).square().sum()  # noqa: E731

    def run(size: int | None) -> tuple[jp.Quadratic, dict[str, Tensor], Tensor]:
        for name, b in net.named_buffers():
            b.copy_(buffers[name])
        torch.manual_seed(5)
        q = jp.quadratic(loss, x, v, chunk_size=size)
        return q, {name: b.clone() for name, b in net.named_buffers()}, torch.rand(3)

    whole, split = run(None), run(chunk_size)
    assert_quadratic(split[0], whole[0])
    for name, value in whole[1].items():
        assert torch.equal(split[1][name], value)
    assert int(split[1]["1.num_batches_tracked"]) == 1
    assert not torch.equal(whole[1]["1.running_mean"], buffers["1.running_mean"])
    assert torch.equal(split[2], whole[2])
    net.zero_grad()
    for name, b in net.named_buffers():
        b.copy_(buffers[name])
    torch.manual_seed(5)
    leaf = x.clone().requires_grad_()
    draws = torch.get_rng_state()

    def again() -> Tensor:
        torch.set_rng_state(draws)
        return loss(leaf)

    assert_quadratic(whole[0], double_backward(again, [leaf], [v]))


def test_chunks_of_a_program_that_keeps_a_counter_in_a_tensor() -> None:
    counter = torch.zeros((), dtype=F64)

    def program(x: Tensor) -> Tensor:
        counter.add_(1)
        return (x**3).sum() * counter

    x = randn(3)
    assert_close(jp.hessian(program, x, chunk_size=1), torch.diag(6 * x))
    assert float(counter) == 1


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 1)).double()


@pytest.mark.parametrize(
    "cut",
    [
        Tensor.detach,
        lambda y: y.data,
        lambda y: (y * 1).detach_() + 1,
        lambda y: torch.zeros(3).copy_(y.detach()),
        lambda y: torch.tensor(y.sum().item(), dtype=F64),
        lambda y: torch.as_tensor(float(y.sum()), dtype=F64),
        lambda y: torch.as_tensor(y.tolist(), dtype=F64),
    ],
    ids=["detach", "data", "detach_", "copied", "item", "float", "tolist"],
)
def test_a_result_that_the_program_has_detached_is_refused(cut: Callable[[Tensor], Tensor]) -> None:
    message = "the program detaches its result from all that varies"
    x, v, leaf = randn(3), randn(2, 3), nn.Parameter(randn(3))
    with pytest.raises(ValueError, match=message):
        jp.quadratic(lambda x: cut(x * x).sum(), x, v)
    with jp.perturb([leaf], [v]) as jets:
        loss = cut(leaf * leaf).sum()
        constant = torch.ones((), dtype=F64)
    with pytest.raises(ValueError, match=message):
        jets.quadratic(loss)
    assert jets.of(constant).tangent.any() == 0  # of what it made itself the derivative is zero
    for make in (FoMoH, FoMoHKD, FGD):
        opt = make([leaf])
        with pytest.raises(ValueError, match=message):
            opt.step(lambda: cut(leaf * leaf).sum())
    assert jp.gradient(lambda x: (cut(x) * x).sum(), x).abs().sum() > 0
    assert_close(jp.gradient(lambda x: x.round().sum(), x), torch.zeros(3, dtype=F64))
