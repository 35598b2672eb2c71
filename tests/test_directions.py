"""Families of directions: the numbers, their laws, and that they are the same however they are asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import jetplane as jp
from jetplane.curvature import Curvature, ExactHessian, NoCurvature
from jetplane.directions import (
    Coordinate,
    Family,
    Fixed,
    Gaussian,
    Gradient,
    Orthonormal,
    Plane,
    Rademacher,
    Sphere,
    scalar,
)
from jetplane.directions import counter as philox_module
from jetplane.directions.counter import Stream, normal, philox, rademacher

F32, F64 = torch.float32, torch.float64
CPU = torch.device("cpu")
RANDOM = [Gaussian, Rademacher, Sphere, Orthonormal]


def plane(leaves: Sequence[Tensor], seed: int = 0, step: int = 0, sample: int = 0) -> Plane:
    return Plane(seed, step, sample, leaves, lambda: [2 * leaf for leaf in leaves])


def leaves(dtype: torch.dtype = F64) -> list[Tensor]:
    return [torch.randn(3, 5, dtype=dtype), torch.randn((), dtype=dtype), torch.randn(7, dtype=dtype)]


def all_rows(family: Family, made: Plane) -> Tensor:
    """(K, D)"""
    drawn = family.draw(made)
    return torch.cat([drawn.rows(i, x, 0, drawn.k).reshape(drawn.k, -1) for i, x in enumerate(made.leaves)], dim=1)


# -- the generator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
@pytest.mark.parametrize("size", [1, 5, 100])
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str, size: int) -> None:
    words = [torch.full((size,), int(word, 16)) for word in counter.split()]
    k0, k1 = (int(word, 16) for word in key.split())
    for word, value in zip(philox(words, (k0, k1)), expected.split(), strict=True):
        assert torch.equal(word, torch.full((size,), int(value, 16)))


def test_philox_broadcasts_and_leaves_its_arguments() -> None:
    columns, rows = torch.arange(6)[None], torch.arange(4)[:, None]
    fixed = torch.full((1, 1), 9)
    grid = philox([columns, rows, fixed, fixed], (3, 4))
    one = philox([torch.tensor(5), torch.tensor(2), torch.tensor(9), torch.tensor(9)], (3, 4))
    assert [int(word[2, 5]) for word in grid] == [int(word) for word in one]
    assert torch.equal(columns, torch.arange(6)[None]) and int(fixed) == 9


def _readable_normal(stream: Stream, row: int, element: int, dtype: torch.dtype) -> float:
    """One number by Python's own arithmetic: the slow twin."""
    per = 2 if dtype == F64 else 4
    block, lane = divmod(element, per)
    numbers = [block, row, stream.position + 65536 * stream.sample, stream.step]
    seed = stream.seed % 2**64
    w = [int(x) for x in philox([torch.tensor(n) for n in numbers], (seed % 2**32, seed // 2**32))]
    if dtype == F64:
        uniform = ((w[0] << 21 | w[1] >> 11) + 0.5) / 2**53
        axis, offset = w[2] >> 30, (((w[2] % 2**30) << 23 | w[3] >> 9) - 2**52 + 0.5) / 2**53
    else:
        radial, angular = w[lane // 2 * 2 : lane // 2 * 2 + 2]
        uniform = (radial + 0.5) / 2**32
        axis, offset = angular >> 30, (angular % 2**30 - 2**29 + 0.5) / 2**30
    radius = math.sqrt(-2 * math.log(uniform))
    long, short = math.cos(offset * math.pi / 2), math.sin(offset * math.pi / 2)
    long = -long if axis & 2 else long
    point = (short, long) if axis & 1 else (long, short)
    return radius * point[lane % 2]


@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 3e-6), (F64, 1e-14)])
def test_normal_numbers_equal_their_slow_twin(dtype: torch.dtype, tolerance: float) -> None:
    stream = Stream(seed=2**63 + 12345, step=7, sample=3, position=11)
    numbers = normal(stream, 2, 5, 61, dtype=dtype, device=CPU)
    expected = [[_readable_normal(stream, row, element, dtype) for element in range(61)] for row in range(2, 5)]
    torch.testing.assert_close(
        numbers.double(), torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [F32, F64])
def test_radius_at_the_ends(dtype: torch.dtype) -> None:
    """The smallest and the largest uniform numbers give finite radii; the polynomial is log to the last digits."""
    short = dtype == F32
    u = torch.cat([torch.tensor([2.0**-33 if short else 2.0**-54, 1.0, 0.5, 0.70710678]), torch.rand(1000)]).to(dtype)
    u = u.clamp_min(2.0**-54)
    expected = (-2 * u.double().log()).sqrt()
    error = (philox_module._radius(u.clone()).double() - expected).abs().max()
    assert float(error) < (2e-6 if short else 5e-15)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_normal_numbers_have_normal_moments(dtype: torch.dtype) -> None:
    x = normal(Stream(1, 0, 0, 0), 0, 4, 250_000, dtype=dtype, device=CPU).double()
    n = x.numel()
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)]:
        assert abs(float((x**power).mean()) - moment) < 4 * math.sqrt(variance / n), power
    assert abs(float((x.abs() > 3).double().mean()) / 0.0026998 - 1) < 4 / math.sqrt(0.0027 * n)
    for a, b in [(x[:, ::2], x[:, 1::2]), (x[:, :-1], x[:, 1:]), (x[:, :-2], x[:, 2:]), (x[0], x[1]), (x[2], x[3])]:
        assert abs(float((a * b).mean())) < 4 / math.sqrt(a.numel())
        assert abs(float((a.square() * b.square()).mean()) - 1) < 4 * math.sqrt(8 / a.numel())  # not even in size
    ordered = x.flatten().sort().values
    distance = (torch.special.ndtr(ordered) - (torch.arange(n) + 0.5) / n).abs().max()
    assert float(distance) < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov at 0.1 %


