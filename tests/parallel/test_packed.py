"""Models as numbers, and what is made of the numbers of parts."""

from __future__ import annotations

import torch

from cases import F64
from jetplane.ad.algebra.curvature_table import CURVATURES
from jetplane.ad.algebra.jet import Jet, PairSet, Quadratic
from jetplane.parallel.packed import Parcel


def slopes(count: int, k: int = 3) -> torch.Tensor:
    return torch.sin(torch.arange(float(count * k), dtype=F64) ** 2).reshape(k, count)


def model(part: torch.Tensor) -> Quadratic:
    """The model of losses (B,) with these slopes (K, B)."""
    return CURVATURES["fisher"].read(Jet(part[0].exp(), part, None), PairSet.none(part.shape[0]))


def test_the_length_is_what_is_said() -> None:
    assert Parcel(10, curved=True, noise=False).length == 1 + 2 + 10 + 55
    assert Parcel(10, curved=False, noise=False).length == 1 + 2 + 10
    assert Parcel(10, curved=True, noise=True).length == 1 + 2 + 10 + 55 + 1 + 55


def test_parts_make_the_whole_with_its_noise() -> None:
    whole, form = slopes(20), Parcel(3, curved=True, noise=True)
    parts = whole.split([1, 4, 15], 1)
    records = [form.packed(model(part), part.shape[1], part.shape[1]) for part in parts]
    found = form.model(form.merged(records), model(whole))
    torch.testing.assert_close(found.loss, whole[0].exp().mean())
    torch.testing.assert_close(found.slope, whole.mean(1))
    torch.testing.assert_close(found.curvature, whole @ whole.T / 20)
    assert found.noise is not None
    torch.testing.assert_close(found.noise, torch.cov(whole) / 20)


def test_weights_that_are_not_counts() -> None:
    one, other = (
        Quadratic(*(torch.full(s, 1.0) for s in ((), (1,), (1, 1)))),
        Quadratic(*(torch.full(s, 4.0) for s in ((), (1,), (1, 1)))),
    )
    form = Parcel(1, curved=True, noise=False)
    found = form.model(form.merged([form.packed(one, 0.5), form.packed(other, 0.25)]), one)
    assert (float(found.loss), float(found.slope), float(found.curvature)) == (2.0, 2.0, 2.0)
    assert found.loss.dtype == torch.float32 and found.noise is None


def test_what_has_no_weight_need_not_be_a_number() -> None:
    form = Parcel(1, curved=True, noise=True)
    nothing = Quadratic(torch.tensor(torch.nan), torch.full((1,), torch.nan), torch.full((1, 1), torch.nan))
    assert not form.packed(nothing, 0.0).any()


def test_without_losses_of_samples_there_is_no_noise() -> None:
    form = Parcel(1, curved=False, noise=True)
    plain = Quadratic(torch.tensor(1.0), torch.ones(1), torch.zeros(1, 1))
    assert form.model(form.merged([form.packed(plain, 2.0), form.packed(plain, 1.0)]), plain).noise is None
