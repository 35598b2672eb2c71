"""The counter-based generator: published vectors, and normal numbers and signs made of its words."""

from __future__ import annotations

import math

import pytest
import torch

from cases import F64
from jetplane.directions import counter as philox_module
from jetplane.directions.counter import Stream, normal, philox, rademacher

F32 = torch.float32
CPU = torch.device("cpu")


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
