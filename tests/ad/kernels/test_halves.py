"""Rows of a jet as float16 with scales: the bits of TF32, over the range that float32 has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetplane.ad.algebra.jet import PairSet
from jetplane.ad.kernels.convolution_kernel import rounded
from jetplane.ad.kernels.halves import SPREAD, halves

T, N, LENGTH, OUTPUTS = 4, 5, 30, 6


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scaled_back(part: Tensor, back: Tensor) -> Tensor:
    return part.double() * back.double().reshape(-1, *[1] * (part.ndim - 1))


def jet(x: Tensor, w: Tensor, second: Tensor | None) -> Tensor:
    """Rows (i, j) of a product's jet in float64."""
    x, w = x.double(), w.double()
    out = []
    for number, (i, j) in enumerate(PairSet.all(T).pairs):
        row = x[i] @ w[j].T + (x[j] @ w[i].T if j else 0)
        out.append(row + (second[number - T].double() @ w[0].T if second is not None and i else 0))
    return torch.stack(out)


def times(row: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The smaller one first: the product with the larger may be out of range."""
    return row * torch.minimum(one, other) * torch.maximum(one, other)


def jet_of_halves(x: Tensor, w: Tensor, second: Tensor | None) -> Tensor:
    """The same as the kernel makes it: sums of float16's products in float32, scaled afterwards."""
    left, right, pairs, back = halves(x, w, second)
    assert left.dtype == right.dtype == torch.float16
    assert back.dtype == torch.float32
    left, right = left.float(), right.float()
    out = []
    for number, (i, j) in enumerate(PairSet.all(T).pairs):
        row = left[i] @ right[j].T + (left[j] @ right[i].T if j else 0)
        row = times(row, back[i], back[T + j])
        if pairs is not None and i:
            scales = back[2 * T + number - T], back[T]
            row = times(row, *(1 / scale for scale in scales)) + pairs[number - T].float() @ right[0].T
            row = times(row, *scales)
        out.append(row)
    return torch.stack(out)


def bound(x: Tensor, w: Tensor, second: Tensor | None) -> Tensor:
    """What rounding both factors to 11 bits may do to each entry, and sums in float32 add."""
    return 2.1 * 2.0**-11 * jet(x.abs(), w.abs(), None if second is None else second.abs())


exponents = st.lists(st.integers(-60, 60), min_size=T, max_size=T)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**20), exponents, st.integers(-40, 40), st.booleans())
def test_directions_of_any_length_lose_no_more_than_tf32_does(
    seed: int, lengths: list[int], ratio: int, more: bool
) -> None:
    lengths[0] = min(max(lengths[0], -20), 20)
    length = torch.tensor([2.0**n for n in lengths]).reshape(T, 1, 1)
    x, w = rows(seed, T, N, LENGTH) * length, rows(seed + 1, T, OUTPUTS, LENGTH) * length * 2.0**ratio / 4
    i, j = torch.triu_indices(T - 1, T - 1) + 1
    second = rows(seed + 2, len(i), N, LENGTH) * length[i] * length[j] / length[0] if more else None
    truth = jet(x, w, second)
    found = jet_of_halves(x, w, second)
    terms = bound(x, w, second) * 2**10  # the sum of their sizes; float32 itself must be able to hold it
    held = (terms < 1e38) & (truth.abs() > 1e-36)
    assert ((found - truth).abs() <= bound(x, w, second))[held].all()


@pytest.mark.parametrize("apart", [0, 10, 20, SPREAD - 3])
def test_ratios_that_differ_between_directions(apart: int) -> None:
    x, w = rows(0, T, N, LENGTH), rows(1, T, OUTPUTS, LENGTH)
    x[1] *= 2.0**apart  # a direction that moves what comes before the layer much more than the layer
    error = (jet_of_halves(x, w, None) - jet(x, w, None)).abs()
    assert (error <= bound(x, w, None)).all()


def test_ratios_too_far_apart_are_no_numbers_instead_of_zeros() -> None:
    x, w = rows(0, T, N, LENGTH), rows(1, T, OUTPUTS, LENGTH)
    x[1] *= 2.0 ** (SPREAD + 6)
    assert jet_of_halves(x, w, None).isnan().all()


@pytest.mark.parametrize("factor", ["x", "w"])
@pytest.mark.parametrize("row", [0, 1, slice(1, None), slice(None)])
def test_rows_of_zeros_do_not_count(factor: str, row: int | slice) -> None:
    x, w = 1e20 * rows(0, T, N, LENGTH), 1e-20 * rows(1, T, OUTPUTS, LENGTH)
    (x if factor == "x" else w)[row] = 0
    found, truth = jet_of_halves(x, w, None), jet(x, w, None)
    assert ((found - truth).abs() <= bound(x, w, None)).all()
    assert (found != 0).any(-1).any(-1).equal((truth != 0).any(-1).any(-1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_where_it_is(value: float) -> None:
    x, w = rows(0, T, N, LENGTH), rows(1, T, OUTPUTS, LENGTH)
    x[2, 3, 7] = value
    found = jet_of_halves(x, w, None)
    assert not found[2, 3].isfinite().any()  # the tangent of that sample
    others = [n for n in range(N) if n != 3]
    truth = jet(x, w, None)[:, others]
    assert ((found[:, others] - truth).abs() <= bound(x, w, None)[:, others]).all()


def test_second_rows_that_are_nothing_beside_the_rest_do_not_spoil_it() -> None:
    x, w = rows(0, T, N, LENGTH), rows(1, T, OUTPUTS, LENGTH)
    for size in (0.0, 1e-35, 1e-20, 1e20):
        second = size * rows(2, T * (T - 1) // 2, N, LENGTH)
        assert ((jet_of_halves(x, w, second) - jet(x, w, second)).abs() <= bound(x, w, second)).all()


def test_entries_have_the_bits_of_tf32() -> None:
    x = rows(0, T, 10000) * 2.0 ** -torch.arange(28.0).repeat(T, 358)[:, :10000]
    left, *_, back = halves(x, rows(1, T, 3), None)
    same = scaled_back(left, back[:T]) == rounded(x).double()
    assert same[x.abs() > x.abs().amax(1, keepdim=True) * 2.0**-22].all()  # the ratios take 6 of 28


def test_the_operation_is_sound() -> None:
    for second in (None, rows(2, T * (T - 1) // 2, N, LENGTH)):
        torch.library.opcheck(
            torch.ops.jetplane.halves.default,
            (rows(0, T, N, LENGTH), rows(1, T, OUTPUTS, LENGTH), second),
            test_utils=("test_schema", "test_faketensor"),
        )


# -- the kernels ----------------------------------------------------------------------------------------------------
