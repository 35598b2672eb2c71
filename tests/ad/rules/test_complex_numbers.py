"""Rules of complex numbers, each against double backward, at complex and at real arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jetplane as jp
import own_operations  # noqa: F401
from cases import F64, assert_close, check_against_oracle, randn
from jetplane.ad.algebra.registry import add_for_complex

C128 = torch.complex128
EYE = torch.eye(3, dtype=C128)
WEIGHT = torch.tensor([[1.0, -2.0, 0.5], [0.25, 1.5, -1.0], [2.0, -0.5, 0.75]], dtype=F64)
linalg = torch.linalg


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=C128)


def real(x: Tensor) -> Tensor:
    """A real number in which every part of every entry counts differently, and not linearly."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return (x.sin() * torch.linspace(1, 2, x.numel(), dtype=F64).view(x.shape)).sum()


def lines(V: Tensor) -> Tensor:
    """What does not depend on the phases of vectors."""
    return real(V.mT.unsqueeze(-1) @ V.mH.unsqueeze(-2))


HOLOMORPHIC = (
    *("neg", "reciprocal", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos"),
    *("tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sinc", "sigmoid", "square"),
)


@pytest.mark.parametrize("name", HOLOMORPHIC)
def test_functions_of_one_complex_number(name: str) -> None:
    check_against_oracle(lambda z: real(getattr(torch, name)(z)), numbers(4).abs() + 1j * randn(4))


def test_the_other_half_of_the_plane() -> None:
    """acosh has the derivative 1 / (sqrt(z - 1) sqrt(z + 1)): torch's one root of the product has the other sign."""
    z = torch.tensor([-0.7 + 0.9j, -1.5 - 0.4j], dtype=C128)
    _, slope = jp.jvp(torch.acosh, (z,), (torch.ones_like(z),))
    step = 1e-6
    assert_close(slope, (torch.acosh(z + step) - torch.acosh(z - step)) / (2 * step), 1e-8)
    assert_close(slope, 1 / torch.sinh(torch.acosh(z)))


PRODUCTS: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
    ("mul", lambda a, b: a * b.conj() + 2j * a - (b + 1j)),
    ("div", lambda a, b: a / b + 1j / b + a / 2j + a.real / b),
    ("pow", lambda a, b: a**b + a**2 + a**2.5 + b ** (1 - 2j) + 2j**b + a.abs() ** b + b**a.real),
    ("mm", lambda a, b: a @ b.mH + a.conj() @ b),
    ("dots", lambda a, b: torch.stack([torch.vdot(a[0], b[1]), torch.dot(a[0].conj(), b[2]), torch.dot(a[1], b[1])])),
    ("addmm", lambda a, b: torch.addmm(a, b, a, beta=2j, alpha=1 - 1j) + torch.add(a, b, alpha=3j)),
    ("addmv", lambda a, b: torch.addmv(a[0], b, a[1], beta=1j, alpha=2j) + torch.addr(a, b[0], a[1], beta=1j)[0]),
    ("addcmul", lambda a, b: torch.addcmul(a, b, a, value=2j) + torch.addcdiv(b, b, a, value=2) + torch.lerp(a, b, b)),
    ("einsum", lambda a, b: torch.einsum("ij,kj,il->kl", a, b.conj(), a) + torch.outer(a[0], b[0].conj())),
    ("bmm", lambda a, b: torch.einsum("bi,bio->bo", a, b.expand(3, 3, 3)) + linalg.multi_dot([a, b, a])),
    ("linear", lambda a, b: torch.nn.functional.linear(a, b, a[0])),
    ("conv", lambda a, b: torch.nn.functional.conv1d(a[None], b[..., None].expand(3, 3, 2), a[0], padding=1)),
    ("cross", lambda a, b: linalg.cross(a, b) + linalg.vecdot(a, b)),
    ("logaddexp", lambda a, b: torch.logaddexp(a, b)),
    ("solve", lambda a, b: linalg.solve(a + 2 * EYE, b) + linalg.solve(a.mH, b, left=False)),
    ("solve_triangular", lambda a, b: linalg.solve_triangular(a.tril() + EYE, b, upper=False)),
    ("lu_solve", lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b, adjoint=True)),
    ("lstsq", lambda a, b: linalg.lstsq(a[:, :2], b).solution),
    ("cholesky_solve", lambda a, b: torch.cholesky_solve(b, linalg.cholesky(a @ a.mH + EYE))),
    ("where", lambda a, b: torch.where(WEIGHT > 0, a, b) + a.masked_fill(WEIGHT > 0, 2j) + torch.cat([a[1:], b[:1]])),
    ("index", lambda a, b: a[[0, 1, 1]] * a.index_put((torch.tensor([1]),), b[0]) + torch.stack([a[0], b[1], b[2]])),
    ("ldexp", lambda a, b: torch.ldexp(a, b)),
]