def test_signs_are_fair() -> None:
    x = rademacher(Stream(1, 0, 0, 0), 0, 4, 100_001, dtype=F32, device=CPU)
    assert x.shape == (4, 100_001) and set(x.unique().tolist()) == {-1.0, 1.0}
    for product in (x, x[:, 1:] * x[:, :-1], x[:, 32:] * x[:, :-32], x[:1] * x[1:2]):
        assert abs(float(product.double().mean())) < 4 / math.sqrt(product.numel())


def test_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(5, 1, 0, 2)
    for make in (normal, rademacher):
        whole = make(stream, 0, 3, 10_007, dtype=F32, device=CPU)
        monkeypatch.setattr(philox_module, "_TILE", 1000)
        assert torch.equal(make(stream, 0, 3, 10_007, dtype=F32, device=CPU), whole)
        monkeypatch.undo()


# -- random families ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", RANDOM)
@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16, torch.float16])
def test_rows_in_any_chunks_are_the_same(family: type, dtype: torch.dtype) -> None:
    made = plane(leaves(dtype), seed=3, step=4, sample=1)
    drawn = family(6).draw(made)
    assert isinstance(drawn, jp.Directions) and drawn.k == 6 == family(6).count(made.leaves)
    for position, leaf in enumerate(made.leaves):
        whole = drawn.rows(position, leaf, 0, 6)
        assert whole.shape == (6, *leaf.shape) and whole.dtype == dtype and whole.device == leaf.device
        parts = [family(6).draw(made).rows(position, leaf, a, b) for a, b in [(0, 1), (1, 4), (4, 6)]]
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(drawn.rows(position, leaf, 0, 6), whole)


