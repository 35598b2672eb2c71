"""Tokens in front of a norm get noise in proportion to their length."""

from __future__ import annotations

import pytest
import torch

from jetplane.gradients.noise.balance import lengths, sizes
from jetplane.gradients.plan.noise_plan import LayerGroup, Site


def site_of(normed: bool) -> Site:
    return Site(0, LayerGroup((0,), {}, {}), torch.Size([2, 2]), torch.device("cpu"), "", normed=normed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_noise_is_as_long_as_the_token(dtype: torch.dtype) -> None:
    found = sizes(site_of(True), torch.tensor([[3.0, 3.0], [1.0, -1.0]], dtype=dtype))
    torch.testing.assert_close(found, torch.tensor([[9 / 5], [1 / 5]], dtype=dtype).sqrt())
    assert sizes(site_of(False), torch.ones(2, 2)) is None


def test_tokens_without_a_length_get_short_noise() -> None:
    assert sizes(site_of(True), torch.tensor([[0.0, 0.0], [2.0, 2.0]])).flatten().tolist() == pytest.approx(
        [0.01, 2**0.5]
    )
    assert sizes(site_of(True), torch.zeros(2, 2)).flatten().tolist() == [1, 1]


def test_what_is_no_larger_than_chance_makes_no_difference() -> None:
    """Six sites of adapters whose derivative is next to nothing: the one above zero was taken for all there is."""
    seen = torch.tensor([-1.11e-3, -5.76e-4, -8.04e-3, -4.6e-4, 2.97e-5, -7.49e-3])
    assert lengths(seen).tolist() == [1.0] * 6
    known = torch.tensor([1.0, 0.04, -0.02])  # but what stands out of it does
    assert torch.equal(lengths(known), lengths(known.clamp_min(0))) and lengths(known)[0] < lengths(known)[1]
