"""Activations against their formulas."""

from __future__ import annotations

import torch.nn.functional as F

from cases import check_against_oracle, vec


def test_hardsigmoid_against_its_formula() -> None:
    # hardsigmoid has no double backward
    twin = lambda x: (F.relu6(x + 3) / 6).square().sum()  # noqa: E731
    check_against_oracle(lambda x: F.hardsigmoid(x).square().sum(), vec(-4, -2.5, 0.3, 2.9, 3.5), twin=twin)
