"""How long noise is: tokens in front of a norm in proportion to their length, sites by what is known of them."""

from __future__ import annotations

import pytest
import torch

from jetplane.gradients.noise.balance import doubt, lengths, sizes, unpredicted
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


def test_what_is_not_predicted_is_as_uncertain_as_it_is_said_to_be() -> None:
    # a site of no derivative at all, whose scalars are other sites' noise of variance 3
    torch.manual_seed(0)
    tangents, samples, entries, calls = 4, 8, 50, 400
    found = []
    for _ in range(calls):
        rows = torch.randint(0, 2, (tangents, samples, entries), dtype=torch.float64) * 2 - 1
        scalars = 3**0.5 * torch.randn(tangents, samples, 1, dtype=torch.float64) / (tangents * samples)
        active = torch.full((samples, 1), float(entries))
        found.append(unpredicted((rows * scalars).sum(0), scalars, active))
    seen = torch.stack(found)
    expected = 3 * doubt(torch.tensor([float(entries)]), tangents, samples, torch.tensor(1))
    assert float(seen.std()) == pytest.approx(float(expected), rel=0.1)
    assert abs(float(seen.mean())) < 3 * float(expected) / calls**0.5


def test_a_site_that_seems_to_have_nothing_is_no_longer_than_its_doubt_allows() -> None:
    unexplained, explained = torch.tensor([1.0, -0.2, 0.0]), torch.tensor([0.0, 0.3, 0.3])
    vague, sure = (lengths(unexplained, explained, torch.full((3,), level)) for level in (0.2, 0.0))
    assert float(vague[1]) == float(vague[2]) and float(vague[1] / vague[0]) == pytest.approx((0.2 * 0.5) ** -0.25)
    assert float(sure[1] / sure[0]) == pytest.approx((1e-2 * 0.31) ** -0.25)


@pytest.mark.parametrize("small", [-1.0, 0.0, 1e-5, 1e-3, 3e-3, 1e-2, 0.1])
def test_small_differences_of_what_is_not_predicted_stay_small(small: float) -> None:
    """A number that passes zero is no measure: what differs in rounding would be far apart after some steps."""
    parts, none = torch.tensor([1.0, 0.3, small], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    change = torch.tensor([0.0, 0.0, 1e-9], dtype=torch.float64)
    moved = lengths(parts + change, none, none) / lengths(parts, none, none) - 1
    assert float(moved.abs().max()) < 50e-9
    assert float(lengths(parts, none, none).max() / lengths(parts, none, none).min()) < 10.1


def test_what_is_no_larger_than_chance_makes_no_difference() -> None:
    """Six sites of adapters whose derivative is next to nothing: the one above zero was taken for all there is."""
    seen, none = torch.tensor([-1.11e-3, -5.76e-4, -8.04e-3, -4.6e-4, 2.97e-5, -7.49e-3]), torch.zeros(6)
    assert lengths(seen, none, none).tolist() == [1.0] * 6
    large, small, chance = lengths(torch.tensor([1.0, 0.04, -0.02]), none[:3], none[:3]).tolist()  # it stands out
    assert large < small < chance
