"""Programs with complex numbers, as users write them, each against double backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from cases import F64, assert_close, assert_quadratic, check_against_oracle, randn
from jetplane.testing.oracle import double_backward

C128 = torch.complex128
linalg = torch.linalg


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=C128)


# -- networks -------------------------------------------------------------------------------------------------------


class SpectralLayer(nn.Module):
    """A layer of a Fourier neural operator; its weights are real memory that is seen as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * randn(2, 3, 3, 2, 2))
        self.skip = nn.Conv2d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros(len(x), 3, 6, 4, dtype=C128)
        kernel = torch.view_as_complex(self.weight)
        out[:, :, :3, :2] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :3, :2], kernel)
        return torch.nn.functional.gelu(torch.fft.irfft2(out, s=(6, 6)) + self.skip(x))


class Mixing(nn.Module):
    """FNet: tokens are mixed by a Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return x + self.down(torch.tanh(self.up(x)))


class Rotary(nn.Module):
    """Attention with positions that turn pairs of numbers, as complex products."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), 10.0 ** -torch.arange(2)).float()
        turns = torch.polar(torch.ones_like(angles), angles)

        def turned(x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)

        scores = turned(self.query(x)) @ turned(self.key(x)).mT / 2
        return scores.softmax(-1) @ self.value(x)


class LinearRecurrence(nn.Module):
    """An LRU: diagonal complex states, unrolled, and by cumulative products."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.angle = nn.Parameter(randn(3)), nn.Parameter(randn(3))
        self.into, self.out = nn.Parameter(numbers(3, 2)), nn.Parameter(numbers(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        eigenvalues = torch.exp(torch.complex(-torch.exp(self.size), torch.exp(self.angle)))
        driven = x.to(C128) @ self.into.T
        state, states = torch.zeros(3, dtype=C128), []
        for step in driven.unbind(1):
            state = eigenvalues * state + step
            states.append(state)
        powers = eigenvalues.expand(driven.shape[1], 3).cumprod(0)
        return ((torch.stack(states, 1) + powers) @ self.out.T).real


NETWORKS: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
    ("fourier-neural-operator", SpectralLayer, (2, 2, 6, 6)),
    ("fnet", Mixing, (2, 5, 4)),
    ("linear-recurrence", LinearRecurrence, (2, 4, 2)),
]


@pytest.mark.parametrize(("make", "shape"), [row[1:] for row in NETWORKS], ids=[row[0] for row in NETWORKS])
def test_networks(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = make().double()
    x, leaves = randn(*shape), list(model.parameters())
    directions = [torch.randn(2, *p.shape, dtype=p.dtype) for p in leaves]
    with jp.perturb(leaves, directions) as jets:
        loss = model(x).square().mean()
    assert_quadratic(jets.quadratic(loss), double_backward(lambda: model(x).square().mean(), leaves, directions))


def test_rotary_embeddings_in_float32() -> None:
    model, x = Rotary(), torch.randn(2, 5, 4)
    leaves = list(model.parameters())
    directions = [torch.randn(2, *p.shape) for p in leaves]
    with jp.perturb(leaves, directions) as jets:
        loss = model(x).square().sum()
    found, wanted = jets.quadratic(loss), double_backward(lambda: model(x).square().sum(), leaves, directions)
    torch.testing.assert_close(found.curvature, wanted.curvature, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.slope, wanted.slope, rtol=1e-4, atol=1e-4)


# -- signals, physics, statistics -----------------------------------------------------------------------------------

WINDOW = torch.hann_window(8, dtype=F64)
SIGNAL, MIXED = torch.arange(32, dtype=F64).sin(), (torch.arange(9, dtype=F64).view(3, 3).cos() + 0.5).to(C128)
GATES = [torch.tensor(gate, dtype=C128) for gate in ([[0, 1], [1, 0]], [[0, -1j], [1j, 0]], [[1, 0], [0, -1j]])]


def spectrogram(x: Tensor) -> Tensor:
    def of(x: Tensor) -> Tensor:
        return torch.stft(x, 8, hop_length=2, window=WINDOW, return_complex=True)

    return (of(x).abs() - of(SIGNAL).abs()).square().mean() + (of(x).abs() + 1e-3).log().mean()


def resynthesis(x: Tensor) -> Tensor:
    spectrum = torch.stft(x, 8, hop_length=2, window=WINDOW, return_complex=True)
    return torch.istft(spectrum * spectrum.abs().tanh(), 8, hop_length=2, window=WINDOW).pow(3).sum()


def circuit(angles: Tensor) -> Tensor:
    """The expectation of an observable after turns about the axes of a qubit, and a product of two."""
    state = torch.tensor([1, 0], dtype=C128)
    for angle, gate in zip(angles, [*GATES, *GATES], strict=False):
        state = torch.matrix_exp(-0.5j * angle * (gate + gate.mH)) @ state
    pair = torch.kron(state, state.conj())
    return torch.vdot(state, GATES[0] @ state).real + torch.vdot(pair, pair.roll(1)).abs()


def phase_retrieval(x: Tensor) -> Tensor:
    measured = torch.fft.fft(SIGNAL).abs().square()
    spectrum = torch.fft.fft(x)
    return ((spectrum * spectrum.conj()).real - measured).square().mean()


def beamformer(steering: Tensor) -> Tensor:
    """The output power of Capon's beamformer, w = R^-1 a / (a^H R^-1 a)."""
    covariance = MIXED @ MIXED.mH + torch.eye(3)
    solved = linalg.solve(covariance, steering)
    weights = solved / torch.vdot(steering, solved)
    return torch.vdot(weights, covariance @ weights).real.log()