@pytest.mark.parametrize("family", RANDOM)
def test_every_number_of_the_plane_matters_and_torch_is_left_alone(family: type) -> None:
    x = [torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)]
    before = torch.get_rng_state()
    planes = [plane(x), plane(x, seed=1), plane(x, seed=2**32), plane(x, step=1), plane(x, sample=1)]
    rows = [all_rows(family(2), made) for made in planes]
    blocks = [half for drawn in rows for row in drawn for half in (row[:40], row[40:])]
    for i, a in enumerate(blocks):
        for b in blocks[:i]:
            assert not torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(all_rows(family(2), plane(x, seed=-1)), all_rows(family(2), plane(x, seed=2**64 - 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_rounded_float32(dtype: torch.dtype) -> None:
    long, short = (all_rows(Gaussian(3), plane([torch.zeros(50, dtype=d)])) for d in (F32, dtype))
    assert torch.equal(long.to(dtype), short)


def test_sphere_rows_have_unit_length_over_all_parameters() -> None:
    rows = all_rows(Sphere(5), plane(leaves()))
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-14)
    normal_rows = all_rows(Gaussian(5), plane(leaves()))
    torch.testing.assert_close(rows, normal_rows / normal_rows.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("k", [1, 4, 23])
def test_orthonormal_rows_are_gram_schmidt_of_the_normal_ones(k: int) -> None:
    made = plane(leaves())
    rows, raw = all_rows(Orthonormal(k), made), all_rows(Gaussian(k), made)
    torch.testing.assert_close(rows @ rows.T, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-13)
    triangle = raw @ rows.T
    assert float(triangle.triu(1).abs().max()) < 1e-12 and bool((triangle.diagonal() > 0).all())


def test_mixed_dtypes_in_one_frame() -> None:
    made = plane([torch.zeros(4, dtype=F32), torch.zeros(6, dtype=torch.float64)])
    drawn = Orthonormal(3).draw(made)
    parts = [drawn.rows(i, x, 0, 3) for i, x in enumerate(made.leaves)]
    assert [part.dtype for part in parts] == [F32, F64]
    rows = torch.cat([part.double() for part in parts], dim=1)
    torch.testing.assert_close(rows @ rows.T, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-6)


# -- the others -----------------------------------------------------------------------------------------------------


def test_coordinates_are_the_identity() -> None:
    made = plane(leaves())
    assert Coordinate().count(made.leaves) == 23
    assert torch.equal(all_rows(Coordinate(), made), torch.eye(23, dtype=torch.float64))


def test_gradient_asks_once() -> None:
    x, calls = leaves(), []

    def gradient() -> list[Tensor]:
        calls.append(1)
        return [2 * leaf for leaf in x]

    drawn = Gradient().draw(Plane(0, 0, 0, x, gradient))
    for position, leaf in enumerate(x):
        for _ in range(2):
            assert torch.equal(drawn.rows(position, leaf, 0, 1), 2 * leaf[None])
    assert drawn.k == Gradient().count(x) == len(calls) == 1


def test_fixed_rows_are_given_back() -> None:
    made = plane(leaves())
    rows = [torch.randn(2, *leaf.shape, dtype=torch.float64) for leaf in made.leaves]
    assert Fixed(rows).count(made.leaves) == 2
    assert torch.equal(all_rows(Fixed(rows), made), torch.cat([row.reshape(2, -1) for row in rows], dim=1))


@pytest.mark.parametrize(
    "family", [*(make(2) for make in RANDOM), Coordinate(), Gradient(), Fixed([torch.ones(2, 3)])], ids=repr
)
def test_families_are_frozen_and_follow_the_protocol(family: Family) -> None:
    assert isinstance(family, Family)
    with pytest.raises(FrozenInstanceError):
        family.k = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", [*(make(3) for make in RANDOM), Coordinate(), Gradient()], ids=repr)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_the_engine_takes_them(family: Family, chunk_size: int | None) -> None:
    x = torch.randn(6, dtype=torch.float64)
    made = plane([x])
    model = jp.quadratic(lambda x: (x**3).sum(), x, family.draw(made), chunk_size=chunk_size)
    rows = all_rows(family, made)
    torch.testing.assert_close(model.slope, rows @ (3 * x**2))
    torch.testing.assert_close(model.curvature, rows @ torch.diag(6 * x) @ rows.T)


# -- curvature ------------------------------------------------------------------------------------------------------


def test_curvatures_read_the_jet() -> None:
    x, v = torch.randn(4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    expected = jp.quadratic(lambda x: x.cos().prod(), x, v)
    for curvature, second in [
        (ExactHessian(), expected.curvature),
        (NoCurvature(), torch.zeros(3, 3, dtype=torch.float64)),
    ]:
        assert isinstance(curvature, Curvature)
        pairs = curvature.pairs(3)
        model = curvature.model(jp.jet(lambda x: x.cos().prod(), x, v, pairs=pairs), pairs)
        torch.testing.assert_close(model.slope, expected.slope)
        torch.testing.assert_close(model.curvature, second)
        assert float(model.loss) == float(expected.loss)


def test_a_loss_that_does_not_depend_on_the_parameters_has_a_flat_model() -> None:
    model = ExactHessian().model(jp.Jet(torch.tensor([1.0]), None, None), ExactHessian().pairs(2))
    assert model.loss.shape == () and not model.slope.any() and model.curvature.shape == (2, 2)


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", RANDOM)
@pytest.mark.parametrize(
    ("k", "error", "message"),
    [
        (0, ValueError, "k is 0; expected at least one direction."),
        (-3, ValueError, "k is -3; expected at least one direction."),
        (2.0, TypeError, "k is float; expected a whole number of directions."),
        (True, TypeError, "k is bool; expected a whole number of directions."),
    ],
)
def test_bad_counts(family: type, k: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        family(k)


@pytest.mark.parametrize("family", RANDOM)
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (plane([torch.zeros(9)], step=-1), "step is -1; expected 0 to 2**32 - 1."),
        (plane([torch.zeros(9)], step=2**32), "step is 4294967296; expected 0 to 2**32 - 1."),
        (plane([torch.zeros(9)], sample=2**16), "sample is 65536; expected 0 to 2**16 - 1."),
        (plane([torch.zeros(1)] * 65537), "there are 65537 parameters; expected at most 2**16."),
    ],
    ids=["step-low", "step-high", "sample", "parameters"],
)
def test_planes_out_of_range(family: type, made: Plane, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        family(2).draw(made)


def test_more_orthonormal_directions_than_dimensions() -> None:
    with pytest.raises(ValueError, match=r"^k is 24; expected at most 23 orthonormal directions in 23 dimensions\.$"):
        Orthonormal(24).draw(plane(leaves()))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (torch.ones(2, 3), TypeError, "the fixed directions are Tensor; expected a list of tensors (K, *S)"),
        (3, TypeError, "the fixed directions are int; expected a list of tensors (K, *S), one per parameter."),
        ([], ValueError, "the fixed directions are an empty list; expected one tensor (K, *S) per parameter."),
        ([[1.0]], TypeError, "the fixed directions for parameter 0 are list; expected a tensor."),
        ([torch.ones(())], ValueError, "parameter 0 have shape (); expected (K, *S) with K >= 1."),
        ([torch.ones(0, 3)], ValueError, "parameter 0 have shape (0, 3); expected (K, *S) with K >= 1."),
        ([torch.ones(2, 3), torch.ones(1)], ValueError, "parameter 1 have K = 1; expected 2 as for parameter 0."),
    ],
)
def test_bad_fixed_directions(rows: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Fixed(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([torch.ones(2, 3)] * 2, "there are fixed directions for 2 parameters; expected 1."),
        ([torch.ones(2, 4)], "the fixed directions for parameter 0 have shape (2, 4); expected (2, 3)."),
        ([torch.ones(2, 3, dtype=torch.float64)], "have dtype torch.float64; expected torch.float32."),
        ([torch.ones(2, 3, device="meta")], "are on meta; expected cpu."),
    ],
)
def test_fixed_directions_that_do_not_fit(rows: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Fixed(rows).draw(plane([torch.zeros(3)]))


def test_a_loss_that_is_not_a_number() -> None:
    pairs = ExactHessian().pairs(1)
    with pytest.raises(ValueError, match=r"^the loss has shape \(1, 2\); expected a single number, or one for each"):
        ExactHessian().model(jp.Jet(torch.ones(1, 2), torch.ones(1, 1, 2), torch.ones(1, 1, 2)), pairs)


def test_roots_are_correctly_rounded() -> None:
    x = torch.cat(
        [
            torch.zeros(1, dtype=torch.float64),
            torch.rand(20000, dtype=torch.float64) * 80,
            torch.rand(1000, dtype=torch.float64) * 1e-15,
        ]
    )
    assert philox_module._root(x).tolist() == [math.sqrt(value) for value in x.tolist()]
    short = x.to(torch.float32)
    exact = torch.tensor([math.sqrt(value) for value in short.tolist()], dtype=torch.float64).to(torch.float32)
    assert torch.equal(philox_module._root(short), exact)


@pytest.mark.parametrize("angular", [0, 1 << 30, 2 << 30, 3 << 30])
def test_a_radius_of_zero_has_the_same_sign_in_python(angular: int) -> None:
    words = 0xFFFFFFFF, angular  # a uniform number that is rounded to one
    tensors = tuple(torch.tensor([word]) for word in (*words, *words))
    radius, angle = next(philox_module._pairs32(tensors))
    expected = torch.stack([radius * part for part in philox_module._on_circle(angle, torch.float32)]).flatten()
    actual = torch.tensor(scalar._singles((*words, *words), 2), dtype=torch.float32)
    assert torch.equal(expected, torch.zeros(2))
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


@given(
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    sample=st.integers(0, 2**16 - 1),
    position=st.integers(0, 2**16 - 1),
    start=st.integers(0, 100),
    rows=st.integers(0, 3),
    size=st.integers(0, 9),
    kind=st.sampled_from([(torch.float32, torch.int32), (torch.float64, torch.int64)]),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_a_few_numbers_in_python_are_the_same_bits(
    seed: int, step: int, sample: int, position: int, start: int, rows: int, size: int, kind: tuple[Any, Any]
) -> None:
    stream, (dtype, bits) = Stream(seed, step, sample, position), kind
    expected = normal(stream, start, start + rows, size, dtype=dtype, device=torch.device("cpu"))
    actual = scalar.normal(stream, start, start + rows, size, dtype)
    assert actual.shape == expected.shape
    assert torch.equal(actual.view(bits), expected.contiguous().view(bits))
