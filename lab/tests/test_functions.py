"""The test functions have the minima that the table says."""

from __future__ import annotations

import pytest
import torch

import jetplane as jp
from jetplane_lab import functions

_CASES = [(name, dim) for name, f in functions.FUNCTIONS.items() for dim in ((2,) if f.dimension else (2, 3, 10))]


@pytest.mark.parametrize(("name", "dim"), _CASES)
def test_minima(name: str, dim: int) -> None:
    entry = functions.find(name)
    points = entry.minima(dim)
    assert points.shape[1] == entry.dim(dim) == dim
    for point in points:
        assert float(entry.function(point)) == pytest.approx(entry.minimum(dim), rel=1e-14, abs=1e-14)
        if entry.smooth:
            torch.testing.assert_close(jp.gradient(entry.function, point), torch.zeros_like(point), rtol=0, atol=1e-11)
            assert torch.linalg.eigvalsh(jp.hessian(entry.function, point)).min() > 0


@pytest.mark.parametrize(("name", "dim"), _CASES)
def test_nothing_lies_below(name: str, dim: int) -> None:
    entry = functions.find(name)
    generator = torch.Generator().manual_seed(0)
    low, high = entry.box
    anywhere = low + (high - low) * torch.rand(2000, dim, dtype=torch.float64, generator=generator)
    noise = torch.randn(2000, dim, dtype=torch.float64, generator=generator)
    nearby = [point + scale * noise for point in entry.minima(dim) for scale in (1e-3, 1e-1)]
    values = torch.vmap(entry.function)(torch.cat([anywhere, *nearby]))
    assert float(values.min()) > entry.minimum(dim)


def test_himmelblau_has_four_minima() -> None:
    assert functions.find("himmelblau").minima(2).unique(dim=0).shape == (4, 2)


@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_starts(name: str) -> None:
    entry = functions.find(name)
    dim = entry.dim(2)
    before = torch.get_rng_state()
    starts = torch.stack([entry.start(dim, seed) for seed in range(20)])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(starts[3], entry.start(dim, 3)) and len(starts.unique(dim=0)) == 20
    assert starts.dtype == torch.float64
    if not entry.normal:
        assert starts.min() >= entry.box[0] and starts.max() <= entry.box[1]


def test_dimensions() -> None:
    assert functions.find("beale").dim(10) == 2
    assert functions.find("rosenbrock").dim(1) == 2
    assert functions.find("levy").dim(7) == 7


def test_unknown_name() -> None:
    with pytest.raises(
        ValueError, match=r"no test function 'sphere'; the known ones are rosenbrock, beale, .*, levy\."
    ):
        functions.find("sphere")
