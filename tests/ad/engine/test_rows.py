"""Rows live as long as what they belong to."""

from __future__ import annotations

import gc

from test_storage import finish
from torch import Tensor

import jetplane as jp
from cases import randn


def live_tensors() -> int:
    gc.collect()
    return sum(type(thing) is Tensor for thing in gc.get_objects())  # isinstance would wake lazy modules


def test_rows_are_freed_with_their_tensors() -> None:
    w = randn(100)
    with jp.perturb([w], [randn(2, 100)]) as jets:
        y = (w * 2).tanh()
        before = live_tensors(), len(jets._pass.mode._records)
        for _ in range(10):
            y = (w * 2).tanh()
            z = y.view(10, 10).t() @ y.view(10, 10)
            z[0] = 3.0
        del z
        after = live_tensors(), len(jets._pass.mode._records)
    assert after == before


def test_nothing_outlives_the_pass() -> None:
    w, v = randn(10), randn(2, 10)
    jp.quadratic(finish, w, v)
    before = live_tensors()
    for _ in range(3):
        jp.quadratic(finish, w, v)
    assert live_tensors() == before
