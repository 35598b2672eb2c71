"""The curvatures by name, and the models that are read from a jet."""

from __future__ import annotations

import pytest
import torch

import jetplane as jp
from cases import assert_close, randn
from jetplane import curvature as curvatures
from jetplane.ad.algebra.curvature_table import CURVATURES, entry
from jetplane.ad.algebra.jet import Jet, PairSet
from jetplane.curvature import GaussNewton


def test_unknown_curvatures() -> None:
    expected = "expected one of 'exact', 'ggn', 'fisher', 'none'."
    with pytest.raises(ValueError, match=rf"^curvature is 'gnn'; {expected} Did you mean 'ggn'\?$"):
        curvatures.find("gnn")
    with pytest.raises(ValueError, match=rf"^curvature is 'zzzz'; {expected}$"):
        curvatures.find("zzzz")
    with pytest.raises(TypeError, match=r"^curvature is int; expected ExactHessian\(\), GaussNewton\(\)"):
        curvatures.find(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^curvature is GaussNewton; expected ExactHessian\(\)"):
        curvatures.find(GaussNewton)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"^curvature is 'fischer'; {expected} Did you mean 'fisher'\?$"):
        jp.perturb([torch.ones(2)], [torch.ones(1, 2)], curvature="fischer")


def test_losses_of_samples_are_read_as_their_mean_with_its_noise() -> None:
    pairs, slopes = PairSet.all(2), randn(2, 6)
    model = CURVATURES["exact"].read(Jet(randn(6), slopes, randn(pairs.rows, 6)), pairs)
    assert_close(model.slope, slopes.mean(1))
    assert_close(model.noise, torch.cov(slopes) / 6)
    fisher = entry("fisher")
    found = fisher.read(Jet(randn(6), slopes, None), fisher.pairs(2))
    assert_close(found.curvature, torch.einsum("ab,cb->ac", slopes, slopes) / 6)
    assert fisher.each and not fisher.pairs(2).rows


def test_a_loss_without_derivatives_has_a_flat_model() -> None:
    for name, one in CURVATURES.items():
        if not one.each:
            model = one.read(Jet(randn(1)[0], None, None), one.pairs(3))
            assert not model.slope.any() and not model.curvature.any() and model.curvature.shape == (3, 3), name


@pytest.mark.parametrize("name", ["exact", "ggn", "none"])
def test_losses_of_other_shapes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^the loss has shape \(2, 3\); expected a single number, or one for each"):
        entry(name).read(Jet(randn(2, 3), randn(1, 2, 3), None), entry(name).pairs(1))