def ground_state(x: Tensor) -> Tensor:
    hamiltonian = torch.complex(x + x.mT, x - x.mT)
    energies, states = linalg.eigh(hamiltonian)
    return energies[0] + torch.softmax(-energies, 0).square().sum() + states[:, 0].abs().pow(4).sum()


def interferometer(phases: Tensor) -> Tensor:
    """Linear optics: beam splitters and phases, and the probability of a coincidence by a permanent."""
    splitter = torch.tensor([[1, 1j], [1j, 1]], dtype=C128) / math.sqrt(2)
    unitary = splitter @ torch.diag(torch.exp(1j * phases[:2])) @ splitter @ torch.diag(torch.exp(1j * phases[2:4]))
    permanent = unitary[0, 0] * unitary[1, 1] + unitary[0, 1] * unitary[1, 0]
    return permanent.abs().square() + unitary[0, 0].angle()


def orthogonal_cost(x: Tensor) -> Tensor:
    """A unitary by the Cayley transform of a skew-Hermitian matrix."""
    skew = x.to(C128) * (1 + 2j)
    skew = skew - skew.mH
    unitary = linalg.solve(torch.eye(3) + skew, torch.eye(3) - skew)
    return (unitary - MIXED).abs().square().sum() + linalg.slogdet(unitary + 3 * torch.eye(3))[1]


def adaptation(x: Tensor) -> Tensor:
    """FourierFT: a few coefficients of a spectrum are a change of a weight."""
    spectrum = torch.zeros(4, 4, dtype=F64)
    spectrum[torch.tensor([0, 1, 3]), torch.tensor([2, 0, 1])] = x
    return (torch.fft.ifft2(spectrum.to(C128)).real * 300 + torch.ones(4, 4)).tanh().square().sum()


def circular_convolution(x: Tensor) -> Tensor:
    """C3A: circulant matrices by transforms."""
    return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(SIGNAL), n=32).tanh().sum()


def state_space_kernel(x: Tensor) -> Tensor:
    """S4D: the kernel sum_n C_n (exp(dt A_n) - 1) / A_n exp(dt A_n)^l, and its convolution by transforms."""
    A = torch.complex(-x[:4].exp(), torch.arange(4) * math.pi + x[4:8])
    C, dt = torch.view_as_complex(x[8:16].reshape(4, 2)), x[16].exp() / 10
    times = torch.arange(16, dtype=F64)
    kernel = 2 * torch.einsum("n,nl->l", C * (torch.exp(A * dt) - 1) / A, torch.exp((A * dt)[:, None] * times)).real
    return torch.fft.irfft(torch.fft.rfft(kernel, n=48) * torch.fft.rfft(SIGNAL, n=48)).square().sum()


def koopman(x: Tensor) -> Tensor:
    """The spectrum of a real operator: all eigenvalues inside of a circle, and a spectral abscissa."""
    return (linalg.eigvals(x).abs() - 0.9).relu().square().sum() + linalg.eigvals(x).real.logsumexp(0)


def transfer(x: Tensor) -> Tensor:
    """The gain of a filter on the unit circle: polynomials of exp(-i w)."""
    z = torch.exp(-1j * torch.linspace(0, 3, 7, dtype=F64))
    powers = z[:, None] ** torch.arange(3)
    top, bottom = powers @ x[:3].to(C128), powers @ torch.cat([torch.ones(1, dtype=F64), 0.3 * x[3:5]]).to(C128)
    return (20 * torch.log10((top / bottom).abs())).square().mean()


def complex_network(x: Tensor) -> Tensor:
    """A convolution, a linear layer and modReLU of complex numbers, normalised by their variance."""
    kernel, weight = torch.view_as_complex(x[:12].reshape(2, 1, 3, 2)), torch.view_as_complex(x[12:20].reshape(2, 2, 2))
    signal = torch.exp(1j * SIGNAL[:8])[None, None]
    h = torch.nn.functional.conv1d(signal, kernel)[0].T @ weight.mH
    h = torch.where(h.abs() > 0.1, h * ((h.abs() - 0.1) / h.abs()), 0)
    h = (h - h.mean(0)) / (h.var(0) + 1e-3).sqrt()
    return h.abs().pow(3).mean() + h.angle().cos().mean()


def schroedinger_kernel(x: Tensor) -> Tensor:
    """One split step of a nonlinear Schroedinger equation."""
    psi = torch.polar(x[:8].exp(), x[8:16])
    psi = torch.fft.ifft(torch.exp(-0.05j * torch.fft.fftfreq(8, dtype=F64) ** 2) * torch.fft.fft(psi))
    psi = psi * torch.exp(-0.1j * psi.abs().square())
    return (psi.conj() * torch.fft.fftshift(psi)).real.sum() + psi.abs().pow(4).sum()


