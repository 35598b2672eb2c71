"""The signs of the noise: those of the counter, fair, fresh everywhere, and the same in both passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from classifiers import X
from jetplane.directions.counter import Stream, rademacher
from jetplane.gradients.noise import signs
from jetplane.gradients.noise.signs import Signs


def test_signs_are_those_of_the_counter() -> None:
    rows = Signs(7, 3).rows(5, 2, 6, torch.zeros(11, 17))
    twin = rademacher(Stream(7, 3, 1 << 15, 5), 2, 6, 11 * 17, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(rows.flatten(1), twin)
    step = torch.tensor(3)
    assert torch.equal(Signs(7, step).rows(5, 2, 6, torch.zeros(11, 17)), rows)
    assert Signs(7, 3).rows(5, 0, 2, torch.zeros(3, dtype=torch.float64)).dtype == torch.float64


def test_noise_has_zero_mean_and_unit_covariance_and_is_fresh_everywhere() -> None:
    draws = torch.stack([Signs(0, step).rows(site, 0, 4, torch.zeros(40)) for step in range(150) for site in range(4)])
    flat = draws.reshape(150, 4 * 4 * 40)  # steps x (site, row, entry)
    assert flat.mean(0).abs().max() < 5 / 150**0.5
    correlation = flat.T @ flat / 150
    assert torch.equal(correlation.diagonal(), torch.ones(640))
    off = correlation - torch.eye(640)
    assert off.abs().max() < 6 / 150**0.5
    assert abs(off.square().mean() * 150 - 1) < 0.05
    # along the steps too, and between seeds
    assert abs(float((flat[1:] * flat[:-1]).mean())) < 0.02
    assert not torch.equal(Signs(0, 0).rows(0, 0, 1, torch.zeros(64)), Signs(1, 0).rows(0, 0, 1, torch.zeros(64)))


def test_bits_are_kept_for_the_second_pass_where_they_are_few() -> None:
    signs = Signs(0, 0)
    small, large = torch.zeros(3, 100), torch.zeros(300_000)
    for site, like in enumerate((small, large, small.double())):
        first = signs.rows(site, 0, 2, like)
        assert all(torch.equal(first, signs.rows(site, 0, 2, like)) for _ in range(3))
        assert torch.equal(first, Signs(0, 0).rows(site, 0, 2, like)) and first.dtype == like.dtype
    for site in range(100):
        signs.rows(site, 0, 2, torch.zeros(10_000))
    assert 0 < sum(bits.nbytes for bits in signs._drawn.values()) <= 1 << 15


def test_noise_is_keyed_by_call_and_not_by_parameter() -> None:
    layer = nn.Linear(4, 4)
    seen: list[int] = []

    class Watched(Signs):
        def rows(self, site: int, start: int, stop: int, like: Tensor) -> Tensor:
            seen.append(site)
            return super().rows(site, start, stop, like)

    def twice(x: Tensor) -> Tensor:
        return layer(layer(layer(x).tanh()).tanh()).square().sum(1)

    jp.ForwardGradient(layer.parameters(), noise=Watched)(twice, X)
    assert seen == [0, 1, 0, 1]  # two of the three calls, in two passes; behind the third is the loss


@pytest.mark.parametrize("seed, step", [(3, 5), ((1 << 63) + 11, torch.tensor(9))])
def test_what_is_drawn_at_once_is_what_each_site_draws(
    seed: int, step: int | Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, alone = Signs(seed, step), Signs(seed, step)
    sizes = {0: 1000, 3: 7, 5: 300, 6: 1 << 18, 7: 40_000, 8: 50_000, 9: 60_000}
    ahead.ahead(sizes, 2, 6, torch.device("cpu"))
    calls: list[int] = []
    drawn = signs._drawn
    monkeypatch.setattr(signs, "_drawn", lambda *args: (calls.append(len(args[2])), drawn(*args))[1])

    def same(site: int, start: int, stop: int, size: int) -> None:
        like = torch.zeros(size)
        found, before = ahead.rows(site, start, stop, like), len(calls)
        assert torch.equal(found, alone.rows(site, start, stop, like))
        del calls[before:]

    for _ in range(2):
        for site, size in sizes.items():
            same(site, 2, 6, size)
    assert calls == 2 * [3, 1, 1, 1, 1]
    same(9, 0, 2, 40)
    same(3, 1, 4, 7)
    same(3, 2, 6, 8)
