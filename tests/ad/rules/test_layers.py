"""Layers without an oracle against their formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import (
    check_against_oracle,
    randn,
)


def summed(rows: Tensor) -> Tensor:
    return rows.sum(0)


@pytest.mark.parametrize(
    ("mode", "reduce"), [("sum", summed), ("mean", lambda rows: rows.mean(0)), ("max", lambda rows: rows.max(0).values)]
)
def test_embedding_bag_against_its_formula(mode: str, reduce) -> None:
    # embedding_bag has no double backward
    tokens, offsets = torch.tensor([0, 3, 1, 1, 2]), torch.tensor([0, 2])
    check_against_oracle(
        lambda w: F.embedding_bag(tokens, w.sin(), offsets, mode=mode).exp().sum(),
        randn(5, 3),
        twin=lambda w: sum(reduce(w.sin()[bag]).exp().sum() for bag in tokens.split([2, 3])),
    )


def test_weighted_embedding_bag() -> None:
    tokens, offsets = torch.tensor([0, 3, 1, 1, 2]), torch.tensor([0, 2])
    check_against_oracle(
        lambda w, s: F.embedding_bag(tokens, w, offsets, mode="sum", per_sample_weights=s).exp().sum(),
        randn(5, 3),
        randn(5),
        twin=lambda w, s: sum(t.sum(0).exp().sum() for t in (w[tokens] * s[:, None]).split([2, 3])),
    )