PROGRAMS: list[tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = [
    (spectrogram, lambda: randn(32)),
    (resynthesis, lambda: randn(32)),
    (circuit, lambda: randn(6)),
    (phase_retrieval, lambda: randn(32)),
    (phase_retrieval, lambda: numbers(32)),
    (beamformer, lambda: numbers(3)),
    (ground_state, lambda: randn(3, 3)),
    (interferometer, lambda: randn(4)),
    (orthogonal_cost, lambda: randn(3, 3)),
    (adaptation, lambda: 0.01 * randn(3)),
    (circular_convolution, lambda: randn(32)),
    (state_space_kernel, lambda: 0.3 * randn(17)),
    (koopman, lambda: randn(4, 4)),
    (transfer, lambda: randn(5)),
    (complex_network, lambda: randn(20)),
    (schroedinger_kernel, lambda: randn(16)),
]


@pytest.mark.parametrize(("program", "start"), PROGRAMS, ids=[program.__name__ for program, _ in PROGRAMS])
def test_programs(program: Callable[[Tensor], Tensor], start: Callable[[], Tensor]) -> None:
    check_against_oracle(program, start(), tolerance=1e-9)


def test_a_complex_wave_by_its_laplacian() -> None:
    """A plane wave of a network's amplitude: i psi_t + psi_xx of exp(i (k x - k^2 t)) is zero."""

    def wave(x: Tensor) -> Tensor:
        return torch.exp(1j * (2 * x[..., 0] - 4 * x[..., 1]))

    points = randn(5, 2)
    space = torch.tensor([[1.0, 0.0]], dtype=F64).expand(5, 2)
    second = jp.laplacian(wave, points, directions=space[None])
    first = jp.jvp(wave, (points,), (torch.tensor([0.0, 1.0], dtype=F64).expand(5, 2),))[1]
    assert_close(1j * first + second, torch.zeros(5, dtype=C128))
    assert_close(jp.laplacian(wave, points, batch_ndim=1), -20 * wave(points))


def test_a_physics_informed_network_of_a_complex_wave() -> None:
    """The residual's gradient by its weights, by backprop through the laplacian, against nested autograd."""
    net, points = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double(), randn(4, 2)

    def wave(x: Tensor) -> Tensor:
        return torch.view_as_complex(net(x)) * torch.exp(1j * x[..., 0])

    residual = (jp.laplacian(wave, points, batch_ndim=1) + 2j * wave(points)).abs().square().mean()
    found = torch.autograd.grad(residual, list(net.parameters()))

    def second(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(part(x).sum(), x, create_graph=True)
        return sum(torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2))

    x = points.clone().requires_grad_()
    by_parts = torch.complex(second(lambda x: wave(x).real, x), second(lambda x: wave(x).imag, x))
    wanted = torch.autograd.grad((by_parts + 2j * wave(x)).abs().square().mean(), list(net.parameters()))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)


def test_gauss_newton_of_a_program_with_complex_numbers_in_between() -> None:
    """V J^T H J V^T with J of the network's real output, which is made of complex numbers."""
    model, x, y = SpectralLayer().double(), randn(2, 2, 6, 6), randn(2, 3, 6, 6)
    leaves = list(model.parameters())
    directions = [randn(3, *p.shape) for p in leaves]
    with jp.perturb(leaves, directions, curvature="ggn") as jets:
        loss = torch.nn.functional.mse_loss(model(x), y)
    with jp.perturb(leaves, directions, pairs="none") as tangents:
        out = model(x)
    rows = tangents.of(out).tangent.flatten(1)
    assert_close(jets.quadratic(loss).curvature, 2 * rows @ rows.T / out.numel())


@pytest.mark.slow
def test_compiled_passes() -> None:
    fast, x, w = jp.compile(jp.quadratic), randn(4, 6), randn(4, 4, 2)

    def loss(w: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) @ torch.view_as_complex(w)
        return (torch.fft.irfft(spectrum, 5).tanh() ** 2).sum() + spectrum.mH.imag.pow(3).sum()

    directions = randn(2, 4, 4, 2)
    assert_close(fast(loss, w, directions).curvature, jp.quadratic(loss, w, directions).curvature)


def test_a_search_with_complex_numbers_in_between() -> None:
    """The loss of a spectral layer falls; a complex parameter of an optimizer is refused."""
    torch.manual_seed(0)
    model, x = SpectralLayer(), torch.randn(2, 2, 6, 6).double()
    model.double()
    opt = jp.optim.FoMoHKD(model.parameters(), lr=0.1, k=4, solver=jp.solvers.TrustRegion())
    losses = [float(opt.step(lambda: (model(x) - 1).square().mean())) for _ in range(4)]
    assert losses[-1] < losses[0]
    with pytest.raises(
        TypeError, match=r"has dtype torch.complex128; expected real numbers here, of which the program"
    ):
        jp.optim.FoMoHKD(LinearRecurrence().parameters(), lr=1.0, k=2)
