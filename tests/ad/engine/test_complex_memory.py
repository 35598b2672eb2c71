"""Memory of complex numbers: views as real ones, conjugate and negative views, and writes through all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jetplane as jp
from cases import F64, along, assert_close, check_against_oracle, randn

C128 = torch.complex128


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=C128)


def finish(*tensors: Tensor) -> Tensor:
    """A real number in which every part of every entry counts differently, and not linearly."""
    parts = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    return sum((t.sin() * torch.linspace(1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in parts)


def put(target: Tensor, index: object, value: object) -> None:
    target[index] = value


READS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("parts", lambda z: finish(z.real, z.imag, z.conj().real, z.conj().imag, torch.view_as_real(z))),
    ("conj-of-slice", lambda z: finish(z[1:].conj() @ z[:, ::2], z.conj()[1:, 0].exp(), z.T.conj()[::2] * 2)),
    ("conj-twice", lambda z: finish(z.conj().conj() ** 2, z.mH.mH[0] ** 2, z.conj().resolve_conj() ** 2)),
    ("imag-of-slice", lambda z: finish(z[1:, ::2].imag ** 2, z.T[1].conj().imag ** 2, z.imag.T[0] ** 2)),
    ("flat", lambda z: finish(torch.view_as_real(z).reshape(-1)[3:9] ** 2, z.reshape(-1)[::2].conj() ** 2)),
    ("expanded", lambda z: finish(z[:1].expand(3, 3).conj() * z, z[0, 0].expand(2, 2).imag ** 2)),
    ("round-trip", lambda z: finish(torch.view_as_complex(torch.view_as_real(z.T)) ** 2)),
    ("back", lambda z: finish(torch.view_as_complex(torch.view_as_real(z * 1.0).flip(0).contiguous()).conj() ** 2)),
]


@pytest.mark.parametrize("program", [row[1] for row in READS], ids=[row[0] for row in READS])
def test_views(program: Callable[[Tensor], Tensor]) -> None:
    check_against_oracle(program, numbers(3, 3))
    check_against_oracle(lambda z: program(z * (1 + 0.5j)), numbers(3, 3))


def written(write: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], Tensor]:
    """A program that writes into a copy of its argument, and reads it as numbers, by their parts, and conjugate."""

    def program(w: Tensor) -> Tensor:
        z = w * (1 - 1j)
        write(z, w)
        return finish(z, z.real, z.conj().imag, (z.mH @ z).abs())

    return program


WRITES: list[tuple[str, Callable[[Tensor, Tensor], object]]] = [
    ("real-mul", lambda z, w: z.real.mul_(3.0)),
    ("imag-add", lambda z, w: z.imag[1].add_(w.real[0] ** 2)),
    ("conj-mul", lambda z, w: z.conj().mul_(w)),
    ("conj-imag-mul", lambda z, w: z.conj().imag.mul_(w.abs())),
    ("conj-slice-copy", lambda z, w: z.conj()[1].copy_(w[0] ** 2)),
    ("conj-zero", lambda z, w: z.conj()[:, 1].zero_()),
    ("view-as-real", lambda z, w: torch.view_as_real(z)[..., 1].copy_(w.abs())),
    ("real-of-column", lambda z, w: put(z[:, 2].real, slice(None), w.imag[0])),
    ("real-into-complex", lambda z, w: put(z, 1, w.real[2])),
    ("constant-into-part", lambda z, w: put(z.imag, (slice(None), 0), 2.0)),
    ("imag-of-transposed", lambda z, w: z.mH.imag.copy_(w.real)),
    ("index-put", lambda z, w: put(z, torch.tensor([0, 2]), w[:2].conj())),
    ("masked", lambda z, w: z.conj().masked_fill_(torch.eye(3, dtype=torch.bool), 1j)),
    ("copy-into-conj", lambda z, w: z.conj().copy_(torch.exp(w))),
    ("set-imag", lambda z, w: setattr(z, "imag", w.real**2)),
]


@pytest.mark.parametrize("write", [row[1] for row in WRITES], ids=[row[0] for row in WRITES])
def test_writes(write: Callable[[Tensor, Tensor], object]) -> None:
    check_against_oracle(written(write), numbers(3, 3))


def test_out_arguments() -> None:
    """Also one that shows the conjugate of its memory."""

    def program(w: Tensor) -> Tensor:
        plain, turned = torch.zeros(3, 3, dtype=C128), torch.zeros(3, 3, dtype=C128)
        torch.mul(w, w.conj(), out=plain)
        torch.exp(w, out=turned.conj())
        return finish(plain, turned)

    check_against_oracle(program, numbers(3, 3), twin=lambda w: finish(w * w.conj(), w.exp().conj()))


def test_writes_into_constants_that_were_viewed_before() -> None:
    """No operation has seen that the views are of what varies: they are asked as they are read."""

    def program(x: Tensor) -> Tensor:
        buffer = torch.zeros(3, 2, dtype=F64)
        z = torch.view_as_complex(buffer)
        seen, turned = z.conj().imag, z.conj()
        buffer[..., 1] = x[0]
        buffer[1] = x[1, :2] ** 2
        return finish(seen**2, z.abs() ** 3, turned.exp(), turned.angle())

    check_against_oracle(program, randn(2, 3), tolerance=1e-10)


def test_memory_that_is_no_whole_number_of_complex_ones() -> None:
    """Seven real numbers, of which six are three complex ones."""

    def program(x: Tensor) -> Tensor:
        buffer = torch.zeros(7, dtype=F64)
        z = torch.view_as_complex(buffer[:6].view(3, 2))
        z.copy_(x[0] + 1j * x[1])
        buffer[5:] = x[2, :2] ** 2
        z.mul_(z + x[1, 1])
        buffer[3:].mul_(x[2, 0])
        return finish(buffer, z, z.conj().imag)

    def twin(x: Tensor) -> Tensor:
        z = x[0] + 1j * x[1]
        flat = torch.cat([torch.view_as_real(z).reshape(-1)[:5], x[2, :2] ** 2])
        z = torch.view_as_complex(flat[:6].reshape(3, 2)) * (torch.view_as_complex(flat[:6].reshape(3, 2)) + x[1, 1])
        flat = torch.cat([torch.view_as_real(z).reshape(-1), flat[6:]])
        flat = torch.cat([flat[:3], flat[3:] * x[2, 0]])
        z = torch.view_as_complex(flat[:6].reshape(3, 2))
        return finish(flat, z, z.conj().imag)

    check_against_oracle(program, randn(3, 3), twin=twin)


def test_parameters_used_in_place() -> None:
    """Real memory that a module views as complex, and a complex parameter of which another view is read."""
    real, z = randn(3, 2), numbers(3)
    directions = along([real, z], 2)

    def program(real: Tensor, z: Tensor) -> Tensor:
        return finish(torch.view_as_complex(real).conj() * z, z.imag**2, real[:, 1] ** 2)

    with jp.perturb([real, z], directions) as jets:
        loss = program(real, z)
    expected = jp.quadratic(program, (real, z), tuple(directions))
    assert_close(jets.quadratic(loss).curvature, expected.curvature)
    check_against_oracle(program, real, z)


def test_directions_may_be_lazy_conjugates_and_negatives() -> None:
    z, v = numbers(3), numbers(3)
    lazy = jp.jvp(lambda z: (z**2).exp(), (z,), (v.conj(),))[1]
    assert_close(lazy, 2 * z * (z**2).exp() * v.conj().resolve_conj())
    curve = jp.hyperdual(torch.exp, z, v, v, v.conj()).eps12
    assert_close(curve, z.exp() * (v.conj() + v * v))
    x, minus = randn(3), v.conj().imag
    assert minus.is_neg()
    assert_close(jp.jvp(torch.exp, (x,), (minus,))[1], x.exp() * -v.imag)


def test_a_primal_may_be_a_conjugate_view() -> None:
    z, v = numbers(3), numbers(3)
    assert_close(jp.jvp(torch.exp, (z.conj(),), (v,))[1], z.conj().exp() * v)


def test_complex_outputs() -> None:
    z, v = numbers(3), numbers(2, 3)
    jet = jp.jet(torch.exp, z, v)
    assert_close(jet.tangent, v * z.exp())
    assert_close(jet.second, torch.stack([v[0] * v[0], v[0] * v[1], v[1] * v[1]]) * z.exp())
    parts = jp.hyperdual(lambda z: z.conj() * z, z, v[0], v[1])
    assert_close(parts.eps12, (v[0].conj() * v[1] + v[1].conj() * v[0]))
    x = randn(3)
    assert_close(jp.jvp(lambda x: x * 2j, (x,), (x,))[1], 2j * x)
    assert_close(jp.hessian(lambda x: (1j * x).exp().sum(), x), torch.diag(-(1j * x).exp()))


def test_coordinates_are_those_of_real_numbers() -> None:
    for transform in (jp.gradient, jp.hessian, jp.laplacian):
        with pytest.raises(TypeError, match=r"has dtype torch.complex128; expected real numbers here, of which"):
            transform(lambda z: z.abs().sum(), numbers(2))


def test_a_complex_loss_is_refused() -> None:
    z = numbers(2)
    with jp.perturb([z], [numbers(1, 2)]) as jets:
        loss = z.sum()
    with pytest.raises(ValueError, match=r"the loss has dtype torch.complex128; expected a real number, such as"):
        jets.quadratic(loss)
    with pytest.raises(ValueError, match=r"the program returned a loss of torch.complex128; expected a real number"):
        jp.verify(lambda z: z.sum(), z)


def test_verify_takes_complex_parameters() -> None:
    assert jp.verify(lambda z: (z.exp() * z.conj()).abs().sum() + z.imag.sin().sum(), numbers(4)).ok


def test_passes_inside_passes_and_backprop_through_rows() -> None:
    z, v, u = numbers(3), numbers(3), numbers(3)

    def program(z: Tensor) -> Tensor:
        return finish(z**2 * z.conj())

    inner = jp.jvp(lambda z: jp.jvp(program, (z,), (v,))[1], (z,), (u,))[1]
    assert_close(inner, jp.hyperdual(program, z, u, v).eps12)
    w = randn(3).requires_grad_()
    slope = jp.jvp(
        lambda x: (w * torch.exp(1j * x)).abs().square().sum() + finish(w * 1j * x), (randn(3),), (randn(3),)
    )[1]
    (by_rows,) = torch.autograd.grad(slope, w)
    assert bool(by_rows.isfinite().all()) and float(by_rows.abs().sum()) > 0


def test_chunks() -> None:
    z, v = numbers(4), numbers(5, 4)

    def program(z: Tensor) -> Tensor:
        return finish(torch.fft.fft(z) * z.conj())

    whole, parts = jp.quadratic(program, z, v), jp.quadratic(program, z, v, chunk_size=2)
    assert_close(parts.curvature, whole.curvature)