@pytest.mark.parametrize("product", [row[1] for row in PRODUCTS], ids=[row[0] for row in PRODUCTS])
def test_functions_of_two_complex_tensors(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    check_against_oracle(lambda a, b: real(product(a, b)), numbers(3, 3), numbers(3, 3), tolerance=1e-10)


UNARY: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("parts", lambda z: real(z.real * z.imag + z.conj().imag)),
    ("abs", lambda z: real(z.abs()) + real(z.abs() ** 2)),
    ("angle", lambda z: real(z.angle()) + real(z.conj().angle())),
    ("sgn", lambda z: real(z.sgn())),
    ("conj_physical", lambda z: real(z * torch.conj_physical(z))),
    ("isfinite", lambda z: real(torch.where(z.isfinite() & ~z.isnan(), z, 0))),
    ("to-real", lambda z: real(z.to(F64)) + real(z.real.to(C128) * z)),
    ("sum", lambda z: real(z.sum(0)) + real(z.mean()) + real(z.cumsum(0))),
    ("prod", lambda z: real(z.prod()) + real(z.prod(1)) + real(z.cumprod(0))),
    ("var", lambda z: real(z.var()) + real(z.std(0))),
    (
        "norms",
        lambda z: linalg.norm(z) ** 3 + linalg.vector_norm(z, 3) + torch.dist(z, 2 * z.mH, 1) + real(z.norm(dim=0)),
    ),
    ("matrix-norms", lambda z: linalg.norm(z, "nuc") + linalg.norm(z, 2) ** 2 + linalg.cond(z)),
    ("logsumexp", lambda z: real(z.logsumexp(1)) + real(z.logcumsumexp(0))),
    ("inverse", lambda z: real(linalg.inv(z)) + real(linalg.matrix_power(z, -2))),
    ("exponential", lambda z: real(torch.matrix_exp(z)) + real(torch.matrix_exp(z.mH))),
    ("det", lambda z: real(linalg.det(z))),
    ("slogdet", lambda z: real(linalg.slogdet(z)[0]) + real(linalg.slogdet(z)[1]) + real(torch.logdet(z))),
    ("lu", lambda z: real(linalg.lu(z)[1]) + real(linalg.lu(z)[2])),
    ("cholesky", lambda z: real(linalg.cholesky(z @ z.mH + EYE)) + real(linalg.cholesky(z @ z.mH + EYE, upper=True))),
    ("cholesky-inverse", lambda z: real(torch.cholesky_inverse(linalg.cholesky(z @ z.mH + EYE)))),
    ("qr", lambda z: real(linalg.qr(z).Q) + real(linalg.qr(z[:, :2]).R) + real(linalg.qr(z[:2]).R)),
    ("eigh", lambda z: real(linalg.eigvalsh(z + z.mH)) + lines(linalg.eigh(z + z.mH).eigenvectors)),
    ("svd", lambda z: real(linalg.svdvals(z)) + lines(linalg.svd(z).U) + lines(linalg.svd(z[:2]).Vh[:2].mH)),
    ("svd-phases", lambda z: (lambda U, _, Vh: real(U.mT.unsqueeze(-1) @ Vh.unsqueeze(-2)))(*linalg.svd(z))),
    ("eig", lambda z: real(linalg.eig(z).eigenvalues) + lines(linalg.eig(z).eigenvectors) + real(linalg.eigvals(z))),
    ("pinv", lambda z: real(linalg.pinv(z[:, :2]))),
    ("reflectors", lambda z: real(linalg.householder_product(z[:, :2], z[2, :2].tanh() / 2))),
    ("ormqr", lambda z: real(torch.ormqr(z[:, :2], z[2, :2].tanh() / 2, EYE, True, True))),
    ("fft", lambda z: real(torch.fft.fft(z)) + real(torch.fft.ifft2(z)) + real(torch.fft.hfft(z))),
    ("shifts", lambda z: real(torch.fft.ifftshift(torch.fft.fftshift(z, 0) ** 2))),
    ("c2r", lambda z: real(torch.fft.irfft(z, n=5, norm="ortho")) + real(torch.fft.irfft2(z))),
]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("function", [row[1] for row in UNARY], ids=[row[0] for row in UNARY])
def test_functions_of_a_complex_tensor(function: Callable[[Tensor], Tensor]) -> None:
    check_against_oracle(function, numbers(3, 3), tolerance=1e-10)


