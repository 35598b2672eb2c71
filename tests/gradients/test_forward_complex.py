"""Forward gradients of programs with complex numbers in between: exact once noise takes every coordinate in turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from exactness import check_exact, normal

C128 = torch.complex128


class Spectral(nn.Module):
    """Convolutions by transforms, with weights that are real memory seen as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.weight, self.out = nn.Linear(2, 2), nn.Parameter(normal(2, 3, 2, 2)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.lift(x).tanh(), dim=1)[:, :2]
        mixed = torch.einsum("bki,iok->bok", spectrum, torch.view_as_complex(self.weight))
        return self.out(torch.fft.irfft(mixed, n=4).mT.sigmoid()).sum(1)


class Mixing(nn.Module):
    """FNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.then = nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.then(self.norm(h + torch.fft.fft2(h).real)).sum(1)


class Turned(nn.Module):
    """Attention with rotary embeddings as complex products."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        turns = torch.polar(torch.ones(4, 1, dtype=torch.float64), torch.arange(4, dtype=torch.float64)[:, None])

        def turned(x: Tensor) -> Tensor:
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (1, 2))) * turns).flatten(-2)

        return self.out((turned(self.query(x)) @ turned(self.key(x)).mT).softmax(-1) @ x).sum(1)


class Recurrence(nn.Module):
    """Diagonal complex states; conjugates of parameters, and a complex number that writes into real memory."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.into, self.out = (nn.Parameter(normal(*shape)) for shape in ((2, 2), (2, 2, 2), (2, 2, 2)))

    def forward(self, x: Tensor) -> Tensor:
        rate = 0.5 * torch.view_as_complex(self.rate).exp()
        driven = x.to(C128) @ torch.view_as_complex(self.into).mH
        state = torch.zeros(len(x), 2, dtype=C128)
        for step in driven.unbind(1):
            state = rate * state + step
        scaled = state * torch.view_as_complex(self.rate).conj()
        result = torch.zeros(len(x), 2, 2, dtype=torch.float64)
        torch.view_as_complex(result).copy_(scaled @ torch.view_as_complex(self.out))
        return result.flatten(1)


class Flat(nn.Module):
    """Real and complex weights in the memory of one parameter, whose places the two kinds count differently."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(normal(12))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.whole[:4].view(2, 2), torch.view_as_complex(self.whole[4:].view(2, 2, 2))
        return ((x @ first).tanh().to(C128) @ second).imag.mean(1) + (x @ second.conj().imag).real.mean(1)


@pytest.mark.parametrize(
    "make", [Spectral, Recurrence, Flat, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Mixing, Turned))]
)
def test_estimates_are_exact(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module, x = make().double(), normal(3, 4, 2)
    check_exact(module, lambda x: module(x).square().sum(1), x)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"w has dtype torch.complex128; expected real numbers here, of which the program"
    ):
        jp.ForwardGradient({"w": torch.ones(2, dtype=C128, requires_grad=True)})


@pytest.mark.slow
def test_steps_of_adam() -> None:
    torch.manual_seed(0)
    ones = torch.ones(8, 2, dtype=torch.float64)
    module, x = Spectral().double(), normal(8, 4, 2)
    opt = jp.optim.HorizonAdam(module.parameters())
    losses = [float(opt.step(lambda x: F.mse_loss(module(x), ones, reduction="none").sum(1), x)) for _ in range(12)]
    assert losses[-1] < losses[0]
