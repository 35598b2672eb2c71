"""Sums of derivatives: as autograd's, but for what is nothing but rounding, which is zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from exactness import normal
from jetplane.gradients.adjoints.sums import summed, total

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize("shape", [(4, 3), (3,), (1, 3), (4, 1), (1, 1), ()])
def test_derivatives_of_what_was_broadcast_are_summed(shape: tuple[int, ...]) -> None:
    x, delta = normal(*shape).requires_grad_(), normal(*(4, 3))
    (wanted,) = torch.autograd.grad(x.expand(4, 3), x, delta)
    torch.testing.assert_close(summed(delta, x), wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_sum_that_is_rounding_is_zero_at_any_scale(dtype: torch.dtype, scale: float) -> None:
    eps = torch.finfo(dtype).eps
    terms = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 1.0], [4 * eps, 64 * eps, 0.0]], dtype=dtype) * scale
    found = total(terms, [0])
    assert found[0] == 0 and torch.equal(found[1:], terms.sum(0)[1:])


def test_what_is_not_finite_stays_so() -> None:
    most = torch.finfo(F32).max
    terms = torch.tensor([[torch.inf, torch.nan, -torch.inf, most], [1.0, 1.0, 1.0, -most], [1.0, 1.0, 1.0, 1e30]])
    torch.testing.assert_close(total(terms, [0]), terms.sum(0), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_halves_and_whole_numbers_are_summed_as_they_are(dtype: torch.dtype) -> None:
    terms = torch.tensor([[100.0], [-101.0]]).to(dtype)
    assert total(terms, [0]) == -1


def test_nothing_to_sum_and_no_terms() -> None:
    assert torch.equal(total(torch.ones(2), []), torch.ones(2))
    assert torch.equal(total(torch.ones(0, 2), [0]), torch.zeros(2))


class Keys(nn.Module):
    """Attention, to which a bias of the keys adds the same number everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.scaled_dot_product_attention(self.query(x), self.key(x), x).mean(1))


class Moved(nn.Module):
    """One number, added to all logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(4, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.number


def perceptron() -> nn.Module:
    norms = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()
    return nn.Sequential(*norms, nn.Linear(6, 3))


def convolution(norm: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


IDLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "batch norms": (perceptron, (16, 4), ["0.bias", "3.bias"]),
    "images": (lambda: convolution(lambda: nn.BatchNorm2d(4)), (16, 2, 4, 4), ["0.bias"]),
    "single channels": (lambda: convolution(lambda: nn.GroupNorm(4, 4)), (16, 2, 4, 4), ["0.bias"]),
    "keys": (Keys, (16, 5, 4), ["key.bias"]),
    "logits": (Moved, (16, 4), ["number"]),
}


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("name", IDLE)
def test_a_parameter_that_does_nothing_has_no_gradient(name: str, dtype: torch.dtype) -> None:
    make, shape, idle = IDLE[name]
    torch.manual_seed(0)
    model, x, y = make().to(dtype), torch.randn(shape, dtype=dtype), torch.arange(16) % 3
    jp.forward_gradient(
        lambda x, y: F.cross_entropy(model(x), y, reduction="none"), model.parameters(), x, y, samples=2
    )
    for place, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert bool((parameter.grad == 0).all()) == (place in idle), place