OF_REAL: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("scalar", lambda x: real((2j * x).exp() + x / (1 + 1j) + (1 - 1j) ** x)),
    ("complex", lambda x: real(torch.complex(x, x**2).log())),
    ("polar", lambda x: real(torch.polar(x.exp(), x))),
    ("cast", lambda x: real(x.to(C128) ** (0.5 + 1j))),
    ("constant", lambda x: real(x.to(C128) @ EYE + torch.where(WEIGHT > 0, x, 1j) ** 2)),
    ("rfft", lambda x: real(torch.fft.rfft(x)) + real(torch.fft.ihfft(x)) + real(torch.fft.rfft2(x).log())),
    ("eigvals", lambda x: real(linalg.eigvals(x)) + lines(linalg.eig(x).eigenvectors)),
    ("view", lambda x: real(torch.view_as_complex(torch.stack([x, x**2], -1)).log())),
    ("view-dtype", lambda x: real((x.reshape(-1)[:8] * 1.0).view(C128).exp())),
]


@pytest.mark.parametrize("function", [row[1] for row in OF_REAL], ids=[row[0] for row in OF_REAL])
def test_complex_numbers_of_real_ones(function: Callable[[Tensor], Tensor]) -> None:
    twin = {  # where torch's own backward fails, or takes the view for a constant
        "constant": lambda x: real(x.to(C128) @ EYE + torch.where(WEIGHT > 0, x.to(C128), 1j) ** 2),
        "view-dtype": lambda x: real(torch.view_as_complex(x.reshape(-1)[:8].view(4, 2)).exp()),
    }
    name = next(row[0] for row in OF_REAL if row[1] is function)
    check_against_oracle(function, randn(3, 3), twin=twin.get(name), tolerance=1e-10)


def test_kinks_at_zero() -> None:
    """abs, angle and sgn have no derivative there, and torch's convention is zero."""
    z = torch.tensor([0.0, 1.0 + 1j], dtype=C128)
    v = torch.ones(1, 2, dtype=C128)
    for function in (torch.abs, torch.angle, torch.sgn):
        jet = jp.jet(function, z, v)
        assert jet.tangent[0, 0] == 0 and jet.second[0, 0] == 0, function
        assert bool(jet.tangent.isfinite().all() and jet.second.isfinite().all())


def test_numbers_in_place_of_nan() -> None:
    check_against_oracle(
        lambda z: real(z.nan_to_num()), numbers(3), twin=lambda z: real(torch.complex(z.real * 1.0, z.imag * 1.0))
    )


def test_a_sum_of_very_different_exponentials() -> None:
    a, b = torch.tensor([1e4 + 1j, -1e4 + 2j], dtype=C128), numbers(2)
    check_against_oracle(
        lambda a, b: real(torch.logaddexp(a, b)), a, b, twin=lambda a, b: real(torch.stack([a[0], b[1]]))
    )


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_a_product_of_nothing_is_one(shape: tuple[int, ...]) -> None:
    jet = jp.jet(lambda x: x.prod(0), torch.ones(shape), torch.ones(1, *shape))
    assert jet.primal.tolist() == [1.0] * shape[1] and not jet.tangent.any()


def test_a_rule_that_is_known_for_real_numbers_alone_is_not_taken(clean_table: None) -> None:
    doubled = torch.ops.jptest.doubled
    jp.register.elementwise(doubled, lambda x, y: 2)
    check_against_oracle(lambda x: doubled(x).square().sum(), randn(3), twin=lambda x: 4 * x.square().sum())
    with pytest.raises(jp.MissingRule, match=r"jptest.doubled.default has no rule for complex numbers"):
        jp.quadratic(lambda x: real(doubled(x)), numbers(3), numbers(1, 3))


def test_a_composite_from_outside_holds_for_complex_numbers(clean_table: None) -> None:
    doubled = torch.ops.jptest.doubled
    jp.register.composite(doubled, lambda x: x + x)
    check_against_oracle(lambda z: real(doubled(z)), numbers(3), twin=lambda z: real(2 * z))


def test_complex_derivatives_of_real_values_are_refused(clean_table: None) -> None:
    doubled = torch.ops.jptest.doubled
    jp.register.elementwise(doubled, lambda x, y: 1j)

    def program(x: Tensor) -> Tensor:
        buffer = x * 1.0
        buffer[:2] = doubled(x[:2])
        return buffer.sum()

    with pytest.raises(jp.MissingRule, match=r"a rule gives complex derivatives of a value of torch.float64"):
        jp.gradient(program, randn(3))


def test_what_torch_has_no_kernel_for_stays_torch_s_error() -> None:
    with pytest.raises(RuntimeError, match="not implemented for 'ComplexDouble'"):
        jp.quadratic(lambda z: real(z.softmax(0)), numbers(3), numbers(1, 3))


def test_a_rule_for_complex_numbers_is_entered_once() -> None:
    with pytest.raises(
        ValueError, match=r"aten.exp already has a rule for complex numbers; expected one rule for each"
    ):
        add_for_complex(torch.ops.aten.exp)
